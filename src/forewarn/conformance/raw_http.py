"""HTTP on a socket of our own, so that checks can send anything and see what is on the wire.

Responses are read by the client's `Reader`, with a deadline; any error in them is `Failed`.
`expect_document` does the same for an invalid document.
"""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from forewarn.client.errors import EndpointError
from forewarn.client.http1 import BODY_BYTES_MAX, READ_BYTES, Endpoint, Reader
from forewarn.conformance.check import Failed, expect, fail

TIMEOUT_SECONDS = 10.0
"""For a response. Only the very first one may take longer: see `session.py`."""


class SessionClock(NamedTuple):
    """A monotonic clock in seconds, and how to wait."""

    now: Callable[[], float]
    sleep: Callable[[float], None]


class JsonObject(dict[str, Any]):
    """Looking up a member that is missing fails the check."""

    def __missing__(self, name: str) -> Any:
        fail(f"a member {name!r}", dict(self))


@dataclass(frozen=True, repr=False)
class RawResponse:
    """`http` is the version in the status line. Header names are in lower case."""

    http: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    def __repr__(self) -> str:
        return f"status {self.status} with the body {self.body!r}"

    def header(self, name: str) -> str | None:
        return self.headers.get(name)

    @property
    def media_type(self) -> str:
        """The Content-Type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def json(self) -> Any:
        try:
            return parse_json(self.body)
        except (ValueError, RecursionError):
            fail("a body that is JSON in UTF-8", self)

    def object(self) -> JsonObject:
        value = self.json()
        if not isinstance(value, JsonObject):
            fail("a JSON object", self)
        return value


def parse_json(body: bytes) -> Any:
    """JSON in UTF-8, with each object as a JsonObject. ValueError if it is not valid."""
    return json.loads(body.decode(), object_hook=JsonObject, parse_constant=_reject_constant)


def _reject_constant(name: str) -> None:
    raise ValueError(name)


class RawConnection:
    """One connection, on which requests may be pipelined."""

    def __init__(self, endpoint: Endpoint, clock: SessionClock) -> None:
        self.was_rate_limited = False
        self._clock = clock
        self._unread = b""
        self._sent_at = clock.now()
        try:
            self._socket = socket.create_connection((endpoint.host, endpoint.port), TIMEOUT_SECONDS)
        except OSError as error:
            raise Failed(
                f"expected to connect to {endpoint}; got {error.strerror or error}"
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._sent_at = self._clock.now()
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Failed(
                f"expected the request to be accepted; got {error.strerror or error}"
            ) from error

    def receive(
        self, *, expects_body: bool = True, seconds: float = TIMEOUT_SECONDS
    ) -> RawResponse:
        """The next response, including an interim one (100)."""
        deadline = self._clock.now() + seconds
        reader = Reader(expects_body=expects_body, wants_interim=True)
        try:
            response = reader.feed(self._unread) if self._unread else None
            while response is None:
                response = reader.feed(self._receive(deadline))
        except EndpointError as error:
            raise Failed(f"expected an HTTP response; got {error.message}") from error
        self._unread = reader.unread
        has_bare_newline = b"\n" in response.head.replace(b"\r\n", b"")
        expect(not has_bare_newline, "lines of the head that end with CRLF", response.head)
        self.was_rate_limited = self.was_rate_limited or response.status == 429
        http = response.head.partition(b" ")[0].decode("latin-1")
        elapsed = self._clock.now() - self._sent_at
        return RawResponse(http, response.status, response.headers, response.body, elapsed)

    def receive_rest(self, seconds: float = TIMEOUT_SECONDS) -> bytes:
        """All bytes until the endpoint closes the connection; Failed if it does not."""
        deadline = self._clock.now() + seconds
        while received := self._receive(deadline):
            self._unread += received
            if len(self._unread) > BODY_BYTES_MAX:
                fail(f"at most {BODY_BYTES_MAX} bytes", f"{len(self._unread)} bytes or more")
        return self._unread

    def _receive(self, deadline: float) -> bytes:
        remaining = deadline - self._clock.now()
        try:
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            return self._socket.recv(READ_BYTES)
        except TimeoutError as error:
            raise Failed(
                f"expected a response or the end of the connection in time;"
                f" got nothing after {self._unread[:100]!r}"
            ) from error
        except OSError as error:
            raise Failed(f"expected a response; got {error.strerror or error}") from error


def expect_status(response: RawResponse, *statuses: int) -> None:
    expect(response.status in statuses, f"status {' or '.join(map(str, statuses))}", response)


def expect_rejected(response: RawResponse) -> None:
    expect(400 <= response.status < 500, "a 4xx status", response)


def expect_error(response: RawResponse, status: int) -> None:
    """This status, with a body `{"error": "…"}`."""
    expect_status(response, status)
    error = response.object()["error"]
    expect(isinstance(error, str) and error != "", "an error message", response)


@dataclass(frozen=True, repr=False)
class PolledDocument:
    response: RawResponse
    incarnation: int
    events: tuple[JsonObject, ...]

    def __repr__(self) -> str:
        return repr(self.response)

    def find(self, event_id: str) -> JsonObject | None:
        """In any case of letters: how an id is written is for another check."""
        wanted = event_id.upper()
        return next((e for e in self.events if str(e.get("EventId")).upper() == wanted), None)

    def event(self, event_id: str) -> JsonObject:
        event = self.find(event_id)
        expect(event is not None, f"the event {event_id}", self)
        return event or JsonObject()


def expect_document(response: RawResponse) -> PolledDocument:
    expect_status(response, 200)
    value = response.object()
    events, incarnation = value["Events"], value["DocumentIncarnation"]
    is_valid = isinstance(events, list) and isinstance(incarnation, int)
    is_valid = is_valid and all(isinstance(event, JsonObject) for event in events)
    expect(is_valid, "a document with a list of events", response)
    return PolledDocument(response, incarnation, tuple(events))
