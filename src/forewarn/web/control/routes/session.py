"""The console's session: who is signed in, and what the page needs to know of the service."""

import secrets
from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, Response, delete, get, post
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK

from forewarn import __version__
from forewarn.auth.sessions import SESSION_DURATION
from forewarn.auth.tokens import Role
from forewarn.core.event import EventType
from forewarn.web.control.auth import COOKIE, Authenticator, Principal
from forewarn.web.control.dependencies import Call
from forewarn.web.service import Service
from forewarn.wire.versions import VERSIONS

LAB_PATH = "/api/v1/clock"
"""Only a lab has it."""
Auth = NamedDependency[Authenticator]


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: Annotated[str, msgspec.Meta(description="the text of a token")]


class SessionView(msgspec.Struct, frozen=True):
    """Who sends this request, and facts about the service.

    `is_required`: requests need a token. `notice_seconds` is how long before its start an event of
    a type is announced, `degraded_notice_seconds` that of a degraded host; `rate` divides the
    notice of a scope's policy. A VM that has not polled for `silent_seconds`, in a scope that
    polls, is silent.
    """

    name: str
    role: Role
    is_required: bool
    version: str
    now: datetime
    is_lab: bool
    rate: float
    notice_seconds: dict[EventType, float]
    degraded_notice_seconds: float
    silent_seconds: float
    api_versions: tuple[str, ...]


class SessionController(Controller):
    path = "/api/v1/session"
    tags = ("Session",)

    @get("/")
    async def show_session(
        self, request: Request[Any, Any, Any], call: Call, authenticator: Auth
    ) -> SessionView:
        """Who sends this request, and facts about the service."""
        return session_view(request, call.service, call.principal, authenticator)

    @post("/", status_code=HTTP_200_OK, is_public=True, ignores_key=True)
    async def sign_in(
        self,
        request: Request[Any, Any, Any],
        data: JSONBody[SignIn],
        call: Call,
        authenticator: Auth,
    ) -> Response[SessionView]:
        """Starts the session of a browser, which a cookie carries from then on."""
        token = await authenticator.verify(request, data.token)
        principal = authenticator.principal(token)
        principal.require(Role.VIEWER)
        text = secrets.token_hex(32)
        await call.service.sessions.start(token, text)
        cookie = _make_cookie(request, text, int(SESSION_DURATION.total_seconds()))
        view = session_view(request, call.service, principal, authenticator)
        return Response(view, cookies=[cookie])

    @delete("/", status_code=HTTP_200_OK, role=Role.VIEWER)
    async def sign_out(self, request: Request[Any, Any, Any], call: Call) -> Response[None]:
        """Ends the session of the cookie. The token stays valid."""
        await call.service.sessions.end(request.cookies.get(COOKIE, ""))
        return Response(None, cookies=[_make_cookie(request, "", 0)])


def session_view(
    request: Request[Any, Any, Any],
    service: Service,
    principal: Principal,
    authenticator: Authenticator,
) -> SessionView:
    timing = service.engine.timing
    return SessionView(
        name=principal.name,
        role=principal.role,
        is_required=authenticator.is_required,
        version=__version__,
        now=service.engine.clock.now(),
        is_lab=any(route.path == LAB_PATH for route in request.app.routes),
        rate=timing.rate,
        notice_seconds={kind: notice.total_seconds() for kind, notice in timing.notice.items()},
        degraded_notice_seconds=timing.degraded_notice.total_seconds(),
        silent_seconds=timing.seen_interval.total_seconds(),
        api_versions=tuple(version.name for version in VERSIONS),
    )


def _make_cookie(request: Request[Any, Any, Any], value: str, max_age: int) -> Cookie:
    return Cookie(
        COOKIE,
        value=value,
        path="/",
        max_age=max_age,
        httponly=True,
        samesite="strict",
        secure=request.scope["scheme"] == "https",
    )
