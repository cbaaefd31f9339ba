"""The facts of an event as commands and texts get them."""

import json
import threading
from datetime import timedelta, timezone

import pytest

from forewarn.agent.steps.base import (
    StepFailed,
    call_with_timeout,
    escape_json,
    escape_line,
    event_environment,
    event_facts,
    fill,
    pause,
)
from tests.unit.agent.steps.build import NOON, context, reboot


def test_environment_has_the_names_that_existing_scripts_read() -> None:
    """Hooks written for other agents must work unchanged."""
    facts = event_environment(context(seconds=20.9))

    assert int(facts.pop("EVENT_DEADLINE_SECONDS")) in (19, 20)
    assert facts == {
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


def test_not_before_is_in_gmt_or_empty() -> None:
    """As on the wire."""
    eastern = NOON.astimezone(timezone(timedelta(hours=-5)))

    assert (
        event_facts(context(event=reboot(not_before=eastern)))["event_notbefore"]
        == "Wed, 04 Mar 2026 12:00:00 GMT"
    )
    assert event_facts(context(event=reboot(not_before=None)))["event_notbefore"] == ""


def test_facts_are_cleaned_for_the_environment() -> None:
    """One odd character in a description must not prevent prepare."""
    facts = event_facts(context(event=reboot(description="a\0b\ud800c")))

    assert facts["event_description"] == "ab?c"


def test_only_braces_with_a_fact_are_filled() -> None:
    """JSON and GraphQL have their own braces."""
    assert (
        fill('{"q": "{viewer}", "id": "{event_id}"}', {"event_id": "E1"}, str)
        == '{"q": "{viewer}", "id": "E1"}'
    )


def test_fact_in_json_stays_inside_its_quotes() -> None:
    """A description must not change the message."""
    evil = 'x", "admin": true, "y": "\n\\'

    assert json.loads('{"why": "' + escape_json(evil) + '"}') == {"why": evil}


def test_fact_in_a_line_stays_in_its_line() -> None:
    """A description must not forge a log line or control a terminal."""
    assert escape_line("a\r\nroot logged in\x1b[2J\u2028b") == "a root logged in [2J b"


def test_long_facts_are_cut() -> None:
    """After whole characters and whole names: half a name may be another VM."""
    facts = event_facts(
        context(event=reboot(description="x" + "é" * 70_000, resources=("web-10",) * 20_000))
    )

    assert facts["event_description"] == "x" + "é" * 2047
    assert set(facts["event_resources"].split(" ")) == {"web-10"}
    assert 65_000 < len(facts["event_resources"]) <= 65_536


def test_waiting_ends_when_the_step_must_stop() -> None:
    """Immediately, and not as a timeout."""
    with pytest.raises(StepFailed, match="stopped early: x") as failure:
        pause(context(stop=True), 60, "x")

    assert "time" not in failure.value.message


def test_pause_that_reaches_the_limit_ends_the_step() -> None:
    """Another attempt would have no time, and hide the true reason."""
    with pytest.raises(StepFailed, match=r"timed out: .*the true reason"):
        pause(context(is_simulated=True), 60, "the true reason")


def test_call_with_timeout_returns_or_raises_as_the_call() -> None:
    assert call_with_timeout(context(), lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(context(), lambda: 1 // 0, 5)


def test_call_with_timeout_gives_up() -> None:
    """DNS lookups have no limit of their own.

    First its own timeout, then the step's, then a stop.
    """
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no response within 0\.1 seconds"):
        call_with_timeout(context(), never.wait, 0.1)
    with pytest.raises(TimeoutError):
        call_with_timeout(context(seconds=0), never.wait, 5)
    with pytest.raises(StepFailed, match="stopped early"):
        call_with_timeout(context(stop=True), never.wait, 5)
    never.set()
