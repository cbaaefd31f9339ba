"""Problem → HTTP status: the only table of statuses. And the two forms of an error's body.

A VM gets `{"error": message}`, an operator `{"error": code, "message": message, "facts": {…}}`.
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


class WrongMethod(Error):
    """The path is known, the verb is not; `allow` names those that are."""

    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message, allow=allow)
        self.allow = allow


class TooSlow(Error):
    code = "request_timeout"


class ClientGone(Invalid):
    code = "client_gone"


class BodyTooLarge(Error):
    code = "body_too_large"


class WrongMediaType(Error):
    code = "unsupported_media_type"


class KeyReused(Error):
    code = "idempotency_key_reused"


class TooManyRequests(Error):
    code = "too_many_requests"


class HeadTooLarge(Error):
    code = "head_too_large"


class WrongHttpVersion(Error):
    code = "http_version_not_supported"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


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
"""A class that is not named here has the status of its nearest ancestor."""

METADATA_STATUS: Mapping[type[Error], int] = MappingProxyType(
    {**STATUS, UnknownEvent: 400, EventEnded: 400}
)
"""To a VM an event that it cannot approve is a bad request, never a path that is not there
(protocol 4).
"""

BUG = Error("something is wrong with the service itself; its log tells more")
UNAVAILABLE = Unavailable("Service unavailable. Try again later")


def status_of(problem: type[Error] | Error, table: Mapping[type[Error], int] = STATUS) -> int:
    kind = problem if isinstance(problem, type) else type(problem)
    return next(table[ancestor] for ancestor in kind.__mro__ if ancestor in table)


def metadata_body(problem: Error) -> bytes:
    """What failed inside the service may name its files and commands: a VM gets a plain sentence,
    and the log the message.
    """
    is_inside = status_of(problem, METADATA_STATUS) >= 500 and not isinstance(
        problem, TooManyConnections | WrongHttpVersion
    )
    if is_inside:
        problem = UNAVAILABLE if isinstance(problem, Unavailable) else BUG
    return msgspec.json.encode({"error": problem.message})


def control_body(problem: Error) -> bytes:
    """Facts are told as they are where JSON can hold them, and as text where it cannot."""
    told = {"error": problem.code, "message": problem.message, "facts": problem.facts}
    return msgspec.json.encode(told, enc_hook=str)
