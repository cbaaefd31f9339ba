"""The agent's log: one line each on standard error, a fixed text with facts beside it.

What others said cannot end the line.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime


@contextmanager
def set_up_log() -> Iterator[None]:
    """Write our log to standard error.

    Afterwards the logging of the process is what it was before.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


class Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = (
            datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        )
        facts: dict[str, object] = getattr(record, "facts", {})
        shown = "".join(f"  {name}={_plain(str(value))}" for name, value in facts.items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{stamp}  {record.levelname.lower():7}  {_plain(record.getMessage())}{shown}{trace}"


def _plain(text: str) -> str:
    return text if text.isprintable() else repr(text)
