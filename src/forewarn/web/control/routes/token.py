"""What an admin may do about tokens, over the control API.

The rules of tokens are in `auth/tokens.py`.
"""

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
from forewarn.auth.tokens import Role
from forewarn.auth.tokens import Token as Held
from forewarn.auth.tokens import Tokens as Registry
from forewarn.engine.engine import Engine
from forewarn.errors import Invalid, Refused, UnknownToken
from forewarn.web.control.auth import Principal
from forewarn.web.control.checks import ROLE, UNKEPT
from forewarn.web.control.openapi_responses import ANY, answers
from forewarn.web.http_status import BodyTooLarge


class NewToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who will hold it, what they may do, and for how long: `30d`, `12h`; null is for good."""

    name: str
    role: Literal["viewer", "operator", "admin"]
    expires: str | None = None


class TokenView(msgspec.Struct, frozen=True):
    """A token, without what only its holder knows."""

    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    is_expired: bool


class TokenAnswer(msgspec.Struct, frozen=True):
    """The text of the token is told this once. Keep it."""

    token: TokenView
    text: str


class TokenList(msgspec.Struct, frozen=True):
    tokens: list[TokenView]
    total: int


class Tokens(Controller):
    path = "/api/v1/tokens"
    tags = ("Tokens",)
    opt = MappingProxyType({ROLE: Role.ADMIN})

    @get("/", responses=ANY)
    async def list_tokens(
        self, engine: NamedDependency[Engine], tokens: NamedDependency[Registry]
    ) -> TokenList:
        """All tokens, by name: their roles and their ends, never their secrets."""
        return listed(engine, tokens)

    @post(
        "/",
        status_code=HTTP_201_CREATED,
        responses=answers(Refused, BodyTooLarge),
        opt={UNKEPT: True},
    )
    async def create_token(
        self,
        data: JSONBody[NewToken],
        engine: NamedDependency[Engine],
        tokens: NamedDependency[Registry],
        caller: NamedDependency[Principal],
        make_secret: NamedDependency[Callable[[], str]],
    ) -> TokenAnswer:
        """Makes a token and tells its text, this once.

        The first one has to be an admin's; from then on all need one.
        """
        return await make(engine, tokens, data, secret=make_secret(), by=caller.name)

    @delete("/{token:str}", status_code=HTTP_200_OK, responses=answers(UnknownToken, Refused))
    async def revoke_token(
        self,
        token: FromPath[str],
        engine: NamedDependency[Engine],
        tokens: NamedDependency[Registry],
        caller: NamedDependency[Principal],
    ) -> TokenView:
        """Ends a token at once, on every server.

        The last admin's can only go when no others are left.
        """
        return view(engine, await tokens.revoke(token, by=caller.name))


async def make(
    engine: Engine, tokens: Registry, new: NewToken, *, secret: str, by: str
) -> TokenAnswer:
    try:
        expires_in = None if new.expires is None else duration.parse_duration(new.expires)
    except ValueError as error:
        raise Invalid(f"body.expires: {error}", field="expires") from error
    token, text = await tokens.create(
        new.name, Role(new.role), secret=secret, by=by, expires_in=expires_in
    )
    return TokenAnswer(view(engine, token), text)


def listed(engine: Engine, tokens: Registry) -> TokenList:
    shown = [view(engine, token) for token in tokens.all()]
    return TokenList(shown, len(shown))


def view(engine: Engine, token: Held) -> TokenView:
    is_expired = not token.is_valid(engine.clock.now())
    return TokenView(token.name, token.role, token.created_at, token.expires_at, is_expired)
