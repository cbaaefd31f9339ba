"""A backup in the place of a store: which files change, when, and whose they are."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from forewarn.errors import Error, Invalid, Refused, StoreUnusable
from forewarn.store.base import Write
from forewarn.store.copy import restoring
from forewarn.store.sqlite import SqliteStore

NOBODY = 65534
HOLD = """
import asyncio, sys
from forewarn.store.sqlite import SqliteStore

async def hold():
    store = await SqliteStore.open(sys.argv[1])
    await store.load()
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(hold())
"""
LOCK = """
import fcntl, os, sys

descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(descriptor, fcntl.LOCK_EX, 510, 0x40000002)
print("locked", flush=True)
sys.stdin.read()
"""


def store_with(path: Path, value: bytes) -> Path:
    async def fill() -> None:
        store = await SqliteStore.open(str(path))
        await store.commit([Write("a", value, 0)])
        await store.close()

    asyncio.run(fill())
    return path


def value_of(path: Path) -> bytes | None:
    async def look() -> bytes | None:
        store = await SqliteStore.open(str(path))
        try:
            return (await store.load("a")).records[0].value
        finally:
            await store.close()

    return asyncio.run(look())


def restore(backup: Path, target: Path, *, may_replace: bool = True) -> Path:
    aside = target.with_name("aside.db")
    with restoring(str(backup), str(target), aside=str(aside), may_replace=may_replace):
        pass
    return aside


@contextmanager
def program(text: str, path: Path) -> Iterator[None]:
    """Another process that has done its work on the file, and keeps it open in the block."""
    with subprocess.Popen(
        [sys.executable, "-c", text, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(30)


def test_a_backup_becomes_the_store_where_there_was_none(tmp_path: Path) -> None:
    backup, target = store_with(tmp_path / "backup.db", b"old"), tmp_path / "store.db"
    content = backup.read_bytes()

    restore(backup, target, may_replace=False)

    assert value_of(target) == b"old"
    assert target.stat().st_mode & 0o777 == 0o600
    assert backup.read_bytes() == content
    assert sorted(file.name for file in tmp_path.iterdir()) == ["backup.db", "store.db"]


def test_existing_store_is_replaced_only_with_force_and_kept(tmp_path: Path) -> None:
    """A restore to the wrong place, or from the wrong backup, can be undone."""
    backup, target = (
        store_with(tmp_path / "backup.db", b"old"),
        store_with(tmp_path / "store.db", b"new"),
    )

    with pytest.raises(Refused, match=r"exists; expected --force"):
        restore(backup, target, may_replace=False)
    assert value_of(target) == b"new"

    aside = restore(backup, target)
    assert (value_of(target), value_of(aside)) == (b"old", b"new")


def test_a_store_that_is_in_use_is_not_replaced(tmp_path: Path) -> None:
    """The service would go on writing into the file that was moved away."""
    backup, target = (
        store_with(tmp_path / "backup.db", b"old"),
        store_with(tmp_path / "store.db", b"new"),
    )

    with (
        program(HOLD, target),
        pytest.raises(Refused, match="is in use; expected that no service has it open"),
    ):
        restore(backup, target)
    assert value_of(target) == b"new"


def test_store_opened_during_a_restore_is_not_replaced(tmp_path: Path) -> None:
    """systemd may start the service in the middle of it."""
    backup, target = (
        store_with(tmp_path / "backup.db", b"old"),
        store_with(tmp_path / "store.db", b"new"),
    )

    with (
        ExitStack() as others,
        pytest.raises(Refused, match="is in use"),
        restoring(str(backup), str(target), aside=str(tmp_path / "aside.db"), may_replace=True),
    ):
        others.enter_context(program(HOLD, target))
    assert value_of(target) == b"new"


def test_a_restore_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    backup, target = (
        store_with(tmp_path / "backup.db", b"old"),
        store_with(tmp_path / "store.db", b"new"),
    )
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    with (
        pytest.raises(ZeroDivisionError),
        restoring(str(backup), str(target), aside=str(tmp_path / "aside"), may_replace=True),
    ):
        raise ZeroDivisionError
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_damaged_store_is_replaced_and_its_log_goes_with_it(tmp_path: Path) -> None:
    """A damaged store is the usual reason for a restore.

    Its log beside the new file would damage that one too.
    """
    backup, target = (
        store_with(tmp_path / "backup.db", b"old"),
        store_with(tmp_path / "store.db", b"new"),
    )
    target.write_bytes(target.read_bytes()[:5000])
    log = tmp_path / "store.db-wal"
    log.write_bytes(b"frames")

    aside = restore(backup, target)

    assert value_of(target) == b"old"
    assert aside.stat().st_size == 5000
    assert aside.with_name("aside.db-wal").read_bytes() == b"frames"


def log_without_store(path: Path, value: bytes) -> Path:
    """What is left beside a store after a crash, if its file alone was moved away."""

    async def crash() -> bytes:
        store = await SqliteStore.open(str(path))
        await store.commit([Write("a", value, 0)])
        content = log.read_bytes()
        await store.close()
        return content

    log = path.with_name(f"{path.name}-wal")
    content = asyncio.run(crash())
    path.unlink()
    log.write_bytes(content)
    return log


def test_restored_store_ignores_a_log_left_by_a_store_that_is_gone(tmp_path: Path) -> None:
    """SQLite would replay the log into the new file.

    It may hold the last changes of the lost store, so it is kept.
    """
    backup, target = store_with(tmp_path / "backup.db", b"old"), tmp_path / "store.db"
    content = log_without_store(target, b"new").read_bytes()

    aside = restore(backup, target, may_replace=False)

    assert value_of(target) == b"old"
    assert aside.with_name("aside.db-wal").read_bytes() == content
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "aside.db-wal",
        "backup.db",
        "store.db",
    ]


def test_log_of_a_store_that_appears_during_a_restore_stays_with_it(tmp_path: Path) -> None:
    """The target did not exist when the restore began; a service that started meanwhile needs its
    log.
    """
    backup, target = store_with(tmp_path / "backup.db", b"old"), tmp_path / "store.db"

    with (
        ExitStack() as others,
        pytest.raises(
            StoreUnusable, match="restore failed: File exists; check free space and permissions"
        ),
        restoring(str(backup), str(target), aside=str(tmp_path / "aside.db"), may_replace=False),
    ):
        others.enter_context(program(HOLD, target))
    assert not (tmp_path / "aside.db-wal").exists()


def replace_by_folder(file: Path) -> None:
    """What cannot take the place of a file."""
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("is_new", [True, False])
def test_failed_replacement_puts_the_log_back(tmp_path: Path, is_new: bool) -> None:
    """Without its log the old store lacks its last changes."""
    backup, target = store_with(tmp_path / "backup.db", b"old"), tmp_path / "store.db"
    if not is_new:
        store_with(target, b"new")
    (tmp_path / "store.db-wal").write_bytes(b"frames")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    with (
        pytest.raises(OSError, match="directory"),
        restoring(
            str(backup), str(target), aside=str(tmp_path / "aside.db"), may_replace=True
        ) as copy,
    ):
        replace_by_folder(Path(copy))
    Path(copy).rmdir()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA application_id = 1")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (damaged, StoreUnusable, "corrupt"),
        (foreign, StoreUnusable, "another program's database"),
        (empty, StoreUnusable, "the file is empty; expected a Forewarn store"),
        (missing, Invalid, "cannot be read"),
    ],
)
def test_incomplete_backup_is_rejected(
    tmp_path: Path, spoil: object, kind: type[Error], message: str
) -> None:
    backup, target = (
        store_with(tmp_path / "backup.db", b"old"),
        store_with(tmp_path / "store.db", b"new"),
    )
    assert callable(spoil)
    spoil(backup)

    with pytest.raises(kind, match=f"{backup}.*{message}"):
        restore(backup, target)
    assert value_of(target) == b"new"


def test_a_store_is_not_restored_from_itself(tmp_path: Path) -> None:
    target = store_with(tmp_path / "store.db", b"new")
    (tmp_path / "link.db").symlink_to(target)

    with pytest.raises(Invalid, match="expected two files"):
        restore(tmp_path / "link.db", target)


@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ, reason="only root can give files away"
)
@pytest.mark.parametrize("is_new", [True, False])
def test_what_root_restores_belongs_to_the_service(tmp_path: Path, is_new: bool) -> None:
    """The service runs as a user of its own, and could not open a file of root's."""
    backup, folder = store_with(tmp_path / "backup.db", b"old"), tmp_path / "state"
    folder.mkdir()
    target = folder / "store.db"
    if not is_new:
        store_with(target, b"new")
        os.chown(target, NOBODY, NOBODY)
        target.chmod(0o640)
    os.chown(folder, NOBODY, NOBODY)

    restore(backup, target)

    found = target.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (
        NOBODY,
        NOBODY,
        0o600 if is_new else 0o640,
    )


def test_service_opens_the_new_store_after_a_restore(
    tmp_path: Path,
) -> None:
    """It has opened the old file and waits for its lock; what it wrote there would be lost."""
    target, other = (
        store_with(tmp_path / "store.db", b"new"),
        store_with(tmp_path / "other.db", b"old"),
    )

    def is_open() -> bool:
        return str(target) in [
            os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
        ]

    async def main() -> None:
        with program(LOCK, target):
            opening = asyncio.ensure_future(SqliteStore.open(str(target), busy_seconds=30))
            while not is_open():
                assert not opening.done()
                await asyncio.sleep(0)
            other.replace(target)
        with pytest.raises(StoreUnusable, match="removed or replaced"):
            await opening

    asyncio.run(main())
