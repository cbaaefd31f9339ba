"""Tokens and roles: who may call the control API.

The store has only digests of tokens, so every server knows them and no copy of the store reveals
one. A token is shown once, as `fw_NAME_SECRET`: the name selects the record, the digest verifies
the secret. Creating a token also writes an admin's record, and revoking an admin compares another
one, so that two servers together cannot leave tokens without an admin.
"""

import hashlib
import hmac
import re
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import Time
from forewarn.duration import format_duration
from forewarn.engine.engine import Engine
from forewarn.engine.record import RecordCodec
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, Refused, UnknownToken

TOKEN_KEY = "token/{}/"  # noqa: S105
ALL_TOKENS = "token/"
TOKENS_MAX = 1000
EXPIRY_MAX = timedelta(days=3660)
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""No underscore: it separates the name from the secret."""
SECRET = re.compile(r"[0-9a-f]{64}")
TEXT = re.compile(rf"fw_({NAME.pattern})_({SECRET.pattern})")


class Role(StrEnum):
    """Each role may do what the one before may: read; act on VMs, hosts and events; change the
    fleet and the tokens. A host daemon's may do only what is needed for its own host, and no other
    role may do that.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"
    HOST = "host"

    def covers(self, needed: "Role") -> bool:
        if Role.HOST in (self, needed):
            return self is needed
        ranks = list(Role)
        return ranks.index(self) >= ranks.index(needed)


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`digest` is the SHA-256 of the secret; `host` is that of a host daemon's token, and `scopes`
    are those that it may place VMs in: any if there are none.

    256 random bits cannot be brute-forced, so a fast hash is enough. A host daemon signs with the
    digest, in hexadecimal, which of its VMs sends a request.
    """

    name: str
    role: Role
    digest: str
    created_at: Time
    expires_at: Time | None = None
    host: str = ""
    scopes: tuple[str, ...] = ()

    def is_valid(self, now: datetime) -> bool:
        return self.expires_at is None or now < self.expires_at


TOKEN = RecordCodec("token", Token)
UNKNOWN = Token(name="", role=Role.VIEWER, digest="", created_at=None)  # type: ignore[arg-type]
"""Used when the name is unknown, so that the check takes the same time."""


class Tokens:
    """All tokens of the store. Create it before the engine loads.

    `refused_count` counts requests with a bad token, for the metrics.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.refused_count = 0
        engine.register("token", TOKEN)

    def __bool__(self) -> bool:
        """Whether a token is required.

        Expired and unreadable tokens count too: otherwise auth would switch itself off when the
        last one expires.
        """
        return self._engine.records.has_any("token") or any(
            key.startswith(ALL_TOKENS) for key in self._engine.unreadable
        )

    def all(self) -> list[Token]:
        """By name."""
        return [token for _, token in sorted(self._engine.records.values("token"))]

    def authenticate(self, text: str) -> Token | None:
        """The token with this text; None if it is unknown or expired, in constant time."""
        parsed = TEXT.fullmatch(text)
        name, secret = parsed.groups() if parsed else ("", "")
        token = self._find(name) or UNKNOWN
        is_right = hmac.compare_digest(hash_secret(secret), token.digest)
        return token if is_right and token.is_valid(self._engine.clock.now()) else None

    def find_host_token(self, name: str) -> Token | None:
        """The valid token of a host daemon by its name."""
        token = self.find_valid(name)
        return token if token is not None and token.role is Role.HOST else None

    def find_valid(self, name: str) -> Token | None:
        """The token with this name, unless it has expired."""
        token = self._find(name)
        is_valid = token is not None and token.is_valid(self._engine.clock.now())
        return token if is_valid else None

    def _find(self, name: str) -> Token | None:
        """A token by its name; None if this version cannot read it."""
        key = TOKEN_KEY.format(name)
        token: Token | None = self._engine.records.get(key).value
        return None if key in self._engine.unreadable else token

    async def create(
        self,
        name: str,
        role: Role,
        *,
        secret: str,
        by: str,
        expires_in: timedelta | None = None,
        host: str = "",
        scopes: tuple[str, ...] = (),
    ) -> tuple[Token, str]:
        """A new token, and its text, which is never available again.

        `secret` is 256 random bits in hexadecimal. The first token must be an admin's.
        """
        assert SECRET.fullmatch(secret)
        now = self._engine.clock.now()
        token = Token(name, role, hash_secret(secret), now, host=host, scopes=scopes)
        token = check_token(token, expires_in)

        def decide(transaction: Transaction) -> None:
            known = transaction.get(TOKEN_KEY.format(name))
            if known == token:
                return  # the reply to the first commit was lost
            if known is not None:
                raise Refused(
                    f"token {name!r} already exists; expected another name, or revoke it first",
                    token=name,
                )
            tokens = self.all()
            if len(tokens) >= TOKENS_MAX:
                raise Refused(
                    f"there are {len(tokens)} tokens; at most {TOKENS_MAX} are accepted",
                    tokens_max=TOKENS_MAX,
                )
            if not self and role is not Role.ADMIN:
                raise Refused(
                    f"the first token has role {role}; expected admin, because only an admin can"
                    " create and revoke tokens",
                    role=role,
                )
            # Writing an admin as it is makes a concurrent revocation of the last admin fail.
            for other in [*_valid_admins(tokens, now), *tokens][:1]:
                transaction.put(TOKEN_KEY.format(other.name), other)
            transaction.put(TOKEN_KEY.format(name), token)
            transaction.record(_change(ChangeKind.TOKEN_CREATED, token))

        await self._engine.update([ALL_TOKENS], decide, by=by)
        return token, f"fw_{name}_{secret}"

    async def revoke(self, name: str, *, by: str) -> Token:
        """Revoke a token: here immediately, on other servers as soon as they see the commit.

        The last admin can be revoked only if there is no other token.
        """

        revoked: Token | None = None

        def decide(transaction: Transaction) -> Token:
            nonlocal revoked
            token: Token | None = transaction.get(TOKEN_KEY.format(name))
            if token is None and revoked is not None:
                return revoked  # the reply to the first commit was lost
            if token is None:
                raise UnknownToken(f"there is no token {name[:80]!r}", token=name[:80])
            others = [other for other in self.all() if other.name != name]
            admins = _valid_admins(others, transaction.now)
            is_admin = bool(_valid_admins([token], transaction.now))
            if is_admin and others and not admins:
                raise Refused(
                    f"{name} is the last admin token; expected another admin, or no other tokens",
                    token=name,
                )
            if is_admin and admins:
                transaction.get(TOKEN_KEY.format(admins[0].name))  # compared: it must stay
            transaction.put(TOKEN_KEY.format(name), None)
            transaction.record(_change(ChangeKind.TOKEN_REVOKED, token))
            revoked = token
            return token

        return await self._engine.update([ALL_TOKENS], decide, by=by)

    async def replace_all(self, name: str, *, secret: str, by: str) -> tuple[list[str], str]:
        """Revoke all tokens and create one for an admin; the names of the old, the new text.

        Does nothing if there are none: without tokens auth is off.
        """
        tokens, now = self.all(), self._engine.clock.now()
        if not tokens:
            return [], ""
        admins = _valid_admins(tokens, now)
        for token in sorted(tokens, key=lambda token: token in admins):  # admins last
            await self.revoke(token.name, by=by)
        _, text = await self.create(name, Role.ADMIN, secret=secret, by=by)
        return [token.name for token in tokens], text


def check_token(token: Token, expires_in: timedelta | None) -> Token:
    """A new token with its end; Invalid if it cannot be used."""
    name, role, host = token.name, token.role, token.host
    if not NAME.fullmatch(name):
        raise Invalid(f"name: expected 1 to 63 of a-z, 0-9 and -, got {name[:80]!r}", field="name")
    if expires_in is not None and not timedelta(0) < expires_in <= EXPIRY_MAX:
        raise Invalid(
            f"expires: expected at most {EXPIRY_MAX.days} days from now, got"
            f" {format_duration(expires_in)}",
            field="expires",
        )
    if (role is Role.HOST) != bool(host):
        raise Invalid(
            f"host: expected the name of a host for the role host, and none for other roles;"
            f" got role {role} with {f'host {host}' if host else 'no host'}",
            field="host",
        )
    if token.scopes and role is not Role.HOST:
        names = ", ".join(token.scopes)
        raise Invalid(f"scopes: expected none for the role {role}, got {names}", field="scopes")
    return replace(token, expires_at=expires_in and token.created_at + expires_in)


def _valid_admins(tokens: list[Token], now: datetime) -> list[Token]:
    return [token for token in tokens if token.role is Role.ADMIN and token.is_valid(now)]


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _change(what: ChangeKind, token: Token) -> Change:
    return Change(what=what, detail=f"{token.name} ({token.role})", host=token.host)
