"""Console sessions: what a browser keeps instead of a token.

The store has the digest of a session's random text, so every server knows it and no copy of the
store reveals it. A session ends when it is signed out, after SESSION_DURATION, and with its token.
"""

from datetime import timedelta

import msgspec

from forewarn.auth.tokens import Token, Tokens, hash_secret
from forewarn.core.event import Time
from forewarn.engine.engine import Engine
from forewarn.engine.record import RecordCodec
from forewarn.engine.transaction import Transaction

KIND = "session"
SESSION_DURATION = timedelta(hours=12)
SESSIONS_PER_TOKEN_MAX = 20
"""A user who signs in often must not sign the others out."""
REMOVED_MAX = 50
"""How many old sessions a new one removes: a commit has a limit."""


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest` is that of the token, which may be revoked and created again."""

    token: str
    digest: str
    expires_at: Time


SESSION = RecordCodec(KIND, Session)


class Sessions:
    """All sessions of the store. Create it before the engine loads."""

    def __init__(self, engine: Engine, tokens: Tokens) -> None:
        self._engine = engine
        self._tokens = tokens
        engine.register(KIND, SESSION)

    def find(self, text: str) -> Token | None:
        """The token of a session; None if either has ended."""
        session: Session | None = self._engine.records.get(_key(text)).value
        if session is None or session.expires_at <= self._engine.clock.now():
            return None
        token = self._tokens.find_valid(session.token)
        return token if token is not None and token.digest == session.digest else None

    async def start(self, token: Token, text: str) -> None:
        """Start a session; `text` is 256 random bits. The oldest of many make room."""
        now = self._engine.clock.now()
        key, session = _key(text), Session(token.name, token.digest, now + SESSION_DURATION)
        known = sorted(
            (each.expires_at, key, each.token) for key, each in self._engine.records.values(KIND)
        )
        own = [key for end, key, name in known if end > now and name == token.name]
        old = [key for end, key, _ in known if end <= now]
        old = own[: max(len(own) - SESSIONS_PER_TOKEN_MAX + 1, 0)] + old

        def decide(transaction: Transaction) -> None:
            for each in old[:REMOVED_MAX]:
                transaction.put(each, None)
            transaction.put(key, session)

        await self._engine.update([key, *old[:REMOVED_MAX]], decide, by=f"token {token.name}")

    async def end(self, text: str) -> None:
        def decide(transaction: Transaction) -> None:
            if transaction.get(_key(text)) is not None:
                transaction.put(_key(text), None)

        await self._engine.update([_key(text)], decide, by="session")


def _key(text: str) -> str:
    return f"{KIND}/{hash_secret(text)}/"
