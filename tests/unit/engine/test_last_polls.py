"""When each VM polled last: known to every server, for the price of one entry per poll."""

import asyncio
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.fleet import Power, Scope, ScopeKind
from forewarn.engine import last_polls
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.fleetfile.parser import Fleet
from tests.builders import NOON, vm
from tests.unit.engine.test_engine import Deaf, World, run_in_world

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
MINUTE = timedelta(minutes=1)
WEB = Scope(name="web", kind=ScopeKind.SCALE_SET, vms=(vm("web-0"), vm("web-1"), vm("web-2")))
FLEET = Fleet(scopes=(WEB, Scope(name="db", vms=(vm("db"),))))


async def applied(world: World) -> Engine:
    engine = await world.engine()
    await Operations(engine, world.make_id).apply(FLEET, by="ann")
    return engine


async def poll(engine: Engine, *vms: str) -> None:
    """As the metadata application does."""
    for name in vms:
        place, now = engine.board.vms[name], engine.clock.now().timestamp()
        engine.board.polled[name] = now
        if engine.last_polls.must_store(place, name, now):
            await engine.submit(place.scope.name, ask.Seen(), by="poll")


def seen(engine: Engine, scope: str = "web") -> dict[str, datetime]:
    times = engine.last_polls.times(engine.board.scopes[scope].scope)
    return {name: datetime.fromtimestamp(seconds, NOON.tzinfo) for name, seconds in times.items()}


def silent(engine: Engine) -> int:
    engine.last_polls.count_silent(engine.clock.now(), engine.timing)
    return engine.last_polls.silent_count


async def revision(world: World) -> int:
    return (await world.store.load()).revision


def test_each_vm_has_the_time_of_its_own_last_poll() -> None:
    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0", "web-1", "db")
        await world.clock.advance(MINUTE)
        await poll(engine, "web-0")

        assert seen(engine) == {"web-0": NOON + MINUTE, "web-1": NOON}
        assert seen(engine, "db") == {"db": NOON}

    run_in_world(main)


def test_last_polls_survive_a_restart() -> None:
    """They are stored once an hour: what came after the record is lost, not what came before."""

    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0", "db")
        await world.clock.advance(HOUR - MINUTE)
        await poll(engine, "web-1")
        await world.clock.advance(MINUTE)
        await poll(engine, "web-0", "db")
        restarted = await world.engine()

        assert seen(restarted) == {"web-0": NOON + HOUR, "web-1": NOON + HOUR - MINUTE}
        assert seen(restarted, "db") == {"db": NOON + HOUR}

    run_in_world(main)


def test_polls_of_many_vms_are_stored_once_an_hour() -> None:
    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0", "web-1", "web-2")
        before = await revision(world)
        for _ in range(59):
            await world.clock.advance(MINUTE)
            await poll(engine, "web-0", "web-1", "web-2")
        assert await revision(world) == before

        await world.clock.advance(MINUTE)
        await poll(engine, "web-0", "web-1", "web-2")
        assert await revision(world) == before + 1

    run_in_world(main)


def test_first_poll_of_each_vm_is_stored_at_once() -> None:
    """Of a VM that is not known to poll, no host that is away delays an event."""

    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0")
        await world.clock.advance(MINUTE)
        await poll(engine, "web-0", "web-1")
        restarted = await world.engine()

        assert seen(restarted)["web-1"] == NOON + MINUTE
        before = await revision(world)
        await poll(restarted, "web-0", "web-1")
        assert await revision(world) == before, "they are known"

    run_in_world(main)


def test_first_poll_that_the_store_refuses_is_stored_seconds_later() -> None:
    """A poll that comes before does not ask the store again: there may be thousands a second."""

    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0")
        place = engine.board.vms["web-1"]
        assert isinstance(world.store, Deaf)
        world.store.is_deaf = True
        now = engine.board.polled["web-1"] = engine.clock.now().timestamp()
        await engine.record_poll(place)
        assert not engine.last_polls.must_store(place, "web-1", now + 4)
        assert engine.last_polls.must_store(place, "web-1", now + 5)

        world.store.is_deaf = False
        await world.clock.advance(timedelta(seconds=5))
        await poll(engine, "web-1")
        assert not engine.last_polls.must_store(place, "web-1", engine.clock.now().timestamp())

    run_in_world(main, Deaf())


def test_vms_that_poll_different_servers_are_known_to_all() -> None:
    """Each server stores what the others cannot know, and no more often than once an hour."""

    async def main(world: World) -> None:
        one, two = await applied(world), await world.engine()
        following = [asyncio.create_task(each.follow()) for each in (one, two)]
        before = await revision(world)
        for _ in range(4 * 60 + 5):
            await poll(one, "web-0")
            await poll(two, "web-1", "web-2")
            for each in (one, two):
                await each.catch_up()
            await world.clock.advance(MINUTE)
        now = world.clock.now()

        assert await revision(world) - before <= 2 * 5 + 2, "two VMs began to poll"
        for each in (one, two):
            assert set(seen(each)) == {"web-0", "web-1", "web-2"}
            assert min(seen(each).values()) > now - HOUR - 2 * MINUTE
        for task in following:
            task.cancel()

    run_in_world(main)


def test_server_that_knows_nothing_new_stores_nothing() -> None:
    """Behind a load balancer every server sees polls of every VM."""

    async def main(world: World) -> None:
        one, two = await applied(world), await world.engine()
        await poll(one, "web-0", "web-1")
        await two.catch_up()
        before = await revision(world)
        await world.clock.advance(MINUTE)
        await poll(two, "web-0", "web-1")
        await world.clock.advance(HOUR - MINUTE)
        await poll(one, "web-0", "web-1")
        assert await revision(world) == before + 1
        await two.catch_up()
        await poll(two, "web-0", "web-1")
        assert await revision(world) == before + 1

    run_in_world(main)


def test_last_poll_of_the_only_vm_of_a_scope_stays_when_another_one_joins() -> None:
    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "db")
        web, db = FLEET.scopes
        grown = replace(db, kind=ScopeKind.SCALE_SET, vms=(*db.vms, vm("db-1")))
        await Operations(engine, world.make_id).apply(Fleet(scopes=(web, grown)), by="ann")
        assert seen(await world.engine(), "db") == {"db": NOON}

    run_in_world(main)


def test_last_poll_stays_when_a_vm_moves_and_goes_when_it_is_deleted() -> None:
    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0", "web-1", "db")
        web, db = FLEET.scopes
        moved = replace(web, vms=(replace(web.vms[0], host="host-z"), web.vms[2]))
        await Operations(engine, world.make_id).apply(Fleet(scopes=(moved, db)), by="ann")
        assert seen(engine) == {"web-0": NOON}
        assert engine.board.polled.keys() == {"web-0", "db"}

        await Operations(engine, world.make_id).apply(Fleet(scopes=(db,)), by="ann")
        assert engine.board.polled.keys() == {"db"}
        keys = {record.key for record in (await world.store.load()).records}
        assert not keys & {"scope/web/", "seen/web/", "polled/web/"}

    run_in_world(main)


def test_running_vm_without_a_poll_for_more_than_an_hour_is_silent() -> None:
    """Only in a scope that is polled: where nobody polls, nobody has stopped."""

    async def main(world: World) -> None:
        engine = await applied(world)
        assert silent(engine) == 0
        await poll(engine, "web-0", "web-1", "web-2", "db")
        await world.clock.advance(HOUR)
        assert silent(engine) == 0
        await poll(engine, "web-0")
        await world.clock.advance(MINUTE)
        assert silent(engine) == 3
        await poll(engine, "db")
        assert silent(engine) == 2
        place = engine.board.scopes["web"]
        stopped = replace(place.scope.vms[1], power=Power.STOPPED)
        vms = (place.scope.vms[0], stopped, place.scope.vms[2])
        engine.board.publish(replace(place.scope, vms=vms), place.revision)
        assert silent(engine) == 1
        await world.clock.advance(DAY + 2 * HOUR)
        assert silent(engine) == 0

    run_in_world(main)


def test_silent_vms_of_a_deleted_scope_are_not_counted() -> None:
    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0", "db")
        await world.clock.advance(2 * HOUR)
        assert silent(engine) == 4
        engine.board.withdraw("web", 99)
        assert silent(engine) == 1

    run_in_world(main)


def test_large_fleet_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_polls, "VMS_PER_COUNT_MAX", 2)

    async def main(world: World) -> None:
        engine = await applied(world)
        await poll(engine, "web-0", "db")
        await world.clock.advance(2 * HOUR)
        counts = {silent(engine) for _ in range(4)}
        assert len(counts) > 1
        assert silent(engine) == 4

    run_in_world(main)
