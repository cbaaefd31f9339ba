"""What `store check` finds in a store."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from forewarn.core.timing import Timing
from forewarn.engine.engine import DECLARED_KEY
from forewarn.engine.entry import first_number
from forewarn.engine.record import DECLARED, SCOPE, SEEN
from forewarn.engine.replica import SCOPE_KEY
from forewarn.history.integrity import inspect
from forewarn.history.webhooks import CURSOR, Cursor
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import HistoryValue, Write
from forewarn.store.memory import MemoryStore
from forewarn.web.service import build_service
from tests.builders import NOON, vm
from tests.unit.engine.test_engine import FLEET, World

WEB = FLEET.scopes[0]


async def problems_of(store: MemoryStore) -> list[str]:
    service = build_service(store, VirtualClock(NOON), Timing(), lambda: "")
    await service.engine.load()
    return (await inspect(service.engine))[1]


def problems_with(*writes: Write, history: Sequence[HistoryValue] = ()) -> list[str]:
    """What is found in the store of a working fleet with these additions."""

    async def main() -> list[str]:
        world = World()
        await world.operations()
        assert await problems_of(world.store) == []
        await world.store.commit(writes)
        world.store._revision = 90
        world.store._history.extend(history)
        return await problems_of(world.store)

    return asyncio.run(main())


def scope_with(scope_name: str, **fields: object) -> Write:
    scope = replace(WEB, name=scope_name, vms=(replace(vm("new-0"), **fields),))
    return Write(SCOPE_KEY.format(scope_name), SCOPE.encode(scope), 0)


def test_store_of_a_working_fleet_is_counted_and_fine() -> None:
    async def main() -> None:
        world = World()
        operations = await world.operations()
        await operations.restart("web-0", by="ann")
        revision = (await world.store.load()).revision
        service = build_service(world.store, world.clock, Timing(), world.make_id)
        await service.engine.load()
        counts, problems = await inspect(service.engine)
        assert (problems, counts["scope"], counts["declared"]) == ([], 2, 1)
        assert counts["history"] == len(await world.store.history())
        assert (await world.store.load()).revision == revision, "it changes nothing"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (
            Write("scope/odd/", b'{"format":2,"value":{}}', 0),
            "scope odd: The stored scope record has format 2; this version reads format 1",
        ),
        (Write("scope/odd/", b"{", 0), "scope odd: The stored scope record is damaged: "),
        (scope_with("new", name="web-0"), "VM web-0 is in new/web-0 and web/web-0; expected one"),
        (
            scope_with("new", address="10.0.0.1"),
            "address 10.0.0.1 is in new/new-0 and web/web-0; expected one",
        ),
        (
            Write("campaign-hosts/c7/0", b'{"format":1,"value":[]}', 0),
            "campaign-hosts c7/0 is left over: campaign c7 is missing",
        ),
        (
            Write("seen/gone/", SEEN.encode(NOON), 0),
            "seen gone is left over: scope gone is missing",
        ),
        (
            Write(DECLARED_KEY.format(2), DECLARED.encode(("host-z",)), 0),
            "declared 2 is left over: declared 1 is missing",
        ),
        (
            Write("webhook/abc/", CURSOR.encode(Cursor(first_number(9999))), 0),
            "webhook abc is after all history entries",
        ),
    ],
)
def test_problem_with_a_record_is_named(write: Write, expected: str) -> None:
    (problem,) = problems_with(write)
    assert problem.startswith(expected)


def test_record_of_an_unreadable_owner_is_not_left_over() -> None:
    """The newer version that wrote the owner knows it."""
    (problem,) = problems_with(
        Write("campaign/c7/", b'{"format":2,"value":{}}', 0),
        Write("campaign-hosts/c7/0", b'{"format":1,"value":[]}', 0),
    )
    assert problem.startswith("campaign c7: ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (HistoryValue(80, b"{"), "history at 80: "),
        (HistoryValue(80, b'[{"by":"a","what":"started"},{}]'), "history at 80: "),
        (HistoryValue(99, b"[]"), "history at 99 is newer than the store, at 90"),
    ],
)
def test_problem_with_the_history_is_named(value: HistoryValue, expected: str) -> None:
    (problem,) = problems_with(history=[value])
    assert problem.startswith(expected)


def test_address_of_vms_on_two_hosts_is_fine() -> None:
    assert problems_with(scope_with("new", address="10.0.0.1", host="host-z")) == []
