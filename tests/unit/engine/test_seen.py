"""When a scope was last polled is a small record of its own, beside the scope's."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.change import ChangeKind
from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.core.lifecycle import is_enabled
from forewarn.core.machine import Outcome
from forewarn.engine.board import Board
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.errors import UnknownScope
from forewarn.fleetfile.parser import Fleet
from forewarn.store.base import Record, RevisionCheck, Write
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, guid, vm
from tests.history import entries_of
from tests.unit.engine.test_engine import FLEET, World, run_in_world
from tests.unit.engine.test_record_explicit import SCOPE_WRITTEN_BY_1

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)
EARLIER = NOON - timedelta(minutes=1)
"""The seen_at in SCOPE_WRITTEN_BY_1."""
SOLO = Fleet(scopes=(FLEET.scopes[1],), hosts=())


async def keys(store: MemoryStore) -> dict[str, Record]:
    return {record.key: record for record in (await store.load()).records}


async def poll(engine: Engine, scope: str) -> None:
    await engine.submit(scope, ask.Seen(), by="poll")


async def restart(engine: Engine, scope: str, vm: str, number: int = 1) -> Outcome:
    return await engine.submit(scope, ask.Restart(vm=vm, event_id=guid(number)), by="ann")


async def silent(store: MemoryStore) -> list[str]:
    entries = await entries_of(store)
    return [entry.event for entry in entries if entry.what is ChangeKind.EXECUTED_SILENTLY]


async def with_record_of_an_earlier_version(world: World) -> Engine:
    await world.store.commit([Write("scope/web/", SCOPE_WRITTEN_BY_1, 0)])
    return await world.engine()


def test_recording_a_poll_does_not_write_the_scope() -> None:
    """The scope's record may be large, and every scope is polled every hour."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        before = await keys(world.store)
        place = engine.board.scopes["db"]
        shown = (place.revision, place.scope.incarnation)
        await poll(engine, "db")
        after = await keys(world.store)

        assert {key for key in after if after[key] != before.get(key)} == {"seen/db/"}
        assert after["seen/db/"].value == b'{"format":1,"value":"2026-03-04T12:00:00Z"}'
        assert (place.revision, place.scope.incarnation) == shown
        assert place.scope.seen_at == NOON
        assert place.fresh_until == (NOON + HOUR).timestamp()

    run_in_world(main)


def test_a_scope_is_stored_without_its_polls() -> None:
    """Else an older value would come back with every change of the scope."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        outcome = await restart(engine, "web", "web-0")
        stored = await keys(world.store)

        assert outcome.scope.seen_at == NOON
        assert b"seen_at" not in (stored["scope/web/"].value or b"")
        fresh = await world.engine()
        assert fresh.board.scopes["web"].scope == engine.board.scopes["web"].scope
        assert fresh.board.scopes["web"].fresh_until == (NOON + HOUR).timestamp()

    run_in_world(main)


def test_polls_within_the_hour_are_recorded_once() -> None:
    """Also if the scope is polled at several servers."""

    async def main(world: World) -> None:
        one, two = (await world.operations())._engine, await world.engine()
        await poll(one, "db")
        revision = (await world.store.load()).revision
        await asyncio.gather(poll(one, "db"), poll(two, "db"))
        assert (await world.store.load()).revision == revision

        await world.clock.advance(HOUR)
        await poll(two, "db")
        assert two.board.scopes["db"].scope.seen_at == NOON + HOUR

    run_in_world(main)


def test_poll_at_one_server_enables_the_scope_at_another() -> None:
    async def main(world: World) -> None:
        one, two = (await world.operations())._engine, await world.engine()
        following = asyncio.create_task(two.follow())
        await poll(one, "db")
        async with asyncio.timeout(5):
            while two.board.scopes["db"].scope.seen_at is None:
                await asyncio.sleep(0)

        assert two.board.scopes["db"].fresh_until == (NOON + HOUR).timestamp()
        assert (await restart(two, "db", "db")).scope.events
        following.cancel()

    run_in_world(main)


class Counting(MemoryStore):
    """Notes what each commit writes and compares, and runs `deed` before one."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[tuple[set[str], set[str]]] = []
        self.deed: Sequence[Write] = ()

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        self.commits.append(({one.key for one in writes}, {one.key for one in checks}))
        if self.deed:
            deed, self.deed = self.deed, ()
            await super().commit(deed)
        return await super().commit(writes, checks, entries)


def test_server_that_missed_a_poll_gives_notice_anyway() -> None:
    """The guest got its document from another server, so it relies on being told."""

    async def main(world: World) -> None:
        one, two = (await world.operations())._engine, await world.engine()
        await poll(one, "db")
        assert not is_enabled(two.board.scopes["db"].scope, NOON, two.timing)
        outcome = await restart(two, "db", "db")

        assert [event.id for event in outcome.scope.events] == [guid(1)]
        assert await silent(world.store) == []

    run_in_world(main)


def test_poll_recorded_while_a_restart_is_committed_is_honoured() -> None:
    """Between the decision that nobody polls and its commit."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        assert isinstance(world.store, Counting)
        world.store.deed = [Write("seen/db/", b'{"format":1,"value":"2026-03-04T12:00:00Z"}', 0)]
        outcome = await restart(engine, "db", "db")

        assert [event.id for event in outcome.scope.events] == [guid(1)]
        assert await silent(world.store) == []

    run_in_world(main, Counting())


def test_only_a_decision_that_nobody_polls_compares_the_polls() -> None:
    """Else polls and commits of the same scope would get in each other's way."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        assert isinstance(world.store, Counting)
        commits = world.store.commits
        commits.clear()
        await restart(engine, "web", "web-0", 1)
        await restart(engine, "db", "db", 2)
        await poll(engine, "db")

        assert commits == [
            ({"scope/web/"}, {"shown"}),
            ({"scope/db/"}, {"shown", "seen/db/"}),
            ({"seen/db/"}, set()),
        ]

    run_in_world(main, Counting())


def test_poll_recorded_during_a_commit_of_its_scope_stays() -> None:
    """The commit publishes the scope as it was decided, before the poll."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        place = engine.board.scopes["db"]
        await asyncio.gather(
            engine.submit("db", ask.Evict(vm="db", event_id=guid(1)), by="ann"), poll(engine, "db")
        )

        assert (place.scope.seen_at, len(place.scope.events)) == (NOON, 1)

    run_in_world(main)


def test_polls_stored_by_an_earlier_version_count() -> None:
    """An upgrade must not turn an announced restart into a silent one."""

    async def main(world: World) -> None:
        engine = await with_record_of_an_earlier_version(world)
        place = engine.board.scopes["web"]

        assert (place.scope.seen_at, place.fresh_until) == (EARLIER, 0.0)
        outcome = await restart(engine, "web", "web-1", 2)
        assert outcome.scope.event(guid(2)) is not None

    run_in_world(main)


def test_commit_keeps_the_polls_stored_by_an_earlier_version() -> None:
    async def main(world: World) -> None:
        engine = await with_record_of_an_earlier_version(world)
        await restart(engine, "web", "web-1", 2)
        stored = await keys(world.store)

        assert b"seen_at" not in (stored["scope/web/"].value or b"")
        assert stored["seen/web/"].value == b'{"format":1,"value":"2026-03-04T11:59:00Z"}'
        for each in (engine, await world.engine()):
            assert each.board.scopes["web"].scope.seen_at == EARLIER

    run_in_world(main)


def test_next_poll_replaces_what_an_earlier_version_stored() -> None:
    """Also within the hour: the scope's record may lose it."""

    async def main(world: World) -> None:
        engine = await with_record_of_an_earlier_version(world)
        await poll(engine, "web")
        await poll(engine, "web")

        assert engine.board.scopes["web"].fresh_until == (EARLIER + HOUR).timestamp()
        for each in (engine, await world.engine()):
            assert each.board.scopes["web"].scope.seen_at == EARLIER

        await world.clock.advance(HOUR)
        await poll(engine, "web")
        for each in (engine, await world.engine()):  # the scope's own record is older
            assert each.board.scopes["web"].scope.seen_at == NOON + HOUR

    run_in_world(main)


@pytest.mark.parametrize("command", [ask.Retire(), "apply"])
def test_scope_created_again_starts_unseen(command: ask.Retire | str) -> None:
    """Its VM is another one: nobody has polled yet."""

    async def main(world: World) -> None:
        operations = await world.operations()
        engine = operations._engine
        await poll(engine, "db")
        if isinstance(command, ask.Retire):
            await engine.submit("db", command, by="ann")
        else:
            await operations.apply(Fleet(scopes=FLEET.scopes[:1], hosts=()), by="ann")
        assert "seen/db/" not in await keys(world.store)

        await operations.apply(FLEET, by="ann")
        for each in (engine, await world.engine()):
            assert each.board.scopes["db"].scope.seen_at is None
            assert each.board.scopes["db"].fresh_until == 0.0
        await restart(engine, "db", "db")
        assert await silent(world.store) == [guid(1)]

    run_in_world(main)


def test_deletion_takes_a_poll_along_that_this_server_missed() -> None:
    async def main(world: World) -> None:
        one, two = (await world.operations())._engine, await world.engine()
        await poll(one, "db")
        await two.submit("db", ask.Retire(), by="ann")

        assert "seen/db/" not in await keys(world.store)

    run_in_world(main)


def test_poll_recorded_after_a_deletion_does_not_enable_the_next_scope() -> None:
    """The server that recorded it had not heard of the deletion."""

    async def main(world: World) -> None:
        operations = await world.operations()
        one, two = operations._engine, await world.engine()
        await one.submit("db", ask.Retire(), by="ann")
        await poll(two, "db")
        assert "seen/db/" in await keys(world.store)

        await one.load()
        await operations.apply(FLEET, by="ann")
        for each in (one, await world.engine()):
            assert each.board.scopes["db"].scope.seen_at is None
        assert "seen/db/" not in await keys(world.store)
        await two.load()
        assert two.board.scopes["db"].scope == one.board.scopes["db"].scope
        await poll(two, "db")
        assert two.board.scopes["db"].scope.seen_at == NOON

    run_in_world(main)


def test_polls_of_a_scope_that_becomes_readable_are_known() -> None:
    """A newer server wrote the scope; polls were recorded meanwhile."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        stored = await keys(world.store)
        newer = b'{"format":1,"value":{"name":"web","colour":"red"}}'
        at = await world.store.commit([Write("scope/web/", newer, stored["scope/web/"].revision)])
        fresh = await world.engine()
        assert "web" not in fresh.board.scopes
        await world.store.commit([Write("scope/web/", stored["scope/web/"].value, at)])
        await fresh.load()

        assert fresh.board.scopes["web"].scope == engine.board.scopes["web"].scope
        assert fresh.board.scopes["web"].fresh_until == (NOON + HOUR).timestamp()

    run_in_world(main)


def test_poll_of_an_unknown_scope_is_refused() -> None:
    """After looking: another server may have created the scope."""

    async def main(world: World) -> None:
        one = await world.engine()
        two = Operations(await world.engine(), world.make_id)
        with pytest.raises(UnknownScope, match="there is no scope 'db'"):
            await poll(one, "db")
        await two.apply(SOLO, by="ann")
        await poll(one, "db")

        assert one.board.scopes["db"].scope.seen_at == NOON

    run_in_world(main)


def test_poll_starts_no_event_and_the_first_is_in_the_history() -> None:
    """A tick does that; a poll costs the same however many events its scope has."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        await engine.submit("db", ask.Evict(vm="db", event_id=guid(1)), by="ann")
        await world.clock.advance(HOUR)
        count = len(await entries_of(world.store))
        await poll(engine, "db")
        await world.clock.advance(2 * HOUR)
        await poll(engine, "db")

        new = (await entries_of(world.store))[count:]
        assert [(entry.what, entry.scope, entry.by) for entry in new] == [
            (ChangeKind.ENABLED, "db", "poll")
        ]

    run_in_world(main)


class Untouched(tuple[Vm, ...]):
    """VMs that fail the test if anything goes through them."""

    def __iter__(self) -> Iterator[Vm]:
        return pytest.fail("a poll went through the VMs of its scope")


def test_poll_of_a_large_scope_costs_no_more_than_of_a_small_one() -> None:
    """Every scope of a large fleet is polled."""

    async def main(world: World) -> None:
        engine = (await world.operations())._engine
        place = engine.board.scopes["db"]
        place.scope = replace(place.scope, vms=Untouched(place.scope.vms))
        engine.board.subscribe(lambda _: pytest.fail("a poll is not a change of the scope"))
        await poll(engine, "db")

        assert place.scope.seen_at == NOON

    run_in_world(main)


def test_the_later_of_two_recorded_polls_counts() -> None:
    """The clocks of servers differ, and updates arrive late."""
    board = Board(HOUR.total_seconds())
    board.publish(Scope(name="web", kind=ScopeKind.VM, vms=(vm("web"),), seen_at=NOON), 1)
    assert board.scopes["web"].fresh_until == 0.0
    board.see("web", NOON - DAY, 2)
    assert board.scopes["web"].scope.seen_at == NOON
    board.see("web", NOON + DAY, 3)
    board.publish(replace(board.scopes["web"].scope, seen_at=None, incarnation=2), 4)

    assert board.scopes["web"].scope.seen_at == NOON + DAY
    assert board.scopes["web"].fresh_until == (NOON + DAY + HOUR).timestamp()
