"""Read the history with filters. The store knows only positions, so filters are applied here."""

from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from forewarn.engine.entry import Entry, decode_each, first_number, position_of
from forewarn.engine.turns import SLICE, Turn, yield_once
from forewarn.store.base import POSITION_MAX, HistoryValue, Store

SCAN_MAX = 20_000
"""How many history values one request reads; then it returns what it has found and a cursor."""
BATCH = 200
SKEW = timedelta(minutes=5)
"""Entries are in the order of their commits; the clocks of servers may differ by this much."""


class EntryFilter(msgspec.Struct, frozen=True):
    """Which entries are wanted; an empty field matches everything."""

    vm: str = ""
    scope: str = ""
    host: str = ""
    event: str = ""
    what: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def matches(self, entry: Entry) -> bool:
        return (
            (not self.vm or self.vm == entry.vm or self.vm in entry.resources)
            and self.scope in ("", entry.scope)
            and (not self.host or self.host in (entry.host, entry.host_before))
            and self.event in ("", entry.event)
            and self.what in ("", entry.what)
            and (self.since is None or self.since <= entry.at)
            and (self.until is None or entry.at < self.until)
        )

    async def select(
        self, values: Iterable[HistoryValue], take_turn: Turn = yield_once
    ) -> AsyncIterator[Entry]:
        """The matching entries of these values, each value's oldest entry first.

        A value that does not contain the names is not decoded. Polls pass also where few entries
        match.
        """
        names = [
            msgspec.json.encode(name)
            for name in (self.vm, self.scope, self.host, self.event, self.what)
            if name
        ]
        work = 0
        for value in values:
            is_possible = all(name in value.value for name in names)
            for entry in decode_each(value) if is_possible else (None,):
                work += 1
                if work % SLICE == 0:
                    await take_turn()
                if entry is not None and self.matches(entry):
                    yield entry


class HistoryPage(NamedTuple):
    """Entries, newest first; `next` is the cursor of the next page, None at the end."""

    entries: list[Entry]
    next: int | None


async def read(
    store: Store,
    wanted: EntryFilter,
    *,
    limit: int,
    before: int | None = None,
    scan_max: int = SCAN_MAX,
    take_turn: Turn = yield_once,
) -> HistoryPage:
    """At most `limit` entries with numbers below `before`.

    The work is bounded: a page may be empty and still have a next one.
    """
    found: list[Entry] = []
    end = POSITION_MAX if before is None else position_of(before - 1) + 1
    for _ in range(0, scan_max, BATCH):
        values = await store.latest(end, min(BATCH, scan_max))
        for first in range(0, len(values), SLICE):
            await take_turn()
            part = reversed(values[first : first + SLICE])
            oldest_first = [entry async for entry in wanted.select(part, take_turn)]
            for entry in reversed(oldest_first):
                if before is not None and entry.number >= before:
                    continue
                found.append(entry)
                if len(found) == limit:
                    return HistoryPage(found, await _cursor(store, entry.number))
        if not values or _is_before(values[-1], wanted.since):
            return HistoryPage(found, None)
        end = values[-1].position
    return HistoryPage(found, await _cursor(store, first_number(values[-1].position)))


async def read_values(store: Store) -> AsyncIterator[HistoryValue]:
    """The whole history, oldest first."""
    after = 0
    while values := await store.history(after):
        for value in values:
            yield value
        after = values[-1].position


async def _cursor(store: Store, number: int) -> int | None:
    """The number as a cursor; None if no older entry is left."""
    (oldest,) = await store.history(limit=1)
    return number if number > first_number(oldest.position) else None


def _is_before(value: HistoryValue, since: datetime | None) -> bool:
    first = None if since is None else next(decode_each(value), None)
    return since is not None and first is not None and first.at < since - SKEW
