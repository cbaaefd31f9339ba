"""The `log` step."""

import logging

import pytest

from forewarn.agent.steps import make_step
from tests.unit.agent.steps.build import context, reboot


def test_line_is_logged_with_the_facts(caplog: pytest.LogCaptureFixture) -> None:
    """The text for people, the facts for programs."""
    with caplog.at_level(logging.DEBUG, "forewarn.agent.event"):
        make_step(
            "log", {"text": "{event_type} of {event_resources}", "level": "warning"}, "W"
        ).run(context())
    record = caplog.records[0]

    assert (record.levelname, record.getMessage()) == ("WARNING", "Reboot of web-0 web-1")
    assert vars(record)["facts"]["event_id"] == "E1"


def test_description_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """It comes from outside, with percent signs and newlines."""
    with caplog.at_level(logging.DEBUG, "forewarn.agent.event"):
        make_step("log", "why: {event_description}", "W").run(
            context(event=reboot(description="%s\nERROR all is lost"))
        )

    assert caplog.records[0].getMessage() == "why: %s ERROR all is lost"
