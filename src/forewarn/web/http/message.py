"""Pieces of HTTP that listeners share: headers as bytes, client addresses, and bodies."""

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from forewarn.web.http_status import ClientGone

Header = tuple[bytes, bytes]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BLANK_LINE = b"\r\n\r\n"
_WAIT = re.compile(r'\s*wait\s*=\s*(?:"([0-9]{1,9})"|([0-9]{1,9}))\s*(?:;.*)?', re.IGNORECASE)
CLOSE: Header = (b"connection", b"close")
CONTENT_TYPE: Header = (b"content-type", b"application/json; charset=utf-8")


def content_length(body: bytes) -> Header:
    return b"content-length", b"%d" % len(body)


def encode_headers(headers: Iterable[Header]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def join_headers(headers: Iterable[Header]) -> dict[bytes, bytes]:
    """By name; the values of a repeated header are joined."""
    values = defaultdict[bytes, list[bytes]](list)
    for name, value in headers:
        values[name].append(value)
    return {name: b", ".join(repeated) for name, repeated in values.items()}


def preferred_seconds(prefer: str) -> int:
    """The wait of a Prefer header (RFC 7240), or 0. A malformed preference is ignored."""
    for preference in prefer.split(","):
        wait = _WAIT.fullmatch(preference)
        if wait:
            return int(wait[1] or wait[2])
    return 0


def plain_address(address: str) -> str:
    """The address as a fleet file writes it: IPv4-mapped IPv6 unwrapped, without a scope id."""
    if ":" not in address:
        return address
    return address.removeprefix("::ffff:") if "." in address else address.partition("%")[0]


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive) -> bytes:
    """The whole body. Its size is limited by the connection."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
    raise ClientGone("the client has disconnected before the end of the body")
