"""Lists the domains of the local libvirt; its events say when that is worth doing again."""

import asyncio
from contextlib import suppress
from typing import Any

import libvirt

from forewarn.errors import Invalid
from forewarn.hostd.inventory import ListedVm, Report
from forewarn.log import log
from forewarn.platform.libvirt.connection import LibvirtHosts
from forewarn.platform.libvirt.discovery import describe, list_leases
from forewarn.platform.libvirt.domain_xml import DiscoveredVm, Leases

EVENTS = (
    libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE,
    libvirt.VIR_DOMAIN_EVENT_ID_METADATA_CHANGE,
    libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_ADDED,
    libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED,
)


class LibvirtSource:
    """`Inventory.run` is its only caller, with one call at a time."""

    def __init__(self, libvirts: LibvirtHosts, host: str) -> None:
        self._libvirts = libvirts
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._watched: Any = None
        self._logged: dict[str, str] = {}
        self.woken = asyncio.Event()

    async def list_vms(self) -> Report:
        return await self._libvirts.ask(self._host, self._list)

    def _list(self, connection: Any) -> Report:
        """Runs in a thread."""
        if connection is not self._watched:
            self._watch(connection)
        leases = list_leases(connection)
        handles = sorted(connection.listAllDomains(), key=lambda handle: str(handle.name()))
        found = [self._describe(handle, leases) for handle in handles]
        vms = tuple(to_listed(vm) for vm in found if vm is not None and vm.ignore != "yes")
        return Report(connection.getInfo()[1] << 20, vms)

    def _describe(self, handle: Any, leases: Leases) -> DiscoveredVm | None:
        """A domain whose metadata is not valid is reported without: it must not disappear."""
        try:
            return describe(handle, self._host, leases)
        except Invalid as error:
            name = str(error.facts["domain"])
            if self._logged.get(name) != error.message:
                self._logged[name] = error.message
                log.warning("metadata of a domain ignored", problem=error.message)
            return describe(handle, self._host, leases, with_metadata=False)

    def _watch(self, connection: Any) -> None:
        for event in EVENTS:
            connection.domainEventRegisterAny(None, event, self._on_event, None)
        with suppress(libvirt.libvirtError):  # in-process drivers have no connection to lose
            connection.registerCloseCallback(self._on_event, None)
        self._watched = connection

    def _on_event(self, *_: object) -> None:
        """Called in libvirt's thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.woken.set)


def to_listed(vm: DiscoveredVm) -> ListedVm:
    names = {*ListedVm.__struct_fields__} - {"power"}
    fields = {name: getattr(vm, name) for name in names}
    return ListedVm(**fields, power="running" if vm.is_active else "stopped")
