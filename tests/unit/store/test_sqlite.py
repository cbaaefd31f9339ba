"""What only a file can do: be reopened, shared, damaged, foreign, or rejected by its disk."""

import asyncio
import grp
import os
import pwd
import sqlite3
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Timer

import pytest

from forewarn.errors import StoreDenied, StoreLost, StoreUnusable
from forewarn.store.base import HistoryValue, Record, Write
from forewarn.store.sqlite import SqliteStore
from forewarn.store.sqlite_file import APPLICATION_ID, SCHEMA, _enable_wal, open_file

NOBODY = 65534
TEST_SECONDS_MAX = 20
Work = Callable[[SqliteStore], Awaitable[None]]


def on_file(path: Path, work: Work, busy_seconds: float = 5.0) -> None:
    async def run() -> None:
        store = await SqliteStore.open(str(path), busy_seconds=busy_seconds)
        try:
            async with asyncio.timeout(TEST_SECONDS_MAX):
                await work(store)
        finally:
            await store.close()

    asyncio.run(run())


async def nothing(store: SqliteStore) -> None:
    """Only open and close the store."""


async def fill(store: SqliteStore) -> None:
    for number in range(40):
        await store.commit([Write(f"scope/{number:02}", b"x" * 2000, 0)], entries=b"[%d]" % number)


async def fill_more(store: SqliteStore) -> None:
    await store.commit([Write("more", b"x", 0)])


def filled(path: Path) -> Path:
    on_file(path, fill)
    return path


def ask(path: Path, *statements: str) -> list[tuple[object, ...]]:
    """Run statements on the file; the rows of the last one."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        connection.commit()
    return rows


@contextmanager
def rejects(path: Path, message: str) -> Iterator[None]:
    """Opening it raises StoreUnusable with the file's name, and changes nothing on disk."""
    before = {file: file.read_bytes() for file in path.parent.glob("*") if file.is_file()}
    with pytest.raises(StoreUnusable, match=message) as error:
        yield
    assert str(error.value).startswith(f"{path}: ")
    assert "expected" in str(error.value) or "from a backup" in str(error.value)
    assert "\n" not in str(error.value)
    assert {file: file.read_bytes() for file in path.parent.glob("*") if file.is_file()} == before


def test_a_reopened_store_has_everything_it_had(tmp_path: Path) -> None:
    """A restart of the server loses nothing."""
    path = tmp_path / "store.db"

    async def before(store: SqliteStore) -> None:
        await store.commit([Write("a", b"1", 0), Write("b", b"1", 0)], entries=b"created")
        await store.commit([Write("b", None, 1)], entries=b"gone")

    async def after(store: SqliteStore) -> None:
        loaded = await store.load()
        assert (loaded.revision, loaded.records) == (2, (Record("a", b"1", 1),))
        assert await store.history() == (HistoryValue(1, b"created"), HistoryValue(2, b"gone"))
        assert await store.commit([Write("b", b"2", 0)], entries=b"back") == 3
        assert (await store.history(2)) == (HistoryValue(3, b"back"),)

    on_file(path, before)
    on_file(path, after)


def test_a_watch_sees_deletions_made_before_it_was_opened(tmp_path: Path) -> None:
    """A server that restarts must learn which scopes were removed meanwhile."""
    path = tmp_path / "store.db"

    async def before(store: SqliteStore) -> None:
        await store.commit([Write("a", b"1", 0)])
        await store.commit([Write("a", None, 1)])

    async def after(store: SqliteStore) -> None:
        batch = await anext(store.watch(1))
        assert batch.records == (Record("a", None, 2),)

    on_file(path, before)
    on_file(path, after)


def test_two_stores_on_one_file_see_each_other(tmp_path: Path) -> None:
    """What one commits, the other loads, watches and compares with."""
    path = tmp_path / "store.db"

    async def run(store: SqliteStore) -> None:
        other = await SqliteStore.open(str(path))
        waiting = asyncio.ensure_future(anext(other.watch(0)))
        await store.commit([Write("a", b"1", 0)])

        assert (await waiting).records == (Record("a", b"1", 1),)
        assert await other.commit([Write("a", None, 1)]) == 2
        assert (await store.load()).records == ()
        await other.close()

    on_file(path, run)


def test_a_closed_store_is_one_file_with_our_id_and_version(tmp_path: Path) -> None:
    """An operator can copy it, and a newer version can recognise it."""
    path = filled(tmp_path / "store.db")

    assert [file.name for file in tmp_path.iterdir()] == ["store.db"]
    assert ask(path, "PRAGMA application_id") == [(APPLICATION_ID,)]
    assert ask(path, "PRAGMA user_version") == [(3,)]
    assert ask(path, "PRAGMA journal_mode") == [("wal",)]


def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    """A test cannot cut the power, so this asks SQLite if it syncs every commit (2 is FULL)."""
    opened = open_file(str(tmp_path / "store.db"), 1.0, None)
    with closing(opened.reader), closing(opened.writer):
        assert opened.writer.execute("PRAGMA synchronous").fetchall() == [(2,)]


@pytest.mark.parametrize("name", ["a b.db", "a?mode=memory", "a#b", "%41.db", ":memory:", "é.db"])
def test_special_characters_in_file_names_have_no_meaning(tmp_path: Path, name: str) -> None:
    """SQLite interprets some names; an operator would not find the file."""
    filled(tmp_path / name)

    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    """`touch`, a mounted volume or a crash in the first second can leave one."""
    path = tmp_path / "store.db"
    path.touch()

    filled(path)


def test_a_file_of_a_newer_version_is_rejected_unchanged(tmp_path: Path) -> None:
    """After a downgrade, half-understood records are worse than none."""
    path = filled(tmp_path / "store.db")
    ask(path, "PRAGMA user_version = 4")

    with rejects(path, "schema 4, from a newer Forewarn; expected schema 3"):
        on_file(path, nothing)


def test_a_file_without_a_schema_number_is_rejected_unchanged(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.db")
    ask(path, "PRAGMA user_version = 0")

    with rejects(path, "without a schema number"):
        on_file(path, nothing)


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TABLE record (key, value, revision)",),
        ("PRAGMA journal_mode = WAL", "CREATE TABLE counter (revision)"),
        ("PRAGMA application_id = 1196444487",),
        ("PRAGMA user_version = 1",),
    ],
    ids=["with tables", "in WAL mode", "with an id", "with a version"],
)
def test_a_database_of_another_program_is_rejected_unchanged(
    tmp_path: Path, statements: tuple[str, ...]
) -> None:
    """A mistyped path must not cost the operator another program's records."""
    path = tmp_path / "theirs.db"
    ask(path, *statements)

    with rejects(path, "another program's database"):
        on_file(path, nothing)


@pytest.mark.parametrize("content", [b"xy", b"scopes:\n  - name: web\n" * 100, b"\x00" * 8192])
def test_a_file_that_is_not_a_database_is_rejected_unchanged(
    tmp_path: Path, content: bytes
) -> None:
    """Passing the fleet file as `--store` is the most likely mistake."""
    path = tmp_path / "fleet.yaml"
    path.write_bytes(content)

    with rejects(path, "not an SQLite database; expected a Forewarn store"):
        on_file(path, nothing)


@pytest.mark.parametrize("damage", ["overwritten", "cut short"])
def test_a_damaged_file_is_rejected_unchanged(tmp_path: Path, damage: str) -> None:
    """Found at the start, it can be restored; found at a commit, it may have become worse."""
    path = filled(tmp_path / "store.db")
    with path.open("r+b") as file:
        if damage == "cut short":
            file.truncate(path.stat().st_size - 3 * 4096)
        else:
            file.seek(8 * 4096)
            file.write(b"\xa5" * 2 * 4096)

    with rejects(path, "the database file is corrupt"):
        on_file(path, nothing)


def test_damage_while_the_store_is_open_is_reported(tmp_path: Path) -> None:
    """A broken disk does not wait for a restart."""
    path = filled(tmp_path / "store.db")

    async def run(store: SqliteStore) -> None:
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (path.stat().st_size - 4096))
        with pytest.raises(StoreUnusable, match="corrupt"):
            await store.load()

    on_file(path, run)


def test_a_folder_is_rejected(tmp_path: Path) -> None:
    """`--store sqlite:////var/lib/forewarn` is half a path."""
    path = tmp_path / "folder"
    path.mkdir()

    with rejects(path, "a folder or a device; expected a file"):
        on_file(path, nothing)


def test_a_missing_folder_is_reported_and_not_created(tmp_path: Path) -> None:
    """It may be a volume that is not mounted yet: a store created now would be hidden later."""
    path = tmp_path / "absent" / "store.db"

    with rejects(path, f"there is no folder {path.parent}; expected one"):
        on_file(path, nothing)
    assert not path.parent.exists()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that anyone may write: root has all permissions, so these tests run as nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder
        folder.chmod(0o777)


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def names(user: int, group: int) -> str:
    return f"{pwd.getpwuid(user).pw_name}:{grp.getgrgid(group).gr_name}"


def test_a_read_only_file_is_rejected_with_a_fix(public_folder: Path) -> None:
    """A server that can only read could not record what it announces."""
    path = public_folder / "store.db"
    with an_ordinary_user():
        filled(path)
        path.chmod(0o444)

        with rejects(
            path,
            f"may not use {path}, which belongs to .* with mode 0444;"
            f" expected .*: chmod u\\+rw {path}$",
        ):
            on_file(path, nothing)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_read_only_folder_is_rejected(public_folder: Path, is_new: bool) -> None:
    """SQLite writes its log next to the file, so the folder must be writable too."""
    path = public_folder / "store.db"
    with an_ordinary_user():
        if not is_new:
            filled(path)
    public_folder.chmod(0o555)

    with (
        an_ordinary_user(),
        rejects(path, f"may not use {public_folder}, which belongs to .* with mode 0555; expected"),
    ):
        on_file(path, nothing)


@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ,
    reason="only root can make a file of another user's",
)
@pytest.mark.parametrize("beside", ["", "-wal", "-shm"])
def test_a_file_of_another_user_is_rejected_with_a_fix(public_folder: Path, beside: str) -> None:
    """A backup restored by root belongs to root, as does the log that `sqlite3` leaves behind."""
    path = public_folder / "store.db"
    with an_ordinary_user():
        filled(path)
        here = names(os.geteuid(), os.getegid())
    file = public_folder / f"store.db{beside}"
    file.touch()
    os.chown(file, 0, 0)
    file.chmod(0o600)

    with an_ordinary_user(), pytest.raises(StoreDenied) as denied:
        on_file(path, nothing)
    us, owner = here.partition(":")[0], names(0, 0)
    assert str(denied.value) == (
        f"{path}: user {us} may not use {file}, which belongs to {owner} with mode 0600;"
        f" expected a store that {us} may read and write: chown {here} {file}"
    )


def test_a_new_store_is_readable_by_its_user_only(tmp_path: Path) -> None:
    """It holds token digests and user data of VMs, and the usual umask is 022."""
    path, before = tmp_path / "store.db", os.umask(0o022)

    async def check(store: SqliteStore) -> None:
        await store.commit([Write("a", b"1", 0)])
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
        assert modes == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}

    try:
        on_file(path, check)
    finally:
        os.umask(before)


def test_an_existing_store_keeps_its_mode(tmp_path: Path) -> None:
    """An operator may have made it readable for a group."""
    path = filled(tmp_path / "store.db")
    path.chmod(0o640)

    on_file(path, fill_more)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_damaged_key_is_reported_as_a_damaged_store(tmp_path: Path) -> None:
    """Python's SQLite module raises an error of its own for it, which looked like a bug."""
    path = filled(tmp_path / "store.db")
    ask(path, "UPDATE record SET key = CAST(x'73ff' AS TEXT) WHERE key = 'scope/07'")

    async def check(store: SqliteStore) -> None:
        with pytest.raises(StoreUnusable, match="the database file is corrupt"):
            await store.load()
        with pytest.raises(StoreUnusable, match="the database file is corrupt"):
            await anext(store.watch(0))

    on_file(path, check)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE record SET value = 7 WHERE key = 'scope/07'",
        "UPDATE record SET revision = 'x' WHERE key = 'scope/07'",
        "UPDATE record SET key = x'00' WHERE key = 'scope/07'",
        "UPDATE history SET value = 'text' WHERE position = 7",
        "INSERT INTO lease VALUES ('lease/a', 'x', 1.0)",
        "UPDATE counter SET revision = 'x'",
        "DELETE FROM counter",
        "INSERT INTO counter VALUES (1, 0)",
        "DROP TABLE history",
        "DROP TABLE lease",
    ],
)
def test_rows_of_the_wrong_type_are_rejected_unchanged(tmp_path: Path, statement: str) -> None:
    """A flipped bit can change the type of a value, and SQLite's own check accepts that."""
    path = filled(tmp_path / "store.db")
    ask(path, statement)

    with rejects(path, "from a backup"):
        on_file(path, nothing)


def test_enabling_the_write_ahead_log_waits_for_a_writer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        for statement in SCHEMA:
            other.execute(statement)
        other.execute("BEGIN IMMEDIATE")
        Timer(0.2, other.execute, ["COMMIT"]).start()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            _enable_wal(connection, 20)
            assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


def test_a_commit_times_out_if_another_writer_is_stuck(
    tmp_path: Path,
) -> None:
    """A stuck process must not block others forever, and readers not at all."""
    path = filled(tmp_path / "store.db")

    async def run(store: SqliteStore) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as stuck:
            stuck.execute("BEGIN IMMEDIATE")
            committing = asyncio.ensure_future(
                store.commit([Write("a", b"1", 0)], entries=b"never")
            )
            assert len((await store.load()).records) == 40
            assert not committing.done()
            with pytest.raises(StoreLost, match="another process is writing"):
                async with asyncio.timeout(4):
                    await committing
            stuck.execute("ROLLBACK")
        assert await store.commit([Write("a", b"2", 0)]) == 41
        assert (await store.load("a")).records == (Record("a", b"2", 41),)

    on_file(path, run, busy_seconds=0.3)


@pytest.mark.parametrize("fate", ["removed", "replaced"])
def test_a_file_that_is_removed_or_replaced_is_rejected(tmp_path: Path, fate: str) -> None:
    """SQLite would keep writing to a file without a name, and all of it would be lost."""
    path = filled(tmp_path / "store.db")

    async def run(store: SqliteStore) -> None:
        path.unlink()
        if fate == "replaced":
            path.write_bytes(b"")
        with pytest.raises(StoreUnusable, match="removed or replaced"):
            await store.commit([Write("a", b"1", 0)])
        with pytest.raises(StoreUnusable, match="removed or replaced"):
            await store.load()

    on_file(path, run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 and "CI" not in os.environ:
        pytest.skip("only root may mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.system
def test_a_full_disk_fails_commits_until_there_is_space(
    small_disk: Path,
) -> None:
    """Reading needs no space, and freeing some must be enough to continue."""
    path = small_disk / "store.db"
    ballast = small_disk / "ballast"

    async def run(store: SqliteStore) -> None:
        await store.commit([Write("before", b"1", 0)], entries=b"before")
        ballast.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
        for _ in range(3):
            with pytest.raises(
                StoreUnusable, match="the disk is full and nothing was written; expected free space"
            ):
                await store.commit([Write("big", b"x" * 100_000, 0)], entries=b"never")
        assert [record.key for record in (await store.load()).records] == ["before"]

        ballast.unlink()
        assert await store.commit([Write("big", b"x" * 100_000, 0)], entries=b"after") == 2
        assert (await anext(store.watch(1))).records == (Record("big", b"x" * 100_000, 2),)
        assert [value.value for value in await store.history()] == [b"before", b"after"]

    on_file(path, run)
    on_file(path, nothing)


@pytest.mark.system
def test_a_full_disk_fails_a_new_store(small_disk: Path) -> None:
    """The server must report it and stop."""
    (small_disk / "ballast").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))

    with pytest.raises(StoreUnusable, match="the disk is full"):
        on_file(small_disk / "store.db", nothing)


@pytest.mark.system
def test_a_full_disk_fails_opening_and_damages_nothing(small_disk: Path) -> None:
    """A restart while the disk is full must lose nothing."""
    path = small_disk / "store.db"
    ballast = small_disk / "ballast"

    async def before(store: SqliteStore) -> None:
        await store.commit([Write("a", b"1", 0)])

    async def after(store: SqliteStore) -> None:
        assert (await store.load()).records == (Record("a", b"1", 1),)

    on_file(path, before)
    ballast.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
    with pytest.raises(
        StoreLost, match="has no space for the log's index; expected one that can be written"
    ):
        on_file(path, nothing)

    ballast.unlink()
    on_file(path, after)
