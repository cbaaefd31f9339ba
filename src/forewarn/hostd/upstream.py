"""Requests to one of several servers, over kept connections, with fail-over.

A request goes to the server that answered last, and to the next one if that cannot be reached.
What cannot be repeated is sent again only if it was certainly not received. Connections and the
time of each attempt have limits.
"""

import asyncio
import functools
import re
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from forewarn.errors import Invalid, Unavailable
from forewarn.web.http.message import Header, content_length, encode_headers

RESPONSE_SECONDS_MAX = 15.0
RETRY_SECONDS = 1.0
"""A server that was lost is not tried again before: others do not wait for it too."""
KEPT_SECONDS_MAX = 30.0
"""Well below the server's `idle_seconds`: it hardly ever closes a connection as we send."""
CONNECTIONS_MAX = 1024
TRY_NEXT = frozenset((502, 503, 504))
AGE = re.compile(rb"[0-9]{1,9}")
CONNECT_SECONDS_MAX = 5.0
BODY_BYTES_MAX = 1 << 24
DEAD_SECONDS = 10
"""A server whose machine is gone is noticed after this time, even if a long poll waits."""
CHECK_EVERY_SECONDS = 2.0
"""How often a server at which long polls wait is checked."""
CHECK_SECONDS_MAX = 4.0
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000),
)


class ServerLost(Unavailable, code="server_lost"):
    """The server does not answer; nothing came from it for `silent_seconds`."""

    silent_seconds = 0.0


class NotSent(ServerLost):
    """The server has certainly not received the request."""


class Response(NamedTuple):
    """`ages_seconds`: how long each server that was asked, and is cut off from its store, may have
    been cut off. One of them has sent this, unless another server could.
    """

    status: int
    headers: list[Header]
    body: bytes
    ages_seconds: tuple[int, ...] = ()

    @property
    def age_seconds(self) -> int:
        """The age of a document whose server is cut off from its store; 0 if it is not."""
        value = next((value for name, value in self.headers if name.lower() == b"age"), b"")
        return int(value) if AGE.fullmatch(value) else 0


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time.

    States:  IDLE -> WAITING (`send`) -> IDLE (the response is complete) ... -> CLOSED

    It closes when the server closes it or announces that, when a response is malformed or too
    large, and when `send` is cancelled: the late response would answer the next request.
    """

    def __init__(self, url: str) -> None:
        self.is_open = False
        self._url = url
        self._transport: asyncio.Transport
        self._parser = HttpResponseParser(self)
        self._pending: asyncio.Future[Response] | None = None
        self._headers: list[Header] = []
        self._body = bytearray()
        self._is_head = False

    async def send(
        self, request: bytes, seconds_max: float = RESPONSE_SECONDS_MAX, *, is_head: bool = False
    ) -> Response:
        """Send a whole request, head and body, and return its response, or raise ServerLost.

        `is_head`: the response has no body, whatever its Content-Length.
        """
        loop = asyncio.get_running_loop()
        pending = self._pending = loop.create_future()
        self._is_head = is_head
        # A timer of this costs less than a timeout. The server may have been stopped all that time.
        problem = f"had no response within {seconds_max:g} s"
        timer = loop.call_later(seconds_max, self.fail, problem, seconds_max)
        try:
            if not self.is_open:
                self.fail("is closed")
            else:
                self._transport.write(request)
            response: Response = await pending
        finally:
            timer.cancel()
            if pending.cancelled():
                self.close()
        return response

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast("asyncio.Transport", transport), True
        connected = transport.get_extra_info("socket")
        for option in SOCKET_OPTIONS:
            connected.setsockopt(*option)

    def connection_lost(self, exc: Exception | None) -> None:
        is_silent = isinstance(exc, TimeoutError)
        self.fail(f"broke: {exc}" if exc else "was closed by the server", DEAD_SECONDS * is_silent)

    def data_received(self, data: bytes) -> None:
        if self._pending is None or self._pending.done():  # a response to nothing
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self.fail(f"had a malformed response: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_head:
            self.on_message_complete()
            self._parser = HttpResponseParser(self)  # the other one expects a body

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            self.fail(f"had a response of more than {BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        response = Response(status, self._headers, bytes(self._body))
        self._headers, self._body = [], bytearray()
        if status < 200 or self._pending is None or self._pending.done():  # 1xx is not the response
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._pending.set_result(response)

    def fail(self, problem: str, silent_seconds: float = 0.0) -> None:
        """Close the connection; the request, if there is one, raises ServerLost."""
        if self._pending is not None and not self._pending.done():
            lost = ServerLost(f"the connection to {self._url} {problem}")
            lost.silent_seconds = silent_seconds
            self._pending.set_exception(lost)
        self.close()


class Server:
    """`path` comes before the path of each request.

    `idle` has its connections between two requests, the one used last at the end, and `waiting`
    those with a long poll. `answered_at` is when its last response came.
    """

    def __init__(self, url: str, ca_file: Path | None = None) -> None:
        parts = urlsplit(url)
        self.url, self.authority, self.path = url, parts.netloc, parts.path.rstrip("/")
        self.tls = make_tls(ca_file) if parts.scheme == "https" else None
        self.host, self.port = parts.hostname or "", parts.port or (443 if self.tls else 80)
        self.retry_at = 0.0
        self.answered_at = 0.0
        self.idle: list[tuple[HttpConnection, float]] = []
        self.waiting: set[HttpConnection] = set()

    async def connect(self) -> HttpConnection:
        """A new connection; NotSent if there is none."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: HttpConnection(self.url), self.host, self.port, ssl=self.tls
                )
        except OSError as error:  # of TLS, and of the time limit
            problem = error.strerror or str(error) or f"not within {CONNECT_SECONDS_MAX:g} seconds"
            lost = NotSent(f"cannot connect to {self.url}: {problem}")
            lost.silent_seconds = CONNECT_SECONDS_MAX * isinstance(error, TimeoutError)
            raise lost from error
        return connection

    def take_idle(self, now: float) -> HttpConnection | None:
        """A connection that was used lately; older ones are closed."""
        while self.idle:
            connection, since = self.idle.pop()
            if connection.is_open and now - since < KEPT_SECONDS_MAX:
                return connection
            connection.close()
        return None

    async def ask(self, request: "Request") -> Response:
        """Over a connection that was kept, or a new one: a restart breaks those that were kept."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.seconds_max
        kept = self.take_idle(loop.time())
        connection = kept or await self.connect()
        try:
            response = await self._send(connection, request)
        except ServerLost:
            if kept is None or not request.may_repeat or loop.time() >= deadline:
                raise
            connection = await self.connect()
            response = await self._send(connection, request)
        self.answered_at = loop.time()
        if connection.is_open:
            self.idle.append((connection, self.answered_at))
        return response

    async def _send(self, connection: HttpConnection, request: "Request") -> Response:
        if request.is_long_poll:
            self.waiting.add(connection)
        try:
            return await connection.send(
                request.encode(self), request.seconds_max, is_head=request.method == "HEAD"
            )
        finally:
            self.waiting.discard(connection)

    async def check(self, request: "Request") -> None:
        """End the long polls that wait here if the server is silent.

        The kernel keeps the connections of a process that is stopped, so nothing else shows it. A
        connection that is refused or closed shows nothing: the server may have too many.
        """
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            await self.ask(request)
        except ServerLost as error:
            if not error.silent_seconds or self.answered_at >= began_at:
                return
            now = loop.time()
            self.retry_at = now + RETRY_SECONDS
            for connection in list(self.waiting):
                connection.fail("was closed: its server does not answer", now - self.answered_at)


@functools.cache
def make_tls(ca_file: Path | None) -> ssl.SSLContext:
    """One for all servers: the certificates of a system take megabytes."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise Invalid(
            f"ca_file: cannot read certificates from {ca_file}: {error}", option="ca_file"
        ) from error


class Request(NamedTuple):
    """`headers` are without Content-Length; without Host, each server gets its own.

    `may_repeat`: doing it twice is as good as once.
    """

    method: str
    target: bytes
    headers: Sequence[Header]
    body: bytes = b""
    seconds_max: float = RESPONSE_SECONDS_MAX
    may_repeat: bool = True

    @property
    def is_long_poll(self) -> bool:
        return self.seconds_max > RESPONSE_SECONDS_MAX

    def encode(self, server: Server) -> bytes:
        headers = [*self.headers]
        if not any(name == b"host" for name, _ in headers):
            headers.append((b"host", server.authority.encode()))
        if self.body or self.method == "POST":
            headers.append(content_length(self.body))
        first = f"{self.method} {server.path}".encode() + self.target
        return b"%b HTTP/1.1\r\n%b\r\n%b" % (first, encode_headers(headers), self.body)


class Upstream:
    """Connections to servers that can stand in for each other, the one that answered last first.

    Long polls can have only three quarters of the connections, so they never keep other requests
    out. `busy` counts those in use.
    """

    def __init__(
        self,
        urls: Sequence[str],
        ca_file: Path | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._servers = [Server(url, ca_file) for url in urls]
        self._connections_max = connections_max
        self.busy = 0

    @property
    def current(self) -> str:
        """The URL of the server that answered last."""
        return self._servers[0].url

    @property
    def count(self) -> int:
        return len(self._servers)

    def skip(self) -> None:
        """Ask the others first from now on."""
        self._servers.append(self._servers.pop(0))

    @property
    def has_room(self) -> bool:
        """Whether there is a connection for another long poll."""
        return self.busy < self._connections_max * 3 // 4

    async def check_servers(self, request: Request) -> None:
        """End the long polls of servers that do not answer a request."""
        waiting = [server for server in self._servers if server.waiting]
        await asyncio.gather(*(server.check(request) for server in waiting))

    def close(self) -> None:
        for server in self._servers:
            while server.idle:
                server.idle.pop()[0].close()

    async def send(self, request: Request) -> Response:
        """The response of the first server that answers; ServerLost if none does.

        If the request may be repeated, a status of 502 to 504 counts as no answer, and so does a
        document with an age, unless all servers answer like that.
        """
        if self.busy >= self._connections_max:
            raise ServerLost(f"{self._connections_max} requests are waiting for a server")
        self.busy += 1
        try:
            return await self._try_each(request)
        finally:
            self.busy -= 1

    async def _try_each(self, request: Request) -> Response:
        now = asyncio.get_running_loop().time
        problem = ServerLost("no server can be reached")
        fallback: Response | None = None
        ages_seconds = list[int]()
        for server in [each for each in self._servers if each.retry_at <= now()]:
            try:
                response = await server.ask(request)
            except ServerLost as error:
                problem, server.retry_at = error, now() + RETRY_SECONDS
                if not request.may_repeat and not isinstance(error, NotSent):
                    self._servers.remove(server)  # the next request begins with another server
                    self._servers.append(server)
                    break
                continue
            age_seconds = response.age_seconds
            if age_seconds:
                ages_seconds.append(age_seconds)
            if not age_seconds and (not request.may_repeat or response.status not in TRY_NEXT):
                self._servers.remove(server)
                self._servers.insert(0, server)
                return response._replace(ages_seconds=tuple(ages_seconds))
            if fallback is None or fallback.status in TRY_NEXT:  # a document is better
                fallback = response
            if not request.may_repeat:
                if age_seconds:  # the request that is sent instead begins with another server
                    self._servers.remove(server)
                    self._servers.append(server)
                break
        if fallback is not None:
            return fallback._replace(ages_seconds=tuple(ages_seconds))
        raise problem
