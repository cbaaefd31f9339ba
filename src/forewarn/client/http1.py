"""HTTP/1.1 without I/O: an endpoint's URL, a request as bytes, bytes as a response.

Both clients and the conformance checks read through `Reader`. It is written by hand because
`http.client` limits the wait for each byte but not for the whole response, and loads TLS and
e-mail parsing, which costs a guest 5 MB. The reader rejects anything that could make part of a
response look like all of it. Nothing here reads the environment, so proxy variables have no
effect.
"""

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from forewarn.client.errors import ConnectionFailed, InvalidResponse, brief
from forewarn.errors import Invalid

READ_BYTES = 64 * 1024
LINE_BYTES_MAX = 8 * 1024
LINES_MAX = 100
BODY_BYTES_MAX = 1024 * 1024
INTERIM_MAX = 5
BODILESS = (204, 304)

_URL = re.compile(r"http://((?![?@#])[!-~])+", re.IGNORECASE)
"""ASCII without spaces, a login, a query or a fragment."""
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})( .*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;.*)?")

T = TypeVar("T")
Reading = Generator[None, bytes, T]
"""A part of `Reader`: it yields to get more bytes, and gets b"" at the end of the connection."""


class ConnectionClosed(ConnectionFailed):
    """The connection ended before the first byte of a response.

    This happens when the server closed an idle connection.
    """


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`prefix` comes before every path: a lab serves many VMs under `/as/{vm}`."""

    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        try:
            split = urlsplit(url)
            host = (split.hostname or "").encode("idna").decode()
            port = 80 if split.port is None else split.port
        except ValueError:
            host, port = "", 0
        if not host or not port or not _URL.fullmatch(url):
            raise Invalid(
                f"endpoint is {brief(url)}; expected a URL like http://169.254.169.254",
                endpoint=url,
            )
        return cls(host, port, split.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 80 else f"{host}:{self.port}"


def encode(
    method: str, target: str, headers: Mapping[str, str], body: bytes = b"", *, http: str = "1.1"
) -> bytes:
    """A request as it is given. A body gets a Content-Length, unless a header says how it ends."""
    lines = [f"{method} {target} HTTP/{http}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body and not {"content-length", "transfer-encoding"} & {name.lower() for name in headers}:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(frozen=True, slots=True)
class Response:
    """Header names are in lower case; the values of a repeated header are joined.

    After one that `is_last` the connection must be closed. `head` is the status line and
    the headers as they came.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_last: bool
    head: bytes = field(default=b"", compare=False, repr=False)


class Reader:
    """Reads one response: feed it bytes as they arrive, and b"" at the end of the connection.

    Without `expects_body` the response ends with its head (HEAD). With `wants_interim` a 1xx
    is returned instead of skipped.
    """

    def __init__(self, *, expects_body: bool = True, wants_interim: bool = False) -> None:
        self.has_begun = False
        self._expects_body = expects_body
        self._wants_interim = wants_interim
        self._buffer = bytearray()
        self._reading = self._read_response()
        next(self._reading)

    @property
    def unread(self) -> bytes:
        """What arrived after the end of the response."""
        return bytes(self._buffer)

    def feed(self, received: bytes) -> Response | None:
        if not (received or self.has_begun):
            raise ConnectionClosed("the endpoint closed the connection without a response")
        self.has_begun = True
        try:
            self._reading.send(received)
        except StopIteration as end:
            response: Response = end.value
            return response
        return None

    def _read_response(self) -> Reading[Response]:
        for _ in range(INTERIM_MAX + 1):
            head, minor, status, headers = yield from self._read_head()
            if status >= 200 or self._wants_interim:
                break
        else:
            raise InvalidResponse(f"status {status} came instead of a response")
        coding, length = headers.get("transfer-encoding", "").lower(), headers.get("content-length")
        ends_connection = minor == b"0" or "close" in headers.get("connection", "").lower()
        if status < 200 or status in BODILESS or not self._expects_body:
            body = b""
        elif coding:
            body = yield from self._read_chunks(coding)
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise InvalidResponse(f"Content-Length is {brief(length)}; expected a number")
            body = yield from self._read_exactly(int(length))
        else:
            ends_connection = True
            body = yield from self._read_to_end()
        # Unrequested bytes or two lengths: what follows may not be what it seems.
        is_ambiguous = bool(self._buffer) or bool(coding and length)
        return Response(status, headers, body, ends_connection or is_ambiguous, head)

    def _read_head(self) -> Reading[tuple[bytes, bytes, int, dict[str, str]]]:
        """The raw head, the minor version, the status and the headers."""
        first = yield from self._read_line()
        match = _STATUS_LINE.fullmatch(first.rstrip(b"\r\n"))
        if match is None:
            raise InvalidResponse(f"not an HTTP/1.1 response: it begins with {brief(first)}")
        lines = yield from self._read_lines()
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not name or name != name.strip():
                raise InvalidResponse(f"a header is {brief(line)}; expected a name and a value")
            known = headers.get(name.lower())
            headers[name.lower()] = value.strip() if known is None else f"{known}, {value.strip()}"
        return first + b"".join(lines), match[1], int(match[2]), headers

    def _read_lines(self) -> Reading[list[bytes]]:
        """Up to an empty line."""
        lines: list[bytes] = []
        while (line := (yield from self._read_line())).rstrip(b"\r\n"):
            lines.append(line)
            if len(lines) > LINES_MAX:
                raise InvalidResponse(f"the response has more than {LINES_MAX} headers")
        return lines

    def _read_line(self) -> Reading[bytes]:
        """With its line ending."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LINE_BYTES_MAX:
                raise InvalidResponse(
                    f"a line of the response has more than {LINE_BYTES_MAX} bytes"
                )
            yield from self._read_more("in its head")
        return self._take(end + 1)

    def _read_exactly(self, length: int) -> Reading[bytes]:
        _check_size(length)
        while len(self._buffer) < length:
            yield from self._read_more(f"after {len(self._buffer)} of {length} bytes")
        return self._take(length)

    def _read_chunks(self, coding: str) -> Reading[bytes]:
        if coding != "chunked":
            raise InvalidResponse(f"Transfer-Encoding is {brief(coding)}; expected chunked")
        body = bytearray()
        while True:  # until the empty chunk
            line = yield from self._read_line()
            match = _CHUNK.fullmatch(line.rstrip(b"\r\n"))
            if match is None:
                raise InvalidResponse(f"a chunk begins with {brief(line)}; expected its size")
            size = int(match[1], 16)
            _check_size(len(body) + size)
            if not size:
                yield from self._read_lines()
                return bytes(body)
            body += yield from self._read_exactly(size)
            if (yield from self._read_line()).rstrip(b"\r\n"):
                raise InvalidResponse("a chunk is longer than its size")

    def _read_to_end(self) -> Reading[bytes]:
        _check_size(len(self._buffer))
        while received := (yield):
            self._buffer += received
            _check_size(len(self._buffer))
        return self._take(len(self._buffer))

    def _read_more(self, where: str) -> Reading[None]:
        received = yield
        if not received:
            raise InvalidResponse(f"the response was cut off {where}")
        self._buffer += received

    def _take(self, length: int) -> bytes:
        taken = bytes(self._buffer[:length])
        del self._buffer[:length]
        return taken


def _check_size(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise InvalidResponse(
            f"the response has {size} bytes or more; the limit is {BODY_BYTES_MAX}"
        )
