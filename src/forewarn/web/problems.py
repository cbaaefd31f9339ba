"""Problem → HTTP status: the only table of statuses. And the two forms of an error's body.

A VM gets `{"error": message}`, an operator `{"error": code, "message": message, "facts": {…}}`.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from forewarn.errors import (
    EventEnded,
    Forbidden,
    ImpactFailed,
    Invalid,
    NotFound,
    Problem,
    Refused,
    Unavailable,
    UnknownEvent,
)

log = logging.getLogger("forewarn")


class WrongMethod(Problem):
    """The path is known, the verb is not; `allow` names those that are."""

    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message, allow=allow)
        self.allow = allow


class TooSlow(Problem):
    code = "request_timeout"


class ClientGone(Invalid):
    code = "client_gone"


class BodyTooLarge(Problem):
    code = "body_too_large"


class TooManyRequests(Problem):
    code = "too_many_requests"


class HeadTooLarge(Problem):
    code = "head_too_large"


class WrongHttpVersion(Problem):
    code = "http_version_not_supported"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


STATUS: Mapping[type[Problem], int] = MappingProxyType(
    {
        Problem: 500,
        Invalid: 400,
        Forbidden: 403,
        NotFound: 404,
        Refused: 409,
        ImpactFailed: 502,
        Unavailable: 503,
        WrongMethod: 405,
        TooSlow: 408,
        BodyTooLarge: 413,
        TooManyRequests: 429,
        HeadTooLarge: 431,
        WrongHttpVersion: 505,
    }
)
"""A class that is not named here has the status of its nearest ancestor."""

METADATA_STATUS: Mapping[type[Problem], int] = MappingProxyType({**STATUS, UnknownEvent: 400, EventEnded: 400})
"""To a VM an event that it cannot approve is a bad request, never a path that is not there (protocol 4)."""

BUG = Problem("something is wrong with the service itself; its log tells more")


def status_of(problem: type[Problem] | Problem, table: Mapping[type[Problem], int] = STATUS) -> int:
    kind = problem if isinstance(problem, type) else type(problem)
    return next(table[ancestor] for ancestor in kind.__mro__ if ancestor in table)


def metadata_body(problem: Problem) -> bytes:
    return msgspec.json.encode({"error": problem.message})


def control_body(problem: Problem) -> bytes:
    """Facts are told as they are where JSON can hold them, and as text where it cannot."""
    told = {"error": problem.code, "message": problem.message, "facts": problem.facts}
    return msgspec.json.encode(told, enc_hook=str)


def _answer_problem(_: Request[Any, Any, Any], problem: Problem) -> Response[bytes]:
    return Response(control_body(problem), status_code=status_of(problem), media_type=MediaType.JSON)


def _answer_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar refuses by itself: unknown paths, verbs, fields that do not fit."""
    if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _answer_bug(request, error)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    told = {"error": Invalid.code if code == "bad_request" else code, "message": _detail(request, error), "facts": {}}
    body = msgspec.json.encode(told)
    return Response(body, status_code=error.status_code, media_type=MediaType.JSON, headers=error.headers)


def _detail(request: Request[Any, Any, Any], error: HTTPException) -> str:
    """What came and what was expected. Litestar keeps which field is wrong, and why, in `extra`."""
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return f"there is nothing at {path}; /api/openapi.json tells what there is"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = {name.lower(): value for name, value in (error.headers or {}).items()}.get("allow", "another method")
        return f"{request.method} is not for {path}; expected {allowed}"
    wrong = [one for one in error.extra or () if isinstance(one, dict)]
    return "; ".join(_wrong(request, one) for one in wrong) or error.detail


def _wrong(request: Request[Any, Any, Any], wrong: dict[str, Any]) -> str:
    key, message = str(wrong.get("key", "body")), str(wrong.get("message", "does not fit"))
    value = request.query_params.get(key)
    return f"{key}: {message}" if value is None else f"{key}: {message.partition(', got ')[0]}, got {value!r}"


def _answer_bug(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("request failed", exc_info=error, extra={"facts": {"method": request.method, "path": request.url.path}})
    return Response(control_body(BUG), status_code=status_of(BUG), media_type=MediaType.JSON)


CONTROL_HANDLERS: ExceptionHandlersMap = {Problem: _answer_problem, HTTPException: _answer_http, Exception: _answer_bug}
"""How the control listener answers whatever is raised."""
