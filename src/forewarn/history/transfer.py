"""Copy a whole store into an empty one, of any kind, and compare the two.

States of the target:  EMPTY -> INCOMPLETE, while it has the record COPY_KEY -> COMPLETE
No server loads an incomplete copy. Copying again continues an interrupted copy.

Positions are revisions of a store, so the entries get new numbers. Cursors of webhooks move with
them. The identity of the store is left out, because a message id must not stand for two entries.
"""

import hashlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from operator import itemgetter

from msgspec.structs import replace

from forewarn.engine.entry import first_number, last_number, position_of
from forewarn.engine.lease import TTL_SECONDS, lease_key
from forewarn.engine.record_cache import kind_of
from forewarn.errors import Refused, StoreUnusable
from forewarn.history.query import read_values
from forewarn.history.webhooks import CURSOR, IDENTITY_KEY
from forewarn.store.base import COMMIT_BYTES_MAX, WRITES_MAX, Record, Store, Write

COPY_KEY = "copy"

Finish = Callable[[Store], Awaitable[None]]
Report = Callable[[int, int], None]
"""Called with the position that is copied, and the last one."""
Moves = list[tuple[int, int]]
"""The position of each history value in the source and in the target."""


async def copy_store(
    source: Store, target: Store, finish: Finish | None = None, report: Report = lambda *_: None
) -> tuple[str, str]:
    """Copy everything but leases. Returns what both hold; the copy is complete if that is equal.

    The target must be empty, or an interrupted copy. No server may use the source, unless it is a
    backup: `finish` makes the copy of it safe to serve.
    """
    for store in (source, target):  # in SQLite, this also deletes the leases that have expired
        if await store.lease(COPY_KEY, TTL_SECONDS) is None:
            raise Refused(
                "another process is copying one of these stores, or both are the same; if a copy"
                f" was killed, try again in {TTL_SECONDS:.0f} seconds"
            )
    is_backup, moves = finish is not None, Moves()
    await _read(source, moves, is_backup=is_backup)  # refuses before the first write
    await _begin(target)
    last = max([value.position for value in await source.latest(limit=1)], default=1)
    async for move in _copy_history(source, target):
        moves.append(move)
        report(move[0], last)
    values = await _read(source, moves, is_backup=is_backup)
    await _commit_all(target, (Write(key, value, 0) for key, value in values.items()))
    copied = {record.key: record.value or b"" for record in await _load(target)}
    values = await _read(source, moves, is_backup=is_backup)
    held = await _summarize(source, values), await _summarize(target, copied)
    if held[0] == held[1]:
        if finish is not None:
            await finish(target)
        await target.commit([Write(COPY_KEY, None, (await target.get(COPY_KEY)).revision)])
    return held


async def check_complete(store: Store) -> None:
    if (await store.get(COPY_KEY)).value is not None:
        raise StoreUnusable(
            "the store is an incomplete copy; run `forewarn store copy` with the same SOURCE and"
            " TARGET again, which continues it"
        )


def move_number(number: int, moves: Moves) -> int:
    """The number in the target that has the same entries before it; 0 is before all entries.

    What is before the oldest entry stays there, at the same distance: a gap stays a gap.
    """
    if not number or not moves:
        return 0
    index = bisect_right(moves, position_of(number), key=itemgetter(0))
    old, new = moves[max(index - 1, 0)]
    return max(min(number + first_number(new - old), last_number(new)), 1)


async def _read(source: Store, moves: Moves, *, is_backup: bool) -> dict[str, bytes]:
    """The records that the target gets. A backup has leases of servers that were running then."""
    await check_complete(source)
    servers = (await source.load(lease_key(""))).records
    if servers and not is_backup:
        raise Refused(
            f"the source is in use (servers: {len(servers)}); stop them first. The lease of a"
            f" server that was killed ends after {TTL_SECONDS:.0f} seconds"
        )
    values = {record.key: record.value or b"" for record in await _load(source)}
    for key in [key for key in values if kind_of(key) == "webhook"]:
        cursor = CURSOR.decode(values[key])
        values[key] = CURSOR.encode(replace(cursor, number=move_number(cursor.number, moves)))
    values.pop(IDENTITY_KEY, None)
    if not values:
        raise Refused("the source is empty; expected the store of a service")
    return values


async def _load(store: Store) -> list[Record]:
    """All records but leases and the mark of an incomplete copy, those written first first."""
    records = sorted((await store.load()).records, key=lambda record: record.revision)
    return [record for record in records if kind_of(record.key) not in ("lease", COPY_KEY)]


async def _begin(target: Store) -> None:
    """Mark the target as incomplete. The history of an interrupted copy stays, to be continued."""
    records = await _load(target)
    if (await target.get(COPY_KEY)).value is None:
        if records or await target.latest(limit=1):
            raise Refused(
                "the target has records or history; expected an empty store: move an SQLite file"
                " away, or choose another prefix of etcd"
            )
        await target.commit([Write(COPY_KEY, b"incomplete", 0)])
    await _commit_all(target, (Write(record.key, None, record.revision) for record in records))


async def _copy_history(source: Store, target: Store) -> AsyncIterator[tuple[int, int]]:
    """Copy the values that the target does not have yet, in order."""
    copied = read_values(target)
    async for value in read_values(source):
        known = await anext(copied, None)  # None at the end, and from then on
        if known and known.value != value.value:
            raise Refused("the target is a copy of another history; delete it and copy again")
        position = known.position if known else await target.commit([], entries=value.value)
        yield value.position, position


async def _commit_all(target: Store, writes: Iterable[Write]) -> None:
    """Commit as much at a time as the limits of a commit allow."""
    batch, size = list[Write](), 0
    for write in writes:
        size += len(write.value or b"")
        if len(batch) == WRITES_MAX or size > COMMIT_BYTES_MAX:
            await target.commit(batch)
            batch, size = [], len(write.value or b"")
        batch.append(write)
    await target.commit(batch)


async def _summarize(store: Store, records: dict[str, bytes]) -> str:
    """What is compared. Each part is hashed with its length: two contents never look alike."""
    digest, count = hashlib.sha256(), 0
    for key, value in sorted(records.items()):
        digest.update(b"%d:%b%d:%b" % (len(key.encode()), key.encode(), len(value), value))
    async for entries in read_values(store):
        digest.update(b"%d:%b" % (len(entries.value), entries.value))
        count += 1
    return f"{len(records)} records, {count} history values, sha256 {digest.hexdigest()}"
