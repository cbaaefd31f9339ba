"""Lists the domains of the local libvirt; its events say when that is worth doing again."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import libvirt

from forewarn.errors import Invalid
from forewarn.hostd.inventory import ListedVm, Report
from forewarn.log import log
from forewarn.platform.file_systems import MountTable, read_mounts
from forewarn.platform.libvirt.connection import LibvirtHosts
from forewarn.platform.libvirt.discovery import list_domains
from forewarn.platform.libvirt.domain_xml import DiscoveredVm

EVENTS = (
    libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE,
    libvirt.VIR_DOMAIN_EVENT_ID_METADATA_CHANGE,
    libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_ADDED,
    libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED,
)


class LibvirtSource:
    """`Inventory.run` is its only caller, with one call at a time."""

    def __init__(
        self,
        libvirts: LibvirtHosts,
        host: str,
        read_mounts: Callable[[], MountTable] = read_mounts,
    ) -> None:
        self._read_mounts = read_mounts
        self._libvirts = libvirts
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._watched: Any = None
        self._logged: set[str] = set()
        self.woken = asyncio.Event()

    async def list_vms(self) -> Report:
        return await self._libvirts.ask(self._host, self._list)

    def _list(self, connection: Any) -> Report:
        """Runs in a thread."""
        if connection is not self._watched:
            self._watch(connection)
        problems = list[Invalid]()
        found = list_domains(connection, self._host, problems, self._read_mounts())
        for message in {each.message for each in problems} - self._logged:
            log.warning("metadata of a domain ignored", problem=message)
        self._logged = {each.message for each in problems}
        vms = tuple(to_listed(vm) for vm in found if vm.ignore != "yes")
        return Report(connection.getInfo()[1] << 20, vms)

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
