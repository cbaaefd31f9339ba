"""What `forewarn fleet sync libvirt` asks libvirt, put together: which hosts, what they tell, what
the fleet becomes.
"""

import asyncio
import json
from typing import Any

from forewarn.config import Config
from forewarn.fleetfile import parser as fleet
from forewarn.platform.libvirt import fleet_import as domain
from forewarn.platform.libvirt.connection import LibvirtHosts
from forewarn.platform.libvirt.discovery import discover


def build_fleet_from_libvirt(told: dict[str, Any], config: Config) -> bytes:
    """The fleet file that brings the fleet, as the service tells it, in line with libvirt."""
    known = fleet.parse(json.dumps(told).encode(), "the fleet in force")
    libvirts = LibvirtHosts(config.libvirt_uri, call_seconds_max=config.libvirt_call_seconds_max)
    found = asyncio.run(discover(libvirts, hosts_to_ask(known, config)))
    domains = [
        domain.parse(one.xml, host=one.host, is_active=one.is_active, leases=one.leases)
        for each in found.values()
        for one in each
    ]
    return json.dumps(fleet.dump(domain.sync_fleet(known, domains, list(found)))).encode()


def hosts_to_ask(known: fleet.Fleet, config: Config) -> list[str]:
    """Those with a URI of their own; with a pattern, every host of the fleet; with a plain URI,
    whichever host answers there.
    """
    named = {one.host for one in config.libvirt_uri if one.host}
    for one in config.libvirt_uri:
        if not one.host and "{host}" not in one.uri:
            named.add("")
        elif not one.host:
            named |= {
                *known.hosts,
                *(vm.host for scope in known.scopes for vm in scope.vms if vm.host),
            }
    return sorted(named)
