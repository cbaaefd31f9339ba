"""What a request to the control listener must pass: it is meant for us, no other page sent it, it says nothing unknown."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec
from litestar import Request
from litestar.exceptions.http_exceptions import InternalServerException, RequestEntityTooLarge
from litestar.handlers import HTTPRouteHandler

from forewarn.config import is_loopback
from forewarn.errors import Forbidden, Invalid
from forewarn.web.problems import BodyTooLarge, ClientGone

QUERY_NAMES = frozenset({"limit", "dry_run"})


def door(host: str) -> Callable[[Request[Any, Any, Any]], Awaitable[None]]:
    """A hook that lets a request pass or raises the Problem that says why not. `host` is the name the listener is bound to."""

    async def admit(request: Request[Any, Any, Any]) -> None:
        handler = request.route_handler
        assert isinstance(handler, HTTPRouteHandler)
        _refuse_strangers(request, host)
        _refuse_query(request, QUERY_NAMES & handler.parsed_fn_signature.parameters.keys())
        try:
            body = await request.body()
        except RequestEntityTooLarge as error:
            most = handler.resolve_request_max_body_size()
            raise BodyTooLarge(f"the body is larger than the {most} bytes accepted here", size_max=most) from error
        except InternalServerException as error:  # the client left before the end of its body
            raise ClientGone("the connection ended before the body did") from error
        if handler.parsed_data_field is not None:
            _refuse_body(body, handler.parsed_data_field.annotation)

    return admit


def _refuse_strangers(request: Request[Any, Any, Any], host: str) -> None:
    """A name that is not ours may be a rebound one (DNS rebinding); an Origin that is not ours is another site's page."""
    asked, origin = request.headers.get("host"), request.headers.get("origin")
    if asked is not None and (name := _name_in(asked)) != host and not is_loopback(name):
        raise Forbidden(f"Host is {asked!r}; expected a loopback name or {host}", host=asked)
    if request.method not in ("GET", "HEAD", "OPTIONS") and origin is not None and origin.rpartition("//")[2] != asked:
        raise Forbidden(f"Origin is {origin!r}; a page of another site may not change anything", origin=origin)


def _name_in(asked: str) -> str:
    try:
        return urlsplit(f"//{asked}").hostname or ""
    except ValueError:
        return ""


def _refuse_query(request: Request[Any, Any, Any], known: frozenset[str]) -> None:
    """A misspelt `dry_run` must not change a fleet, and of two that differ nobody knows which is meant."""
    for name in request.query_params:
        if name not in known:
            raise Invalid(f"unknown query parameter {name!r}; known here: {', '.join(sorted(known)) or 'none'}", field=name)
        if len(request.query_params.getall(name)) > 1:
            raise Invalid(f"query parameter {name!r} stands twice; expected it once", field=name)


def _refuse_body(body: bytes, type_: type[msgspec.Struct]) -> None:
    """Read strictly before Litestar reads it leniently: it would take "9" for 9, and 0 for the year 1970."""
    try:
        msgspec.json.decode(body or b"{}", type=type_)
    except (msgspec.MsgspecError, RecursionError) as error:
        message, _, where = str(error).partition(" - at ")
        found = re.search(r"field `(.*)`", message) or re.search(r"\.(\w+)", where)
        name = found[1] if found else ""
        choices = get_args(type_.__annotations__.get(name))
        hint = f"; expected one of {', '.join(choices)}" if "enum" in message else ""
        raise Invalid(f"body{f'.{name}' if where else ''}: {message}{hint}", field=name) from error
