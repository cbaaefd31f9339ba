"""The service's log: what others say in it stays inside the value that it is."""

import json
import logging
import sys

import pytest

from forewarn.log import HumanLines, JsonLines

FORGED = "ok\n2030-01-01T00:00:00.000Z  error    token-created  detail=evil (admin)  by=token boss\n\033[2J"
"""What a driver printed, to look like a line of the log and to clear the operator's screen."""


def line(
    message: str = "impact failed", formatter: logging.Formatter | None = None, **facts: object
) -> str:
    record = logging.makeLogRecord(
        {"msg": message, "levelname": "WARNING", "created": 0.0, "facts": facts}
    )
    return (formatter or HumanLines()).format(record)


def test_a_log_line_is_a_stamp_a_level_a_message_and_its_facts() -> None:
    """For a person to read; what needs no quotes has none."""
    assert line(vm="web-0", tries=2, detail="Reboot of web-0") == (
        '1970-01-01T00:00:00.000Z  warning  impact failed  vm=web-0  tries=2  detail="Reboot of web-0"'
    )


@pytest.mark.parametrize("formatter", [HumanLines(), JsonLines()])
def test_what_a_driver_prints_cannot_forge_a_log_line(formatter: logging.Formatter) -> None:
    """Output of ssh and virsh holds text of hosts and guests; whoever reads the log believes its
    lines.
    """
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
def test_a_value_is_quoted_where_it_could_be_taken_for_more_than_a_value(
    value: object, written: str
) -> None:
    """No value can add a fact of its own to a line, or say something to the terminal."""
    assert line(fact=value).partition("  fact=")[2] == written


def test_a_traceback_cannot_forge_a_log_line_either() -> None:
    """The message of an exception may hold what somebody sent; its lines are indented, so none
    looks like an entry.
    """
    try:
        raise RuntimeError(FORGED)
    except RuntimeError:
        record = logging.makeLogRecord(
            {"msg": "request failed", "levelname": "ERROR", "exc_info": sys.exc_info()}
        )
    first, *rest = HumanLines().format(record).split("\n")

    assert first.endswith("request failed")
    assert len(rest) >= 5
    assert all(one.startswith("    ") and one.isprintable() for one in rest)
    assert json.loads(JsonLines().format(record))["trace"].startswith("Traceback")
