"""Delete history that is too old, or beyond the limit."""

from dataclasses import dataclass
from datetime import timedelta

from forewarn.engine.clock import Clock
from forewarn.engine.entry import decode_all
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Error
from forewarn.history.feed import HistoryFeed
from forewarn.store.base import HistoryValue, Store

BATCH = 1000
CLOCK_CONFIRMED_AFTER = timedelta(hours=1)
"""How long a server runs before it trims by age: its clock may have been wrong at the start."""
INTERVAL = timedelta(seconds=60)
PAUSE = timedelta(seconds=0.2)


@dataclass
class RetentionWorker:
    """Trims the history in small batches. 0 means no limit."""

    store: Store
    clock: Clock
    feed: HistoryFeed
    keep: timedelta
    commits_max: int
    batch: int = BATCH

    def __post_init__(self) -> None:
        self._started_at = self.clock.now()
        self._throttled_log = ThrottledLog(self.clock)

    async def run(self) -> None:
        while True:
            pause = INTERVAL
            try:
                if await self.trim() == self.batch:
                    pause = PAUSE  # there is more, but let other writers in between
            except Error as problem:
                self._throttled_log.warn("history not trimmed", problem=problem.message)
            await self.clock.sleep_until(self.clock.now() + pause)

    async def trim(self) -> int:
        """Trim one batch; how many history values it had."""
        count = await self.store.trim(await self._first_kept(), self.batch)
        self.feed.entries_trimmed += count
        return count

    async def _first_kept(self) -> int:
        """The position before which values are too old or too many."""
        first = 0
        newest = await self.store.latest(limit=1)
        if newest and self.commits_max:
            first = newest[0].position - self.commits_max + 1
        if self.keep and self._may_trim_by_age():
            batch = await self.store.history(limit=self.batch)
            first = max([first, *(value.position + 1 for value in batch if self._is_old(value))])
        return first

    def _may_trim_by_age(self) -> bool:
        """Trimmed entries are gone for good, so do not trust a clock that may be wrong."""
        now = self.clock.now()
        return now >= self._started_at + CLOCK_CONFIRMED_AFTER and not self.clock.jump_seconds

    def _is_old(self, value: HistoryValue) -> bool:
        """An unreadable value is trimmed together with the values around it."""
        entries = decode_all(value)
        return bool(entries) and entries[-1].at < self.clock.now() - self.keep
