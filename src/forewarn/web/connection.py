"""One connection and its limits: how large, how slow, how many. What HTTP itself refuses is answered here, by no application.

Uvicorn's protocol speaks the HTTP; these are the limits that it lacks. One sweep a second looks for connections whose time is
up, so a request costs no timer. Nothing here is logged: whoever can connect could fill the log.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from forewarn.errors import Invalid, Problem
from forewarn.web.callers import plain
from forewarn.web.page import CONTENT_TYPE, content_length, lines
from forewarn.web.problems import BodyTooLarge, HeadTooLarge, TooManyConnections, TooSlow, WrongHttpVersion, status_of

TICK_SECONDS = 1.0
SLICE_BYTES = 4096
"""What arrives is parsed in slices, so that a client that pipelines is held back after a few hundred requests, not thousands."""
REST_BYTES_MAX = 1 << 20
FRAMING_MAX = 8
"""How many times its own size a body may take with all its chunk sizes and trailers."""
CLOSE = (b"connection", b"close")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`stall_seconds`: how long a request may take to arrive whole, and an answer to be taken."""

    head_bytes_max: int = 64 * 1024
    body_bytes_max: int = 64 * 1024
    idle_seconds: float = 75.0
    stall_seconds: float = 10.0
    connections_per_address_max: int = 4096


class Timed(Protocol):
    """A connection to the sweep: when it is to be looked at, and what then."""

    due_at: float

    def time_out(self) -> None: ...


class Guard:
    """What all connections of a listener share. `idle_at` and `stall_at`: when one that begins now is to be looked at."""

    def __init__(self, limits: Limits, body_of: Callable[[Problem], bytes]) -> None:
        self.limits = limits
        self.body_of = body_of
        self.counts: dict[str, int] = {}
        self.connections_count = 0
        self.idle_at = self.stall_at = math.inf

    def connector(self, **given: Any) -> Callable[[], asyncio.Protocol]:
        """What makes the protocol of a new connection; `given` is what uvicorn gives to its own."""
        return partial(Connection, self, **given)

    def tick(self, state: ServerState, now: float) -> None:
        """Once a second, by the time of the event loop. A time is given until the next tick and then in full, never less."""
        self.idle_at = now + TICK_SECONDS + self.limits.idle_seconds
        self.stall_at = now + TICK_SECONDS + self.limits.stall_seconds
        connections = cast("set[Timed]", state.connections)
        for connection in [one for one in connections if one.due_at <= now]:
            connection.time_out()

    def admit(self, address: str) -> bool:
        """Count a connection in; whether there is room for it."""
        self.connections_count += 1
        self.counts[address] = count = self.counts.get(address, 0) + 1
        return count <= self.limits.connections_per_address_max

    def release(self, address: str) -> None:
        self.connections_count -= 1
        self.counts[address] -= 1
        if not self.counts[address]:
            del self.counts[address]


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, with limits.

    `is_idle`: nothing has begun to arrive, nothing is being answered, nothing waits to be written.
    `is_within`: a request has begun to arrive and not ended; `has_head`: its headers are there, and it has its own cycle.
    `rest`: what arrived and is not parsed yet, because what came before it must be answered first.
    """

    def __init__(self, guard: Guard, **given: Any) -> None:
        super().__init__(**given)
        self.guard = guard
        self.address = ""
        self.due_at = guard.idle_at
        self.is_idle = True
        self.is_within = self.has_head = self.is_refused = False
        self.size = self.body_size = self.unsent = 0
        self.rest = b""
        self.running: RequestResponseCycle | None = None

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = plain(self.client[0]) if self.client else ""
        if not self.guard.admit(self.address):
            self.is_idle, self.is_refused = False, True
            self._write(TooManyConnections("Too many connections from this address"))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.release(self.address)
        if self.running is not None:  # uvicorn tells the newest request only, and that one may still be in the queue
            self.running.disconnected = not self.running.response_complete
            self.running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        if self.rest:
            self._keep(self.rest + data)
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.transport.is_closing():  # ends: every turn parses something, or stops
            if self.pipeline or self.flow.write_paused:
                return self._keep(data[at:])
            piece = data[at : at + SLICE_BYTES]
            try:
                self.parser.feed_data(piece)
                at += len(piece)
            except HttpParserUpgrade as upgrade:  # an offer of HTTP/2, as Java's client makes it: answered in HTTP/1.1
                at += upgrade.args[0]
            except HttpParserError as error:
                return self.refuse(problem_of(error))
            if self.is_within:
                self.size += len(piece)
                problem = self._too_large()
                if problem:
                    return self.refuse(problem)
        return None

    def _keep(self, rest: bytes) -> None:
        """Parse it later, and read no more until then."""
        self.rest = rest
        self.flow.pause_reading()
        if len(rest) > REST_BYTES_MAX:
            self.transport.abort()

    def _too_large(self) -> Problem | None:
        """What is too large though it has not ended. Slices may reach beyond the request, so this is the looser limit."""
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
        size, hosts, length = len(self.url), 0, 0
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                length = int(value)
        if version not in ("1.0", "1.1"):
            raise WrongHttpVersion(f"HTTP version not supported. HTTP/{version} came; expected HTTP/1.1")
        if size > limits.head_bytes_max:
            raise _head_too_large(limits)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise Invalid(f"Bad request. Expected one Host header, got {hosts}")
        if length > limits.body_bytes_max:
            raise _body_too_large(limits)

    def on_body(self, body: bytes) -> None:
        self.body_size += len(body)
        if self.body_size > self.guard.limits.body_bytes_max:
            raise _body_too_large(self.guard.limits)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.is_within = False
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

    def pause_writing(self) -> None:
        """The client does not take its answers: nothing more is parsed, and it has so long."""
        super().pause_writing()
        self.is_idle = False
        self.unsent = self.transport.get_write_buffer_size()
        self.due_at = self.guard.stall_at

    def resume_writing(self) -> None:
        super().resume_writing()
        self.settle()

    def settle(self) -> None:
        """Something has ended: say what may come next and until when, and go on with what has arrived meanwhile."""
        if self.is_refused or self.flow.write_paused:
            return
        self.is_idle = not self.is_within and not self.is_answering
        if self.is_idle:
            self.due_at = self.guard.idle_at
        else:
            self.due_at = self.guard.stall_at if self.is_within else math.inf  # the application's time is its own
        if self.pipeline:
            return
        if self.rest:  # perhaps the body that the application waits for
            rest, self.rest = self.rest, b""
            self._parse(rest)
        if not self.rest and not self.transport.is_closing():
            self.flow.resume_reading()

    def time_out(self) -> None:
        """The time is up. A client that takes its answer slowly, but takes it, gets more."""
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self.unsent:
            self.unsent, self.due_at = unsent, self.guard.stall_at
        elif unsent or self.is_refused or self.transport.is_closing():
            self.transport.abort()
        elif self.is_within:
            self.refuse(TooSlow(f"Request timeout. It took longer than {self.guard.limits.stall_seconds:g} s to arrive"))
        else:
            self.transport.close()

    def refuse(self, problem: Problem) -> None:
        """Answer what cannot be served, and hang up; what is owed to earlier requests goes first."""
        is_own = self.is_within and self.has_head
        self.is_idle, self.is_refused = False, True
        self.rest = b""
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
            self._write(problem)
        if self.transport.can_write_eof():
            self.transport.write_eof()  # not closed: that could destroy the answer while the client is still sending
        else:
            self.transport.close()  # TLS has no half-closed connections

    def _write(self, problem: Problem) -> None:
        body = self.guard.body_of(problem)
        headers = (*self.server_state.default_headers, CONTENT_TYPE, content_length(body), CLOSE)
        self.transport.write(STATUS_LINE[status_of(problem)] + lines(headers) + b"\r\n" + body)


def problem_of(error: HttpParserError) -> Problem:
    """What stands behind a parser's error. A bug of ours that it met on the way is let out."""
    cause = error.__context__ if isinstance(error, HttpParserCallbackError) else error
    if isinstance(cause, Problem):
        return cause
    if cause is None or isinstance(cause, HttpParserError):
        return Invalid(f"Bad request. This is not HTTP: {cause or error}")
    raise cause


def _head_too_large(limits: Limits) -> Problem:
    return HeadTooLarge(f"Request header fields too large. At most {limits.head_bytes_max} bytes are accepted")


def _body_too_large(limits: Limits) -> Problem:
    return BodyTooLarge(f"Payload too large. At most {limits.body_bytes_max} bytes are accepted")
