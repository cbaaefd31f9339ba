"""A kept HTTP/1.1 connection to a server, for the relay and for the daemon's own calls.

It does not choose servers and does not retry: `upstream.py` and `control.py` do.
"""

import asyncio
import functools
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from forewarn.errors import Invalid, Unavailable

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
    """The server does not answer.

    `is_unanswered`: no byte of a response came, so a GET may be repeated on another connection.
    """

    def __init__(self, message: str, *, is_unanswered: bool = True) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered


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
        self._is_answered = self._is_head = False

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
        self._is_answered, self._is_head = False, is_head
        if self._transport is None or not self.is_open:
            self._fail("is closed")
        else:
            self._transport.write(request)
        return pending

    def give_up(self, seconds: float) -> None:
        """Fail the request, which took too long. A timer of this costs less than a timeout."""
        self._fail(f"had no response within {seconds:g} s")

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
        self._fail(f"broke: {exc}" if exc else "was closed by the server")

    def data_received(self, data: bytes) -> None:
        if self._pending is None or self._pending.done():  # a response to nothing
            self.close()
            return
        self._is_answered = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"had a malformed response: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_head:
            self.on_message_complete()
            self._parser = HttpResponseParser(self)  # the other one expects a body

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._body_bytes_max:
            self._fail(f"had a response of more than {self._body_bytes_max} bytes")
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

    def _fail(self, problem: str) -> None:
        pending = self._pending
        if pending is not None and not pending.done():
            pending.set_exception(
                ServerLost(
                    f"the connection to {self._url} {problem}",
                    is_unanswered=not self._is_answered,
                )
            )
        self.close()
