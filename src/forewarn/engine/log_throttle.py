"""Warnings and bugs that may repeat, logged without flooding the log."""

import logging
from datetime import datetime, timedelta

from forewarn.engine.clock import Clock
from forewarn.log import log

REPEAT_AFTER = timedelta(seconds=30)
KEYS_MAX = 1000
"""How many records with errors are told apart. Those above it share the limit of their message."""

Key = tuple[object, ...]


class ThrottledLog:
    """Logs a message at most every half minute, with the count of those left out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at: dict[Key, datetime] = {}
        self._skipped: dict[Key, int] = {}
        self._purge_at: datetime | None = None

    def warn(self, text: str, *, error: BaseException | None = None, **facts: object) -> None:
        """At most every half minute, whatever the facts. `error` is logged with its traceback."""
        self._log(logging.WARNING, (text,), text, error, facts)

    def error(self, text: str, *, error: BaseException, **facts: object) -> None:
        """At most every half minute with the same facts. `error` is logged with its traceback."""
        key: Key = (text, *facts.values())
        if key not in self._logged_at and len(self._logged_at) >= KEYS_MAX:
            self._purge()
            key = key if len(self._logged_at) < KEYS_MAX else (text,)
        self._log(logging.ERROR, key, text, error, facts)

    def _purge(self) -> None:
        """Forget what may be logged again. Costs nothing while all of it is recent."""
        now = self._clock.now()
        if self._purge_at is not None and now < self._purge_at:
            return
        self._logged_at = {
            key: at for key, at in self._logged_at.items() if at > now - REPEAT_AFTER
        }
        self._skipped = {key: n for key, n in self._skipped.items() if key in self._logged_at}
        self._purge_at = min(self._logged_at.values(), default=now) + REPEAT_AFTER

    def _log(
        self, level: int, key: Key, text: str, error: BaseException | None, facts: dict[str, object]
    ) -> None:
        now, last = self._clock.now(), self._logged_at.get(key)
        if last is not None and now < last + REPEAT_AFTER:
            self._skipped[key] = self._skipped.get(key, 0) + 1
            return
        self._logged_at[key] = now
        if skipped := self._skipped.pop(key, 0):
            facts["suppressed"] = skipped
        log.logger.log(level, text, exc_info=error, extra={"facts": facts})
