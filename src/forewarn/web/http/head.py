"""Checks of a request's head, and the errors of requests that are not valid HTTP.

The messages are part of the metadata protocol and never change (docs/protocol.md).
"""

from collections.abc import Iterable

from httptools import HttpParserCallbackError, HttpParserError, parse_url

from forewarn.errors import Error, Invalid
from forewarn.web.http.admission import Limits
from forewarn.web.http.message import Header
from forewarn.web.http_status import BodyTooLarge, HeadTooLarge, WrongHttpVersion

LENGTH_DIGITS_MAX = 20


def check_head(url: bytes, headers: Iterable[Header], version: str, limits: Limits) -> int:
    """The size of the head in bytes; raises an Error if it is not acceptable."""
    size, hosts, length = len(url), 0, b""
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = value
    if version not in ("1.0", "1.1"):
        raise WrongHttpVersion(
            f"HTTP version not supported. HTTP/{version} came; expected HTTP/1.1"
        )
    if size > limits.head_bytes_max:
        raise head_too_large(limits)
    if hosts > 1 or (not hosts and version == "1.1"):
        raise Invalid(f"Bad request. Expected one Host header, got {hosts}")
    if not url.startswith(b"/") and parse_url(url).path is None:
        raise Invalid("Bad request. The URL of the request has no path")
    if len(length) > LENGTH_DIGITS_MAX:
        raise Invalid(
            f"Bad request. Expected at most {LENGTH_DIGITS_MAX} digits as Content-Length,"
            f" got {len(length)}"
        )
    if length and int(length) > limits.body_bytes_max:
        raise body_too_large(limits)
    return size


def translate(error: HttpParserError) -> Error:
    """The Error behind a parser's error. A bug that a callback raised is raised again."""
    cause = error.__context__ if isinstance(error, HttpParserCallbackError) else error
    if isinstance(cause, Error):
        return cause
    if cause is None or isinstance(cause, HttpParserError):
        return Invalid(f"Bad request. This is not HTTP: {cause or error}")
    raise cause


def head_too_large(limits: Limits) -> Error:
    return HeadTooLarge(
        f"Request header fields too large. At most {limits.head_bytes_max} bytes are accepted"
    )


def body_too_large(limits: Limits) -> Error:
    return BodyTooLarge(f"Payload too large. At most {limits.body_bytes_max} bytes are accepted")
