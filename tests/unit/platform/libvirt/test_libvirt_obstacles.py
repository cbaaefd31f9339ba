"""The libvirt platform on libvirt's own test driver: a VM that cannot move is not stopped for it.

What that driver does not support, a fake host answers as QEMU's driver does.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import RedeployMethod
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactResult
from forewarn.platform.file_systems import NO_MOUNTS, MountTable
from forewarn.platform.libvirt.mover import IN_PLACE
from forewarn.platform.libvirt.obstacles import find_tie
from tests.builders import guid
from tests.unit.platform.libvirt.libvirt_world import (
    DRAIN,
    LIVE_MIGRATION,
    NOT_LIVE,
    RUNNING,
    Host,
    LibvirtWorld,
    MoveWorld,
    Target,
    break_down,
    domain_xml,
    order,
    refusal,
    refuse,
)

pytestmark = pytest.mark.system

FILE_DISK = "<disk type='file'><source file='{}'/><target dev='vdb' bus='virtio'/></disk>"
VOLUME_DISK = (
    "<disk type='volume'><source pool='fast' volume='web-0'/>"
    "<target dev='vdb' bus='virtio'/></disk>"
)
SECRET_DISK = (
    "<disk type='network'><source protocol='rbd' name='vms/web-0'><host name='ceph'/>"
    f"<auth username='web'><secret type='ceph' uuid='{guid(9).lower()}'/></auth></source>"
    "<target dev='vdb' bus='virtio'/></disk>"
)
OTHER_NETWORK = "<interface type='network'><source network='lan'/></interface>"
PCI_DEVICE = (
    "<hostdev mode='subsystem' type='pci' managed='yes'><source>"
    "<address domain='0x0000' bus='0x3b' slot='0x00' function='0x1'/></source></hostdev>"
)
USB_DEVICE = (
    "<hostdev mode='subsystem' type='usb'><source>"
    "<vendor id='0x0529'/><product id='0x0001'/></source></hostdev>"
)
TEAM_INTERFACE = (
    "<interface type='hostdev'><source><address type='pci' domain='0' bus='6' slot='2'"
    " function='0'/></source><teaming type='transient' persistent='ua-net0'/></interface>"
)
TPM = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>"
CPU = "<cpu mode='custom' match='exact'><model>EPYC-Rome</model></cpu><devices>"


@pytest.fixture
def world(tmp_path: Path) -> MoveWorld:
    return MoveWorld(tmp_path)


def test_vm_whose_disk_the_target_cannot_open_is_not_stopped(world: MoveWorld) -> None:
    world.give(FILE_DISK.format("/var/lib/libvirt/images/local.img"))
    world.target = Target(world.on("host-b"), blockInfo=refuse(libvirt.VIR_ERR_SYSTEM_ERROR))

    assert world.fails_untouched("host-b cannot run it: disk vdb: no")


def test_target_that_cannot_tell_may_be_tried(world: MoveWorld) -> None:
    """QEMU's driver cannot look at a disk on the network, for one."""
    world.give(FILE_DISK.format("/var/lib/libvirt/images/local.img"))
    world.target = Target(world.on("host-b"), blockInfo=refuse(libvirt.VIR_ERR_INTERNAL_ERROR))

    assert world.carry_out(DRAIN).host == "host-b"


def test_connection_that_breaks_is_not_an_obstacle(world: MoveWorld) -> None:
    """It is a failed try, and the next one may succeed."""
    world.give(FILE_DISK.format("/var/lib/libvirt/images/local.img"))
    world.target = Target(world.on("host-b"), blockInfo=break_down)

    with pytest.raises(ImpactFailed) as failed:
        world.carry_out(DRAIN)
    assert not failed.value.facts.get("is_final")
    assert (world.state(), world.names_on("host-b")) == (RUNNING, [])


def test_vm_without_its_storage_pool_on_the_target_is_not_stopped(world: MoveWorld) -> None:
    world.give(VOLUME_DISK)

    assert world.fails_untouched("no storage pool with matching name 'fast'")


def test_vm_whose_storage_pool_on_the_target_is_stopped_is_not_stopped(world: MoveWorld) -> None:
    world.give(VOLUME_DISK)
    world.on("host-b").storagePoolDefineXML(
        "<pool type='dir'><name>fast</name><target><path>/fast</path></target></pool>"
    )

    assert world.fails_untouched("disk vdb: storage pool 'fast' is not active")


def test_vm_without_its_network_on_the_target_is_not_stopped(world: MoveWorld) -> None:
    world.give(OTHER_NETWORK)

    assert world.fails_untouched("no network with matching name 'lan'")


def test_vm_whose_network_on_the_target_is_stopped_is_not_stopped(world: MoveWorld) -> None:
    """libvirt would not start the VM there, and starts no network for it."""
    world.give(OTHER_NETWORK)
    world.on("host-b").networkDefineXML("<network><name>lan</name></network>")

    assert world.fails_untouched("host-b cannot run it: network 'lan' is not active")


def test_vm_without_its_secret_on_the_target_is_not_stopped(world: MoveWorld) -> None:
    world.give(SECRET_DISK)
    no_secret = refuse(libvirt.VIR_ERR_NO_SECRET)
    world.target = Target(world.on("host-b"), secretLookupByUUIDString=no_secret)

    assert world.fails_untouched("host-b cannot run it: no")


def test_vm_whose_cpu_the_target_does_not_have_is_not_stopped(world: MoveWorld) -> None:
    world.give(cpu=CPU)
    world.target = Target(world.on("host-b"), compareHypervisorCPU=lambda handle: 0)

    assert world.fails_untouched("its CPU does not have all features of EPYC-Rome")


def test_vm_whose_machine_the_target_does_not_have_is_not_stopped(world: MoveWorld) -> None:
    no_machine = refuse(libvirt.VIR_ERR_INVALID_ARG)
    world.target = Target(world.on("host-b"), getDomainCapabilities=no_machine)

    assert world.fails_untouched("host-b cannot run it: no")


@pytest.mark.parametrize(
    ("device", "name"),
    [(PCI_DEVICE, "PCI device 0000:3b:00.1"), (USB_DEVICE, "USB device 0529:0001")],
)
def test_vm_with_a_device_of_its_host_is_not_stopped(
    world: MoveWorld, device: str, name: str
) -> None:
    """A device of the same kind on the target is another device, with other data on it."""
    world.give(device)

    assert world.fails_untouched(
        f"web-0 cannot leave host-a: {name} of its host is passed through to it"
    )


@pytest.mark.parametrize(
    "device",
    [
        PCI_DEVICE.replace(
            "</hostdev>", "<teaming type='transient' persistent='ua-net0'/></hostdev>"
        ),
        TEAM_INTERFACE,
        USB_DEVICE.replace("<source>", "<source startupPolicy='optional'>"),
    ],
    ids=["device of a team", "network card of a team", "optional device"],
)
def test_device_that_a_vm_can_run_without_is_no_tie(device: str) -> None:
    xml = domain_xml().replace("</devices>", f"{device}</devices>")
    needed = xml.replace("transient", "persistent").replace("optional", "mandatory")

    assert find_tie(xml, NO_MOUNTS) == ""
    assert find_tie(needed, NO_MOUNTS).endswith("of its host is passed through to it")


def test_migration_of_a_tied_vm_that_fails_for_another_reason_may_be_tried_again(
    world: MoveWorld,
) -> None:
    """A connection that breaks, say, tells nothing about the device."""
    world.give(PCI_DEVICE)
    failure = refuse(libvirt.VIR_ERR_OPERATION_FAILED)
    world.source = Host(world.on("host-a"), migrate3=failure)

    with pytest.raises(ImpactFailed) as failed:
        world.carry_out(DRAIN)
    assert str(failed.value) == (
        "host-b failed: libvirt of host-a: no;"
        " PCI device 0000:3b:00.1 of its host is passed through to it"
    )
    assert not failed.value.facts.get("is_final")
    assert (world.state(), "shutdown" in world.source.calls) == (RUNNING, False)


def test_vm_with_a_disk_on_a_local_file_system_is_not_stopped(
    world: MoveWorld, tmp_path: Path
) -> None:
    """The target may have a file of that name: an old copy, say. It is not this disk."""
    disk = tmp_path / "disk.img"
    disk.touch()
    world.give(FILE_DISK.format(disk))

    assert world.fails_untouched(
        f"web-0 cannot leave host-a: disk vdb is on a local file system (ext4): {disk}",
        read_mounts=lambda: MountTable({"/": "ext4"}),
    )


FOLDER = (
    "<filesystem type='mount'><driver type='virtiofs'/><source dir='{}'/><target dir='build'/>"
    "</filesystem>"
)
NVDIMM = (
    "<memory model='nvdimm'><source><path>{}</path></source>"
    "<target><size unit='MiB'>64</size><node>0</node></target></memory>"
)
ALL_LOCAL, ALL_SHARED = MountTable({"/": "ext4"}), MountTable({"/": "nfs4"})


def with_devices(devices: str) -> str:
    return domain_xml().replace("</devices>", f"{devices}</devices>")


@pytest.mark.parametrize(
    ("device", "name", "end"),
    [(FOLDER, "filesystem build", "</filesystem>"), (NVDIMM, "NVDIMM", "</target></memory>")],
    ids=["virtiofs", "NVDIMM"],
)
def test_local_folder_or_nvdimm_is_a_tie_unless_it_is_read_only(
    tmp_path: Path, device: str, name: str, end: str
) -> None:
    """As of a disk, the target may have a copy of what is never written to."""
    device = device.format(tmp_path)
    read_only = device.replace(end, f"<readonly/>{end}")

    tie = f"{name} is on a local file system (ext4): {tmp_path}"
    assert find_tie(with_devices(device), ALL_LOCAL) == tie
    assert find_tie(with_devices(device), ALL_SHARED) == ""
    assert find_tie(with_devices(read_only), ALL_LOCAL) == ""


def test_vm_with_a_local_folder_is_not_stopped(world: MoveWorld, tmp_path: Path) -> None:
    """libvirt would not start it on a target without that folder, and migrates no virtiofs."""
    world.give(FOLDER.format(tmp_path))
    no = refuse(libvirt.VIR_ERR_OPERATION_INVALID)
    world.source = Host(world.on("host-a"), migrate3=no)

    assert world.fails_untouched(
        f"web-0 cannot leave host-a: filesystem build is on a local file system (ext4): {tmp_path}",
        read_mounts=lambda: ALL_LOCAL,
    )


@pytest.mark.parametrize(
    "nvram", ["<nvram>{}</nvram>", "<nvram type='file'><source file='{}'/></nvram>"]
)
def test_vm_with_local_uefi_variables_is_not_stopped_to_move(
    world: MoveWorld, tmp_path: Path, nvram: str
) -> None:
    """On the target it would get new ones, without its boot entries and Secure Boot keys."""
    file = tmp_path / "web-0_VARS.fd"
    file.touch()
    xml = world.give_uefi(nvram.format(file))

    assert world.fails_untouched(
        "web-0 cannot leave host-a: its UEFI variables (NVRAM) are on a local file system (ext4);"
        " only a live migration takes them along",
        read_mounts=lambda: ALL_LOCAL,
    )
    assert find_tie(xml, ALL_LOCAL) == ""


@pytest.mark.parametrize(
    "nvram",
    [
        "<nvram>/shared/web-0_VARS.fd</nvram>",
        "<nvram type='file'><source file='/shared/web-0_VARS.fd'/></nvram>",
        "<nvram type='network'><source protocol='nbd' name='a'><host name='b'/></source></nvram>",
    ],
)
def test_vm_with_shared_uefi_variables_may_be_stopped_to_move(world: MoveWorld, nvram: str) -> None:
    world.give_uefi(nvram)
    world.source = Host(world.on("host-a"), undefineFlags=lambda handle: handle.undefine())

    mounts = MountTable({"/": "ext4", "/shared": "nfs4"})
    assert world.carry_out(DRAIN, read_mounts=lambda: mounts).host == "host-b"


def test_vm_with_a_tpm_is_not_stopped_to_move(world: MoveWorld) -> None:
    """Undefining it here deletes the state of its TPM, and with that the keys of its disks."""
    world.give(TPM)

    assert world.fails_untouched(
        "the state of its TPM is on its host; only a live migration takes it along"
    )


def test_vm_that_one_target_cannot_run_moves_to_another(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path, ("host-a", "host-b", "host-c"))
    small = Target(world.on("host-b"), getDomainCapabilities=refuse(libvirt.VIR_ERR_INVALID_ARG))

    done = world.run_impact(
        DRAIN, connect=lambda uri: small if uri.endswith("host-b") else world.connect(uri)
    )

    assert (done.host, world.names_on("host-b")) == ("host-c", [])


def test_redeploy_that_must_not_begin_stops_nothing(tmp_path: Path) -> None:
    """The other hosts are away: a restart in place is for a host that is the only one."""
    world = LibvirtWorld(tmp_path, ["host-a"])
    request = order(EventType.REDEPLOY, Cause.REDEPLOY)

    with pytest.raises(ImpactFailed, match=r"^0 of 1 other hosts answer$"):
        world.run_impact(replace(request, no_target="0 of 1 other hosts answer"))

    assert (world.state(), world.web.ID()) == (RUNNING, 1)
    assert world.run_impact(request).detail.endswith(IN_PLACE)


def test_drain_without_another_host_stops_nothing(tmp_path: Path) -> None:
    """A restart in place would gain nothing. Another host may answer later."""
    world = LibvirtWorld(tmp_path, ["host-a"])

    with pytest.raises(ImpactFailed, match="host-a cannot move web-0: there is no other host"):
        world.run_impact(DRAIN)
    assert world.state() == RUNNING


@pytest.mark.parametrize("hosts", [("host-a", "host-b"), ("host-a", "host-b", "host-c")])
def test_vm_whose_target_is_lost_while_it_shuts_down_is_started_elsewhere(
    tmp_path: Path, hosts: tuple[str, ...]
) -> None:
    """A guest may take minutes for that. The start was not sent, so it does not run there."""
    world = MoveWorld(tmp_path, hosts)
    lost = list[Any]()

    def shut_down(handle: Any) -> None:
        lost.append(handle)
        handle.shutdown()

    def state(handle: Any) -> Any:
        return break_down(handle) if lost else handle.state()

    world.source = Host(world.on("host-a"), shutdown=shut_down)
    world.target = Target(world.on("host-b"), create=break_down, state=state)

    if len(hosts) == 2:
        with pytest.raises(ImpactFailed, match="host-b failed: libvirt of host-b: no"):
            world.carry_out(DRAIN)
        assert world.state() == RUNNING
    else:
        assert world.carry_out(DRAIN).host == "host-c"
        assert world.state("host-c") == RUNNING


# --- a VM that QEMU cannot migrate

REFUSALS = [
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_OPERATION_INVALID,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
    libvirt.VIR_ERR_MIGRATE_UNSAFE,
]
"""OPERATION_INVALID is what current libvirt has for the reasons that QEMU reports."""


@pytest.mark.parametrize("number", REFUSALS)
def test_vm_that_libvirt_refuses_to_migrate_is_stopped_once_and_moved(
    world: MoveWorld, number: int
) -> None:
    """A shared folder of virtiofs, say, which both hosts have."""
    world.source = Host(world.on("host-a"), migrate3=refuse(number))

    done = world.carry_out(DRAIN)

    assert (done.host, world.state("host-b")) == ("host-b", RUNNING)
    assert done.detail == (
        "cannot migrate live to host-b: libvirt of host-a: no;"
        " the guest shut down by itself; moved to host-b"
    )


@pytest.mark.parametrize("number", REFUSALS)
def test_vm_that_libvirt_refuses_to_migrate_fails_a_live_migration_at_once(
    world: MoveWorld, number: int
) -> None:
    world.source = Host(world.on("host-a"), migrate3=refuse(number))

    assert world.fails_untouched(
        "web-0 cannot leave host-a: cannot migrate live to host-b: libvirt of host-a: no",
        LIVE_MIGRATION,
    )


@pytest.mark.parametrize("number", REFUSALS)
def test_vm_with_a_device_that_libvirt_refuses_to_migrate_fails_at_once(
    world: MoveWorld, number: int
) -> None:
    world.give(PCI_DEVICE)
    world.source = Host(world.on("host-a"), migrate3=refuse(number))

    assert world.fails_untouched("PCI device 0000:3b:00.1 of its host is passed through to it")


MIGRATING = {
    "type": libvirt.VIR_DOMAIN_JOB_UNBOUNDED,
    "operation": libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT,
}


@pytest.mark.parametrize("busy", ["another migration", "a copy of its disk", "running there"])
def test_vm_that_cannot_migrate_for_now_is_not_stopped(world: MoveWorld, busy: str) -> None:
    """libvirt has the same error code for that. The next try may migrate it."""
    tried = list[Any]()

    def migrate(handle: Any) -> None:
        tried.append(handle)
        if busy == "running there":
            world.on("host-b").defineXML(handle.XMLDesc()).create()
        raise refusal(libvirt.VIR_ERR_OPERATION_INVALID)

    def job(handle: Any) -> Any:
        return MIGRATING if tried and busy == "another migration" else {"type": 0}

    def block_job(handle: Any) -> Any:
        return {"type": 2, "cur": 1, "end": 9} if busy == "a copy of its disk" else {}

    world.give(FILE_DISK.format("/shared/web-0.img"))
    world.source = Host(world.on("host-a"), migrate3=migrate, jobStats=job, blockJobInfo=block_job)

    with pytest.raises(ImpactFailed, match=r"^host-b failed: libvirt of host-a: no$") as failed:
        world.carry_out(DRAIN)
    assert not failed.value.facts.get("is_final")
    assert (world.state(), "shutdown" in world.source.calls) == (RUNNING, False)


def test_vm_that_is_off_when_it_should_migrate_is_not_moved_by_that_try(world: MoveWorld) -> None:
    """Its owner has stopped it, which libvirt reports with the same error code."""

    def migrate(handle: Any) -> None:
        handle.destroy()
        raise refusal(libvirt.VIR_ERR_OPERATION_INVALID)

    world.source = Host(world.on("host-a"), migrate3=migrate)

    with pytest.raises(ImpactFailed, match=r"^host-b failed: libvirt of host-a: no$") as failed:
        world.carry_out(DRAIN)
    assert not failed.value.facts.get("is_final")
    assert world.names_on("host-b") == []


def test_vm_with_snapshots_is_not_stopped_to_move(world: MoveWorld) -> None:
    """libvirt does not migrate it either, and to undefine it here would lose them."""
    world.web.snapshotCreateXML("<domainsnapshot><name>before-upgrade</name></domainsnapshot>")
    no = refuse(libvirt.VIR_ERR_OPERATION_INVALID)
    world.source = Host(world.on("host-a"), migrate3=no)

    assert world.fails_untouched(
        "web-0 cannot leave host-a: its snapshots are on its host, and no move takes them along"
    )
    assert world.web.snapshotListNames() == ["before-upgrade"]


# --- how a scope's VMs may be moved


def test_live_only_vm_is_never_stopped(world: MoveWorld) -> None:
    request = order(EventType.REDEPLOY, method=RedeployMethod.LIVE_ONLY)

    assert world.fails_untouched(f"web-0 cannot leave host-a: {NOT_LIVE}", request)


def test_live_only_user_redeploy_without_another_host_stops_nothing(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path, ["host-a"])
    request = order(EventType.REDEPLOY, Cause.REDEPLOY, method=RedeployMethod.LIVE_ONLY)

    with pytest.raises(ImpactFailed, match="host-a cannot move web-0: there is no other host"):
        world.run_impact(request)
    assert world.state() == RUNNING


def test_cold_move_does_not_try_to_migrate(world: MoveWorld) -> None:
    world.source = Host(world.on("host-a"), migrate3=lambda handle: handle)

    done = world.carry_out(order(EventType.REDEPLOY, method=RedeployMethod.COLD))

    assert (done.host, done.detail) == ("host-b", "the guest shut down by itself; moved to host-b")
    assert "migrate3" not in world.source.calls


def test_all_targets_are_tried_live_before_the_vm_is_stopped(tmp_path: Path) -> None:
    """One that cannot may be the only one."""
    world = LibvirtWorld(tmp_path, ("host-a", "host-b", "host-c"))
    tried = list[Any]()

    def refuse_first(handle: Any) -> Any:
        tried.append(handle)
        if len(tried) == 1:
            raise refusal(libvirt.VIR_ERR_CONFIG_UNSUPPORTED)
        return handle

    source = Host(world.on("host-a"), migrate3=refuse_first)

    done = world.run_impact(
        DRAIN, connect=lambda uri: source if uri.endswith("host-a") else world.connect(uri)
    )

    assert done.host == "host-c"
    assert done.detail.endswith("host-b: libvirt of host-a: no; migrated live to host-c")
    assert "shutdown" not in source.calls


# --- a Freeze that is a live migration


def test_freeze_for_a_live_migration_moves_the_vm(world: MoveWorld) -> None:
    world.source = Host(world.on("host-a"), migrate3=lambda handle: handle)

    done = world.carry_out(LIVE_MIGRATION)

    assert done == ImpactResult(host="host-b", detail="migrated live to host-b")
    assert not {"suspend", "shutdown"} & {*world.source.calls}


def test_live_migration_that_is_not_possible_says_so(world: MoveWorld) -> None:
    """It was announced as a Freeze, so the VM is neither stopped nor just suspended."""
    assert world.fails_untouched(f"web-0 cannot leave host-a: {NOT_LIVE}", LIVE_MIGRATION)


def test_live_migration_without_another_host_says_so(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path, ["host-a"])

    with pytest.raises(ImpactFailed, match="host-a cannot move web-0: there is no other host"):
        world.run_impact(LIVE_MIGRATION)
    assert world.state() == RUNNING


def test_host_without_a_uri_for_the_targets_names_them(world: MoveWorld) -> None:
    request = order(EventType.REDEPLOY, targets=("host-y", "host-z"))

    with pytest.raises(ImpactFailed, match="it has no libvirt_uri for host-y, host-z"):
        world.carry_out(request)
