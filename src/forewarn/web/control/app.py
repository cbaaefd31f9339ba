"""Builds the application of the control listener: Litestar with our routes, checks and errors."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from litestar import Litestar, Request
from litestar.config.response_cache import ResponseCacheConfig
from litestar.datastructures import MutableScopeHeaders
from litestar.di import Provide
from litestar.types import ControllerRouterHandler, Message, Scope
from litestar.utils.path import normalize_path

from forewarn.config import is_loopback
from forewarn.engine.engine import Engine
from forewarn.engine.turns import Turns
from forewarn.web.control.auth import BAD_TOKEN_DELAY_SECONDS, Authenticator
from forewarn.web.control.checks import READ_METHODS, CheckedRequest, Checks
from forewarn.web.control.dependencies import ApiCall, make_page
from forewarn.web.control.docs_page import docs
from forewarn.web.control.error_handlers import EXCEPTION_HANDLERS
from forewarn.web.control.idempotency import Idempotency
from forewarn.web.control.openapi import make_openapi_config, openapi_json
from forewarn.web.control.routes.acknowledge import AcknowledgeController
from forewarn.web.control.routes.campaign import CampaignController
from forewarn.web.control.routes.console import console_file, show_entry_points
from forewarn.web.control.routes.event import EventController
from forewarn.web.control.routes.fleet import FleetController
from forewarn.web.control.routes.health import check_health, check_readiness
from forewarn.web.control.routes.history import HistoryController, make_filter
from forewarn.web.control.routes.host import HostController
from forewarn.web.control.routes.hostd import HostDaemonController
from forewarn.web.control.routes.scope import ScopeController
from forewarn.web.control.routes.session import SessionController
from forewarn.web.control.routes.stream import follow_stream
from forewarn.web.control.routes.token import TokenController
from forewarn.web.control.routes.vm import VmController
from forewarn.web.http_status import is_azure
from forewarn.web.service import Service

BODY_BYTES_MAX = 64 * 1024
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
"""Added to every response that does not set them itself."""
API = "/api/v1/"
STREAM = f"{API}stream"
"""The only GET whose response has no end, so HEAD cannot be served by it."""

ROUTES: tuple[ControllerRouterHandler, ...] = (
    show_entry_points,
    console_file,
    check_health,
    check_readiness,
    docs,
    openapi_json,
    FleetController,
    ScopeController,
    VmController,
    HostController,
    HostDaemonController,
    EventController,
    AcknowledgeController,
    TokenController,
    SessionController,
    HistoryController,
    follow_stream,
    CampaignController,
)


def make_app(
    service: Service,
    *,
    host: str = "127.0.0.1",
    more: Sequence[ControllerRouterHandler] = (),
    delay_seconds: float = BAD_TOKEN_DELAY_SECONDS,
) -> "ControlApp":
    """`host` is the address the listener is bound to; `more` are routes of the caller's own.

    The response to a bad token is delayed by `delay_seconds`.
    """
    operations = service.operations
    authenticator = Authenticator(
        service.tokens,
        service.sessions,
        is_loopback=is_loopback(host),
        delay_seconds=delay_seconds,
    )

    async def make_call(request: Request[Any, Any, Any]) -> ApiCall:
        state, used = request.scope["state"], operations
        if "operation_id" in state:
            used = operations.repeating(state["operation_id"])
        call = ApiCall(state["principal"], service._replace(operations=used))
        if request.method in READ_METHODS:
            await call.take_turn()
        else:  # commands of operators and reports of hosts have limits of their own
            await service.turns.start(call.principal.identity)
        return call

    return ControlApp(
        service.turns,
        route_handlers=[*ROUTES, *more],
        dependencies={
            "authenticator": Provide(lambda: authenticator, sync_to_thread=False),
            "call": Provide(make_call),
            "page": Provide(make_page, sync_to_thread=False),
            "wanted": Provide(make_filter, sync_to_thread=False),
        },
        middleware=[Checks(authenticator, host), Idempotency(service.engine, operations.new_id)],
        before_send=[add_headers, partial(add_age, service.engine)],
        exception_handlers=EXCEPTION_HANDLERS,
        request_class=CheckedRequest,
        request_max_body_size=BODY_BYTES_MAX,
        openapi_config=make_openapi_config(),
        # By default it is the path as written, so `//api/docs` would be cached again.
        response_cache_config=ResponseCacheConfig(
            key_builder=lambda request: request.scope["path_template"]
        ),
        logging_config=None,
    )


async def add_headers(message: Message, _: Scope) -> None:
    if message["type"] == "http.response.start":
        headers = MutableScopeHeaders.from_message(message)
        for name, value in HEADERS.items():
            headers.setdefault(name, value)


async def add_age(engine: Engine, message: Message, scope: Any) -> None:
    """While this server is cut off from the store, what it shows may be old. Clients that know
    other servers then ask one of them.
    """
    is_read = message["type"] == "http.response.start" and scope["method"] in READ_METHODS
    if is_read and scope["path"].startswith(API) and engine.age_seconds:
        MutableScopeHeaders.from_message(message).setdefault("Age", str(engine.age_seconds))


class ControlApp(Litestar):
    """Litestar, but HEAD is served as GET: Litestar would need a handler of its own.

    The paths of Azure's own API are not case-sensitive. Requests begin in turns, clients by their
    addresses: many at once would delay polls by what Litestar does for each.
    """

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self._turns = turns

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._turns.start((scope.get("client") or ("",))[0])
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        if is_head and normalize_path(scope["path"]) != STREAM:
            scope = {**scope, "method": "GET"}  # uvicorn knows the method, and sends no body
        if is_azure(scope.get("path", "")):
            scope = {**scope, "path": scope["path"].lower()}
        await super().__call__(scope, receive, send)
