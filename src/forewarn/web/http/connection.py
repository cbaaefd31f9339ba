"""One connection and its limits: how large, how slow, how many. What HTTP itself refuses is
answered here, by no application.

Uvicorn's protocol speaks the HTTP; these are the limits that it lacks. One sweep a second looks for
connections whose time is up, so a request costs no timer. What a client sends is not logged:
whoever can connect could fill the log.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, parse_url
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from forewarn.engine.clock import RealClock
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Error, Invalid
from forewarn.web.http_status import (
    BUG,
    BodyTooLarge,
    HeadTooLarge,
    TooManyConnections,
    TooSlow,
    WrongHttpVersion,
    status_of,
)
from forewarn.web.metadata.client_identity import plain
from forewarn.web.metadata.rendered_document import CONTENT_TYPE, Header, content_length, lines

TICK_SECONDS = 1.0
SLICE_BYTES = 1024
"""What arrives is parsed in slices: the shortest poll has 72 bytes, so one slice holds at most 15
of them.
"""
TURN_BYTES = 16 * SLICE_BYTES
"""How much of one connection is parsed before others get their turn, if no request ends in it: a
body, say.
"""
REST_BYTES_MAX = 1 << 20
HEADER_LINES_MAX = 100
LENGTH_DIGITS_MAX = 20
FRAMING_MAX = 8
"""How many times its own size a body may take with all its chunk sizes and trailers."""
CLOSE = (b"connection", b"close")
LOOK_MAX = 32
"""How many connections are looked at, to find an idle one that can be closed for a new one."""
UNKNOWN_SHARE = 8
"""One connection in so many may be held by clients whose address is no VM's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`stall_seconds`: how long a request may take to arrive whole, and an answer to be taken.

    `connections_max` is for all clients of a listener together.
    """

    head_bytes_max: int = 64 * 1024
    body_bytes_max: int = 64 * 1024
    idle_seconds: float = 75.0
    stall_seconds: float = 10.0
    connections_max: int = 1_000_000
    connections_per_address_max: int = 4096


class Timed(Protocol):
    """A connection to the sweep: when it is to be looked at, and what then. `abort` ends it at
    once, whatever is unsent.

    `is_evictable`: nothing is being received, answered or sent, so that it can be closed to make
    room for another.
    """

    address: str
    due_at: float

    @property
    def is_evictable(self) -> bool: ...

    def time_out(self) -> None: ...

    def abort(self) -> None: ...


class ConnectionPolicy:
    """What all connections of a listener share. `idle_at` and `stall_at`: when one that begins now
    is to be looked at.

    A new connection is admitted if its address has room, and if the listener has room or can make
    some by closing an idle connection: one of an unknown address (`is_unknown`) if there is any,
    else the one that has been open longest. Unknown addresses have a small share together and never
    take the place of a VM. All of it costs the same however many there are. `limits_reached`
    counts, by the name of the limit, how often a connection was refused or an idle one closed.
    """

    def __init__(
        self, limits: Limits, body_of: Callable[[Error], bytes], trouble: ThrottledLog | None = None
    ) -> None:
        self.limits = limits
        self.body_of = body_of
        self.throttled_log = trouble or ThrottledLog(RealClock())
        self.counts: dict[str, int] = {}
        self.limits_reached = dict.fromkeys(("address", "unknown", "total"), 0)
        self.too_many = b""
        self._known: OrderedDict[Timed, None] = OrderedDict()
        self._unknown: OrderedDict[Timed, None] = OrderedDict()
        self._unknown_max = max(1, limits.connections_max // UNKNOWN_SHARE)
        self.idle_at = self.stall_at = math.inf
        self._turns: deque[Connection] = deque()

    def connector(self, **given: Any) -> Callable[[], asyncio.Protocol]:
        """What makes the protocol of a new connection; `given` is what uvicorn gives to its own."""
        return partial(Connection, self, **given)

    def tick(self, state: ServerState, now: float) -> None:
        """Once a second, by the time of the event loop.

        A time is given until the next tick and then in full, never less.
        """
        self.idle_at = now + TICK_SECONDS + self.limits.idle_seconds
        self.stall_at = now + TICK_SECONDS + self.limits.stall_seconds
        self.too_many = self.response(
            TooManyConnections("Too many connections. Try again later"), state.default_headers
        )
        connections = cast("set[Timed]", state.connections)
        for connection in [one for one in connections if one.due_at <= now]:
            connection.time_out()

    def queue_turn(self, connection: "Connection") -> None:
        """Let a connection go on parsing after all others had their turn.

        One turn per iteration of the event loop, for all connections together: what clients
        pipeline delays the others by one turn, however much it is and however many connections they
        use.
        """
        self._turns.append(connection)
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._give_turn)

    def _give_turn(self) -> None:
        connection = self._turns.popleft()
        if self._turns:
            asyncio.get_running_loop().call_soon(self._give_turn)
        connection.take_turn()

    @property
    def connections_count(self) -> int:
        return len(self._known) + len(self._unknown)

    def is_unknown(self, address: str) -> bool:
        """Whether this address is none that the listener is for."""
        return False

    def admit(self, connection: Timed) -> bool:
        """Count a new connection in;

        False if there is no room for it: then it gets `too_many` and is closed.
        """
        address = connection.address
        group = self._unknown if self.is_unknown(address) else self._known
        if not self._has_room(address, group):
            return False
        self.counts[address] = self.counts.get(address, 0) + 1
        group[connection] = None
        return True

    def release(self, connection: Timed) -> None:
        """Count it out, if it is counted."""
        address = connection.address
        for group in (self._known, self._unknown):
            if connection in group:
                del group[connection]
                self.counts[address] -= 1
                if not self.counts[address]:
                    del self.counts[address]

    def _has_room(self, address: str, group: "OrderedDict[Timed, None]") -> bool:
        limits = self.limits
        if self.counts.get(address, 0) >= limits.connections_per_address_max:
            return self._reached("address", limits.connections_per_address_max, address)
        if group is self._unknown and len(group) >= self._unknown_max:
            return self._reached("unknown", self._unknown_max, address, self._unknown)
        if len(self._known) + len(self._unknown) >= limits.connections_max:
            return self._reached("total", limits.connections_max, address, self._unknown, group)
        return True

    def _reached(
        self, limit: str, limit_max: int, address: str, *groups: "OrderedDict[Timed, None]"
    ) -> bool:
        """Whether there is room all the same, because an idle connection of the groups could be
        closed.
        """
        self.limits_reached[limit] += 1
        count = self.connections_count
        self.throttled_log.warn(
            f"connection limit reached: {limit}",
            limit_max=limit_max,
            connections=count,
            address=address,
        )
        return any(self._evict(group) for group in groups)

    def _evict(self, group: "OrderedDict[Timed, None]") -> bool:
        """Close an idle connection, the oldest first.

        Those that are not idle go to the end, so that others are looked at.
        """
        for _ in range(min(LOOK_MAX, len(group))):
            connection = next(iter(group))
            if connection.is_evictable:
                self.release(connection)
                connection.abort()
                return True
            group.move_to_end(connection)
        return False

    def response(self, problem: Error, default_headers: Iterable[Header]) -> bytes:
        """A whole answer, after which the connection is closed."""
        body = self.body_of(problem)
        headers = (*default_headers, CONTENT_TYPE, content_length(body), CLOSE)
        return STATUS_LINE[status_of(problem)] + lines(headers) + b"\r\n" + body


class Flow(FlowControl):
    """Uvicorn's flow control with a second reason not to read: received bytes are not parsed yet.

    The application pauses and resumes reading as it takes the body; `hold` and `release` are the
    connection's own.
    """

    is_held = False

    def hold(self) -> None:
        self._change(is_paused=self.read_paused, is_held=True)

    def release(self) -> None:
        self._change(is_paused=self.read_paused, is_held=False)

    def pause_reading(self) -> None:
        self._change(is_paused=True, is_held=self.is_held)

    def resume_reading(self) -> None:
        self._change(is_paused=False, is_held=self.is_held)

    def _change(self, *, is_paused: bool, is_held: bool) -> None:
        was_reading = not (self.read_paused or self.is_held)
        self.read_paused, self.is_held = is_paused, is_held
        is_reading = not (is_paused or is_held)
        if was_reading and not is_reading:
            self._transport.pause_reading()
        elif is_reading and not was_reading:
            self._transport.resume_reading()


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, with limits.

    `is_idle`: nothing has begun to arrive, nothing is being answered, nothing waits to be written.
    `is_within`: a request has begun to arrive and not ended; `has_head`: its headers are there, and
    it has its own cycle. `rest` from `rest_at` on: what arrived and is not parsed yet, because an
    earlier request must be answered first, or because this connection has had its turn
    (`is_queued`). Nothing is read meanwhile.
    """

    flow: Flow

    def __init__(self, guard: ConnectionPolicy, **given: Any) -> None:
        super().__init__(**given)
        self.guard = guard
        self.address = ""
        self.due_at = guard.idle_at
        self.is_idle = True
        self.is_within = self.has_head = self.is_refused = False
        self.size = self.head_size = self.body_size = self.unsent = 0
        self.rest, self.rest_at = b"", 0
        self.is_queued = self.has_ended = False
        self.running: RequestResponseCycle | None = None

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_evictable(self) -> bool:
        return self.is_idle and not self.rest and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.address = plain(self.client[0]) if self.client else ""
        if not self.guard.admit(self):
            self.is_idle, self.is_refused = False, True
            transport.write(self.guard.too_many)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.release(self)
        if (
            self.running is not None
        ):  # uvicorn tells the newest request only, and that one may still be in the queue
            self.running.disconnected = not self.running.response_complete
            self.running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        had_rest = self.rest_at < len(self.rest)
        self.rest, self.rest_at = (self.rest[self.rest_at :] + data, 0) if had_rest else (data, 0)
        if not had_rest:
            self.take_turn()
        elif len(self.rest) > REST_BYTES_MAX:
            self.transport.abort()

    def take_turn(self) -> None:
        """Parse until a request has ended, or for TURN_BYTES.

        If there is more, it has to wait until others had their turn.
        """
        self.is_queued = self.has_ended = False
        end = self.rest_at + TURN_BYTES
        while (
            self.rest_at < len(self.rest) and not self.transport.is_closing()
        ):  # ends: every pass parses something, or stops
            if self.pipeline or self.flow.write_paused:
                return self.flow.hold()  # `go_on` continues
            if self.has_ended or self.rest_at >= end:
                self.flow.hold()
                self.is_queued = True
                return self.guard.queue_turn(self)
            self._parse(self.rest[self.rest_at : self.rest_at + SLICE_BYTES])
        self.rest, self.rest_at = b"", 0
        return None if self.transport.is_closing() else self.flow.release()

    def _parse(self, piece: bytes) -> None:
        self.rest_at += len(piece)
        try:
            self.parser.feed_data(piece)
        except (
            HttpParserUpgrade
        ) as upgrade:  # an offer of HTTP/2, as Java's client makes it: answered in HTTP/1.1
            self.rest_at += upgrade.args[0] - len(piece)
        except HttpParserError as error:
            return self.refuse(self._problem_of(error))
        if self.is_within:
            self.size += len(piece)
            problem = self._too_large()
            if problem:
                return self.refuse(problem)
        return None

    def _problem_of(self, error: HttpParserError) -> Error:
        """A bug of ours is logged, but not as often as somebody sends the bytes that lead to it."""
        try:
            return problem_of(error)
        except Exception as bug:
            self.guard.throttled_log.warn("request failed", error=bug, address=self.address)
            return BUG

    def _too_large(self) -> Error | None:
        """What is too large though it has not ended.

        Slices may reach beyond the request, so this is the looser limit.
        """
        limits = self.guard.limits
        if not self.has_head and self.size > limits.head_bytes_max + SLICE_BYTES:
            return _head_too_large(limits)
        if self.has_head and self.size > FRAMING_MAX * limits.body_bytes_max + SLICE_BYTES:
            return _body_too_large(limits)
        return None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.is_idle, self.is_within, self.has_head = False, True, False
        self.size = self.body_size = 0
        if not self.is_answering:
            self.due_at = self.guard.stall_at

    def on_header(self, name: bytes, value: bytes) -> None:
        # a trailer: it came after the request was checked and perhaps answered, so it has no say
        if self.has_head:
            return
        if len(self.headers) >= HEADER_LINES_MAX:
            raise HeadTooLarge(
                f"Request header fields too large. At most {HEADER_LINES_MAX} header lines are accepted"
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        self.begin()
        self.has_head = True
        self.size = 0

    def begin(self) -> None:
        """The head of a request is there: the application answers it, when its turn comes."""
        super().on_headers_complete()

    def _check_head(self) -> None:
        limits, version = self.guard.limits, self.parser.get_http_version()
        size, hosts, length = len(self.url), 0, b""
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                length = value
        self.head_size = size
        if version not in ("1.0", "1.1"):
            raise WrongHttpVersion(
                f"HTTP version not supported. HTTP/{version} came; expected HTTP/1.1"
            )
        if size > limits.head_bytes_max:
            raise _head_too_large(limits)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise Invalid(f"Bad request. Expected one Host header, got {hosts}")
        if not self.url.startswith(b"/") and parse_url(self.url).path is None:
            raise Invalid("Bad request. The URL of the request has no path")
        if len(length) > LENGTH_DIGITS_MAX:
            raise Invalid(
                f"Bad request. Expected at most {LENGTH_DIGITS_MAX} digits as Content-Length, got {len(length)}"
            )
        if length and int(length) > limits.body_bytes_max:
            raise _body_too_large(limits)

    def on_body(self, body: bytes) -> None:
        self.body_size += len(body)
        if self.body_size > self.guard.limits.body_bytes_max:
            raise _body_too_large(self.guard.limits)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.end_request()

    def end_request(self) -> None:
        """The last byte of a request has been parsed."""
        self.is_within, self.has_ended = False, True
        self.settle()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self.settle()
        self.go_on()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent all it will send still gets its answer; whether to keep the
        connection for that.

        Not if it sent half a request, nor while it reads a stream, which has no end: then it has
        left.
        """
        is_stream = (
            self.running is not None
            and bool(self.running.chunked_encoding)
            and not self.running.response_complete
        )
        if (
            self.is_within
            or not self.is_answering
            or is_stream
            or not self.transport.can_write_eof()
        ):
            return False
        self.cycle.keep_alive = False
        return True

    def pause_writing(self) -> None:
        """The client does not take its answers: nothing more is parsed, and it has so long."""
        super().pause_writing()
        self.is_idle = False
        self.unsent = self.transport.get_write_buffer_size()
        self.due_at = self.guard.stall_at

    def resume_writing(self) -> None:
        super().resume_writing()
        self.settle()
        self.go_on()

    def settle(self) -> None:
        """Something has ended: say what may come next and until when."""
        if self.is_refused or self.flow.write_paused:
            return
        self.is_idle = not self.is_within and not self.is_answering
        if self.is_idle:
            self.due_at = self.guard.idle_at
        else:
            self.due_at = (
                self.guard.stall_at if self.is_within else math.inf
            )  # the application's time is its own
        if not self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()

    def go_on(self) -> None:
        """Parse what arrived while an earlier request was answered: perhaps the body that the
        application waits for.
        """
        if self.rest and not self.is_queued:
            self.take_turn()

    def time_out(self) -> None:
        """The time is up. A client that takes its answer slowly, but takes it, gets more."""
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self.unsent:
            self.unsent, self.due_at = unsent, self.guard.stall_at
        elif unsent or self.is_refused or self.transport.is_closing():
            self.transport.abort()
        elif self.rest:  # it has arrived; that it is not parsed yet is no fault of the client
            self.due_at = self.guard.stall_at
        elif self.is_within:
            self.refuse(
                TooSlow(
                    f"Request timeout. It took longer than {self.guard.limits.stall_seconds:g} s to arrive"
                )
            )
        else:
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def refuse(self, problem: Error) -> None:
        """Answer what cannot be served, and hang up; what is owed to earlier requests goes first."""
        is_own = self.is_within and self.has_head
        self.is_idle, self.is_refused = False, True
        self.rest, self.rest_at = b"", 0
        if (
            not self.transport.is_closing()
        ):  # read on and throw it away: a client that is still sending does not read why
            self.flow.resume_reading()
            self.flow.release()
        self.due_at = self.guard.stall_at
        if self.is_answering and not is_own:
            self.due_at = math.inf
            self.cycle.keep_alive = False  # the last of the earlier ones closes
            return
        if is_own:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.pipeline:
            return  # the sweep closes
        if not (is_own and self.cycle.response_started):
            self.transport.write(self.guard.response(problem, self.server_state.default_headers))
        if self.transport.can_write_eof():
            # not closed: that could destroy the answer while the client is still sending
            self.transport.write_eof()
        else:
            self.transport.close()  # TLS has no half-closed connections


def problem_of(error: HttpParserError) -> Error:
    """What stands behind a parser's error. A bug of ours that it met on the way is let out."""
    cause = error.__context__ if isinstance(error, HttpParserCallbackError) else error
    if isinstance(cause, Error):
        return cause
    if cause is None or isinstance(cause, HttpParserError):
        return Invalid(f"Bad request. This is not HTTP: {cause or error}")
    raise cause


def _head_too_large(limits: Limits) -> Error:
    return HeadTooLarge(
        f"Request header fields too large. At most {limits.head_bytes_max} bytes are accepted"
    )


def _body_too_large(limits: Limits) -> Error:
    return BodyTooLarge(f"Payload too large. At most {limits.body_bytes_max} bytes are accepted")
