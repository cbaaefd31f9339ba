"""The quick way to answer a poll: from ready bytes, without an application, a task, a log line or
JSON.

A VM sends the same bytes at every poll, so the bytes of a request that the parser has once read as
an ordinary poll, whole and alone, are remembered with what they ask for (`ParsedPoll`). The same bytes at
the start of a request ask for the same again. Nothing else is remembered: who is calling, what its
document is and whether the poll must be recorded are looked up each time.

A connection begins as a `PollConnection`, which knows nothing but such bytes. At the first others
it becomes a `FullConnection`, which speaks HTTP, learns, and gives anything unusual to
`metadata.py`. All ways give the same bytes.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from forewarn.config import Identify
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.errors import Error
from forewarn.web.http.connection import CLOSE, Connection, ConnectionPolicy, Limits
from forewarn.web.http_status import metadata_body
from forewarn.web.metadata import client_identity as callers
from forewarn.web.metadata import request as ask
from forewarn.web.metadata.rendered_document import BLANK_LINE, Header, etag, lines, page
from forewarn.web.metadata.request import Request
from forewarn.web.settings import Settings
from forewarn.wire import document
from forewarn.wire.versions import Version

REQUEST_BYTES_MAX = 1024
PLANS_MAX = 16_384
UNUSUAL = frozenset(
    (
        b"content-length",
        b"expect",
        b"origin",
        b"prefer",
        b"transfer-encoding",
        b"upgrade",
        b"x-forwarded-for",
        callers.ID,
        callers.SIGNATURE,
    )
)
_CLOSING = b"\r\n" + lines([CLOSE]) + b"\r\n"
_INCARNATION = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class ParsedPoll:
    """What a poll asks for.

    `vm` is empty where the address tells it; `known` are the incarnations that it has already.
    """

    vm: str
    version: Version
    known: frozenset[int]
    is_last: bool


class Polls(ConnectionPolicy):
    """What all connections of the metadata listener share.

    `now` is the engine's time, read once a second; 0: ask its clock.
    """

    def __init__(self, engine: Engine, settings: Settings, limits: Limits) -> None:
        super().__init__(limits, metadata_body, engine.throttled_log)
        self.plans: dict[bytes, ParsedPoll] = {}
        self.board = engine.board
        self.ok = self.unchanged = b""
        self.documents_count = self.unchanged_count = 0
        self.now = 0.0
        self._clock = engine.clock
        self._settings = settings
        self._is_by_address = settings.identify == {Identify.ADDRESS}

    def is_unknown(self, address: str) -> bool:
        """Where VMs are known by address alone, one that is no VM's can only be refused."""
        return self._is_by_address and address not in self.board.addresses

    def connector(self, **given: Any) -> Callable[[], asyncio.Protocol]:
        return partial(
            PollConnection,
            self,
            given["server_state"].connections,
            partial(FullConnection, self, **given),
        )

    def tick(self, state: ServerState, now: float) -> None:
        common = lines(state.default_headers)
        self.ok, self.unchanged = STATUS_LINE[200] + common, STATUS_LINE[304] + common
        if isinstance(self._clock, RealClock):  # any other may leap
            self.now = self.read_clock()
        super().tick(state, now)

    def read_clock(self) -> float:
        return self._clock.now().timestamp()

    def answer(self, plan: ParsedPoll, address: str) -> bytes | None:
        """The whole answer;

        None if the caller is unknown, or if the poll must be recorded first.
        """
        board = self.board
        place = board.vms.get(plan.vm or board.addresses.get(address, ""))
        if place is None or place.fresh_until <= (self.now or self.read_clock()):
            return None
        if plan.known and place.scope.incarnation in plan.known:
            self.unchanged_count += 1
            answer = self.unchanged + lines([etag(place.scope)]) + b"\r\n"
        else:
            self.documents_count += 1
            answer = self.ok + page(
                place, plan.version, iso_not_before=self._settings.iso_not_before
            )
        return answer.replace(BLANK_LINE, _CLOSING, 1) if plan.is_last else answer

    def plan(self, url: bytes, headers: list[Header], *, is_last: bool) -> ParsedPoll | None:
        """What a GET asks for;

        None for anything but an ordinary poll. Whoever counts requests must see each one.
        """
        joined = ask.join(headers)
        path, _, query = url.partition(b"?")
        if (
            self._settings.requests_per_second
            or not UNUSUAL.isdisjoint(joined)
            or not path.isascii()
            or b"%" in path
        ):
            return None
        vm, rest = (
            ask.split(path.decode())
            if Identify.PATH in self._settings.identify
            else ("", path.decode())
        )
        if ask.route(rest) != ask.EVENTS or not (vm or Identify.ADDRESS in self._settings.identify):
            return None
        request = Request("GET", vm, rest, query, joined, "")
        try:
            version = ask.events_version(request, self._settings)
        except Error:
            return None
        tags = document.read_tags(request.header(b"if-none-match"))
        if "*" in tags:
            return None
        return ParsedPoll(
            vm, version, frozenset(int(tag) for tag in tags if _INCARNATION.fullmatch(tag)), is_last
        )

    def learn(self, data: bytes, plan: ParsedPoll) -> None:
        """Remember what came between two rests of a connection, if it is one request: then it has
        one blank line, at its end.
        """
        if len(data) > REQUEST_BYTES_MAX or data.find(BLANK_LINE) != len(data) - len(BLANK_LINE):
            return
        if len(self.plans) >= PLANS_MAX:
            self.plans.clear()
        self.plans[data] = plan


class PollConnection(asyncio.Protocol):
    """A connection on which nothing but known polls has come yet: always between two requests, with
    nothing in flight.
    """

    __slots__ = ("_connections", "_full", "_polls", "_transport", "address", "due_at")

    def __init__(
        self, polls: Polls, connections: set[Any], full: Callable[[], "FullConnection"]
    ) -> None:
        self._polls = polls
        self._connections = connections
        self._full = full
        self.due_at = polls.idle_at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        self.address = callers.plain(peer[0]) if peer else ""
        self._transport = transport
        self._connections.add(self)
        if not self._polls.admit(self):
            transport.write(self._polls.too_many)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._polls.release(self)

    def data_received(self, data: bytes) -> None:
        plan = self._polls.plans.get(data)
        answer = None if plan is None else self._polls.answer(plan, self.address)
        if plan is None or answer is None:
            self._become_full().data_received(data)
            return
        self.due_at = self._polls.idle_at
        self._transport.write(answer)
        if plan.is_last:
            self._transport.close()

    def _become_full(self) -> "FullConnection":
        self.connection_lost(None)
        full = self._full()
        self._transport.set_protocol(full)
        full.connection_made(self._transport)
        return full

    def pause_writing(self) -> None:
        self.due_at = self._polls.stall_at
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.due_at = self._polls.idle_at
        self._transport.resume_reading()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def is_evictable(self) -> bool:
        return not self.unsent_bytes

    def time_out(self) -> None:
        if self.unsent_bytes or self._transport.is_closing():
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """Uvicorn's word for: finish and close."""
        self._transport.close()


class FullConnection(Connection):
    """A VM's connection that speaks HTTP.

    `plan` is that of the latest request, if it was answered here.
    """

    def __init__(self, polls: Polls, **given: Any) -> None:
        super().__init__(polls, **given)
        self.polls = polls
        self.plan: ParsedPoll | None = None

    def data_received(self, data: bytes) -> None:
        self.plan = None
        was_idle = self.is_idle and not self.rest
        plan = self.polls.plans.get(data)
        if was_idle and plan is not None and self._answer(plan):
            return
        super().data_received(data)
        if was_idle and self.is_idle and not self.rest and self.plan is not None:
            self.polls.learn(data, self.plan)

    def _answer(self, plan: ParsedPoll) -> bool:
        answer = self.polls.answer(plan, self.address)
        if answer is None:
            return False
        self.due_at = self.polls.idle_at
        self.transport.write(answer)
        if plan.is_last:
            self.transport.close()
        return True

    def begin(self) -> None:
        self.plan = None
        is_kept, version = self.parser.should_keep_alive(), self.parser.get_http_version()
        is_free = not self.is_answering and not self.flow.write_paused
        is_small = self.head_size <= REQUEST_BYTES_MAX
        if (
            is_free
            and is_small
            and self.parser.get_method() == b"GET"
            and (version == "1.1" or not is_kept)
        ):
            plan = self.polls.plan(self.url, self.headers, is_last=not is_kept)
            if plan is not None and self._answer(plan):
                self.plan = plan
                return
        super().begin()
        if version == "1.0" and is_kept:  # uvicorn would close
            self.cycle.keep_alive = True
            self.cycle.default_headers = [
                *self.cycle.default_headers,
                (b"connection", b"keep-alive"),
            ]

    def on_message_complete(self) -> None:
        if self.plan is None:
            super().on_message_complete()
        else:
            self.end_request()

    def eof_received(self) -> bool:  # type: ignore[override]
        """If the client asked to wait, silence means that it has left."""
        return (
            not any(name == b"prefer" for name, _ in self.headers or ()) and super().eof_received()
        )
