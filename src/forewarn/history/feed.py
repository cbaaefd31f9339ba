"""The end of the history, as it grows: for all who follow it here, whoever wrote it. Nobody is
told: they wait, then read.

Who follows keeps only the number of the last note it has seen, so one that is slow costs nothing
but its own time. The newest notes are kept in memory: many who follow read the store once.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from forewarn.errors import Unavailable
from forewarn.store.base import Note, Store

RECENT_MAX = 1000
BATCH = 200


class Told(Protocol):
    """One who is told of changes: a webhook, and how it is doing."""

    name: str
    delivered: int
    failed: int
    refused: int
    lost: int
    is_failing: bool


class HistoryFeed:
    """`ring` says that there may be something new.

    The counters are for whoever shows how the service is doing.
    """

    def __init__(self, store: Store) -> None:
        self.stops = 0
        self.followers = 0
        self._followers_by: Counter[str] = Counter()
        self.notes_trimmed = 0
        self.receivers: tuple[Told, ...] = ()
        self._store = store
        self._bell = asyncio.Event()
        self._reading = asyncio.Lock()
        self._recent: list[Note] = []

    @property
    def bell(self) -> asyncio.Event:
        """Rings once.

        Take it before you look, so that nothing falls between the look and the wait.
        """
        return self._bell

    def ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    def stop(self) -> None:
        """All who follow end now: they see that this count is not what it was when they began."""
        self.stops += 1
        self.ring()

    async def last(self) -> int:
        """The number of the newest note; 0 if there is none."""
        newest = await self._store.latest(limit=1)
        return newest[0].number if newest else 0

    async def after(self, number: int) -> tuple[Note, ...]:
        """The next notes after this number, from memory if they are there."""
        async with self._reading:
            if self._recent and number > self._recent[-1].number:
                # from a time when somebody followed: it would be caught up with in many looks
                self._recent = []
            if not self._recent or number + 1 < self._recent[0].number:
                if number + BATCH < await self.last():
                    return await self._store.history(number, BATCH)
                self._recent = []
            newest = self._recent[-1].number if self._recent else number
            if newest <= number:
                self._keep(await self._store.history(newest, BATCH), newest)
            start = max(number + 1 - self._recent[0].number, 0) if self._recent else 0
            return tuple(self._recent[start : start + BATCH])

    def _keep(self, notes: tuple[Note, ...], newest: int) -> None:
        """In memory numbers have no holes, so that a note is found by its number."""
        if notes and notes[0].number != newest + 1:
            self._recent = []
        self._recent.extend(notes)
        if len(self._recent) > 2 * RECENT_MAX:
            del self._recent[:-RECENT_MAX]

    @contextmanager
    def following(
        self, followers_max: int, by: str = "", each_max: int | None = None
    ) -> Iterator[None]:
        """Within this one more follows, on behalf of `by`;

        Unavailable if too many do, in all or on behalf of the same.
        """
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
                f"{self.followers} streams are open; at most {followers_max} may be",
                streams_max=followers_max,
            )
