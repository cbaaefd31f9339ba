"""The format of log lines: a constant message and structured facts, for people or programs.

One line per state change, none per poll.
"""

import json
import logging
import sys
from datetime import UTC, datetime

from forewarn.config import LogFormat, LogLevel

NEEDS_QUOTES = frozenset(' "=')


def set_up_log(format_: LogFormat, level: LogLevel) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanLines() if format_ is LogFormat.HUMAN else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("forewarn").setLevel(level.upper())


class HumanLines(logging.Formatter):
    """`TIME  level  message  name=value …` on one line. A traceback follows on indented lines.

    Values contain output of platforms, hosts and guests. They are escaped, so that a value cannot
    forge a line or a fact, or control the terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        facts = [f"{name}={quote(str(value))}" for name, value in facts_of(record).items()]
        message = f"{record.levelname.lower():7}  {escape(record.getMessage())}"
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        line = "  ".join([time_of(record), message, *facts]).rstrip()
        return "\n".join([line, *(f"    {escape(each)}" for each in trace)])


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": time_of(record),
            "level": record.levelname.lower(),
            "text": record.getMessage(),
            **facts_of(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def quote(value: str) -> str:
    """The value of a fact, in double quotes unless it is one plain word."""
    if value and value.isprintable() and not NEEDS_QUOTES.intersection(value):
        return value
    return '"' + escape(value.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def escape(text: str) -> str:
    """Replace every character that is not printable by its backslash escape."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "facts", {})


def time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
