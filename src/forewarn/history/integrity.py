"""Check that the contents of a store can be read and fit together. Changes nothing."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from forewarn.core.fleet import Scope
from forewarn.engine.engine import DECLARED_KEY, Engine
from forewarn.engine.entry import Entry, last_number
from forewarn.engine.replica import NO_KEY, SCOPE_KEY, describe, kind_of, name_of
from forewarn.errors import StoreUnusable
from forewarn.history.query import read_values
from forewarn.history.webhooks import Cursor

OWNERS = {"campaign-hosts": "campaign/{}/", "seen": SCOPE_KEY}
"""Records that belong to another record."""
_ENTRIES = msgspec.json.Decoder(list[Entry])


async def inspect(engine: Engine) -> tuple[Counter[str], list[str]]:
    """How many records of each kind and history values there are, and what is wrong.

    Servers may use the store meanwhile: the records are those of one revision.
    """
    counts, problems, values = Counter[str](), list[str](), dict[str, Any]()
    for record in (await engine.store.load()).records:
        counts[kind_of(record.key)] += 1
        values[record.key] = None
        try:
            values[record.key] = engine.codec(record.key).decode(record.value or b"")
        except KeyError:
            problems.append(f"{describe(record.key)}: this version does not know such records")
        except StoreUnusable as error:
            problems.append(f"{describe(record.key)}: {error.message}")
    position = 0
    async for value in read_values(engine.store):
        counts["history"] += 1
        try:
            _ENTRIES.decode(value.value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"history at {value.position}: {error}")
        position = value.position
    revision = (await engine.store.get(NO_KEY)).revision
    if position > revision:
        problems.append(f"history at {position} is newer than the store, at {revision}")
    if not counts:
        problems.append("the store is empty; expected the store of a service")
    return counts, [*problems, *_duplicates(values), *_left_over(values, position)]


def _duplicates(values: Mapping[str, Any]) -> Iterator[str]:
    """A VM is in one scope, and its address and id are its own."""
    places = defaultdict[tuple[str, str], list[str]](list)
    for scope in values.values():
        for vm in scope.vms if isinstance(scope, Scope) else ():
            for what, name in (("VM", vm.name), ("address", vm.address), ("VM id", vm.id)):
                places[what, name].append(f"{scope.name}/{vm.name}")
    for (what, name), found in places.items():
        if name and len(found) > 1:
            yield f"{what} {name} is in {' and '.join(found)}; expected one"


def _left_over(values: Mapping[str, Any], position: int) -> Iterator[str]:
    """Records whose owner is missing, and webhooks that wait for numbers of another store."""
    for key, value in values.items():
        kind, name = kind_of(key), name_of(key).partition("/")[0]
        owner = OWNERS[kind].format(name) if kind in OWNERS else key
        if kind == "declared" and name != "0":
            owner = DECLARED_KEY.format(int(name) - 1)
        if owner not in values:
            yield f"{describe(key)} is left over: {describe(owner)} is missing"
        if isinstance(value, Cursor) and value.number > last_number(position):
            yield f"{describe(key)} is after all history entries"
