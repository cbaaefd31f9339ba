"""Lists the domains of hosts as libvirt reports them. `fleet_import` turns them into a fleet."""

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import libvirt
from msgspec.structs import replace

from forewarn.platform.libvirt.connection import LibvirtHosts, ignoring
from forewarn.platform.libvirt.domain_xml import DiscoveredVm, Leases, parse

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
        return await libvirts.ask(host, lambda connection: _describe_all(connection, host))

    return dict(await libvirts.for_each(hosts, look))


def _describe_all(connection: Any, host: str) -> tuple[str, list[DiscoveredVm]]:
    host = host or connection.getHostname()
    handles = sorted(connection.listAllDomains(), key=lambda handle: str(handle.name()))
    leases = list_leases(connection)
    found = (describe(handle, host, leases) for handle in handles)
    return host, [vm for vm in found if vm is not None]


def describe(
    handle: Any, host: str, leases: Leases, *, with_metadata: bool = True
) -> DiscoveredVm | None:
    """Return the domain, None if it ended meanwhile. One that is still on its way here is off."""
    with ignoring(libvirt.VIR_ERR_NO_DOMAIN):
        vm = parse(
            handle.XMLDesc(),
            host=host,
            is_active=bool(handle.isActive()),
            leases=leases,
            with_metadata=with_metadata,
        )
        is_incoming = tuple(handle.state()) in INCOMING
        return replace(vm, is_active=vm.is_active and not is_incoming)
    return None


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
