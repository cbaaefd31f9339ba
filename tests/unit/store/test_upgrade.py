"""A file that version 0.2 wrote is upgraded when it is opened."""

import asyncio
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from forewarn.errors import StoreUnusable
from forewarn.store.base import HistoryValue, Snapshot, Upgrade, Write
from forewarn.store.sqlite import SqliteStore

T = TypeVar("T")
OLD = Path(__file__).parents[2] / "input" / "store-0.2.db"
ENTRIES = 39
REVISION = 52


def keep_record(key: str, value: bytes) -> bytes | None:
    return value


def keep_entry(value: bytes) -> bytes:
    return b"[" + value + b"]"


KEEP = Upgrade(keep_record, keep_entry)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD, tmp_path / "store.db"))


def on_file(
    path: Path, work: Callable[[SqliteStore], Awaitable[T]], upgrade: Upgrade | None = KEEP
) -> T:
    async def run() -> T:
        store = await SqliteStore.open(str(path), upgrade=upgrade)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def select(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


async def load(store: SqliteStore) -> Snapshot:
    return await store.load()


async def history(store: SqliteStore) -> tuple[HistoryValue, ...]:
    return await store.history()


def test_records_keep_their_revisions_and_entries_their_order(path: Path) -> None:
    """Watches, compare-and-set and cursors of before go on."""
    records = select(path, "SELECT key, value, revision FROM record WHERE value IS NOT NULL")
    notes = select(path, "SELECT number, body FROM note ORDER BY number")

    loaded = on_file(path, load)

    assert loaded.revision == REVISION
    assert {(record.key, record.value, record.revision) for record in loaded.records} == set(
        records
    )
    values = on_file(path, history)
    assert [(value.position, value.value[1:-1]) for value in values] == notes
    assert len(values) == ENTRIES


def test_record_values_are_rewritten_or_dropped(path: Path) -> None:
    """The store knows no rules: a function of the engine decides."""

    def rewrite(key: str, value: bytes) -> bytes | None:
        return None if key.startswith("token") else b"new " + key.encode()

    loaded = on_file(path, load, Upgrade(rewrite, keep_entry))

    assert {record.value for record in loaded.records} == {
        b"new " + record.key.encode() for record in loaded.records
    }
    assert not [record for record in loaded.records if record.key.startswith("token")]
    assert len(loaded.records) == 12


def test_the_next_commit_is_after_all_old_entries(path: Path) -> None:
    """A commit with many entries gave numbers that were ahead of the revision."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO note (number, body) VALUES (5000, x'7b7d')")
        connection.commit()

    async def commit(store: SqliteStore) -> int:
        return await store.commit([Write("a", b"1", 0)], entries=b"[]")

    assert on_file(path, commit) == 5001
    assert [value.position for value in on_file(path, history)][-2:] == [5000, 5001]


def test_an_upgraded_file_is_not_upgraded_again(path: Path) -> None:
    """Opening it twice must not wrap the entries twice."""
    before = on_file(path, load), on_file(path, history)

    assert (on_file(path, load, None), on_file(path, history, None)) == before
    assert select(path, "PRAGMA user_version") == [(3,)]


@pytest.mark.parametrize("step", ["record", "entries"])
def test_a_crash_during_the_upgrade_leaves_the_old_file(path: Path, step: str) -> None:
    """The upgrade is one transaction, so it can be tried again."""
    calls = 0

    def fail(*_: object) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("crash")
        return b"half"

    queries = ("SELECT * FROM record", "SELECT * FROM note", "PRAGMA user_version")
    before = [select(path, query) for query in queries]
    with pytest.raises(RuntimeError, match="crash"):
        on_file(path, load, KEEP._replace(**{step: fail}))

    assert [select(path, query) for query in queries] == before
    assert on_file(path, load).revision == REVISION


def test_an_old_file_is_not_used_without_an_upgrade(path: Path) -> None:
    """Reading its values as if they were new would damage them."""
    before = path.read_bytes()

    with pytest.raises(StoreUnusable, match="schema 2; expected schema 3"):
        on_file(path, load, None)
    assert path.read_bytes() == before


def test_a_damaged_old_file_is_left_alone(path: Path) -> None:
    """The copy that a person restores from must not become worse."""
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xa5" * 2 * 4096)
    before = path.read_bytes()

    with pytest.raises(StoreUnusable, match="the database file is corrupt"):
        on_file(path, load)
    assert path.read_bytes() == before


def test_a_file_of_the_first_version_is_upgraded(path: Path) -> None:
    """It had no column for compacted deletions."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE counter DROP COLUMN forgotten")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()

    assert on_file(path, load).revision == REVISION
    assert select(path, "SELECT compacted FROM counter") == [(0,)]


def test_an_old_watch_sees_the_deletions_of_before(path: Path) -> None:
    """The file has one deleted scope."""

    async def watch(store: SqliteStore) -> Snapshot:
        return await anext(store.watch(29))

    deleted = [record.key for record in on_file(path, watch).records if record.value is None]
    assert deleted == ["scope/gone/"]
