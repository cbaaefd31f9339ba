"""Whether libvirt's lock manager keeps a VM from being started on two hosts that share its disk."""

import asyncio
import errno
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path

from forewarn.errors import ImpactFailed
from forewarn.log import log
from forewarn.option_kind import HostUri

QEMU_CONF = Path("/etc/libvirt/qemu.conf")
QEMU_CONF_BYTES_MAX = 1 << 20
CREDENTIAL, MISSING = "qemu.conf", "missing"
"""The file is for root only, by default: the unit of the daemon has a copy of it as a credential.
systemd starts no unit whose credential is missing, so that has a default.
"""
LOCK_MANAGER = re.compile(r"""^\s*lock_manager\s*=\s*["'](\w+)["']""", re.MULTILINE)
NO_LOCK, LOCKD = "nop", "lockd"
LOCKD_CONF = Path("/etc/libvirt/qemu-lockd.conf")
LOCKSPACE = re.compile(r"""^\s*(file|lvm|scsi)_lockspace_dir\s*=\s*["']""", re.MULTILINE)
RETRY_SECONDS = 60.0
FILE, BLOCK, NETWORK = "file", "block", "network"
"""libvirt's types of disks that hosts may share."""
FindDisk = Callable[[Collection[str]], Awaitable[str]]


async def check_disk_lock(
    uris: Iterable[HostUri],
    environ: Mapping[str, str],
    find_shared_disks: FindDisk,
    path: Path = QEMU_CONF,
    lockd_path: Path = LOCKD_CONF,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Log a warning if there is no lock manager, and a line if that cannot be told.

    It matters where VMs of QEMU may run on other hosts: those have a libvirt URI, too, or
    `find_shared_disks` says why they may, given the types of disks that matter. They may be started
    there by hand. A lock manager locks files; other disks only if it is configured for them.
    """
    texts = [each.uri for each in uris]
    if not all(text.startswith("qemu") for text in texts):
        return
    moves_vms = any("{host}" in text for text in texts) or len(set(texts)) > 1
    unknown = ""
    try:
        found = LOCK_MANAGER.findall(_read(environ, path))
        if found and found[-1] != NO_LOCK:
            await _check_other_disks(found[-1], find_shared_disks, lockd_path, sleep)
            return
    except OSError as error:
        unknown = f"{path}: {error.strerror}"
    shared = "VMs may be moved to other hosts"
    if not moves_vms:
        shared = await _find(find_shared_disks, (FILE, BLOCK, NETWORK), sleep)
    if not shared:
        return
    if unknown:
        log.info("cannot tell whether disks of VMs are locked", problem=unknown)
        return
    problem = (
        f"{path} has no lock_manager: if hosts share the disks of VMs, a VM that is started on two"
        ' of them destroys its disk; expected lock_manager = "lockd" or "sanlock"'
    )
    log.warning("disks of VMs are not locked", problem=problem, shared=shared)


async def _check_other_disks(
    lock_manager: str,
    find_shared_disks: FindDisk,
    lockd_path: Path,
    sleep: Callable[[float], Awaitable[object]],
) -> None:
    """Log a line for disks that the lock manager may not lock against other hosts."""
    problems = {NETWORK: "libvirt's lock managers do not lock network disks"}
    if lock_manager == LOCKD:
        problems[BLOCK] = _find_lockspace_problem(lockd_path)
    for type_, problem in problems.items():
        shared = await _find(find_shared_disks, (type_,), sleep) if problem else ""
        if shared:
            log.info("cannot tell whether disks of VMs are locked", problem=problem, shared=shared)


def _find_lockspace_problem(path: Path) -> str:
    """Why virtlockd may not lock block devices against other hosts; empty if it is told how.

    Locks of files in /dev do not reach other hosts; those of files in a shared folder do.
    """
    try:
        with path.open("rb") as file:
            text = file.read(QEMU_CONF_BYTES_MAX).decode(errors="replace")
    except OSError as error:
        return f"{path}: {error.strerror}; it may have a lockspace directory for block devices"
    if LOCKSPACE.search(text):
        return ""
    return (
        f"{path} has no lockspace directory: virtlockd locks block devices on this host only;"
        " expected file_lockspace_dir, lvm_lockspace_dir or scsi_lockspace_dir on a shared file"
        " system"
    )


async def _find(
    find_shared_disks: FindDisk,
    types: Collection[str],
    sleep: Callable[[float], Awaitable[object]],
) -> str:
    """Why hosts may share a disk of one of these types. Tries until libvirt answers."""
    problem = ""
    while True:  # ends when libvirt answers
        try:
            return await find_shared_disks(types)
        except ImpactFailed as error:
            if not problem:
                problem = str(error)
                log.info("cannot tell yet whether hosts share disks of VMs", problem=problem)
            await sleep(RETRY_SECONDS)


def _read(environ: Mapping[str, str], path: Path) -> str:
    """libvirt's configuration, from the credential of the unit if it has one."""
    copy = Path(environ.get("CREDENTIALS_DIRECTORY", ""), CREDENTIAL)
    is_copied = "CREDENTIALS_DIRECTORY" in environ and copy.exists()
    with (copy if is_copied else path).open("rb") as file:
        text = file.read(QEMU_CONF_BYTES_MAX).decode(errors="replace")
    if is_copied and text == MISSING:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return text
