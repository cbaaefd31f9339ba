"""How the control listener responds to exceptions: an Error, one of Litestar's, or a bug.

The path is that of the scope. Litestar makes `request.url` from the Host header, which may be
anything.
"""

from http import HTTPStatus
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from forewarn.errors import Error, Invalid, NotFound
from forewarn.log import log
from forewarn.web.http_status import BUG, WrongMethod, control_body, headers_of, status_of


def _handle_error(request: Request[Any, Any, Any], error: Error) -> Response[bytes]:
    return Response(
        control_body(error, request.scope["path"]),
        status_code=status_of(error),
        media_type=MediaType.JSON,
        headers=headers_of(error),
    )


def _handle_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar rejects by itself: unknown paths, methods, parameters of a wrong type."""
    path = request.scope["path"]
    if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _handle_bug(request, error)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _handle_error(request, NotFound(f"no such path: {path}; see /api/openapi.json"))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = {name.lower(): value for name, value in (error.headers or {}).items()}["allow"]
        message = f"{path} does not accept {request.method}; expected {allow}"
        return _handle_error(request, WrongMethod(message, allow=allow))
    details = [detail for detail in error.extra or () if isinstance(detail, dict)]
    problems = [_describe(request, detail) for detail in details if "key" in detail]
    facts = {"field": problems[0][0]} if problems else {}
    message = "; ".join(f"{name}: {problem}" for name, problem in problems) or error.detail
    return _handle_error(request, Invalid(message, **facts))


def _handle_bug(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("request failed", exc_info=error, method=request.method, path=request.scope["path"])
    return _handle_error(request, BUG)


def _describe(request: Request[Any, Any, Any], detail: dict[str, Any]) -> tuple[str, str]:
    """The public name of a parameter, and what is wrong with it.

    Litestar reports the name in our code, and the type of the value instead of the value.
    """
    key, message = detail["key"], str(detail["message"])
    parameter = request.route_handler.parsed_fn_signature.parameters.get(key)
    name = getattr(parameter and parameter.kwarg_definition, "name", None) or key
    if name in request.query_params:
        message = f"{message.partition(', got ')[0]}, got {request.query_params[name]!r}"
    return name, message


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    Error: _handle_error,
    HTTPException: _handle_http,
    Exception: _handle_bug,
}
