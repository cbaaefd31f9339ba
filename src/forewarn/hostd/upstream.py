"""Requests to one of several servers, over kept connections, with fail-over.

A request goes to the server that answered last, and to the next one if that cannot be reached.
What cannot be repeated is sent again only if it was certainly not received. Connections and the
time of each attempt have limits.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forewarn.errors import Unavailable
from forewarn.hostd.connection import HttpConnection, Response, ServerAddress, ServerLost
from forewarn.web.http.message import Header, content_length, encode_headers

RESPONSE_SECONDS_MAX = 15.0
RETRY_SECONDS = 1.0
"""A server that was lost is not tried again before: others do not wait for it too."""
KEPT_SECONDS_MAX = 30.0
"""Well below the server's `idle_seconds`: it hardly ever closes a connection as we send."""
CONNECTIONS_MAX = 1024
TRY_NEXT = frozenset((502, 503, 504))


class NotSent(ServerLost):
    """The server has certainly not received the request."""


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
    timer = loop.call_later(request.seconds_max, connection.give_up, request.seconds_max)
    try:
        response = await connection.send(data, is_head=is_head)
    finally:
        timer.cancel()
    if request.is_fresh:
        connection.close()
    elif connection.is_open:
        server.idle.append((connection, loop.time()))
    return response
