"""A metadata listener on a real socket, in its own thread, and a client that sees every byte."""

import asyncio
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop
from uvicorn.server import ServerState

from forewarn.auth.tokens import Tokens
from forewarn.config import Config, Identify
from forewarn.core.command import Command, Restart, SetMembers
from forewarn.core.fleet import Policy, Scope, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock, RealClock
from forewarn.engine.engine import Engine
from forewarn.option_kind import Address
from forewarn.store.memory import MemoryStore
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Listener
from forewarn.web.http.message import Message, Receive, Send
from forewarn.web.http.parse_queue import ParseQueue, Parsing
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls

T = TypeVar("T")

EVENT_ID = "602D9444-D2CD-49C7-8624-8643E7171297"
VERSION = "2020-07-01"
TARGET = f"/metadata/scheduledevents?api-version={VERSION}"
POLL = f"GET {TARGET} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n\r\n".encode()
RESPONSE_SECONDS_MAX = 10.0
SENT_BYTES_MAX = 200_000_000


class World:
    """`web-0` is at 127.0.0.1; `web-1` is in the same scope, `db-0` in another.

    `called` lists what reached the application. Errors of the event loop fail the test.
    """

    def __init__(
        self,
        config: Config | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        application: Callable[[Message, Receive, Send], Awaitable[None]] | None = None,
        stop_seconds_max: float = 2.0,
        proxy_key: bytes = b"key",
    ) -> None:
        self.engine = Engine(MemoryStore(), clock or RealClock(), Timing())
        self.config = config or Config(identify=(Identify.ADDRESS, Identify.PATH))
        self.tokens = Tokens(self.engine)
        self.metadata = Metadata(self.engine, self.config, proxy_key, self.tokens)
        self.application = application or self.metadata
        self.polls = AheadPolls(self.engine, self.config, limits or Limits(), self.tokens)
        self.called: list[str] = []
        self.listener = Listener(
            self._application,
            Address("127.0.0.1", 0),
            self.polls,
            server_name=SERVER_METADATA,
            on_stop=self.metadata.stop,
            stop_seconds_max=stop_seconds_max,
        )
        self.broken: list[dict[str, Any]] = []
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(lambda _, broken: self.broken.append(broken))
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self.enrol(
            "web",
            Vm(name="web-0", address="127.0.0.1", id="id-web-0"),
            Vm(name="web-1", update_domain=1),
        )
        self.enrol("db", Vm(name="db-0"))
        self.run(self.listener.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert self.broken == []

    def stop(self) -> None:
        self.run(self.listener.stop())

    async def _application(self, scope: Message, receive: Receive, send: Send) -> None:
        self.called.append(f"{scope['method']} {scope['path']}")
        await self.application(scope, receive, send)

    @property
    def port(self) -> int:
        return self.listener.address.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(RESPONSE_SECONDS_MAX)

    def submit(self, command: Command, scope: str = "web") -> None:
        self.run(self.engine.submit(scope, command, by="test"))

    def enrol(self, name: str, *vms: Vm) -> None:
        self.submit(SetMembers(kind=ScopeKind.AVAILABILITY_SET, policy=Policy(), vms=vms), name)

    def restart(self, vm: str = "web-0", event_id: str = EVENT_ID) -> None:
        self.submit(Restart(vm=vm, event_id=event_id))

    def pass_time(self, span: timedelta) -> None:
        """Let the policy of the connections see a later time from now on."""

        async def tick() -> None:
            self.polls.ahead_seconds = span.total_seconds()
            self.polls.tick(self.listener.state, asyncio.get_running_loop().time())

        self.run(tick())

    def until(self, is_true: Callable[[], bool]) -> None:
        """Wait for a condition in the server."""
        deadline = time.monotonic() + RESPONSE_SECONDS_MAX
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def scope(self, name: str = "web") -> Scope:
        return self.engine.board.scopes[name].scope

    def connect(self, source: str = "127.0.0.1") -> "Client":
        return Client(self.port, source)

    def ask(self, request: bytes) -> "RawResponse":
        """One request on a connection of its own."""
        with self.connect() as client:
            client.send(request)
            return client.response()


class CountingQueue(ParseQueue):
    """Counts the turns of connections."""

    turns = 0

    def add(self, connection: Parsing) -> None:
        self.turns += 1
        super().add(connection)


class AheadPolls(Polls):
    """Polls whose time can be ahead of the real one, and that count the turns of connections."""

    ahead_seconds = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.counting_queue = self.parse_queue = CountingQueue()

    @property
    def turns(self) -> int:
        return self.counting_queue.turns

    def tick(self, state: ServerState, now: float) -> None:
        super().tick(state, now + self.ahead_seconds)


class RawResponse:
    """`raw` is every byte of the response."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.raw = head + body
        self.body = body
        first, *rest = head.decode().split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = dict(line.split(": ", 1) for line in rest if line)

    @property
    def undated(self) -> bytes:
        return re.sub(rb"date: [^\r]+", b"date: -", self.raw)


class Client:
    """A plain socket."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(
            ("127.0.0.1", port), timeout=RESPONSE_SECONDS_MAX, source_address=(source, 0)
        )
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def finish_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def response(self, *, has_body: bool = True) -> RawResponse:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        response = RawResponse(head + b"\r\n\r\n", b"")
        length = (
            int(response.headers.get("content-length", "0"))
            if has_body and response.status not in (100, 304)
            else 0
        )
        while len(self._buffer) < length:
            self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return RawResponse(head + b"\r\n\r\n", body)

    def read_to_end(self) -> bytes:
        """Read until the server closes."""
        while True:
            try:
                piece = self._socket.recv(65536)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return self._buffer
            self._buffer += piece

    def send_until_stuck(self, data: bytes) -> int:
        """Send without reading until the server accepts no more; the number of bytes sent.

        A busy machine may take a while until the server reads at all.
        """
        self._socket.settimeout(3)
        sent = 0
        try:
            while sent < SENT_BYTES_MAX:
                sent += self._socket.send(data)
        except TimeoutError:
            return sent
        finally:
            self._socket.settimeout(RESPONSE_SECONDS_MAX)
        raise AssertionError(f"the server took {sent} bytes")

    def count_responses(self) -> int:
        """The number of responses that have begun to arrive, without waiting."""
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            self._buffer += self._socket.recv(1 << 20)
        self._socket.settimeout(RESPONSE_SECONDS_MAX)
        return self._buffer.count(b"HTTP/1.1 ")

    def take(self, size: int) -> int:
        """Read and discard bytes; the number read before the server closed."""
        taken = 0
        while taken < size:
            piece = self._socket.recv(size - taken)
            if not piece:
                break
            taken += len(piece)
        return taken

    def is_open(self) -> bool:
        """Whether the server would take more. What came before is read and thrown away."""
        try:
            while self._socket.recv(1 << 20):
                pass
        except ConnectionResetError:
            return False
        except TimeoutError:
            return True
        return False

    def is_silent(self, span: timedelta) -> bool:
        """Whether nothing comes for so long, and the connection stays open."""
        self._socket.settimeout(span.total_seconds())
        try:
            self._more()
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(RESPONSE_SECONDS_MAX)
        return False

    def _more(self) -> None:
        piece = self._socket.recv(65536)
        if not piece:
            raise EOFError(f"the server closed after {self._buffer!r}")
        self._buffer += piece
