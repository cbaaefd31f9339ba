"""Warnings that may repeat, logged without flooding the log."""

from datetime import datetime, timedelta

from forewarn.engine.clock import Clock
from forewarn.log import log

REPEAT_AFTER = timedelta(seconds=30)


class ThrottledLog:
    """Logs each message at most every half minute, with the count of those left out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at: dict[str, datetime] = {}
        self._skipped: dict[str, int] = {}

    def warn(self, text: str, *, error: BaseException | None = None, **facts: object) -> None:
        """`error` is logged with its traceback."""
        now, last = self._clock.now(), self._logged_at.get(text)
        if last is not None and now < last + REPEAT_AFTER:
            self._skipped[text] = self._skipped.get(text, 0) + 1
            return
        self._logged_at[text] = now
        if skipped := self._skipped.pop(text, 0):
            facts["suppressed"] = skipped
        log.logger.warning(text, exc_info=error, extra={"facts": facts})
