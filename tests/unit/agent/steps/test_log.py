"""Lines for the log, and for those who are logged in."""

import logging
from pathlib import Path

import pytest

from forewarn.agent.step import StepFailed
from forewarn.agent.steps import make
from tests.unit.agent.steps.build import occasion, reboot, script


def test_a_line_is_logged_with_the_facts_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """The text for a person, the facts for a program."""
    with caplog.at_level(logging.DEBUG, "forewarn.agent.event"):
        make("log", {"text": "{event_type} of {event_resources}", "level": "warning"}, "W").run(
            occasion()
        )
    record = caplog.records[0]

    assert (record.levelname, record.getMessage()) == ("WARNING", "Reboot of web-0 web-1")
    assert vars(record)["facts"]["event_id"] == "E1"


def test_a_description_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """It comes from outside, percent signs and line ends included."""
    with caplog.at_level(logging.DEBUG, "forewarn.agent.event"):
        make("log", "why: {event_description}", "W").run(
            occasion(event=reboot(description="%s\nERROR all is lost"))
        )

    assert caplog.records[0].getMessage() == "why: %s ERROR all is lost"


def test_syslog_takes_a_line_even_where_nobody_listens() -> None:
    """A machine without a syslog daemon is no reason to fail."""
    make("log", {"text": "{event_id}", "to": "syslog"}, "W").run(occasion())


def test_all_who_are_logged_in_are_told(tmp_path: Path) -> None:
    """In one line, whatever the event says."""
    wall = script(tmp_path / "wall", f'printf "%s|" "$@" > {tmp_path}/said')
    spec = {"text": "{event_vm} goes: {event_description}", "wall": wall}
    make("wall", spec, "W").run(occasion(event=reboot(description="-x\x1b[2J\n")))

    assert (tmp_path / "said").read_text() == "--|web-0 goes: -x [2J |"


def test_a_machine_without_wall_is_told_so() -> None:
    """Small containers have none."""
    with pytest.raises(StepFailed, match="there is no no-such-wall on this machine"):
        make("wall", {"text": "x", "wall": "no-such-wall"}, "W").run(occasion())
