"""Bad days: stores that go away, drivers that misbehave, two who do the same at once.

Nothing is lost, doubled or mixed.
"""

import asyncio
import errno
from collections.abc import Sequence
from datetime import timedelta

import pytest

from forewarn.core import command as ask
from forewarn.core.event import EventType
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.engine.entry import Entry
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import StoreLost, StoreUnusable, Unavailable, UnknownEvent
from forewarn.fleetfile.parser import Fleet
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import RevisionCheck, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, guid, vm
from tests.unit.engine.test_engine import FLEET, Deaf, World, run_in_world


def many(prefix: str, count: int) -> Fleet:
    """VMs, each in a scope of its own. Their names do not depend on the prefix."""
    scopes = tuple(
        Scope(name=f"{prefix}{number}", kind=ScopeKind.SCALE_SET, vms=(vm(f"v{number}"),))
        for number in range(count)
    )
    return Fleet(scopes=scopes, hosts=())


class FailsAt(MemoryStore):
    """Goes away at the given commit, once."""

    calls, fails_at = 0, 0

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        self.calls += 1
        if self.calls == self.fails_at:
            raise StoreUnusable("the disk is full")
        return await super().commit(writes, checks, entries)


def test_fleet_file_applied_in_part_is_applied_again() -> None:
    """Else its other VMs would be strangers for ever."""

    async def main(world: World) -> None:
        assert isinstance(world.store, FailsAt)
        operations = Operations(await world.engine(), world.make_id)
        world.store.fails_at = 2
        with pytest.raises(StoreUnusable):
            await operations.apply(many("s", 250), by="fleet file", digest="d1")

        again = Operations(await world.engine(), world.make_id)
        assert again.applied_digest() == ""
        await again.apply(many("s", 250), by="fleet file", digest="d1")
        assert (len(again.fleet().scopes), again.applied_digest()) == (250, "d1")

    run_in_world(main, FailsAt())


class Slow(MemoryStore):
    """Lets others have a turn before every commit."""

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().commit(writes, checks, entries)


@pytest.mark.parametrize("servers", [1, 2])
def test_two_large_fleets_at_once_do_not_mix(servers: int) -> None:
    """On one server they take turns; on two the later one is told to try again.

    No VM is ever in two scopes.
    """

    async def main(world: World) -> None:
        first = Operations(await world.engine(), world.make_id)
        second = first if servers == 1 else Operations(await world.engine(), world.make_id)
        results = await asyncio.gather(
            first.apply(many("a", 250), by="ann"),
            second.apply(many("b", 250), by="bob"),
            return_exceptions=True,
        )
        assert all(
            not isinstance(result, BaseException) or isinstance(result, Unavailable)
            for result in results
        )
        if servers == 2:
            assert any(isinstance(result, Unavailable) for result in results)

        scopes = Operations(await world.engine(), world.make_id).fleet().scopes
        members = [member.name for scope in scopes for member in scope.vms]
        assert len(members) == len(set(members))

    run_in_world(main, Slow())


class Driver:
    """Counts its calls, and does what it is told."""

    def __init__(self, world: World, deed: str = "done") -> None:
        self.world, self.deed, self.tries = world, deed, list[int]()

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        self.tries.append(order.tries)
        if self.deed == "none":
            return None  # type: ignore[return-value]
        if self.deed == "cancel":
            raise asyncio.CancelledError
        await self.world.clock.sleep_until(self.world.clock.now() + MINUTE)
        return ImpactResult()


async def at_work(operations: Operations, driver: Driver) -> "asyncio.Task[None]":
    loops = Worker(operations._engine, driver, worker="w1", impact_limit=timedelta(hours=1))
    task = asyncio.create_task(loops.run())
    await asyncio.sleep(0)
    return task


async def ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_impact_done_while_the_store_was_lost_is_not_repeated() -> None:
    async def main(world: World) -> None:
        assert isinstance(world.store, Deaf)
        operations = await world.operations()
        driver = Driver(world)
        task = await at_work(operations, driver)
        outcome = await operations.restart("web-0", by="ann")
        assert outcome is not None
        await operations.approve(outcome.event.id, by="ann")
        await world.clock.advance(30 * timedelta(seconds=1))
        world.store.is_deaf = True
        await world.clock.advance(10 * MINUTE)
        world.store.is_deaf = False
        await world.clock.advance(2 * MINUTE)
        await ended(task)

        assert driver.tries == [1]
        assert operations._engine.board.events == {}

    run_in_world(main, Deaf())


class ShortOfFiles(Driver):
    """Cannot be started so many times, because there are no file descriptors left."""

    def __init__(self, world: World, shortages: int) -> None:
        super().__init__(world)
        self.shortages = shortages

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        if self.shortages:
            self.shortages -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await super().run_impact(order)


def test_lack_of_file_descriptors_is_not_a_failed_attempt() -> None:
    """It failed three times, the event was given up, and the VM was never rebooted: by somebody's
    idle connections.
    """

    async def main(world: World) -> None:
        operations = await world.operations()
        driver = ShortOfFiles(world, shortages=6)
        task = await at_work(operations, driver)
        outcome = await operations.restart("web-0", by="ann")
        assert outcome is not None
        await operations.approve(outcome.event.id, by="ann")
        await world.clock.advance(10 * MINUTE)
        await ended(task)

        assert (driver.shortages, driver.tries) == (0, [1])
        assert operations._engine.metrics.impacts[EventType.REBOOT, "failed"] == 0
        assert operations._engine.metrics.impacts[EventType.REBOOT, "done"] == 1

    run_in_world(main)


def test_a_shortage_without_end_is_a_failure_at_last() -> None:
    """An event must not stay Started for ever: the limit for an impact is the limit for its start,
    too.
    """

    async def main(world: World) -> None:
        operations = await world.operations()
        task = await at_work(operations, ShortOfFiles(world, shortages=1_000_000))
        outcome = await operations.restart("web-0", by="ann")
        assert outcome is not None
        await operations.approve(outcome.event.id, by="ann")
        await world.clock.advance(timedelta(minutes=90))
        await ended(task)

        assert operations._engine.metrics.impacts[EventType.REBOOT, "failed"] == 1

    run_in_world(main)


@pytest.mark.parametrize("deed", ["none", "cancel"])
def test_a_driver_that_breaks_its_promise_is_a_failed_try(deed: str) -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        driver = Driver(world, deed)
        task = await at_work(operations, driver)
        await operations.restart("web-0", by="ann")
        await world.clock.advance(timedelta(hours=1))
        await ended(task)

        assert driver.tries == list(range(1, 10))
        assert operations._engine.board.scopes["web"].scope.ended[-1].how == "failed"

    run_in_world(main)


def test_cancelled_platform_call_gets_time_to_end() -> None:
    """A command that has suspended a VM wakes it; what else is there to end would be broken off by
    the end of the process.
    """

    class Careful(Driver):
        ends = 0

        async def run_impact(self, order: ImpactRequest) -> ImpactResult:
            try:
                return await super().run_impact(order)
            except asyncio.CancelledError:
                for _ in range(100):
                    await asyncio.sleep(0)
                self.ends += 1
                raise

    async def main(world: World) -> None:
        operations = await world.operations()
        driver = Careful(world)
        task = await at_work(operations, driver)
        await operations.restart("web-0", by="ann")
        await world.clock.advance(timedelta(minutes=15, seconds=30))
        assert (driver.tries, driver.ends) == ([1], 0)
        await ended(task)

        assert driver.ends == 1

    run_in_world(main)


def test_platform_call_that_ignores_cancel_is_awaited_briefly() -> None:
    class Stubborn(Driver):
        async def run_impact(self, order: ImpactRequest) -> ImpactResult:
            self.tries.append(order.tries)
            while not is_free.is_set():
                try:
                    await is_free.wait()
                except asyncio.CancelledError:
                    self.tries.append(0)
            return ImpactResult()

    async def main(world: World) -> None:
        operations = await world.operations()
        driver = Stubborn(world)
        limit = timedelta(hours=1)
        loops = Worker(
            operations._engine, driver, worker="w1", impact_limit=limit, stop_seconds_max=0.05
        )
        task = asyncio.create_task(loops.run())
        await operations.restart("web-0", by="ann")
        await world.clock.advance(timedelta(minutes=15, seconds=30))
        await ended(task)

        assert driver.tries == [1, 0]
        is_free.set()

    is_free = asyncio.Event()
    run_in_world(main)


def test_platform_call_is_cancelled_when_its_scope_is_deleted() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        driver = Driver(world)
        loops = Worker(operations._engine, driver, worker="w1", impact_limit=timedelta(hours=1))
        task = asyncio.create_task(loops.run())
        outcome = await operations.restart("web-0", by="ann")
        assert outcome is not None
        await operations.approve(outcome.event.id, by="ann")
        await world.clock.advance(timedelta(seconds=1))
        assert len(loops._running) == 1
        await operations.apply(Fleet(scopes=FLEET.scopes[1:], hosts=()), by="ann")
        await world.clock.advance(timedelta(0))

        assert loops._running == set()
        await ended(task)

    run_in_world(main)


def test_refusal_is_checked_against_the_store() -> None:
    """A guest may approve at one server what another has just announced."""

    async def main(world: World) -> None:
        operations = await world.operations()
        other = await world.engine()
        outcome = await operations.restart("web-0", by="ann")
        assert outcome is not None

        await other.submit(
            "web", ask.Approve(event_ids=(outcome.event.id,), vm="web-1"), by="web-1"
        )
        assert other.board.scopes["web"].scope.events[0].approvals == ("web-1",)
        with pytest.raises(UnknownEvent):
            await other.submit("web", ask.Approve(event_ids=(guid(99),), vm="web-1"), by="web-1")

    run_in_world(main)


def test_a_subscriber_that_fails_undoes_nothing() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()

        def broken(entries: Sequence[Entry]) -> None:
            raise BrokenPipeError

        operations._engine.subscribe(broken)
        assert await operations.restart("web-0", by="ann") is not None

    run_in_world(main)


def test_unreadable_record_does_not_affect_others() -> None:
    """Another server may be newer than we are."""

    async def main(world: World) -> None:
        operations = await world.operations()
        other = await world.engine()
        task = asyncio.create_task(
            Worker(other, Driver(world), worker="w2", impact_limit=MINUTE).run()
        )
        await world.store.commit([Write("scope/strange/", b'{"format":99,"value":{}}', 0)])
        await operations.restart("web-0", by="ann")
        await world.clock.advance(timedelta(seconds=1))

        assert len(other.board.scopes["web"].scope.events) == 1
        await ended(task)

    run_in_world(main)


def test_rescheduled_alarms_do_not_accumulate() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        loops = Worker(operations._engine, Driver(world), worker="w1", impact_limit=MINUTE)
        for _ in range(10):
            outcome = await operations.maintain(
                "host-b", type=EventType.FREEZE, by="ann", not_before=NOON + timedelta(days=300)
            )
            await operations.cancel(outcome[0].event.id, by="ann")

        assert len(loops._alarms) == 0

    run_in_world(main)


def test_repeated_error_is_counted_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(world: World) -> None:
        engine = await world.engine()
        for _ in range(50):
            engine.throttled_log.warn("tick failed", problem="no answer")
        await world.clock.advance(MINUTE)
        engine.throttled_log.warn("tick failed", problem="no answer")

    run_in_world(main)

    assert [record.__dict__["facts"] for record in caplog.records] == [
        {"problem": "no answer"},
        {"problem": "no answer", "suppressed": 49},
    ]


def test_scope_that_comes_back_never_repeats_a_number() -> None:
    """The same number means the same bytes, also over the scope's end."""

    async def main(world: World) -> None:
        operations = await world.operations()
        await operations.restart("web-0", by="ann")
        assert operations._engine.board.scopes["web"].scope.incarnation == 2
        await operations.apply(Fleet(scopes=(), hosts=()), by="ann")
        again = Operations(await world.engine(), world.make_id)
        await again.apply(FLEET, by="ann")

        assert again._engine.board.scopes["web"].scope.incarnation > 2

    run_in_world(main)


def test_canceling_again_is_canceling_once() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        outcome = await operations.restart("web-0", by="ann")
        assert outcome is not None
        assert await operations.cancel(outcome.event.id, by="ann") is not None
        assert await operations.cancel(outcome.event.id, by="ann") is None
        with pytest.raises(Exception, match="is over: canceled at"):
            await operations.complete(outcome.event.id, by="ann")

    run_in_world(main)


def test_server_is_not_ready_while_its_store_is_lost() -> None:
    class Breaks(Deaf):
        """Its watch breaks while it is deaf."""

        async def watch(self, after: int):  # type: ignore[no-untyped-def]
            async for batch in super().watch(after):
                if self.is_deaf:
                    raise StoreLost("no answer")
                yield batch

    async def main(world: World) -> None:
        assert isinstance(world.store, Breaks)
        operations = await world.operations()
        task = await at_work(operations, Driver(world))
        await world.clock.advance(timedelta(seconds=1))
        assert operations._engine.is_ready
        world.store.is_deaf = True
        await MemoryStore.commit(world.store, [Write("x", b"", 0)])
        await world.clock.advance(timedelta(seconds=10))
        assert not operations._engine.is_ready
        world.store.is_deaf = False
        await world.clock.advance(timedelta(seconds=2))
        assert operations._engine.is_ready
        await ended(task)

    run_in_world(main, Breaks())
