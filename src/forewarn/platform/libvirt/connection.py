"""The libvirt of each host: connections, domains, and their verbs. Every call is made in a thread
and has a limit.

Foreign errors end here: whatever libvirt refuses, and whoever does not answer, is an ImpactFailed.
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
from forewarn.platform.threads import LAST_CALL_SECONDS, Threads, see_through

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
"""What libvirt says where a domain cannot be moved while it runs, today or ever."""


class LibvirtRefused(ImpactFailed):
    """Libvirt says no. `number` is its own code for the reason."""

    def __init__(self, message: str, number: int, **facts: object) -> None:
        super().__init__(message, **facts)
        self.number = number


class Libvirts:
    """Finds the libvirt of a host by the `uris`.

    Connections are opened when needed and kept while they live.
    """

    def __init__(
        self,
        uris: Iterable[HostUri],
        *,
        call_seconds_max: float,
        connect: Connect | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._uris = {one.host: one.uri for one in uris}
        self._call_seconds_max = call_seconds_max
        self._connect = connect or open_connection
        self._threads = threads or Threads()
        self._connections: dict[str, Any] = {}

    def uri(self, host: str) -> str:
        """Where the host's libvirt answers; empty if nobody said."""
        uri = self._uris.get(host) or self._uris.get("", "")
        return uri.replace("{host}", host) if host or "{host}" not in uri else ""

    async def ask(
        self,
        host: str,
        question: Callable[[Any], T],
        seconds_max: float | None = None,
        undo: Callable[[], object] | None = None,
    ) -> T:
        """What the host's connection answers.

        Long calls, with a limit of their own, do not stand in the way of short ones.
        """
        uri = self.uri(host)
        if not uri:
            raise ImpactFailed(
                f"libvirt_uri says nothing of host {host!r}; expected HOST=URI or a URI with {{host}}",
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
            raise LibvirtRefused(
                f"libvirt of {host or uri}: {error}", error.get_error_code() or 0, host=host
            ) from error
        except TimeoutError:
            self._connections.pop(uri, None)  # the thread that hangs keeps the old one
            raise ImpactFailed(
                f"libvirt of {host or uri} did not answer within {limit:g} seconds", host=host
            ) from None

    async def find(self, host: str, vm: Vm) -> "Domain | None":
        """The VM's domain on this host: by its id where it has one, else by its name."""

        def look(connection: Any) -> Any:
            try:
                return (
                    connection.lookupByUUIDString(vm.id)
                    if vm.id
                    else connection.lookupByName(vm.name)
                )
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise

        found = await self.ask(host, look)
        return None if found is None else Domain(self, host, found)

    async def define(self, host: str, xml: str) -> "Domain":
        return Domain(
            self, host, await self.ask(host, lambda connection: connection.defineXML(xml))
        )


@dataclass(frozen=True)
class Domain:
    """A domain and the host whose libvirt knows it."""

    libvirts: Libvirts
    host: str
    handle: Any

    async def do(self, verb: Callable[[Any], T], seconds_max: float | None = None) -> T:
        """One call. The handle keeps its own connection, so the host's is not asked for."""
        return await self.libvirts.ask(self.host, lambda _: verb(self.handle), seconds_max)

    async def do_or_undo(self, verb: Callable[[Any], T], undo: Callable[[Any], object]) -> T:
        """One call that is undone if it comes through after we have given it up."""
        return await self.libvirts.ask(
            self.host, lambda _: verb(self.handle), undo=lambda: undo(self.handle)
        )

    async def is_marked(self, event_id: str) -> bool:
        """Whether an earlier try of this event had begun to act."""
        return await self.do(lambda handle: is_marked(handle, event_id))

    def see_through(self, verb: Callable[[Any], object]) -> None:
        """The last call of a try that was cancelled."""
        see_through(lambda: verb(self.handle), LAST_CALL_SECONDS)

    async def state(self) -> tuple[int, int]:
        """State and reason, as libvirt numbers them. A transient domain that has ended is off."""
        try:
            state, reason = await self.do(lambda handle: handle.state())
        except LibvirtRefused as refused:
            if refused.number == libvirt.VIR_ERR_NO_DOMAIN:
                return libvirt.VIR_DOMAIN_SHUTOFF, 0
            raise
        return state, reason

    async def is_off(self) -> bool:
        state, _ = await self.state()
        return state in (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_NOSTATE)

    async def definition(self) -> str:
        """The XML that makes it anew, here or elsewhere."""
        flags = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE
        return str(await self.do(lambda handle: handle.XMLDesc(flags)))

    async def undefine(self, *, keep_nvram: bool) -> None:
        """Forget it, and what libvirt keeps for it. Who is gone already is forgotten already."""

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
        except LibvirtRefused as refused:
            if refused.number != libvirt.VIR_ERR_NO_DOMAIN:
                raise

    async def listen_for_reboot(self) -> tuple[threading.Event, Callable[[], None]]:
        """An event that is set when the guest reboots, and the way to stop listening."""
        heard = threading.Event()

        def listen(handle: Any) -> tuple[Any, int]:
            connection = handle.connect()
            what = libvirt.VIR_DOMAIN_EVENT_ID_REBOOT
            return connection, connection.domainEventRegisterAny(
                handle, what, lambda *told: heard.set(), None
            )

        connection, number = await self.do(listen)
        return heard, lambda: see_through(
            lambda: connection.domainEventDeregisterAny(number), LAST_CALL_SECONDS
        )


_PREPARING = threading.Lock()


def open_connection(uri: str) -> Any:
    with _PREPARING:
        prepare()
    connection = libvirt.open(uri)
    with suppress(libvirt.libvirtError):  # a driver inside this process has nobody to keep alive
        connection.setKeepAlive(KEEPALIVE_SECONDS, KEEPALIVE_COUNT)
    return connection


@functools.cache
def prepare() -> None:
    """Once in a process, before the first connection: libvirt's events get a thread, and its errors
    do not go to stderr.
    """
    libvirt.registerErrorHandler(lambda context, error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def run() -> None:
        while True:  # ends with the process
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=run, daemon=True, name="libvirt-events").start()
