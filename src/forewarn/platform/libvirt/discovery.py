"""Lists the domains of hosts as libvirt reports them. `fleet_import` turns them into a fleet."""

import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import libvirt
from msgspec.structs import replace

from forewarn.errors import Invalid
from forewarn.platform.file_systems import NO_MOUNTS, MountTable
from forewarn.platform.libvirt.connection import LibvirtHosts, ignoring
from forewarn.platform.libvirt.domain_xml import DiscoveredVm, Leases, parse
from forewarn.platform.libvirt.obstacles import find_shared_disk, find_snapshots, find_tie

INCOMING = tuple(
    (libvirt.VIR_DOMAIN_PAUSED, reason)
    for reason in (libvirt.VIR_DOMAIN_PAUSED_MIGRATION, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP)
)
"""States of a domain whose migration may still fail, or that has not begun to run."""


async def discover(libvirts: LibvirtHosts, hosts: Iterable[str]) -> dict[str, list[DiscoveredVm]]:
    """Return the domains of each host; host "" gets the name that its libvirt reports.

    Fails if any host does not answer, or if the metadata of a domain is not valid.
    """

    async def look(host: str) -> tuple[str, list[DiscoveredVm]]:
        def describe(connection: Any) -> tuple[str, list[DiscoveredVm]]:
            name = host or connection.getHostname()
            return name, list_domains(connection, name)

        return await libvirts.ask(host, describe)

    return dict(await libvirts.for_each(hosts, look))


def list_domains(
    connection: Any,
    host: str,
    problems: list[Invalid] | None = None,
    mounts: MountTable = NO_MOUNTS,
) -> list[DiscoveredVm]:
    """Return the domains of a host. One that is still on its way there is not active.

    Metadata that is not valid is ignored if there is a list for the `problems`. `mounts` are those
    of the host.
    """
    found, leases = list[DiscoveredVm](), list_leases(connection)
    for handle in sorted(connection.listAllDomains(), key=lambda handle: str(handle.name())):
        with ignoring(libvirt.VIR_ERR_NO_DOMAIN):  # it ended meanwhile
            xml, is_active, state = handle.XMLDesc(), bool(handle.isActive()), handle.state()
            vm = parse(xml, host=host, is_active=is_active, leases=leases, problems=problems)
            is_active = is_active and tuple(state) not in INCOMING
            unmovable = find_tie(xml, mounts) or _find_snapshots(handle)
            found.append(replace(vm, is_active=is_active, unmovable=unmovable))
    return found


def _find_snapshots(handle: Any) -> str:
    with suppress(libvirt.libvirtError):  # the domain counts, whether this is known or not
        return find_snapshots(handle)
    return ""


def find_shared_disks(connection: Any, mounts: MountTable, types: Collection[str]) -> str:
    """Why other hosts may write to a disk of this one's domains; empty if that is not known.

    `mounts` are those of the host, `types` those of the disks that matter.
    """
    for handle in connection.listAllDomains():
        with ignoring(libvirt.VIR_ERR_NO_DOMAIN):  # it ended meanwhile
            found = find_shared_disk(handle.XMLDesc(), mounts, types)
            if found:
                return f"a disk of {handle.name()}, {found}"
    return ""


def list_leases(connection: Any) -> Leases:
    """Return the addresses that libvirt's networks have leased, by MAC.

    A MAC has several while an old lease has not expired. The one that expires last comes first;
    0 means never.
    """
    leases: list[dict[str, Any]] = []
    with suppress(libvirt.libvirtError):  # a driver without networks
        for network in connection.listAllNetworks(libvirt.VIR_CONNECT_LIST_NETWORKS_ACTIVE):
            with suppress(libvirt.libvirtError):  # ended meanwhile, or without leases
                leases += network.DHCPLeases()
    leases.sort(key=lambda lease: lease["expirytime"] or math.inf, reverse=True)
    addresses: dict[str, list[str]] = {}
    for lease in leases:
        addresses.setdefault((lease["mac"] or "").lower(), []).append(lease["ipaddr"])
    return addresses
