"""One record must not stop the work on the others.

Every server works on every record. If an exception of one ended a loop, it would end all servers,
again after each start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forewarn.engine.log_throttle import ThrottledLog


@dataclass
class Isolation:
    """Whether the code within has met a bug, for the code after it."""

    has_failed: bool = False


@contextmanager
def isolated(throttled_log: ThrottledLog, message: str, **facts: Any) -> Iterator[Isolation]:
    """Log a bug within this, and go on after it.

    Loops meet a lasting bug again and again, so the log is limited for each record, which `facts`
    name. An expected Error has to be handled within. A cancellation is passed on.
    """
    isolation = Isolation()
    try:
        yield isolation
    except Exception as error:
        isolation.has_failed = True
        throttled_log.error(message, error=error, **facts)
