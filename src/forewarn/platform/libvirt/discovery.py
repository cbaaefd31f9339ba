"""Lists the domains of hosts as libvirt reports them. `fleet_import` turns them into a fleet."""

import asyncio
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import libvirt

from forewarn.platform.libvirt.connection import LibvirtHosts

HOSTS_AT_ONCE_MAX = 16

LeaseEnds = Mapping[tuple[str, str], float]
"""When the lease of a MAC for an address ends, in seconds since 1970."""


@dataclass(frozen=True)
class DomainDescription:
    """A domain. `leases` are its addresses by MAC, the lease that expires last first."""

    host: str
    xml: str
    is_active: bool
    leases: dict[str, tuple[str, ...]]


async def discover(
    libvirts: LibvirtHosts, hosts: Iterable[str]
) -> dict[str, list[DomainDescription]]:
    """Return the domains of each host; host "" gets the name that its libvirt reports.

    Fails if any host does not answer.
    """
    slots = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)

    async def look(host: str) -> tuple[str, list[DomainDescription]]:
        async with slots:
            return await libvirts.ask(
                host, lambda connection: _describe_all(connection, host or connection.getHostname())
            )

    return dict(await asyncio.gather(*(look(host) for host in hosts)))


def _describe_all(connection: Any, host: str) -> tuple[str, list[DomainDescription]]:
    handles = sorted(connection.listAllDomains(), key=lambda handle: str(handle.name()))
    ends = _lease_ends(connection)
    domains = [_describe(handle, host, ends) for handle in handles]
    return host, [domain for domain in domains if domain is not None]


def _describe(handle: Any, host: str, ends: LeaseEnds) -> DomainDescription | None:
    try:
        return DomainDescription(
            host, handle.XMLDesc(), bool(handle.isActive()), _leases(handle, ends)
        )
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:  # it ended meanwhile
            return None
        raise


def _leases(handle: Any, ends: LeaseEnds) -> dict[str, tuple[str, ...]]:
    """Return the leases by MAC; none for a domain that is off or has no leases.

    A MAC has several while an old lease has not expired, and libvirt lists them unsorted.
    """
    try:
        interfaces = handle.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE)
    except libvirt.libvirtError:
        return {}
    leases = {}
    for interface in interfaces.values():
        if interface["hwaddr"] and interface["addrs"]:
            mac = interface["hwaddr"].lower()
            addresses = [address["addr"] for address in interface["addrs"]]
            leases[mac] = _sort_by_expiry(mac, addresses, ends)
    return leases


def _sort_by_expiry(mac: str, addresses: Iterable[str], ends: LeaseEnds) -> tuple[str, ...]:
    return tuple(sorted(addresses, key=lambda address: ends.get((mac, address), 0), reverse=True))


def _lease_ends(connection: Any) -> LeaseEnds:
    """Return when the leases expire. Only networks report that; 0 means never."""
    ends: dict[tuple[str, str], float] = {}
    try:
        networks = connection.listAllNetworks(libvirt.VIR_CONNECT_LIST_NETWORKS_ACTIVE)
    except libvirt.libvirtError:  # a driver without networks
        return {}
    for network in networks:
        with suppress(libvirt.libvirtError):  # ended meanwhile, or without leases
            for lease in network.DHCPLeases():
                ends[(lease["mac"] or "").lower(), lease["ipaddr"]] = (
                    lease["expirytime"] or math.inf
                )
    return ends
