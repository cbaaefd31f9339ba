"""Connections to the libvirt of each host, and its domains.

Every call runs in a thread and has a time limit. libvirt's errors and timeouts become ImpactFailed.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import libvirt

from forewarn.core.fleet import Vm
from forewarn.errors import ImpactFailed
from forewarn.option_kind import HostUri
from forewarn.platform.threads import CallThreads, Change, run_to_completion

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


def do_nothing() -> None:
    """What a canceled call does that can only be awaited."""


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
        self._replacing = threading.Lock()

    def uri(self, host: str) -> str:
        """Return the URI of the host's libvirt, empty if none is configured."""
        uri = self._uris.get(host) or self._uris.get("", "")
        return uri.replace("{host}", host) if host or "{host}" not in uri else ""

    async def ask(
        self,
        host: str,
        question: Callable[[Any], T],
        seconds_max: float | None = None,
        on_cancel: Callable[[], object] | None = None,
        changes: str = "",
    ) -> T:
        """Call a function with the host's connection.

        Calls with their own `seconds_max` have threads of their own, for each limit: if the agent
        of a guest hangs, that delays neither a short call nor a migration. A call that `changes` a
        domain, by its UUID, has `on_cancel`, too: see `CallThreads.call`.
        """
        uri = self.uri(host)
        assert uri, host  # libvirt would connect to this machine

        used: Any | None = None

        def work() -> T:
            nonlocal used
            used = self._connections.get(uri)
            if used is None or not used.isAlive():
                used = self._replace(uri, used)
            return question(used)

        limit = seconds_max or self.call_seconds_max
        threads = f"{uri} {limit:g}" if seconds_max else uri
        try:
            change = Change(changes, host or uri) if changes else None
            return await self._threads.call(threads, work, limit, on_cancel, change)
        except libvirt.libvirtError as error:
            number = error.get_error_code()
            raise LibvirtError(f"libvirt of {host or uri}: {error}", number=number) from error
        except BlockingIOError as error:
            raise ImpactFailed(
                f"libvirt of {host or uri} cannot be called: {error.strerror}", host=host
            ) from error
        except TimeoutError:
            if not seconds_max:
                self._drop(uri, used)
            raise ImpactFailed(
                f"libvirt of {host or uri} did not answer within {limit:g} seconds", host=host
            ) from None

    def _refuse_unended(self, uuid: str) -> None:
        """ImpactFailed while a call that changes this domain, on any host, has not ended.

        A thread cannot be canceled: after its time limit, the call may still act, also on what a
        later try has done.
        """
        for change in self._threads.list_unended():
            if change.vm == uuid:
                raise ImpactFailed(
                    f"an earlier call on {change.host} has not ended", host=change.host
                )

    def _drop(self, uri: str, hung: Any | None) -> None:
        """Let the next call open a connection, unless one has replaced that which hung."""
        with self._replacing:
            if self._connections.get(uri) is hung:
                self._connections.pop(uri, None)

    def _replace(self, uri: str, old: Any | None) -> Any:
        """Open a connection, unless another thread has done so meanwhile."""
        opened = self._connect(uri)
        with self._replacing:
            current = self._connections.get(uri)
            if current is None or current is old:
                current = self._connections[uri] = opened
        return current

    async def for_each(self, hosts: Iterable[str], call: Callable[[str], Awaitable[T]]) -> list[T]:
        """Call a function with each host, a few at a time."""
        slots = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)

        async def call_one(host: str) -> T:
            async with slots:
                return await call(host)

        return await asyncio.gather(*map(call_one, hosts))

    async def find(self, host: str, vm: Vm, *, is_needed: bool = False) -> "Domain | None":
        """Find the VM's domain on this host, by id if it has one, else by name.

        A host without a URI has none, unless an answer `is_needed`. ImpactFailed while an earlier
        call may still act on the VM, on any host.
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
        found = None if handle is None else Domain(self, host, handle)
        self._refuse_unended(found.uuid if found is not None else vm.id.lower())
        return found

    async def define(self, host: str, xml: str, uuid: str) -> "Domain":
        def work(connection: Any) -> Any:
            return connection.defineXML(xml)

        handle = await self.ask(host, work, on_cancel=do_nothing, changes=uuid)
        return Domain(self, host, handle)


@dataclass(frozen=True)
class Domain:
    """A domain on a host."""

    libvirts: LibvirtHosts
    host: str
    handle: Any

    @property
    def uuid(self) -> str:
        return str(self.handle.UUIDString())

    async def ask(self, question: Callable[[Any], T], seconds_max: float | None = None) -> T:
        """Call a function with the domain's handle that no later call has to wait for.

        It changes nothing, or what may change at any time.
        """
        return await self.libvirts.ask(self.host, lambda _: question(self.handle), seconds_max)

    async def do(
        self,
        verb: Callable[[Any], T],
        seconds_max: float | None = None,
        on_cancel: Callable[[], object] = do_nothing,
    ) -> T:
        """Call a function with the domain's handle that changes the domain.

        Ends when the function has, even if it is canceled: nothing changes later. One that outlives
        its time limit is remembered: see `LibvirtHosts.find`.
        """
        return await self.libvirts.ask(
            self.host, lambda _: verb(self.handle), seconds_max, on_cancel, self.uuid
        )

    async def state(self) -> tuple[int, int]:
        """Return libvirt's state and reason. A transient domain that has ended is off."""

        def work(handle: Any) -> tuple[int, int]:
            with ignoring(libvirt.VIR_ERR_NO_DOMAIN):
                state, reason = handle.state()
                return state, reason
            return libvirt.VIR_DOMAIN_SHUTOFF, 0

        return await self.ask(work)

    async def is_off(self) -> bool:
        state, _ = await self.state()
        return state in OFF

    async def is_migrating(self) -> bool:
        """Whether a migration takes it away, or brings it: that may still succeed.

        Only the host that it leaves has statistics of the job.
        """

        def work(handle: Any) -> bool:
            try:
                job = handle.jobStats()
            except libvirt.libvirtError as error:
                number = error.get_error_code()
                if number == libvirt.VIR_ERR_OPERATION_INVALID:
                    return bool(handle.isActive())
                if number in (libvirt.VIR_ERR_NO_DOMAIN, *UNSUPPORTED):
                    return False
                raise
            is_running = job["type"] in (
                libvirt.VIR_DOMAIN_JOB_BOUNDED,
                libvirt.VIR_DOMAIN_JOB_UNBOUNDED,
            )
            migration = libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT
            return is_running and job.get(libvirt.VIR_DOMAIN_JOB_OPERATION, migration) == migration

        return await self.ask(work)

    async def undefine(self, nvram: int, *, only_if_off: bool = False) -> None:
        """Undefine it with its saved state. A domain that is already gone is not an error.

        `nvram` is libvirt's flag that keeps or deletes the NVRAM.
        """

        def work(handle: Any) -> None:
            flags = (
                libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
                | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
            )
            with ignoring(libvirt.VIR_ERR_NO_DOMAIN):
                if only_if_off and handle.state()[0] not in OFF:
                    return
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


closing: SimpleQueue[Callable[[], None]] = SimpleQueue()


class LibvirtConnection(libvirt.virConnect):  # type: ignore[misc]
    """A connection that is closed in a background thread, whatever lets go of it last.

    Closing one waits for the host. The event loop may be the last, because it has the domains of
    the connection, and the errors that were raised in its calls.
    """

    def __del__(self) -> None:
        closing.put(super().__del__)  # which keeps it alive until then


def open_connection(uri: str) -> Any:
    connection = libvirt.open(uri)
    connection.__class__ = LibvirtConnection
    with suppress(libvirt.libvirtError):  # in-process drivers have no keepalive
        connection.setKeepAlive(KEEPALIVE_SECONDS, KEEPALIVE_COUNT)
    return connection


@functools.cache
def prepare() -> None:
    """Start libvirt's event loop thread and silence its error output, once per process.

    libvirt needs this before the first connection is opened. A second thread closes connections.
    """
    libvirt.registerErrorHandler(lambda context, error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def run() -> None:
        while True:  # ends with the process
            libvirt.virEventRunDefaultImpl()

    def close() -> None:
        while True:  # ends with the process
            with suppress(Exception):  # there is no caller to raise it in
                closing.get()()

    threading.Thread(target=run, daemon=True, name="libvirt-events").start()
    threading.Thread(target=close, daemon=True, name="libvirt-close").start()
