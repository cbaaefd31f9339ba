"""HTTP as bytes on a socket, so that what is on the wire can be judged: every answer bounded in
size and time.

The guest's client reads leniently, as a client must; this reader keeps what it was told and refuses
what is not HTTP.
"""

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from forewarn.conformance.check import Failed, fail
from forewarn.conformance.document import Entry, parse
from forewarn.conformance.spec import EVENTS
from forewarn.errors import Invalid

SECONDS_MAX = 10.0
"""How long an answer may take. Only the first one of all may take longer: see `stage.py`."""
HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 16 * 1024 * 1024
READ_BYTES = 64 * 1024
BODILESS = (204, 304)
_STATUS_LINE = re.compile(r"(HTTP/\d\.\d) (\d{3})(?: [^\r\n]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[^\r\n]*)?")


class Time(NamedTuple):
    """What may read the clock and wait: `now` in seconds that only grow."""

    now: Callable[[], float]
    sleep: Callable[[float], None]


class Endpoint(NamedTuple):
    """Where it is. `prefix` stands before every path."""

    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        split = urlsplit(url)
        try:
            port = split.port or 80
        except ValueError:
            port = 0
        if (
            split.scheme != "http"
            or not split.hostname
            or not port
            or "@" in split.netloc
            or split.fragment
        ):
            raise Invalid(
                f"the endpoint's URL is {url!r}; expected http://HOST[:PORT][/PREFIX]", url=url
            )
        path = split.path.rstrip("/")
        return cls(
            split.hostname, port, path[: -len(EVENTS)] if path.lower().endswith(EVENTS) else path
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 80 else f"{host}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """Header names are in lower case.

    `framing` says how the body's end was known: length, chunked, or end of the connection.
    """

    http: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    framing: str
    seconds: float = field(compare=False)

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known == name), None)

    def json(self) -> Any:
        try:
            return parse(self.body)
        except (ValueError, RecursionError):
            fail("a body that is JSON in UTF-8", self)

    def object(self) -> Entry:
        said = self.json()
        if not isinstance(said, Entry):
            fail("a JSON object", self)
        return said

    def told(self) -> str:
        return f"status {self.status} with the body {self.body!r}"


def encode(
    method: str, target: str, headers: Mapping[str, str], body: bytes = b"", *, http: str = "1.1"
) -> bytes:
    lines = [
        f"{method} {target} HTTP/{http}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if body and not {"content-length", "transfer-encoding"} & {name.lower() for name in headers}:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Line:
    """One connection. Whatever the endpoint does wrong on it is Failed."""

    def __init__(self, endpoint: Endpoint, time: Time) -> None:
        self._time = time
        self._buffer = bytearray()
        self._since = time.now()
        self.was_rate_limited = False
        try:
            self._socket = socket.create_connection((endpoint.host, endpoint.port), SECONDS_MAX)
        except OSError as error:
            raise Failed(
                f"expected to connect to {endpoint}; got {error.strerror or error}"
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Line":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def send(self, request: bytes) -> None:
        self._since = self._time.now()
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise Failed(
                f"expected the request to be taken; got {error.strerror or error}"
            ) from error

    def answer(self, *, has_body: bool = True, seconds: float = SECONDS_MAX) -> Answer:
        """The next answer, an interim one (100) included."""
        until = self._time.now() + seconds
        head = self._until(b"\r\n\r\n", HEAD_BYTES_MAX, until).decode("latin-1")
        status_line, *lines = head[: -len("\r\n\r\n")].split("\r\n")
        found = _STATUS_LINE.fullmatch(status_line)
        if found is None:
            fail("a status line such as 'HTTP/1.1 200 OK'", status_line)
        headers = tuple(_header(line) for line in lines)
        http, status = found[1], int(found[2])
        self.was_rate_limited = self.was_rate_limited or status == 429
        if not has_body or status < 200 or status in BODILESS:
            framing, body = "none", b""
        else:
            framing, body = self._body(dict(reversed(headers)), until)
        return Answer(http, status, headers, body, framing, self._time.now() - self._since)

    def rest(self, seconds: float = SECONDS_MAX) -> bytes:
        """All that comes until the endpoint closes; Failed if it does not."""
        until = self._time.now() + seconds
        while self._more(until):  # ends with the connection, with the time, or at too many bytes
            self._check_size(len(self._buffer))
        return self._take(len(self._buffer))

    def _body(self, headers: Mapping[str, str], until: float) -> tuple[str, bytes]:
        length = headers.get("content-length")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return "chunked", self._chunks(until)
        if length is None:
            return "end", self.rest(until - self._time.now())
        if not length.isdecimal():
            fail("a Content-Length that is a number", length)
        return "length", self._exactly(int(length), until)

    def _chunks(self, until: float) -> bytes:
        body = bytearray()
        while True:  # ends at the chunk of no bytes, with the time, or at too many bytes
            line = self._until(b"\r\n", HEAD_BYTES_MAX, until)
            found = _CHUNK.fullmatch(line[:-2])
            if found is None:
                fail("a chunk that begins with its size", line)
            size = int(found[1], 16)
            self._check_size(len(body) + size)
            body += self._exactly(size, until)
            if self._until(b"\r\n", HEAD_BYTES_MAX, until) != b"\r\n":
                fail("a chunk as long as it says", line)
            if not size:
                return bytes(body)

    def _until(self, end: bytes, bytes_max: int, until: float) -> bytes:
        while (
            at := self._buffer.find(end)
        ) < 0:  # ends where it is found, with the time, or at too many bytes
            if len(self._buffer) > bytes_max:
                fail(f"{end!r} within {bytes_max} bytes", bytes(self._buffer))
            if not self._more(until):
                fail("an HTTP answer", f"the end of the connection after {bytes(self._buffer)!r}")
        return self._take(at + len(end))

    def _exactly(self, size: int, until: float) -> bytes:
        self._check_size(size)
        while len(self._buffer) < size:  # ends with the body, with the connection, or with the time
            if not self._more(until):
                fail(
                    f"a body of {size} bytes",
                    f"the end of the connection after {len(self._buffer)}",
                )
        return self._take(size)

    def _more(self, until: float) -> bool:
        """Read once; False at the end of the connection."""
        left = until - self._time.now()
        try:
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            arrived = self._socket.recv(READ_BYTES)
        except TimeoutError as error:
            raise Failed(
                f"expected more from the endpoint in time; got silence after {bytes(self._buffer[:100])!r}"
            ) from error
        except OSError as error:
            raise Failed(f"expected an answer; got {error.strerror or error}") from error
        self._buffer += arrived
        return bool(arrived)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _check_size(self, size: int) -> None:
        if size > BODY_BYTES_MAX:
            fail(f"a body of at most {BODY_BYTES_MAX} bytes", f"{size} bytes or more")


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        fail("a header 'name: value'", line)
    return name.lower(), value.strip()
