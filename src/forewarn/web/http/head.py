"""Checks of a request's head that the parser does not make.

The messages are part of the metadata protocol and never change (docs/protocol.md).
"""

import re
from collections.abc import Sequence

from httptools import parse_url

from forewarn.errors import Error, Invalid
from forewarn.web.http.admission import Limits
from forewarn.web.http.message import Header
from forewarn.web.http_status import BodyTooLarge, HeadTooLarge, WrongHttpVersion

HOST = re.compile(rb"(?:\[[^\]]*\]|[^:]*)(?::([0-9]{0,5}))?")
"""An address in brackets or a name, and perhaps a port."""
PORT_MAX = 65535
"""Libraries raise an exception for a larger port, as for one that is not a number."""


def check_head(url: bytes, headers: Sequence[Header], version: str, limits: Limits) -> int:
    """The Content-Length, or 0; raises an Error if the head is not acceptable."""
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    # The parser accepts at most 20 digits, but any number of leading zeros.
    length = int(dict(headers).get(b"content-length", b"").lstrip(b"0") or b"0")
    if version not in ("1.0", "1.1"):
        raise WrongHttpVersion(
            f"HTTP version not supported. HTTP/{version} came; expected HTTP/1.1"
        )
    if hosts > 1 or (not hosts and version == "1.1"):
        raise Invalid(f"Bad request. Expected one Host header, got {hosts}")
    if hosts and not _is_host(dict(headers)[b"host"]):
        raise Invalid(
            f"Bad request. Expected a host and a port of at most {PORT_MAX} in the Host header"
        )
    if not url.startswith(b"/") and parse_url(url).path is None:
        raise Invalid("Bad request. The URL of the request has no path")
    if length > limits.body_bytes_max:
        raise body_too_large(limits)
    return length


def _is_host(value: bytes) -> bool:
    match = HOST.fullmatch(value)
    return match is not None and int(match[1] or 0) <= PORT_MAX


def head_too_large(limits: Limits) -> Error:
    return HeadTooLarge(
        f"Request header fields too large. At most {limits.head_bytes_max} bytes are accepted"
    )


def body_too_large(limits: Limits) -> Error:
    return BodyTooLarge(f"Payload too large. At most {limits.body_bytes_max} bytes are accepted")
