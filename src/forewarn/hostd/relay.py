"""The relay: passes requests of the guests on a bridge to the servers, with the guest's identity.

The identity is where the guest is plugged in (`ports.py`). It is determined when the connection is
accepted, and must be the same at each request and response. What a guest sends itself as its
identity is removed. A response is passed on as it is.

While no server answers, a poll gets the last document that this guest got for the same request.
"""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from forewarn.engine.clock import RealClock
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Error, Forbidden, Invalid, Unavailable
from forewarn.hostd.connection import Response, ServerLost
from forewarn.hostd.last_document import LastDocuments, Poll
from forewarn.hostd.ports import BridgePorts, Peer, peer_of
from forewarn.hostd.upstream import TRY_NEXT, Request, Upstream
from forewarn.log import log
from forewarn.option_kind import Address
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import Connection, ConnectionPolicy
from forewarn.web.http.listener import SERVER_METADATA, Listener
from forewarn.web.http.message import (
    CLOSE,
    CONTENT_TYPE,
    Header,
    Message,
    Receive,
    Send,
    content_length,
    plain_address,
    read_body,
    wait_for_disconnect,
)
from forewarn.web.http_status import (
    BUG,
    METADATA_STATUS,
    ClientGone,
    TooManyRequests,
    headers_of,
    metadata_body,
    status_of,
)

ADDRESS_V6 = "fe80::a9fe:a9fe"
"""169.254.169.254 for guests that have only IPv6, as in OpenStack."""
FOLLOW_SECONDS = 2.0
WAIT_SECONDS_MAX = 3600
"""The longest that a server can be configured to let a long poll wait."""
REQUESTS_PER_GUEST_MAX = 32
LIMITS = Limits(connections_max=4096, connections_per_address_max=64)

HOST, ID, SIGNATURE = b"x-forewarn-host", b"x-instance-id", b"x-instance-id-signature"
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
NOT_FORWARDED = HOP_BY_HOP | {b"content-length", b"expect", HOST, ID, SIGNATURE}


class Signer:
    """Signs the identity of guests with the host's token.

    Servers have its digest, which is the key.
    """

    def __init__(self, token_name: str, key: bytes) -> None:
        self._host = (HOST, token_name.encode())
        self._key = key

    def sign(self, vm: str) -> tuple[Header, ...]:
        identity = vm.encode()
        signature = hmac.digest(self._key, identity, "sha256").hex().encode()
        return self._host, (ID, identity), (SIGNATURE, signature)


class Ports(Protocol):
    """`BridgePorts`, or a double in tests."""

    bridge: str

    def port_of(self, peer: Peer, now: float) -> str: ...


class RelayPolicy(ConnectionPolicy):
    """What all connections from one bridge share."""

    def __init__(
        self, ports: Ports, vm_of_port: Callable[[str, str], str | None], limits: Limits = LIMITS
    ) -> None:
        super().__init__(limits, metadata_body)
        self._ports = ports
        self._vm_of_port = vm_of_port

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(RelayConnection, self, **arguments)

    def is_unknown(self, address: str) -> bool:
        return not address

    def vm_of(self, peer: Peer) -> str:
        """The id of the guest; empty if it is not one. Unavailable if its port just changed."""
        port = self._ports.port_of(peer, asyncio.get_running_loop().time())
        return (self._vm_of_port(self._ports.bridge, port) or "") if port else ""


class RelayConnection(Connection):
    """A guest's connection; `address` is the id of the guest that opened it, if it is one.

    So limits for an address are limits for a guest, however many addresses it uses.
    """

    policy: RelayPolicy

    def identify(self) -> str:
        address = plain_address(self.client[0]) if self.client else ""
        self.peer = peer_of(self.transport.get_extra_info("socket"), address)
        try:
            return self.policy.vm_of(self.peer)
        except Unavailable:
            return ""

    def check_identity(self) -> None:
        """Unavailable or Forbidden unless it is still the guest that opened the connection."""
        vm = self.policy.vm_of(self.peer)
        if not vm:
            raise Forbidden(f"Forbidden. {self.peer.address} is not a VM of this host")
        if vm != self.address:
            raise Forbidden(f"Forbidden. {self.peer.address} is another VM than before")

    def start_request(self) -> None:
        self.check_identity()
        cast("Message", self.scope)["connection"] = self
        super().start_request()
        # The server's response has these headers already.
        self.cycle.default_headers = []
        if self.parser.get_http_version() == "1.0" and self.parser.should_keep_alive():
            self.cycle.keep_alive = True  # uvicorn would close
            self.cycle.default_headers = [(b"connection", b"keep-alive")]

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client of a long poll that closes its side is gone."""
        is_long_poll = any(name == b"prefer" for name, _ in self.headers or ())
        return not is_long_poll and super().eof_received()


class Relay:
    """The application of all bridges."""

    def __init__(
        self, upstream: Upstream, signer: Signer, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._upstream = upstream
        self._now = now
        self._signer = signer
        self._documents = LastDocuments()
        self._active: Counter[str] = Counter()
        self._waiting: set[asyncio.Task[Response]] = set()
        self._is_stopping = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        connection: RelayConnection = scope["connection"]
        vm = connection.address
        self._active[vm] += 1
        try:
            response = await self._respond(vm, connection, receive)
            connection.check_identity()
            headers = [each for each in response.headers if each[0].lower() not in HOP_BY_HOP]
            response = response._replace(headers=headers)
        except ClientGone:
            return
        except Error as error:
            response = self._error(error, connection)
        except Exception:
            log.exception("request failed", method=scope["method"], path=scope["path"])
            response = self._error(BUG, connection)
        finally:
            self._active[vm] -= 1
            if not self._active[vm]:
                del self._active[vm]
        start = {"type": "http.response.start", "status": response.status}
        await send({**start, "headers": response.headers})
        await send({"type": "http.response.body", "body": response.body})

    def stop(self) -> None:
        """Respond to all long polls now."""
        self._is_stopping = True
        for poll in self._waiting:
            poll.cancel()

    async def _respond(self, vm: str, connection: RelayConnection, receive: Receive) -> Response:
        if self._active[vm] > REQUESTS_PER_GUEST_MAX:
            raise TooManyRequests(
                f"Too many requests. {REQUESTS_PER_GUEST_MAX} at a time are accepted"
            )
        headers = forwarded_headers(connection.headers)
        names = {name for name, _ in connection.headers}
        has_body = not names.isdisjoint((b"content-length", b"transfer-encoding"))
        body = await read_body(receive) if has_body else None
        signed = (*headers, *self._signer.sign(vm))
        request = Request(connection.scope["method"], connection.url, signed, body)
        poll = Poll.parse(vm, request)
        if poll is not None:
            return await self._poll(poll, request, receive)
        if request.method != "HEAD" and request.method != "GET":
            request = request._replace(may_repeat=False, is_fresh=True)
        return await self._upstream.send(request)

    async def _poll(self, poll: Poll, request: Request, receive: Receive) -> Response:
        response = None
        if poll.wait_seconds:
            response = await self._wait(request, poll.wait_seconds, receive)
            plain = [each for each in request.headers if each[0] != b"prefer"]
            request = request._replace(headers=plain)
        try:
            response = response or await self._upstream.send(request)
        except Unavailable:
            if last := self._documents.find(poll, self._now()):
                return last
            raise
        if response.status in TRY_NEXT:
            return self._documents.find(poll, self._now()) or response
        self._documents.record(poll, response, self._now())
        return response

    async def _wait(self, request: Request, seconds: int, receive: Receive) -> Response | None:
        """The response to a long poll; None if another request has to be sent, without waiting."""
        if self._is_stopping or not self._upstream.has_room:
            return None
        seconds_max = min(seconds, WAIT_SECONDS_MAX) + request.seconds_max
        waiting = request._replace(seconds_max=seconds_max, may_repeat=False)
        poll = asyncio.create_task(self._upstream.send(waiting))
        gone = asyncio.create_task(wait_for_disconnect(receive))
        self._waiting.add(poll)
        try:
            await asyncio.wait((poll, gone), return_when=asyncio.FIRST_COMPLETED)
            if not poll.done():
                raise ClientGone("the client has disconnected")
            response = None if poll.cancelled() else poll.result()
        except ServerLost:
            return None
        finally:
            self._waiting.discard(poll)
            poll.cancel()
            gone.cancel()
        return None if response and response.status in TRY_NEXT else response

    def _error(self, error: Error, connection: RelayConnection) -> Response:
        body = metadata_body(error)
        more = (
            (name.lower().encode(), value.encode()) for name, value in headers_of(error).items()
        )
        default = connection.server_state.default_headers
        headers = [*default, CONTENT_TYPE, *more, content_length(body)]
        if isinstance(error, Forbidden):
            headers.append(CLOSE)
        return Response(status_of(error, METADATA_STATUS), headers, body)


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


class BridgeListener:
    """The listeners of one bridge, for IPv4 and IPv6.

    A bridge may be deleted and made again, with libvirt's network. `follow` notices that.
    """

    def __init__(
        self,
        relay: Relay,
        bridge: str,
        address: Address,
        vm_of_port: Callable[[str, str], str | None],
        limits: Limits = LIMITS,
    ) -> None:
        self._relay = relay
        self._bridge = bridge
        self._addresses = (address, Address(ADDRESS_V6, address.port))
        self._vm_of_port = vm_of_port
        self._limits = limits
        self._throttled_log = ThrottledLog(RealClock())
        self._ports: BridgePorts | None = None
        self._listeners: list[Listener] = []

    async def start(self) -> None:
        """Invalid or Unavailable if the bridge does not exist or cannot be listened on."""
        self._ports = BridgePorts(self._bridge)
        for address in self._addresses:
            try:
                bound = self._ports.listen(address)
            except Error as error:
                if not self._listeners:
                    await self.stop()
                    raise
                log.info("the relay serves no IPv6", bridge=self._bridge, problem=error.message)
                continue
            policy = RelayPolicy(self._ports, self._vm_of_port, self._limits)
            listener = Listener(
                self._relay, address, policy, server_name=SERVER_METADATA, bound=bound
            )
            await listener.start()
            self._listeners.append(listener)

    async def follow(self) -> None:
        """Listen again if the bridge was made again, or its address was removed."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                if self._ports is not None and self._ports.is_current():
                    self._ports.add_addresses(listener.address for listener in self._listeners)
                    continue
                await self.stop()
                await self.start()
                log.info("the relay listens again", bridge=self._bridge)
            except (Error, OSError) as error:
                self._throttled_log.warn(
                    "the relay cannot listen", bridge=self._bridge, problem=str(error)
                )

    async def stop(self) -> None:
        listeners, self._listeners = self._listeners, []
        await asyncio.gather(*(listener.stop() for listener in listeners))
        if self._ports is not None:
            self._ports.close()
            self._ports = None
