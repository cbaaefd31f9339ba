"""The client for ordinary programs: one keep-alive connection, and threads.

Any trouble closes the connection, so an answer can never be taken for that to another question. A
question that the server never saw, because it had closed an idle connection, is asked once more; an
approval always has a connection of its own, so that it neither meets such a connection nor stands
behind a wait.
"""

import errno
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from forewarn.client.backoff import WAIT_SECONDS, Clock, Pace
from forewarn.client.errors import ConnectionFailed, EndpointError
from forewarn.client.http1 import READ_BYTES, Answer, Endpoint, HungUp, Reader
from forewarn.client.models import Document
from forewarn.client.protocol import (
    API_VERSION,
    DEFAULT_ENDPOINT,
    INSTANCE_VERSION,
    TIMEOUT_SECONDS,
    Dialogue,
    Known,
    Question,
    name_of,
)
from forewarn.client.watcher import Change, Watcher

CLOSE_LOOK_SECONDS = 0.05
"""How soon a connect that nobody answers notices that the client was closed."""
CONNECTING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)

T = TypeVar("T")


class Stop(Protocol):
    """What ends a watch, as `threading.Event` does."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float) -> object: ...


class Client:
    """Reads, waits and approves. Everything may be called from any thread.

    A call made while another thread's is under way uses a connection of its own, so nothing waits
    behind a wait. `close` may be called from a signal handler too: it ends every question that is
    under way, and every watch, if need be after the pause that it is in. Only the lookup of a
    host's name, where the endpoint is one, cannot be ended, and has the time limits of the
    resolver. `timeout_seconds` bounds a whole answer; what a wait is allowed to take comes on top.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        api_version: str = API_VERSION,
        instance_version: str = INSTANCE_VERSION,
        timeout_seconds: float = TIMEOUT_SECONDS,
        clock: Clock = Clock(),
    ) -> None:
        self._dialogue = Dialogue(
            endpoint, api_version=api_version, instance_version=instance_version
        )
        self._known = Known(clock.monotonic)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._closed = threading.Event()
        self._connection = self._connect()
        self._others: set[Connection] = set()
        self._turn = threading.Lock()
        self._name = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        for connection in (self._connection, *self._others):
            connection.interrupt()
        if self._turn.acquire(
            blocking=False
        ):  # else whoever has the turn finds the connection ended, and closes it
            self._connection.close()
            self._turn.release()

    def document(self) -> Document:
        """The document as it is now."""
        return self._known.keep(self._ask(self._dialogue.document()))

    def wait(self, timeout_seconds: float, *, since: Document | None = None) -> Document:
        """The document when it is another than `since`, or when the time is up. Without `since`,
        than the last one given here.

        An endpoint that cannot wait answers at once, changed or not; so does any that has not been
        asked before or not lately. Whoever calls this in a loop rests for the rest of a second;
        where threads share a client, each says since when.
        """
        return self._known.keep(
            self._ask(self._dialogue.wait(timeout_seconds, since or self._known.document))
        )

    def approve(self, *event_ids: str, timeout_seconds: float | None = None) -> None:
        """Let these events start before their time. Approving again is no problem; one unknown id
        refuses them all.

        `timeout_seconds` is for this call, instead of the client's.
        """
        self._ask(self._dialogue.approval(event_ids), timeout_seconds)

    def instance(self) -> dict[str, Any]:
        """What the endpoint tells about this VM: `compute` and `network`."""
        return self._ask(self._dialogue.instance())

    def name(self) -> str:
        """This VM's name as Resources have it, asked once. It is not the hostname."""
        self._name = self._name or name_of(self.instance())
        return self._name

    def watch(
        self,
        *,
        stop: Stop | None = None,
        changes_max: int | None = None,
        on_problem: Callable[[EndpointError], object] = lambda problem: None,
        wait_seconds: float = WAIT_SECONDS,
        watcher: Watcher | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> Iterator[Change]:
        """What changes, each once, for ever: until `stop` is set, the client is closed, or
        `changes_max` have been told.

        Waits where the endpoint can, otherwise asks once a second. Each problem is told to
        `on_problem`, and the watch goes on.
        """
        stop = stop or threading.Event()
        pace = Pace(
            self._dialogue,
            watcher or Watcher(approved=self._dialogue.approved),
            self._clock,
            wait_seconds,
        )
        told = 0
        while not (stop.is_set() or self._closed.is_set()):
            try:
                changes = pace.answered(self._ask(pace.question()))
            except EndpointError as problem:
                if self._closed.is_set():
                    return
                changes = []
                pace.failed(problem)
                on_problem(problem)
            for change in changes:
                yield change
                told += 1
                if told == changes_max:
                    return
            (sleep or stop.wait)(pace.rest_seconds())

    def _ask(self, question: Question[T], timeout_seconds: float | None = None) -> T:
        seconds = (
            self._timeout_seconds if timeout_seconds is None else timeout_seconds
        ) + question.wait_seconds
        try:
            if question.is_repeatable and self._turn.acquire(blocking=False):
                try:
                    return question.read(self._connection.ask(question.request, seconds))
                finally:
                    self._turn.release()
            with closing(self._connect()) as alone:
                self._others.add(alone)
                try:
                    return question.read(alone.ask(question.request, seconds))
                finally:
                    self._others.discard(alone)
        except EndpointError:
            self._known.forget()
            raise

    def _connect(self) -> "Connection":
        return Connection(self._dialogue.endpoint, self._clock.monotonic, self._closed)


class Connection:
    """A connection that is opened when it is needed and kept while it is of use, until `closed` is
    set.
    """

    def __init__(
        self, endpoint: Endpoint, monotonic: Callable[[], float], closed: threading.Event
    ) -> None:
        self._endpoint = endpoint
        self._monotonic = monotonic
        self._closed = closed
        self._socket: socket.socket | None = None

    def ask(self, request: bytes, timeout_seconds: float) -> Answer:
        deadline = self._monotonic() + timeout_seconds
        if self._socket is not None:
            with suppress(HungUp):
                return self._exchange(request, deadline)
        return self._exchange(request, deadline)

    def interrupt(self) -> None:
        """From any thread: whoever reads finds that the connection has ended."""
        if (open_socket := self._socket) is not None:
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        open_socket, self._socket = self._socket, None
        if open_socket is not None:
            open_socket.close()

    def _exchange(self, request: bytes, deadline: float) -> Answer:
        reader = Reader()
        answer = None
        try:
            open_socket = self._open(deadline)
            open_socket.sendall(request)
            while answer is None:  # ends with the answer, the connection or the time
                open_socket.settimeout(self._seconds_to(deadline))
                answer = reader.feed(open_socket.recv(READ_BYTES))
            return answer
        except TimeoutError as error:
            raise ConnectionFailed(f"{self._endpoint} did not answer in time") from error
        except OSError as error:
            kind = ConnectionFailed if reader.has_begun or self._socket is None else HungUp
            raise kind(f"no answer from {self._endpoint}: {error.strerror or error}") from error
        finally:
            if answer is None or answer.is_last:
                self.close()

    def _open(self, deadline: float) -> socket.socket:
        if self._socket is None and not self._closed.is_set():
            self._socket = self._connect(deadline)
        if self._socket is None or self._closed.is_set():
            raise ConnectionFailed("this client is closed")
        self._socket.settimeout(self._seconds_to(deadline))
        return self._socket

    def _connect(self, deadline: float) -> socket.socket:
        """To the first of the host's addresses that accepts.

        As `socket.create_connection`, which nothing can end early.
        """
        addresses = socket.getaddrinfo(
            self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM
        )
        for number, (family, kind, protocol, _, address) in enumerate(addresses, start=1):
            try:
                return self._connect_to(socket.socket(family, kind, protocol), address, deadline)
            except TimeoutError:
                raise
            except OSError:
                if number == len(addresses):
                    raise
        raise AssertionError("a host without an address is an error of getaddrinfo")

    def _connect_to(self, opening: socket.socket, address: Any, deadline: float) -> socket.socket:
        """Non-blocking, so that it can be ended when the client is closed."""
        try:
            opening.settimeout(0)
            error = opening.connect_ex(address)
            if error in CONNECTING:
                self._await_connection(opening, deadline)
                error = opening.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
        except BaseException:
            opening.close()
            raise
        return opening

    def _await_connection(self, opening: socket.socket, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(opening, selectors.EVENT_WRITE)
            while not self._closed.is_set():  # ends with the connection, its failure, or the time
                if selector.select(min(self._seconds_to(deadline), CLOSE_LOOK_SECONDS)):
                    return
        raise ConnectionFailed("this client is closed")

    def _seconds_to(self, deadline: float) -> float:
        rest = deadline - self._monotonic()
        if rest <= 0:
            raise TimeoutError
        return rest
