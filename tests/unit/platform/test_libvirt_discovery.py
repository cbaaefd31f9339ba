"""What libvirt's own test driver tells of its domains."""

import asyncio
from pathlib import Path

import libvirt

from forewarn.config_platform import HostUri
from forewarn.platform.libvirt_discovery import discover
from forewarn.platform.libvirt_host import Libvirts, open_connection
from forewarn.wire.domain import parse
from tests.builders import guid
from tests.unit.platform.libvirt_world import URIS, LibvirtWorld, domain_xml

OURS = "<f:vm xmlns:f='urn:forewarn:vm:1' scope='web' update-domain='2'/>"


def test_the_domains_of_each_host_are_told_with_what_was_leased_to_them(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path)
    world.on("host-b").defineXML(domain_xml("web-1", 2, metadata=OURS))

    told = asyncio.run(discover(Libvirts(URIS, call_seconds_max=30, connect=world.connect), ["host-a", "host-b"]))

    ((web_0,), (web_1,)) = told["host-a"], told["host-b"]
    assert (web_0.is_active, web_1.is_active) == (True, False)
    assert web_0.leases == {"52:54:00:00:00:01": ("192.168.122.129",)}
    assert web_1.leases == {}
    known = parse(web_1.xml, host="host-b", is_active=False, leases={})
    assert (known.name, known.id, known.scope, known.update_domain) == ("web-1", guid(2).lower(), "web", 2)


def test_metadata_that_virsh_has_set_are_read(tmp_path: Path) -> None:
    """As docs/platforms.md tells it: virsh metadata … --key forewarn --set '<vm …/>'."""
    world = LibvirtWorld(tmp_path)
    world.web.setMetadata(
        libvirt.VIR_DOMAIN_METADATA_ELEMENT,
        '<vm scope="web" update-domain="1"/>',
        "forewarn",
        "urn:forewarn:vm:1",
        libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG,
    )

    ((web_0,),) = asyncio.run(discover(Libvirts(URIS, call_seconds_max=30, connect=world.connect), ["host-a"])).values()

    known = parse(web_0.xml, host="host-a", is_active=True, leases={})
    assert (known.scope, known.update_domain) == ("web", 1)


def test_a_libvirt_without_a_host_name_of_ours_is_called_as_it_calls_itself() -> None:
    here = "test:///default"

    told = asyncio.run(discover(Libvirts([HostUri("", here)], call_seconds_max=30), [""]))

    assert list(told) == [open_connection(here).getHostname()]
    assert [parse(one.xml, host="x", is_active=True, leases={}).name for each in told.values() for one in each] == ["test"]
