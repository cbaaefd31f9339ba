"""The relay: passes requests of the guests on a bridge to the servers, with the guest's identity.

The identity is where the guest is plugged in (`ports.py`). It is determined when the connection is
accepted, and must be the same at each request and response. What a guest sends itself as its
identity is removed. A response is passed on as it is.

While no server answers, a poll gets the last document that this guest got for the same request.
"""

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from forewarn.engine.clock import wait_for_first
from forewarn.errors import Error, Forbidden, Invalid, Unavailable
from forewarn.hostd.last_document import LastDocuments, Poll
from forewarn.hostd.netlink import add_address
from forewarn.hostd.ports import BridgePorts, interface_index, listen, open_bridge, peer_of
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import TRY_NEXT, Request, Response, Upstream
from forewarn.log import log
from forewarn.option_kind import Address
from forewarn.web.http import message
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import Connection, ConnectionPolicy
from forewarn.web.http.listener import SERVER_METADATA, Listener
from forewarn.web.http.message import Header
from forewarn.web.http_status import BUG, ClientGone, headers_of, metadata_body, status_of

ADDRESS_V6 = "fe80::a9fe:a9fe"
"""169.254.169.254 for guests that have only IPv6, as in OpenStack."""
FOLLOW_SECONDS = 2.0
WAIT_SECONDS_MAX = 3600
"""The longest that a server can be configured to let a long poll wait."""
SIGNED_MAX = 4096
LIMITS = Limits(connections_max=4096, connections_per_address_max=64)

IDENTITY = (b"x-forewarn-host", b"x-instance-id", b"x-forewarn-time", b"x-instance-id-signature")
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
NOT_FORWARDED = HOP_BY_HOP | {b"content-length", b"expect", *IDENTITY}


@lru_cache(SIGNED_MAX)
def sign(token: HostToken, vm: str, minute: int) -> tuple[Header, ...]:
    """The identity of a guest. Servers know the token's key, and accept it for some minutes."""
    at = b"%d" % (minute * 60)
    signature = hmac.digest(token.key, b"%b %b" % (vm.encode(), at), "sha256").hex()
    values = (token.name.encode(), vm.encode(), at, signature.encode())
    return tuple(zip(IDENTITY, values, strict=True))


class RelayPolicy(ConnectionPolicy):
    """What all connections from one bridge share."""

    def __init__(self, ports: BridgePorts, limits: Limits = LIMITS) -> None:
        super().__init__(limits, metadata_body)
        self.ports = ports

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(RelayConnection, self, **arguments)

    def is_unknown(self, address: str) -> bool:
        return not address


class RelayConnection(Connection):
    """A guest's connection; `address` is the id of the guest that opened it, if it is one.

    So limits for an address are limits for a guest, however many addresses it uses. The
    application is a `Relay`. It gets the connection too, for `send_response`: to send a response
    as messages of ASGI takes longer than all the rest.
    """

    policy: RelayPolicy

    def identify(self) -> str:
        address = message.plain_address(self.client[0]) if self.client else ""
        self.peer = peer_of(self.transport.get_extra_info("socket"), address)
        try:
            return self.policy.ports.vm_of(self.peer, time.monotonic())
        except Unavailable:
            return ""

    def check_identity(self) -> None:
        """Unavailable or Forbidden unless it is still the guest that opened the connection."""
        vm = self.policy.ports.vm_of(self.peer, time.monotonic())
        if not vm:
            raise Forbidden(f"Forbidden. {self.peer.address} is not a VM of this host")
        if vm != self.address:
            raise Forbidden(f"Forbidden. {self.peer.address} is another VM than before")

    def start_request(self) -> None:
        self.check_identity()
        cast("message.Message", self.scope)["connection"] = self
        super().start_request()
        self.cycle.keep_alive = self.parser.should_keep_alive()  # uvicorn closes for HTTP/1.0

    def send_response(self, response: Response) -> None:
        cycle = self.cycle
        if cycle.disconnected or self.transport.is_closing():
            return
        headers = [each for each in response.headers if each[0].lower() not in HOP_BY_HOP]
        has_body = response.status not in (204, 304) and cycle.scope["method"] != "HEAD"
        if has_body and not any(name.lower() == b"content-length" for name, _ in headers):
            headers.append(message.content_length(response.body))
        if not cycle.keep_alive:
            headers.append(message.CLOSE)
        elif cycle.scope["http_version"] == "1.0":
            headers.append((b"connection", b"keep-alive"))
        head = STATUS_LINE[response.status] + message.encode_headers(headers)
        self.transport.write(b"%b\r\n%b" % (head, response.body))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()


class Relay:
    """The application of all bridges."""

    def __init__(
        self,
        upstream: Upstream,
        token: HostToken,
        now: Callable[[], float] = time.monotonic,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._upstream = upstream
        self._token = token
        self._now = now
        self._wall_time = wall_time
        self._documents = LastDocuments()

    async def __call__(self, scope: message.Message, receive: message.Receive, _: object) -> None:
        connection: RelayConnection = scope["connection"]
        try:
            response = await self._respond(connection, receive)
            connection.check_identity()
        except ClientGone:
            return
        except Error as error:
            response = _error_response(error, connection)
        except Exception:
            log.exception("request failed", path=scope["path"])
            response = _error_response(BUG, connection)
        connection.send_response(response)

    async def _respond(self, connection: RelayConnection, receive: message.Receive) -> Response:
        vm = connection.address
        headers = forwarded_headers(connection.headers)
        body = await message.read_body(receive)
        signed = (*headers, *sign(self._token, vm, int(self._wall_time()) // 60))
        request = Request(connection.scope["method"], connection.url, signed, body)
        poll = Poll.parse(vm, request)
        if poll is not None:
            return await self._poll(poll, request, receive)
        return await self._upstream.send(request)

    async def _poll(self, poll: Poll, request: Request, receive: message.Receive) -> Response:
        try:
            if poll.wait_seconds and self._upstream.has_room:
                response = await self._wait(request, poll.wait_seconds, receive)
            else:
                plain = [each for each in request.headers if each[0] != b"prefer"]
                response = await self._upstream.send(request._replace(headers=plain))
        except Unavailable:
            if last := self._documents.find(poll, self._now()):
                return last
            raise
        if response.status in TRY_NEXT:
            return self._documents.find(poll, self._now()) or response
        self._documents.record(poll, response, self._now())
        return response

    async def _wait(self, request: Request, seconds: int, receive: message.Receive) -> Response:
        """The response to a long poll, which is sent once.

        If its server is lost, the guest may be gone too, without a trace if it was reset. Another
        poll in its name would mean that it is back.
        """
        seconds_max = min(seconds, WAIT_SECONDS_MAX) + request.seconds_max
        waiting = request._replace(seconds_max=seconds_max, may_repeat=False)
        poll = asyncio.create_task(self._upstream.send(waiting))
        await wait_for_first(poll, message.wait_for_disconnect(receive))
        if not poll.done():
            raise ClientGone("the client has disconnected")
        return poll.result()


def _error_response(error: Error, connection: RelayConnection) -> Response:
    more = [(name.lower().encode(), value.encode()) for name, value in headers_of(error).items()]
    headers = [*connection.server_state.default_headers, message.CONTENT_TYPE, *more]
    if isinstance(error, Forbidden):
        connection.cycle.keep_alive = False
    return Response(status_of(error), headers, metadata_body(error))


def forwarded_headers(headers: list[Header]) -> list[Header]:
    """What a server gets of a guest's headers; Invalid if the request was forwarded to us.

    Headers that Connection names are between the guest and us (RFC 9110, 7.6.1).
    """
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"x-forwarded-for":
            raise Invalid("Bad request. X-Forwarded-For is not accepted")
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    dropped = NOT_FORWARDED | (named - {b"host"}) if named else NOT_FORWARDED
    return [header for header in headers if header[0] not in dropped]


@dataclass(eq=False)
class BridgeListener:
    """The listeners of one bridge, for IPv4 and IPv6.

    A bridge may be made later, or deleted and made again with libvirt's network, and may get IPv6
    at any time. `follow` notices that. `vms` has the id of the VM at each port, by its index.
    """

    relay: Relay
    bridge: str
    address: Address
    vms: dict[int, str]

    def __post_init__(self) -> None:
        self._ports: BridgePorts | None = None
        self._listeners: dict[Address, Listener] = {}

    @property
    def is_serving(self) -> bool:
        return bool(self._listeners)

    async def follow(self) -> None:
        """Listen wherever that becomes possible, until cancelled; log each problem once."""
        logged = ""
        while True:
            problem = await self.update()
            if problem not in ("", logged):  # libvirt's networks are often without IPv6
                write = log.info if self.is_serving else log.warning
                write("not all guests are served", bridge=self.bridge, problem=problem)
            logged = problem
            await asyncio.sleep(FOLLOW_SECONDS)

    async def update(self) -> str:
        """Listen on both addresses, if that is possible now; the problem, if there is one."""
        try:
            if self._ports and self._ports.index != interface_index(self.bridge):
                await self.stop()
            self._ports = self._ports or open_bridge(self.bridge, self.vms)
            for address in (self.address, Address(ADDRESS_V6, self.address.port)):
                await self._listen(self._ports, address)
        except (Error, OSError) as error:
            return str(error)
        return ""

    async def _listen(self, ports: BridgePorts, address: Address) -> None:
        """The bridge's address may have been removed, so it is added again and again."""
        if address in self._listeners:
            add_address(ports.index, address.host)
            return
        bound, policy = listen(self.bridge, address), RelayPolicy(ports)
        listener = Listener(self.relay, address, policy, server_name=SERVER_METADATA, bound=bound)
        await listener.start()
        self._listeners[address] = listener
        log.info("the relay listens", bridge=self.bridge, address=str(address))

    async def stop(self) -> None:
        listeners, self._listeners = self._listeners, {}
        await asyncio.gather(*(listener.stop() for listener in listeners.values()))
        if self._ports is not None:
            self._ports.close()
            self._ports = None
