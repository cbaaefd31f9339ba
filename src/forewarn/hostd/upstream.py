"""Requests to one of several servers, over kept connections, with fail-over.

A request goes to the server that answered last, and to the next one if that cannot be reached.
What cannot be repeated is sent again only if it was certainly not received. Connections and the
time of each attempt have limits.
"""

import asyncio
import functools
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
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


CONNECT_SECONDS_MAX = 5.0
BODY_BYTES_MAX = 1 << 24
DEAD_SECONDS = 10
"""A server whose machine is gone is noticed after this time, even if a long poll waits."""
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000),
)


class ServerLost(Unavailable, code="server_lost"):
    """The server does not answer."""


class NotSent(ServerLost):
    """The server has certainly not received the request."""


class ServerAddress(NamedTuple):
    """Where a server is. `path` comes before the path of each request."""

    url: str
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None


class Response(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def parse_servers(urls: Sequence[str], ca_file: Path | None) -> tuple[ServerAddress, ...]:
    """The addresses of servers. `ca_file` replaces the certificates of the system."""
    parsed = [(url, urlsplit(url)) for url in urls]
    return tuple(
        ServerAddress(
            url,
            cast("str", parts.hostname),
            parts.port or (443 if parts.scheme == "https" else 80),
            parts.path.rstrip("/"),
            make_tls(ca_file) if parts.scheme == "https" else None,
        )
        for url, parts in parsed
    )


@functools.cache
def make_tls(ca_file: Path | None) -> ssl.SSLContext:
    """One for all servers: the certificates of a system take megabytes."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise Invalid(
            f"ca_file: cannot read certificates from {ca_file}: {error}", option="ca_file"
        ) from error


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time.

    States:  IDLE -> WAITING (`send`) -> IDLE (the response is complete) ... -> CLOSED

    It closes when the server closes it or announces that, when a response is malformed or too
    large, and when the future of `send` is cancelled: the late response would answer the next
    request.
    """

    def __init__(self, url: str, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self.is_open = False
        self._url = url
        self._body_bytes_max = body_bytes_max
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._pending: asyncio.Future[Response] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._is_head = False

    @classmethod
    async def open(
        cls, server: ServerAddress, body_bytes_max: int = BODY_BYTES_MAX
    ) -> "HttpConnection":
        """Connect, or raise ServerLost."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: cls(server.url, body_bytes_max),
                    server.host,
                    server.port,
                    ssl=server.tls,
                )
        except TimeoutError:
            problem = f"does not accept a connection within {CONNECT_SECONDS_MAX:g} seconds"
            raise ServerLost(f"{server.url} {problem}") from None
        except OSError as error:  # of TLS too
            raise ServerLost(
                f"cannot connect to {server.url}: {error.strerror or error}"
            ) from error
        return connection

    def send(self, request: bytes, *, is_head: bool = False) -> asyncio.Future[Response]:
        """Send a whole request, head and body. The future raises ServerLost.

        `is_head`: the response has no body, whatever its Content-Length.
        """
        assert self._pending is None or self._pending.done()
        pending = self._pending = asyncio.get_running_loop().create_future()
        pending.add_done_callback(self._on_done)
        self._is_head = is_head
        if self._transport is None or not self.is_open:
            self.fail("is closed")
        else:
            self._transport.write(request)
        return pending

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast("asyncio.Transport", transport), True
        connected = transport.get_extra_info("socket")
        for option in SOCKET_OPTIONS:
            connected.setsockopt(*option)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self.fail(f"broke: {exc}" if exc else "was closed by the server")

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
        self._body_bytes += len(body)
        if self._body_bytes > self._body_bytes_max:
            self.fail(f"had a response of more than {self._body_bytes_max} bytes")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        response = Response(status, self._headers, b"".join(self._body))
        self._headers, self._body, self._body_bytes = [], [], 0
        if status < 200 or self._pending is None or self._pending.done():  # 1xx is not the response
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._pending.set_result(response)

    def _on_done(self, pending: asyncio.Future[Response]) -> None:
        if pending.cancelled():
            self.close()

    def fail(self, problem: str) -> None:
        """Close the connection; the request, if there is one, raises ServerLost."""
        pending = self._pending
        if pending is not None and not pending.done():
            pending.set_exception(ServerLost(f"the connection to {self._url} {problem}"))
        self.close()


class Request(NamedTuple):
    """`headers` are without Content-Length; without Host, each server gets its own.

    `may_repeat`: doing it twice is as good as once. `is_fresh`: on a connection of its own, which
    the server cannot be about to close.
    """

    method: str
    target: bytes
    headers: Sequence[Header]
    body: bytes | None = None
    seconds_max: float = RESPONSE_SECONDS_MAX
    may_repeat: bool = True
    is_fresh: bool = False

    def encode(self, server: ServerAddress) -> bytes:
        headers = [*self.headers]
        if not any(name == b"host" for name, _ in headers):
            headers.append((b"host", f"{server.host}:{server.port}".encode()))
        if self.body is not None:
            headers.append(content_length(self.body))
        first = f"{self.method} {server.path}".encode() + self.target
        return b"%b HTTP/1.1\r\n%b\r\n%b" % (first, encode_headers(headers), self.body or b"")


@dataclass(eq=False)
class Server:
    """`idle` has its connections between two requests, the one used last at the end."""

    address: ServerAddress
    retry_at: float = 0.0
    idle: list[tuple[HttpConnection, float]] = field(default_factory=list)

    def take_idle(self, now: float) -> HttpConnection | None:
        """A connection that was used lately; older ones are closed."""
        while self.idle:
            connection, since = self.idle.pop()
            if connection.is_open and now - since < KEPT_SECONDS_MAX:
                return connection
            connection.close()
        return None


class Upstream:
    """Connections to servers that can stand in for each other, the one that answered last first.

    Long polls can have only three quarters of the connections, so they never keep other requests
    out. `busy` counts those in use.
    """

    def __init__(
        self, addresses: Sequence[ServerAddress], connections_max: int = CONNECTIONS_MAX
    ) -> None:
        self._servers = [Server(address) for address in addresses]
        self._connections_max = connections_max
        self.busy = 0

    @property
    def current(self) -> str:
        """The URL of the server that answered last."""
        return self._servers[0].address.url

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

    def close(self) -> None:
        for server in self._servers:
            while server.idle:
                server.idle.pop()[0].close()

    async def send(self, request: Request) -> Response:
        """The response of the first server that answers; ServerLost if none does.

        If the request may be repeated, a status of 502 to 504 counts as no answer, unless all
        servers answer like that.
        """
        if self.busy >= self._connections_max:
            raise Unavailable(f"{self._connections_max} requests are waiting for a server")
        self.busy += 1
        try:
            return await self._try_each(request)
        finally:
            self.busy -= 1

    async def _try_each(self, request: Request) -> Response:
        now = asyncio.get_running_loop().time
        problem = ServerLost("no server can be reached")
        refusal: Response | None = None
        for server in [each for each in self._servers if each.retry_at <= now()]:
            try:
                response = await _ask(server, request)
            except ServerLost as error:
                problem, server.retry_at = error, now() + RETRY_SECONDS
                if not request.may_repeat and not isinstance(error, NotSent):
                    break
                continue
            if not request.may_repeat or response.status not in TRY_NEXT:
                self._servers.remove(server)
                self._servers.insert(0, server)
                return response
            refusal = response
        if refusal is not None:
            return refusal
        raise problem


async def _ask(server: Server, request: Request) -> Response:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + request.seconds_max
    if not request.is_fresh and (kept := server.take_idle(loop.time())):
        try:
            return await _exchange(server, kept, request)
        except ServerLost:
            # A restart breaks kept connections, so the server may well accept a new one.
            if not request.may_repeat or loop.time() >= deadline:
                raise
    try:
        connection = await HttpConnection.open(server.address)
    except ServerLost as error:
        raise NotSent(error.message) from error
    return await _exchange(server, connection, request)


async def _exchange(server: Server, connection: HttpConnection, request: Request) -> Response:
    loop = asyncio.get_running_loop()
    data, is_head = request.encode(server.address), request.method == "HEAD"
    # A timer of this costs less than a timeout.
    problem = f"had no response within {request.seconds_max:g} s"
    timer = loop.call_later(request.seconds_max, connection.fail, problem)
    try:
        response = await connection.send(data, is_head=is_head)
    finally:
        timer.cancel()
    if request.is_fresh:
        connection.close()
    elif connection.is_open:
        server.idle.append((connection, loop.time()))
    return response
