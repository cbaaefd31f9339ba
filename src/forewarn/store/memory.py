"""A store that lives in memory: for tests, the lab and the demo.

It survives neither a crash nor a restart.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import islice, takewhile
from typing import Any

from sortedcontainers import SortedList

from forewarn.errors import StoreLost
from forewarn.store.base import Note, Record, Snapshot, Write
from forewarn.store.check import check_revision, check_watch, check_writes

NOTES_MAX = 100_000
"""How much history is kept for certain: memory is not a place for all of it."""


class MemoryStore:
    """The contract of `base.py` on a dict. No verb waits in the middle, so each one is a moment."""

    def __init__(self) -> None:
        self._revision = 0
        # Live records and tombstones. A write moves its key to the end, so the order of the dict is
        # the order of revisions.
        self._records: dict[str, Record] = {}
        self._keys: Any = (
            SortedList()
        )  # of the same records: reading one of a large fleet again must not go through all
        self._forgotten = 0
        self._notes: list[Note] = []
        self._bell = asyncio.Event()
        self._is_closed = False

    async def load(self, prefix: str = "") -> Snapshot:
        self._check_open()
        keys = takewhile(lambda key: key.startswith(prefix), self._keys.irange(prefix))
        found = (self._records[key] for key in keys)
        return Snapshot(
            self._revision, tuple(record for record in found if record.value is not None)
        )

    async def commit(self, writes: Sequence[Write], notes: Sequence[bytes] = ()) -> int:
        self._check_open()
        check_writes(writes)
        for write in writes:
            check_revision(write, self._found(write.key))
        self._revision += 1
        for write in writes:
            self._apply(write)
        last = self._notes[-1].number if self._notes else 0
        self._notes.extend(Note(number, body) for number, body in enumerate(notes, start=last + 1))
        if len(self._notes) > 2 * NOTES_MAX:
            del self._notes[:-NOTES_MAX]
        self._ring()
        return self._revision

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        while not self._is_closed:  # close() ends it
            bell = (
                self._bell
            )  # taken before the look, so that no change falls between the look and the wait
            check_watch(after, self._forgotten)
            records = self._changed(after)
            if not records:
                await bell.wait()
                continue
            after = records[-1].revision
            yield Snapshot(after, records)

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[Note, ...]:
        self._check_open()
        start = self._place(after + 1)
        return tuple(self._notes[start : start + max(limit, 0)])

    async def latest(self, before: int | None = None, limit: int = 1000) -> tuple[Note, ...]:
        self._check_open()
        end = len(self._notes) if before is None else self._place(before)
        return tuple(reversed(self._notes[max(end - max(limit, 0), 0) : end]))

    async def trim(self, before: int, limit: int = 1000) -> int:
        self._check_open()
        count = max(min(self._place(before), limit, len(self._notes) - 1), 0)
        del self._notes[:count]
        return count

    async def forget(self, revision: int, limit: int = 1000) -> int:
        self._check_open()
        dead = (
            one for one in self._records.values() if one.value is None and one.revision <= revision
        )
        found = tuple(islice(dead, max(limit, 0)))  # in the order of revisions, as the records are
        for one in found:
            del self._records[one.key]
            self._keys.remove(one.key)
            self._forgotten = one.revision
        return len(found)

    async def close(self) -> None:
        self._is_closed = True
        self._ring()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreLost("The store in memory is closed; expected an open one")

    def _place(self, number: int) -> int:
        """Where the note of this number stands, or would stand: numbers have no gaps."""
        return min(max(number - self._notes[0].number, 0), len(self._notes)) if self._notes else 0

    def _found(self, key: str) -> int:
        record = self._records.get(key)
        return record.revision if record and record.value is not None else 0

    def _apply(self, write: Write) -> None:
        if write.value is None and write.revision == 0:
            return  # deleting what is not there: already true
        if self._records.pop(write.key, None) is None:
            self._keys.add(write.key)
        self._records[write.key] = Record(write.key, write.value, self._revision)

    def _changed(self, after: int) -> tuple[Record, ...]:
        """From the newest back to the first that is old enough: the work is what changed, not what
        is held.
        """
        newest_first = []
        for record in reversed(self._records.values()):
            if record.revision <= after:
                break
            newest_first.append(record)
        return tuple(reversed(newest_first))

    def _ring(self) -> None:
        """Wakes every watch that waits now; those that come later wait for the next bell."""
        self._bell.set()
        self._bell = asyncio.Event()
