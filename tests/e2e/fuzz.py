"""Requests that are malformed in random ways, and clients that leave in the middle.

Everything is drawn from a `Random` with a seed, so a connection that was answered wrongly can be
sent again.
"""

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

RESPONSE_SECONDS_MAX = 0.05
"""Some requests are never complete, so there is no response to wait for."""

METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"HEAD",
    b"DELETE",
    b"OPTIONS",
    b"get",
    b"PRI",
    b"",
    b"\xff",
    b"G" * 300,
)
VERSIONS = (b"HTTP/1.1",) * 6 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1", b"http/1.1", b"", b"HTTP/9.9")
HOSTS = (b"127.0.0.1",) * 24 + (
    b"h",
    b"a:b",
    b"127.0.0.1:65536",
    b"a:99999999",
    b"a:1:b",
    b"[",
    b"[::1]:80",
    b"",
    b"\xff",
    b"a b",
    b"a" * 9000,
)
"""Mostly one that every listener accepts: another is refused before the application sees it."""
ENDS = (b"\r\n",) * 12 + (b"\n", b"\r", b"\r\r\n", b"\0\r\n")
HEADERS = (
    (b"Metadata", b"true"),
    (b"Content-Type", b"application/json"),
    (b"Expect", b"100-continue"),
    (b"Expect", b"200-ok"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Transfer-Encoding", b"gzip, chunked"),
    (b"Transfer-Encoding", b"\x0bchunked"),
    (b"Content-Length", b"5"),
    (b"Content-Length", b"-1"),
    (b"Content-Length", b"99999999999999999999"),
    (b"Content-Length", b"1e3"),
    (b"Connection", b"close"),
    (b"Connection", b"keep-alive, upgrade, host, te"),
    (b"Upgrade", b"h2c"),
    (b"Prefer", b"wait=1"),
    (b"Prefer", b"wait=99999999999999999999"),
    (b"If-None-Match", b'"' + b"x" * 200),
    (b"Origin", b"null"),
    (b"Cookie", b"forewarn=\xff; a=b;;="),
    (b"Authorization", b"Bearer fw_\xff_" + b"0" * 64),
    (b"X-Forwarded-For", b"10.0.0.1"),
    (b"X-Instance-Id", b"\xff\xfe"),
    (b"X-Forewarn-Host", b"h"),
    (b"X-Forewarn-Time", b"1e400"),
    (b"X-Instance-Id-Signature", b"zz"),
    (b"Idempotency-Key", b"\xff"),
    (b"Range", b"bytes=0-"),
    (b" folded", b"x"),
    (b"", b"x"),
    (b"A\0b", b"\0"),
)
BODIES = (
    b"",
    b"{}",
    b"hello",
    b'{"StartRequests": [{"EventId": "x"}]}',
    b"zz\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;x=y\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
    b"5\r\nhel",
    b"-5\r\nhello\r\n",
    b"fffffffffffffffff\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"{" * 3000,
    b"\xff" * 300,
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
)
PREFACES = (b"",) * 20 + (
    b"\r\n\r\n",
    b"\x16\x03\x01\x00\xa5",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n",
)
KNOWN = (
    b"GET /x HTTP/1.1\r\nHost: a:b\r\n\r\n",
    b"GET /api/v1/vms?limit=x HTTP/1.1\r\nHost: 127.0.0.1:65536\r\n\r\n",
    b"\r\n".join(
        (
            b"POST %b HTTP/1.1",
            b"Host: 127.0.0.1",
            b"Metadata: true",
            b"Content-Type: application/json",
            b"Transfer-Encoding: chunked",
            b"Expect: 100-continue",
            b"",
            b"zz",
            b"",
        )
    ),
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nMetadata: true\r\nContent-Length: 40\r\n\r\nhalf",
    b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nMetadata: true\r\n\r\n",
    b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nMetadata: true\r\nPrefer: wait=5\r\n\r\n",
    b"",
)
"""What has written a traceback before, and ordinary requests that are cut off."""


def known_requests(targets: Sequence[bytes]) -> list[bytes]:
    return [*dict.fromkeys(known.replace(b"%b", target) for known in KNOWN for target in targets)]


def draw_requests(random: Random, targets: Sequence[bytes]) -> list[bytes]:
    """The requests of one connection."""
    return [draw_request(random, targets) for _ in range(random.choice((1, 1, 1, 2, 4)))]


def draw_request(random: Random, targets: Sequence[bytes]) -> bytes:
    """One request, or something like it."""
    target = random.choice(targets)
    if random.random() < 0.25:
        return random.choice(KNOWN).replace(b"%b", target)
    line = b" ".join((random.choice(METHODS[:2] * 8 + METHODS), target, random.choice(VERSIONS)))
    host = [(b"Host", random.choice(HOSTS))] if random.random() < 0.9 else []
    headers = [*host, *random.choices(HEADERS, k=random.choice((0, 1, 2, 3, 5, 9)))]
    if random.random() < 0.02:
        headers += [(b"X", b"y")] * 150
    lines = [line, *(b"%b: %b" % header for header in headers)]
    head = b"".join(each + random.choice(ENDS) for each in lines) + random.choice(ENDS)
    request = random.choice(PREFACES) + head + random.choice(BODIES)
    if random.random() < 0.2:  # one byte is changed
        at = random.randrange(len(request))
        request = request[:at] + bytes([random.randrange(256)]) + request[at + 1 :]
    return request


def authorize(request: bytes, token: str) -> bytes:
    """The request with the token as its first header, if there is a token."""
    line, end, rest = request.partition(b"\n")
    header = b"Authorization: Bearer %b\r\n" % token.encode() if token else b""
    return line + end + header + rest


def send_whole(request: bytes, connect: Callable[[], socket.socket]) -> None:
    """Send a request in one piece and wait for the response."""
    with connect() as client, suppress(OSError):
        client.settimeout(RESPONSE_SECONDS_MAX)
        client.sendall(request)
        client.recv(65536)


def send_randomly(random: Random, sent: bytes, connect: Callable[[], socket.socket]) -> None:
    """Send it in random pieces, perhaps not all of it, and leave in a random way.

    It may read, half-close, close or reset, before or after a response.
    """
    left = sent[: random.randrange(len(sent) + 1)] if random.random() < 0.2 else sent
    with connect() as client, suppress(OSError):
        client.settimeout(RESPONSE_SECONDS_MAX)
        while left:
            size = random.choice((1, 10, 100, len(left)))
            client.sendall(left[:size])
            left = left[size:]
        if random.random() < 0.3:
            client.shutdown(socket.SHUT_WR)
        if random.random() < 0.6:
            client.recv(65536)
        if random.random() < 0.4:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
