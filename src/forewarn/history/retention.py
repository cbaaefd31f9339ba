"""Delete history that is too old, or beyond the limit."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta

from forewarn.engine.engine import Engine
from forewarn.engine.entry import decode_last
from forewarn.engine.isolation import isolated
from forewarn.errors import Error
from forewarn.history.feed import HistoryFeed
from forewarn.store.base import HistoryValue

BATCH = 1000
PAGE_MAX = 100
"""How many values are fetched at once: each may have 256 KiB."""
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
            with isolated(self.engine.throttled_log, "bug while trimming the history"):
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
            first = max(first, await self._first_young())
        return first

    async def _first_young(self) -> int:
        """The position before which values are too old.

        Values only get younger, so the first that is young ends the search: nearly always the first
        of all. Those that are old may be large, so polls pass between them. A value that is
        unreadable, or dated by a clock that was ahead, is trimmed with the values around it.
        """
        first, now = 0, self._clock.now()
        async with aclosing(self._oldest()) as values:
            async for value in values:
                entry = decode_last(value)
                if entry is not None and now - self.keep <= entry.at <= now:
                    break
                if entry is not None and entry.at < now:
                    first = value.position + 1
                await asyncio.sleep(0)
        return first

    async def _oldest(self) -> AsyncGenerator[HistoryValue, None]:
        """The oldest values, at most a batch, in pages that grow: nearly always one suffices."""
        after, count, page = 0, 0, 1
        while count < self.batch:  # ends: each page has a value
            values = await self._store.history(after, min(page, self.batch - count))
            if not values:
                return
            for value in values:
                yield value
            after = values[-1].position
            count += len(values)
            page = min(2 * page, PAGE_MAX)

    def _may_trim_by_age(self) -> bool:
        """Trimmed entries are gone for good, so do not trust a clock that may be wrong."""
        is_confirmed = self._clock.now() >= self._started_at + CLOCK_CONFIRMED_AFTER
        return is_confirmed and not self._clock.jump_seconds and not self.engine.is_clock_off
