"""Log lines: a fixed text with facts beside it, for a person or for a program.

One per change of the world, none per poll.
"""

import json
import logging
import sys
from datetime import UTC, datetime

from forewarn.config import LogFormat, LogLevel

NEEDS_QUOTES = frozenset(' "=')


def set_up_log(format_: LogFormat, level: LogLevel) -> None:
    """Write our log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanLines() if format_ is LogFormat.HUMAN else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("forewarn").setLevel(level.upper())


class HumanLines(logging.Formatter):
    """`STAMP  level  message  name=value …`, one line. A traceback follows it on indented lines.

    Values hold what drivers, hosts and guests print, so no value can start another line or fact, or
    reach the terminal raw.
    """

    def format(self, record: logging.LogRecord) -> str:
        facts = "  ".join(
            f"{name}={quoted(str(value))}" for name, value in facts_of(record).items()
        )
        line = f"{stamp(record)}  {record.levelname.lower():7}  {escaped(record.getMessage())}"
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join([f"{line}  {facts}".rstrip(), *(f"    {escaped(one)}" for one in trace)])


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": stamp(record),
            "level": record.levelname.lower(),
            "text": record.getMessage(),
            **facts_of(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def quoted(value: str) -> str:
    """The value of a fact; in double quotes if it would not read as one plain word."""
    if value and value.isprintable() and not NEEDS_QUOTES.intersection(value):
        return value
    return '"' + escaped(value.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def escaped(text: str) -> str:
    """The text with a backslash escape for every character that is not printable."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "facts", {})


def stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
