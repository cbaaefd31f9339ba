"""Refuses files that other users may write, as ssh does: the agent runs them, or does what they
say, with its own rights, and these are often root's.

The file, each folder on the way to it, and each symbolic link must belong to root or to the agent's
user, and neither their group nor others may write them. Three exceptions: a folder with the sticky
bit, such as /tmp, where only the owner of an entry can replace it, and the entry is checked too;
a group that has no other member, unless there is an ACL, which may name more users; and a
read-only file system, such as a mounted ConfigMap.
Members are those that the system lists. A directory service that does not list its users, as sssd
without `enumerate`, may have a user with this primary group that is not seen.

The first exception is not for a folder of hooks. All files in it are run, so others may not add one
either: with fs.protected_hardlinks=0, that could be a link to any program of root.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from forewarn.errors import Invalid

ACL_ATTRIBUTE = "system.posix_acl_access"
LINKS_MAX = 40
"""The limit of Linux."""


def check_ownership(path: Path, *, is_run: bool = False) -> None:
    """Raises Invalid if another user could change what the path leads to. A path that does not
    exist is for the caller to report. Windows has other permissions, which are not checked.

    `is_run`: it is a program, or a folder whose programs are run.
    """
    if not hasattr(os, "geteuid"):
        return
    trusted = (0, os.geteuid())
    folder = os.path.realpath(path) if is_run and path.is_dir() else ""
    for entry, found in _walk(path):
        if problem := _find_problem(entry, found, trusted, is_sticky_safe=entry != folder):
            reason, fix = problem
            raise Invalid(
                f"{entry} {reason}, so other users could change what the agent does; "
                f"expected {path} to be writable by root and the agent's user only: {fix} {entry}",
                file=str(path),
            )


def _walk(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Each folder, link and file that is visited when the path is opened, from the root on."""
    current, links = "/", 0
    # Not abspath, which removes `link/..` although that may be elsewhere.
    names = list(reversed(os.path.join(os.getcwd(), path).split("/")))
    yield current, os.lstat(current)
    while names:  # ends: a path is finite, and so is the number of links
        name = names.pop()
        if name in ("", "."):
            continue
        if name == "..":
            current = os.path.dirname(current)
            continue
        entry = os.path.join(current, name)
        try:
            found = os.lstat(entry)
            target = os.readlink(entry) if stat.S_ISLNK(found.st_mode) else None
        except OSError:
            return
        yield entry, found
        if target is None:
            current = entry
            continue
        links += 1
        if links > LINKS_MAX:
            return
        if target.startswith("/"):
            current = "/"
        names += reversed(target.split("/"))


def _find_problem(
    entry: str, found: os.stat_result, trusted: tuple[int, ...], *, is_sticky_safe: bool
) -> tuple[str, str] | None:
    """What is wrong, and the command that fixes it."""
    if _is_read_only(entry):
        return None
    if found.st_uid not in trusted:
        return f"belongs to the user {_name_of(found.st_uid)}", "chown root"
    mode = found.st_mode
    if stat.S_ISLNK(mode) or (is_sticky_safe and stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWGRP and _has_acl(entry):  # then these bits are the mask of the ACL
        return f"has an ACL (see getfacl) and the mode {stat.S_IMODE(mode):04o}", "chmod go-w"
    is_private = mode & stat.S_IWGRP and _is_group_private(found.st_gid, trusted)
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not is_private):
        return f"has the mode {stat.S_IMODE(mode):04o}", "chmod go-w"
    return None


def _has_acl(entry: str) -> bool:
    """Whether a POSIX ACL may let more users and groups write than the mode shows."""
    if not hasattr(os, "getxattr"):  # only Linux has it
        return False
    try:
        return bool(os.getxattr(entry, ACL_ATTRIBUTE))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise Invalid(f"cannot read the ACL of {entry}: {error.strerror}", file=entry) from error


def _is_group_private(group: int, users: tuple[int, ...]) -> bool:
    """Whether only these users are in the group, as in one that is made for each user."""
    import grp
    import pwd

    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:
        return False
    return members | {user.pw_uid for user in pwd.getpwall() if user.pw_gid == group} <= {*users}


def _is_read_only(entry: str) -> bool:
    try:
        return bool(os.statvfs(entry).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _name_of(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
