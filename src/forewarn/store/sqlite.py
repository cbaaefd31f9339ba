"""A store in one SQLite file, the default. Processes of one machine can share the file."""

import asyncio
import os
import sqlite3
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import starmap
from typing import Concatenate, NamedTuple, ParamSpec, Self, TypeVar
from uuid import uuid4

from forewarn.errors import StoreLost, StoreUnusable, Unavailable
from forewarn.store.base import (
    LEASE_KEY,
    HistoryValue,
    Lease,
    Record,
    RevisionCheck,
    Snapshot,
    Upgrade,
    Write,
    check_commit,
    check_revision,
    check_watch,
)
from forewarn.store.sqlite_file import BUSY_SECONDS, connect, open_file, translate_errors

# how late another process's commit is seen: 250 ms is promised, and a look costs some 0.2 ms
POLL_SECONDS = 0.1
TOMBSTONES_MAX = 10_000
"""How many deleted records are remembered for watches."""

P = ParamSpec("P")
T = TypeVar("T")


class SqliteStore:
    """The contract of `base.py` on a file.

    Commits and reads have a thread each, so a waiting commit does not block readers.

    Leases are timed by the machine's monotonic clock, which all its processes share: a step of the
    wall clock neither ends nor prolongs one.
    """

    def __init__(
        self,
        writer: "_DbThread",
        reader: "_DbThread",
        *,
        tombstones_max: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._tombstones_max = tombstones_max
        self._monotonic = monotonic
        self._changed = asyncio.Event()
        self._leases: set[Lease] = set()
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        path: str,
        *,
        upgrade: Upgrade | None = None,
        busy_seconds: float = BUSY_SECONDS,
        tombstones_max: int = TOMBSTONES_MAX,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Open the file, or create it. Reject one that is damaged, foreign, newer or read-only.

        A file of an older version is upgraded with `upgrade`.
        """
        path = os.path.realpath(path)
        writer = await _DbThread.open(path, lambda: open_file(path, busy_seconds, upgrade))
        try:
            reader = await _DbThread.open(path, lambda: connect(path, busy_seconds))
        except BaseException:
            await writer.close()
            raise
        return cls(writer, reader, tombstones_max=tombstones_max, monotonic=monotonic)

    async def get(self, key: str) -> Record:
        return await self._reader.run(_get, key)

    async def load(self, prefix: str = "") -> Snapshot:
        return await self._reader.run(_load, prefix)

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        check_commit(writes, checks, entries)
        revision = await self._writer.run(
            _commit, tuple(writes), tuple(checks), entries, self._tombstones_max
        )
        self._notify()
        return revision

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        while not self._reader.is_closed:
            changed = self._changed  # taken before reading, so that no change is missed
            records = await self._reader.run(_records_after, after)
            if not records:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await changed.wait()
                continue
            after = records[-1].revision
            yield Snapshot(after, records)

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[HistoryValue, ...]:
        return await self._reader.run(_history, after, limit)

    async def latest(
        self, before: int | None = None, limit: int = 1000
    ) -> tuple[HistoryValue, ...]:
        return await self._reader.run(_latest, before, limit)

    async def oldest_position(self) -> int:
        return await self._reader.run(_oldest_position)

    async def trim(self, before: int, limit: int = 1000) -> int:
        return await self._writer.run(_trim, before, limit)

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        now, key = self._monotonic(), LEASE_KEY.format(name)
        revision = await self._writer.run(_acquire, key, uuid4().hex.encode(), ttl_seconds, now)
        self._notify()
        if not revision:
            return None
        lease = Lease(
            name,
            revision,
            ttl_seconds=ttl_seconds,
            monotonic=self._monotonic,
            release=self._release,
        )
        lease.renew(now)
        self._leases.add(lease)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_forever())
        return lease

    async def renew_leases(self) -> None:
        """Renew the leases of this process, and delete the expired ones of others."""
        now = self._monotonic()
        leases = [lease for lease in self._leases if lease.is_held()]
        with suppress(Unavailable):  # the next renewal may succeed, until the lease is lost
            renewed = await self._writer.run(_renew, [_Held.of(lease) for lease in leases], now)
            for lease in leases:
                if lease.key in renewed:
                    lease.renew(now)
                else:
                    lease.end()
            self._notify()
        self._leases = {lease for lease in self._leases if lease.is_held()}

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        for lease in list(self._leases):
            with suppress(Unavailable):
                await lease.release()
        await self._reader.close()
        await self._writer.close()  # the last one to close moves the write-ahead log into the file
        self._notify()

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(min((lease.ttl_seconds for lease in self._leases), default=3) / 3)
            await self.renew_leases()

    async def _release(self, lease: Lease) -> None:
        self._leases.discard(lease)
        await self._writer.run(_release, _Held.of(lease))
        self._notify()

    def _notify(self) -> None:
        """Wake all waiting watches; later ones wait for the next event."""
        self._changed.set()
        self._changed = asyncio.Event()


class _DbThread:
    """One connection and the one thread that uses it: the event loop never waits for the disk."""

    def __init__(
        self, path: str, thread: ThreadPoolExecutor, connection: sqlite3.Connection
    ) -> None:
        self.is_closed = False
        self._path = path
        self._thread = thread
        self._connection = connection
        self._file = os.stat(path)

    @classmethod
    async def open(cls, path: str, open_connection: Callable[[], sqlite3.Connection]) -> Self:
        thread = ThreadPoolExecutor(1, thread_name_prefix="forewarn-sqlite")
        before = os.stat(path) if os.path.exists(path) else None
        try:
            with translate_errors(path):
                connection = await asyncio.get_running_loop().run_in_executor(
                    thread, open_connection
                )
        except BaseException:
            thread.shutdown(wait=False)
            raise
        opened = cls(path, thread, connection)
        try:
            # a restore may have replaced the file while we waited for its lock
            opened.check_file(before or opened._file)
        except StoreUnusable:
            await opened.close()
            raise
        return opened

    async def run(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        def run_checked() -> T:
            self.check_file(self._file)
            return work(self._connection, *args, **kwargs)

        if self.is_closed:
            raise StoreLost(f"{self._path}: the store is closed")
        with translate_errors(self._path):
            return await asyncio.get_running_loop().run_in_executor(self._thread, run_checked)

    async def close(self) -> None:
        """Work in progress finishes first: the thread takes its work in order."""
        if self.is_closed:
            return
        self.is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    def check_file(self, opened: os.stat_result) -> None:
        """SQLite keeps writing to a file that was deleted or replaced; such writes are lost."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path), opened):
                return
        raise StoreUnusable(
            f"{self._path}: the file was removed or replaced; expected the one that was opened:"
            " restart the service"
        )


class _Held(NamedTuple):
    """A lease as the functions below see it."""

    key: str
    revision: int
    ttl_seconds: float

    @classmethod
    def of(cls, lease: Lease) -> Self:
        return cls(lease.key, lease.revision, lease.ttl_seconds)


# The functions below run in a database thread. Those that write open a transaction of their own.


def _get(connection: sqlite3.Connection, key: str) -> Record:
    rows = connection.execute(
        "SELECT record.value, coalesce(record.revision, counter.revision) FROM counter"
        " LEFT JOIN record ON record.key = ? AND record.value IS NOT NULL",
        (key,),
    ).fetchall()
    ((value, revision),) = rows
    return Record(key, value, revision)


def _load(connection: sqlite3.Connection, prefix: str) -> Snapshot:
    with connection:
        connection.execute("BEGIN")
        ((revision,),) = connection.execute("SELECT revision FROM counter").fetchall()
        # UTF-8 never contains the byte FF, so this sorts directly after every key with the prefix.
        ceiling = prefix.encode() + b"\xff"
        rows = connection.execute(
            "SELECT key, value, revision FROM record"
            " WHERE key >= ? AND key < CAST(? AS TEXT) AND value IS NOT NULL ORDER BY key",
            (prefix, ceiling),
        ).fetchall()
    return Snapshot(revision, tuple(starmap(Record, rows)))


def _commit(
    connection: sqlite3.Connection,
    writes: tuple[Write, ...],
    checks: tuple[RevisionCheck, ...],
    entries: bytes | None,
    tombstones_max: int,
) -> int:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        compared: tuple[Write | RevisionCheck, ...] = (*writes, *checks)
        for each in compared:
            check_revision(each, _live_revision(connection, each.key))
        revision = _next_revision(connection)
        # deleting an absent record leaves no row
        changes = [write for write in writes if write.value is not None or write.revision]
        _put(connection, [(write.key, write.value, revision) for write in changes])
        if any(write.value is None for write in changes):
            _compact(connection, tombstones_max)
        if entries is not None:
            connection.execute("INSERT INTO history VALUES (?, ?)", (revision, entries))
    return revision


def _live_revision(connection: sqlite3.Connection, key: str) -> int:
    rows = connection.execute(
        "SELECT revision FROM record WHERE key = ? AND value IS NOT NULL", (key,)
    ).fetchall()
    return int(rows[0][0]) if rows else 0


def _next_revision(connection: sqlite3.Connection) -> int:
    connection.execute("UPDATE counter SET revision = revision + 1")
    ((revision,),) = connection.execute("SELECT revision FROM counter").fetchall()
    return int(revision)


def _put(connection: sqlite3.Connection, rows: Sequence[tuple[str, bytes | None, int]]) -> None:
    connection.executemany(
        "INSERT INTO record (key, value, revision) VALUES (?, ?, ?)"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision",
        rows,
    )


def _compact(connection: sqlite3.Connection, tombstones_max: int) -> None:
    """Drop the oldest tombstones above the limit, and remember up to which revision."""
    surplus = connection.execute(
        "SELECT key, revision FROM record WHERE value IS NULL ORDER BY revision DESC"
        " LIMIT -1 OFFSET ?",
        (tombstones_max,),
    ).fetchall()
    if surplus:
        connection.executemany("DELETE FROM record WHERE key = ?", [(key,) for key, _ in surplus])
        connection.execute("UPDATE counter SET compacted = max(compacted, ?)", (surplus[0][1],))


def _records_after(connection: sqlite3.Connection, after: int) -> tuple[Record, ...]:
    rows = connection.execute(
        "SELECT key, value, revision FROM record WHERE revision > ? ORDER BY revision", (after,)
    ).fetchall()
    # read second, so that a compaction between the two reads is noticed
    ((compacted,),) = connection.execute("SELECT compacted FROM counter").fetchall()
    check_watch(after, compacted)
    return tuple(starmap(Record, rows))


def _history(connection: sqlite3.Connection, after: int, limit: int) -> tuple[HistoryValue, ...]:
    rows = connection.execute(
        "SELECT position, value FROM history WHERE position > ? ORDER BY position LIMIT ?",
        (after, max(limit, 0)),
    )
    return tuple(starmap(HistoryValue, rows.fetchall()))


def _latest(
    connection: sqlite3.Connection, before: int | None, limit: int
) -> tuple[HistoryValue, ...]:
    rows = connection.execute(
        "SELECT position, value FROM history WHERE position < ? ORDER BY position DESC LIMIT ?",
        (sys.maxsize if before is None else before, max(limit, 0)),
    )
    return tuple(starmap(HistoryValue, rows.fetchall()))


def _oldest_position(connection: sqlite3.Connection) -> int:
    ((oldest,),) = connection.execute("SELECT min(position) FROM history").fetchall()
    return int(oldest or 0)


def _trim(connection: sqlite3.Connection, before: int, limit: int) -> int:
    return connection.execute(
        "DELETE FROM history WHERE position IN (SELECT position FROM history"
        " WHERE position < min(?, (SELECT max(position) FROM history)) ORDER BY position LIMIT ?)",
        (before, max(limit, 0)),
    ).rowcount


def _acquire(
    connection: sqlite3.Connection, key: str, token: bytes, ttl_seconds: float, now: float
) -> int:
    """The revision of the new lease; 0 if another holder has it."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        _delete_expired(connection, now)
        if _live_revision(connection, key):
            return 0
        revision = _next_revision(connection)
        _put(connection, [(key, token, revision)])
        connection.execute(
            "INSERT OR REPLACE INTO lease VALUES (?, ?, ?)", (key, ttl_seconds, now + ttl_seconds)
        )
    return revision


def _renew(connection: sqlite3.Connection, leases: Sequence[_Held], now: float) -> Collection[str]:
    """Renew what is still held, return its keys, and delete what has expired."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        held = [
            lease for lease in leases if _live_revision(connection, lease.key) == lease.revision
        ]
        connection.executemany(
            "UPDATE lease SET expires_at = ? WHERE key = ?",
            [(now + lease.ttl_seconds, lease.key) for lease in held],
        )
        _delete_expired(connection, now)
    return {lease.key for lease in held}


def _release(connection: sqlite3.Connection, lease: _Held) -> None:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if _live_revision(connection, lease.key) == lease.revision:
            _delete_leases(connection, [lease.key])


def _delete_expired(connection: sqlite3.Connection, now: float) -> None:
    """Delete the records of expired leases, as ordinary deletions that every watch sees.

    A lease that would expire far later than a ttl from now was written before the last boot.
    """
    rows = connection.execute(
        "SELECT record.key FROM record LEFT JOIN lease ON lease.key = record.key"
        " WHERE record.key >= 'lease/' AND record.key < 'lease0' AND record.value IS NOT NULL"
        " AND (lease.key IS NULL OR ? NOT BETWEEN expires_at - 2 * ttl AND expires_at)",
        (now,),
    ).fetchall()
    _delete_leases(connection, [key for (key,) in rows])


def _delete_leases(connection: sqlite3.Connection, keys: Sequence[str]) -> None:
    if keys:
        revision = _next_revision(connection)
        _put(connection, [(key, None, revision) for key in keys])
        connection.executemany("DELETE FROM lease WHERE key = ?", [(key,) for key in keys])
