"""The end of the history as it grows, for streams and webhooks. Followers wait, then read.

A follower keeps only the number it has reached, so a slow one costs nothing but its own time.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forewarn.engine.entry import first_number, last_number, position_of
from forewarn.errors import Unavailable
from forewarn.store.base import HistoryValues, Store

if TYPE_CHECKING:
    from forewarn.history.webhooks import Webhook

BATCH = 50


class HistoryFeed:
    """Call `notify` when there may be something new.

    `followers` counts the open streams of each client. `changed` is set by the next `notify`: take
    it before you read, so that no change is missed.
    """

    def __init__(self, store: Store) -> None:
        self.stops = 0
        self.followers: Counter[str] = Counter()
        self.entries_trimmed = 0
        self.webhooks: tuple[Webhook, ...] = ()
        self.changed = asyncio.Event()
        self._store = store
        self._reading = asyncio.Lock()
        self._position = 0
        self._values: HistoryValues = ()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def stop(self) -> None:
        """End all streams: each compares this count with its value at the start."""
        self.stops += 1
        self.notify()

    async def last(self) -> int:
        """A number that covers the newest entry; 0 if there is none."""
        newest = await self._store.latest(limit=1)
        return last_number(newest[0].position) if newest else 0

    async def gap_after(self, number: int, values: HistoryValues) -> int:
        """The first number of `values` if entries between it and `number` were trimmed; else 0."""
        if not values or number == 0:
            return 0
        (oldest,), first = await self._store.history(limit=1), values[0].position
        return first_number(first) if position_of(number + 1) < oldest.position <= first else 0

    async def after(self, number: int) -> HistoryValues:
        """The next values that may have entries after this number, oldest first.

        Followers that wait for the same change share one read of the store.
        """
        position = position_of(number + 1) - 1
        async with self._reading:
            if position != self._position or not self._values:
                self._values = await self._store.history(position, BATCH)
                self._position = position
            return self._values

    @contextmanager
    def following(self, by: str) -> Iterator[None]:
        self.followers[by] += 1
        try:
            yield
        finally:
            self.followers -= Counter([by])  # forgets a client without streams

    def check_room(self, followers_max: int, by: str, each_max: int) -> None:
        """Unavailable if there are too many streams, in total or of this client."""
        if self.followers[by] >= each_max:
            raise Unavailable(
                f"this client already has {each_max} open streams; the limit is {each_max}",
                streams_max=each_max,
            )
        if self.followers.total() >= followers_max:
            raise Unavailable(
                f"{self.followers.total()} streams are open; at most {followers_max} are accepted",
                streams_max=followers_max,
            )
