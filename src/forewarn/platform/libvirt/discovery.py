"""What libvirt knows of the domains of some hosts, as it tells it.

What it means for a fleet is settled in `platform/libvirt/fleet_import.py`.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import libvirt

from forewarn.platform.libvirt.connection import Libvirts

HOSTS_AT_ONCE_MAX = 16

LeaseEnds = Mapping[tuple[str, str], float]
"""When the lease of a MAC for an address ends, in seconds since 1970."""


@dataclass(frozen=True)
class Description:
    """A domain: its XML, whether it runs, and the addresses that were leased to it, by MAC, the
    lease that ends last first.
    """

    host: str
    xml: str
    is_active: bool
    leases: dict[str, tuple[str, ...]]


async def discover(libvirts: Libvirts, hosts: Iterable[str]) -> dict[str, list[Description]]:
    """The domains of each host; the host "" has the name that its libvirt gives it.

    One that does not answer fails it all.
    """
    turns = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)

    async def look(host: str) -> tuple[str, list[Description]]:
        async with turns:
            return await libvirts.ask(
                host, lambda connection: _describe_all(connection, host or connection.getHostname())
            )

    return dict(await asyncio.gather(*(look(host) for host in hosts)))


def _describe_all(connection: Any, host: str) -> tuple[str, list[Description]]:
    handles = sorted(connection.listAllDomains(), key=lambda handle: str(handle.name()))
    ends = _lease_ends(connection)
    found = [_describe(handle, host, ends) for handle in handles]
    return host, [domain for domain in found if domain is not None]


def _describe(handle: Any, host: str, ends: LeaseEnds) -> Description | None:
    try:
        return Description(host, handle.XMLDesc(), bool(handle.isActive()), _leases(handle, ends))
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:  # it has ended since
            return None
        raise


def _leases(handle: Any, ends: LeaseEnds) -> dict[str, tuple[str, ...]]:
    """Nothing for a domain that does not run, or whose network gives no leases.

    A MAC has several while an old lease has not ended. libvirt lists them in the order of its file,
    so they are sorted here.
    """
    try:
        interfaces = handle.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE)
    except libvirt.libvirtError:
        return {}
    found = {
        one["hwaddr"].lower(): one["addrs"]
        for one in interfaces.values()
        if one["hwaddr"] and one["addrs"]
    }
    return {
        mac: _last_ending_first(mac, [address["addr"] for address in addresses], ends)
        for mac, addresses in found.items()
    }


def _last_ending_first(mac: str, addresses: Iterable[str], ends: LeaseEnds) -> tuple[str, ...]:
    return tuple(sorted(addresses, key=lambda address: ends.get((mac, address), 0), reverse=True))


def _lease_ends(connection: Any) -> LeaseEnds:
    """Of all leases of the host's networks.

    Only a network tells when its leases end; a lease without an end has 0 there.
    """
    ends: dict[tuple[str, str], float] = {}
    try:
        networks = connection.listAllNetworks(libvirt.VIR_CONNECT_LIST_NETWORKS_ACTIVE)
    except libvirt.libvirtError:  # a driver without networks
        return {}
    for network in networks:
        with suppress(libvirt.libvirtError):  # one that has ended since, or gives no leases
            for lease in network.DHCPLeases():
                ends[(lease["mac"] or "").lower(), lease["ipaddr"]] = (
                    lease["expirytime"] or math.inf
                )
    return ends
