"""The file of an SQLite store: its schema, opening, checking, upgrading and copying it.

A file that is not clearly a whole Forewarn store is rejected before a byte of it is written.
Every error of SQLite is translated here.
"""

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from forewarn.errors import StoreDenied, StoreLost, StoreUnusable
from forewarn.store.base import Upgrade

APPLICATION_ID = 0x466F7265  # "Fore", in the file's header
SCHEMA_VERSION = 3
FILE_MODE = 0o600  # of a new file: it holds digests of tokens and the user data of VMs
BUSY_SECONDS = 5.0

# A deleted record stays as a row without a value (a tombstone), for watches in other processes.
# A lease is an ordinary record; its row here holds what a renewal changes, without a revision.
NEW_TABLES = (
    "CREATE INDEX tombstone ON record (revision) WHERE value IS NULL",
    "CREATE TABLE history (position INTEGER PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE lease (key TEXT PRIMARY KEY NOT NULL, ttl REAL, expires_at REAL)",
)
SCHEMA = (
    "CREATE TABLE counter (revision INTEGER NOT NULL, compacted INTEGER NOT NULL)",
    "INSERT INTO counter VALUES (0, 0)",
    "CREATE TABLE record (key TEXT PRIMARY KEY NOT NULL, value BLOB, revision INTEGER NOT NULL)",
    "CREATE INDEX record_revision ON record (revision)",
    *NEW_TABLES,
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
COUNTER_UPGRADES = {
    1: "ALTER TABLE counter ADD COLUMN compacted INTEGER NOT NULL DEFAULT 0",
    2: "ALTER TABLE counter RENAME COLUMN forgotten TO compacted",
}
"""The tables of versions 1 and 2 differ only here."""

DAMAGED = "the database file is corrupt; restore it from a backup"
WRONG_ROWS = {
    "a record with a value of the wrong type": "SELECT 1 FROM record WHERE typeof(key) <> 'text'"
    " OR typeof(revision) <> 'integer' OR typeof(value) NOT IN ('blob', 'null') LIMIT 1",
    "a history value of the wrong type": "SELECT 1 FROM history WHERE typeof(value) <> 'blob'"
    " LIMIT 1",
    "a lease of the wrong type": "SELECT 1 FROM lease WHERE typeof(key) <> 'text'"
    " OR typeof(ttl) <> 'real' OR typeof(expires_at) <> 'real' LIMIT 1",
    "a revision counter of the wrong type": "SELECT 1 FROM counter"
    " WHERE typeof(revision) <> 'integer' OR typeof(compacted) <> 'integer' LIMIT 1",
    "more or less than one revision counter": "SELECT 1 WHERE (SELECT count(*) FROM counter) <> 1",
}

# SQLite's primary code: the problem and what is expected. Any other code is StoreLost.
UNUSABLE = {
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; expected a file and folder that this user"
    " may write",
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_ERROR: "the tables do not match the Forewarn schema; restore the file from a"
    " backup",
    sqlite3.SQLITE_FULL: "the disk is full and nothing was written; expected free space",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database; expected a Forewarn store, or no"
    " file",
    sqlite3.SQLITE_READONLY: "the file is read-only; expected a file and folder that this user may"
    " write",
}
LOST = {
    sqlite3.SQLITE_BUSY: "another process is writing; expected it to finish before the timeout",
    sqlite3.SQLITE_IOERR: "the disk fails, or has no space for the log's index; expected one that"
    " can be written",
}


class OpenFile(NamedTuple):
    """The identity of the file that was opened, and two connections to it."""

    file: os.stat_result
    writer: sqlite3.Connection
    reader: sqlite3.Connection


def open_file(path: str, busy_seconds: float, upgrade: Upgrade | None) -> OpenFile:
    """Create the file unless there is one, check it, and upgrade an older one."""
    check_path(path)
    # SQLite would make it readable by all. Its log gets the mode of the file.
    with suppress(FileExistsError):
        create_file(path)
    file = os.stat(path)
    with ExitStack() as connections:
        writer = connections.enter_context(closing(connect(path, busy_seconds)))
        reader = connections.enter_context(closing(connect(path, busy_seconds)))
        _prepare(writer, path, busy_seconds, upgrade)
        check_same_file(path, file)  # a restore may have replaced it while we waited for its lock
        connections.pop_all()
    return OpenFile(file, writer, reader)


def create_file(path: str) -> None:
    """Create an empty file. Made by root, it belongs to the owner of its folder: the service."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, FILE_MODE)
    try:
        if os.geteuid() == 0:
            folder = os.stat(os.path.dirname(os.path.abspath(path)))
            os.fchown(descriptor, folder.st_uid, folder.st_gid)
    finally:
        os.close(descriptor)


def _prepare(
    connection: sqlite3.Connection, path: str, busy_seconds: float, upgrade: Upgrade | None
) -> None:
    connection.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        version = _schema_version(connection, path)
        if version == 0:
            for statement in SCHEMA:
                connection.execute(statement)
        elif version < SCHEMA_VERSION:
            _check_integrity(connection, path)  # a damaged file stays as it is
            _upgrade(connection, path, version, upgrade)
    _check_integrity(connection, path)
    _check_rows(connection, path)
    _enable_wal(connection, busy_seconds)


def _upgrade(
    connection: sqlite3.Connection, path: str, version: int, upgrade: Upgrade | None
) -> None:
    """Rewrite an older file, within the caller's transaction: a crash leaves the old file.

    History entry N becomes the value at position N, so the revision must be at least N.
    """
    if upgrade is None:
        raise StoreUnusable(
            f"{path}: the file has schema {version}; expected schema {SCHEMA_VERSION}:"
            " start a server on it once, which upgrades it"
        )
    connection.execute(COUNTER_UPGRADES[version])
    for statement in NEW_TABLES:
        connection.execute(statement)
    records = connection.execute("SELECT key, value FROM record WHERE value IS NOT NULL").fetchall()
    for key, value in records:
        new_value = upgrade.record(key, value)
        if new_value is None:
            connection.execute("DELETE FROM record WHERE key = ?", (key,))
        elif new_value != value:
            connection.execute("UPDATE record SET value = ? WHERE key = ?", (new_value, key))
    with closing(connection.execute("SELECT number, body FROM note ORDER BY number")) as notes:
        connection.executemany(
            "INSERT INTO history (position, value) VALUES (?, ?)",
            ((number, upgrade.entries(body)) for number, body in notes),
        )
    connection.execute(
        "UPDATE counter SET"
        " revision = max(revision, (SELECT coalesce(max(position), 0) FROM history))"
    )
    connection.execute("DROP TABLE note")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _enable_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """If two processes open a new file together, SQLite fails this in one without waiting."""
    until = time.monotonic() + busy_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.005)


def connect(path: str, busy_seconds: float) -> sqlite3.Connection:
    """Never creates the file: only `open_file` does, with the right mode.

    The caller must not use the connection in two threads at the same time.
    """
    return sqlite3.connect(
        f"{Path(path).as_uri()}?mode=rw",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )


def check_same_file(path: str, file: os.stat_result) -> None:
    """SQLite keeps writing to a file that was deleted or replaced; such writes are lost."""
    with suppress(OSError):
        if os.path.samestat(os.stat(path), file):
            return
    raise StoreUnusable(
        f"{path}: the file was removed or replaced; expected the one that was opened:"
        " restart the service"
    )


def check_path(path: str) -> None:
    """Check permissions here: SQLite silently opens a file that it may only read."""
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
    """If this user may not use the file or folder, report its owner, mode and the fix."""
    mode = {"rw": os.R_OK | os.W_OK, "wx": os.W_OK | os.X_OK}[needed]
    if os.access(file, mode, effective_ids=True):
        return
    if os.statvfs(file).f_flag & os.ST_RDONLY:
        raise StoreUnusable(
            f"{path}: {file} is on a read-only file system; expected one that can be written"
        )
    status = os.stat(file)
    owner, us = _names(status.st_uid, status.st_gid), _names(os.geteuid(), os.getegid())
    user = us.partition(":")[0]
    is_ours = status.st_uid == os.geteuid()
    fix = f"chmod u+{needed} {file}" if is_ours else f"chown {us} {file}"
    raise StoreDenied(
        f"{path}: user {user} may not use {file}, which belongs to {owner} with mode"
        f" {stat.S_IMODE(status.st_mode):04o}; expected a store that {user} may read and write:"
        f" {fix}"
    )


def _names(user_id: int, group_id: int) -> str:
    """The names of a user and a group, or their numbers, as `chown` takes them."""
    import grp  # POSIX only; the lab imports this module on Windows too
    import pwd

    user, group = str(user_id), str(group_id)
    with suppress(KeyError):
        user = pwd.getpwuid(user_id).pw_name
    with suppress(KeyError):
        group = grp.getgrgid(group_id).gr_name
    return f"{user}:{group}"


def back_up(source: str, target: str) -> None:
    """Copy a whole store with SQLite's own backup. The target must not exist."""
    # A log means that a server may have it open. Without one the file is read as it is, which also
    # works in a read-only folder.
    mode = "mode=ro" if os.path.exists(f"{source}-wal") else "immutable=1"
    with (
        translate_errors(source),
        closing(sqlite3.connect(f"{Path(source).as_uri()}?{mode}", uri=True)) as original,
    ):
        if _schema_version(original, source) == 0:
            raise StoreUnusable(f"{source}: the file is empty; expected a Forewarn store")
        _check_integrity(original, source)
        create_file(target)
        with closing(connect(target, BUSY_SECONDS)) as copy:
            original.backup(copy)


def _schema_version(connection: sqlite3.Connection, path: str) -> int:
    """0 for an empty database. Other programs' databases and newer versions are rejected."""
    ((application_id,),) = connection.execute("PRAGMA application_id").fetchall()
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if application_id == APPLICATION_ID:
        if version > SCHEMA_VERSION:
            raise StoreUnusable(
                f"{path}: the file has schema {version}, from a newer Forewarn; expected schema"
                f" {SCHEMA_VERSION} or older"
            )
        if version < 1:
            raise StoreUnusable(f"{path}: {DAMAGED} (a store without a schema number)")
        return int(version)
    ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    if application_id or version or tables:
        raise StoreUnusable(
            f"{path}: the file is another program's database (application id {application_id:#x},"
            f" {tables} tables and indexes); expected a Forewarn store ({APPLICATION_ID:#x}),"
            " or no file"
        )
    return 0


def _check_integrity(connection: sqlite3.Connection, path: str) -> None:
    """Detect corruption at startup, while an operator is present.

    The quick check would not compare indexes with their tables, and would miss a lost record.
    """
    ((result,),) = connection.execute("PRAGMA integrity_check(1)").fetchall()
    if result != "ok":
        raise StoreUnusable(f"{path}: {DAMAGED} ({' '.join(result.split())})")


def _check_rows(connection: sqlite3.Connection, path: str) -> None:
    """SQLite's own check accepts a value of another type, and a flipped bit can make one."""
    for problem, query in WRONG_ROWS.items():
        if connection.execute(query).fetchall():
            raise StoreUnusable(f"{path}: {DAMAGED} ({problem})")


@contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """Raise SQLite's errors as ours."""
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite's message itself quotes a damaged name
        raise StoreUnusable(f"{path}: {DAMAGED}") from error
    except sqlite3.DatabaseError as error:
        # a damaged key, which Python's module reports without an SQLite code
        if str(error).startswith("Could not decode to UTF-8"):
            raise StoreUnusable(f"{path}: {DAMAGED}") from error
        if not hasattr(error, "sqlite_errorcode"):
            raise  # a bug in how we call it
        code = error.sqlite_errorcode & 0xFF
        problem = UNUSABLE.get(code) or LOST.get(code, f"SQLite reports {error}")
        kind = StoreUnusable if code in UNUSABLE else StoreLost
        raise kind(f"{path}: {problem}", sqlite=error.sqlite_errorname) from error
