"""Makes the document numbers of a backup safe to serve again.

A client that still holds ETag "7" would get a 304 for a different document 7. So every
scope, and the number that new scopes start above, continues far above all that can have been shown.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.fleet import Scope
from forewarn.engine.engine import FLOOR_KEY, Engine
from forewarn.engine.record import SCOPE, Floor
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Refused
from forewarn.store.base import COMMIT_BYTES_MAX, WRITES_MAX

BY = "store restore"
JUMP = 1_000_000
"""More visible changes than one scope can have had since any backup."""
NUMBER_MAX = 2**31 - 1
"""Many clients read DocumentIncarnation into 32 bits, and a scope must be able to continue."""
SCOPES_PER_COMMIT = WRITES_MAX // 2
"""Each scope may need a second record, for polls that an earlier version stored in the scope."""


async def raise_incarnations(engine: Engine, source: str) -> int:
    """Continue all documents at a number above all that was shown; return that number.

    No other server may have the store open.
    """
    for key in engine.unreadable:
        engine.check_readable(key)  # its number could not be raised
    shown = (published.scope.incarnation for published in engine.board.scopes.values())
    number = max([engine.floor, *shown]) + JUMP
    if number > NUMBER_MAX - JUMP:
        raise Refused(
            f"document numbers would continue at {number}; at most {NUMBER_MAX - JUMP} is accepted,"
            " for clients that read 32 bits",
            number=number,
        )
    keys, size = list[str](), 0
    for name, published in engine.board.scopes.items():
        bytes_ = len(SCOPE.encode(published.scope))
        if len(keys) == SCOPES_PER_COMMIT or (keys and size + bytes_ > COMMIT_BYTES_MAX // 2):
            await _raise_scopes(engine, keys, number)
            keys, size = [], 0
        keys.append(SCOPE_KEY.format(name))
        size += bytes_
    await _raise_scopes(engine, keys, number)

    def finish(transaction: Transaction) -> None:
        transaction.put(FLOOR_KEY, Floor(number))
        detail = f"from {source}; document numbers continue at {number}"
        transaction.record(Change(what=ChangeKind.RESTORED, detail=detail))

    await engine.update([FLOOR_KEY], finish, by=BY)
    return number


async def _raise_scopes(engine: Engine, keys: Sequence[str], number: int) -> None:
    def decide(transaction: Transaction) -> None:
        for key in keys:
            scope: Scope | None = transaction.get(key)
            assert scope is not None  # no other server has the store open
            transaction.put(key, replace(scope, incarnation=number))

    await engine.update(keys, decide, by=BY)
