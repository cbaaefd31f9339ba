"""Checks that a request to the control listener passes before its handler runs.

In this order: token, Host (DNS rebinding), Origin (cross-site requests), role, query parameters,
Content-Type, size and content of the body, Idempotency-Key. The first that fails raises an Error.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec
from litestar import Request, Response
from litestar.exceptions.http_exceptions import InternalServerException, RequestEntityTooLarge
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from litestar.routes import HTTPRoute
from litestar.status_codes import HTTP_204_NO_CONTENT

from forewarn.auth.tokens import Role
from forewarn.config import is_loopback
from forewarn.errors import Forbidden, Invalid
from forewarn.web.control.auth import LOCAL_OPERATOR, Authenticator
from forewarn.web.control.idempotency import HEADER, Idempotency
from forewarn.web.http_status import BodyTooLarge, ClientGone, WrongMediaType

PUBLIC = "is_public"
"""Marks a route that needs no token: health checks, and what is the same for everybody."""
ROLE = "role"
"""Marks a route that needs another role than its method: viewers may read, operators may change."""
SECRET = "is_secret"  # noqa: S105
"""Marks a route whose responses hold a secret: they are not stored under an Idempotency-Key."""
JSON_ONLY = ("application/json",)
READ_METHODS = ("GET", "HEAD", "OPTIONS")
VALUE_LENGTH_MAX = 60
_PATH_STEP = re.compile(r"\.(\w+)|\[([0-9]+)\]")

S = TypeVar("S", bound=msgspec.Struct)
Hook = Callable[[Request[Any, Any, Any]], Awaitable[Response[bytes] | None]]


def make_checks(authenticator: Authenticator, idempotency: Idempotency, host: str) -> Hook:
    """The hook that Litestar runs before each handler.

    `host` is the name or address the listener is bound to.
    """

    async def check(request: Request[Any, Any, Any]) -> Response[bytes] | None:
        handler = request.route_handler
        assert isinstance(handler, HTTPRouteHandler)
        is_public = handler.opt.get(PUBLIC, False)
        token = None if is_public else await authenticator.find_token(request)
        # A page that reached us by DNS rebinding cannot send a token.
        if token is None and authenticator.is_loopback:
            _check_host(request, host)
        _check_origin(request)
        principal = LOCAL_OPERATOR if is_public else authenticator.principal(token)
        principal.require(required_role(handler.opt, request.method))
        if request.method == "OPTIONS":
            headers = {"Allow": _allowed_methods(request)}
            return Response(b"", status_code=HTTP_204_NO_CONTENT, headers=headers)
        _check_query(request, handler)
        body = await _read_body(request, handler)
        if handler.parsed_data_field is not None:
            decode_strictly(body, handler.parsed_data_field.annotation)
        state = request.scope["state"]
        state["principal"] = principal
        if request.method == "POST" and HEADER in request.headers and not handler.opt.get(SECRET):
            reserved = await idempotency.begin(request, principal, body)
            if isinstance(reserved, Response):
                return reserved
            state["reservation"] = reserved
        return None

    return check


def required_role(opt: Mapping[str, Any], method: str) -> Role:
    role: Role | None = opt.get(ROLE)
    return role or (Role.VIEWER if method in READ_METHODS else Role.OPERATOR)


def _check_host(request: Request[Any, Any, Any], host: str) -> None:
    """A foreign name in Host is a sign of DNS rebinding."""
    value = request.headers.get("host")
    if value is None:
        return
    try:
        name = urlsplit(f"//{value}").hostname or ""
    except ValueError:
        name = ""
    if name != host and not is_loopback(name):
        raise Forbidden(f"Host is {value!r}; expected a loopback name or {host}", host=value)


def _check_origin(request: Request[Any, Any, Any]) -> None:
    """Pages of other sites may not change anything.

    Browsers send Origin or Sec-Fetch-Site. Very old ones omit both for forms; `_check_type`
    rejects those, because a form is never JSON or YAML.
    """
    if request.method in READ_METHODS:
        return
    origin = request.headers.get("origin")
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
    """Litestar's own response names only the methods of the handler registered last."""
    path = request.scope["path_template"]
    routes = (
        route
        for route in request.app.routes
        if isinstance(route, HTTPRoute) and route.path_format == path
    )
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _check_query(request: Request[Any, Any, Any], handler: HTTPRouteHandler) -> None:
    """Unknown and duplicate parameters are errors: a misspelt `dry_run` must not change a fleet."""
    known = sorted(
        field.kwarg_definition.name or name
        for name, field in handler.parsed_fn_signature.parameters.items()
        if isinstance(field.kwarg_definition, QueryParameter)
    )
    for name in request.query_params:
        if name not in known:
            raise Invalid(
                f"unknown query parameter {name!r}; accepted: {', '.join(known) or 'none'}",
                field=name,
            )
        if len(request.query_params.getall(name)) > 1:
            raise Invalid(f"duplicate query parameter {name!r}", field=name)


async def _read_body(request: Request[Any, Any, Any], handler: HTTPRouteHandler) -> bytes:
    _check_type(request, handler)
    try:
        body = await request.body()
    except RequestEntityTooLarge as error:
        size_max = handler.resolve_request_max_body_size()
        raise BodyTooLarge(
            f"the body is too large; at most {size_max} bytes are accepted", size_max=size_max
        ) from error
    except InternalServerException as error:
        raise ClientGone("the connection was closed before the end of the body") from error
    if body and request.method == "POST" and "content-type" not in request.headers:
        raise WrongMediaType("the body has no Content-Type; expected application/json")
    return body


def _check_type(request: Request[Any, Any, Any], handler: HTTPRouteHandler) -> None:
    """Only for POST: no page can send a PUT across sites without a preflight request."""
    value = request.headers.get("content-type")
    if request.method != "POST" or value is None:
        return
    accepted = ("application/json", "application/yaml") if reads_raw_body(handler) else JSON_ONLY
    if value.partition(";")[0].strip().lower() not in accepted:
        raise WrongMediaType(
            f"Content-Type is {value[:80]!r}; expected {' or '.join(accepted)}",
            content_type=value[:80],
        )


def reads_raw_body(handler: HTTPRouteHandler) -> bool:
    """Whether the handler parses the body by itself, as JSON or YAML."""
    return "body" in handler.parsed_fn_signature.parameters


def decode_strictly(body: bytes, type_: type[S]) -> S:
    """Decode a JSON body, or raise Invalid with the field and the value.

    Litestar decodes leniently: it takes "9" for 9, and 0 for a date in 1970.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=type_)
    except (msgspec.MsgspecError, RecursionError) as error:
        message, _, where = str(error).partition(" - at ")
        steps = [name or int(index) for name, index in _PATH_STEP.findall(where)]
        unknown = re.search(r"field `(.*)`", message)
        name = unknown[1] if unknown else ""
        removed = getattr(type_, "REMOVED", {}).get(name)
        choices = get_args(type_.__annotations__.get(str(steps[0]) if steps else ""))
        if removed is not None:
            message = f"{name} {removed}"
        elif "unknown field" in message:
            message += f"; expected {', '.join(type_.__struct_fields__) or 'none'}"
        elif "enum" in message:
            message += f"; expected one of {', '.join(choices)}"
        elif where:
            message = f"{message.partition(', got ')[0]}, got {_value_at(body, steps)}"
        path = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps)
        raise Invalid(f"body{path}: {message}", field=name or path.lstrip(".")) from error


def _value_at(body: bytes, steps: list[str | int]) -> str:
    """The rejected value as it was written."""
    try:
        value = msgspec.json.decode(body)
        for step in steps:
            value = value[step]
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError):
        return "malformed JSON"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= VALUE_LENGTH_MAX else f"{text[:VALUE_LENGTH_MAX]}…"
