"""Checks that a request to the control listener passes before its handler runs.

In this order: token or session, Host (DNS rebinding), Origin (cross-site requests), role, query
parameters, bytes per second of a host, size of the body, Content-Type, number of values and content
of the body. The first that fails raises an Error.

A route is marked by additional arguments of its decorator, which Litestar stores in `opt`:

    is_public    it needs no token: health checks, and what is the same for everybody
    role         the role it needs, if not that of its method: viewers read, operators change
    ignores_key  it ignores an Idempotency-Key: its responses hold a secret and must not be stored,
                 or it may be repeated without one
    errors       the errors it may raise, for the OpenAPI document; see `openapi.py`
    is_limited   the bytes of its bodies count, and a host that sends too many gets a 429
    is_azure     it is one of Azure's own API, and its errors have the form of Azure's
"""

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from litestar import Request
from litestar.exceptions.http_exceptions import InternalServerException, RequestEntityTooLarge
from litestar.handlers import HTTPRouteHandler
from litestar.middleware import ASGIMiddleware
from litestar.params import QueryParameter
from litestar.response.base import ASGIResponse
from litestar.status_codes import HTTP_204_NO_CONTENT
from litestar.types import ASGIApp, Receive, Scope, Send

from forewarn.auth.tokens import Role
from forewarn.config import is_loopback
from forewarn.errors import Forbidden, Invalid
from forewarn.fleetfile.yaml_source import FieldError, explain, format_path, split_message
from forewarn.web.control.auth import LOCAL_OPERATOR, Authenticator
from forewarn.web.control.body_rate import BYTES_PER_SECOND, BodyRate
from forewarn.web.http_status import (
    BodyTooLarge,
    ClientGone,
    TooManyRequests,
    WrongMediaType,
)

READ_METHODS = ("GET", "HEAD", "OPTIONS")
VALUES_MAX = 100_000
"""Of all objects and lists of a body together: it takes milliseconds to decode so many."""
EXPLAINED_BYTES_MAX = 16 * 1024
"""A larger body is not decoded again to explain what is wrong with it."""
EMPTY = (b"", b"{}")

S = TypeVar("S", bound=msgspec.Struct)


class Checks(ASGIMiddleware):
    """The middleware. `host` is the name or address the listener is bound to."""

    def __init__(self, authenticator: Authenticator, host: str) -> None:
        self._authenticator = authenticator
        self._host = host
        self._body_rate = BodyRate()

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        request: Request[Any, Any, Any] = Request(scope, receive, send)
        handler = request.route_handler
        assert isinstance(handler, HTTPRouteHandler)
        is_public = handler.opt.get("is_public", False)
        token = None if is_public else await self._authenticator.find_token(request)
        if token is not None and "connection" in scope:
            connection = scope["connection"]  # type: ignore[typeddict-item]
            connection.policy.trust(connection.address)
        # A page that reached us by DNS rebinding cannot send a token.
        if token is None and self._authenticator.is_loopback:
            _check_host(request, self._host)
        is_session = token is not None and "authorization" not in request.headers
        _check_origin(request, is_session=is_session)
        principal = LOCAL_OPERATOR if is_public else self._authenticator.principal(token)
        principal.require(required_role(handler, request.method))
        if request.method == "OPTIONS":
            headers = {"Allow": _allowed_methods(request)}
            next_app = ASGIResponse(status_code=HTTP_204_NO_CONTENT, headers=headers)
        _check_query(request, handler)
        if handler.opt.get("is_limited"):
            self._check_rate(request, handler, principal.host)
        await _check_body(request, handler)
        scope["state"]["principal"] = principal
        await next_app(scope, receive, send)

    def _check_rate(
        self, request: Request[Any, Any, Any], handler: HTTPRouteHandler, host: str
    ) -> None:
        """Refuse a body before it is read, if its host has sent too many bytes."""
        length = request.headers.get("content-length", "")
        size_max, now = handler.resolve_request_max_body_size(), asyncio.get_running_loop().time()
        assert size_max is not None
        if not self._body_rate.admits(host, length, size_max, now):
            raise TooManyRequests(
                f"too many bytes from {host}; at most {BYTES_PER_SECOND} per second are read"
            )


def required_role(handler: HTTPRouteHandler, method: str) -> Role:
    role: Role | None = handler.opt.get("role")
    return role or (Role.VIEWER if method in READ_METHODS else Role.OPERATOR)


def _check_host(request: Request[Any, Any, Any], host: str) -> None:
    """A foreign name in Host is a sign of DNS rebinding. One without a valid port is foreign too:
    Litestar cannot make a URL of it.
    """
    value = request.headers.get("host")
    if value is None:
        return
    try:
        parts = urlsplit(f"//{value}")
        name, _ = parts.hostname or "", parts.port
    except ValueError:
        name = ""
    if name != host and not is_loopback(name):
        raise Forbidden(f"Host is {value!r}; expected a loopback name or {host}", host=value)


def _check_origin(request: Request[Any, Any, Any], *, is_session: bool) -> None:
    """Pages of other sites may not change anything.

    Browsers send Origin or Sec-Fetch-Site. Very old ones omit both for forms; `_check_type`
    rejects those, because a form is never JSON or YAML. A browser sends the cookie of a session by
    itself, so there the Origin is required: pages cannot leave it out or choose it.
    """
    if request.method in READ_METHODS:
        return
    origin = request.headers.get("origin")
    if origin is None and is_session:
        raise Forbidden("Origin is missing; with a session cookie it must be this service's")
    if origin is not None and origin.rpartition("//")[2] != request.headers.get("host"):
        raise Forbidden(
            f"Origin is {origin!r}; requests from other sites are not accepted", origin=origin
        )
    site = request.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none"):
        raise Forbidden(
            f"Sec-Fetch-Site is {site!r}; requests from other sites are not accepted", site=site
        )


def _allowed_methods(request: Request[Any, Any, Any]) -> str:
    """Litestar's own response names only the methods of the handler registered first."""
    path = request.scope["path_template"]
    routes = (route for route in request.app.routes if route.path_format == path)
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def _check_query(request: Request[Any, Any, Any], handler: HTTPRouteHandler) -> None:
    """Unknown and duplicate parameters are errors: a misspelt `dry_run` must not change a fleet."""
    known = sorted(_query_parameters(handler))
    for name in request.query_params:
        if name not in known:
            raise Invalid(
                f"unknown query parameter {name!r}; accepted: {', '.join(known) or 'none'}",
                field=name,
            )
        if len(request.query_params.getall(name)) > 1:
            raise Invalid(f"duplicate query parameter {name!r}", field=name)


def _query_parameters(handler: HTTPRouteHandler) -> Iterator[str]:
    """The names of the handler's query parameters, and of those of its dependencies."""
    parameters = handler.parsed_fn_signature.parameters
    used = (one for name, one in handler.resolve_dependencies().items() if name in parameters)
    for signature in (handler.parsed_fn_signature, *(one.parsed_fn_signature for one in used)):
        for name, field in signature.parameters.items():
            if isinstance(field.kwarg_definition, QueryParameter):
                yield field.kwarg_definition.name or name


async def _check_body(request: Request[Any, Any, Any], handler: HTTPRouteHandler) -> None:
    try:
        body = await request.body()
    except RequestEntityTooLarge as error:
        size_max = handler.resolve_request_max_body_size()
        raise BodyTooLarge(
            f"the body is too large; at most {size_max} bytes are accepted", size_max=size_max
        ) from error
    except InternalServerException as error:
        raise ClientGone("the connection was closed before the end of the body") from error
    if request.method == "POST":
        _check_type(request, handler, body)
    if handler.parsed_data_field is not None:
        _check_values(body)
        data = decode_strictly(body, handler.parsed_data_field.annotation)
        request.scope["state"][CheckedRequest.KEY] = data
    elif request.method == "POST" and not reads_raw_body(handler) and body.strip() not in EMPTY:
        raise Invalid("body: expected none, or {}: the path says it all", field="")


def _check_type(request: Request[Any, Any, Any], handler: HTTPRouteHandler, body: bytes) -> None:
    """Only for POST: no page can send a PUT across sites without a preflight request."""
    value = request.headers.get("content-type", "")[:80]
    accepted = ["application/json", *["application/yaml"] * reads_raw_body(handler)]
    is_accepted = value.partition(";")[0].strip().lower() in accepted
    if not is_accepted and (body or "content-type" in request.headers):
        raise WrongMediaType(
            f"Content-Type is {value!r}; expected {' or '.join(accepted)}", content_type=value
        )


def reads_raw_body(handler: HTTPRouteHandler) -> bool:
    """Whether the handler parses the body by itself, as JSON or YAML."""
    return "body" in handler.parsed_fn_signature.parameters


def decode_strictly(body: bytes, type_: type[S]) -> S:
    """Decode a JSON body, or raise Invalid with the field and, if the body is small, the value."""
    body = body or b"{}"
    try:
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.ValidationError as error:
            message, path = split_message(error)
            if len(body) <= EXPLAINED_BYTES_MAX:
                values = msgspec.json.decode(body)
                path, message = explain(FieldError(path), values, msgspec.json.schema(type_))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"body: {error}", field="") from error
    where = format_path(("body", *path))
    raise Invalid(f"{where}: {message[0].lower()}{message[1:]}", field=format_path(path))


def _check_values(body: bytes) -> None:
    """Refuse a body that takes long to decode, before that: small values take longest."""
    count = len(body) - len(body.translate(None, b"[{,"))
    if count > VALUES_MAX:
        raise BodyTooLarge(
            f"the body has {count} values; at most {VALUES_MAX} are accepted",
            values_max=VALUES_MAX,
        )


class CheckedRequest(Request[Any, Any, Any]):
    """A request whose body `Checks` has decoded: it is not decoded again.

    Litestar decodes leniently: it takes "9" for 9, and 0 for a date in 1970.
    """

    KEY = "decoded_body"

    async def json(self) -> Any:
        return self.scope["state"][self.KEY]
