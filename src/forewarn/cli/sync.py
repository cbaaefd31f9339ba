"""`forewarn fleet sync libvirt`: the fleet that libvirt describes."""

import asyncio
import json
from typing import Any

from forewarn.config import Config
from forewarn.fleetfile import parser
from forewarn.platform.libvirt import fleet_import
from forewarn.platform.libvirt.connection import LibvirtHosts
from forewarn.platform.libvirt.discovery import discover


def build_fleet_from_libvirt(current: dict[str, Any], config: Config) -> bytes:
    """The fleet file that brings the current fleet in line with libvirt."""
    fleet = parser.parse(json.dumps(current).encode(), "the current fleet")
    libvirts = LibvirtHosts(config.libvirt_uri, call_seconds_max=config.libvirt_call_seconds_max)
    found = asyncio.run(discover(libvirts, hosts_to_query(fleet, config)))
    domains = [
        fleet_import.parse(
            domain.xml, host=domain.host, is_active=domain.is_active, leases=domain.leases
        )
        for domains in found.values()
        for domain in domains
    ]
    return json.dumps(parser.dump(fleet_import.sync_fleet(fleet, domains, list(found)))).encode()


def hosts_to_query(fleet: parser.Fleet, config: Config) -> list[str]:
    """Hosts with a URI of their own; for a URI with {host}, every host of the fleet.

    "" stands for a plain URI: whichever host answers there.
    """
    hosts = {each.host for each in config.libvirt_uri if each.host}
    for each in config.libvirt_uri:
        if not each.host and "{host}" not in each.uri:
            hosts.add("")
        elif not each.host:
            hosts |= {
                *fleet.hosts,
                *(vm.host for scope in fleet.scopes for vm in scope.vms if vm.host),
            }
    return sorted(hosts)
