"""What only a file can do: be reopened, be shared, be damaged, be somebody else's, be refused by
its disk.
"""

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
from forewarn.store.base import Note, Record, Write
from forewarn.store.sqlite import APPLICATION_ID, SCHEMA, SqliteStore, _log_ahead, _prepare

NOBODY = 65534
STORY_SECONDS_MAX = 20
Story = Callable[[SqliteStore], Awaitable[None]]


def on_file(path: Path, story: Story, busy_seconds: float = 5.0) -> None:
    async def told() -> None:
        store = await SqliteStore.open(str(path), busy_seconds=busy_seconds)
        try:
            async with asyncio.timeout(STORY_SECONDS_MAX):
                await story(store)
        finally:
            await store.close()

    asyncio.run(told())


async def nothing(store: SqliteStore) -> None:
    """The story of a store that is only opened and closed."""


async def fill(store: SqliteStore) -> None:
    for number in range(40):
        await store.commit([Write(f"scope/{number:02}", b"x" * 2000, 0)], [b"scope %d" % number])


async def fill_more(store: SqliteStore) -> None:
    await store.commit([Write("more", b"x", 0)])


def filled(path: Path) -> Path:
    on_file(path, fill)
    return path


def ask(path: Path, *statements: str) -> list[tuple[object, ...]]:
    """What SQLite itself says of the file: the rows of the last statement."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        connection.commit()
    return rows


@contextmanager
def refused(path: Path, message: str) -> Iterator[None]:
    """Opening it raises StoreUnusable, in one line that names the file, and changes nothing on the
    disk.
    """
    before = {file: file.read_bytes() for file in path.parent.glob("*") if file.is_file()}
    with pytest.raises(StoreUnusable, match=message) as refusal:
        yield
    assert str(refusal.value).startswith(f"{path}: ")
    assert "expected" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert {file: file.read_bytes() for file in path.parent.glob("*") if file.is_file()} == before


def test_a_store_that_is_reopened_holds_all_it_held(tmp_path: Path) -> None:
    """A restart of the server is not an event in anybody's life."""
    path = tmp_path / "store.db"

    async def before(store: SqliteStore) -> None:
        await store.commit([Write("a", b"1", 0), Write("b", b"1", 0)], [b"made"])
        await store.commit([Write("b", None, 1)], [b"gone"])

    async def after(store: SqliteStore) -> None:
        loaded = await store.load()
        assert (loaded.revision, loaded.records) == (2, (Record("a", b"1", 1),))
        assert await store.history() == (Note(1, b"made"), Note(2, b"gone"))
        assert await store.commit([Write("b", b"2", 0)], [b"back"]) == 3
        assert (await store.history(2)) == (Note(3, b"back"),)

    on_file(path, before)
    on_file(path, after)


def test_a_deletion_is_told_to_a_watch_that_was_not_there(tmp_path: Path) -> None:
    """A server that comes back asks for what changed since; a scope that was removed is among it."""
    path = tmp_path / "store.db"

    async def before(store: SqliteStore) -> None:
        await store.commit([Write("a", b"1", 0)])
        await store.commit([Write("a", None, 1)])

    async def after(store: SqliteStore) -> None:
        batch = await anext(store.watch(1))
        assert batch.records == (Record("a", None, 2),)

    on_file(path, before)
    on_file(path, after)


def test_two_stores_on_one_file_are_one_store(tmp_path: Path) -> None:
    """What one commits the other loads, watches and must build on."""
    path = tmp_path / "store.db"

    async def story(one: SqliteStore) -> None:
        other = await SqliteStore.open(str(path))
        waiting = asyncio.ensure_future(anext(other.watch(0)))
        await one.commit([Write("a", b"1", 0)], [b"made"])

        assert (await waiting).records == (Record("a", b"1", 1),)
        assert await other.commit([Write("a", None, 1)]) == 2
        assert (await one.load()).records == ()
        await other.close()

    on_file(path, story)


def test_a_closed_store_is_one_file_that_says_whose_it_is(tmp_path: Path) -> None:
    """An operator may copy it; a newer Forewarn will know what it holds."""
    path = filled(tmp_path / "store.db")

    assert [file.name for file in tmp_path.iterdir()] == ["store.db"]
    assert ask(path, "PRAGMA application_id") == [(APPLICATION_ID,)]
    assert ask(path, "PRAGMA user_version") == [(2,)]
    assert ask(path, "PRAGMA journal_mode") == [("wal",)]


def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    """No test can pull the plug, so this one asks SQLite whether it syncs at every commit (2 is
    FULL).
    """
    with closing(_prepare(str(tmp_path / "store.db"), 1.0)) as connection:
        assert connection.execute("PRAGMA synchronous").fetchall() == [(2,)]


@pytest.mark.parametrize("name", ["a b.db", "a?mode=memory", "a#b", "%41.db", ":memory:", "é.db"])
def test_any_name_of_a_file_is_just_a_name(tmp_path: Path, name: str) -> None:
    """SQLite reads meaning into some names; an operator does not, and would look for the file in
    vain.
    """
    filled(tmp_path / name)

    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    """`touch`, a mounted volume or a crash in the first second leave one, and it is nobody's."""
    path = tmp_path / "store.db"
    path.touch()

    filled(path)


def test_a_file_from_a_newer_forewarn_is_refused_and_left_alone(tmp_path: Path) -> None:
    """After a downgrade, half-understood records are worse than none."""
    path = filled(tmp_path / "store.db")
    ask(path, "PRAGMA user_version = 3")

    with refused(path, "schema 3, from a newer Forewarn; expected schema 2"):
        on_file(path, nothing)


def test_a_file_of_ours_that_lost_its_number_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.db")
    ask(path, "PRAGMA user_version = 0")

    with refused(path, "without a schema number"):
        on_file(path, nothing)


def test_a_damaged_file_from_an_older_forewarn_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.db")
    ask(path, "ALTER TABLE counter DROP COLUMN forgotten", "PRAGMA user_version = 1")
    with path.open("r+b") as file:
        file.seek(8 * 4096)
        file.write(b"\xa5" * 2 * 4096)

    with refused(path, "damaged; expected a whole database"):
        on_file(path, nothing)


def test_a_file_from_an_older_forewarn_is_brought_up_to_date_with_all_it_holds(
    tmp_path: Path,
) -> None:
    """An upgrade of the program is not an event in anybody's life either."""
    path = filled(tmp_path / "store.db")
    ask(path, "ALTER TABLE counter DROP COLUMN forgotten", "PRAGMA user_version = 1")

    async def look(store: SqliteStore) -> None:
        loaded = await store.load()
        assert loaded.records
        assert await store.forget(loaded.revision) == 0

    on_file(path, look)
    assert ask(path, "PRAGMA user_version") == [(2,)]


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
def test_somebody_elses_database_is_refused_and_left_alone(
    tmp_path: Path, statements: tuple[str, ...]
) -> None:
    """A mistyped path must not cost the operator another program's records."""
    path = tmp_path / "theirs.db"
    ask(path, *statements)

    with refused(path, "another program's database"):
        on_file(path, nothing)


@pytest.mark.parametrize("content", [b"xy", b"scopes:\n  - name: web\n" * 100, b"\x00" * 8192])
def test_a_file_that_is_no_database_is_refused_and_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    """`--store` given the fleet file is the likeliest slip of all."""
    path = tmp_path / "fleet.yaml"
    path.write_bytes(content)

    with refused(path, "not an SQLite database; expected a Forewarn store"):
        on_file(path, nothing)


@pytest.mark.parametrize("damage", ["overwritten", "cut short"])
def test_a_damaged_file_is_refused_when_it_is_opened_and_left_alone(
    tmp_path: Path, damage: str
) -> None:
    """Found at the start, it is restored from a copy; found at a commit, it may have been made
    worse.
    """
    path = filled(tmp_path / "store.db")
    with path.open("r+b") as file:
        if damage == "cut short":
            file.truncate(path.stat().st_size - 3 * 4096)
        else:
            file.seek(8 * 4096)
            file.write(b"\xa5" * 2 * 4096)

    with refused(path, "damaged; expected a whole database"):
        on_file(path, nothing)


def test_damage_that_comes_later_is_told_by_whoever_reads_it(tmp_path: Path) -> None:
    """A broken disk does not wait for a restart."""
    path = filled(tmp_path / "store.db")

    async def story(store: SqliteStore) -> None:
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (path.stat().st_size - 4096))
        with pytest.raises(StoreUnusable, match="damaged"):
            await store.load()

    on_file(path, story)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    """`--store sqlite:////var/lib/forewarn` is half a path."""
    path = tmp_path / "folder"
    path.mkdir()

    with refused(path, "a folder or a device; expected a file"):
        on_file(path, nothing)


def test_a_missing_folder_is_named_and_not_made(tmp_path: Path) -> None:
    """It may be a volume that is not mounted yet: a store made below it would vanish under the
    mount.
    """
    path = tmp_path / "absent" / "store.db"

    with refused(path, f"there is no folder {path.parent}; expected one"):
        on_file(path, nothing)
    assert not path.parent.exists()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that an ordinary user may enter and write: root is refused nothing, so these tests
    are told as nobody.
    """
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


def test_a_read_only_file_is_refused_with_the_command_that_helps(public_folder: Path) -> None:
    """A server that can only read would promise a notice and never record it."""
    path = public_folder / "store.db"
    with an_ordinary_user():
        filled(path)
        path.chmod(0o444)

        with refused(
            path,
            f"may not use {path}, which belongs to .* with mode 0444; expected .*: chmod u\\+rw {path}$",
        ):
            on_file(path, nothing)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_read_only_folder_is_refused(public_folder: Path, is_new: bool) -> None:
    """SQLite keeps its log beside the file, so a writable file in a read-only folder is no store
    either.
    """
    path = public_folder / "store.db"
    with an_ordinary_user():
        if not is_new:
            filled(path)
    public_folder.chmod(0o555)

    with (
        an_ordinary_user(),
        refused(path, f"may not use {public_folder}, which belongs to .* with mode 0555; expected"),
    ):
        on_file(path, nothing)


@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ,
    reason="only root can make a file of another user's",
)
@pytest.mark.parametrize("beside", ["", "-wal", "-shm"])
def test_a_file_of_another_user_is_refused_with_the_command_that_helps(
    public_folder: Path, beside: str
) -> None:
    """A backup restored as root belongs to root, and so does the log that `sqlite3` leaves behind
    as root.
    """
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


def test_a_new_store_can_be_read_by_its_user_alone(tmp_path: Path) -> None:
    """It holds the digests of tokens and the user data of VMs; a umask of 022 is what most programs
    run with.
    """
    path, before = tmp_path / "store.db", os.umask(0o022)

    async def look(store: SqliteStore) -> None:
        await store.commit([Write("a", b"1", 0)])
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
        assert modes == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}

    try:
        on_file(path, look)
    finally:
        os.umask(before)


def test_an_existing_store_keeps_its_mode(tmp_path: Path) -> None:
    """An operator may have given a group the right to read it; that is not ours to take away."""
    path = filled(tmp_path / "store.db")
    path.chmod(0o640)

    on_file(path, fill_more)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_damaged_key_is_reported_as_a_damaged_store(tmp_path: Path) -> None:
    """Python's SQLite module raises an error of its own for it, which looked like a bug in
    Forewarn.
    """
    path = filled(tmp_path / "store.db")
    ask(path, "UPDATE record SET key = CAST(x'73ff' AS TEXT) WHERE key = 'scope/07'")

    async def look(store: SqliteStore) -> None:
        with pytest.raises(StoreUnusable, match="damaged; expected a whole database"):
            await store.load()
        with pytest.raises(StoreUnusable, match="damaged; expected a whole database"):
            await anext(store.watch(0))

    on_file(path, look)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE record SET value = 7 WHERE key = 'scope/07'",
        "UPDATE record SET revision = 'x' WHERE key = 'scope/07'",
        "UPDATE record SET key = x'00' WHERE key = 'scope/07'",
        "UPDATE note SET body = 'text' WHERE number = 7",
        "UPDATE counter SET revision = 'x'",
        "DELETE FROM counter",
        "INSERT INTO counter (revision) VALUES (1)",
        "DROP TABLE note",
    ],
)
def test_rows_that_no_forewarn_writes_are_refused_and_left_alone(
    tmp_path: Path, statement: str
) -> None:
    """A single flipped bit turns a value into one of another type, and SQLite's own check lets it
    pass.
    """
    path = filled(tmp_path / "store.db")
    ask(path, statement)

    with refused(path, "restore it from a copy"):
        on_file(path, nothing)


def test_the_write_ahead_log_waits_for_another_who_writes_while_the_file_is_made(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        for statement in SCHEMA:
            other.execute(statement)
        other.execute("BEGIN IMMEDIATE")
        Timer(0.2, other.execute, ["COMMIT"]).start()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            _log_ahead(connection, 20)
            assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


def test_a_writer_that_holds_the_file_too_long_makes_the_commit_lost_and_the_store_goes_on(
    tmp_path: Path,
) -> None:
    """A stuck process must not stop the others for ever; who reads is not stopped at all."""
    path = filled(tmp_path / "store.db")

    async def story(store: SqliteStore) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as stuck:
            stuck.execute("BEGIN IMMEDIATE")
            committing = asyncio.ensure_future(store.commit([Write("a", b"1", 0)], [b"never"]))
            assert len((await store.load()).records) == 40
            assert not committing.done()
            with pytest.raises(StoreLost, match="another writer holds it"):
                async with asyncio.timeout(4):
                    await committing
            stuck.execute("ROLLBACK")
        assert await store.commit([Write("a", b"2", 0)], [b"made"]) == 41
        assert (await store.load("a")).records == (Record("a", b"2", 41),)

    on_file(path, story, busy_seconds=0.3)


@pytest.mark.parametrize("fate", ["removed", "replaced"])
def test_a_file_that_is_removed_or_replaced_under_the_store_is_refused(
    tmp_path: Path, fate: str
) -> None:
    """SQLite would go on writing into a file that has no name, and every promise kept there is
    lost.
    """
    path = filled(tmp_path / "store.db")

    async def story(store: SqliteStore) -> None:
        path.unlink()
        if fate == "replaced":
            path.write_bytes(b"")
        with pytest.raises(StoreUnusable, match="removed or replaced"):
            await store.commit([Write("a", b"1", 0)])
        with pytest.raises(StoreUnusable, match="removed or replaced"):
            await store.load()

    on_file(path, story)


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
def test_a_full_disk_refuses_the_commit_and_the_store_goes_on_when_there_is_space(
    small_disk: Path,
) -> None:
    """Reading needs no space, and an operator who makes some must not have to restart anything."""
    path = small_disk / "store.db"
    ballast = small_disk / "ballast"

    async def story(store: SqliteStore) -> None:
        await store.commit([Write("before", b"1", 0)], [b"before"])
        ballast.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
        for _ in range(3):
            with pytest.raises(
                StoreUnusable, match="the disk is full and nothing was written; expected free space"
            ):
                await store.commit([Write("big", b"x" * 100_000, 0)], [b"never"])
        assert [record.key for record in (await store.load()).records] == ["before"]

        ballast.unlink()
        assert await store.commit([Write("big", b"x" * 100_000, 0)], [b"after"]) == 2
        assert (await anext(store.watch(1))).records == (Record("big", b"x" * 100_000, 2),)
        assert [note.body for note in await store.history()] == [b"before", b"after"]

    on_file(path, story)
    on_file(path, nothing)


@pytest.mark.system
def test_a_full_disk_refuses_a_new_store(small_disk: Path) -> None:
    """The server says so and stops, instead of starting without a memory."""
    (small_disk / "ballast").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))

    with pytest.raises(StoreUnusable, match="the disk is full"):
        on_file(small_disk / "store.db", nothing)


@pytest.mark.system
def test_a_full_disk_refuses_to_open_a_store_and_leaves_it_whole(small_disk: Path) -> None:
    """A restart while the disk is full must cost nothing but time."""
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
