"""What libvirt knows of the domains of some hosts, as it tells it. What it means for a fleet is settled in `wire/domain.py`."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import libvirt

from forewarn.platform.libvirt_host import Libvirts

HOSTS_AT_ONCE_MAX = 16


@dataclass(frozen=True)
class Description:
    """A domain: its XML, whether it runs, and the addresses that were leased to it, by MAC."""

    host: str
    xml: str
    is_active: bool
    leases: dict[str, tuple[str, ...]]


async def discover(libvirts: Libvirts, hosts: Iterable[str]) -> dict[str, list[Description]]:
    """The domains of each host; the host "" has the name that its libvirt gives it. One that does not answer fails it all."""
    turns = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)

    async def look(host: str) -> tuple[str, list[Description]]:
        async with turns:
            return await libvirts.ask(host, lambda connection: _describe_all(connection, host or connection.getHostname()))

    return dict(await asyncio.gather(*(look(host) for host in hosts)))


def _describe_all(connection: Any, host: str) -> tuple[str, list[Description]]:
    handles = sorted(connection.listAllDomains(), key=lambda handle: str(handle.name()))
    found = [_describe(handle, host) for handle in handles]
    return host, [domain for domain in found if domain is not None]


def _describe(handle: Any, host: str) -> Description | None:
    try:
        return Description(host, handle.XMLDesc(), bool(handle.isActive()), _leases(handle))
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:  # it has ended since
            return None
        raise


def _leases(handle: Any) -> dict[str, tuple[str, ...]]:
    """Nothing for a domain that does not run, or whose network gives no leases."""
    try:
        interfaces = handle.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE)
    except libvirt.libvirtError:
        return {}
    found = [one for one in interfaces.values() if one["hwaddr"] and one["addrs"]]
    return {one["hwaddr"].lower(): tuple(address["addr"] for address in one["addrs"]) for one in found}
