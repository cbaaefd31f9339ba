"""Trouble that may come again and again, told in the log without flooding it: the first time, and
then counted.
"""

import logging
from datetime import datetime, timedelta

from forewarn.engine.clock import Clock

log = logging.getLogger("forewarn")

AGAIN_AFTER = timedelta(seconds=30)


class ThrottledLog:
    """Warnings by their fixed text.

    The same one within half a minute is counted, and told with the next that is told.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_at: dict[str, datetime] = {}
        self._untold: dict[str, int] = {}

    def warn(self, text: str, *, error: BaseException | None = None, **facts: object) -> None:
        """`error` is logged with its traceback."""
        now, last = self._clock.now(), self._told_at.get(text)
        if last is not None and now < last + AGAIN_AFTER:
            self._untold[text] = self._untold.get(text, 0) + 1
            return
        self._told_at[text] = now
        untold = self._untold.pop(text, 0)
        log.warning(
            text,
            exc_info=error,
            extra={"facts": {**facts, **({"and_before": untold} if untold else {})}},
        )
