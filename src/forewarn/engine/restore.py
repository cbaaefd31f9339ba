"""What must change in a backup before it is served again, because the world has gone on since it
was made.

Document numbers: a client that holds the ETag "7" of before would be answered 304 for another
document 7. So every scope, and the number that new scopes start above, goes on far above all that
can have been shown. Tokens: one that was revoked after the backup would be good again. So all are
revoked, and a new admin's token takes their place: without any, whoever reaches the control API on
loopback may do everything. The store's identity: entries of the history get numbers that were given
before, and webhooks must not take them for old ones.
"""

from typing import NamedTuple

from msgspec.structs import replace

from forewarn.auth.token import Role
from forewarn.core.change import Change, ChangeKind
from forewarn.engine.engine import FLOOR_KEY, SCOPE_KEY, Engine
from forewarn.engine.record import FLOOR, SCOPE, Floor
from forewarn.errors import Refused
from forewarn.history.webhooks import IDENTITY_KEY
from forewarn.store.base import WRITES_MAX, Write

BY = "store restore"
JUMP = 1_000_000
"""More visible changes than one scope can have had since any backup."""
NUMBER_MAX = 2**31 - 1
"""Many clients read DocumentIncarnation into 32 bits, and a scope needs room to go on."""
ADMIN = "restored-{:%Y%m%d-%H%M%S}"


class Renewed(NamedTuple):
    """What was done: the number that all documents have now, the tokens that are revoked, and the
    new admin's token, if any.
    """

    number: int
    revoked: tuple[str, ...] = ()
    token: str = ""


def highest_number(engine: Engine) -> int:
    """The highest document number that this store can have shown."""
    shown = (place.scope.incarnation for place in engine.board.scopes.values())
    return max([engine.floor, *shown])


async def renew(
    engine: Engine, *, above: int, source: str, keep_tokens: bool, secret: str
) -> Renewed:
    """Make the store of this engine, which nobody else has open, fit to be served.

    `above` is a number shown meanwhile.
    """
    for key in engine.unreadable:
        engine.check_readable(key)  # its number could not be raised
    number = max(highest_number(engine), above) + JUMP
    if number > NUMBER_MAX - JUMP:
        raise Refused(
            f"document numbers would continue at {number}; at most {NUMBER_MAX - JUMP} is accepted,"
            " for clients that read 32 bits",
            number=number,
        )
    await _raise_numbers(engine, number, f"from {source}; document numbers continue at {number}")
    tokens, now = engine.tokens.all(), engine.clock.now()
    if keep_tokens or not tokens:
        return Renewed(number)
    for token in sorted(
        tokens, key=lambda token: token.role is Role.ADMIN and token.is_good(now)
    ):  # the last admin's goes last
        await engine.tokens.revoke(token.name, by=BY)
    _, text = await engine.tokens.create(ADMIN.format(now), Role.ADMIN, secret=secret, by=BY)
    return Renewed(number, tuple(token.name for token in tokens), text)


async def _raise_numbers(engine: Engine, number: int, detail: str) -> None:
    """The floor of new scopes comes last, with the note of all: a file that lacks it was not
    restored to the end.
    """
    places = list(engine.board.scopes.values())
    writes = [
        Write(
            SCOPE_KEY.format(place.scope.name),
            SCOPE.encode(replace(place.scope, incarnation=number)),
            place.revision,
        )
        for place in places
    ]
    for first in range(0, len(writes), WRITES_MAX):
        await engine.commit([], BY, *writes[first : first + WRITES_MAX])
    known = [
        one
        for one in [await engine.store.get(key) for key in (FLOOR_KEY, IDENTITY_KEY)]
        if one.value is not None
    ]
    revisions = {one.key: one.revision for one in known}
    floor = Write(FLOOR_KEY, FLOOR.encode(Floor(number)), revisions.get(FLOOR_KEY, 0))
    forgotten = (
        [Write(IDENTITY_KEY, None, revisions[IDENTITY_KEY])] if IDENTITY_KEY in revisions else []
    )
    await engine.commit(
        [], BY, floor, *forgotten, changes=[Change(what=ChangeKind.RESTORED, detail=detail)]
    )
