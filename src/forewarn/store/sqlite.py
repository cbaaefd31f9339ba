"""A store in one SQLite file: the embedded default. Any number of processes of one machine may
share the file.

What lives here: the file, its recognition, and the translation of every SQLite error. A file that
is not plainly ours and whole is refused before a byte of it is written.
"""

import asyncio
import os
import sqlite3
import stat
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import starmap
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from forewarn.errors import Error, StoreDenied, StoreLost, StoreUnusable
from forewarn.store.base import Note, Record, Snapshot, Write
from forewarn.store.check import check_revision, check_watch, check_writes

APPLICATION_ID = 0x466F7265  # "Fore", in the file's header: this database is ours
SCHEMA_NUMBER = 2
FILE_MODE = 0o600  # of a new file: it holds digests of tokens and the user data of VMs
BUSY_SECONDS = 5.0
# how late another process's commit is seen: 250 ms is promised, and a look costs some 0.2 ms
POLL_SECONDS = 0.1

# A deleted record stays as a row without a value, so that a watch in another process learns of it.
SCHEMA = (
    "CREATE TABLE counter (revision INTEGER NOT NULL, forgotten INTEGER NOT NULL DEFAULT 0)",
    "INSERT INTO counter (revision) VALUES (0)",
    "CREATE TABLE record (key TEXT PRIMARY KEY NOT NULL, value BLOB, revision INTEGER NOT NULL)",
    "CREATE INDEX record_revision ON record (revision)",
    "CREATE TABLE note (number INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_NUMBER}",
)
UPGRADES = {
    1: (
        "ALTER TABLE counter ADD COLUMN forgotten INTEGER NOT NULL DEFAULT 0",
        "PRAGMA user_version = 2",
    )
}
"""What makes an older file one of the next schema.

A server of the older kind that has it open can go on.
"""

DAMAGED = "the file is damaged; expected a whole database: restore it from a copy"
WRONG_ROWS = {
    "a record with a value of the wrong type": "SELECT 1 FROM record WHERE typeof(key) <> 'text'"
    " OR typeof(revision) <> 'integer' OR typeof(value) NOT IN ('blob', 'null') LIMIT 1",
    "a history entry of the wrong type": "SELECT 1 FROM note WHERE typeof(body) <> 'blob' LIMIT 1",
    "a revision counter of the wrong type": "SELECT 1 FROM counter WHERE typeof(revision) <> 'integer'"
    " OR typeof(forgotten) <> 'integer' LIMIT 1",
    "more or less than one revision counter": "SELECT 1 WHERE (SELECT count(*) FROM counter) <> 1",
}

# SQLite's primary code: the problem, what was found and what is expected. Any other code is a
# StoreLost in SQLite's own words.
MEANING: dict[int, tuple[type[Error], str]] = {
    sqlite3.SQLITE_BUSY: (
        StoreLost,
        "another writer holds it; expected a turn before the wait ran out",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        StoreUnusable,
        "the file cannot be opened; expected a file and folder that this user may write",
    ),
    sqlite3.SQLITE_CORRUPT: (StoreUnusable, DAMAGED),
    sqlite3.SQLITE_ERROR: (
        StoreUnusable,
        "its tables are not those of a Forewarn store; expected a whole one: restore it from a copy",
    ),
    sqlite3.SQLITE_FULL: (
        StoreUnusable,
        "the disk is full and nothing was written; expected free space",
    ),
    sqlite3.SQLITE_IOERR: (
        StoreLost,
        "the disk fails, or has no space for the log's index; expected one that can be written",
    ),
    sqlite3.SQLITE_NOTADB: (
        StoreUnusable,
        "the file is not an SQLite database; expected a Forewarn store, or no file",
    ),
    sqlite3.SQLITE_READONLY: (
        StoreUnusable,
        "the file is read-only; expected a file and folder that this user may write",
    ),
}

P = ParamSpec("P")
T = TypeVar("T")


class SqliteStore:
    """The contract of `base.py` on a file.

    Commits and reads have a lane each, so a commit that waits delays no reader.
    """

    def __init__(self, writing: "_Lane", reading: "_Lane") -> None:
        self._writing = writing
        self._reading = reading
        self._bell = asyncio.Event()

    @classmethod
    async def open(cls, path: str, *, busy_seconds: float = BUSY_SECONDS) -> Self:
        """Opens the file, makes it if there is none, and refuses what is damaged, foreign, newer or
        not writable.
        """
        path = os.path.realpath(path)
        writing = await _Lane.open(_prepare, path, busy_seconds)
        try:
            reading = await _Lane.open(_connect, path, busy_seconds)
        except BaseException:
            await writing.close()
            raise
        return cls(writing, reading)

    async def load(self, prefix: str = "") -> Snapshot:
        return await self._reading.run(_load, prefix)

    async def commit(self, writes: Sequence[Write], notes: Sequence[bytes] = ()) -> int:
        check_writes(writes)
        revision = await self._writing.run(_commit, tuple(writes), tuple(notes))
        self._ring()
        return revision

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        while not self._reading.is_closed:  # close() ends it
            bell = (
                self._bell
            )  # taken before the look, so that no change falls between the look and the wait
            records = await self._reading.run(_changed, after)
            if not records:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await bell.wait()
                continue
            after = records[-1].revision
            yield Snapshot(after, records)

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[Note, ...]:
        return await self._reading.run(_history, after, limit)

    async def latest(self, before: int | None = None, limit: int = 1000) -> tuple[Note, ...]:
        return await self._reading.run(_latest, before, limit)

    async def trim(self, before: int, limit: int = 1000) -> int:
        return await self._writing.run(_trim, before, limit)

    async def forget(self, revision: int, limit: int = 1000) -> int:
        return await self._writing.run(_forget, revision, limit)

    async def close(self) -> None:
        await self._reading.close()
        await self._writing.close()  # the last one out brings the write-ahead log into the file
        self._ring()

    def _ring(self) -> None:
        """Wakes every watch that waits now; those that come later wait for the next bell."""
        self._bell.set()
        self._bell = asyncio.Event()


class _Lane:
    """One connection and the one thread it lives in: the event loop never waits for the disk."""

    def __init__(
        self, path: str, thread: ThreadPoolExecutor, connection: sqlite3.Connection
    ) -> None:
        self.is_closed = False
        self._path = path
        self._thread = thread
        self._connection = connection
        self._file = os.stat(path)

    @classmethod
    async def open(
        cls, opening: Callable[[str, float], sqlite3.Connection], path: str, busy_seconds: float
    ) -> Self:
        thread = ThreadPoolExecutor(1, thread_name_prefix="forewarn-sqlite")
        before = os.stat(path) if os.path.exists(path) else None
        try:
            with _problems_of(path):
                connection = await asyncio.get_running_loop().run_in_executor(
                    thread, opening, path, busy_seconds
                )
        except BaseException:
            thread.shutdown(wait=False)
            raise
        lane = cls(path, thread, connection)
        try:
            lane.check_file(
                before or lane._file
            )  # a restore may have replaced it while we waited for its lock
        except StoreUnusable:
            await lane.close()
            raise
        return lane

    async def run(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        def worked() -> T:
            self.check_file(self._file)
            return work(self._connection, *args, **kwargs)

        if self.is_closed:
            raise StoreLost(f"{self._path}: the store is closed; expected an open one")
        with _problems_of(self._path):
            return await asyncio.get_running_loop().run_in_executor(self._thread, worked)

    async def close(self) -> None:
        """What is under way is finished first: the thread takes its work in order."""
        if self.is_closed:
            return
        self.is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    def check_file(self, opened: os.stat_result) -> None:
        """SQLite goes on writing to a file that was deleted or replaced, and what it writes is
        lost.
        """
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path), opened):
                return
        raise StoreUnusable(
            f"{self._path}: the file was removed or replaced; expected the one that was opened: start again"
        )


def _load(connection: sqlite3.Connection, prefix: str) -> Snapshot:
    with connection:
        connection.execute("BEGIN")
        ((revision,),) = connection.execute("SELECT revision FROM counter").fetchall()
        # No text in UTF-8 holds the byte FF, so this is the first thing after every key with the
        # prefix.
        ceiling = prefix.encode() + b"\xff"
        rows = connection.execute(
            "SELECT key, value, revision FROM record WHERE key >= ? AND key < CAST(? AS TEXT) AND value IS NOT NULL ORDER BY key",
            (prefix, ceiling),
        ).fetchall()
    return Snapshot(revision, tuple(starmap(Record, rows)))


def _commit(
    connection: sqlite3.Connection, writes: tuple[Write, ...], notes: tuple[bytes, ...]
) -> int:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        for write in writes:
            check_revision(write, _found(connection, write.key))
        connection.execute("UPDATE counter SET revision = revision + 1")
        ((revision,),) = connection.execute("SELECT revision FROM counter").fetchall()
        connection.executemany(
            "INSERT INTO record (key, value, revision) VALUES (?, ?, ?)"
            " ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision",
            # Deleting what is not there is already true, and leaves no row.
            [
                (write.key, write.value, revision)
                for write in writes
                if write.value is not None or write.revision != 0
            ],
        )
        connection.executemany("INSERT INTO note (body) VALUES (?)", [(body,) for body in notes])
    return int(revision)


def _found(connection: sqlite3.Connection, key: str) -> int:
    rows = connection.execute(
        "SELECT revision FROM record WHERE key = ? AND value IS NOT NULL", (key,)
    ).fetchall()
    return int(rows[0][0]) if rows else 0


def _changed(connection: sqlite3.Connection, after: int) -> tuple[Record, ...]:
    rows = connection.execute(
        "SELECT key, value, revision FROM record WHERE revision > ? ORDER BY revision", (after,)
    ).fetchall()
    # Asked afterwards: what was forgotten between the two is known as well.
    ((forgotten,),) = connection.execute("SELECT forgotten FROM counter").fetchall()
    check_watch(after, forgotten)
    return tuple(Record(*row) for row in rows)


def _history(connection: sqlite3.Connection, after: int, limit: int) -> tuple[Note, ...]:
    rows = connection.execute(
        "SELECT number, body FROM note WHERE number > ? ORDER BY number LIMIT ?",
        (after, max(limit, 0)),
    )
    return tuple(Note(*row) for row in rows.fetchall())


def _latest(connection: sqlite3.Connection, before: int | None, limit: int) -> tuple[Note, ...]:
    rows = connection.execute(
        "SELECT number, body FROM note WHERE number < ? ORDER BY number DESC LIMIT ?",
        (sys.maxsize if before is None else before, max(limit, 0)),
    )
    return tuple(Note(*row) for row in rows.fetchall())


def _trim(connection: sqlite3.Connection, before: int, limit: int) -> int:
    """The newest note stays:

    SQLite gives the next one its number plus one, and would begin at 1 again without it.
    """
    return connection.execute(
        "DELETE FROM note WHERE number IN (SELECT number FROM note WHERE number < min(?, (SELECT max(number) FROM note))"
        " ORDER BY number LIMIT ?)",
        (before, max(limit, 0)),
    ).rowcount


def _forget(connection: sqlite3.Connection, revision: int, limit: int) -> int:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        dead = connection.execute(
            "SELECT key, revision FROM record WHERE revision <= ? AND value IS NULL ORDER BY revision LIMIT ?",
            (revision, max(limit, 0)),
        ).fetchall()
        connection.executemany("DELETE FROM record WHERE key = ?", [(key,) for key, _ in dead])
        connection.executemany(
            "UPDATE counter SET forgotten = max(forgotten, ?)", [(last,) for _, last in dead[-1:]]
        )
    return len(dead)


def _prepare(path: str, busy_seconds: float) -> sqlite3.Connection:
    """The file, recognised, whole and ready to be written."""
    check_path(path)
    with suppress(
        FileExistsError
    ):  # SQLite would make it readable by all, and gives its log the mode of the file
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, FILE_MODE))
    connection = _connect(path, busy_seconds)
    try:
        connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            number = _schema_number(connection, path)
            if number in UPGRADES:
                _check_whole(connection, path)  # what is damaged stays as it is
            statements = SCHEMA if number == 0 else UPGRADES.get(number, ())
            for statement in statements:
                connection.execute(statement)
        _check_whole(connection, path)
        _check_rows(connection, path)
        _log_ahead(connection, busy_seconds)
    except BaseException:
        connection.close()
        raise
    return connection


def _log_ahead(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Where two open a new file at once, SQLite refuses one of them this change at once, whatever
    wait it was given.
    """
    until = time.monotonic() + busy_seconds
    while True:  # until it is done, or the wait has run out
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.005)


def _connect(path: str, busy_seconds: float) -> sqlite3.Connection:
    """Never makes the file: only `_prepare` does, with the right mode."""
    return sqlite3.connect(
        f"{Path(path).as_uri()}?mode=rw", uri=True, timeout=busy_seconds, isolation_level=None
    )


def check_path(path: str) -> None:
    """SQLite opens what it may only read without a word, and its word for the rest is one for all.

    So we look ourselves.
    """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise StoreUnusable(
            f"{path}: there is no folder {folder}; expected one that this user may write"
        )
    _check_access(path, folder, "wx")
    if os.path.exists(path) and not os.path.isfile(path):
        raise StoreUnusable(f"{path}: it is a folder or a device; expected a file")
    for file in (path, f"{path}-wal", f"{path}-shm"):
        if os.path.exists(file):
            _check_access(path, file, "rw")


def _check_access(path: str, file: str, needed: str) -> None:
    """Refuse a file or folder of the store that this user may not use, with its owner, its mode and
    the command that helps.
    """
    wanted = [{"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}[letter] for letter in needed]
    if os.access(file, sum(wanted), effective_ids=True):
        return
    found, user = os.stat(file), os.geteuid()
    owner = f"{_user_name(found.st_uid)}:{_group_name(found.st_gid)}"
    us = _user_name(user)
    if found.st_uid != user:
        fix = f"chown {us}:{_group_name(os.getegid())} {file}"
    elif any(not found.st_mode & bit << 6 for bit in wanted):
        fix = f"chmod u+{needed} {file}"
    else:  # it is ours and may be written: the file system as a whole may not
        raise StoreUnusable(
            f"{path}: {file} is on a read-only file system; expected one that can be written"
        )
    raise StoreDenied(
        f"{path}: user {us} may not use {file}, which belongs to {owner} with mode {stat.S_IMODE(found.st_mode):04o};"
        f" expected a store that {us} may read and write: {fix}",
        file=file,
        owner=owner,
        fix=fix,
    )


def _user_name(number: int) -> str:
    import pwd  # POSIX only; the lab imports this module on Windows too

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group_name(number: int) -> str:
    import grp  # POSIX only, as above

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def copy_store(source: str, target: str) -> None:
    """A copy of a whole store, made by SQLite's own backup; the target must not exist.

    The source is not written to.
    """
    # Beside a log there may be a server. Without one the file is read as it is, which also works
    # where nothing may be written.
    how = "mode=ro" if os.path.exists(f"{source}-wal") else "immutable=1"
    with (
        _problems_of(source),
        closing(sqlite3.connect(f"{Path(source).as_uri()}?{how}", uri=True)) as original,
    ):
        if _schema_number(original, source) == 0:
            raise StoreUnusable(f"{source}: the file holds nothing; expected a Forewarn store")
        _check_whole(original, source)
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, FILE_MODE))
        with closing(_connect(target, BUSY_SECONDS)) as copy:
            original.backup(copy)


def _schema_number(connection: sqlite3.Connection, path: str) -> int:
    """0 for a database with nothing in it yet.

    What belongs to somebody else, or to a newer Forewarn, is refused.
    """
    ((application_id,),) = connection.execute("PRAGMA application_id").fetchall()
    ((number,),) = connection.execute("PRAGMA user_version").fetchall()
    if application_id == APPLICATION_ID:
        if number > SCHEMA_NUMBER:
            raise StoreUnusable(
                f"{path}: the file is of schema {number}, from a newer Forewarn; expected schema {SCHEMA_NUMBER} or older",
                found=number,
                expected=SCHEMA_NUMBER,
            )
        if number < 1:
            raise StoreUnusable(
                f"{path}: the file is a Forewarn store without a schema number ({number}); expected 1 to {SCHEMA_NUMBER}:"
                " restore it from a copy",
                found=number,
                expected=SCHEMA_NUMBER,
            )
        return int(number)
    ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    if application_id or number or tables:
        raise StoreUnusable(
            f"{path}: the file is another program's database (application id {application_id:#x}, {tables} tables and indexes);"
            f" expected a Forewarn store ({APPLICATION_ID:#x}), or no file",
            found=application_id,
            expected=APPLICATION_ID,
        )
    return 0


def _check_whole(connection: sqlite3.Connection, path: str) -> None:
    """Damage is found when the server starts and a person is there, not in the night when the page
    is needed.

    The quick check would not compare indexes with their tables, and a record that its index does
    not know is lost.
    """
    ((finding,),) = connection.execute("PRAGMA integrity_check(1)").fetchall()
    if finding != "ok":
        raise StoreUnusable(f"{path}: {DAMAGED} ({' '.join(finding.split())})")


def _check_rows(connection: sqlite3.Connection, path: str) -> None:
    """SQLite's own check lets a value of another type pass, and a flipped bit can make one."""
    for what, query in WRONG_ROWS.items():
        if connection.execute(query).fetchall():
            raise StoreUnusable(f"{path}: {DAMAGED} ({what})")


@contextmanager
def _problems_of(path: str) -> Iterator[None]:
    """SQLite's errors end here."""
    try:
        yield
    except (
        UnicodeDecodeError
    ) as error:  # Python's module fails on SQLite's own message about a damaged name
        raise StoreUnusable(f"{path}: {DAMAGED}") from error
    except sqlite3.DatabaseError as error:
        if str(error).startswith(
            "Could not decode to UTF-8"
        ):  # a damaged key, found by Python's module, not by SQLite
            raise StoreUnusable(f"{path}: {DAMAGED}") from error
        if not hasattr(error, "sqlite_errorcode"):
            raise  # not SQLite's: a bug in how we call it
        kind, meaning = MEANING.get(
            error.sqlite_errorcode & 0xFF, (StoreLost, f"SQLite says {error}; expected an answer")
        )
        raise kind(f"{path}: {meaning}", sqlite=error.sqlite_errorname) from error
