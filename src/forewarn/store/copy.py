"""Replace an SQLite store by a copy of a backup: files, locks and owners.

`engine/restore.py` changes what must change inside the copy. The target is replaced in one step at
the end; any failure before leaves it as it was.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from forewarn.errors import Invalid, Refused, StoreDenied, StoreUnusable
from forewarn.store.sqlite_file import FILE_MODE, check_path, copy_store

# Where SQLite locks a file (https://www.sqlite.org/fileformat.html#the_lock_byte_page). In WAL mode
# every process that has the file open holds a shared lock on these bytes.
SHARED_FIRST, SHARED_SIZE = 0x40000002, 510


@contextmanager
def restoring(backup: str, target: str, *, aside: str, may_replace: bool) -> Iterator[str]:
    """Yield the path of a copy of the backup, to be changed; then move it to the target.

    An existing target is kept under the name `aside`. It is replaced only with `may_replace` and
    if no process has it open.
    """
    backup, target = os.path.realpath(backup), os.path.realpath(target)
    _check_backup(backup, target)
    check_path(target)
    is_new = not os.path.exists(target)
    if not is_new:
        _check_replaceable(target, may_replace=may_replace)
    copy = f"{target}.restoring-{os.getpid()}"
    try:
        copy_store(backup, copy)
        yield copy
        _set_owner(copy, like=os.path.dirname(target) if is_new else target)
        _replace(copy, target, aside, is_new=is_new)
        _sync(os.path.dirname(target))
    except OSError as error:
        raise StoreUnusable(
            f"{target}: restore failed: {error.strerror or error}; check free space and permissions"
        ) from error
    finally:
        for file in (copy, f"{copy}-wal", f"{copy}-shm"):
            with suppress(FileNotFoundError):
                os.unlink(file)


def _check_backup(backup: str, target: str) -> None:
    if backup == target:
        raise Invalid(f"{backup} is both backup and target; expected two files", file=backup)
    if not os.path.isfile(backup) or not os.access(backup, os.R_OK, effective_ids=True):
        raise Invalid(
            f"the backup {backup} cannot be read; expected a file that this user may read",
            file=backup,
        )


def _check_replaceable(target: str, *, may_replace: bool) -> None:
    if not may_replace:
        raise Refused(
            f"{target} exists; expected --force, which keeps it under another name,"
            " or another target",
            file=target,
        )
    owner, uid = os.stat(target).st_uid, os.geteuid()
    if uid not in (0, owner):
        raise StoreDenied(
            f"{target} belongs to user {owner}, and the restored file would belong to another user;"
            " run this as that user or as root"
        )
    with _lock_alone(target):
        return


@contextmanager
def _lock_alone(target: str) -> Iterator[None]:
    """No other process can have the file open as a store within this context.

    Closing any descriptor of the file in this process would drop the lock, so SQLite must not be
    used on it meanwhile.
    """
    descriptor = os.open(target, os.O_RDWR)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, SHARED_SIZE, SHARED_FIRST)
        except OSError as error:
            raise Refused(
                f"{target} is in use; expected that no service has it open: stop it first",
                file=target,
            ) from error
        yield
    finally:
        os.close(descriptor)


def _set_owner(copy: str, like: str) -> None:
    """The service must be able to open what root has restored."""
    status = os.stat(like)
    os.chmod(copy, stat.S_IMODE(status.st_mode) if stat.S_ISREG(status.st_mode) else FILE_MODE)
    if os.geteuid() == 0:
        os.chown(copy, status.st_uid, status.st_gid)


def _replace(copy: str, target: str, aside: str, *, is_new: bool) -> None:
    """Move the copy to the target under the lock, so that no server opens it meanwhile.

    SQLite would replay an old log into the new file and damage it, so the log is moved first. A
    crash may leave a log without its file.
    """
    # Create the name first: this fails if a server has created the target meanwhile.
    if is_new:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
    with _lock_alone(target), ExitStack() as undo:
        if is_new:
            undo.callback(os.unlink, target)
        else:
            os.link(target, aside)
            undo.callback(os.unlink, aside)
        with suppress(FileNotFoundError):
            os.rename(f"{target}-wal", f"{aside}-wal")
            undo.callback(os.rename, f"{aside}-wal", f"{target}-wal")
        with suppress(FileNotFoundError):
            os.unlink(f"{target}-shm")
        os.replace(copy, target)
        undo.pop_all()


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
