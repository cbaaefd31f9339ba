"""Whose request it is: the holder of a token, or whoever reaches a loopback listener while there
are no tokens.
"""

import asyncio
from typing import Any, NamedTuple

from litestar import Request

from forewarn.auth.tokens import Role, Token, Tokens
from forewarn.errors import Forbidden, Unauthorized
from forewarn.web.http.rate_limit import TokenBucket
from forewarn.web.http_status import TooManyRequests
from forewarn.web.metadata.client_identity import plain

DELAY_SECONDS = 1.0
BAD_PER_SECOND = 5.0
"""How many bad tokens an address may show in a second and be told so; more are turned away at once.
"""
EXPECTED = "expected the header `Authorization: Bearer TOKEN`; `forewarn token create` makes one"


class Principal(NamedTuple):
    """By whom it is asked, as the history tells it, and what they may do.

    `identity` differs between two tokens that had the same name one after the other.
    """

    name: str
    role: Role
    identity: str

    def must_be(self, needed: Role) -> None:
        if not self.role.covers(needed):
            raise Forbidden(
                f"{self.name} is {self.role}; expected {needed}: see the table of roles",
                role=self.role,
                needed=needed,
            )


OPERATOR = Principal("operator", Role.ADMIN, "operator")
"""Whoever reaches a loopback listener while there are no tokens."""


class Authenticator:
    """Knows callers by their tokens.

    A bad token is answered late, so that trying is slow, and is never logged.
    """

    def __init__(
        self, tokens: Tokens, *, is_loopback: bool, delay_seconds: float = DELAY_SECONDS
    ) -> None:
        self.is_loopback = is_loopback
        self._tokens = tokens
        self._delay_seconds = delay_seconds
        self._pace = TokenBucket(BAD_PER_SECOND)

    async def token(self, request: Request[Any, Any, Any]) -> Token | None:
        """The token that the request shows; None if it shows none, or none is asked for."""
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if not scheme or not self._is_asked_for:
            return None
        token = self._tokens.authenticate(text.strip()) if scheme.lower() == "bearer" else None
        if token is not None:
            return token
        self._tokens.refused_count += 1
        address = plain(request.client.host) if request.client else ""
        if not self._pace.admits(address, asyncio.get_running_loop().time()):
            raise TooManyRequests(
                f"too many bad tokens came from {address}; at most {BAD_PER_SECOND:g} a second are looked at"
            )
        await asyncio.sleep(self._delay_seconds)
        raise Unauthorized(f"the token is unknown, revoked or expired; {EXPECTED}")

    def caller(self, token: Token | None) -> Principal:
        if token is not None:
            return Principal(f"token {token.name}", token.role, token.digest)
        if self._is_asked_for:
            raise Unauthorized(f"this needs a token; {EXPECTED}")
        return OPERATOR

    @property
    def _is_asked_for(self) -> bool:
        return bool(self._tokens) or not self.is_loopback
