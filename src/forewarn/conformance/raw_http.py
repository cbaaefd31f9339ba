"""HTTP on a socket of our own, so that checks can send anything and see what is on the wire.

Responses are read by the client's `Reader`, with a deadline; any error in them is `Failed`.
"""

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from forewarn.client.errors import EndpointError
from forewarn.client.http1 import BODY_BYTES_MAX, READ_BYTES, Endpoint, Reader
from forewarn.conformance import spec
from forewarn.conformance.check import Failed, expect, fail

TIMEOUT_SECONDS = 10.0
"""For a response. Only the very first one may take longer: see `session.py`."""
Headers = Mapping[str, str]
METADATA: Headers = {"Metadata": "true"}


class SessionClock(NamedTuple):
    """A monotonic clock in seconds, and how to wait."""

    now: Callable[[], float]
    sleep: Callable[[float], None]


class Request(NamedTuple):
    """By default a poll. `vm` is the VM to call as, if not the first of the session."""

    path: str = spec.EVENTS
    version: str | None = spec.NEWEST
    headers: Headers = METADATA
    query: str = ""
    vm: str = ""
    method: str = "GET"
    body: bytes = b""
    http: str = "1.1"


TREE = Request(spec.INSTANCE, spec.INSTANCE_VERSION)
VERSION_LIST = Request(spec.VERSIONS_PATH, None)


def instance_text(path: str, vm: str = "") -> Request:
    """A part of the instance tree as plain text, as shell scripts read it."""
    return TREE._replace(path=TREE.path + path, query=spec.TEXT, vm=vm)


def post(
    body: bytes, version: str | None = spec.NEWEST, headers: Headers = METADATA, vm: str = ""
) -> Request:
    headers = {**headers, "Content-Length": str(len(body))}
    return Request(version=version, headers=headers, vm=vm, method="POST", body=body)


def approval(*event_ids: str, **extra: object) -> bytes:
    """The body of a POST that approves these events."""
    requests = [{"EventId": event_id} for event_id in event_ids]
    return json.dumps({**extra, "StartRequests": requests}).encode()


class JsonObject(dict[str, Any]):
    """Looking up a member that is missing fails the check."""

    def __missing__(self, name: str) -> Any:
        fail(f"a member {name!r}", dict(self))


def is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


class RawResponse(NamedTuple):
    """`http` is the version in the status line. Header names are in lower case."""

    http: str
    status: int
    headers: Headers
    body: bytes
    seconds: float

    def __repr__(self) -> str:
        return f"status {self.status} with the body {self.body!r}"

    def header(self, name: str) -> str:
        """Empty if there is none."""
        return self.headers.get(name, "")

    def json(self) -> Any:
        """JSON in UTF-8, with each object as a JsonObject."""
        try:
            text = self.body.decode()
            return json.loads(text, object_hook=JsonObject, parse_constant=_reject_constant)
        except (ValueError, RecursionError):
            fail("a body that is JSON in UTF-8", self)

    def object(self) -> JsonObject:
        value = self.json()
        if not isinstance(value, JsonObject):
            fail("a JSON object", self)
        return value


def _reject_constant(name: str) -> None:
    raise ValueError(name)


class RateLimited(Failed):
    """Status 429."""


@contextmanager
def expecting(what: str) -> Iterator[None]:
    """An error of the operating system fails the check."""
    try:
        yield
    except OSError as error:
        reason = "nothing in time" if isinstance(error, TimeoutError) else error.strerror or error
        raise Failed(f"expected {what}; got {reason}") from error


class RawConnection:
    """One connection, on which requests may be pipelined."""

    def __init__(self, endpoint: Endpoint, clock: SessionClock) -> None:
        self._clock = clock
        self._unread = b""
        self._sent_at = clock.now()
        with expecting(f"to connect to {endpoint}"):
            self._socket = socket.create_connection((endpoint.host, endpoint.port), TIMEOUT_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._sent_at = self._clock.now()
        with expecting("the request to be accepted"):
            self._socket.sendall(data)

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
        if response.status == 429:
            raise RateLimited("expected a response in time; got status 429")
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
        with expecting("a response or the end of the connection"):
            remaining = deadline - self._clock.now()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            return self._socket.recv(READ_BYTES)
