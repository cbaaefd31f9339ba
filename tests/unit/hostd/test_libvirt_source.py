"""What a daemon sees of libvirt's own test driver, with its real events."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.hostd.inventory import Inventory, ListedVm
from forewarn.hostd.libvirt_source import LibvirtSource
from forewarn.platform.file_systems import MountTable
from forewarn.platform.libvirt.connection import LibvirtHosts
from tests.builders import guid
from tests.unit.hostd.fake_server import running_together, until
from tests.unit.hostd.http_server import in_loop
from tests.unit.platform.libvirt.libvirt_world import URIS, LibvirtWorld, domain_xml

pytestmark = pytest.mark.system

OURS = "<f:vm xmlns:f='urn:forewarn:vm:1' {}/>"


@asynccontextmanager
async def listing(
    world: LibvirtWorld, read_mounts: Callable[[], MountTable] = MountTable
) -> AsyncIterator[Inventory]:
    """An inventory that looks again only at events."""
    libvirts = LibvirtHosts(URIS, call_seconds_max=30, connect=world.connect)
    source = LibvirtSource(libvirts, "host-a", read_mounts)
    inventory = Inventory(source, every_seconds=3600)
    async with running_together(inventory.run()):
        await until(inventory.tried.is_set)
        yield inventory


DISK = "<disk type='file'><source file='{}'/><target dev='vdb' bus='virtio'/></disk></devices>"


@in_loop
async def test_domain_with_a_local_disk_is_reported_as_unmovable(tmp_path: Path) -> None:
    """As soon as the disk is attached, and no longer when it is detached."""
    world = LibvirtWorld(tmp_path)
    (tmp_path / "disk.img").touch()
    xml = domain_xml("web-1", 2).replace("</devices>", DISK.format(tmp_path / "disk.img"))
    mounts = MountTable({"/": "ext4"})
    async with listing(world, lambda: mounts) as inventory:
        world.on("host-a").defineXML(xml)
        await until(lambda: len(inventory.report.vms) == 2)
        assert [vm.unmovable for vm in inventory.report.vms] == [
            "",
            f"disk vdb is on a local file system (ext4): {tmp_path}/disk.img",
        ]
        world.on("host-a").defineXML(domain_xml("web-1", 2))
        await until(lambda: inventory.report.vms[1].unmovable == "")


def shape(inventory: Inventory) -> dict[str, str]:
    return {vm.name: vm.power for vm in inventory.report.vms}


@in_loop
async def test_domains_are_reported_as_their_events_come(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path)
    async with listing(world) as inventory:
        assert shape(inventory) == {"web-0": "running"}
        domain = world.on("host-a").defineXML(domain_xml("web-1", 2, OURS.format("scope='web'")))
        await until(lambda: shape(inventory) == {"web-0": "running", "web-1": "stopped"})
        assert inventory.report.vms[1] == ListedVm(
            name="web-1",
            id=guid(2).lower(),
            macs=("52:54:00:00:00:02",),
            power="stopped",
            memory_bytes=64 << 20,
            scope="web",
        )
        domain.create()
        await until(lambda: shape(inventory)["web-1"] == "running")
        assert [*inventory.report.vms[1].ports] == ["testnet0"]
        domain.destroy()
        await until(lambda: shape(inventory)["web-1"] == "stopped")
        assert [*inventory.report.vms[1].ports] == []
        domain.undefine()
        await until(lambda: shape(inventory) == {"web-0": "running"})


@in_loop
async def test_changed_metadata_is_reported(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path)
    async with listing(world) as inventory:
        domain = world.on("host-a").lookupByName("web-0")
        element = libvirt.VIR_DOMAIN_METADATA_ELEMENT
        domain.setMetadata(element, "<vm scope='db'/>", "f", "urn:forewarn:vm:1", 0)
        await until(lambda: inventory.report.vms[0].scope == "db")
        domain.setMetadata(element, "<vm ignore='yes'/>", "f", "urn:forewarn:vm:1", 0)
        await until(lambda: shape(inventory) == {})


@in_loop
async def test_invalid_metadata_does_not_hide_a_domain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would leave the fleet, with the events of its VM."""
    world = LibvirtWorld(tmp_path)
    with caplog.at_level(logging.INFO, "forewarn"):
        async with listing(world) as inventory:
            bad = domain_xml("web-1", 2, OURS.format("kind='herd'"))
            world.on("host-a").defineXML(bad)
            await until(lambda: "web-1" in shape(inventory))
            world.on("host-a").defineXML(domain_xml("web-2", 3))
            await until(lambda: "web-2" in shape(inventory))
    assert caplog.messages.count("metadata of a domain ignored") == 1


@in_loop
async def test_a_restarted_libvirt_is_connected_again(tmp_path: Path) -> None:
    """Its events come from the new connection."""
    world = LibvirtWorld(tmp_path)
    opened: list[Any] = []

    class Connection:
        """A connection that can be lost, as one to a libvirtd that is stopped."""

        def __init__(self) -> None:
            self.is_lost = False
            self.inner: Any = world.connect("test:///host-a")
            self.on_close: Any = None
            self.callbacks: list[int] = []

        def __getattr__(self, verb: str) -> Any:
            return getattr(self.inner, verb)

        def isAlive(self) -> bool:
            return not self.is_lost

        def domainEventRegisterAny(self, *arguments: Any) -> None:
            self.callbacks.append(self.inner.domainEventRegisterAny(*arguments))

        def lose(self) -> None:
            self.is_lost = True
            for number in self.callbacks:
                self.inner.domainEventDeregisterAny(number)
            self.on_close(self, 0, None)

        def registerCloseCallback(self, callback: Any, opaque: object) -> None:
            self.on_close = callback

    def connect(uri: str) -> Connection:
        made = Connection()
        opened.append(made)
        return made

    libvirts = LibvirtHosts(URIS, call_seconds_max=30, connect=connect)
    inventory = Inventory(LibvirtSource(libvirts, "host-a"), every_seconds=3600)
    async with running_together(inventory.run()):
        await until(inventory.tried.is_set)
        opened[0].lose()
        await until(lambda: len(opened) == 2 and opened[1].on_close)
        world.on("host-a").defineXML(domain_xml("web-1", 2))
        await until(lambda: "web-1" in shape(inventory))
