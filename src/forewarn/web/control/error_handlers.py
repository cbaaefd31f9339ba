"""How the control listener responds to whatever is raised: an Error, Litestar's own, a bug."""

from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ExceptionHandlersMap

from forewarn.errors import Error, Invalid, Unauthorized
from forewarn.log import log
from forewarn.web.http_status import BUG, TooManyRequests, control_body, status_of

HEADERS: dict[type[Error], dict[str, str]] = {
    Unauthorized: {"WWW-Authenticate": 'Bearer realm="forewarn"'},
    TooManyRequests: {"Retry-After": "1"},
}


def _handle_error(_: Request[Any, Any, Any], error: Error) -> Response[bytes]:
    return Response(
        control_body(error),
        status_code=status_of(error),
        media_type=MediaType.JSON,
        headers=HEADERS.get(type(error), {}),
    )


def _handle_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar rejects by itself: unknown paths, methods, parameters of a wrong type."""
    if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _handle_bug(request, error)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    details = [detail for detail in error.extra or () if isinstance(detail, dict)]
    fields = [_field_name(request, detail) for detail in details if "key" in detail]
    body = {
        "error": Invalid.code if code == "bad_request" else code,
        "message": _message(request, error, details),
        "facts": {"field": fields[0]} if fields else {},
    }
    return Response(
        msgspec.json.encode(body),
        status_code=error.status_code,
        media_type=MediaType.JSON,
        headers=error.headers,
    )


def _handle_bug(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("request failed", exc_info=error, method=request.method, path=request.url.path)
    return Response(control_body(BUG), status_code=status_of(BUG), media_type=MediaType.JSON)


def _message(
    request: Request[Any, Any, Any], error: HTTPException, details: list[dict[str, Any]]
) -> str:
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return f"no such path: {path}; see /api/openapi.json"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        return f"{path} does not accept {request.method}; expected {headers.get('allow')}"
    return "; ".join(_detail(request, detail) for detail in details) or error.detail


def _detail(request: Request[Any, Any, Any], detail: dict[str, Any]) -> str:
    name, message = _field_name(request, detail), str(detail.get("message", "invalid value"))
    value = request.query_params.get(name)
    if value is None:
        return f"{name}: {message}"
    return f"{name}: {message.partition(', got ')[0]}, got {value!r}"


def _field_name(request: Request[Any, Any, Any], detail: dict[str, Any]) -> str:
    """The parameter's public name; Litestar reports its name in our code."""
    key = str(detail.get("key", "body"))
    handler = request.route_handler
    if not isinstance(handler, HTTPRouteHandler):
        return key
    parameter = handler.parsed_fn_signature.parameters.get(key)
    return getattr(parameter and parameter.kwarg_definition, "name", None) or key


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    Error: _handle_error,
    HTTPException: _handle_http,
    Exception: _handle_bug,
}
