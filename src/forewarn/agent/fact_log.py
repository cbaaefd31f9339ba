"""The agent's log: one line each on standard error, a fixed message and its facts.

log.info("event approved", event=event.key, rule=rule.name)
"""

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

STANDARD_ARGUMENTS = ("exc_info", "stack_info", "stacklevel", "extra")


class FactLogger(logging.LoggerAdapter[logging.Logger]):
    """Keyword arguments are facts."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        facts = {name: kwargs.pop(name) for name in [*kwargs] if name not in STANDARD_ARGUMENTS}
        return msg, {**kwargs, "extra": {"facts": facts}}


log = FactLogger(logging.getLogger("forewarn.agent"))


@contextmanager
def log_to_stderr() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger("forewarn")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class LineFormatter(logging.Formatter):
    """Values from outside cannot end the line."""

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, UTC)
        timestamp = created.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        facts: dict[str, object] = getattr(record, "facts", {})
        shown = "".join(f"  {name}={_printable(str(value))}" for name, value in facts.items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        message = _printable(record.getMessage())
        return f"{timestamp}  {record.levelname.lower():7}  {message}{shown}{trace}"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)
