"""One HTTP connection and its limits: sizes, times, and the order in which connections are parsed.

Uvicorn's protocol does the HTTP; this adds the limits that it lacks, and responds to what is not
valid HTTP. Deadlines are checked once a second, so a request costs no timer. Nothing that a client
sends is logged: it could fill the log.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Error
from forewarn.web.http.admission import Admission, Limits, TimedConnection
from forewarn.web.http.flow import Flow
from forewarn.web.http.head import body_too_large, check_head, head_too_large, translate
from forewarn.web.http.message import (
    CLOSE,
    CONTENT_TYPE,
    Header,
    content_length,
    encode_headers,
    plain_address,
)
from forewarn.web.http_status import (
    BUG,
    HeadTooLarge,
    TooManyConnections,
    TooSlow,
    status_of,
)

TICK_SECONDS = 1.0
SLICE_BYTES = 1024
"""Input is parsed in slices: the shortest poll has 72 bytes, so a slice holds at most 15."""
TURN_BYTES = 16 * SLICE_BYTES
"""Parsed before other connections get their turn, if no request ends within it."""
UNPARSED_BYTES_MAX = 1 << 20
HEADER_LINES_MAX = 100
FRAMING_FACTOR_MAX = 8
"""How many times its own size a body may take up with its chunk sizes and trailers."""


class ConnectionPolicy(Admission):
    """What all connections of a listener share.

    `idle_at` and `stall_at` are the deadlines of what begins now. Connections with more input than
    one turn wait in a queue: one turn per iteration of the event loop, for all connections
    together. However much clients pipeline, and on however many connections, the others are
    delayed by one turn only.
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
        self.idle_at = self.stall_at = math.inf
        self._turns: deque[Connection] = deque()

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        """A factory of connections; `arguments` are those of uvicorn's protocol."""
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

    def queue_turn(self, connection: "Connection") -> None:
        """Continue parsing this connection after the others in the queue."""
        self._turns.append(connection)
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._give_turn)

    def _give_turn(self) -> None:
        connection = self._turns.popleft()
        if self._turns:
            asyncio.get_running_loop().call_soon(self._give_turn)
        connection.parse_turn()

    def response(self, error: Error, default_headers: Iterable[Header]) -> bytes:
        """A whole response, after which the connection is closed."""
        body = self.body_of(error)
        headers = (*default_headers, CONTENT_TYPE, content_length(body), CLOSE)
        return STATUS_LINE[status_of(error)] + encode_headers(headers) + b"\r\n" + body


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, with limits.

    A request is received while earlier ones are processed (pipelining), so the state has two parts:

        receiving     is_receiving  has_head   deadline, if nothing is processed or unsent
        NOTHING       no            -          idle_at: closed
        HEAD          yes           no         stall_at: 408
        BODY          yes           yes        stall_at: 408

        NOTHING -> HEAD      on_message_begin
        HEAD -> BODY         on_headers_complete: the request has a cycle, and may be processed
        BODY -> NOTHING      on_message_complete

        sending       how it shows             deadline
        NOTHING       is_responding is False   that of receiving
        PROCESSING    is_responding is True    none: the application takes the time it needs
        STALLED       flow.write_paused        stall_at: aborted, unless the client has read some
        REJECTED      is_rejected              stall_at: aborted

        NOTHING -> PROCESSING    on_headers_complete
        PROCESSING -> NOTHING    on_response_complete
        any -> STALLED           pause_writing; back with resume_writing
        any -> REJECTED          reject: the end; input is read and thrown away

    `is_idle` is NOTHING in both. `unparsed`, from `parsed_to` on, is input that waits: for an
    earlier response, or in the policy's queue (`is_queued`). Meanwhile nothing is read.
    """

    flow: Flow

    def __init__(self, policy: ConnectionPolicy, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.policy = policy
        self.address = ""
        self.due_at = policy.idle_at
        self.is_idle = True
        self.is_receiving = self.has_head = self.is_rejected = False
        self.received_size = self.head_size = self.body_size = self.unsent_size = 0
        self.unparsed, self.parsed_to = b"", 0
        self.is_queued = self.has_request_ended = False
        self.running: RequestResponseCycle | None = None

    @property
    def is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_evictable(self) -> bool:
        return self.is_idle and not self.unparsed and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.address = plain_address(self.client[0]) if self.client else ""
        if not self.policy.admit(self):
            self.is_idle, self.is_rejected = False, True
            transport.write(self.policy.too_many)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.policy.release(self)
        # Uvicorn informs the newest request only, and that one may not be running yet.
        if self.running is not None:
            self.running.disconnected = not self.running.response_complete
            self.running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_rejected:
            return
        if self.parsed_to >= len(self.unparsed):
            self.unparsed, self.parsed_to = data, 0
            self.parse_turn()
            return
        self.unparsed, self.parsed_to = self.unparsed[self.parsed_to :] + data, 0
        if len(self.unparsed) > UNPARSED_BYTES_MAX:
            self.transport.abort()

    def parse_turn(self) -> None:
        """Parse until a request has ended, or TURN_BYTES; what is left waits for the next turn."""
        self.is_queued = self.has_request_ended = False
        end = self.parsed_to + TURN_BYTES
        while self.parsed_to < len(self.unparsed) and not self.transport.is_closing():
            if self.pipeline or self.flow.write_paused:
                return self.flow.hold()  # until `resume_parsing`
            if self.has_request_ended or self.parsed_to >= end:
                self.flow.hold()
                self.is_queued = True
                return self.policy.queue_turn(self)
            self._parse(self.unparsed[self.parsed_to : self.parsed_to + SLICE_BYTES])
        self.unparsed, self.parsed_to = b"", 0
        return None if self.transport.is_closing() else self.flow.release()

    def _parse(self, piece: bytes) -> None:
        self.parsed_to += len(piece)
        try:
            self.parser.feed_data(piece)
        except HttpParserUpgrade as upgrade:
            # Java's client offers HTTP/2 like this; we continue in HTTP/1.1.
            self.parsed_to += upgrade.args[0] - len(piece)
        except HttpParserError as error:
            return self.reject(self._translate(error))
        if self.is_receiving:
            self.received_size += len(piece)
            self._check_size()
        return None

    def _translate(self, error: HttpParserError) -> Error:
        """A bug is logged, but not as often as a client sends the bytes that trigger it."""
        try:
            return translate(error)
        except Exception as bug:
            self.policy.throttled_log.warn("request failed", error=bug, address=self.address)
            return BUG

    def _check_size(self) -> None:
        """The limits of a head or body that has not ended.

        A slice may reach beyond the request, so these are looser than those of `check_head`.
        """
        limits, size = self.policy.limits, self.received_size - SLICE_BYTES
        if not self.has_head and size > limits.head_bytes_max:
            self.reject(head_too_large(limits))
        elif self.has_head and size > FRAMING_FACTOR_MAX * limits.body_bytes_max:
            self.reject(body_too_large(limits))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.is_idle, self.is_receiving, self.has_head = False, True, False
        self.received_size = self.body_size = 0
        if not self.is_responding:
            self.due_at = self.policy.stall_at

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:
            return  # a trailer: the request was checked, and perhaps processed, without it
        if len(self.headers) >= HEADER_LINES_MAX:
            raise HeadTooLarge(
                "Request header fields too large."
                f" At most {HEADER_LINES_MAX} header lines are accepted"
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        self.head_size = check_head(self.url, self.headers, version, self.policy.limits)
        self.start_request()
        self.has_head = True
        self.received_size = 0

    def start_request(self) -> None:
        """The head has arrived: pass the request to the application, after the earlier ones."""
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.body_size += len(body)
        if self.body_size > self.policy.limits.body_bytes_max:
            raise body_too_large(self.policy.limits)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.end_request()

    def end_request(self) -> None:
        """The last byte of a request has been parsed."""
        self.is_receiving, self.has_request_ended = False, True
        self.update_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self.update_deadline()
        self.resume_parsing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: whether to keep the connection for its response.

        Not after half a request, and not for a stream: that has no end, so the client is gone.
        """
        running = self.running
        if running is not None and running.chunked_encoding and not running.response_complete:
            return False
        if self.is_receiving or not self.is_responding or not self.transport.can_write_eof():
            return False
        self.cycle.keep_alive = False
        return True

    def pause_writing(self) -> None:
        """The client does not read its responses: parse no more, and wait for a limited time."""
        super().pause_writing()
        self.is_idle = False
        self.unsent_size = self.transport.get_write_buffer_size()
        self.due_at = self.policy.stall_at

    def resume_writing(self) -> None:
        super().resume_writing()
        self.update_deadline()
        self.resume_parsing()

    def update_deadline(self) -> None:
        """After a change of the state: see the table above."""
        if self.is_rejected or self.flow.write_paused:
            return
        self.is_idle = not self.is_receiving and not self.is_responding
        if self.is_idle:
            self.due_at = self.policy.idle_at
        else:
            self.due_at = self.policy.stall_at if self.is_receiving else math.inf
        if not self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()

    def resume_parsing(self) -> None:
        """Parse input that waited: perhaps the body that the application waits for."""
        if self.unparsed and not self.is_queued:
            self.parse_turn()

    def time_out(self) -> None:
        unsent_size = self.transport.get_write_buffer_size()
        if 0 < unsent_size < self.unsent_size:  # the client reads slowly: extend the deadline
            self.unsent_size, self.due_at = unsent_size, self.policy.stall_at
        elif unsent_size or self.is_rejected or self.transport.is_closing():
            self.transport.abort()
        elif self.unparsed:  # the client has sent it; we have not parsed it yet
            self.due_at = self.policy.stall_at
        elif self.is_receiving:
            seconds = self.policy.limits.stall_seconds
            self.reject(TooSlow(f"Request timeout. It took longer than {seconds:g} s to arrive"))
        else:
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def reject(self, error: Error) -> None:
        """Send the error and close, after the responses to earlier requests."""
        has_cycle = self.is_receiving and self.has_head
        self.is_idle, self.is_rejected = False, True
        self.unparsed, self.parsed_to = b"", 0
        if not self.transport.is_closing():
            # Keep reading: a client that is still sending does not read the error.
            self.flow.resume_reading()
            self.flow.release()
        self.due_at = self.policy.stall_at
        if self.is_responding and not has_cycle:
            self.due_at = math.inf
            self.cycle.keep_alive = False  # the last earlier response closes the connection
            return
        if has_cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.pipeline:
            return  # `time_out` closes
        if not (has_cycle and self.cycle.response_started):
            self.transport.write(self.policy.response(error, self.server_state.default_headers))
        if self.transport.can_write_eof():
            # Not closed: a reset could destroy the response while the client is still sending.
            self.transport.write_eof()
        else:
            self.transport.close()  # TLS has no half-closed connections
