"""What libvirt's own test driver tells of its domains."""

import asyncio
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.option_kind import HostUri
from forewarn.platform.libvirt.connection import LibvirtHosts, open_connection
from forewarn.platform.libvirt.discovery import discover, list_domains
from forewarn.platform.libvirt.domain_xml import DiscoveredVm
from tests.builders import guid
from tests.unit.platform.libvirt.libvirt_world import (
    URIS,
    Host,
    LibvirtWorld,
    domain_xml,
    refuse,
)

pytestmark = pytest.mark.system

OURS = "<f:vm xmlns:f='urn:forewarn:vm:1' scope='web' update-domain='2'/>"


def test_domains_are_listed_with_their_metadata(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path)
    world.on("host-b").defineXML(domain_xml("web-1", 2, metadata=OURS))

    result = asyncio.run(
        discover(
            LibvirtHosts(URIS, call_seconds_max=30, connect=world.connect), ["host-a", "host-b"]
        )
    )

    ids, mac = [guid(number).lower() for number in (1, 2)], "52:54:00:00:00:0{}"
    assert result == {
        "host-a": [
            DiscoveredVm(
                name="web-0",
                id=ids[0],
                host="host-a",
                macs=(mac.format(1),),
                ports=("testnet0",),
                memory_bytes=64 << 20,
            )
        ],
        "host-b": [
            DiscoveredVm(
                name="web-1",
                id=ids[1],
                host="host-b",
                macs=(mac.format(2),),
                memory_bytes=64 << 20,
                is_active=False,
                scope="web",
                update_domain=2,
            )
        ],
    }


@pytest.mark.parametrize(
    ("reason", "is_active"),
    [
        (libvirt.VIR_DOMAIN_PAUSED_USER, True),
        (libvirt.VIR_DOMAIN_PAUSED_IOERROR, True),
        (libvirt.VIR_DOMAIN_PAUSED_MIGRATION, False),
        (libvirt.VIR_DOMAIN_PAUSED_STARTING_UP, False),
    ],
)
def test_domain_that_is_still_migrated_here_does_not_run_here(
    tmp_path: Path, reason: int, is_active: bool
) -> None:
    """The migration may fail, so its impact is not done. The guest is already plugged in."""
    world = LibvirtWorld(tmp_path)
    host = Host(world.on("host-a"), state=lambda handle: [libvirt.VIR_DOMAIN_PAUSED, reason])

    (found,) = list_domains(host, "host-a")

    assert (found.is_active, found.ports) == (is_active, ("testnet0",))


def test_vm_with_snapshots_is_unmovable(tmp_path: Path) -> None:
    """No move takes them along: the operator has to know before the drain is announced."""
    world = LibvirtWorld(tmp_path)
    world.run_vm("host-a", "web-1", 2)
    world.web.snapshotCreateXML("<domainsnapshot><name>before-upgrade</name></domainsnapshot>")

    found = list_domains(world.on("host-a"), "host-a")

    assert [vm.unmovable for vm in found] == [
        "its snapshots are on its host, and no move takes them along",
        "",
    ]


@pytest.mark.parametrize(
    "number", [libvirt.VIR_ERR_NO_SUPPORT, libvirt.VIR_ERR_INTERNAL_ERROR], ids=str
)
def test_vm_whose_snapshots_are_not_known_is_listed(tmp_path: Path, number: int) -> None:
    """Whether it can move matters less than that it is there."""
    world = LibvirtWorld(tmp_path)

    found = list_domains(Host(world.on("host-a"), snapshotNum=refuse(number)), "host-a")

    assert [(vm.name, vm.unmovable) for vm in found] == [("web-0", "")]


class Leasing:
    """A connection to libvirt whose only network has given `leases`: address to the second at which
    the lease ends.
    """

    def __init__(self, connection: Any, mac: str, leases: dict[str, int]) -> None:
        self._connection, self._mac, self._leases = connection, mac, leases

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._connection, verb)

    def listAllNetworks(self, flags: int) -> list[Any]:
        return [self]

    def DHCPLeases(self) -> list[dict[str, Any]]:
        return [
            {"mac": self._mac, "ipaddr": address, "expirytime": end}
            for address, end in self._leases.items()
        ]


@pytest.mark.parametrize(
    ("leases", "address"),
    [
        ({"10.0.0.7": 1_700_000_000, "10.0.0.8": 1_700_000_900}, "10.0.0.8"),
        ({"10.0.0.8": 1_700_000_900, "10.0.0.7": 1_700_000_000}, "10.0.0.8"),
        ({"10.0.0.7": 1_700_000_000, "10.0.0.8": 0}, "10.0.0.8"),
        (
            {"2001:db8::8": 1_700_000_900, "10.0.0.7": 1_700_000_000, "10.0.0.8": 1_700_000_100},
            "10.0.0.8",
        ),
        ({"2001:db8::7": 1_700_000_000, "2001:db8::8": 1_700_000_900}, "2001:db8::8"),
    ],
    ids=[
        "stale one first",
        "stale one last",
        "one without an end",
        "IPv4 before IPv6",
        "IPv6 alone",
    ],
)
def test_lease_that_expires_last_is_the_preferred_address(
    tmp_path: Path, leases: dict[str, int], address: str
) -> None:
    """A VM that was installed again asks with another client id and gets another address; the old
    lease stays until it ends.
    """
    world, mac = LibvirtWorld(tmp_path), "52:54:00:00:00:01"
    libvirts = LibvirtHosts(
        URIS, call_seconds_max=30, connect=lambda uri: Leasing(world.on("host-a"), mac, leases)
    )

    ((web_0,),) = asyncio.run(discover(libvirts, ["host-a"])).values()

    assert web_0.addresses[0] == address


def test_metadata_set_by_virsh_is_parsed(tmp_path: Path) -> None:
    """As docs/platforms.md tells it: virsh metadata … --key forewarn --set '<vm …/>'."""
    world = LibvirtWorld(tmp_path)
    world.web.setMetadata(
        libvirt.VIR_DOMAIN_METADATA_ELEMENT,
        '<vm scope="web" update-domain="1"/>',
        "forewarn",
        "urn:forewarn:vm:1",
        libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG,
    )

    ((web_0,),) = asyncio.run(
        discover(LibvirtHosts(URIS, call_seconds_max=30, connect=world.connect), ["host-a"])
    ).values()

    assert (web_0.scope, web_0.update_domain) == ("web", 1)


def test_unnamed_host_takes_the_name_libvirt_reports() -> None:
    here = "test:///default"

    result = asyncio.run(discover(LibvirtHosts([HostUri("", here)], call_seconds_max=30), [""]))

    assert list(result) == [open_connection(here).getHostname()]
    assert [vm.name for vms in result.values() for vm in vms] == ["test"]
