"""The client for ordinary programs: blocking calls, usable from any thread.

Any error closes the connection, so a response is never taken for that of another request. A request
that the server never saw, because it had closed an idle connection, is sent a second time. An
approval always gets its own connection, so it never uses a stale connection or waits behind a long
poll. What does not depend on threads is in `BaseClient`, which `aio.AsyncClient` shares.
"""

import errno
import os
import selectors
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypeVar

from forewarn.client.backoff import PERIOD_SECONDS, WAIT_SECONDS, ClientClock, PollSchedule
from forewarn.client.discovery import discover
from forewarn.client.errors import ConnectionFailed, EndpointError
from forewarn.client.http1 import READ_BYTES, ConnectionClosed, Endpoint, Reader, Response
from forewarn.client.models import Document
from forewarn.client.protocol import (
    API_VERSION,
    INSTANCE_VERSION,
    TIMEOUT_SECONDS,
    Api,
    ApiRequest,
    ConditionalCache,
    vm_name,
)
from forewarn.client.watcher import Change, Watcher

CLOSE_CHECK_SECONDS = 0.05
"""How soon a pending connect notices that the client was closed."""
CONNECTING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
CLOSED = "this client is closed"
KEEPALIVE = {
    "TCP_KEEPIDLE": 3,
    "TCP_KEEPALIVE": 3,  # what macOS calls it
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 6000,  # the same for a request that is not acknowledged, in milliseconds
}
"""A peer that is gone is noticed after 6 seconds, and one that knows nothing of the connection, as
after a live migration, after 3. A system that lacks one of these options uses its own values."""

T = TypeVar("T")


class Stop(Protocol):
    """Ends a watch, as `threading.Event` does."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float) -> object: ...


class Interruptible(Protocol):
    """A connection. `interrupt` ends the call that uses it, `close` a connection without one."""

    def interrupt(self) -> None: ...
    def close(self) -> None: ...


Connection = TypeVar("Connection", bound=Interruptible)


class BaseClient(Generic[Connection]):
    """State of a client, and which connection a call uses. Sends nothing itself.

    One idle connection is kept. A list and a set change atomically, so this needs no lock, which
    a signal handler that calls `close` could not wait for.
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        api_version: str = API_VERSION,
        instance_version: str = INSTANCE_VERSION,
        timeout_seconds: float = TIMEOUT_SECONDS,
        clock: ClientClock = ClientClock(),  # noqa: B008 - a frozen value
    ) -> None:
        endpoint = endpoint or discover(os.environ)
        self._api = Api(endpoint, api_version=api_version, instance_version=instance_version)
        self._cache = ConditionalCache(clock.monotonic)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._closed = threading.Event()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._name = ""
        self._logged = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._api.endpoint}>"

    @abstractmethod
    def _new_connection(self) -> Connection:
        """A connection that is not open yet."""

    def _interrupt(self) -> None:
        self._closed.set()
        for connection in tuple(self._busy):
            connection.interrupt()
        with suppress(IndexError):
            while True:  # until it is empty, even if another thread takes the last one
                self._idle.pop().close()

    @contextmanager
    def _connection(self, request: ApiRequest[T]) -> Iterator[Connection]:
        """The idle connection if there is one, else a new one. Its errors become ours."""
        connection = self._new_connection()
        if request.is_repeatable:
            with suppress(IndexError):
                connection = self._idle.pop()
        self._busy.add(connection)
        try:
            if self._closed.is_set():
                raise ConnectionFailed(CLOSED)
            yield connection
        except (EndpointError, OSError) as error:
            self._cache.clear()
            if isinstance(error, EndpointError):
                raise
            raise ConnectionFailed(self._describe(error)) from error
        finally:
            self._busy.discard(connection)
            if request.is_repeatable and not self._idle:
                self._idle.append(connection)
            else:
                connection.close()
            if self._closed.is_set():  # it may have missed this connection
                self._interrupt()

    def _describe(self, error: OSError) -> str:
        if self._closed.is_set():
            return CLOSED
        if isinstance(error, TimeoutError):
            return f"{self._api.endpoint} did not respond in time"
        return f"no response from {self._api.endpoint}: {error.strerror or error}"

    def _limit(self, request: ApiRequest[T], timeout_seconds: float | None) -> float:
        own = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return own + request.wait_seconds

    def _changes(
        self,
        result: Document | EndpointError,
        watcher: Watcher,
        on_error: Callable[[EndpointError], object] | None,
    ) -> list[Change]:
        if isinstance(result, EndpointError):
            (on_error or self._log_error)(result)
            return []
        self._logged = ""
        return watcher.update(result, self._clock.now())

    def _log_error(self, error: EndpointError) -> None:
        """Once, until it is another error or the endpoint has responded again."""
        from forewarn.log import log  # costs memory where it is not used

        if self._logged != error.message:
            self._logged = error.message
            log.warning("no scheduled events", reason=error.message)


class Client(BaseClient["EndpointConnection"]):
    """Reads, waits and approves. All methods may be called from any thread.

    A call made during another thread's call uses its own connection. `close` may also be called
    from a signal handler: it ends every call in progress and every watch, the latter at the
    latest after its current pause. Only a DNS lookup cannot be interrupted; the resolver's
    timeouts apply. `timeout_seconds` limits a whole response; the time of a long poll is added
    to it.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._interrupt()

    def document(self) -> Document:
        """The current document."""
        return self._cache.put(self._send(self._api.document()))

    def wait(self, timeout_seconds: float, *, since: Document | None = None) -> Document:
        """The document once it differs from `since`, or after the timeout, at most an hour.

        Without `since`, the last document returned here is used; threads that share a client
        should pass their own. An endpoint that does not support waiting responds immediately,
        and so does the first call, so pause between calls in a loop.
        """
        request = self._api.wait(timeout_seconds, since or self._cache.document)
        return self._cache.put(self._send(request))

    def approve(self, *event_ids: str, timeout_seconds: float | None = None) -> None:
        """Allow these events to start before NotBefore. Approving again is harmless.

        One unknown id rejects the whole request. `timeout_seconds` replaces the client's.
        """
        self._send(self._api.approval(event_ids), timeout_seconds)

    def instance(self) -> dict[str, Any]:
        """The endpoint's metadata about this VM: `compute` and `network`."""
        return self._send(self._api.instance())

    def name(self) -> str:
        """This VM's name as used in Resources, requested once. It is not the hostname."""
        self._name = self._name or vm_name(self.instance())
        return self._name

    def watch(
        self,
        *,
        stop: Stop | None = None,
        changes_max: int | None = None,
        on_error: Callable[[EndpointError], object] | None = None,
        wait_seconds: float = WAIT_SECONDS,
        watcher: Watcher | None = None,
    ) -> Iterator[Change]:
        """Each change once, until `stop` is set, the client is closed, or after `changes_max`.

        Errors are passed to `on_error`, or else logged, and the watch continues.
        """
        known = watcher or Watcher(approved=self._api.approved)
        results = self.documents(
            stop=stop, wait_seconds=wait_seconds, may_wait=lambda: not known.is_in_doubt
        )
        batches = (self._changes(result, known, on_error) for result in results)
        return islice((change for changes in batches for change in changes), changes_max)

    def documents(
        self,
        *,
        stop: Stop | None = None,
        wait_seconds: float = WAIT_SECONDS,
        period_seconds: float = PERIOD_SECONDS,
        may_wait: Callable[[], bool] = lambda: True,
    ) -> Iterator[Document | EndpointError]:
        """The result of each poll, a document or an error, until `stop` is set or `close`.

        Long polls where the endpoint supports it, otherwise polls every `period_seconds`. Errors
        are retried with back-off. `may_wait` is called before each poll: False makes it a plain
        one. An unchanged document is the same object again.
        """
        stop = stop or threading.Event()
        schedule = PollSchedule(self._api, self._clock, wait_seconds, period_seconds, may_wait)
        while not (stop.is_set() or self._closed.is_set()):
            result: Document | EndpointError
            try:
                result = schedule.succeeded(self._send(schedule.request()))
            except EndpointError as error:
                result = schedule.failed(error)
            if self._closed.is_set():
                return
            yield result
            stop.wait(schedule.rest_seconds())

    def _new_connection(self) -> "EndpointConnection":
        return EndpointConnection(self._api.endpoint, self._clock.monotonic, self._closed)

    def _send(self, request: ApiRequest[T], timeout_seconds: float | None = None) -> T:
        limit = self._limit(request, timeout_seconds)
        with self._connection(request) as connection:
            return request.read(connection.send(request.data, limit))


class SocketOptions(Protocol):
    """A socket, or what asyncio shows of one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def keep_alive(connected: SocketOptions) -> None:
    """Let the connection fail when its peer is gone, so that a long poll does not wait for it."""
    with suppress(OSError):  # it helps, and is not needed
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass(eq=False)
class EndpointConnection:
    """A keep-alive connection. One thread sends; any thread may interrupt it.

    States:  CLOSED -> CONNECTING -> OPEN -> CLOSED
    `send` opens it if it is closed. It stays open after a response that allows that, and is closed
    after any error. Once `closed` is set, every state leads to CLOSED permanently.
    """

    endpoint: Endpoint
    monotonic: Callable[[], float]
    closed: threading.Event
    _socket: socket.socket | None = None

    def send(self, data: bytes, timeout_seconds: float) -> Response:
        deadline = self.monotonic() + timeout_seconds
        if self._socket is not None:
            with suppress(ConnectionClosed, ConnectionError):
                return self._exchange(data, deadline)
        return self._exchange(data, deadline)

    def interrupt(self) -> None:
        """End a blocking read in another thread."""
        if (open_socket := self._socket) is not None:
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        open_socket, self._socket = self._socket, None
        if open_socket is not None:
            open_socket.close()

    def _exchange(self, data: bytes, deadline: float) -> Response:
        reader = Reader()
        response = None
        try:
            open_socket = self._socket or self._connect(deadline)
            open_socket.settimeout(self._seconds_left(deadline))
            open_socket.sendall(data)
            while response is None:
                open_socket.settimeout(self._seconds_left(deadline))
                response = reader.feed(open_socket.recv(READ_BYTES))
            return response
        finally:
            if response is None or response.is_last:
                self.close()

    def _connect(self, deadline: float) -> socket.socket:
        """Connect to the first address that accepts.

        As `socket.create_connection`, but `close` can end it.
        """
        self._seconds_left(deadline)
        failure = OSError("the host has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.endpoint.host, self.endpoint.port, type=socket.SOCK_STREAM
        ):
            self._socket = new_socket = socket.socket(family, kind, protocol)
            try:
                self._connect_to(new_socket, address, deadline)
            except TimeoutError:
                raise
            except OSError as error:
                self.close()
                failure = error
            else:
                keep_alive(new_socket)
                return new_socket
        raise failure

    def _connect_to(self, new_socket: socket.socket, address: Any, deadline: float) -> None:
        new_socket.settimeout(0)
        error = new_socket.connect_ex(address)
        if error in CONNECTING:
            with selectors.DefaultSelector() as selector:
                selector.register(new_socket, selectors.EVENT_WRITE)
                while not selector.select(min(self._seconds_left(deadline), CLOSE_CHECK_SECONDS)):
                    continue
            error = new_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    def _seconds_left(self, deadline: float) -> float:
        """TimeoutError after the deadline, ConnectionFailed once the client is closed."""
        if self.closed.is_set():
            raise ConnectionFailed(CLOSED)
        remaining = deadline - self.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining
