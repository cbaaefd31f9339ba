"""A backup put in the place of an SQLite store: the files, who has them open, and whose they are.

What must change inside the copy is settled by `engine/restore.py`. The target is replaced in one
step, at the end: until then it is as it was, and whatever goes wrong leaves it so.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from forewarn.errors import Invalid, Refused, StoreDenied, StoreUnusable
from forewarn.store.sqlite import FILE_MODE, check_path, copy_store

# Where SQLite keeps its locks in a file
# (https://www.sqlite.org/fileformat.html#the_lock_byte_page). Everybody who has the file open in
# WAL mode holds a shared lock on these bytes.
SHARED_FIRST, SHARED_SIZE = 0x40000002, 510


@contextmanager
def restoring(backup: str, target: str, *, aside: str, may_replace: bool) -> Iterator[str]:
    """Within this the copy of the backup can be changed, at the path that is given; afterwards it
    is the target.

    A target that exists is kept under the name `aside`, and is replaced only with `may_replace` and
    while nobody has it open.
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
        _give_to_owner(copy, like=os.path.dirname(target) if is_new else target)
        _swap(copy, target, aside, is_new=is_new)
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
        raise Invalid(f"{backup} is the backup and the target; expected two files", file=backup)
    if not os.path.isfile(backup) or not os.access(backup, os.R_OK, effective_ids=True):
        raise Invalid(
            f"the backup {backup} cannot be read; expected a file that this user may read",
            file=backup,
        )


def _check_replaceable(target: str, *, may_replace: bool) -> None:
    if not may_replace:
        raise Refused(
            f"{target} exists; expected --force, which keeps it under another name, or another target",
            file=target,
        )
    owner, us = os.stat(target).st_uid, os.geteuid()
    if us not in (0, owner):
        raise StoreDenied(
            f"{target} belongs to user {owner}, and the restored file would belong to another user;"
            " run this as that user or as root"
        )
    with _alone(target):
        return


@contextmanager
def _alone(target: str) -> Iterator[None]:
    """Within this nobody else can have the file open as a store.

    Closing any descriptor of it ends this, so SQLite must not.
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


def _give_to_owner(copy: str, like: str) -> None:
    """The service must be able to open what root has restored."""
    found = os.stat(like)
    os.chmod(copy, stat.S_IMODE(found.st_mode) if stat.S_ISREG(found.st_mode) else FILE_MODE)
    if os.geteuid() == 0:
        os.chown(copy, found.st_uid, found.st_gid)


def _swap(copy: str, target: str, aside: str, *, is_new: bool) -> None:
    """Under the lock, so that no server opens the target now.

    SQLite would replay an old log beside the new file, and damage it: the log goes first. A crash
    may leave one without its file.
    """
    # its name is taken first: this fails if somebody has made the target meanwhile, and the log is
    # theirs
    if is_new:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
    with _alone(target), ExitStack() as undo:
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
