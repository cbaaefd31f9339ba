"""Error -> HTTP status, the only such table, and the forms of an error's body.

A VM gets `{"error": message}`, an operator `{"error": code, "message": message, "facts": {…}}`, and
a client of Azure's API what Azure Resource Manager sends, `{"error": {"code": …, "message": …}}`.
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from forewarn.errors import (
    Error,
    EventEnded,
    FleetChanged,
    Forbidden,
    ImpactFailed,
    Invalid,
    NotFound,
    Refused,
    Unauthorized,
    Unavailable,
    UnknownEvent,
)


class WrongMethod(Error, code="method_not_allowed"):
    """The path does not accept the method; `allow` lists those it accepts."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message, allow=allow)
        self.allow = allow


class TooSlow(Error, code="request_timeout"):
    """The request took too long to arrive."""


class ClientGone(Invalid, code="client_gone"):
    """The client disconnected before the end of its request."""


class BodyTooLarge(Error, code="body_too_large"):
    """The body has more bytes than are accepted."""


class WrongMediaType(Error, code="unsupported_media_type"):
    """The body is not of an accepted media type."""


class KeyReused(Error, code="idempotency_key_reused"):
    """The Idempotency-Key was used for another request."""


class TooManyRequests(Error, code="too_many_requests"):
    """More requests per second than are accepted."""


class HeadTooLarge(Error, code="head_too_large"):
    """The head has more bytes or lines than are accepted."""


class WrongHttpVersion(Error, code="http_version_not_supported"):
    """Not HTTP/1.0 or HTTP/1.1."""


class TooManyConnections(Unavailable, code="too_many_connections"):
    """A connection limit is reached."""


STATUS: Mapping[type[Error], int] = MappingProxyType(
    {
        Error: 500,
        Invalid: 400,
        Unauthorized: 401,
        Forbidden: 403,
        NotFound: 404,
        Refused: 409,
        ImpactFailed: 502,
        Unavailable: 503,
        WrongMethod: 405,
        TooSlow: 408,
        FleetChanged: 412,
        BodyTooLarge: 413,
        WrongMediaType: 415,
        KeyReused: 422,
        TooManyRequests: 429,
        HeadTooLarge: 431,
        WrongHttpVersion: 505,
    }
)
"""A class that is not listed has the status of its nearest ancestor."""

METADATA_STATUS: Mapping[type[Error], int] = MappingProxyType(
    {**STATUS, UnknownEvent: 400, EventEnded: 400}
)
"""For a VM, an event that it cannot approve is a bad request, not a missing path (protocol 4)."""

BUG = Error("internal error; see the log of the service")
UNAVAILABLE = Unavailable("Service unavailable. Try again later")


def status_of(error: type[Error] | Error, table: Mapping[type[Error], int] = STATUS) -> int:
    kind = error if isinstance(error, type) else type(error)
    return next(table[ancestor] for ancestor in kind.__mro__ if ancestor in table)


def headers_of(error: Error) -> dict[str, str]:
    """What a client needs to know before its next request."""
    if isinstance(error, WrongMethod):
        return {"Allow": error.allow}
    if isinstance(error, Unavailable | TooManyRequests):
        return {"Retry-After": "1"}
    return (
        {"WWW-Authenticate": 'Bearer realm="forewarn"'} if isinstance(error, Unauthorized) else {}
    )


def metadata_body(error: Error) -> bytes:
    """Internal errors may name files and commands, so a VM gets a general message instead."""
    is_internal = status_of(error, METADATA_STATUS) >= 500
    if is_internal and not isinstance(error, TooManyConnections | WrongHttpVersion):
        error = UNAVAILABLE if isinstance(error, Unavailable) else BUG
    return msgspec.json.encode({"error": error.message})


def is_azure(path: str) -> bool:
    """Whether a path is one of Azure's own API."""
    return path.lower().startswith("/subscriptions/")


def control_body(error: Error, path: str = "") -> bytes:
    """The body of an error at this path. Facts that JSON cannot hold are written as text."""
    if is_azure(path):
        return msgspec.json.encode({"error": {"code": error.code, "message": error.message}})
    body = {"error": error.code, "message": error.message, "facts": error.facts}
    return msgspec.json.encode(body, enc_hook=str)
