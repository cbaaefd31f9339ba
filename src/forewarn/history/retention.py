"""Delete history that is too old, or beyond the limit."""

from dataclasses import dataclass
from datetime import timedelta

from forewarn.engine.engine import Engine
from forewarn.engine.entry import decode_all
from forewarn.errors import Error
from forewarn.history.feed import HistoryFeed
from forewarn.store.base import HistoryValue

BATCH = 1000
CLOCK_CONFIRMED_AFTER = timedelta(hours=1)
"""How long a server runs before it trims by age: its clock may have been wrong at the start."""
INTERVAL = timedelta(seconds=60)
PAUSE = timedelta(seconds=0.2)


@dataclass
class RetentionWorker:
    """Trims the history in small batches. 0 means no limit."""

    engine: Engine
    feed: HistoryFeed
    keep: timedelta
    commits_max: int
    batch: int = BATCH

    def __post_init__(self) -> None:
        self._clock, self._store = self.engine.clock, self.engine.store
        self._started_at = self._clock.now()

    async def run(self) -> None:
        while True:
            pause = INTERVAL
            try:
                if await self.trim() == self.batch:
                    pause = PAUSE  # there is more, but let other writers in between
            except Error as problem:
                self.engine.throttled_log.warn("history not trimmed", problem=problem.message)
            await self._clock.sleep_until(self._clock.now() + pause)

    async def trim(self) -> int:
        """Trim one batch; how many history values it had."""
        count = await self._store.trim(await self._first_kept(), self.batch)
        self.feed.entries_trimmed += count
        return count

    async def _first_kept(self) -> int:
        """The position before which values are too old or too many."""
        first = 0
        if self.commits_max:
            first = await self._store.first_of_newest(self.commits_max)
        if self.keep and self._may_trim_by_age():
            batch = await self._store.history(limit=self.batch)
            first = max([first, *(value.position + 1 for value in batch if self._is_old(value))])
        return first

    def _may_trim_by_age(self) -> bool:
        """Trimmed entries are gone for good, so do not trust a clock that may be wrong."""
        is_confirmed = self._clock.now() >= self._started_at + CLOCK_CONFIRMED_AFTER
        return is_confirmed and not self._clock.jump_seconds and not self.engine.is_clock_off

    def _is_old(self, value: HistoryValue) -> bool:
        """An unreadable value is trimmed together with the values around it."""
        entries = decode_all(value)
        return bool(entries) and entries[-1].at < self._clock.now() - self.keep
