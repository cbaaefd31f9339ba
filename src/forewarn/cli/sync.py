"""`forewarn fleet sync libvirt`: the fleet that libvirt describes."""

import asyncio
import json
from itertools import chain
from typing import Any

from forewarn.config import Config
from forewarn.fleetfile import parser
from forewarn.platform.libvirt.connection import LibvirtHosts
from forewarn.platform.libvirt.discovery import discover
from forewarn.platform.libvirt.fleet_import import sync_fleet


def build_fleet_from_libvirt(current: dict[str, Any], config: Config) -> bytes:
    """The fleet file that brings the current fleet in line with libvirt."""
    fleet = parser.parse(json.dumps(current).encode(), "the current fleet")
    libvirts = LibvirtHosts(config.libvirt_uri, call_seconds_max=config.libvirt_call_seconds_max)
    found = asyncio.run(discover(libvirts, hosts_to_query(fleet, config)))
    return parser.dump_json(sync_fleet(fleet, chain(*found.values()), list(found)))


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
