"""A server holds one lease; its claims are good while the lease is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import cast

import pytest

from forewarn.core.event import ImpactState
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock
from forewarn.engine.engine import Engine
from forewarn.engine.lease import run_under_lease
from forewarn.engine.operations import Operations
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.transaction import LeaseLost
from forewarn.engine.worker import Worker
from forewarn.errors import StoreLost
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import LEASE_KEY, Lease
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, SECOND, guid
from tests.history import entries_of
from tests.unit.engine.hostd_world import SlowStore
from tests.unit.engine.test_engine import FLEET
from tests.unit.platform.instant_clock import InstantClock

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)


class Ahead(VirtualClock):
    """The clock of a server that is a day ahead of the true time."""

    def __init__(self, true: VirtualClock) -> None:
        super().__init__(NOON)
        self._true = true

    def now(self) -> datetime:
        return self._true.now() + DAY

    async def sleep_until(self, moment: datetime) -> None:
        await self._true.sleep_until(moment - DAY)


class Driver:
    """Takes ten minutes for an impact, by the true time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.tries: list[int] = []
        self.cancelled = 0

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        self.tries.append(order.tries)
        try:
            await self._clock.sleep_until(self._clock.now() + 10 * MINUTE)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ImpactResult()


class World:
    """One store, one clock, and servers that can die."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = VirtualClock(NOON)
        self.driver = Driver(self.clock)

    @asynccontextmanager
    async def server(
        self, worker: str, *, clock: Clock | None = None, driver: Driver | None = None
    ) -> AsyncIterator[Engine]:
        """A server at work. At the end it is stopped, and releases its lease."""
        engine = Engine(self.store, clock or self.clock, Timing())
        await engine.load()
        driver = driver or self.driver
        work = asyncio.create_task(
            Worker(engine, driver, worker=worker, impact_limit=2 * HOUR).run()
        )
        await self.clock.advance(timedelta(0))
        try:
            yield engine
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def fail_host(engine: Engine) -> None:
    """The hardware of host-b has failed: its VM is moved at once."""
    operations = Operations(engine, lambda: guid(1))
    await operations.apply(FLEET, by="ann")
    await operations.fail("host-b", by="ann")


def test_ten_minute_impact_costs_three_commits() -> None:
    """Started, claimed, finished. Nothing is written while it runs."""

    async def main() -> None:
        world = World()
        async with world.server("w1") as engine:
            operations = Operations(engine, lambda: guid(1))
            await operations.apply(FLEET, by="ann")
            await engine.seen(engine.board.scopes["web"])
            await operations.restart("web-0", by="ann")
            before = (await world.store.load()).revision
            await world.clock.advance(HOUR)

            assert world.driver.tries == [1]
            assert engine.board.events == {}
            assert (await world.store.load()).revision == before + 3

    asyncio.run(main())


def test_impact_of_a_server_that_lost_its_lease_is_taken_over() -> None:
    """The other servers see that the lease is gone, and release its claims."""

    async def main() -> None:
        world = World()
        dead = Driver(world.clock)
        async with world.server("dead", driver=dead) as engine, world.server("w2"):
            await fail_host(engine)
            await world.clock.advance(MINUTE)
            first, second = (dead, world.driver) if dead.tries else (world.driver, dead)
            assert (first.tries, second.tries) == ([1], [])
            holder = "dead" if first is dead else "w2"
            await world.store.expire(f"server/{holder}")
            await world.clock.advance(timedelta(0))

            assert second.tries == [2]
            assert (first.tries, first.cancelled) == ([1], 1)

    asyncio.run(main())


def test_server_that_lost_its_lease_continues_under_another_name() -> None:
    """Nobody can take a claim of its old name for one that is good."""

    async def main() -> None:
        world = World()
        async with world.server("w1") as engine:
            await fail_host(engine)
            await world.clock.advance(MINUTE)
            await world.store.expire("server/w1")
            await world.clock.advance(MINUTE)

            assert world.driver.tries == [1, 2]
            claims = [e.detail for e in await entries_of(world.store) if e.what == "claimed"]
            assert claims == ["w1", "w1-2"]

    asyncio.run(main())


def test_stopped_server_leaves_its_impacts_to_others_at_once() -> None:
    async def main() -> None:
        world = World()
        async with world.server("w2"):
            pass
        stopped = Driver(world.clock)
        async with world.server("w1", driver=stopped) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
        async with world.server("w3"):
            assert (stopped.tries, world.driver.tries) == ([1], [2])

    asyncio.run(main())


def test_claim_without_a_lease_is_released_at_the_start() -> None:
    """A store of an earlier version, or all servers have died."""

    async def main() -> None:
        world = World()
        async with world.server("w1") as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            await world.store.expire("server/w1")
        async with world.server("w2"):
            await world.clock.advance(timedelta(0))

            assert world.driver.tries[-1] >= 2

    asyncio.run(main())


@pytest.mark.parametrize("clock_of", [Ahead, lambda clock: clock])
def test_server_that_holds_its_lease_keeps_its_claims(
    clock_of: Callable[[VirtualClock], Clock],
) -> None:
    """Whatever its clock says: only the lease counts. Nothing is done twice."""

    async def main() -> None:
        world = World()
        holder = Driver(world.clock)
        async with world.server("w1", clock=clock_of(world.clock), driver=holder) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            async with world.server("w2"):
                await world.clock.advance(HOUR)

        assert (holder.tries, world.driver.tries) == ([1], [])

    asyncio.run(main())


def test_server_without_the_record_of_a_lease_releases_no_claim() -> None:
    """It has read the scope, and its watch is late: it asks the store before it takes over."""

    async def main() -> None:
        world = World()
        late = World(cast("MemoryStore", path := SlowStore(world.store)))
        late.clock = world.clock
        holder = Driver(world.clock)
        async with late.server("w1") as behind:
            path.watches.clear()
            async with world.server("w2", driver=holder) as engine:
                await fail_host(engine)
                await world.clock.advance(10 * SECOND)
                (scope,) = (each for each in engine.board.scopes.values() if each.scope.impacts)
                await behind.refresh(SCOPE_KEY.format(scope.scope.name))
                await world.clock.advance(MINUTE)
                assert (holder.tries, holder.cancelled, late.driver.tries) == ([1], 0, [])
            path.watches.set()

    asyncio.run(main())


def test_impact_dated_a_day_ahead_is_carried_out_now() -> None:
    """A server whose clock was wrong announced it, and died."""

    async def main() -> None:
        world = World()
        wrong = Engine(world.store, Ahead(world.clock), Timing())
        await fail_host(wrong)
        (impact,) = wrong.board.find_scope("web").scope.impacts
        assert (impact.state, impact.due_at) == (ImpactState.WAITING, NOON + DAY)
        async with world.server("w2"):
            await world.clock.advance(SECOND)

        assert world.driver.tries == [1]

    asyncio.run(main())


class StoppedStore(MemoryStore):
    """Takes the lease of a server away while that server waits for the reply to its claim.

    So it was as long in between as a process that is stopped and continued.
    """

    is_stopping = False

    async def commit(self, writes, checks=(), entries=None):  # type: ignore[no-untyped-def]
        revision = await super().commit(writes, checks, entries)
        if self.is_stopping and b"claimed" in (entries or b""):
            self.is_stopping = False
            await self.expire("server/w1")
        return revision


def test_paused_server_starts_no_platform_call_without_lease() -> None:
    """Another server may have carried the impact out: a second one would come without notice."""

    async def main() -> None:
        store = StoppedStore()
        world = World(store)
        stopped = Driver(world.clock)
        store.is_stopping = True
        async with world.server("w1", driver=stopped) as engine:
            await fail_host(engine)
            await asyncio.sleep(0)
            async with world.server("w2"):
                await world.clock.advance(HOUR)

        claims = [e.detail for e in await entries_of(store) if e.what == "claimed"]
        assert claims[0] == "w1"
        assert sorted([*stopped.tries, *world.driver.tries]) == [2]

    asyncio.run(main())


def test_nothing_is_committed_under_a_lease_that_is_gone() -> None:
    """The store compares the lease, also where this server does not know yet that it is lost."""

    async def main() -> None:
        world = World()
        engine = Engine(world.store, world.clock, Timing())
        lease = await world.store.lease("campaigns", 10)
        assert lease is not None
        await engine.update(["floor"], lambda tx: tx.put("floor", None), by="ann", lease=lease)
        unaware = Lease(
            "campaigns", lease.revision, ttl_seconds=60, monotonic=lambda: 0.0, delete=forget
        )
        await world.store.expire("campaigns")
        before = (await world.store.load()).revision
        with pytest.raises(LeaseLost):
            await engine.update(
                ["fleet"], lambda tx: tx.put("fleet", engine.applied), by="ann", lease=unaware
            )

        assert (await world.store.load()).revision == before

    asyncio.run(main())


async def forget(lease: Lease) -> None:
    """Releases nothing."""


def test_work_moves_to_the_process_that_gets_the_lease() -> None:
    """One at a time, and the next one as soon as the lease is free."""

    async def main() -> None:
        store, running = MemoryStore(), list[str]()
        engine = Engine(store, InstantClock(), Timing())

        def work_as(name: str) -> asyncio.Task[None]:
            async def work(lease: Lease) -> None:
                running.append(name)
                try:
                    await asyncio.Event().wait()
                finally:
                    running.remove(name)

            return asyncio.create_task(run_under_lease(engine, "retention", work))

        async def settle() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        first = work_as("a")
        await settle()
        second = work_as("b")
        await settle()
        assert running == ["a"]
        first.cancel()
        await settle()
        assert running == ["b"]
        await store.expire("retention")
        await settle()
        assert running == ["b"]
        second.cancel()
        await settle()
        assert running == []
        assert (await store.get(LEASE_KEY.format("retention"))).value is None

    asyncio.run(main())


def test_work_that_fails_ends_and_frees_the_lease() -> None:
    async def main() -> None:
        store = MemoryStore()
        engine = Engine(store, InstantClock(), Timing())

        async def work(lease: Lease) -> None:
            raise StoreLost("no answer")

        with suppress(StoreLost):
            await run_under_lease(engine, "retention", work)
        assert await store.lease("retention", 10) is not None

    asyncio.run(main())


class MalformedStore(MemoryStore):
    """Its next replies to requests for a lease, and for its release, are not what was expected."""

    malformed = 1

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        if self.malformed:
            self.malformed -= 1
            raise ValueError("a malformed reply")
        lease = await super().lease(name, ttl_seconds)
        if lease is not None:
            lease.delete = self._fail
        return lease

    async def _fail(self, lease: Lease) -> None:
        raise ValueError("a malformed reply")


def test_lease_is_acquired_after_a_malformed_reply(caplog: pytest.LogCaptureFixture) -> None:
    """Else each server would end, again after each start."""

    async def main() -> None:
        clock, held = VirtualClock(NOON), list[Lease]()
        engine = Engine(MalformedStore(), clock, Timing())

        async def work(lease: Lease) -> None:
            held.append(lease)

        task = asyncio.create_task(run_under_lease(engine, "server/a", work))
        await clock.advance(MINUTE)
        await task
        assert len(held) == 1
        await engine.close()

    asyncio.run(main())
    assert [line.message for line in caplog.records] == [
        "bug while acquiring a lease",
        "bug while releasing a lease",
    ]
