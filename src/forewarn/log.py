"""The log of the service and the agent: a constant message and its facts, one line each.

    log.info("fleet applied", file=path.name, added=3)

One line per state change, none per poll. Standard library only: the guest uses this module too.
"""

import json
import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

STANDARD_ARGUMENTS = ("exc_info", "stack_info", "stacklevel", "extra")
NEEDS_QUOTES = frozenset(' "=')


class FactLogger(logging.LoggerAdapter[logging.Logger]):
    """Keyword arguments are facts."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        facts = {name: kwargs.pop(name) for name in [*kwargs] if name not in STANDARD_ARGUMENTS}
        return msg, {**kwargs, "extra": {"facts": facts}}


log = FactLogger(logging.getLogger("forewarn"))


@contextmanager
def log_to_stderr(
    format_: str = "human", level: str = "info", *, logger: str = "forewarn"
) -> Iterator[None]:
    """Log to standard error within this. With `logger` "", warnings of libraries too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format_ == "json" else HumanLines())
    handled, level_before = logging.getLogger(logger), log.logger.level
    handled.addHandler(handler)
    log.logger.setLevel(level.upper())
    try:
        yield
    finally:
        handled.removeHandler(handler)
        log.logger.setLevel(level_before)


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
