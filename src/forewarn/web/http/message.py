"""Pieces of HTTP that both listeners share: headers as bytes, and client addresses."""

from collections.abc import Iterable

Header = tuple[bytes, bytes]

BLANK_LINE = b"\r\n\r\n"
CLOSE: Header = (b"connection", b"close")
CONTENT_TYPE: Header = (b"content-type", b"application/json; charset=utf-8")


def content_length(body: bytes) -> Header:
    return b"content-length", b"%d" % len(body)


def encode_headers(headers: Iterable[Header]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def plain_address(address: str) -> str:
    """The address as a fleet file writes it: IPv4-mapped IPv6 unwrapped, without a scope id."""
    if ":" not in address:
        return address
    return address.removeprefix("::ffff:") if "." in address else address.partition("%")[0]
