"""The service's log: text from outside cannot forge lines or facts."""

import json
import logging
import sys

import pytest

from forewarn.log import HumanLines, JsonLines

FORGED = (
    "ok\n2030-01-01T00:00:00.000Z  error    token-created  detail=evil (admin)  by=token boss\n"
    "\033[2J"
)
"""Output that looks like a log line and clears the screen."""


def line(
    message: str = "impact failed", formatter: logging.Formatter | None = None, **facts: object
) -> str:
    record = logging.makeLogRecord(
        {"msg": message, "levelname": "WARNING", "created": 0.0, "facts": facts}
    )
    return (formatter or HumanLines()).format(record)


def test_log_line_has_time_level_message_and_facts() -> None:
    """Readable: only values that need quotes have them."""
    assert line(vm="web-0", tries=2, detail="Reboot of web-0") == (
        "1970-01-01T00:00:00.000Z  warning  impact failed  vm=web-0  tries=2"
        '  detail="Reboot of web-0"'
    )


@pytest.mark.parametrize("formatter", [HumanLines(), JsonLines()])
def test_output_of_a_platform_cannot_forge_a_log_line(formatter: logging.Formatter) -> None:
    """Output of ssh and virsh contains text of hosts and guests."""
    for written in (line(detail=FORGED, formatter=formatter), line(FORGED, formatter)):
        assert written.isprintable()
        assert len(written.splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("web-0", "web-0"),
        ("a  by=boss", '"a  by=boss"'),
        ('say "yes"', '"say \\"yes\\""'),
        ("C:\\disk", "C:\\disk"),
        ("C:\\my disk", '"C:\\\\my disk"'),
        ("", '""'),
        ("a\tb", '"a\\tb"'),
        ("\x1b[2J", '"\\x1b[2J"'),
        ("\x9b2J", '"\\x9b2J"'),
        ("\x7f", '"\\x7f"'),
        ("user\u202etxt", '"user\\u202etxt"'),
        ("a\u2028b", '"a\\u2028b"'),
        ("\ud800", '"\\ud800"'),
        ("caf\u00e9", "caf\u00e9"),
        (None, "None"),
    ],
)
def test_ambiguous_value_is_quoted(value: object, written: str) -> None:
    """No value can add a fact to a line, or control the terminal."""
    assert line(fact=value).partition("  fact=")[2] == written


def test_traceback_cannot_forge_a_log_line() -> None:
    """Its message may contain what a client sent; indented lines do not look like entries."""
    try:
        raise RuntimeError(FORGED)
    except RuntimeError:
        record = logging.makeLogRecord(
            {"msg": "request failed", "levelname": "ERROR", "exc_info": sys.exc_info()}
        )
    first, *rest = HumanLines().format(record).split("\n")

    assert first.endswith("request failed")
    assert len(rest) >= 5
    assert all(each.startswith("    ") and each.isprintable() for each in rest)
    assert json.loads(JsonLines().format(record))["trace"].startswith("Traceback")
