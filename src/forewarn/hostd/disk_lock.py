"""Whether libvirt's lock manager keeps a VM from being started on two hosts that share its disk."""

import re
from collections.abc import Iterable
from pathlib import Path

from forewarn.option_kind import HostUri

QEMU_CONF = Path("/etc/libvirt/qemu.conf")
QEMU_CONF_BYTES_MAX = 1 << 20
LOCK_MANAGER = re.compile(r"""^\s*lock_manager\s*=\s*["'](\w+)["']""", re.MULTILINE)
NO_LOCK = ("nop", "")


def find_missing_lock(uris: Iterable[HostUri], path: Path = QEMU_CONF) -> str:
    """What is missing, for a warning; empty if nothing is, or if that cannot be told.

    It matters only where VMs of QEMU may run on other hosts: those have a libvirt URI, too.
    """
    texts = [each.uri for each in uris]
    is_shared = any("{host}" in text for text in texts) or len(set(texts)) > 1
    if not is_shared or not all(text.startswith("qemu") for text in texts):
        return ""
    try:
        with path.open("rb") as file:
            text = file.read(QEMU_CONF_BYTES_MAX).decode(errors="replace")
    except OSError:  # only root may read it, by default
        return ""
    found = LOCK_MANAGER.findall(text)
    if found and found[-1] not in NO_LOCK:
        return ""
    return (
        f"{path} has no lock_manager: if hosts share the disks of VMs, a VM that is started on two"
        ' of them destroys its disk; expected lock_manager = "lockd" or "sanlock"'
    )
