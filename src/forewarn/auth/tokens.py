"""Who may call the control API: tokens by name, kept in the store as digests, so that every server
knows them and their end.

A token is shown once, as `fw_NAME_SECRET`. The name finds it, the digest of the secret proves it.
Whoever makes or revokes one also writes the roll, a record that all tokens share: of two who decide
at once one is told so, and decides again.
"""

import hashlib
import hmac
import re
from datetime import timedelta

from forewarn.auth.token import EXPIRY_MAX, NAME, TOKEN, Role, Token
from forewarn.core.change import Change, ChangeKind
from forewarn.engine.engine import Engine
from forewarn.engine.record import RAW
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, Refused, UnknownToken

TOKEN_KEY = "token/{}/"
ROLL_KEY = "tokens"
ROLL = b'{"format":1}'
KEYS = (ROLL_KEY, "token/")
TOKENS_MAX = 1000
SECRET = re.compile(r"[0-9a-f]{64}")
TEXT = re.compile(rf"fw_({NAME.pattern})_({SECRET.pattern})")
NOBODY = Token(name="", role=Role.VIEWER, digest="", created_at=None)  # type: ignore[arg-type]
"""What an unknown name is compared with, so that it takes as long as a known one."""


class Tokens:
    """All tokens as the store holds them. Create it before the engine loads.

    `refused_count` counts requests with a bad token, for the metrics.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.refused_count = 0
        engine.register("token", TOKEN)
        engine.register(ROLL_KEY, RAW)

    def __bool__(self) -> bool:
        """Whether a token is required.

        Expired and unreadable tokens still count, so that auth never switches itself off.
        """
        is_known = next(self._engine.records.values("token"), None) is not None
        return is_known or any(key.startswith("token/") for key in self._engine.unreadable)

    def all(self) -> list[Token]:
        return [token for _, token in sorted(self._engine.records.values("token"))]

    def _get(self, name: str) -> Token | None:
        """A token by its name; None if this version cannot read it."""
        key = TOKEN_KEY.format(name)
        token: Token | None = self._engine.records.get(key).value
        return None if key in self._engine.unreadable else token

    def holder(self, text: str) -> Token | None:
        """The token that this text is, if it is one, is known and has not expired.

        It takes as long whatever is wrong.
        """
        found = TEXT.fullmatch(text)
        name, secret = found.groups() if found else ("", "")
        token = self._get(name) or NOBODY
        is_right = hmac.compare_digest(digest_of(secret), token.digest)
        return token if is_right and token.is_good(self._engine.clock.now()) else None

    async def create(
        self, name: str, role: Role, *, secret: str, by: str, expires_in: timedelta | None = None
    ) -> tuple[Token, str]:
        """A new token and its text, which is told here and never again.

        `secret` is 256 bits of chance in hexadecimal.
        """
        assert SECRET.fullmatch(secret)
        if not NAME.fullmatch(name):
            raise Invalid(
                f"name: expected 1 to 63 of a-z, 0-9 and -, got {name[:80]!r}", field="name"
            )
        if expires_in is not None and not timedelta(0) < expires_in <= EXPIRY_MAX:
            raise Invalid(
                f"expires: expected at most {EXPIRY_MAX.days} days from now, got {expires_in}",
                field="expires",
            )
        now = self._engine.clock.now()
        expires_at = None if expires_in is None else now + expires_in
        token = Token(
            name=name, role=role, digest=digest_of(secret), created_at=now, expires_at=expires_at
        )

        def decide(transaction: Transaction) -> None:
            known = transaction.get(TOKEN_KEY.format(name))
            if known == token:
                return  # the reply to the first commit was lost
            if known is not None:
                raise Refused(
                    f"there is a token {name!r} already; expected another name, or revoke it first",
                    token=name,
                )
            count = len(self.all())
            if count >= TOKENS_MAX:
                raise Refused(
                    f"there are {count} tokens; at most {TOKENS_MAX} may be", tokens_max=TOKENS_MAX
                )
            if not self and role is not Role.ADMIN:
                raise Refused(
                    f"the first token is a {role}; expected an admin: nobody could make or revoke"
                    " tokens",
                    role=role,
                )
            self._put(transaction, token.name, token, _change(ChangeKind.TOKEN_CREATED, token))

        await self._engine.update(KEYS, decide, by=by)
        return token, f"fw_{name}_{secret}"

    async def revoke(self, name: str, *, by: str) -> Token:
        """End a token, here at once and elsewhere as soon as the store tells.

        The last admin stays while others do.
        """

        def decide(transaction: Transaction) -> Token:
            token: Token | None = transaction.get(TOKEN_KEY.format(name))
            if token is None:
                raise UnknownToken(f"there is no token {name[:80]!r}", token=name[:80])
            others = [other for other in self.all() if other.name != name]
            is_admin = token.role is Role.ADMIN and token.is_good(transaction.now)
            is_last = is_admin and not any(
                other.role is Role.ADMIN and other.is_good(transaction.now) for other in others
            )
            if is_last and others:
                raise Refused(
                    f"{name} is the last admin's token; expected another admin, or no other tokens"
                    " at all",
                    token=name,
                )
            self._put(transaction, name, None, _change(ChangeKind.TOKEN_REVOKED, token))
            return token

        return await self._engine.update(KEYS, decide, by=by)

    async def replace_all(self, name: str, *, secret: str, by: str) -> tuple[list[str], str]:
        """Revoke all tokens and create one for an admin; the names of the old, the new text.

        Does nothing if there are none: without tokens auth is off.
        """
        tokens, now = self.all(), self._engine.clock.now()
        if not tokens:
            return [], ""
        is_admin = {token.name: token.role is Role.ADMIN and token.is_good(now) for token in tokens}
        for token in sorted(tokens, key=lambda token: is_admin[token.name]):  # admins last
            await self.revoke(token.name, by=by)
        _, text = await self.create(name, Role.ADMIN, secret=secret, by=by)
        return [token.name for token in tokens], text

    def _put(
        self, transaction: Transaction, name: str, token: Token | None, change: Change
    ) -> None:
        transaction.put(TOKEN_KEY.format(name), token)
        transaction.put(ROLL_KEY, ROLL)
        transaction.record(change)


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _change(what: ChangeKind, token: Token) -> Change:
    return Change(what=what, detail=f"{token.name} ({token.role})")
