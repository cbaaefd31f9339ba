"""The end of the history as it grows, for streams and webhooks. Followers wait, then read.

A follower keeps only the number it has reached, so a slow one costs nothing but its own time. The
newest values are cached: many followers cause one read of the store.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from forewarn.engine.entry import first_number, last_number, position_of
from forewarn.errors import Unavailable
from forewarn.store.base import HistoryValue, Store

RECENT_MAX = 500
BATCH = 50


class WebhookStatus(Protocol):
    """What metrics show of a webhook."""

    name: str
    delivered: int
    failed: int
    refused: int
    lost: int
    is_failing: bool


class HistoryFeed:
    """Call `notify` when there may be something new.

    The cache holds all values after position `_since`, up to the newest that was read.
    """

    def __init__(self, store: Store) -> None:
        self.stops = 0
        self.followers = 0
        self.entries_trimmed = 0
        self.webhooks: tuple[WebhookStatus, ...] = ()
        self._store = store
        self._followers_by: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._reading = asyncio.Lock()
        self._since = 0
        self._recent: list[HistoryValue] = []

    @property
    def changed(self) -> asyncio.Event:
        """Set by the next `notify`. Take it before you read, so that no change is missed."""
        return self._changed

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """End all streams: each compares this count with its value at the start."""
        self.stops += 1
        self.notify()

    async def last(self) -> int:
        """A number that covers the newest entry; 0 if there is none."""
        newest = await self._store.latest(limit=1)
        return last_number(newest[0].position) if newest else 0

    async def gap_after(self, number: int, values: Sequence[HistoryValue]) -> int:
        """The first number of `values` if entries between it and `number` were trimmed; else 0."""
        if not values or number == 0:
            return 0
        oldest, first = await self._store.oldest_position(), values[0].position
        return first_number(first) if position_of(number + 1) < oldest <= first else 0

    async def after(self, number: int) -> tuple[HistoryValue, ...]:
        """The next values that may have entries after this number, oldest first."""
        position = position_of(number + 1)
        async with self._reading:
            newest = self._recent[-1].position if self._recent else self._since
            if not self._since < position <= newest + 1:
                values = await self._store.history(position - 1, BATCH)
                if len(values) == BATCH:
                    return values  # far from the end: not worth caching
                self._since, self._recent = position - 1, list(values)
            elif newest < position:
                self._recent += await self._store.history(newest, BATCH)
                if len(self._recent) > 2 * RECENT_MAX:
                    self._since = self._recent[-RECENT_MAX - 1].position
                    del self._recent[:-RECENT_MAX]
            start = bisect_left(self._recent, position, key=lambda value: value.position)
            return tuple(self._recent[start : start + BATCH])

    @contextmanager
    def following(
        self, followers_max: int, by: str = "", each_max: int | None = None
    ) -> Iterator[None]:
        """Count one more follower for `by`; Unavailable if there are too many."""
        self.check_room(followers_max, by, each_max)
        self.followers += 1
        self._followers_by[by] += 1
        try:
            yield
        finally:
            self.followers -= 1
            self._followers_by[by] -= 1
            if not self._followers_by[by]:
                del self._followers_by[by]

    def check_room(self, followers_max: int, by: str = "", each_max: int | None = None) -> None:
        if each_max is not None and self._followers_by.get(by, 0) >= each_max:
            raise Unavailable(
                f"this client already has {each_max} open streams; the limit is {each_max}",
                streams_max=each_max,
            )
        if self.followers >= followers_max:
            raise Unavailable(
                f"{self.followers} streams are open; at most {followers_max} are accepted",
                streams_max=followers_max,
            )
