"""Connections to the libvirt of each host, and its domains.

Every call runs in a thread and has a time limit. libvirt's errors and timeouts become ImpactFailed.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import libvirt

from forewarn.config import HostUri
from forewarn.core.fleet import Vm
from forewarn.errors import ImpactFailed
from forewarn.platform.libvirt.marker import is_marked
from forewarn.platform.threads import LAST_CALL_SECONDS, CallThreads, run_to_completion

T = TypeVar("T")
Connect = Callable[[str], Any]

KEEPALIVE_SECONDS, KEEPALIVE_COUNT = 5, 3
CANNOT_MIGRATE = (
    libvirt.VIR_ERR_NO_SUPPORT,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED,
    libvirt.VIR_ERR_MIGRATE_UNSAFE,
)
"""Error codes that mean a domain cannot be migrated live."""


class LibvirtError(ImpactFailed):
    """libvirt refused a call. `number` is its error code."""

    def __init__(self, message: str, number: int, **facts: object) -> None:
        super().__init__(message, **facts)
        self.number = number


class LibvirtHosts:
    """Connects to the libvirt of a host. Connections are opened when needed and reused."""

    def __init__(
        self,
        uris: Iterable[HostUri],
        *,
        call_seconds_max: float,
        connect: Connect | None = None,
        threads: CallThreads | None = None,
    ) -> None:
        self._uris = {uri.host: uri.uri for uri in uris}
        self._call_seconds_max = call_seconds_max
        self._connect = connect or open_connection
        self._threads = threads or CallThreads()
        self._connections: dict[str, Any] = {}

    def uri(self, host: str) -> str:
        """Return the URI of the host's libvirt, empty if none is configured."""
        uri = self._uris.get(host) or self._uris.get("", "")
        return uri.replace("{host}", host) if host or "{host}" not in uri else ""

    async def ask(
        self,
        host: str,
        question: Callable[[Any], T],
        seconds_max: float | None = None,
        undo: Callable[[], object] | None = None,
    ) -> T:
        """Call a function with the host's connection.

        Calls with their own `seconds_max` are long; they do not block short ones.
        """
        uri = self.uri(host)
        if not uri:
            raise ImpactFailed(
                f"libvirt_uri has no URI for host {host!r};"
                " expected HOST=URI, or a URI with {host}",
                host=host,
            )

        def work() -> T:
            connection = self._connections.get(uri)
            if connection is None or not connection.isAlive():
                connection = self._connections[uri] = self._connect(uri)
            return question(connection)

        limit = seconds_max or self._call_seconds_max
        try:
            return await self._threads.call(
                f"{uri} long" if seconds_max else uri, work, limit, undo=undo
            )
        except libvirt.libvirtError as error:
            raise LibvirtError(
                f"libvirt of {host or uri}: {error}", error.get_error_code() or 0, host=host
            ) from error
        except TimeoutError:
            self._connections.pop(uri, None)  # the hanging thread keeps the old one
            raise ImpactFailed(
                f"libvirt of {host or uri} did not answer within {limit:g} seconds", host=host
            ) from None

    async def find(self, host: str, vm: Vm) -> "Domain | None":
        """Find the VM's domain on this host, by id if it has one, else by name."""

        def look(connection: Any) -> Any:
            try:
                if vm.id:
                    return connection.lookupByUUIDString(vm.id)
                return connection.lookupByName(vm.name)
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise

        handle = await self.ask(host, look)
        return None if handle is None else Domain(self, host, handle)

    async def define(self, host: str, xml: str) -> "Domain":
        return Domain(
            self, host, await self.ask(host, lambda connection: connection.defineXML(xml))
        )


@dataclass(frozen=True)
class Domain:
    """A domain on a host."""

    libvirts: LibvirtHosts
    host: str
    handle: Any

    async def do(self, verb: Callable[[Any], T], seconds_max: float | None = None) -> T:
        """Call a function with the domain's handle."""
        return await self.libvirts.ask(self.host, lambda _: verb(self.handle), seconds_max)

    async def do_or_undo(self, verb: Callable[[Any], T], undo: Callable[[Any], object]) -> T:
        """Call a function, and undo it if it completes after its timeout."""
        return await self.libvirts.ask(
            self.host, lambda _: verb(self.handle), undo=lambda: undo(self.handle)
        )

    async def is_marked(self, event_id: str) -> bool:
        """Whether an earlier try of this event has begun to act."""
        return await self.do(lambda handle: is_marked(handle, event_id))

    def run_to_completion(self, verb: Callable[[Any], object]) -> None:
        """Make the last call of a cancelled try."""
        run_to_completion(lambda: verb(self.handle), LAST_CALL_SECONDS)

    async def state(self) -> tuple[int, int]:
        """Return libvirt's state and reason. A transient domain that has ended is off."""
        try:
            state, reason = await self.do(lambda handle: handle.state())
        except LibvirtError as refused:
            if refused.number == libvirt.VIR_ERR_NO_DOMAIN:
                return libvirt.VIR_DOMAIN_SHUTOFF, 0
            raise
        return state, reason

    async def is_off(self) -> bool:
        state, _ = await self.state()
        return state in (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_NOSTATE)

    async def definition(self) -> str:
        """Return the XML that defines it again, here or on another host."""
        flags = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE
        return str(await self.do(lambda handle: handle.XMLDesc(flags)))

    async def undefine(self, *, keep_nvram: bool) -> None:
        """Undefine it with its saved state. A domain that is already gone is not an error."""

        def work(handle: Any) -> None:
            flags = (
                libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
                | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
            )
            if "<nvram" in handle.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE):
                flags |= (
                    libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM
                    if keep_nvram
                    else libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
                )
            handle.undefineFlags(flags)

        try:
            await self.do(work)
        except LibvirtError as refused:
            if refused.number != libvirt.VIR_ERR_NO_DOMAIN:
                raise

    async def listen_for_reboot(self) -> tuple[threading.Event, Callable[[], None]]:
        """Return an event that is set when the guest reboots, and a function to unsubscribe."""
        rebooted = threading.Event()

        def listen(handle: Any) -> tuple[Any, int]:
            connection = handle.connect()
            kind = libvirt.VIR_DOMAIN_EVENT_ID_REBOOT
            return connection, connection.domainEventRegisterAny(
                handle, kind, lambda *_: rebooted.set(), None
            )

        connection, number = await self.do(listen)
        return rebooted, lambda: run_to_completion(
            lambda: connection.domainEventDeregisterAny(number), LAST_CALL_SECONDS
        )


_PREPARING = threading.Lock()


def open_connection(uri: str) -> Any:
    with _PREPARING:
        prepare()
    connection = libvirt.open(uri)
    with suppress(libvirt.libvirtError):  # in-process drivers have no keepalive
        connection.setKeepAlive(KEEPALIVE_SECONDS, KEEPALIVE_COUNT)
    return connection


@functools.cache
def prepare() -> None:
    """Start libvirt's event loop thread and silence its error output, once per process."""
    libvirt.registerErrorHandler(lambda context, error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def run() -> None:
        while True:  # ends with the process
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=run, daemon=True, name="libvirt-events").start()
