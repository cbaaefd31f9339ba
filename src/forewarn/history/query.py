"""The history read with filters, and kept within its limits.

Filters are applied here: the store knows only numbers.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from forewarn.engine.clock import Clock
from forewarn.engine.entry import Entry, entry
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Conflict, Error
from forewarn.history.feed import HistoryFeed
from forewarn.store.base import Note, Store, Write

SCAN_MAX = 20_000
"""How many notes one question looks at before it answers what it has found, with a cursor to go on.
"""
BATCH = 1000
SKEW = timedelta(minutes=5)
"""Notes stand in the order of their commits; the servers' clocks may differ by so much."""

RETENTION_KEY = "retention"
DELETIONS_KEPT = timedelta(days=1)
"""A server that was away for longer reads everything again."""
CLOCK_CONFIRMED_AFTER = timedelta(hours=1)
"""How long a server runs before it trims by age: a clock that was wrong when it started may be
noticed until then.
"""
TURN = timedelta(seconds=60)
PAUSE = timedelta(seconds=0.2)


class Wanted(msgspec.Struct, frozen=True):
    """Which entries are asked for; what is empty asks for nothing in particular."""

    vm: str = ""
    scope: str = ""
    host: str = ""
    event: str = ""
    what: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def holds(self, shown: Entry) -> bool:
        return (
            (not self.vm or self.vm == shown.vm or self.vm in shown.resources)
            and self.scope in ("", shown.scope)
            and (not self.host or self.host in (shown.host, shown.host_before))
            and self.event in ("", shown.event)
            and self.what in ("", shown.what)
            and (self.since is None or self.since <= shown.at)
            and (self.until is None or shown.at < self.until)
        )

    def pick(self, notes: Iterable[Note]) -> Iterator[Entry]:
        """The entries asked for, in the order given.

        A note that does not even hold the names is not decoded.
        """
        names = [
            msgspec.json.encode(name)
            for name in (self.vm, self.scope, self.host, self.event, self.what)
            if name
        ]
        for note in notes:
            if all(name in note.body for name in names):
                shown = entry(note.number, note.body)
                if shown is not None and self.holds(shown):
                    yield shown


class Page(NamedTuple):
    """Entries, newest first; `next` is the cursor that goes on, None at the end."""

    entries: list[Entry]
    next: int | None


async def read(
    store: Store, wanted: Wanted, *, limit: int, before: int | None = None, scan_max: int = SCAN_MAX
) -> Page:
    """At most `limit` entries that are older than the cursor.

    Bounded work, whatever is asked: it may find none and go on.
    """
    found: list[Entry] = []
    for _ in range(0, scan_max, BATCH):
        notes = await store.latest(before, min(BATCH, scan_max))
        if not notes:
            return Page(found, None)
        for shown in wanted.pick(notes):
            found.append(shown)
            if len(found) == limit:
                return Page(found, shown.number if shown.number > 1 else None)
        before = notes[-1].number
        if _is_before(notes[-1], wanted.since) or before == 1:
            return Page(found, None)
        await asyncio.sleep(0)  # others have their turn
    return Page(found, before)


def _is_before(note: Note, since: datetime | None) -> bool:
    shown = entry(note.number, note.body)
    return since is not None and shown is not None and shown.at < since - SKEW


class Mark(msgspec.Struct, frozen=True):
    """The store's revision at a moment: a day later, what was deleted up to then can be forgotten."""

    at: datetime
    revision: int


class RetentionWorker:
    """Lets go of notes that are too old or too many, and of old deletions; never of a record. 0
    keeps them for ever.

    Any number of servers may do this on one store: taking away what is gone already takes nothing.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        tail: HistoryFeed,
        *,
        keep: timedelta,
        notes_max: int,
        batch: int = BATCH,
    ) -> None:
        self._store = store
        self._clock = clock
        self._tail = tail
        self._keep = keep
        self._notes_max = notes_max
        self._batch = batch
        self._started_at = clock.now()
        self._trouble = ThrottledLog(clock)

    async def run(self) -> None:
        while True:  # ends when cancelled
            pause = TURN
            try:
                trimmed = await self.trim()
                forgotten = await self.forget()
                if self._batch in (trimmed, forgotten):
                    pause = PAUSE  # there is more, but others want to write too
            except Error as problem:
                self._trouble.warn("history not trimmed", problem=problem.message)
            await self._clock.sleep_until(self._clock.now() + pause)

    async def trim(self) -> int:
        """One small batch of what is too old or too many."""
        oldest = await self._store.history(limit=1)
        count = (
            await self._store.trim(await self._first_kept(oldest[0]), self._batch) if oldest else 0
        )
        self._tail.notes_trimmed += count
        return count

    async def _first_kept(self, oldest: Note) -> int:
        first = oldest.number
        if self._notes_max:
            first = max(first, (await self._store.latest(limit=1))[0].number - self._notes_max + 1)
        if (
            self._keep
            and self._may_trim_by_age()
            and (self._is_old(oldest) or entry(oldest.number, oldest.body) is None)
        ):
            batch = await self._store.history(limit=self._batch)
            first = max([first, *(note.number + 1 for note in batch if self._is_old(note))])
        return first

    def _may_trim_by_age(self) -> bool:
        """Not on the word of a clock alone: what is trimmed is gone for good."""
        now = self._clock.now()
        return now >= self._started_at + CLOCK_CONFIRMED_AFTER and not self._clock.jump_seconds

    def _is_old(self, note: Note) -> bool:
        """One that we cannot read goes with those around it."""
        shown = entry(note.number, note.body)
        return shown is not None and shown.at < self._clock.now() - self._keep

    async def forget(self) -> int:
        """One small batch of deletions that every server has heard of by now."""
        now = self._clock.now()
        loaded = await self._store.load(RETENTION_KEY)
        found = next((one for one in loaded.records if one.key == RETENTION_KEY), None)
        mark = msgspec.json.decode(found.value, type=Mark) if found and found.value else None
        if mark is not None and mark.at <= now < mark.at + DELETIONS_KEPT:
            return 0
        if mark is not None and mark.at <= now:
            count = await self._store.forget(mark.revision, self._batch)
            if count == self._batch:
                return count
        renewed = Write(
            RETENTION_KEY,
            msgspec.json.encode(Mark(now, loaded.revision)),
            found.revision if found else 0,
        )
        with suppress(Conflict):  # another server was faster
            await self._store.commit([renewed])
        return 0
