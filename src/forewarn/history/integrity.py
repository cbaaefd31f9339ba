"""Check that the contents of a store can be read and fit together. Changes nothing."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import msgspec

from forewarn.engine.engine import DECLARED_KEY, Engine
from forewarn.engine.entry import Entry, last_number
from forewarn.engine.record_cache import describe, kind_of, name_of
from forewarn.engine.replica import NO_KEY, SCOPE_KEY
from forewarn.history.query import read_values

OWNERS = {"campaign-hosts": "campaign/{}/", "polled": SCOPE_KEY, "seen": SCOPE_KEY}
"""Records that belong to another record."""
_ENTRIES = msgspec.json.Decoder(list[Entry])


async def inspect(engine: Engine) -> tuple[Counter[str], list[str]]:
    """How many records of each kind and history values there are, and what is wrong.

    The engine has loaded the store. Servers may be using it.
    """
    problems = [f"{describe(key)}: {each.problem}" for key, each in engine.unreadable.items()]
    keys = {record.key for record in (await engine.store.load()).records}
    counts, position = Counter(map(kind_of, keys)), 0
    async for value in read_values(engine.store):
        counts["history"] += 1
        position = value.position
        try:
            _ENTRIES.decode(value.value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"history at {position}: {error}")
    revision = (await engine.store.get(NO_KEY)).revision
    if position > revision:
        problems.append(f"history at {position} is newer than the store, at {revision}")
    for key, cursor in engine.records.values("webhook"):
        if cursor.number > last_number(position):
            problems.append(f"{describe(key)} is after all history entries")
    if not counts:
        problems.append("the store is empty; expected the store of a service")
    return counts, [*problems, *_duplicates(engine), *_left_over(keys)]


def _duplicates(engine: Engine) -> Iterator[str]:
    """A VM is in one scope, its id is its own, and so is its address on its host."""
    places = defaultdict[tuple[str, str, str], list[str]](list)
    for published in engine.board.scopes.values():
        for vm in published.scope.vms:
            address = ("address", vm.address, vm.host)
            for key in (("VM", vm.name, ""), address, ("VM id", vm.id, "")):
                places[key].append(f"{published.scope.name}/{vm.name}")
    for (what, name, _), found in places.items():
        if name and len(found) > 1:
            yield f"{what} {name} is in {' and '.join(sorted(found))}; expected one"


def _left_over(keys: Collection[str]) -> Iterator[str]:
    for key in sorted(keys):
        kind, name = kind_of(key), name_of(key).partition("/")[0]
        owner = OWNERS[kind].format(name) if kind in OWNERS else key
        if kind == "declared" and name != "0":
            owner = DECLARED_KEY.format(int(name) - 1)
        if owner not in keys:
            yield f"{describe(key)} is left over: {describe(owner)} is missing"
