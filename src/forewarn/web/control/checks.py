"""What a request to the control listener must pass: its caller may ask it, no other page sent it,
it says nothing unknown.
"""

import re
from collections.abc import Awaitable, Callable, Iterator
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
from forewarn.web.control.auth import OPERATOR, Authenticator
from forewarn.web.control.idempotency import HEADER, Answers
from forewarn.web.http_status import BodyTooLarge, ClientGone, WrongMediaType

OPEN = "is_open"
"""The mark of a route that asks for no token: health, and what is the same for everybody."""
ROLE = "role"
"""The mark of a route that needs another role than its verb does: a viewer may look, an operator
may do.
"""
UNKEPT = "is_unkept"
"""The mark of a route whose answers hold a secret, and so are never kept: an Idempotency-Key means
nothing there.
"""
READS = ("GET", "HEAD", "OPTIONS")
OURS = ("same-origin", "none")
SHOWN_MAX = 60
_STEP = re.compile(r"\.(\w+)|\[([0-9]+)\]")

S = TypeVar("S", bound=msgspec.Struct)
Hook = Callable[[Request[Any, Any, Any]], Awaitable[Response[bytes] | None]]


def door(porter: Authenticator, answers: Answers, host: str) -> Hook:
    """A hook that lets a request pass or raises the Problem that says why not.

    `host` is the name the listener is bound to.
    """

    async def admit(request: Request[Any, Any, Any]) -> Response[bytes] | None:
        handler = request.route_handler
        assert isinstance(handler, HTTPRouteHandler)
        is_open = handler.opt.get(OPEN, False)
        token = None if is_open else await porter.token(request)
        if token is None and porter.is_loopback:
            _refuse_host(request, host)
        _refuse_other_sites(request)
        caller = OPERATOR if is_open else porter.caller(token)
        caller.must_be(
            handler.opt.get(ROLE) or (Role.VIEWER if request.method in READS else Role.OPERATOR)
        )
        if request.method == "OPTIONS":
            return Response(
                b"", status_code=HTTP_204_NO_CONTENT, headers={"Allow": _allowed(request)}
            )
        _refuse_query(request, frozenset(_query_names(handler)))
        body = await _body(request, handler)
        if handler.parsed_data_field is not None:
            read_strictly(body, handler.parsed_data_field.annotation)
        state = request.scope["state"]
        state["caller"] = caller
        if request.method == "POST" and HEADER in request.headers and not handler.opt.get(UNKEPT):
            begun = await answers.begin(request, caller, body)
            if isinstance(begun, Response):
                return begun
            state["slot"] = begun
        return None

    return admit


def _refuse_host(request: Request[Any, Any, Any], host: str) -> None:
    """A name that is not ours may be a rebound one (DNS rebinding).

    Whoever shows a token is no page that was lured here.
    """
    asked = request.headers.get("host")
    if asked is not None and (name := _name_in(asked)) != host and not is_loopback(name):
        raise Forbidden(f"Host is {asked!r}; expected a loopback name or {host}", host=asked)


def _refuse_other_sites(request: Request[Any, Any, Any]) -> None:
    """Another site's page may not change anything. A browser tells whose page it is, but for forms
    in very old ones.

    Those are refused by their type: what a page can send elsewhere without asking first is never
    JSON or YAML. A type that is absent means no form; and what scripts send across sites has an
    Origin.
    """
    if request.method in READS:
        return
    asked, origin = request.headers.get("host"), request.headers.get("origin")
    if origin is not None and origin.rpartition("//")[2] != asked:
        raise Forbidden(
            f"Origin is {origin!r}; a page of another site may not change anything", origin=origin
        )
    site = request.headers.get("sec-fetch-site", "none")
    if site not in OURS:
        raise Forbidden(
            f"Sec-Fetch-Site is {site!r}; a page of another site may not change anything", site=site
        )


def _name_in(asked: str) -> str:
    try:
        return urlsplit(f"//{asked}").hostname or ""
    except ValueError:
        return ""


def _allowed(request: Request[Any, Any, Any]) -> str:
    """Litestar's own answer names only the verbs of the handler that was registered last."""
    path = request.scope["path_template"]
    routes = (
        route
        for route in request.app.routes
        if isinstance(route, HTTPRoute) and route.path_format == path
    )
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _query_names(handler: HTTPRouteHandler) -> Iterator[str]:
    for name, field in handler.parsed_fn_signature.parameters.items():
        if isinstance(field.kwarg_definition, QueryParameter):
            yield field.kwarg_definition.name or name


def _refuse_query(request: Request[Any, Any, Any], known: frozenset[str]) -> None:
    """A misspelt `dry_run` must not change a fleet, and of two that differ nobody knows which is
    meant.
    """
    for name in request.query_params:
        if name not in known:
            raise Invalid(
                f"unknown query parameter {name!r}; known here: {', '.join(sorted(known)) or 'none'}",
                field=name,
            )
        if len(request.query_params.getall(name)) > 1:
            raise Invalid(f"query parameter {name!r} stands twice; expected it once", field=name)


async def _body(request: Request[Any, Any, Any], handler: HTTPRouteHandler) -> bytes:
    is_raw = "body" in handler.parsed_fn_signature.parameters  # the handler reads it by itself
    _refuse_type(
        request, ("application/json", "application/yaml") if is_raw else ("application/json",)
    )
    try:
        body = await request.body()
    except RequestEntityTooLarge as error:
        most = handler.resolve_request_max_body_size()
        raise BodyTooLarge(
            f"the body is larger than the {most} bytes accepted here", size_max=most
        ) from error
    except InternalServerException as error:  # the client left before the end of its body
        raise ClientGone("the connection ended before the body did") from error
    if body and request.method == "POST" and "content-type" not in request.headers:
        raise WrongMediaType("the body has no Content-Type; expected application/json")
    return body


def _refuse_type(request: Request[Any, Any, Any], known: tuple[str, ...]) -> None:
    """PUT is exempt: no page can send that elsewhere without asking first, and curl says what it
    likes of a file.
    """
    said = request.headers.get("content-type")
    if (
        request.method == "POST"
        and said is not None
        and said.partition(";")[0].strip().lower() not in known
    ):
        raise WrongMediaType(
            f"Content-Type is {said[:80]!r}; expected {' or '.join(known)}", content_type=said[:80]
        )


def read_strictly(body: bytes, type_: type[S]) -> S:
    """Before Litestar reads it leniently: it would take "9" for 9, and 0 for the year 1970.

    Invalid names field and value.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=type_)
    except (msgspec.MsgspecError, RecursionError) as error:
        message, _, where = str(error).partition(" - at ")
        steps = [name or int(index) for name, index in _STEP.findall(where)]
        found = re.search(r"field `(.*)`", message)
        name = found[1] if found else ""
        removed = getattr(type_, "REMOVED", {}).get(name)
        choices = get_args(type_.__annotations__.get(str(steps[0]) if steps else ""))
        if removed is not None:
            message = f"{name} {removed}"
        elif "unknown field" in message:
            message += f"; expected {', '.join(type_.__struct_fields__) or 'none'}"
        elif "enum" in message:
            message += f"; expected one of {', '.join(choices)}"
        elif where:
            message = f"{message.partition(', got ')[0]}, got {_shown(body, steps)}"
        path = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps)
        raise Invalid(f"body{path}: {message}", field=name or path.lstrip(".")) from error


def _shown(body: bytes, steps: list[str | int]) -> str:
    """The value that did not fit, as it was written."""
    try:
        value = msgspec.json.decode(body)
        for step in steps:
            value = value[step]
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError):
        return "what cannot be read"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
