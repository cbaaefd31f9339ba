"""The daemon warns at its start, from what it finds on its host."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from forewarn.config import PlatformName
from forewarn.hostd.daemon import run
from forewarn.hostd.disk_lock import CREDENTIAL
from forewarn.hostd.settings import HostdConfig
from forewarn.option_kind import HostUri
from forewarn.platform.file_systems import MountTable
from forewarn.platform.libvirt.discovery import find_shared_disks
from tests.unit.hostd.fake_server import until
from tests.unit.platform.libvirt.libvirt_world import LibvirtWorld, domain_xml

pytestmark = pytest.mark.system

WAIT_SECONDS_MAX = 30
NOWHERE = "http://127.0.0.1:9"
URIS = (
    HostUri("", "qemu+unix:///system?socket=/no/such/socket"),
    HostUri("host-b", "qemu+unix:///system?socket=/no/such/other"),
)
TYPES = ("file", "block", "network")
MOUNTS = MountTable({"/": "ext4", "/mnt": "nfs4"})
DISK = "<disk type='file'><source file='{}'/><target dev='vd{}' bus='virtio'/>{}</disk></devices>"


@pytest.mark.parametrize(
    ("uris", "level", "message"),
    [
        (URIS, "WARNING", "disks of VMs are not locked"),
        (URIS[:1], "INFO", "cannot tell yet whether hosts share disks of VMs"),
    ],
    ids=["moves VMs", "libvirt does not answer"],
)
def test_daemon_that_starts_looks_for_a_lock_manager(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    uris: tuple[HostUri, ...],
    level: str,
    message: str,
) -> None:
    caplog.set_level(logging.INFO, "forewarn")
    (tmp_path / CREDENTIAL).write_text('vnc_listen = "0.0.0.0"\n')
    (tmp_path / "token").write_text(f"fw_host-a_{'5e' * 32}")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    config = HostdConfig(
        host="host-a",
        server=(NOWHERE,),
        token_file=tmp_path / "token",
        machine="a machine",
        platform=PlatformName.LIBVIRT,
        libvirt_uri=uris,
    )

    async def test() -> None:
        daemon = asyncio.create_task(run(config, lambda line: None))
        await until(lambda: daemon.done() or message in caplog.messages)
        daemon.cancel()
        await asyncio.wait((daemon,))
        assert daemon.cancelled()

    asyncio.run(asyncio.wait_for(test(), WAIT_SECONDS_MAX))
    found: list[Any] = [each for each in caplog.records if each.message == message]
    assert [each.levelname for each in found] == [level]


def test_disk_that_other_hosts_may_write_to_is_found(tmp_path: Path) -> None:
    """Not a CD-ROM, which many hosts may have from one file server."""
    world = LibvirtWorld(tmp_path)
    connection = world.on("host-a")

    def define(file: str, more: str = "") -> None:
        xml = domain_xml().replace("</devices>", DISK.format(file, "b", more))
        connection.defineXML(xml)

    world.web.destroy()
    assert find_shared_disks(connection, MOUNTS, TYPES) == ""
    define("/var/images/web-0.img")
    assert find_shared_disks(connection, MOUNTS, TYPES) == ""
    define("/mnt/install.iso", "<readonly/>")
    assert find_shared_disks(connection, MOUNTS, TYPES) == ""
    define("/mnt/web-0.img")
    assert find_shared_disks(connection, MOUNTS, TYPES) == (
        "a disk of web-0, /mnt/web-0.img is on a shared file system (nfs4)"
    )


@pytest.mark.parametrize(
    ("type_", "source", "found"),
    [
        ("block", "<source dev='/dev/vg/web-0'/>", "/dev/vg/web-0 is a block device"),
        (
            "network",
            "<source protocol='rbd' name='pool/web-0'><host name='mon'/></source>",
            "pool/web-0 is a network disk (rbd)",
        ),
    ],
)
def test_block_device_and_network_disk_may_be_shared(
    tmp_path: Path, type_: str, source: str, found: str
) -> None:
    world = LibvirtWorld(tmp_path)
    connection = world.on("host-a")
    world.web.destroy()
    disk = f"<disk type='{type_}'>{source}<target dev='vdb' bus='virtio'/></disk></devices>"
    connection.defineXML(domain_xml().replace("</devices>", disk))
    assert find_shared_disks(connection, MOUNTS, TYPES) == f"a disk of web-0, {found}"
    others = [each for each in TYPES if each != type_]
    assert find_shared_disks(connection, MOUNTS, others) == ""
