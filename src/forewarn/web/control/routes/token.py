"""Tokens over the control API, for admins. Their rules are in `auth/`."""

from collections.abc import Callable
from datetime import datetime
from types import MappingProxyType
from typing import Literal

import msgspec
from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_200_OK, HTTP_201_CREATED

from forewarn import duration
from forewarn.auth.tokens import Role, Token, Tokens
from forewarn.engine.engine import Engine
from forewarn.errors import Invalid, Refused, UnknownToken
from forewarn.web.control.checks import ROLE, SECRET
from forewarn.web.control.dependencies import (
    EngineDependency,
    PrincipalDependency,
    TokensDependency,
)
from forewarn.web.control.openapi import COMMON_ERRORS, error_responses
from forewarn.web.control.views import view


class NewToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, role and lifetime (`30d`, `12h`, null for no end) of a token."""

    name: str
    role: Literal["viewer", "operator", "admin"]
    expires: str | None = None


class TokenView(msgspec.Struct, frozen=True):
    """A token without its secret."""

    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    is_expired: bool


class CreatedToken(msgspec.Struct, frozen=True):
    """A new token with its text, which is shown only once."""

    token: TokenView
    text: str


class TokenList(msgspec.Struct, frozen=True):
    tokens: list[TokenView]
    total: int


class TokenController(Controller):
    path = "/api/v1/tokens"
    tags = ("Tokens",)
    opt = MappingProxyType({ROLE: Role.ADMIN})

    @get("/", responses=COMMON_ERRORS)
    async def list_tokens(self, engine: EngineDependency, tokens: TokensDependency) -> TokenList:
        """All tokens, by name, without their secrets."""
        return token_list(engine, tokens)

    @post(
        "/",
        status_code=HTTP_201_CREATED,
        responses=error_responses(Refused),
        opt={SECRET: True},
    )
    async def create_token(
        self,
        data: JSONBody[NewToken],
        engine: EngineDependency,
        tokens: TokensDependency,
        principal: PrincipalDependency,
        make_secret: NamedDependency[Callable[[], str]],
    ) -> CreatedToken:
        """Creates a token. Its text is in this response only.

        The first token must be an admin's; from then on every request needs a token.
        """
        return await create_token(engine, tokens, data, secret=make_secret(), by=principal.name)

    @delete(
        "/{token:str}", status_code=HTTP_200_OK, responses=error_responses(UnknownToken, Refused)
    )
    async def revoke_token(
        self,
        token: FromPath[str],
        engine: EngineDependency,
        tokens: TokensDependency,
        principal: PrincipalDependency,
    ) -> TokenView:
        """Revokes a token at once, on every server.

        The last admin token can be revoked only after all others.
        """
        return token_view(engine, await tokens.revoke(token, by=principal.name))


async def create_token(
    engine: Engine, tokens: Tokens, new: NewToken, *, secret: str, by: str
) -> CreatedToken:
    try:
        expires_in = None if new.expires is None else duration.parse_duration(new.expires)
    except ValueError as error:
        raise Invalid(f"body.expires: {error}", field="expires") from error
    token, text = await tokens.create(
        new.name, Role(new.role), secret=secret, by=by, expires_in=expires_in
    )
    return CreatedToken(token_view(engine, token), text)


def token_list(engine: Engine, tokens: Tokens) -> TokenList:
    views = [token_view(engine, token) for token in tokens.all()]
    return TokenList(views, len(views))


def token_view(engine: Engine, token: Token) -> TokenView:
    return view(TokenView, token, is_expired=not token.is_valid(engine.clock.now()))
