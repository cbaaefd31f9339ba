"""The facts of an event as commands and texts get them."""

import json
import threading
from datetime import timedelta, timezone

import pytest

from forewarn.agent.steps.base import (
    StepFailed,
    StepTimedOut,
    call_with_timeout,
    escape_json,
    escape_line,
    event_environment,
    event_facts,
    fill,
    pause,
    wait_until,
)
from tests.unit.agent.steps.build import NOON, context, reboot


def test_the_environment_is_the_one_that_scripts_in_the_field_read() -> None:
    """Hooks written for other agents must work unchanged."""
    said = event_environment(context(seconds=20.9))

    assert int(said.pop("EVENT_DEADLINE_SECONDS")) in (19, 20)
    assert said == {
        "EVENT_ID": "E1",
        "EVENT_TYPE": "Reboot",
        "EVENT_STATUS": "Scheduled",
        "EVENT_SOURCE": "Platform",
        "EVENT_NOTBEFORE": "Wed, 04 Mar 2026 12:00:00 GMT",
        "EVENT_RESOURCES": "web-0 web-1",
        "EVENT_RESOURCETYPE": "VirtualMachine",
        "EVENT_DURATION": "9",
        "EVENT_DESCRIPTION": "Host is being maintained",
        "EVENT_PHASE": "prepare",
        "EVENT_VM": "web-0",
    }


def test_not_before_is_told_in_gmt_and_empty_for_now() -> None:
    """That is how the endpoint itself writes it."""
    eastern = NOON.astimezone(timezone(timedelta(hours=-5)))

    assert (
        event_facts(context(event=reboot(not_before=eastern)))["event_notbefore"]
        == "Wed, 04 Mar 2026 12:00:00 GMT"
    )
    assert event_facts(context(event=reboot(not_before=None)))["event_notbefore"] == ""


def test_a_fact_that_no_environment_can_hold_is_cleaned() -> None:
    """One odd character in a description must not keep the VM from being prepared."""
    said = event_facts(context(event=reboot(description="a\0b\ud800c")))

    assert said["event_description"] == "ab?c"


def test_only_braces_with_a_fact_are_filled() -> None:
    """JSON and GraphQL have braces of their own."""
    assert (
        fill('{"q": "{viewer}", "id": "{event_id}"}', {"event_id": "E1"}, str)
        == '{"q": "{viewer}", "id": "E1"}'
    )


def test_a_fact_in_json_stays_inside_its_quotes() -> None:
    """Whoever writes a description must not get to write the message."""
    evil = 'x", "admin": true, "y": "\n\\'

    assert json.loads('{"why": "' + escape_json(evil) + '"}') == {"why": evil}


def test_a_fact_in_a_line_stays_in_its_line() -> None:
    """A description must not forge a line of the log, nor talk to a terminal."""
    assert escape_line("a\r\nroot logged in\x1b[2J\u2028b") == "a root logged in [2J b"


def test_a_fact_is_cut_to_what_an_environment_can_hold() -> None:
    """Whole characters, and whole names: half a name may be another VM's."""
    said = event_facts(
        context(event=reboot(description="x" + "é" * 70_000, resources=("web-10",) * 20_000))
    )

    assert said["event_description"] == "x" + "é" * 2047
    assert set(said["event_resources"].split(" ")) == {"web-10"}
    assert 65_000 < len(said["event_resources"]) <= 65_536


def test_waiting_ends_when_it_is_done() -> None:
    """What is true already is not waited for."""
    looks = iter((False, False, True))
    wait_until(context(), lambda: next(looks), waiting_for=lambda: "x", every=0)

    assert list(looks) == []


def test_waiting_ends_at_the_limit_and_says_what_did_not_come() -> None:
    """That is what the operator wants to know."""
    with pytest.raises(StepTimedOut, match="timed out: x did not come"):
        wait_until(context(seconds=0), lambda: False, waiting_for=lambda: "x did not come")


def test_waiting_ends_when_the_agent_has_to() -> None:
    """At once, and not as a time-out."""
    with pytest.raises(StepFailed, match="stopped early: x") as failure:
        pause(context(stop=True), 60, "x")

    assert not isinstance(failure.value, StepTimedOut)


def test_a_pause_that_reaches_the_limit_ends_the_step() -> None:
    """One more try at the last moment would fail for want of time, and hide the true reason."""
    with pytest.raises(StepTimedOut, match="the true reason"):
        pause(context(is_simulated=True), 60, "the true reason")


def test_a_call_gives_back_what_it_returns_and_raises_what_it_raises() -> None:
    """As if it were called here."""
    assert call_with_timeout(context(), 5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(context(), 5, lambda: 1 // 0)


def test_a_call_that_does_not_return_is_given_up() -> None:
    """Name resolution knows no limit of its own.

    Its own time first, then the step's, then the agent's.
    """
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no response within 0\.1 seconds"):
        call_with_timeout(context(), 0.1, never.wait)
    with pytest.raises(TimeoutError):
        call_with_timeout(context(seconds=0), 5, never.wait)
    with pytest.raises(StepFailed, match="stopped early"):
        call_with_timeout(context(stop=True), 5, never.wait)
    never.set()
