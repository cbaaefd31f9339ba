"""The facts of an event as commands and texts get them."""

import json
from datetime import timedelta, timezone

from forewarn.agent.steps import fact
from tests.unit.agent.steps.build import NOON, occasion, reboot


def test_the_environment_is_the_one_that_scripts_in_the_field_read() -> None:
    """Hooks written for other agents must work unchanged."""
    said = fact.environment(occasion(seconds=20.9))

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
        fact.facts(occasion(event=reboot(not_before=eastern)))["event_notbefore"]
        == "Wed, 04 Mar 2026 12:00:00 GMT"
    )
    assert fact.facts(occasion(event=reboot(not_before=None)))["event_notbefore"] == ""


def test_a_fact_that_no_environment_can_hold_is_cleaned() -> None:
    """One odd character in a description must not keep the VM from being prepared."""
    said = fact.facts(occasion(event=reboot(description="a\0b\ud800c")))

    assert said["event_description"] == "ab?c"


def test_only_braces_with_a_fact_are_filled() -> None:
    """JSON and GraphQL have braces of their own."""
    assert (
        fact.fill('{"q": "{viewer}", "id": "{event_id}"}', {"event_id": "E1"}, str)
        == '{"q": "{viewer}", "id": "E1"}'
    )


def test_a_fact_in_json_stays_inside_its_quotes() -> None:
    """Whoever writes a description must not get to write the message."""
    evil = 'x", "admin": true, "y": "\n\\'

    assert json.loads('{"why": "' + fact.in_json(evil) + '"}') == {"why": evil}


def test_a_fact_in_a_line_stays_in_its_line() -> None:
    """A description must not forge a line of the log, nor talk to a terminal."""
    assert fact.in_line("a\r\nroot logged in\x1b[2J\u2028b") == "a root logged in [2J b"


def test_a_fact_is_cut_to_what_an_environment_can_hold() -> None:
    """Whole characters, and whole names: half a name may be another VM's."""
    said = fact.facts(
        occasion(event=reboot(description="x" + "é" * 70_000, resources=("web-10",) * 20_000))
    )

    assert said["event_description"] == "x" + "é" * 2047
    assert set(said["event_resources"].split(" ")) == {"web-10"}
    assert 65_000 < len(said["event_resources"]) <= 65_536
