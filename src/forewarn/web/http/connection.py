"""One HTTP connection and its limits: sizes, times, and its states.

Uvicorn's protocol does the HTTP; this adds the limits that it lacks, and responds to what is not
valid HTTP. Deadlines are checked once a second, so a request costs no timer. Nothing that a client
sends is logged: it could fill the log.
"""

import asyncio
import math
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Error, Invalid
from forewarn.web.http.admission import Admission, Limits, TimedConnection
from forewarn.web.http.compatibility import UvicornProtocol
from forewarn.web.http.head import body_too_large, check_head, head_too_large
from forewarn.web.http.message import (
    BLANK_LINE,
    CLOSE,
    CONTENT_TYPE,
    Header,
    content_length,
    encode_headers,
    plain_address,
)
from forewarn.web.http.parse_queue import ParseQueue
from forewarn.web.http_status import BUG, HeadTooLarge, TooManyConnections, TooSlow, status_of

TICK_SECONDS = 1.0
TURN_BYTES = 16 * 1024
"""Parsed before other connections get their turn, if no request ends within it."""
PIECE_BYTES_MIN = 512
"""A piece takes at least this much of a turn: a client can make pieces of a few bytes."""
UNPARSED_BYTES_MAX = 1 << 20
HEADER_LINES_MAX = 100
FRAMING_FACTOR_MAX = 8
"""How many times its own size a body may take up with its chunk sizes and trailers."""


class ConnectionPolicy(Admission):
    """What all connections of a listener share.

    `idle_at` and `stall_at` are the deadlines of what begins now. `can_replace`: a connection may
    pass its transport on to another (not with every uvicorn). Connections with more input than one
    turn wait in `parse_queue`.
    """

    def __init__(
        self,
        limits: Limits,
        body_of: Callable[[Error], bytes],
        throttled_log: ThrottledLog | None = None,
    ) -> None:
        super().__init__(limits, throttled_log)
        self.body_of = body_of
        self.too_many = b""
        self.can_replace = True
        self.idle_at = self.stall_at = math.inf
        self.parse_queue = ParseQueue()

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        """A factory of connections; `arguments` are for uvicorn's protocol."""
        return partial(Connection, self, **arguments)

    def tick(self, state: ServerState, now: float) -> None:
        """Set the deadlines of the next second, and close what is overdue.

        A deadline is never too early: it counts from the next tick.
        """
        self.idle_at = now + TICK_SECONDS + self.limits.idle_seconds
        self.stall_at = now + TICK_SECONDS + self.limits.stall_seconds
        self.too_many = self.response(
            TooManyConnections("Too many connections. Try again later"), state.default_headers
        )
        connections = cast("set[TimedConnection]", state.connections)
        for connection in [each for each in connections if each.due_at <= now]:
            connection.time_out()

    def response(self, error: Error, default_headers: Iterable[Header]) -> bytes:
        """A whole response, after which the connection is closed."""
        body = self.body_of(error)
        headers = (*default_headers, CONTENT_TYPE, content_length(body), CLOSE)
        return STATUS_LINE[status_of(error)] + encode_headers(headers) + b"\r\n" + body


class ConnectionState(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    RESPONDING = auto()
    REJECTED = auto()


class Connection(UvicornProtocol):
    """Uvicorn's connection, with limits.

        state         what happens                               deadline
        IDLE          between two requests                       idle_at: closed
        HEAD          a head is arriving                         stall_at: 408
        BODY          a body is arriving; the application may    that of its head: 408
                      be reading it, and may have responded
        RESPONDING    the request has arrived                    none: the application takes the
                                                                 time it needs
        REJECTED      the end; input is thrown away              stall_at: aborted

        IDLE -> HEAD          on_message_begin
        HEAD -> BODY          on_headers_complete
        BODY -> RESPONDING    on_message_complete; -> IDLE if the response is complete already
        RESPONDING -> IDLE    on_response_complete
        any -> REJECTED       reject

    A client that does not read its responses (`flow.write_paused`) has until stall_at in every
    state, and longer only if it has read some.

    Input is parsed in pieces in which at most one request ends, at the end of the piece. What
    follows a request stays in `unparsed` until its response is complete, and until its turn comes
    in the policy's queue. Meanwhile nothing is read.
    """

    def __init__(self, policy: ConnectionPolicy, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.policy = policy
        self.address = ""
        self.state = ConnectionState.IDLE
        self.due_at = policy.idle_at
        self.unparsed = bytearray()
        self.unsent_size = 0
        self.part_size = 0
        """Bytes of the head, or of the body with its chunk sizes and trailers, so far."""
        self.body_size = self.body_length = 0
        """Of the body, without them: so far, and as in Content-Length."""
        self.is_upgrade_body = False
        self.has_ended = False
        """The client sends no more."""

    @property
    def is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        is_waiting = self.unparsed or self.flow.write_paused
        return self.state is ConnectionState.IDLE and not is_waiting

    @property
    def is_evictable(self) -> bool:
        return self.is_idle and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Never raises: the event loop would log it, and would not close the socket."""
        try:
            super().connection_made(transport)
            self.address = self.identify()
            is_admitted = self.policy.admit(self)
        except Exception as error:
            self.policy.throttled_log.warn("connection failed", error=error)
            transport.abort()
            return
        if not is_admitted:
            self.enter(ConnectionState.REJECTED)
            transport.write(self.policy.too_many)
            transport.close()

    def identify(self) -> str:
        """The client whose connections are counted together."""
        return plain_address(self.client[0]) if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self.policy.release(self)
        super().connection_lost(exc)

    def enter(self, state: ConnectionState) -> None:
        """See the table above."""
        self.state = state
        if state is ConnectionState.IDLE:
            self.due_at = self.policy.idle_at
        elif state is ConnectionState.RESPONDING:
            self.due_at = math.inf
        else:
            self.due_at = self.policy.stall_at
        if self.flow.write_paused:
            self.due_at = self.policy.stall_at

    def data_received(self, data: bytes) -> None:
        if self.state is ConnectionState.REJECTED:
            return
        is_waiting = bool(self.unparsed)
        self.unparsed += data
        if len(self.unparsed) > UNPARSED_BYTES_MAX:
            self.transport.abort()
        elif is_waiting:
            self.flow.pause_reading()  # the application has resumed it, to wait for a disconnect
        else:
            self.parse_turn()

    def parse_turn(self) -> None:
        """Parse until a request has ended, or TURN_BYTES; what is left waits for the next turn."""
        if not self.transport.is_closing():
            self.flow.resume_reading()
        left = TURN_BYTES
        while self.unparsed and not self.transport.is_closing():
            if self.state is ConnectionState.RESPONDING or self.flow.write_paused:
                return self.flow.pause_reading()  # until `_continue`
            if left <= 0:
                self.flow.pause_reading()
                return self.policy.parse_queue.add(self)
            left -= max(self._parse_piece(), PIECE_BYTES_MIN)
            if self.state is ConnectionState.IDLE:
                left = 0
        return self._continue()

    def _continue(self) -> None:
        """Parse what waited, or close if the client sends no more and has all its responses."""
        if self.transport.is_closing():
            self.unparsed.clear()
        elif self.unparsed:
            self.policy.parse_queue.add(self)
        elif self.has_ended and self.state is not ConnectionState.RESPONDING:
            self.transport.close()

    def _parse_piece(self) -> int:
        piece = self._next_piece()
        del self.unparsed[: len(piece)]
        self.part_size += len(piece)
        try:
            self._check_size()
            if self.is_upgrade_body:
                self._take_upgrade_body(piece)
            else:
                self.parser.feed_data(piece)
        except HttpParserUpgrade:
            pass  # Java's client offers HTTP/2 like this; we continue in HTTP/1.1
        except HttpParserError as error:
            self.reject(self._explain(error))
        except Error as error:
            self.reject(error)
        return len(piece)

    def _take_upgrade_body(self, piece: bytes) -> None:
        """The parser ends a request that offers an upgrade at its head; read its body here."""
        self.on_body(piece)
        if self.body_size == self.body_length:
            self.is_upgrade_body = False
            self.on_message_complete()

    def _next_piece(self) -> bytes:
        """A request ends after its Content-Length, or with a blank line and nowhere else.

        A blank line that was cut in two is continued by a piece of line ends only.
        """
        piece = bytes(self.unparsed[:TURN_BYTES])
        if self.state is ConnectionState.BODY and self.body_size < self.body_length:
            return piece[: self.body_length - self.body_size]
        if piece[0] in b"\r\n":
            return piece[: len(piece) - len(piece.lstrip(b"\r\n"))]
        lines, blank_line, _ = piece.partition(BLANK_LINE)
        return lines + blank_line

    def _check_size(self) -> None:
        limits = self.policy.limits
        if self.state is not ConnectionState.BODY:
            if self.part_size > limits.head_bytes_max:
                raise head_too_large(limits)
        elif self.part_size > FRAMING_FACTOR_MAX * limits.body_bytes_max:
            raise body_too_large(limits)

    def _explain(self, error: HttpParserError) -> Error:
        """What a callback raised, or that it is not HTTP.

        A bug is logged, but not as often as a client sends the bytes that trigger it.
        """
        cause = error.__context__ if isinstance(error, HttpParserCallbackError) else error
        if isinstance(cause, Error):
            return cause
        if cause is None or isinstance(cause, HttpParserError):
            return Invalid(f"Bad request. This is not HTTP: {cause or error}")
        self.policy.throttled_log.warn("request failed", error=cause, address=self.address)
        return BUG

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.enter(ConnectionState.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.state is ConnectionState.BODY:
            return  # a trailer: the request was checked, and perhaps processed, without it
        if len(self.headers) >= HEADER_LINES_MAX:
            raise HeadTooLarge(
                "Request header fields too large."
                f" At most {HEADER_LINES_MAX} header lines are accepted"
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        self.body_length = check_head(self.url, self.headers, version, self.policy.limits)
        self.start_request()
        self.state = ConnectionState.BODY
        self.part_size = self.body_size = 0

    def start_request(self) -> None:
        """The head has arrived: pass the request to the application."""
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.body_size += len(body)
        if self.body_size > self.policy.limits.body_bytes_max:
            raise body_too_large(self.policy.limits)
        if self.is_responding:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self.body_size < self.body_length:
            self.is_upgrade_body = True
            return
        self.part_size = 0
        if self.is_responding:
            super().on_message_complete()
            self.enter(ConnectionState.RESPONDING)
        else:
            self.enter(ConnectionState.IDLE)

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            return
        self.flow.resume_reading()  # of a body that the application did not read
        if self.state is ConnectionState.RESPONDING:
            self.enter(ConnectionState.IDLE)
            self._continue()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: whether to keep the connection for its responses.

        Not after half a request. A client of a stream, which has no end, or of a long poll is gone.
        """
        is_stream = self.is_responding and self.cycle.chunked_encoding
        is_gone = is_stream or any(name == b"prefer" for name, _ in self.headers or ())
        is_pending = self.unparsed or self.state is ConnectionState.RESPONDING
        self.has_ended = bool(is_pending) and not is_gone and self.transport.can_write_eof()
        return self.has_ended

    def pause_writing(self) -> None:
        """The client does not read its responses: parse no more, and wait for a limited time."""
        super().pause_writing()
        self.unsent_size = self.transport.get_write_buffer_size()
        self.enter(self.state)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.enter(self.state)
        self._continue()

    def time_out(self) -> None:
        unsent_size = self.transport.get_write_buffer_size()
        if 0 < unsent_size < self.unsent_size:  # the client reads slowly: extend the deadline
            self.unsent_size, self.due_at = unsent_size, self.policy.stall_at
        elif unsent_size or self.state is ConnectionState.REJECTED or self.transport.is_closing():
            self.transport.abort()
        elif self.unparsed:  # the client has sent it; we have not parsed it yet
            self.due_at = self.policy.stall_at
        elif self.state is ConnectionState.IDLE:
            self.transport.close()
        else:
            seconds = self.policy.limits.stall_seconds
            self.reject(TooSlow(f"Request timeout. It took longer than {seconds:g} s to arrive"))

    def abort(self) -> None:
        self.transport.abort()

    def reject(self, error: Error) -> None:
        """Send the error, unless a response has begun, and close."""
        cycle = self.cycle if self.state is ConnectionState.BODY else None
        self.enter(ConnectionState.REJECTED)
        self.unparsed.clear()
        self.flow.resume_reading()  # a client that is still sending does not read the error
        if cycle is not None:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # uvicorn would write after the end
            cycle.message_event.set()
        if cycle is None or not cycle.response_started:
            self.transport.write(self.policy.response(error, self.server_state.default_headers))
        if self.transport.can_write_eof():
            # Not closed: a reset could destroy the response while the client is still sending.
            self.transport.write_eof()
        else:
            self.transport.close()  # TLS has no half-closed connections
