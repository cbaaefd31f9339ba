"""Who sends a request to the control listener.

That is the holder of a token, the browser of one (by the cookie of its session), or any client
while no tokens exist and the listener is on loopback.
"""

import asyncio
from typing import Any, NamedTuple

from litestar import Request

from forewarn.auth.sessions import Sessions
from forewarn.auth.tokens import Role, Token, Tokens
from forewarn.errors import Forbidden, Unauthorized
from forewarn.web.http.message import plain_address
from forewarn.web.http.rate_limit import TokenBucket
from forewarn.web.http_status import TooManyRequests

BAD_TOKEN_DELAY_SECONDS = 1.0
BAD_TOKENS_PER_SECOND = 5.0
"""Bad tokens per second and address that get a 401; more get a 429 without a delay."""
COOKIE = "forewarn_session"
EXPECTED = "expected the header `Authorization: Bearer TOKEN`; `forewarn token create` makes one"


class Principal(NamedTuple):
    """Who sends a request, as the history names them, and their role.

    `identity` differs between two tokens that had the same name one after the other. `host` is the
    one that a host daemon acts for, `scopes` those that it may place VMs in.
    """

    name: str
    role: Role
    identity: str
    host: str = ""
    scopes: tuple[str, ...] = ()

    def require(self, role: Role) -> None:
        if not self.role.covers(role):
            raise Forbidden(
                f"{self.name} has the role {self.role}; this needs the role {role}",
                role=self.role,
                needed=role,
            )


LOCAL_OPERATOR = Principal("operator", Role.ADMIN, "operator")
"""Any client that reaches a loopback listener while no tokens exist."""


class Authenticator:
    """Finds the principal of a request by its token or its session.

    The response to a bad token is delayed, which slows guessing down. Tokens are never logged.
    """

    def __init__(
        self, tokens: Tokens, sessions: Sessions, *, is_loopback: bool, delay_seconds: float
    ) -> None:
        self.is_loopback = is_loopback
        self._tokens = tokens
        self._sessions = sessions
        self._delay_seconds = delay_seconds
        self._bad_tokens = TokenBucket(BAD_TOKENS_PER_SECOND)

    async def find_token(self, request: Request[Any, Any, Any]) -> Token | None:
        """The token in the request, or of its session; None if it has neither or needs none."""
        if not self.is_required:
            return None
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if not scheme:
            return self._sessions.find(request.cookies.get(COOKIE, ""))
        return await self.verify(request, text.strip() if scheme.lower() == "bearer" else "")

    async def verify(self, request: Request[Any, Any, Any], text: str) -> Token:
        """The token with this text; if there is none, an error after a while."""
        token = self._tokens.authenticate(text)
        if token is not None:
            return token
        self._tokens.refused_count += 1
        address = plain_address(request.client.host) if request.client else ""
        if not self._bad_tokens.admits(address, asyncio.get_running_loop().time()):
            raise TooManyRequests(
                f"too many bad tokens from {address};"
                f" at most {BAD_TOKENS_PER_SECOND:g} per second are checked"
            )
        await asyncio.sleep(self._delay_seconds)
        raise Unauthorized(f"the token is unknown, revoked or expired; {EXPECTED}")

    def principal(self, token: Token | None) -> Principal:
        if token is not None:
            name, scopes = f"token {token.name}", token.scopes
            return Principal(name, token.role, token.digest, token.host, scopes)
        if self.is_required:
            raise Unauthorized(f"this request needs a token; {EXPECTED}")
        return LOCAL_OPERATOR

    @property
    def is_required(self) -> bool:
        return bool(self._tokens) or not self.is_loopback
