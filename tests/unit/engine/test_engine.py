"""Submitting: durable, idempotent, never the wrong winner."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import astuple

import forewarn
from forewarn.core import command as ask
from forewarn.core.change import ChangeKind
from forewarn.core.event import EventType, Status
from forewarn.core.fleet import Approval, Policy, Scope, ScopeKind
from forewarn.core.timing import DURATION, Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import (
    AlreadyPending,
    EventEnded,
    StoreLost,
    Unavailable,
    UnknownEvent,
    UnknownHost,
    UnknownScope,
    UnknownVm,
)
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.store.base import Record, RevisionCheck, Snapshot, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, guid, restart, vm
from tests.history import entries_of

FLEET = Fleet(
    scopes=(
        Scope(
            name="web",
            kind=ScopeKind.AVAILABILITY_SET,
            vms=(
                vm("web-0", address="10.0.0.1"),
                vm("web-1", domain=1, host="host-b", address="10.0.0.2"),
            ),
        ),
        Scope(name="db", kind=ScopeKind.VM, vms=(vm("db", address="10.0.0.3"),)),
    ),
    hosts=("host-a", "host-b", "host-c"),
)


class World:
    """A store and a clock; `engine()` is another server on the same store."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = VirtualClock(NOON)
        self.count = 0

    def make_id(self) -> str:
        self.count += 1
        return guid(self.count)

    async def engine(self) -> Engine:
        engine = Engine(self.store, self.clock, Timing())
        await engine.load()
        return engine

    async def operations(self) -> Operations:
        """A server with the fleet, its first scope polled."""
        engine = await self.engine()
        operations = Operations(engine, self.make_id)
        await operations.apply(FLEET, by="test")
        await engine.seen(engine.board.scopes["web"])
        return operations


def run_in_world(
    main: Callable[[World], Awaitable[None]], store: MemoryStore | None = None
) -> None:
    async def run() -> None:
        await main(World(store))

    asyncio.run(run())


def test_change_and_its_history_are_one_commit() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        before = len(await entries_of(world.store))
        result = await operations.restart("web-0", by="ann")

        assert result is not None
        (written,) = (await entries_of(world.store))[before:]
        assert (written.at, written.by, written.scope) == (NOON, "ann", "web")
        assert (written.what, written.event) == (ChangeKind.SCHEDULED, result.event.id)
        other = await world.engine()
        assert other.board.scopes["web"].scope.events == (result.event,)

    run_in_world(main)


def test_a_command_that_changes_nothing_writes_nothing() -> None:
    """Approving again is a 200 and no commit."""

    async def main(world: World) -> None:
        operations = await world.operations()
        result = await operations.restart("web-0", by="ann")
        assert result is not None
        await operations.approve(result.event.id, by="ann", vm="web-1")
        revision = (await world.store.load()).revision
        await operations.approve(result.event.id, by="ann", vm="web-1")

        assert (await world.store.load()).revision == revision

    run_in_world(main)


def test_concurrent_approvals_on_two_servers_both_count() -> None:
    """The one that comes second reads again and decides again."""

    async def main(world: World) -> None:
        operations = await world.operations()
        one, two = await world.engine(), await world.engine()
        result = await operations.restart("web-0", by="ann")
        assert result is not None
        for engine in (one, two):
            await engine.load()
        scope = FLEET.scopes[0]
        policy = Policy(approval=Approval.ALL)
        await one.submit(
            "web", ask.SetMembers(kind=scope.kind, policy=policy, vms=scope.vms), by="ann"
        )
        results = await asyncio.gather(
            one.submit("web", ask.Approve(event_ids=(result.event.id,), vm="web-0"), by="web-0"),
            two.submit("web", ask.Approve(event_ids=(result.event.id,), vm="web-1"), by="web-1"),
        )

        stored = (await world.engine()).board.scopes["web"].scope
        assert set(stored.events[0].approvals) == {"web-0", "web-1"}
        assert stored.events[0].status is Status.STARTED
        assert len(results) == 2

    run_in_world(main)


class LosesReplies(MemoryStore):
    """Every commit happens, and every other reply is lost."""

    calls = 0

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        revision = await super().commit(writes, checks, entries)
        self.calls += 1
        if self.calls % 2 == 0:
            raise StoreLost("reply lost")
        return revision


def test_lost_commit_reply_does_not_repeat_work() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        first = await operations.restart("web-0", by="ann")
        second = await operations.restart("web-1", by="ann")

        assert first is not None
        assert second is not None
        scope = (await world.engine()).board.scopes["web"].scope
        assert [event.resources for event in scope.events] == [("web-0",), ("web-1",)]

    run_in_world(main, LosesReplies())


class AlwaysContested(MemoryStore):
    """Somebody else is always faster."""

    is_contested = False

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        if self.is_contested:
            for write in writes:
                record = self._records[write.key]
                await super().commit([Write(write.key, record.value, record.revision)])
        return await super().commit(writes, checks, entries)


def test_repeated_conflicts_end_in_an_error() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        assert isinstance(world.store, AlwaysContested)
        world.store.is_contested = True

        with pytest.raises(Unavailable, match="too many clients change scope web at once"):
            await operations.restart("web-0", by="ann")

    run_in_world(main, AlwaysContested())


class Deaf(MemoryStore):
    """Answers nothing but what it was asked before it went deaf."""

    is_deaf = False

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        if self.is_deaf:
            raise StoreLost("no answer")
        return await super().commit(writes, checks, entries)

    async def get(self, key: str) -> Record:
        if self.is_deaf:
            raise StoreLost("no answer")
        return await super().get(key)

    async def load(self, prefix: str = "") -> Snapshot:
        if self.is_deaf:
            raise StoreLost("no answer")
        return await super().load(prefix)


def test_poll_is_answered_while_the_store_is_lost() -> None:
    """The document in memory is still right; the guest must not be kept from it."""

    async def main(world: World) -> None:
        operations = await world.operations()
        engine = operations._engine
        assert isinstance(world.store, Deaf)
        place = engine.board.scopes["db"]
        world.store.is_deaf = True
        await engine.seen(place)
        assert place.scope.seen_at is None
        assert place.fresh_until == (NOON + timedelta(seconds=5)).timestamp()

        world.store.is_deaf = False
        await engine.seen(place)
        assert place.scope.seen_at == NOON

    run_in_world(main, Deaf())


def test_the_first_poll_is_recorded_before_it_is_answered() -> None:
    """Whoever restarts a VM right after its first poll must find it enabled."""

    async def main(world: World) -> None:
        operations = await world.operations()
        assert await operations.restart("web-0", by="ann") is not None
        assert await operations.restart("db", by="ann") is None

    run_in_world(main)


def test_a_refused_fleet_changes_nothing() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        await operations.restart("web-0", by="ann")
        revision = (await world.store.load()).revision
        web = FLEET.scopes[0]
        moved = Scope(name="web", kind=web.kind, vms=(vm("web-0", domain=4), web.vms[1]))

        with pytest.raises(Exception, match="cannot change its update domain"):
            await operations.apply(
                Fleet(scopes=(moved, Scope(name="new", kind=ScopeKind.SCALE_SET)), hosts=()),
                by="ann",
            )
        assert (await world.store.load()).revision == revision

    run_in_world(main)


def test_dry_run_returns_the_difference_and_changes_nothing() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        web = FLEET.scopes[0]
        wanted = Fleet(
            scopes=(Scope(name="web", kind=web.kind, vms=(web.vms[0], vm("web-9"))),),
            hosts=("host-a",),
        )
        planned = await operations.apply(wanted, by="ann", dry_run=True)

        assert astuple(planned)[:5] == ((), ("web",), ("db",), ("web-9",), ("db", "web-1"))
        assert operations.fleet() != wanted
        assert await operations.apply(wanted, by="ann") == planned
        assert operations.fleet() == wanted
        assert not any(astuple(await operations.apply(wanted, by="ann")))

    run_in_world(main)


def test_a_vm_changes_scopes_without_ever_being_in_two() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        web, db = FLEET.scopes
        bigger = Scope(name="db", kind=ScopeKind.SCALE_SET, vms=(*db.vms, web.vms[0]))
        smaller = Scope(name="web", kind=web.kind, vms=web.vms[1:])
        await operations.apply(Fleet(scopes=(bigger, smaller), hosts=FLEET.hosts), by="ann")

        fresh = await world.engine()
        assert fresh.board.find_vm("web-0")[0].scope.name == "db"
        assert fresh.board.addresses["10.0.0.1"] == "web-0"

    run_in_world(main)


def test_a_large_fleet_takes_several_commits() -> None:
    async def main(world: World) -> None:
        engine = await world.engine()
        operations = Operations(engine, world.make_id)
        many = tuple(
            Scope(name=f"s{number}", kind=ScopeKind.VM, vms=(vm(f"v{number}"),))
            for number in range(250)
        )
        await operations.apply(Fleet(scopes=many, hosts=()), by="ann", digest="d1")

        assert len((await world.store.load("scope/")).records) == 250
        assert (await world.store.load()).revision == 3
        assert Operations(await world.engine(), world.make_id).applied_digest() == "d1"

    run_in_world(main)


def test_concurrent_applies_do_not_mix() -> None:
    """Whichever server the second one asks, the fleet is then what the second one said."""

    async def main(world: World) -> None:
        operations = await world.operations()
        other = Operations(await world.engine(), world.make_id)
        await operations.apply(Fleet(scopes=FLEET.scopes[:1], hosts=()), by="ann")
        await other.apply(Fleet(scopes=FLEET.scopes[1:], hosts=()), by="bob")

        stored = Operations(await world.engine(), world.make_id).fleet()
        assert [scope.name for scope in stored.scopes] == ["db"]

    run_in_world(main)


def test_maintenance_of_a_host_is_one_event_for_each_scope() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        result = await operations.maintain("host-a", type=EventType.REBOOT, by="ann")

        assert [(one.scope.name, one.event.resources) for one in result] == [
            ("db", ("db",)),
            ("web", ("web-0",)),
        ]
        with pytest.raises(AlreadyPending):
            await operations.maintain("host-a", type=EventType.REBOOT, by="ann")
        assert await operations.maintain("host-c", type=EventType.REBOOT, by="ann") == []

    run_in_world(main)


def test_unknown_and_ended_events_are_different_errors() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        result = await operations.restart("web-0", by="ann")
        assert result is not None
        await operations.cancel(result.event.id.lower(), by="ann")

        with pytest.raises(EventEnded, match="is over: canceled at"):
            operations.find_event(result.event.id)
        with pytest.raises(UnknownEvent):
            operations.find_event(guid(999))
        with pytest.raises(UnknownVm):
            await operations.restart("nobody", by="ann")
        with pytest.raises(UnknownHost):
            await operations.fail("nowhere", by="ann")
        with pytest.raises(UnknownScope):
            await operations._engine.submit("nothing", restart(), by="ann")

    run_in_world(main)


class Crew:
    """Loops at work on an engine, under the world's clock."""

    def __init__(
        self,
        engine: Engine,
        clock: VirtualClock,
        *,
        failing: tuple[str, ...] = (),
        worker: str = "w1",
        durations: Mapping[EventType, timedelta] = DURATION,
    ) -> None:
        platform = SimulatedPlatform(
            clock, durations=durations, hosts=lambda: engine.board.hosts, failing=set(failing)
        )
        loops = Worker(engine, platform, worker=worker, impact_limit=timedelta(hours=1))
        self.task = asyncio.create_task(loops.run())

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_unapproved_event_completes_by_itself() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        crew = Crew(operations._engine, world.clock)
        await operations.redeploy("web-0", by="ann")
        seen = []
        for minutes in (9, 1, 9, 2):
            await world.clock.advance(minutes * MINUTE)
            scope = operations._engine.board.scopes["web"].scope
            seen.append(
                (
                    scope.incarnation,
                    [str(event.status) for event in scope.events],
                    scope.vms[0].host,
                )
            )
        await crew.leave()

        assert seen == [
            (2, ["Scheduled"], "host-a"),
            (3, ["Started"], "host-a"),
            (3, ["Started"], "host-a"),
            (4, [], "host-b"),
        ]

    run_in_world(main)


def test_impact_of_a_dead_server_is_finished_by_another() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        first = Crew(operations._engine, world.clock, worker="dies")
        await operations.redeploy("web-0", by="ann")
        await world.clock.advance(11 * MINUTE)
        assert operations._engine.board.scopes["web"].scope.impacts[0].claimed_by == "dies"
        await first.leave()

        heir = await world.engine()
        second = Crew(heir, world.clock, worker="heir")
        await world.clock.advance(MINUTE)
        impact = heir.board.scopes["web"].scope.impacts[0]
        assert (impact.claimed_by, impact.tries) == ("heir", 2)
        await world.clock.advance(11 * MINUTE)
        await second.leave()
        assert heir.board.scopes["web"].scope.events == ()

    run_in_world(main)


def test_two_servers_share_the_work_and_do_it_once() -> None:
    class Counting:
        """Counts how often it is called for each VM."""

        def __init__(self) -> None:
            self.calls: list[str] = []

        async def run_impact(self, order: ImpactRequest) -> ImpactResult:
            self.calls.append(order.vm.name)
            return ImpactResult()

    async def main(world: World) -> None:
        operations = await world.operations()
        platform = Counting()
        engines = [operations._engine, await world.engine()]
        crews = [
            asyncio.create_task(
                Worker(engine, platform, worker=f"w{number}", impact_limit=MINUTE).run()
            )
            for number, engine in enumerate(engines)
        ]
        await operations.restart("web-0", by="ann")
        await operations.restart("web-1", by="ann")
        await world.clock.advance(20 * MINUTE)
        for crew in crews:
            crew.cancel()
        await asyncio.gather(*crews, return_exceptions=True)

        assert sorted(platform.calls) == ["web-0", "web-1"]
        assert engines[0].board.scopes["web"].scope == engines[1].board.scopes["web"].scope

    run_in_world(main)


def test_failing_impact_is_retried_for_the_retry_window() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        crew = Crew(
            operations._engine,
            world.clock,
            failing=("web-0",),
            durations=dict.fromkeys(EventType, timedelta(0)),
        )
        await operations.restart("web-0", by="ann")
        await world.clock.advance(timedelta(hours=2))
        await crew.leave()

        scope = operations._engine.board.scopes["web"].scope
        assert (scope.events, scope.ended[-1].how) == ((), "failed")
        entries = await entries_of(world.store)
        assert [str(entry.what) for entry in entries].count("impact-failed") == 9

    run_in_world(main)


def test_no_more_impacts_at_once_than_allowed() -> None:
    class Busy:
        """Knows how many it is doing at once."""

        now_busy, most = 0, 0

        def __init__(self, clock: VirtualClock) -> None:
            self.clock = clock

        async def run_impact(self, order: ImpactRequest) -> ImpactResult:
            self.now_busy += 1
            self.most = max(self.most, self.now_busy)
            await self.clock.sleep_until(self.clock.now() + MINUTE)
            self.now_busy -= 1
            return ImpactResult()

    async def main(world: World) -> None:
        operations = await world.operations()
        many = tuple(
            Scope(name=f"s{number}", kind=ScopeKind.VM, vms=(vm(f"v{number}"),))
            for number in range(10)
        )
        await operations.apply(Fleet(scopes=many, hosts=()), by="ann")
        platform = Busy(world.clock)
        loops = Worker(
            operations._engine, platform, worker="w", impacts_max=3, impact_limit=timedelta(hours=1)
        )
        task = asyncio.create_task(loops.run())
        await operations.maintain("host-a", type=EventType.FREEZE, by="ann")
        await world.clock.advance(timedelta(minutes=30))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert platform.most == 3
        assert operations._engine.board.events == {}

    run_in_world(main)


def test_only_the_engine_commits() -> None:
    """A commit elsewhere would bypass the conflicts, the history and the board."""
    sources = Path(forewarn.__file__).parent
    committing = {
        str(path.relative_to(sources))
        for path in sources.rglob("*.py")
        if "store.commit(" in path.read_text()
    }

    assert committing == {"engine/engine.py"}
