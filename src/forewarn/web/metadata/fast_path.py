"""The fast path of a poll: prepared bytes, without the application, a task, a log line or JSON.

A VM sends the same bytes at every poll. Once the parser has read them as one ordinary poll, they
are remembered with their meaning (`ParsedPoll`), and the same bytes mean the same again. Nothing
else is: the client, its document, and whether the poll must be recorded are looked up each time.
All connections send the same bytes for the same request.

    PollConnection       only remembered bytes have arrived; between two requests, or a long poll
                         waits
      -> MetadataConnection    at the first other bytes, or if the client does not read: parses
                               HTTP, remembers polls, and passes everything else to the application
      -> PollConnection        to wait: a parser would cost more than all the rest
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from uvicorn import __version__ as uvicorn_version
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from forewarn.auth.tokens import Tokens
from forewarn.config import Config, Identify, NotBeforeFormat
from forewarn.core.fleet import Scope
from forewarn.engine.board import PublishedScope
from forewarn.engine.engine import Engine
from forewarn.errors import Error, Forbidden
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import Connection, ConnectionPolicy
from forewarn.web.http.message import (
    BLANK_LINE,
    CLOSE,
    CONTENT_TYPE,
    Header,
    content_length,
    encode_headers,
    join_headers,
    plain_address,
)
from forewarn.web.http_status import metadata_body
from forewarn.web.metadata import request as requests
from forewarn.web.metadata.client_identity import (
    ID,
    SIGNATURE,
    HostSignature,
    accepted_times,
    find_signed_vm,
    read_host_signature,
)
from forewarn.web.metadata.request import MetadataRequest
from forewarn.wire import document
from forewarn.wire.versions import Version

REQUEST_BYTES_MAX = 1024
POLLS_MAX = 16_384
UNUSUAL_SIGNED_HEADERS = frozenset(
    b"content-length expect origin transfer-encoding upgrade x-forwarded-for".split()
)  # if a host daemon has signed
UNUSUAL_HEADERS = UNUSUAL_SIGNED_HEADERS | {ID, SIGNATURE}
RELAYS_MAX = 4096
_CLOSE = encode_headers([CLOSE])


def render(place: PublishedScope, version: Version, *, is_iso: bool) -> bytes:
    """Headers and body of the document, rendered once per change and api-version."""
    key = f"{version.name} iso" if is_iso else version.name
    rendered = place.pages.get(key)
    if rendered is None:
        body = document.body(place.scope, version, iso_not_before=is_iso)
        headers = encode_headers(document_headers(place.scope, body))
        rendered = place.pages[key] = headers + b"\r\n" + body
    return rendered


def document_headers(scope: Scope, body: bytes) -> tuple[Header, ...]:
    return CONTENT_TYPE, etag(scope), content_length(body)


def etag(scope: Scope) -> Header:
    return b"etag", b'"%d"' % scope.incarnation


def age(engine: Engine) -> tuple[Header, ...]:
    """While this server is cut off from the store. A host daemon then asks another server."""
    seconds = engine.age_seconds
    return ((b"age", b"%d" % seconds),) if seconds else ()


@dataclass(frozen=True, slots=True)
class ParsedPoll:
    """`vm` is empty where the address identifies it; `known` are incarnations the client has.

    `request` has its bytes, once they are remembered. `signed` is what a host daemon has added.
    """

    vm: str
    version: Version
    known: frozenset[int]
    is_last: bool
    wait_seconds: int = 0
    request: bytes = b""
    signed: HostSignature | None = None


class Polls(ConnectionPolicy):
    """What all connections of the metadata listener share.

    `parsed` holds the remembered polls by their bytes. `now` is the engine's time in seconds, read
    once a second, and so is `age`, a header line while the store is lost. `waiting` counts the long
    polls in progress. `relays` are the addresses of host daemons, which have signed a poll.
    """

    def __init__(
        self, engine: Engine, config: Config, limits: Limits, tokens: Tokens | None = None
    ) -> None:
        super().__init__(limits, metadata_body, engine.throttled_log)
        self.connections: set[Any] = set()
        self.parsed: dict[bytes, ParsedPoll] = {}
        self.relays: set[str] = set()
        self.board = engine.board
        self.ok = self.unchanged = self.age = b""
        self.documents_count = self.unchanged_count = self.waiting = 0
        self.now = engine.clock.now().timestamp()
        self.signed_times = accepted_times(engine.clock)
        self._tokens = tokens
        self._engine = engine
        self._config = config
        self._is_iso = config.not_before_format is NotBeforeFormat.DOCUMENTED
        self._is_by_address = set(config.identify) == {Identify.ADDRESS}

    def is_unknown(self, address: str) -> bool:
        """Where VMs are identified by address alone, other addresses can only be refused."""
        is_vm = address in self.board.addresses
        return self._is_by_address and not is_vm and address not in self.relays

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        if not self.can_replace:
            self.throttled_log.warn("no fast path with this uvicorn", version=uvicorn_version)
            return super().connector(**arguments)
        self.connections = arguments["server_state"].connections
        self.make_full = partial(MetadataConnection, self, **arguments)
        return partial(PollConnection, self)

    def tick(self, state: ServerState, now: float) -> None:
        headers = encode_headers(state.default_headers)
        self.ok, self.unchanged = STATUS_LINE[200] + headers, STATUS_LINE[304] + headers
        at = self._engine.clock.now()
        self.now = at.timestamp()
        self.signed_times = accepted_times(self._engine.clock)
        self._engine.last_polls.count_silent(at, self._engine.timing)
        was_followed, self.age = not self.age, encode_headers(age(self._engine))
        if self.age and was_followed:
            self._end_relayed_waits()
        super().tick(state, now)

    def _end_relayed_waits(self) -> None:
        """A host daemon can ask another server, which knows what is new."""
        for connection in list(self.connections):
            if isinstance(connection, PollConnection) and connection.is_relayed:
                connection.time_out()

    def find(self, poll: ParsedPoll, address: str) -> PublishedScope | None:
        """The scope of the client; None if it is unknown."""
        return self.board.vms.get(self.find_name(poll, address))

    def find_name(self, poll: ParsedPoll, address: str) -> str:
        """The name of the client's VM; empty if it is unknown."""
        if poll.signed is None:
            return poll.vm or self.board.addresses.get(address, "")
        try:
            name = find_signed_vm(poll.signed, self.board, self._tokens)
        except Forbidden:
            return ""  # the application refuses it
        if address not in self.relays and len(self.relays) < RELAYS_MAX:
            self.relays.add(address)
        return name

    def respond(self, poll: ParsedPoll, address: str) -> bytes | None:
        """The whole response; empty if a long poll has to wait for it.

        None if the client is refused or unknown, or the poll must be recorded first.
        """
        if poll.signed is not None and poll.signed.time not in self.signed_times:
            return None
        name = self.find_name(poll, address)
        place = self.board.vms.get(name)
        if place is None or place.fresh_until <= self.now or name in (place.booting or ()):
            return None
        self.board.polled[name] = self.now
        if self._engine.last_polls.must_store(place, name, self.now):
            self._engine.record_poll(place)
        must_not_wait = self.age and poll.signed is not None
        if poll.wait_seconds and place.scope.incarnation in poll.known and not must_not_wait:
            return b""
        return self.encode(poll, place)

    def encode(self, poll: ParsedPoll, place: PublishedScope, more: bytes = b"") -> bytes:
        """The response, with more header lines."""
        more += self.age
        if poll.known and place.scope.incarnation in poll.known:
            self.unchanged_count += 1
            response = self.unchanged + encode_headers([etag(place.scope)]) + b"\r\n"
        else:
            self.documents_count += 1
            response = self.ok + render(place, poll.version, is_iso=self._is_iso)
        if poll.is_last:
            more += _CLOSE
        return response.replace(BLANK_LINE, b"\r\n%b\r\n" % more, 1) if more else response

    def send(self, connection: Any, poll: ParsedPoll, response: bytes) -> None:
        connection.due_at = self.idle_at
        connection.transport.write(response)
        if poll.is_last:
            connection.transport.close()

    def parse(self, url: bytes, headers: list[Header], *, is_last: bool) -> ParsedPoll | None:
        """The meaning of a GET; None for anything but an ordinary poll.

        With a rate limit the application must see every request.
        """
        joined = join_headers(headers)
        path, _, query = url.partition(b"?")
        signed = read_host_signature(joined)
        unusual = UNUSUAL_HEADERS if signed is None else UNUSUAL_SIGNED_HEADERS
        is_unusual = not path.isascii() or b"%" in path or not unusual.isdisjoint(joined)
        if is_unusual or self._config.requests_per_second:
            return None
        is_by_path = Identify.PATH in self._config.identify
        vm, rest = requests.split(path.decode()) if is_by_path else ("", path.decode())
        if requests.normalize(rest) != requests.EVENTS:
            return None
        if not vm and not signed and Identify.ADDRESS not in self._config.identify:
            return None
        request = MetadataRequest("GET", vm, rest, query, joined, "")
        try:
            version = requests.events_version(request, self._config)
        except Error:
            return None
        tags = document.read_tags(request.header(b"if-none-match"))
        known = document.read_incarnations(tags)
        seconds = requests.wait_seconds(request, self._config)
        if "*" in tags or (b"prefer" in joined and not (seconds and known)):
            return None
        return ParsedPoll(vm, version, known, is_last, seconds, signed=signed)

    def remember(self, data: bytes, poll: ParsedPoll) -> None:
        if len(self.parsed) >= POLLS_MAX:
            self.parsed.clear()
        self.parsed[data] = replace(poll, request=data)


def can_remember(data: bytes) -> bool:
    """Whether what arrived on an idle connection can be remembered, if it is a poll.

    It must be exactly one request. Then its only blank line is at its end.
    """
    return len(data) <= REQUEST_BYTES_MAX and data.find(BLANK_LINE) == len(data) - len(BLANK_LINE)


class PollConnection(asyncio.Protocol):
    """A connection on which only remembered polls have arrived.

    state      what happens                             deadline
    idle       between two requests                     idle_at: closed
    waiting    `_poll` waits for a change of `_place`   as the client prefers: answered

    idle -> waiting    data_received, of a long poll whose document is known
    waiting -> idle    answer, when the document has changed or the deadline has passed
    """

    __slots__ = ("_place", "_poll", "_polls", "address", "due_at", "transport")

    def __init__(self, polls: Polls) -> None:
        self._polls = polls
        self._poll: ParsedPoll | None = None
        self._place: PublishedScope | None = None
        self.due_at = polls.idle_at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Never raises: the event loop would log it, and would not close the socket."""
        self.address = ""
        self.transport = transport
        self._polls.connections.add(self)
        try:
            peer = transport.get_extra_info("peername")
            self.address = plain_address(peer[0]) if peer else ""
            is_admitted = self._polls.admit(self)
        except Exception as error:
            self._polls.throttled_log.warn("connection failed", error=error)
            transport.abort()
            return
        if not is_admitted:
            transport.write(self._polls.too_many)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._polls.connections.discard(self)
        self._polls.release(self)
        self._wait(None, None)

    def data_received(self, data: bytes) -> None:
        if self._poll is not None:  # more input than one request: the application waits instead
            data = self._poll.request + data
        poll = self._polls.parsed.get(data)
        response = None if poll is None else self._polls.respond(poll, self.address)
        if poll is None or response is None:
            self._replace().data_received(data)
        elif response:
            self._polls.send(self, poll, response)
        else:
            self.due_at = asyncio.get_running_loop().time() + poll.wait_seconds
            self._wait(poll, self._polls.find(poll, self.address))

    def _wait(self, poll: ParsedPoll | None, place: PublishedScope | None) -> None:
        """Wait for the next change of this scope only, or of none any more."""
        if self._place is not None:
            self._place.remove_waiter(self.answer)
        if place is not None:
            place.add_waiter(self.answer)
        self._polls.waiting += (poll is not None) - (self._poll is not None)
        self._poll, self._place = poll, place

    def answer(self) -> None:
        """Respond, unless this client's document has not changed and it still wants to wait.

        The client is identified again: its VM may have moved to another scope.
        """
        poll = self._poll
        if poll is None or self.transport.is_closing():
            return
        place = self._polls.find(poll, self.address)
        if place is None:
            self._replace().data_received(poll.request)
        elif self.due_at and place.scope.incarnation in poll.known:
            self._wait(poll, place)
        else:
            self._wait(None, None)
            applied = b"preference-applied: wait=%d\r\n" % poll.wait_seconds
            self._polls.send(self, poll, self._polls.encode(poll, place, applied))

    def _replace(self) -> "MetadataConnection":
        self.connection_lost(None)
        full = self._polls.make_full()
        self.transport.set_protocol(full)
        full.connection_made(self.transport)
        return full

    def pause_writing(self) -> None:
        """The client does not read its responses."""
        self._replace().pause_writing()

    @property
    def is_relayed(self) -> bool:
        """Whether a long poll of a host daemon waits."""
        return self._poll is not None and self._poll.signed is not None

    @property
    def is_evictable(self) -> bool:
        return self._poll is None and not self.transport.get_write_buffer_size()

    def time_out(self) -> None:
        if self._poll is not None:
            self.due_at = 0
            self._polls.board.call_in_turn([self.answer])
        elif self.is_evictable and not self.transport.is_closing():
            self.transport.close()
        else:
            self.transport.abort()

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops."""
        self.due_at = 0
        self.answer()
        self.transport.close()


class MetadataConnection(Connection):
    """A VM's connection that parses HTTP. `poll` is the latest request, if it was a poll.

    `is_alone`: nothing but one request has arrived. If it has to wait, that is enough to wait for
    the response in a PollConnection.
    """

    def __init__(self, polls: Polls, **arguments: Any) -> None:
        super().__init__(polls, **arguments)
        self.polls = polls
        self.poll: ParsedPoll | None = None
        self.is_alone = self.must_wait = False

    def data_received(self, data: bytes) -> None:
        self.poll, self.must_wait = None, False
        self.is_alone = self.is_idle and can_remember(data)
        poll = self.polls.parsed.get(data) if self.is_alone else None
        if poll is None or not self._respond(poll):
            super().data_received(data)
            if self.is_alone and self.poll is not None:
                self.polls.remember(data, self.poll)
        if self.must_wait:
            self.connection_lost(ConnectionError())  # without an error uvicorn would close it
            simple = PollConnection(self.polls)
            self.transport.set_protocol(simple)
            simple.connection_made(self.transport)
            simple.data_received(data)

    def _respond(self, poll: ParsedPoll) -> bool:
        response = self.polls.respond(poll, self.address)
        self.must_wait = self.is_alone and response == b""
        if response:
            self.polls.send(self, poll, response)
        return bool(response) or self.must_wait

    def start_request(self) -> None:
        self.poll = None
        is_kept, version = self.parser.should_keep_alive(), self.parser.get_http_version()
        if self.parser.get_method() == b"GET" and (version == "1.1" or not is_kept):
            poll = self.polls.parse(self.url, self.headers, is_last=not is_kept)
            if poll is not None and self._respond(poll):
                self.poll = poll
                return
        super().start_request()
        if version == "1.0" and is_kept:  # uvicorn would close
            self.cycle.keep_alive = True
            keep_alive = (b"connection", b"keep-alive")
            self.cycle.default_headers = [*self.cycle.default_headers, keep_alive]
