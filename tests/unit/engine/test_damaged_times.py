"""A stored time without a time zone, as an editor or a script may leave it: it cannot be compared
with others, so its record is unreadable and stops nothing else.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from msgspec import inspect

from forewarn.core.event import EventType
from forewarn.engine.entry import Entry
from forewarn.engine.record import RecordCodec
from forewarn.engine.transaction import Transaction
from forewarn.engine.unserved import UNSERVED_KEY, Unserved, UnservedReason
from forewarn.history.webhooks import KEY, Cursor
from forewarn.store.base import Record, Write
from tests.unit.engine.hostd_world import NOON, SECOND, Server, World, reported, run

PACKAGES = ("auth", "campaign", "core", "engine", "history", "web")
KINDS = (
    "campaign",
    "clock",
    "hostd",
    "scope",
    "seen",
    "session",
    "shown",
    "token",
    "unserved",
    "webhook",
)
"""The kinds of records with times."""
TIME = re.compile(rb'("\d{4}-\d\d-\d\dT[\d:.]+)Z"')


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        folder = importlib.import_module(f"forewarn.{package}")
        yield folder
        for each in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            yield importlib.import_module(each.name)


def times_of(type_: object, path: str, seen: set[type]) -> Iterator[tuple[str, bool | None]]:
    """The times in a type, each with whether a time zone is required."""
    if isinstance(type_, inspect.DateTimeType):
        yield path, type_.tz
    elif isinstance(type_, inspect.StructType | inspect.NamedTupleType):
        if type_.cls in seen:
            return
        for field in type_.fields:
            yield from times_of(field.type, f"{path}.{field.name}", seen | {type_.cls})
    elif isinstance(type_, inspect.Type):
        for name in type_.__struct_fields__:
            inner = getattr(type_, name)
            for each in inner if isinstance(inner, tuple) else (inner,):
                yield from times_of(each, path, seen)


def test_every_stored_time_needs_a_time_zone() -> None:
    """One without could not be compared with the others: the first comparison would raise."""
    codecs = {
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, RecordCodec)
    }
    stored = [codec.type for codec in codecs if codec.type is not bytes]
    found = {
        path: tz
        for type_ in (*stored, Entry)
        for path, tz in times_of(inspect.type_info(type_), getattr(type_, "__name__", "?"), set())
    }

    assert {"Scope.events.gaps.since", "ManagedHost.rivals", "Entry.at"} <= found.keys()
    assert [path for path, tz in found.items() if not tz] == []


async def write_all(world: World) -> None:
    """A record of every kind that has times. Only one scope has an event."""
    server = world.servers[0]
    await world.daemon("host-a", reported("web-0", scope="web"))
    await world.daemon("host-b", reported("db-0", scope="db"))
    await world.poll("db")  # `web` is not enabled: it needs no notice
    await server.operations.maintain("host-a", type=EventType.REBOOT, by="ann")
    await server.client.post(
        "/api/v1/campaigns",
        json={"type": "Reboot", "hosts": ["host-a"]},
        headers={"authorization": f"Bearer fw_root_{world.secret}"},
    )
    await server.service.sessions.start(server.service.tokens.all()[0], "a")
    unserved = Unserved(NOON, UnservedReason.ERRORS, "", is_confirmed=True)

    def put(transaction: Transaction) -> None:
        transaction.put(UNSERVED_KEY.format("db"), {"db-0": unserved})
        transaction.put(KEY.format("a"), Cursor(0))

    await server.engine.update([UNSERVED_KEY.format("db"), KEY.format("a")], put, by="test")
    await world.pass_time(31 * SECOND)


async def find_record(world: World, kind: str) -> Record:
    found = [
        each for each in (await world.store.load(kind)).records if TIME.search(each.value or b"")
    ]
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_time_without_a_zone_ends_no_server(kind: str) -> None:
    """Every server follows the store, and reads it at its start: one record would end them all."""

    async def test(world: World) -> None:
        await write_all(world)
        damaged = await find_record(world, kind)
        value = TIME.sub(rb'\1"', damaged.value or b"")
        await world.store.commit([Write(damaged.key, value, damaged.revision)])
        await world.pass_time(31 * SECOND)
        assert [server.has_ended for server in world.servers] == [False, False]

        fresh = Server(world.store, world.clock, "server-3", is_confirming=True)
        await fresh.start()
        await world.pass_time(31 * SECOND)
        assert not fresh.has_ended
        assert damaged.key in fresh.engine.unreadable
        await fresh.stop()
        await fresh.engine.close()

    run(test, is_confirming=True)
