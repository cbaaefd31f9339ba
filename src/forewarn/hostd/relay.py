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
from functools import lru_cache, partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from forewarn.engine.clock import wait_for_first
from forewarn.errors import Error, Forbidden, Invalid, Unavailable
from forewarn.hostd.last_document import LastDocuments, Poll, is_document
from forewarn.hostd.moves import Moves
from forewarn.hostd.ports import BridgePorts, peer_of
from forewarn.hostd.refusals import Refusals, reason_of, reason_of_status
from forewarn.hostd.settings import HostToken
from forewarn.hostd.unconfirmed import Unconfirmed
from forewarn.hostd.upstream import (
    CHECK_EVERY_SECONDS,
    CHECK_SECONDS_MAX,
    TRY_NEXT,
    Request,
    Response,
    ServerLost,
    Upstream,
)
from forewarn.log import log
from forewarn.platform.remote import RefusalReason
from forewarn.web.http import message
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import Connection, ConnectionPolicy
from forewarn.web.http.message import Header
from forewarn.web.http_status import BUG, ClientGone, headers_of, metadata_body, status_of

WAIT_SECONDS_MAX = 3600
"""The longest that a server can be configured to let a long poll wait."""
SIGNED_MAX = 4096
CONFIRMED = (200, 304)
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

    def __init__(
        self, ports: BridgePorts, limits: Limits = LIMITS, refusals: Refusals | None = None
    ) -> None:
        super().__init__(limits, metadata_body)
        self.ports = ports
        self.refusals = refusals or Refusals()
        self.on_refused = partial(self.refusals.add, reason=RefusalReason.TOO_MANY, is_poll=True)

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
        """Empty if the guest is not known, or gone already: a reset leaves no address."""
        address = message.plain_address(self.client[0]) if self.client else ""
        self.peer = peer_of(self.transport.get_extra_info("socket"), address)
        if address and not self.peer.has_syn:
            self.policy.throttled_log.warn(
                "connections of guests are refused: they come with SYN cookies,"
                " because too many are half open"
            )
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

    def reject(self, error: Error) -> None:
        is_poll = bool(self.url) and self.parser.get_method() == b"GET" and is_document(self.url)
        reason, address = reason_of(error), self.peer.address
        self.policy.refusals.add(self.address, reason, is_poll=is_poll, address=address)
        super().reject(error)

    def send_response(self, response: Response) -> None:
        cycle = self.cycle
        if cycle.disconnected or self.transport.is_closing():
            cycle.disconnected = True  # else uvicorn logs that there is no response
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
    """The application of all bridges. `moves` are the VMs that are leaving this host."""

    def __init__(
        self,
        upstream: Upstream,
        token: HostToken,
        moves: Moves,
        now: Callable[[], float] = time.monotonic,
        wall_time: Callable[[], float] = time.time,
        refusals: Refusals | None = None,
        unconfirmed: Unconfirmed | None = None,
    ) -> None:
        self.refusals = refusals or Refusals(now)
        self.unconfirmed = unconfirmed or Unconfirmed(now)
        self._upstream = upstream
        self._token = token
        self._moves = moves
        self._now = now
        self._wall_time = wall_time
        self._documents = LastDocuments()
        self._waiting_vm = ""

    async def run(self) -> None:
        """Check the servers at which guests wait, until cancelled."""
        while True:  # ends when cancelled
            await asyncio.sleep(CHECK_EVERY_SECONDS)
            await self.check_servers()

    async def check_servers(self, seconds_max: float = CHECK_SECONDS_MAX) -> None:
        """End the long polls of servers that do not answer.

        It is sent in the name of a guest that waits, or did. Any response, also an error, shows
        that the server is alive.
        """
        headers = ((b"metadata", b"true"), *self._sign(self._waiting_vm))
        request = Request("GET", b"/metadata/versions", headers, seconds_max=seconds_max)
        await self._upstream.check_servers(request)

    def _sign(self, vm: str) -> tuple[Header, ...]:
        return sign(self._token, vm, int(self._wall_time()) // 60)

    async def __call__(self, scope: message.Message, receive: message.Receive, _: object) -> None:
        connection: RelayConnection = scope["connection"]
        try:
            response = await self._respond(connection, receive)
            reason = reason_of_status(response.status)
            connection.check_identity()
        except (ClientGone, asyncio.CancelledError):  # a stopped listener has aborted it before
            connection.cycle.disconnected = True  # else uvicorn logs that there is no response
            return
        except Error as error:
            response, reason = _error_response(error, connection), reason_of(error)
        except Exception:
            log.exception("request failed", path=scope["path"])
            response, reason = _error_response(BUG, connection), RefusalReason.SERVER_ERROR
        is_poll = scope["method"] == "GET" and is_document(connection.url)
        if response.status >= 400:
            self.refusals.add(connection.address, reason, is_poll=is_poll)
        elif is_poll:
            self.refusals.end(connection.address)
        connection.send_response(response)

    async def _respond(self, connection: RelayConnection, receive: message.Receive) -> Response:
        vm = connection.address
        headers = forwarded_headers(connection.headers)
        body = await message.read_body(receive)
        signed = (*headers, *self._sign(vm))
        request = Request(connection.scope["method"], connection.url, signed, body)
        poll = Poll.parse(vm, request)
        if poll is not None:
            return await self._poll(poll, request, receive)
        # A server that lets it wait would be taken for one that does not answer.
        return await self._upstream.send(without_wait(request))

    async def _poll(self, poll: Poll, request: Request, receive: message.Receive) -> Response:
        asked_at = self._now()
        ages_seconds: tuple[int, ...] = ()
        try:
            response = await self._wait(poll, request, receive)
            if response is not None and response.age_seconds:
                asked_at, ages_seconds = self._now(), response.ages_seconds
                response = None
            if response is None:
                response = await self._upstream.send(without_wait(request))
        except Unavailable as error:
            silent_seconds = error.silent_seconds if isinstance(error, ServerLost) else 0.0
            self.unconfirmed.doubt(ages_seconds, asked_at)
            self._fail(poll, asked_at, silent_seconds)
            if last := self._documents.find(poll, self._now()):
                return last
            raise
        is_confirmed = response.status in CONFIRMED and not response.age_seconds
        ages_seconds += response.ages_seconds
        self.unconfirmed.doubt(ages_seconds, asked_at, is_confirmed=is_confirmed)
        if response.age_seconds:
            return self._choose_old(poll, response)
        if response.status in TRY_NEXT:
            self._fail(poll, asked_at)
            return self._documents.find(poll, self._now()) or response
        if is_confirmed:
            self.unconfirmed.confirm(None if poll.wait_seconds else asked_at)
        self._documents.record(poll, response, self._now())
        return response

    def _choose_old(self, poll: Poll, response: Response) -> Response:
        """The document of a server that is cut off from its store, unless the guest has seen a
        later one: events that the guest knows would seem to be over.
        """
        if not self._documents.is_older(poll, response):
            self._documents.record_old(poll, response)
            return response
        last = self._documents.find(poll, self._now())
        if last is None:
            raise ServerLost("the only server that answers is cut off from its store")
        return last

    def _fail(self, poll: Poll, asked_at: float, silent_seconds: float = 0.0) -> None:
        """No server answers. One that let a poll wait and has closed the connection was there until
        just now. If its machine is gone, or it was stopped, nothing came from it for some time.
        """
        if not poll.wait_seconds:
            self.unconfirmed.fail(asked_at)
            return
        lost_at = max(self._now() - silent_seconds, asked_at)
        if silent_seconds:
            self.unconfirmed.note_lost_wait(lost_at)
        self.unconfirmed.fail(lost_at)

    async def _wait(
        self, poll: Poll, request: Request, receive: message.Receive
    ) -> Response | None:
        """The response to a long poll, which is sent once; None if it should not wait.

        If its server is lost, the guest may be gone too, without a trace if it was reset. Another
        poll in its name would mean that it is back.

        It does not wait while the VM moves, and stops waiting when the move begins. The guest
        would wait on its new host for a response that only this host can send.
        """
        is_moving = self._moves.is_moving(poll.vm)
        if not poll.wait_seconds or is_moving or not self._upstream.has_room:
            return None
        seconds_max = min(poll.wait_seconds, WAIT_SECONDS_MAX) + request.seconds_max
        waiting = request._replace(seconds_max=seconds_max, may_repeat=False)
        self._waiting_vm = poll.vm
        sent = asyncio.create_task(self._upstream.send(waiting))
        move = asyncio.create_task(self._moves.wait_for(poll.vm))
        await wait_for_first(sent, move, message.wait_for_disconnect(receive))
        if sent.done():
            return sent.result()
        if move.done():
            return None
        raise ClientGone("the client has disconnected")


def _error_response(error: Error, connection: RelayConnection) -> Response:
    more = [(name.lower().encode(), value.encode()) for name, value in headers_of(error).items()]
    headers = [*connection.server_state.default_headers, message.CONTENT_TYPE, *more]
    if isinstance(error, Forbidden):
        connection.cycle.keep_alive = False
    return Response(status_of(error), headers, metadata_body(error))


def without_wait(request: Request) -> Request:
    """The request, which its server answers at once."""
    headers = [each for each in request.headers if each[0] != b"prefer"]
    return request._replace(headers=headers)


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
