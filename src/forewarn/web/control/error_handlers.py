"""How the control listener answers whatever is raised: a problem, what Litestar refuses by itself,
a bug.
"""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ExceptionHandlersMap

from forewarn.errors import Error, Invalid, Unauthorized
from forewarn.web.http_status import BUG, TooManyRequests, control_body, status_of

log = logging.getLogger("forewarn")

HEADERS: dict[type[Error], dict[str, str]] = {
    Unauthorized: {"WWW-Authenticate": 'Bearer realm="forewarn"'},
    TooManyRequests: {"Retry-After": "1"},
}


def _answer_problem(_: Request[Any, Any, Any], problem: Error) -> Response[bytes]:
    headers = HEADERS.get(type(problem), {})
    return Response(
        control_body(problem),
        status_code=status_of(problem),
        media_type=MediaType.JSON,
        headers=headers,
    )


def _answer_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar refuses by itself: unknown paths, verbs, fields that do not fit."""
    if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _answer_bug(request, error)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    fields = [_field(request, wrong) for wrong in _wrongs(error) if "key" in wrong]
    facts = {"field": fields[0]} if fields else {}
    told = {
        "error": Invalid.code if code == "bad_request" else code,
        "message": _detail(request, error),
        "facts": facts,
    }
    body = msgspec.json.encode(told)
    return Response(
        body, status_code=error.status_code, media_type=MediaType.JSON, headers=error.headers
    )


def _detail(request: Request[Any, Any, Any], error: HTTPException) -> str:
    """What came and what was expected. Litestar keeps which field is wrong, and why, in `extra`."""
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return f"there is nothing at {path}; /api/openapi.json tells what there is"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = {name.lower(): value for name, value in (error.headers or {}).items()}.get(
            "allow", "another method"
        )
        return f"{request.method} is not for {path}; expected {allowed}"
    return "; ".join(_wrong(request, one) for one in _wrongs(error)) or error.detail


def _wrongs(error: HTTPException) -> list[dict[str, Any]]:
    return [one for one in error.extra or () if isinstance(one, dict)]


def _wrong(request: Request[Any, Any, Any], wrong: dict[str, Any]) -> str:
    key, message = _field(request, wrong), str(wrong.get("message", "does not fit"))
    value = request.query_params.get(key)
    return (
        f"{key}: {message}"
        if value is None
        else f"{key}: {message.partition(', got ')[0]}, got {value!r}"
    )


def _field(request: Request[Any, Any, Any], wrong: dict[str, Any]) -> str:
    """As the caller knows it: Litestar tells the name that it has in our code."""
    key = str(wrong.get("key", "body"))
    handler = request.route_handler
    known = (
        handler.parsed_fn_signature.parameters.get(key)
        if isinstance(handler, HTTPRouteHandler)
        else None
    )
    return getattr(known and known.kwarg_definition, "name", None) or key


def _answer_bug(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error(
        "request failed",
        exc_info=error,
        extra={"facts": {"method": request.method, "path": request.url.path}},
    )
    return Response(control_body(BUG), status_code=status_of(BUG), media_type=MediaType.JSON)


CONTROL_HANDLERS: ExceptionHandlersMap = {
    Error: _answer_problem,
    HTTPException: _answer_http,
    Exception: _answer_bug,
}
