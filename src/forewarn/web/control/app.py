"""Builds the application of the control listener: Litestar with our routes, checks and errors.

Around every response, errors included: security headers, HEAD, and storing the response of a
request with an Idempotency-Key.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

from litestar import Litestar, Request
from litestar.di import Provide
from litestar.types import ControllerRouterHandler
from litestar.utils.path import normalize_path

from forewarn.config import is_loopback
from forewarn.engine.operations import Operations
from forewarn.web.control.auth import BAD_TOKEN_DELAY_SECONDS, Authenticator, Principal
from forewarn.web.control.checks import make_checks
from forewarn.web.control.docs_page import docs
from forewarn.web.control.error_handlers import EXCEPTION_HANDLERS
from forewarn.web.control.idempotency import Idempotency
from forewarn.web.control.openapi import make_openapi_config
from forewarn.web.control.routes.campaign import CampaignController
from forewarn.web.control.routes.event import EventController
from forewarn.web.control.routes.fleet import FleetController
from forewarn.web.control.routes.health import healthz, landing, readyz
from forewarn.web.control.routes.history import HistoryController
from forewarn.web.control.routes.host import HostController
from forewarn.web.control.routes.scope import ScopeController
from forewarn.web.control.routes.stream import StreamController
from forewarn.web.control.routes.token import TokenController
from forewarn.web.control.routes.vm import VmController
from forewarn.web.service import Service

BODY_BYTES_MAX = 64 * 1024
SECRET_BYTES = 32
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
"""Added to every response that does not set them itself."""
STREAM = "/api/v1/stream"
"""The only GET whose response has no end, so HEAD cannot be served by it."""

ROUTES: tuple[ControllerRouterHandler, ...] = (
    landing,
    healthz,
    readyz,
    docs,
    FleetController,
    ScopeController,
    VmController,
    HostController,
    EventController,
    TokenController,
    HistoryController,
    StreamController,
    CampaignController,
)

Message = dict[str, Any]


def make_app(
    service: Service,
    *,
    host: str = "127.0.0.1",
    more: Sequence[ControllerRouterHandler] = (),
    delay_seconds: float = BAD_TOKEN_DELAY_SECONDS,
    make_secret: Callable[[], str] = lambda: secrets.token_hex(SECRET_BYTES),
) -> "ControlApp":
    """`host` is the address the listener is bound to; `more` are routes of the caller's own.

    The response to a bad token is delayed by `delay_seconds`.
    """
    operations = service.operations
    idempotency = Idempotency(service.engine, operations.new_id)
    authenticator = Authenticator(
        service.tokens, is_loopback=is_loopback(host), delay_seconds=delay_seconds
    )

    def provide_principal(request: Request[Any, Any, Any]) -> Principal:
        principal: Principal = request.scope["state"]["principal"]
        return principal

    def provide_operations(request: Request[Any, Any, Any]) -> Operations:
        reservation = request.scope["state"].get("reservation")
        return operations.repeating(reservation.operation_id) if reservation else operations

    return ControlApp(
        idempotency,
        route_handlers=[*ROUTES, *more],
        dependencies={
            "operations": Provide(provide_operations, sync_to_thread=False),
            "engine": Provide(lambda: service.engine, sync_to_thread=False),
            "campaigns": Provide(lambda: service.campaigns, sync_to_thread=False),
            "feed": Provide(lambda: service.feed, sync_to_thread=False),
            "tokens": Provide(lambda: service.tokens, sync_to_thread=False),
            "principal": Provide(provide_principal, sync_to_thread=False),
            "make_secret": Provide(lambda: make_secret, sync_to_thread=False),
        },
        before_request=make_checks(authenticator, idempotency, host),
        exception_handlers=EXCEPTION_HANDLERS,
        request_max_body_size=BODY_BYTES_MAX,
        openapi_config=make_openapi_config(),
        logging_config=None,
    )


class ControlApp(Litestar):
    """Litestar's middleware does not see responses to unknown paths, so this wraps the app."""

    def __init__(self, idempotency: Idempotency, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._idempotency = idempotency

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if scope["method"] == "HEAD" and normalize_path(scope["path"]) != STREAM:
            scope = {**scope, "method": "GET"}  # uvicorn knows the method, and sends no body
        state: Message = scope.setdefault("state", {})
        status, body = 0, b""

        async def send_completed(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {bytes(name).lower() for name, _ in message["headers"]}
                missing = (header for header in HEADERS if header[0] not in names)
                message["headers"] = [*message["headers"], *missing]
            elif message["type"] == "http.response.body" and "reservation" in state:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await self._idempotency.finish(state["reservation"], status, body)
            await send(message)

        try:
            await super().__call__(scope, receive, cast("Any", send_completed))
        finally:
            if "reservation" in state:
                state["reservation"].lock.release()
