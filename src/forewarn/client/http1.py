"""HTTP/1.1 as a guest needs it: where to ask, a question as bytes, bytes as an answer. Pure: both
clients read through here.

Written by hand, because `http.client` bounds each byte's wait but not the whole answer's, and
brings TLS and mail parsing into memory, neither of which the protocol knows. Strict where leniency
could take half an answer for a whole one. Nothing here reads the environment, so no proxy variable
has a say.
"""

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
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

_URL = re.compile(r"http://[!-~]+", re.IGNORECASE)
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})( .*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;.*)?")

T = TypeVar("T")
Reading = Generator[None, bytes, T]
"""A part of reading: it yields for more bytes, and b"" tells it that there are none."""


class HungUp(ConnectionFailed):
    """The connection ended before the first byte of an answer, as one does that the server had
    closed while it was idle.
    """


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask. `prefix` comes before every path: a lab serves many VMs under `/as/{vm}`."""

    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        try:
            split = urlsplit(url)
            host, port = (split.hostname or "").encode("idna").decode(), split.port or 80
        except ValueError:
            host = ""
        if (
            not host
            or not _URL.fullmatch(url)
            or "@" in split.netloc
            or split.query
            or split.fragment
        ):
            raise Invalid(
                f"endpoint is {brief(url)}; expected a URL like http://169.254.169.254",
                endpoint=url,
            )
        return cls(host, port, split.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 80 else f"{host}:{self.port}"


def encode(
    endpoint: Endpoint, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> bytes:
    lines = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {endpoint}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


@dataclass(frozen=True, slots=True)
class Answer:
    """Header names are in lower case; the values of a repeated one are joined.

    After the last one the connection is of no use.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_last: bool


class Reader:
    """Give it bytes as they arrive, and b"" at the end of the connection, until it gives back the
    answer.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._buffer = bytearray()
        self._reading = self._answer()
        next(self._reading)

    def feed(self, arrived: bytes) -> Answer | None:
        if not (arrived or self.has_begun):
            raise HungUp("the endpoint closed the connection without an answer")
        self.has_begun = True
        try:
            self._reading.send(arrived)
        except StopIteration as end:
            answer: Answer = end.value
            return answer
        return None

    def _answer(self) -> Reading[Answer]:
        minor, status, headers = yield from self._head()
        for _ in range(INTERIM_MAX):
            if status >= 200:
                break
            minor, status, headers = yield from self._head()
        if status < 200:
            raise InvalidResponse(f"status {status} came instead of an answer")
        coding, length = headers.get("transfer-encoding", "").lower(), headers.get("content-length")
        is_open_ended = False
        if status in BODILESS:
            body = b""
        elif coding:
            body = yield from self._chunked(coding)
        elif length is not None:
            body = yield from self._exactly(_length(length))
        else:
            is_open_ended = True
            body = yield from self._rest()
        is_closing = minor == b"0" or "close" in headers.get("connection", "").lower()
        is_odd = bool(self._buffer) or bool(
            coding and length
        )  # more than was asked for, or two lengths
        return Answer(status, headers, body, is_closing or is_open_ended or is_odd)

    def _head(self) -> Reading[tuple[bytes, int, dict[str, str]]]:
        line = yield from self._line()
        found = _STATUS_LINE.fullmatch(line)
        if found is None:
            raise InvalidResponse(f"the answer is no HTTP/1.1: it begins with {brief(line)}")
        headers: dict[str, str] = {}
        for line in (yield from self._lines()):
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not name or name != name.strip():
                raise InvalidResponse(f"a header is {brief(line)}; expected a name and a value")
            known = headers.get(name.lower())
            headers[name.lower()] = value.strip() if known is None else f"{known}, {value.strip()}"
        return found[1], int(found[2]), headers

    def _lines(self) -> Reading[list[bytes]]:
        """Up to an empty line."""
        lines: list[bytes] = []
        while line := (yield from self._line()):  # ends at the empty line, or at too many
            lines.append(line)
            if len(lines) > LINES_MAX:
                raise InvalidResponse(f"the answer has more than {LINES_MAX} headers")
        return lines

    def _line(self) -> Reading[bytes]:
        while (
            end := self._buffer.find(b"\n")
        ) < 0:  # ends with the line, or where it grows too long
            if len(self._buffer) > LINE_BYTES_MAX:
                raise InvalidResponse(f"a line of the answer has more than {LINE_BYTES_MAX} bytes")
            yield from self._more("in its head")
        return self._take(end + 1).rstrip(b"\r\n")

    def _exactly(self, length: int) -> Reading[bytes]:
        _check_size(length)
        while len(self._buffer) < length:  # ends with the body, or with the connection
            yield from self._more(f"after {len(self._buffer)} of {length} bytes")
        return self._take(length)

    def _chunked(self, coding: str) -> Reading[bytes]:
        if coding != "chunked":
            raise InvalidResponse(f"Transfer-Encoding is {brief(coding)}; expected chunked")
        body = bytearray()
        while True:  # ends at the chunk of no bytes, or where the body grows too large
            line = yield from self._line()
            found = _CHUNK.fullmatch(line)
            if found is None:
                raise InvalidResponse(f"a chunk begins with {brief(line)}; expected its size")
            size = int(found[1], 16)
            _check_size(len(body) + size)
            if not size:
                yield from self._lines()
                return bytes(body)
            body += yield from self._exactly(size)
            if (yield from self._line()):
                raise InvalidResponse("a chunk is longer than it says")

    def _rest(self) -> Reading[bytes]:
        while arrived := (yield):  # ends with the connection, or where the body grows too large
            self._buffer += arrived
            _check_size(len(self._buffer))
        return self._take(len(self._buffer))

    def _more(self, where: str) -> Reading[None]:
        arrived = yield
        if not arrived:
            raise InvalidResponse(f"the answer was cut off {where}")
        self._buffer += arrived

    def _take(self, length: int) -> bytes:
        taken = bytes(self._buffer[:length])
        del self._buffer[:length]
        return taken


def _length(text: str) -> int:
    if not _LENGTH.fullmatch(text):
        raise InvalidResponse(f"Content-Length is {brief(text)}; expected a number")
    return int(text)


def _check_size(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise InvalidResponse(
            f"the answer has {size} bytes or more; at most {BODY_BYTES_MAX} are read"
        )
