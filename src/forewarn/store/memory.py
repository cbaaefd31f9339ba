"""A store in memory, for tests, the lab and the demo. It does not survive a restart."""

import asyncio
import math
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from forewarn.errors import Conflict, StoreLost
from forewarn.store.base import (
    CHANGES_MAX,
    LEASE_KEY,
    POSITION_MAX,
    HistoryValue,
    HistoryValues,
    Lease,
    Record,
    RevisionCheck,
    Snapshot,
    Write,
    check_commit,
    check_revision,
    check_watch,
)

HISTORY_VALUES_MAX = 100_000
"""At least this many of the newest history values are kept."""


class MemoryStore:
    """The contract of `base.py` on a dict. No method awaits in the middle, so each is atomic.

    All servers on it are in one process, so leases do not expire by themselves: a simulation calls
    `expire` where a dead process would have lost its lease.
    """

    def __init__(self) -> None:
        self._revision = 0
        self._records: dict[str, Record] = {}
        self._changes: deque[tuple[int, str]] = deque(maxlen=CHANGES_MAX)  # revisions and keys
        self._compacted = 0
        self._history: list[HistoryValue] = []
        self._leases: dict[str, Lease] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    async def get(self, key: str) -> Record:
        self._check_open()
        return self._records.get(key) or Record(key, None, self._revision)

    async def load(self, prefix: str = "") -> Snapshot:
        self._check_open()
        keys = sorted(key for key in self._records if key.startswith(prefix))
        return Snapshot(self._revision, tuple(self._records[key] for key in keys))

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        self._check_open()
        for each in check_commit(writes, checks, entries):
            record = self._records.get(each.key)
            check_revision(each, record.revision if record else 0)
        self._revision += 1
        for write in writes:
            self._apply(write)
        if entries is not None:
            self._history.append(HistoryValue(self._revision, entries))
            if len(self._history) > 2 * HISTORY_VALUES_MAX:
                del self._history[:-HISTORY_VALUES_MAX]
        self._notify()
        return self._revision

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        while not self._is_closed:
            changed = self._changed  # taken before reading, so that no change is missed
            check_watch(after, self._compacted)
            records = self._records_after(after)
            if not records:
                await changed.wait()
                continue
            after = records[-1].revision
            yield Snapshot(after, records)

    async def history(self, after: int = 0, limit: int = 1000) -> HistoryValues:
        self._check_open()
        start = self._index(after + 1)
        return tuple(self._history[start : start + limit])

    async def latest(self, before: int = POSITION_MAX, limit: int = 1000) -> HistoryValues:
        self._check_open()
        end = self._index(before)
        return tuple(reversed(self._history[max(end - limit, 0) : end]))

    async def first_of_newest(self, commits: int) -> int:
        return self._revision - commits + 1

    async def trim(self, before: int, limit: int = 1000) -> int:
        self._check_open()
        count = max(min(self._index(before), limit, len(self._history) - 1), 0)
        del self._history[:count]
        return count

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        key = LEASE_KEY.format(name)
        try:
            revision = await self.commit([Write(key, b"%d" % (self._revision + 1), 0)])
        except Conflict:
            return None
        self._leases[key] = lease = Lease(
            name, revision, ttl_seconds=math.inf, monotonic=lambda: 0.0, delete=self._release
        )
        return lease

    async def expire(self, name: str) -> None:
        """Take the lease from its holder, as if that process had died."""
        await self._release(self._leases[LEASE_KEY.format(name)])

    async def close(self) -> None:
        self._is_closed = True
        for lease in self._leases.values():
            lease.end()
        self._notify()

    async def _release(self, lease: Lease) -> None:
        with suppress(Conflict):  # another holder has it already
            await self.commit([Write(lease.key, None, lease.revision)])

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreLost("the memory store is closed")

    def _index(self, position: int) -> int:
        """The index of the first history value at or after this position."""
        return bisect_left(self._history, position, key=lambda value: value.position)

    def _apply(self, write: Write) -> None:
        if write.value is None and write.revision == 0:
            return  # it is absent already
        if write.value is None:
            del self._records[write.key]
        else:
            self._records[write.key] = Record(write.key, write.value, self._revision)
        if len(self._changes) == self._changes.maxlen:
            self._compacted = self._changes[0][0]
        self._changes.append((self._revision, write.key))
        if write.key in self._leases:
            self._leases.pop(write.key).end()

    def _records_after(self, after: int) -> tuple[Record, ...]:
        """The last change of each record. The work grows only with what changed."""
        newest_first: dict[str, Record] = {}
        for revision, key in reversed(self._changes):
            if revision <= after:
                break
            if key not in newest_first:
                newest_first[key] = self._records.get(key) or Record(key, None, revision)
        return tuple(reversed(newest_first.values()))

    def _notify(self) -> None:
        """Wake all waiting watches; later ones wait for the next event."""
        self._changed.set()
        self._changed = asyncio.Event()
