"""Connections to the libvirt of each host, and its domains.

Every call runs in a thread and has a time limit. libvirt's errors and timeouts become ImpactFailed.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import libvirt

from forewarn.core.fleet import Vm
from forewarn.errors import ImpactFailed
from forewarn.option_kind import HostUri
from forewarn.platform.threads import CallThreads, run_to_completion

T = TypeVar("T")

KEEPALIVE_SECONDS, KEEPALIVE_COUNT = 5, 3
HOSTS_AT_ONCE_MAX = 16
UNSUPPORTED = (
    libvirt.VIR_ERR_NO_SUPPORT,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED,
)
"""Error codes that mean a domain cannot do this: it has no channel for a guest agent, say."""
OFF = (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_NOSTATE)


class LibvirtError(ImpactFailed):
    """libvirt refused a call. Its fact `number` is libvirt's VIR_ERR_…"""


class LibvirtHosts:
    """Connects to the libvirt of a host. Connections are opened when needed and reused."""

    def __init__(
        self,
        uris: Iterable[HostUri],
        *,
        call_seconds_max: float,
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        prepare()
        self._uris = {uri.host: uri.uri for uri in uris}
        self.call_seconds_max = call_seconds_max
        self._connect = connect or open_connection
        self._threads = CallThreads()
        self._connections: dict[str, Any] = {}

    def uri(self, host: str) -> str:
        """Return the URI of the host's libvirt, empty if none is configured."""
        uri = self._uris.get(host) or self._uris.get("", "")
        return uri.replace("{host}", host) if host or "{host}" not in uri else ""

    async def ask(
        self, host: str, question: Callable[[Any], T], seconds_max: float | None = None
    ) -> T:
        """Call a function with the host's connection.

        Calls with their own `seconds_max` have threads of their own, for each limit: if the agent
        of a guest hangs, that delays neither a short call nor a migration.
        """
        uri = self.uri(host)
        assert uri, host  # libvirt would connect to this machine

        def work() -> T:
            connection = self._connections.get(uri)
            if connection is None or not connection.isAlive():
                connection = self._connections[uri] = self._connect(uri)
            return question(connection)

        limit = seconds_max or self.call_seconds_max
        threads = f"{uri} {limit:g}" if seconds_max else uri
        try:
            return await self._threads.call(threads, work, limit)
        except libvirt.libvirtError as error:
            number = error.get_error_code()
            raise LibvirtError(f"libvirt of {host or uri}: {error}", number=number) from error
        except BlockingIOError as error:
            raise ImpactFailed(
                f"libvirt of {host or uri} cannot be called: {error.strerror}", host=host
            ) from error
        except TimeoutError:
            if not seconds_max:
                self._connections.pop(uri, None)  # the hanging thread keeps the old one
            raise ImpactFailed(
                f"libvirt of {host or uri} did not answer within {limit:g} seconds", host=host
            ) from None

    async def for_each(self, hosts: Iterable[str], call: Callable[[str], Awaitable[T]]) -> list[T]:
        """Call a function with each host, a few at a time."""
        slots = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)

        async def call_one(host: str) -> T:
            async with slots:
                return await call(host)

        return await asyncio.gather(*map(call_one, hosts))

    async def find(self, host: str, vm: Vm, *, is_needed: bool = False) -> "Domain | None":
        """Find the VM's domain on this host, by id if it has one, else by name.

        A host without a URI has none, unless an answer `is_needed`.
        """
        if not self.uri(host):
            if is_needed:
                raise ImpactFailed("it has no libvirt_uri", host=host)
            return None

        def look(connection: Any) -> Any:
            with ignoring(libvirt.VIR_ERR_NO_DOMAIN):
                if vm.id:
                    return connection.lookupByUUIDString(vm.id)
                return connection.lookupByName(vm.name)

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

    async def do_to_the_end(self, verb: Callable[[Any], object]) -> None:
        """Like `do`. Ends with the call even if it is cancelled, so that nothing changes later."""
        call = asyncio.ensure_future(self.do(verb))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.gather(call, return_exceptions=True)
            raise

    async def state(self) -> tuple[int, int]:
        """Return libvirt's state and reason. A transient domain that has ended is off."""

        def work(handle: Any) -> tuple[int, int]:
            with ignoring(libvirt.VIR_ERR_NO_DOMAIN):
                state, reason = handle.state()
                return state, reason
            return libvirt.VIR_DOMAIN_SHUTOFF, 0

        return await self.do(work)

    async def is_off(self) -> bool:
        state, _ = await self.state()
        return state in OFF

    async def undefine(self, nvram: int) -> None:
        """Undefine it with its saved state. A domain that is already gone is not an error.

        `nvram` is libvirt's flag that keeps or deletes the NVRAM.
        """

        def work(handle: Any) -> None:
            flags = (
                libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
                | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
            )
            with ignoring(libvirt.VIR_ERR_NO_DOMAIN):
                if "<nvram" in handle.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE):
                    flags |= nvram
                handle.undefineFlags(flags)

        await self.do(work)

    @asynccontextmanager
    async def watch_reboot(self) -> AsyncIterator[threading.Event]:
        """Within this, an event that is set when the guest reboots."""
        rebooted = threading.Event()

        def listen(handle: Any) -> tuple[Any, int]:
            connection = handle.connect()
            kind = libvirt.VIR_DOMAIN_EVENT_ID_REBOOT
            return connection, connection.domainEventRegisterAny(
                handle, kind, lambda *_: rebooted.set(), None
            )

        connection, number = await self.do(listen)
        try:
            yield rebooted
        finally:
            run_to_completion(lambda: connection.domainEventDeregisterAny(number))


@contextmanager
def ignoring(*codes: int) -> Iterator[None]:
    """Ignore an error of libvirt if it has one of these codes."""
    try:
        yield
    except libvirt.libvirtError as error:
        if error.get_error_code() not in codes:
            raise


def open_connection(uri: str) -> Any:
    connection = libvirt.open(uri)
    with suppress(libvirt.libvirtError):  # in-process drivers have no keepalive
        connection.setKeepAlive(KEEPALIVE_SECONDS, KEEPALIVE_COUNT)
    return connection


@functools.cache
def prepare() -> None:
    """Start libvirt's event loop thread and silence its error output, once per process.

    libvirt needs this before the first connection is opened.
    """
    libvirt.registerErrorHandler(lambda context, error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def run() -> None:
        while True:  # ends with the process
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=run, daemon=True, name="libvirt-events").start()
