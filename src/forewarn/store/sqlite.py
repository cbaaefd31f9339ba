"""A store in one SQLite file, the default. Processes of one machine can share the file."""

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from uuid import uuid4

from forewarn.errors import StoreLost
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
    Upgrade,
    Write,
    check_commit,
    check_revision,
    check_watch,
)
from forewarn.store.lease_keeper import LeaseKeeper
from forewarn.store.sqlite_file import BUSY_SECONDS, check_same_file, open_file, translate_errors

# how late another process's commit is seen: 250 ms is promised, and a look costs some 0.2 ms
POLL_SECONDS = 0.1

GET = (
    "SELECT record.value, coalesce(record.revision, counter.revision) FROM counter"
    " LEFT JOIN record ON record.key = ? AND record.value IS NOT NULL"
)
HISTORY = "SELECT position, value FROM history WHERE position > ? ORDER BY position LIMIT ?"
LATEST = "SELECT position, value FROM history WHERE position < ? ORDER BY position DESC LIMIT ?"

P = ParamSpec("P")
T = TypeVar("T")


class SqliteStore(LeaseKeeper):
    """The contract of `base.py` on a file.

    Commits and reads have a thread each, so a waiting commit does not block readers.

    Leases are timed by the machine's monotonic clock, which all its processes share: a step of the
    wall clock neither ends nor prolongs one.
    """

    def __init__(
        self, writer: "_DbThread", reader: "_DbThread", monotonic: Callable[[], float]
    ) -> None:
        super().__init__(monotonic)
        self._writer = writer
        self._reader = reader
        self._changed = asyncio.Event()

    @classmethod
    async def open(
        cls,
        path: str,
        *,
        upgrade: Upgrade | None = None,
        busy_seconds: float = BUSY_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Open the file, or create it. Reject one that is damaged, foreign, newer or read-only.

        A file of an older version is upgraded with `upgrade`.
        """
        path = os.path.realpath(path)
        with translate_errors(path):
            opened = await asyncio.to_thread(open_file, path, busy_seconds, upgrade)
        writer = _DbThread(path, opened.file, opened.writer, "BEGIN IMMEDIATE")
        reader = _DbThread(path, opened.file, opened.reader, "BEGIN")
        return cls(writer, reader, monotonic)

    async def get(self, key: str) -> Record:
        ((value, revision),) = await self._reader.run(_select, GET, key)
        return Record(key, value, revision)

    async def load(self, prefix: str = "") -> Snapshot:
        return await self._reader.run(_load, prefix)

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        compared = check_commit(writes, checks, entries)
        revision = await self._writer.run(_commit, tuple(writes), compared, entries)
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

    async def history(self, after: int = 0, limit: int = 1000) -> HistoryValues:
        return tuple(starmap(HistoryValue, await self._reader.run(_select, HISTORY, after, limit)))

    async def latest(self, before: int = POSITION_MAX, limit: int = 1000) -> HistoryValues:
        return tuple(starmap(HistoryValue, await self._reader.run(_select, LATEST, before, limit)))

    async def first_of_newest(self, commits: int) -> int:
        return (await self.get("")).revision - commits + 1

    async def trim(self, before: int, limit: int = 1000) -> int:
        return await self._writer.run(_trim, before, limit)

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        now, key = self._monotonic(), LEASE_KEY.format(name)
        revision = await self._writer.run(_acquire, key, ttl_seconds, now)
        self._notify()
        if not revision:
            return None
        return self._keep(name, revision, ttl_seconds, since=now)

    async def _renew(self, leases: Sequence[Lease], now: float) -> Collection[Lease]:
        """Renew them, and delete the expired ones of others."""
        renewed = await self._writer.run(_renew, leases, now)
        self._notify()
        return renewed

    async def close(self) -> None:
        await self._release_all()
        await self._reader.close()
        await self._writer.close()  # the last one to close moves the write-ahead log into the file
        self._notify()

    def _notify(self) -> None:
        """Wake all waiting watches; later ones wait for the next event."""
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False)
class _DbThread:
    """One connection and the one thread that uses it: the event loop never waits for the disk."""

    path: str
    file: os.stat_result
    connection: sqlite3.Connection
    begin: str
    is_closed: bool = False

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forewarn-sqlite")

    async def run(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run the work in a transaction."""

        def run_in_transaction() -> T:
            check_same_file(self.path, self.file)
            with self.connection:
                self.connection.execute(self.begin)
                return work(self.connection, *args, **kwargs)

        if self.is_closed:
            raise StoreLost(f"{self.path}: the store is closed")
        with translate_errors(self.path):
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, run_in_transaction
            )

    async def close(self) -> None:
        """Work in progress finishes first: the thread takes its work in order."""
        if self.is_closed:
            return
        self.is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self.connection.close)
        self._thread.shutdown(wait=False)


# The functions below run in a database thread, within a transaction.


def _select(connection: sqlite3.Connection, statement: str, *parameters: str | int) -> list[Any]:
    return connection.execute(statement, parameters).fetchall()


def _load(connection: sqlite3.Connection, prefix: str) -> Snapshot:
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
    writes: Sequence[Write],
    compared: Sequence[Write | RevisionCheck],
    entries: bytes | None,
) -> int:
    for each in compared:
        check_revision(each, _live_revision(connection, each.key))
    # deleting an absent record leaves no row
    changes = [write for write in writes if write.value is not None or write.revision]
    revision = _put(connection, {write.key: write.value for write in changes})
    if any(write.value is None for write in changes):
        _compact(connection)
    if entries is not None:
        connection.execute("INSERT INTO history VALUES (?, ?)", (revision, entries))
    return revision


def _live_revision(connection: sqlite3.Connection, key: str) -> int:
    rows = connection.execute(
        "SELECT revision FROM record WHERE key = ? AND value IS NOT NULL", (key,)
    ).fetchall()
    return int(rows[0][0]) if rows else 0


def _put(connection: sqlite3.Connection, values: dict[str, bytes | None]) -> int:
    """Write these values at a new revision, and return it."""
    connection.execute("UPDATE counter SET revision = revision + 1")
    ((revision,),) = connection.execute("SELECT revision FROM counter").fetchall()
    connection.executemany(
        "INSERT INTO record (key, value, revision) VALUES (?, ?, ?)"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision",
        [(key, value, revision) for key, value in values.items()],
    )
    return int(revision)


def _compact(connection: sqlite3.Connection) -> None:
    """Drop the oldest tombstones above the limit, and remember up to which revision."""
    surplus = connection.execute(
        "SELECT key, revision FROM record WHERE value IS NULL ORDER BY revision DESC"
        " LIMIT -1 OFFSET ?",
        (CHANGES_MAX,),
    ).fetchall()
    if surplus:
        connection.executemany("DELETE FROM record WHERE key = ?", [(key,) for key, _ in surplus])
        connection.execute("UPDATE counter SET compacted = max(compacted, ?)", (surplus[0][1],))


def _records_after(connection: sqlite3.Connection, after: int) -> tuple[Record, ...]:
    ((compacted,),) = connection.execute("SELECT compacted FROM counter").fetchall()
    check_watch(after, compacted)
    rows = connection.execute(
        "SELECT key, value, revision FROM record WHERE revision > ? ORDER BY revision", (after,)
    ).fetchall()
    return tuple(starmap(Record, rows))


def _trim(connection: sqlite3.Connection, before: int, limit: int) -> int:
    return connection.execute(
        "DELETE FROM history WHERE position IN (SELECT position FROM history"
        " WHERE position < min(?, (SELECT max(position) FROM history)) ORDER BY position LIMIT ?)",
        (before, limit),
    ).rowcount


def _acquire(connection: sqlite3.Connection, key: str, ttl_seconds: float, now: float) -> int:
    """The revision of the new lease; 0 if another holder has it."""
    _delete_expired(connection, now)
    if _live_revision(connection, key):
        return 0
    connection.execute(
        "INSERT OR REPLACE INTO lease VALUES (?, ?, ?)", (key, ttl_seconds, now + ttl_seconds)
    )
    return _put(connection, {key: uuid4().hex.encode()})


def _renew(
    connection: sqlite3.Connection, leases: Sequence[Lease], now: float
) -> Collection[Lease]:
    """Renew what is still held, return it, and delete what has expired."""
    held = [lease for lease in leases if _live_revision(connection, lease.key) == lease.revision]
    connection.executemany(
        "UPDATE lease SET expires_at = ? WHERE key = ?",
        [(now + lease.ttl_seconds, lease.key) for lease in held],
    )
    _delete_expired(connection, now)
    return held


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
    if rows:
        _put(connection, {key: None for (key,) in rows})
    connection.execute(
        "DELETE FROM lease WHERE NOT EXISTS"
        " (SELECT 1 FROM record WHERE record.key = lease.key AND value IS NOT NULL)"
    )
