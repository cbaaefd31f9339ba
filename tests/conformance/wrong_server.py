"""A proxy in front of a real endpoint that does one thing wrong.

Without a fault it passes every check itself.
"""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from io import BufferedRWPair
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    http: str
    lines: tuple[tuple[str, str], ...]
    body: bytes = b""

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.lines}

    def with_header(self, name: str, value: str | None) -> "Request":
        """With this value, or for None without the header."""
        kept = tuple(line for line in self.lines if line[0].lower() != name.lower())
        return replace(self, lines=kept if value is None else (*kept, (name, value)))


@dataclass(frozen=True)
class Reply:
    """`surplus` follows the body. `is_last`: close afterwards; None: as the client requests."""

    status: int
    lines: tuple[tuple[str, str], ...]
    body: bytes
    http: str = "HTTP/1.1"
    surplus: bytes = b""
    seconds: float = 0
    is_last: bool | None = None

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.lines if known.lower() == name.lower()), None)

    def with_header(self, name: str, value: str | None) -> "Reply":
        kept = tuple(line for line in self.lines if line[0].lower() != name.lower())
        return replace(self, lines=kept if value is None else (*kept, (name, value)))

    def with_body(self, body: bytes) -> "Reply":
        return replace(self, body=body).with_header("content-length", str(len(body)))


@dataclass(frozen=True)
class Fault:
    """Changes to each request and each reply, and faults of the connection."""

    on_request: Callable[[Request], Request] = lambda request: request
    on_reply: Callable[[Request, Reply], Reply] = lambda request, reply: reply
    is_swallowed: Callable[[Request], bool] = lambda request: False
    continues: bool = True
    echoes_close: bool = True
    accepts_pieces: bool = True


class Clock:
    """Real time, plus the time that was skipped instead of slept.

    A sleep ends only when the server has looked at what it received, if it sets `wait_for_server`.
    """

    def __init__(self, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._now, self._sleep = now, sleep
        self.skipped = 0.0
        self.wait_for_server: threading.Event | None = None

    def now(self) -> float:
        return self._now() + self.skipped

    def sleep(self, seconds: float) -> None:
        self._sleep(min(seconds, 0.01))
        if self.wait_for_server is not None:
            assert self.wait_for_server.wait(60)
        self.skipped += max(seconds - 0.01, 0)


@dataclass
class FaultyServer:
    """`url` is its address; `requests` are those it received."""

    upstream: str
    fault: Fault
    clock: Clock
    url: str = ""
    requests: list[Request] = field(default_factory=list)

    def serve(self, connection: socket.socket) -> None:
        with connection.makefile("rwb") as file:
            while request := self._read(connection, file):
                self.requests.append(request)
                reply = self._reply(request)
                is_asked_to = (
                    request.http == "1.0"
                    or request.headers.get("connection", "").lower() == "close"
                )
                is_last = is_asked_to if reply.is_last is None else reply.is_last
                if is_asked_to and self.fault.echoes_close:
                    reply = reply.with_header("connection", "close")
                file.write(_encode(request, reply))
                file.flush()
                if is_last:
                    return

    def _reply(self, request: Request) -> Reply:
        if self.fault.is_swallowed(request):
            return Reply(200, (("content-length", "0"),), b"")
        reply = self.fault.on_reply(request, self._forward(self.fault.on_request(request)))
        self.clock.skipped += reply.seconds
        return reply

    def _read(self, connection: socket.socket, file: BufferedRWPair) -> Request | None:
        if not self.fault.accepts_pieces:
            received = connection.recv(65536, socket.MSG_PEEK)
            assert self.clock.wait_for_server is not None
            self.clock.wait_for_server.set()
            if HEAD_END not in received:
                return None
        head = list[bytes]()
        while (line := file.readline(65536)) not in (
            b"\r\n",
            b"",
        ):  # ends with the head or the connection
            head.append(line.rstrip(b"\r\n"))
        if not head:
            return None
        method, target, http = head[0].decode("latin-1").split(" ")
        pairs = [line.decode("latin-1").partition(":") for line in head[1:]]
        request = Request(
            method,
            target,
            http.removeprefix("HTTP/"),
            tuple((name, value.strip()) for name, _, value in pairs),
        )
        if "expect" in request.headers and self.fault.continues:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "transfer-encoding" in request.headers:
            size = int(file.readline(100), 16)
            body = file.read(size)
            for _ in range(3):
                file.readline(100)
        else:
            body = file.read(int(request.headers.get("content-length", "0")))
        return replace(request, body=body)

    def _forward(self, request: Request) -> Reply:
        split = urlsplit(self.upstream)
        assert split.hostname
        connection = HTTPConnection(split.hostname, split.port, timeout=30)
        connection.putrequest(
            request.method,
            request.target,
            skip_host="host" in request.headers,
            skip_accept_encoding=True,
        )
        for name, value in request.lines:
            if name.lower() not in ("connection", "expect", "transfer-encoding", "content-length"):
                connection.putheader(name, value)
        if request.body or request.method == "POST":
            connection.putheader("Content-Length", str(len(request.body)))
        connection.endheaders(request.body or None)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return Reply(response.status, tuple(response.getheaders()), body)


def _encode(request: Request, reply: Reply) -> bytes:
    lines = [
        f"{reply.http} {reply.status} Whatever",
        *(f"{name}: {value}" for name, value in reply.lines),
    ]
    body = b"" if request.method == "HEAD" or reply.status == 304 else reply.body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body + reply.surplus


@contextmanager
def faulty_server(upstream: str, fault: Fault, clock: Clock) -> Iterator[FaultyServer]:
    clock.wait_for_server = None if fault.accepts_pieces else threading.Event()
    server = FaultyServer(upstream, fault, clock)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(ConnectionError):  # the client has left
                server.serve(self.request)

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 64

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server.url = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
