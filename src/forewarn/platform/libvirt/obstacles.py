"""What keeps a domain from running on another host, as far as libvirt can tell while it runs.

A VM is stopped for a move only if nothing is found here. What cannot be told is no obstacle: then
the move may be tried.

Two kinds: a *tie* binds a domain to its host, whatever the target; the others are found on a
target, where the domain is already defined and not started.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import libvirt

from forewarn.platform.file_systems import MountTable
from forewarn.platform.libvirt.connection import UNSUPPORTED, ignoring
from forewarn.platform.remote import UNMOVABLE_LENGTH_MAX

NO_CONNECTION = (libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE)
NO_VOLUME = (libvirt.VIR_ERR_NO_STORAGE_POOL, libvirt.VIR_ERR_NO_STORAGE_VOL)
OPTIONAL = ("optional", "requisite")
"""Media that a domain starts without."""


def find_tie(xml: str, mounts: MountTable) -> str:
    """Why a domain cannot leave its host, whether it runs or not; empty if that is not certain."""
    ties = filter(None, _list_ties(_parse(xml), mounts))
    return next(ties, "")[:UNMOVABLE_LENGTH_MAX]


def _parse(xml: str) -> Element:
    return ElementTree.fromstring(xml)  # noqa: S314 what libvirt wrote, with libvirt's limits


def _list_ties(root: Element, mounts: MountTable) -> Iterator[str]:
    for path in ("devices/hostdev", "devices/interface[@type='hostdev']"):
        for device in filter(_is_needed, root.iterfind(path)):
            yield f"{_name_device(device)} of its host is passed through to it"
    for disk in root.iterfind("devices/disk"):
        source, name = disk.find("source"), disk.find("target")
        if source is None or name is None or disk.find("readonly") is not None:
            continue
        if disk.get("type") == "nvme":
            yield f"disk {name.get('dev')} is an NVMe device of its host"
        yield _check_local(f"disk {name.get('dev')}", source.get("file"), mounts)
    for folder in root.iterfind("devices/filesystem"):
        source, name = folder.find("source"), folder.find("target")
        if source is None or name is None or folder.find("readonly") is not None:
            continue
        yield _check_local(f"filesystem {name.get('dir')}", source.get("dir"), mounts)
    for memory in root.iterfind("devices/memory"):
        if memory.find("target/readonly") is None:
            yield _check_local("NVDIMM", memory.findtext("source/path"), mounts)


def _check_local(name: str, path: str | None, mounts: MountTable) -> str:
    """Say so if only this host has a file or folder that a domain writes to."""
    kind = mounts.local_type(path) if path else ""
    return f"{name} is on a local file system ({kind}): {path}" if kind else ""


def find_shared_disk(xml: str, mounts: MountTable, types: Collection[str]) -> str:
    """A disk of a domain, of one of these types, that other hosts may reach, too, and write to.

    Empty if none is known. The types are libvirt's: file, block and network.
    """
    for disk in _parse(xml).iterfind("devices/disk"):
        source, type_ = disk.find("source"), disk.get("type", "")
        if source is None or type_ not in types or disk.find("readonly") is not None:
            continue
        if type_ == "block":
            return f"{source.get('dev')} is a block device"
        if type_ == "network":
            return f"{source.get('name')} is a network disk ({source.get('protocol')})"
        file = source.get("file", "")
        kind = mounts.shared_type(file) if file else ""
        if kind:
            return f"{file} is on a shared file system ({kind})"
    return ""


def _is_needed(device: Element) -> bool:
    """Whether a domain cannot run without a passed-through device. One of a team is unplugged for
    a migration, while its virtio partner goes on.
    """
    is_optional = device.find("source[@startupPolicy='optional']") is not None
    return not is_optional and device.find("teaming[@type='transient']") is None


def _name_device(device: Element) -> str:
    """A passed-through device as operators know it."""
    kind, address = device.get("type", ""), device.find("source/address")
    if kind in ("pci", "hostdev") and address is not None:
        numbers = [int(address.get(name, "0"), 16) for name in ("domain", "bus", "slot")]
        function = int(address.get("function", "0"), 16)
        return f"PCI device {numbers[0]:04x}:{numbers[1]:02x}:{numbers[2]:02x}.{function}"
    vendor, product = device.find("source/vendor"), device.find("source/product")
    if vendor is not None and product is not None:
        ids = [each.get("id", "").removeprefix("0x") for each in (vendor, product)]
        return f"USB device {':'.join(ids)}"
    return f"a device ({kind})"


def find_state(xml: str, mounts: MountTable) -> str:
    """What a domain would lose if it were stopped and started on another host."""
    root = _parse(xml)
    for backend in root.iterfind("devices/tpm/backend[@type='emulator']"):
        if backend.find("source") is None:
            return "the state of its TPM is on its host; only a live migration takes it along"
    for nvram in root.iterfind("os/nvram"):
        source = nvram.find("source")
        path = (nvram.text or "").strip() if source is None else source.get("file")
        kind = mounts.local_type(path) if path else ""
        if kind:
            return (
                f"its UEFI variables (NVRAM) are on a local file system ({kind});"
                " only a live migration takes them along"
            )
    return ""


def find_snapshots(handle: Any) -> str:
    """Why a move would lose snapshots: to undefine a domain forgets them. Runs in a thread."""
    with ignoring(*UNSUPPORTED):
        if handle.snapshotNum():
            return "its snapshots are on its host, and no move takes them along"
    return ""


def has_block_job(handle: Any) -> bool:
    """Whether a disk of a domain is being copied or merged. Runs in a thread."""
    with ignoring(*UNSUPPORTED):
        disks = _parse(handle.XMLDesc()).iterfind("devices/disk/target")
        return any(handle.blockJobInfo(disk.get("dev")) for disk in disks)
    return False


def find_obstacle(handle: Any, connection: Any, xml: str) -> str:
    """Why a domain that is defined on a target, with this XML, cannot run there.

    Runs in a thread.
    """
    root = _parse(xml)
    for check in (_check_disks, _check_networks, _check_secrets, _check_hypervisor, _check_cpu):
        obstacle = check(handle, connection, root)
        if obstacle:
            return obstacle[:UNMOVABLE_LENGTH_MAX]
    return ""


def _refusal(call: Callable[[], object], *codes: int) -> str:
    """Why libvirt refuses a call with one of these codes. Another error tells nothing.

    A connection that breaks is an error, and no refusal.
    """
    try:
        call()
    except libvirt.libvirtError as error:
        if error.get_error_domain() in NO_CONNECTION:
            raise
        return str(error) if error.get_error_code() in codes else ""
    return ""


def _check_disks(handle: Any, connection: Any, root: Element) -> str:
    """Files and devices must be there under the same path; Forewarn copies none."""
    for disk in root.iterfind("devices/disk"):
        source, name = disk.find("source"), disk.find("target")
        if source is None or name is None or source.get("startupPolicy") in OPTIONAL:
            continue
        pool, volume, device = source.get("pool", ""), source.get("volume", ""), name.get("dev")
        problem = ""
        if disk.get("type") == "volume":
            problem = _check_volume(connection, pool, volume)
        elif disk.get("type") != "network":
            problem = _refusal(partial(handle.blockInfo, device), libvirt.VIR_ERR_SYSTEM_ERROR)
        if problem:
            return f"disk {device}: {problem}"
    return ""


def _check_volume(connection: Any, pool: str, volume: str) -> str:
    active = list[int]()

    def look() -> None:
        found = connection.storagePoolLookupByName(pool)
        active.append(found.isActive())
        found.storageVolLookupByName(volume)

    problem = _refusal(look, *NO_VOLUME)
    return f"storage pool '{pool}' is not active" if active == [0] else problem


def _check_networks(handle: Any, connection: Any, root: Element) -> str:
    """libvirt starts neither a network nor a pool for a domain."""
    for source in root.iterfind("devices/interface[@type='network']/source"):
        problem = _check_network(connection, source.get("network", ""))
        if problem:
            return problem
    return ""


def _check_network(connection: Any, name: str) -> str:
    active = list[int]()
    problem = _refusal(
        lambda: active.append(connection.networkLookupByName(name).isActive()),
        libvirt.VIR_ERR_NO_NETWORK,
    )
    return f"network '{name}' is not active" if active == [0] else problem


def _check_secrets(handle: Any, connection: Any, root: Element) -> str:
    """Storage on the network may need them."""
    for secret in root.iterfind("devices/disk/source/auth/secret[@uuid]"):
        look = partial(connection.secretLookupByUUIDString, secret.get("uuid"))
        problem = _refusal(look, libvirt.VIR_ERR_NO_SECRET)
        if problem:
            return problem
    return ""


def _hypervisor(root: Element) -> tuple[str | None, str | None, str | None, str | None]:
    """The emulator, architecture, machine and type of a domain."""
    os_type = root.find("os/type")
    arch, machine = (None, None) if os_type is None else map(os_type.get, ("arch", "machine"))
    return root.findtext("devices/emulator"), arch, machine, root.get("type")


def _check_hypervisor(handle: Any, connection: Any, root: Element) -> str:
    return _refusal(
        lambda: connection.getDomainCapabilities(*_hypervisor(root)),
        libvirt.VIR_ERR_INVALID_ARG,
        libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
    )


def _check_cpu(handle: Any, connection: Any, root: Element) -> str:
    """A CPU that the domain names; another one is made from what the target has."""
    cpu = root.find("cpu")
    if cpu is None or cpu.get("mode", "custom") != "custom" or cpu.get("check") == "none":
        return ""
    model, found = cpu.findtext("model"), list[int]()
    if not model:
        return ""
    text = ElementTree.tostring(cpu, encoding="unicode")
    _refusal(lambda: found.append(connection.compareHypervisorCPU(*_hypervisor(root), text, 0)))
    if found == [libvirt.VIR_CPU_COMPARE_INCOMPATIBLE]:
        return f"its CPU does not have all features of {model}"
    return ""
