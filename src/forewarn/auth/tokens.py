"""Who may call the control API: tokens by name, kept in the store as digests, so that every server
knows them and their end.

A token is shown once, as `fw_NAME_SECRET`. The name finds it, the digest of the secret proves it.
Whoever makes or revokes one also writes the roll, a record that all tokens share: of two who decide
at once one is told so, and decides again.
"""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from forewarn.auth.token import EXPIRY_MAX, NAME, Role, Token
from forewarn.core.change import Change, ChangeKind
from forewarn.engine import record
from forewarn.engine.clock import Clock
from forewarn.errors import Conflict, Invalid, Refused, Unavailable, UnknownToken
from forewarn.store.base import Record, Store, Write

TOKEN_KEY = "token/{}/"
ROLL_KEY = "tokens"
ROLL = b'{"format":1}'
KINDS = ("token", ROLL_KEY)
TOKENS_MAX = 1000
TRIES_MAX = 10
SECRET = re.compile(r"[0-9a-f]{64}")
TEXT = re.compile(rf"fw_({NAME.pattern})_({SECRET.pattern})")
NEVER = datetime.fromtimestamp(0, UTC)
NOBODY = Token(name="", role=Role.VIEWER, digest="", created_at=None)  # type: ignore[arg-type]
"""What an unknown name is compared with, so that it takes as long as a known one."""

Commit = Callable[[Sequence[Write], Change, str], Awaitable[int]]


class Held(NamedTuple):
    """A token and the revision at which it was written."""

    token: Token
    revision: int


class Tokens:
    """All tokens as the store holds them. `commit` writes records with their note and has them
    learned.

    `refused_count` counts the tokens that were shown and are none, for whoever tells how the
    service is doing.
    """

    def __init__(self, store: Store, clock: Clock, commit: Commit) -> None:
        self._store = store
        self._clock = clock
        self._commit = commit
        self._held: dict[str, Held] = {}
        self._gone: dict[str, int] = {}
        self._roll_revision = 0
        self.refused_count = 0

    def __bool__(self) -> bool:
        """Whether there are any: then they are asked for.

        One that has expired still counts, so that time opens no door.
        """
        return bool(self._held)

    def all(self) -> list[Token]:
        return [self._held[name].token for name in sorted(self._held)]

    def holder(self, text: str) -> Token | None:
        """The token that this text is, if it is one, is known and has not expired.

        It takes as long whatever is wrong.
        """
        found = TEXT.fullmatch(text)
        name, secret = found.groups() if found else ("", "")
        token = self._held[name].token if name in self._held else NOBODY
        is_right = hmac.compare_digest(digest_of(secret), token.digest)
        return token if is_right and token.is_good(self._clock.now()) else None

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
        now = self._clock.now()
        expires_at = None if expires_in is None else now + expires_in
        token = Token(
            name=name, role=role, digest=digest_of(secret), created_at=now, expires_at=expires_at
        )

        def decide() -> tuple[Write, Change]:
            if name in self._held:
                raise Refused(
                    f"there is a token {name!r} already; expected another name, or revoke it first",
                    token=name,
                )
            if len(self._held) >= TOKENS_MAX:
                raise Refused(
                    f"there are {len(self._held)} tokens; at most {TOKENS_MAX} may be",
                    tokens_max=TOKENS_MAX,
                )
            if not self._held and role is not Role.ADMIN:
                raise Refused(
                    f"the first token is a {role}; expected an admin: nobody could make or revoke tokens",
                    role=role,
                )
            return Write(TOKEN_KEY.format(name), record.TOKEN.encode(token), 0), _change(
                ChangeKind.TOKEN_CREATED, token
            )

        await self._write(decide, by)
        return token, f"fw_{name}_{secret}"

    async def revoke(self, name: str, *, by: str) -> Token:
        """End a token, here at once and elsewhere as soon as the store tells.

        The last admin stays while others do.
        """

        def decide() -> tuple[Write, Change]:
            held = self._standing(name)
            others = [one.token for one in self._held.values() if one.token.name != name]
            now = self._clock.now()
            is_admin = held.token.role is Role.ADMIN and held.token.is_good(now)
            is_last = is_admin and not any(
                one.role is Role.ADMIN and one.is_good(now) for one in others
            )
            if is_last and others:
                raise Refused(
                    f"{name} is the last admin's token; expected another admin, or no other tokens at all",
                    token=name,
                )
            return Write(TOKEN_KEY.format(name), None, held.revision), _change(
                ChangeKind.TOKEN_REVOKED, held.token
            )

        token = self._standing(name).token
        await self._write(decide, by)
        return token

    def _standing(self, name: str) -> Held:
        if name not in self._held:
            raise UnknownToken(f"there is no token {name[:80]!r}", token=name[:80])
        return self._held[name]

    async def _write(self, decide: Callable[[], tuple[Write, Change]], by: str) -> None:
        """What was decided, if no token came or went meanwhile; else look again and decide anew."""
        for _ in range(TRIES_MAX):
            write, change = decide()
            try:
                await self._commit((write, Write(ROLL_KEY, ROLL, self._roll_revision)), change, by)
            except Conflict:
                await self._look_again()
            else:
                return
        raise Unavailable("the tokens are being changed by too many at once; try again")

    async def _look_again(self) -> None:
        snapshot = await self._store.load("token")
        self._forget(snapshot.revision, {found.key for found in snapshot.records})
        for found in snapshot.records:
            self.learn(found)

    def learn(self, found: Record) -> None:
        """Know a token, or the roll, as it stands in the store, unless something newer is known
        already.
        """
        if found.key == ROLL_KEY:
            self._roll_revision = max(self._roll_revision, found.revision)
            return
        name = found.key.split("/")[1]
        known = self._held[name].revision if name in self._held else self._gone.get(name, 0)
        if found.revision <= known:
            return
        if found.value is None:
            self._held.pop(name, None)
            self._gone[name] = found.revision
        else:
            self._held[name] = Held(record.TOKEN.decode(found.value), found.revision)

    def hold_unreadable(self, found: Record) -> None:
        """Know that a token exists that this version cannot read.

        It opens nothing here; but without it auth might be off.
        """
        name = found.key.split("/")[1]
        self._held[name] = Held(
            Token(name=name, role=Role.VIEWER, digest="", created_at=NEVER), found.revision
        )

    def keep_only(self, keys: Collection[str], revision: int) -> None:
        """The store was read as of a revision: what it did not hold then is gone.

        What was revoked since then stays so.
        """
        self._gone = {name: gone for name, gone in self._gone.items() if gone > revision}
        self._forget(revision, keys)

    def _forget(self, revision: int, keys: Collection[str]) -> None:
        if ROLL_KEY not in keys:
            self._roll_revision = 0
        for name in [name for name in self._held if TOKEN_KEY.format(name) not in keys]:
            self.learn(Record(TOKEN_KEY.format(name), None, revision))


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _change(what: ChangeKind, token: Token) -> Change:
    return Change(what=what, detail=f"{token.name} ({token.role})")
