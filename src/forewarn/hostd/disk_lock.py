"""Whether libvirt's lock manager keeps a VM from being started on two hosts that share its disk."""

import asyncio
import errno
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
NO_LOCK = "nop"
RETRY_SECONDS = 60.0


async def check_disk_lock(
    uris: Iterable[HostUri],
    environ: Mapping[str, str],
    find_shared_disks: Callable[[], Awaitable[str]],
    path: Path = QEMU_CONF,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Log a warning if there is no lock manager, and a line if that cannot be told.

    It matters where VMs of QEMU may run on other hosts: those have a libvirt URI, too, or
    `find_shared_disks` says why they may. They may be started there by hand. It is asked once a
    minute until libvirt answers.
    """
    texts = [each.uri for each in uris]
    if not all(text.startswith("qemu") for text in texts):
        return
    moves_vms = any("{host}" in text for text in texts) or len(set(texts)) > 1
    unknown = ""
    try:
        found = LOCK_MANAGER.findall(_read(environ, path))
        if found and found[-1] != NO_LOCK:
            return
    except OSError as error:
        unknown = f"{path}: {error.strerror}"
    shared = "VMs may be moved to other hosts" if moves_vms else None
    problem = ""
    while shared is None:  # ends when libvirt answers
        try:
            shared = await find_shared_disks()
        except ImpactFailed as error:
            if not problem:
                problem = str(error)
                log.info("cannot tell yet whether hosts share disks of VMs", problem=problem)
            await sleep(RETRY_SECONDS)
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


def _read(environ: Mapping[str, str], path: Path) -> str:
    """libvirt's configuration, from the credential of the unit if it has one."""
    copy = Path(environ.get("CREDENTIALS_DIRECTORY", ""), CREDENTIAL)
    is_copied = "CREDENTIALS_DIRECTORY" in environ and copy.exists()
    with (copy if is_copied else path).open("rb") as file:
        text = file.read(QEMU_CONF_BYTES_MAX).decode(errors="replace")
    if is_copied and text == MISSING:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return text
