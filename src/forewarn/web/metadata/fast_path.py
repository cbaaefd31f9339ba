"""The fast path of a poll: prepared bytes, without the application, a task, a log line or JSON.

A VM sends the same bytes at every poll. Once the parser has read them as one ordinary poll, they
are remembered with their meaning (`ParsedPoll`), and the same bytes mean the same again. Nothing
else is remembered: the client, its document, and whether the poll must be recorded are looked up
each time.

    PollConnection       only remembered bytes have arrived; between two requests, nothing in flight
      -> MetadataConnection    at the first other bytes, or if the client does not read: parses
                               HTTP, remembers polls, and passes everything else to the application

All of them send the same bytes for the same request.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from forewarn.config import Config, Identify, NotBeforeFormat
from forewarn.core.fleet import Scope
from forewarn.engine.board import PublishedScope
from forewarn.engine.engine import Engine
from forewarn.errors import Error
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import Connection, ConnectionPolicy
from forewarn.web.http.message import (
    BLANK_LINE,
    CLOSE,
    CONTENT_TYPE,
    Header,
    content_length,
    encode_headers,
    plain_address,
)
from forewarn.web.http_status import metadata_body
from forewarn.web.metadata import request as requests
from forewarn.web.metadata.client_identity import ID, SIGNATURE
from forewarn.web.metadata.request import MetadataRequest
from forewarn.wire import document
from forewarn.wire.versions import Version

REQUEST_BYTES_MAX = 1024
POLLS_MAX = 16_384
UNUSUAL_HEADERS = frozenset(
    (
        b"content-length",
        b"expect",
        b"origin",
        b"prefer",
        b"transfer-encoding",
        b"upgrade",
        b"x-forwarded-for",
        ID,
        SIGNATURE,
    )
)
_CLOSING = b"\r\n" + encode_headers([CLOSE]) + b"\r\n"
_INCARNATION = re.compile(r"[1-9][0-9]{0,17}")


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


@dataclass(frozen=True, slots=True)
class ParsedPoll:
    """`vm` is empty where the address identifies it; `known` are incarnations the client has."""

    vm: str
    version: Version
    known: frozenset[int]
    is_last: bool


class Polls(ConnectionPolicy):
    """What all connections of the metadata listener share.

    `parsed` holds the remembered polls by their bytes. `now` is the engine's time in seconds, read
    once a second.
    """

    def __init__(self, engine: Engine, config: Config, limits: Limits) -> None:
        super().__init__(limits, metadata_body, engine.throttled_log)
        self.parsed: dict[bytes, ParsedPoll] = {}
        self.board = engine.board
        self.ok = self.unchanged = b""
        self.documents_count = self.unchanged_count = 0
        self.now = engine.clock.now().timestamp()
        self._clock = engine.clock
        self._config = config
        self._is_iso = config.not_before_format is NotBeforeFormat.DOCUMENTED
        self._is_by_address = set(config.identify) == {Identify.ADDRESS}

    def is_unknown(self, address: str) -> bool:
        """Where VMs are identified by address alone, other addresses can only be refused."""
        return self._is_by_address and address not in self.board.addresses

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(
            PollConnection,
            self,
            arguments["server_state"].connections,
            partial(MetadataConnection, self, **arguments),
        )

    def tick(self, state: ServerState, now: float) -> None:
        headers = encode_headers(state.default_headers)
        self.ok, self.unchanged = STATUS_LINE[200] + headers, STATUS_LINE[304] + headers
        self.now = self._clock.now().timestamp()
        super().tick(state, now)

    def respond(self, poll: ParsedPoll, address: str) -> bytes | None:
        """The whole response; None if the client is unknown or the poll must be recorded first."""
        board = self.board
        place = board.vms.get(poll.vm or board.addresses.get(address, ""))
        if place is None or place.fresh_until <= self.now:
            return None
        if poll.known and place.scope.incarnation in poll.known:
            self.unchanged_count += 1
            response = self.unchanged + encode_headers([etag(place.scope)]) + b"\r\n"
        else:
            self.documents_count += 1
            response = self.ok + render(place, poll.version, is_iso=self._is_iso)
        return response.replace(BLANK_LINE, _CLOSING, 1) if poll.is_last else response

    def parse(self, url: bytes, headers: list[Header], *, is_last: bool) -> ParsedPoll | None:
        """The meaning of a GET; None for anything but an ordinary poll.

        With a rate limit the application must see every request.
        """
        joined = requests.join(headers)
        path, _, query = url.partition(b"?")
        is_unusual = not path.isascii() or b"%" in path or not UNUSUAL_HEADERS.isdisjoint(joined)
        if is_unusual or self._config.requests_per_second:
            return None
        vm, rest = "", path.decode()
        if Identify.PATH in self._config.identify:
            vm, rest = requests.split(rest)
        if requests.normalize(rest) != requests.EVENTS:
            return None
        if not vm and Identify.ADDRESS not in self._config.identify:
            return None
        request = MetadataRequest("GET", vm, rest, query, joined, "")
        try:
            version = requests.events_version(request, self._config)
        except Error:
            return None
        tags = document.read_tags(request.header(b"if-none-match"))
        if "*" in tags:
            return None
        known = frozenset(int(tag) for tag in tags if _INCARNATION.fullmatch(tag))
        return ParsedPoll(vm, version, known, is_last)

    def remember(self, data: bytes, poll: ParsedPoll) -> None:
        """Remember what arrived between two idle states, if it is exactly one request.

        Then its only blank line is at its end.
        """
        if len(data) > REQUEST_BYTES_MAX or data.find(BLANK_LINE) != len(data) - len(BLANK_LINE):
            return
        if len(self.parsed) >= POLLS_MAX:
            self.parsed.clear()
        self.parsed[data] = poll


class PollConnection(asyncio.Protocol):
    """A connection on which only remembered polls have arrived: always idle."""

    __slots__ = ("_connections", "_make_full", "_polls", "_transport", "address", "due_at")

    def __init__(
        self,
        polls: Polls,
        connections: set[Any],
        make_full: Callable[[], "MetadataConnection"],
    ) -> None:
        self._polls = polls
        self._connections = connections
        self._make_full = make_full
        self.due_at = polls.idle_at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        self.address = plain_address(peer[0]) if peer else ""
        self._transport = transport
        self._connections.add(self)
        if not self._polls.admit(self):
            transport.write(self._polls.too_many)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._polls.release(self)

    def data_received(self, data: bytes) -> None:
        poll = self._polls.parsed.get(data)
        response = None if poll is None else self._polls.respond(poll, self.address)
        if poll is None or response is None:
            self._replace().data_received(data)
            return
        self.due_at = self._polls.idle_at
        self._transport.write(response)
        if poll.is_last:
            self._transport.close()

    def _replace(self) -> "MetadataConnection":
        self.connection_lost(None)
        full = self._make_full()
        self._transport.set_protocol(full)
        full.connection_made(self._transport)
        return full

    def pause_writing(self) -> None:
        """The client does not read its responses."""
        self._replace().pause_writing()

    @property
    def is_evictable(self) -> bool:
        return not self._transport.get_write_buffer_size()

    def time_out(self) -> None:
        if self.is_evictable and not self._transport.is_closing():
            self._transport.close()
        else:
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops."""
        self._transport.close()


class MetadataConnection(Connection):
    """A VM's connection that parses HTTP. `poll` is the latest request, if it was a poll."""

    def __init__(self, polls: Polls, **arguments: Any) -> None:
        super().__init__(polls, **arguments)
        self.polls = polls
        self.poll: ParsedPoll | None = None

    def data_received(self, data: bytes) -> None:
        self.poll = None
        was_idle = self.is_idle
        poll = self.polls.parsed.get(data)
        if was_idle and poll is not None and self._respond(poll):
            return
        super().data_received(data)
        if was_idle and self.is_idle and self.poll is not None:
            self.polls.remember(data, self.poll)

    def _respond(self, poll: ParsedPoll) -> bool:
        response = self.polls.respond(poll, self.address)
        if response is None:
            return False
        self.due_at = self.polls.idle_at
        self.transport.write(response)
        if poll.is_last:
            self.transport.close()
        return True

    def start_request(self) -> None:
        self.poll = None
        is_kept, version = self.parser.should_keep_alive(), self.parser.get_http_version()
        is_get = self.parser.get_method() == b"GET"
        if is_get and (version == "1.1" or not is_kept):
            poll = self.polls.parse(self.url, self.headers, is_last=not is_kept)
            if poll is not None and self._respond(poll):
                self.poll = poll
                return
        super().start_request()
        if version == "1.0" and is_kept:  # uvicorn would close
            self.cycle.keep_alive = True
            keep_alive = (b"connection", b"keep-alive")
            self.cycle.default_headers = [*self.cycle.default_headers, keep_alive]

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client of a long poll that closes its side is gone."""
        is_long_poll = any(name == b"prefer" for name, _ in self.headers or ())
        return not is_long_poll and super().eof_received()
