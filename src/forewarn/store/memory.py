"""A store in memory, for tests, the lab and the demo. It does not survive a restart."""

import asyncio
import math
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from itertools import takewhile
from typing import Any

from sortedcontainers import SortedList

from forewarn.errors import StoreLost
from forewarn.store.base import (
    LEASE_KEY,
    HistoryValue,
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
TOMBSTONES_MAX = 10_000
"""How many deleted records are remembered for watches."""


class MemoryStore:
    """The contract of `base.py` on a dict. No method awaits in the middle, so each is atomic.

    All servers on it are in one process, so leases do not expire by themselves: a simulation calls
    `expire` where a dead process would have lost its lease.
    """

    def __init__(self, *, tombstones_max: int = TOMBSTONES_MAX) -> None:
        self._revision = 0
        # Live records and tombstones. A write moves its key to the end, so the order of the dict
        # is the order of revisions.
        self._records: dict[str, Record] = {}
        self._keys: Any = SortedList()  # the same keys, so that a prefix is found without a scan
        self._tombstones: dict[str, None] = {}  # oldest first
        self._tombstones_max = tombstones_max
        self._compacted = 0
        self._history: list[HistoryValue] = []
        self._leases: dict[str, Lease] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    async def get(self, key: str) -> Record:
        self._check_open()
        record = self._records.get(key)
        is_live = record is not None and record.value is not None
        return record if record and is_live else Record(key, None, self._revision)

    async def load(self, prefix: str = "") -> Snapshot:
        self._check_open()
        keys = takewhile(lambda key: key.startswith(prefix), self._keys.irange(prefix))
        records = (self._records[key] for key in keys)
        live = tuple(record for record in records if record.value is not None)
        return Snapshot(self._revision, live)

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        self._check_open()
        check_commit(writes, checks, entries)
        compared: tuple[Write | RevisionCheck, ...] = (*writes, *checks)
        for each in compared:
            check_revision(each, self._live_revision(each.key))
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

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[HistoryValue, ...]:
        self._check_open()
        start = self._index(after + 1)
        return tuple(self._history[start : start + max(limit, 0)])

    async def latest(
        self, before: int | None = None, limit: int = 1000
    ) -> tuple[HistoryValue, ...]:
        self._check_open()
        end = len(self._history) if before is None else self._index(before)
        return tuple(reversed(self._history[max(end - max(limit, 0), 0) : end]))

    async def oldest_position(self) -> int:
        self._check_open()
        return self._history[0].position if self._history else 0

    async def trim(self, before: int, limit: int = 1000) -> int:
        self._check_open()
        count = max(min(self._index(before), limit, len(self._history) - 1), 0)
        del self._history[:count]
        return count

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        key = LEASE_KEY.format(name)
        if (await self.get(key)).value is not None:
            return None
        revision = await self.commit([Write(key, b"%d" % (self._revision + 1), 0)])
        self._leases[key] = lease = Lease(
            name, revision, ttl_seconds=math.inf, monotonic=lambda: 0.0, release=self._release
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
        if self._live_revision(lease.key) == lease.revision:
            await self.commit([Write(lease.key, None, lease.revision)])

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreLost("the memory store is closed")

    def _index(self, position: int) -> int:
        """The index of the first history value at or after this position."""
        return bisect_left(self._history, position, key=lambda value: value.position)

    def _live_revision(self, key: str) -> int:
        record = self._records.get(key)
        return record.revision if record and record.value is not None else 0

    def _apply(self, write: Write) -> None:
        if write.value is None and write.revision == 0:
            return  # it is absent already
        if self._records.pop(write.key, None) is None:
            self._keys.add(write.key)
        self._records[write.key] = Record(write.key, write.value, self._revision)
        self._tombstones.pop(write.key, None)
        if write.value is None:
            self._tombstones[write.key] = None
            self._compact()
        if write.key in self._leases:
            self._leases.pop(write.key).end()

    def _compact(self) -> None:
        while len(self._tombstones) > self._tombstones_max:
            key = next(iter(self._tombstones))
            del self._tombstones[key]
            self._keys.remove(key)
            self._compacted = self._records.pop(key).revision

    def _records_after(self, revision: int) -> tuple[Record, ...]:
        """Reads backwards from the newest, so the work grows only with what changed."""
        newest_first = []
        for record in reversed(self._records.values()):
            if record.revision <= revision:
                break
            newest_first.append(record)
        return tuple(reversed(newest_first))

    def _notify(self) -> None:
        """Wake all waiting watches; later ones wait for the next event."""
        self._changed.set()
        self._changed = asyncio.Event()
