"""Tokens over the control API, for admins. Their rules are in `auth/`."""

import secrets
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from litestar import Controller, delete, get, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK, HTTP_201_CREATED

from forewarn.auth.tokens import Role, Token
from forewarn.duration import parse_duration
from forewarn.errors import Invalid, Refused, UnknownToken
from forewarn.fleetfile import schema
from forewarn.web.control.dependencies import Call, Name
from forewarn.web.control.views import view
from forewarn.web.service import Service

SECRET_BYTES = 32
SCOPES_MAX = 1000


class NewToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, role and lifetime (`30d`, `12h`, null for no end) of a token.

    `host` is for the role `host`: the only host that its daemon may act for. With `scopes`, it may
    place VMs in these only, or in a scope of their own.
    """

    name: Annotated[str, msgspec.Meta(description="1 to 63 of a-z, 0-9 and -")]
    role: Literal["viewer", "operator", "admin", "host"]
    expires: Annotated[
        str | None, msgspec.Meta(description="a duration such as 90d or 12h; null for never")
    ] = None
    host: schema.Name | None = None
    scopes: Annotated[list[schema.Name], msgspec.Meta(max_length=SCOPES_MAX)] = []


class TokenView(msgspec.Struct, frozen=True):
    """A token without its secret."""

    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    is_expired: bool
    host: str
    scopes: list[str]


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
    opt = MappingProxyType({"role": Role.ADMIN})

    @get("/")
    async def list_tokens(self, call: Call) -> TokenList:
        """All tokens, by name, without their secrets."""
        return token_list(call.service)

    @post("/", status_code=HTTP_201_CREATED, errors=(Refused,), ignores_key=True)
    async def create_token(self, data: JSONBody[NewToken], call: Call) -> CreatedToken:
        """Creates a token. Its text is in this response only.

        The first token must be an admin's; from then on every request needs a token.
        """
        return await create_token(call.service, data, by=call.by)

    @delete("/{token:str}", status_code=HTTP_200_OK, errors=(UnknownToken, Refused))
    async def revoke_token(self, token: Name, call: Call) -> TokenView:
        """Revokes a token immediately, on every server.

        The last admin token can be revoked only after all others.
        """
        revoked = await call.service.tokens.revoke(token, by=call.by)
        return token_view(call.service, revoked)


async def create_token(service: Service, new: NewToken, *, by: str) -> CreatedToken:
    try:
        expires_in = None if new.expires is None else parse_duration(new.expires)
    except ValueError as error:
        raise Invalid(f"body.expires: {error}", field="expires") from error
    secret = secrets.token_hex(SECRET_BYTES)
    token, text = await service.tokens.create(
        new.name,
        Role(new.role),
        secret=secret,
        by=by,
        expires_in=expires_in,
        host=new.host or "",
        scopes=tuple(sorted({*new.scopes})),
    )
    return CreatedToken(token_view(service, token), text)


def token_list(service: Service) -> TokenList:
    views = [token_view(service, token) for token in service.tokens.all()]
    return TokenList(views, len(views))


def token_view(service: Service, token: Token) -> TokenView:
    is_expired = not token.is_valid(service.engine.clock.now())
    return view(TokenView, token, is_expired=is_expired, scopes=list(token.scopes))
