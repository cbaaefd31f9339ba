"""The worker: one impact per VM at a time, never after its claim is over, and at a cost in
proportion to the VMs.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import pytest

from forewarn.core.event import EventType
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import RevisionCheck, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND, guid, vm
from tests.unit.engine.test_engine import World, run_in_world


class TimedPlatform:
    """Takes a minute for everything, and knows when each impact began and how many one VM had at
    once.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._running = Counter[str]()
        self.most_at_once = 0
        self.begun: list[tuple[str, EventType, timedelta]] = []

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        name = order.vm.name
        self.begun.append((name, order.type, self._clock.now() - NOON))
        self._running[name] += 1
        self.most_at_once = max(self.most_at_once, self._running[name])
        try:
            await self._clock.sleep_until(self._clock.now() + MINUTE)
        finally:
            self._running[name] -= 1
        return ImpactResult()


async def stopped(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def three_events(operations: Operations) -> None:
    """A restart, a redeploy and a freeze of web-0, all Started."""
    first = await operations.restart("web-0", by="ann")
    second = await operations.redeploy("web-0", by="ann")
    assert first is not None
    assert second is not None
    (third,) = [
        one
        for one in await operations.maintain("host-a", type=EventType.FREEZE, by="ann")
        if one.scope.name == "web"
    ]
    for result in (first, second, third):
        await operations.approve(result.event.id, by="ann")


def test_impacts_of_one_vm_run_one_after_the_other() -> None:
    """The end of one is what starts the next; nobody polls for it."""

    async def main(world: World) -> None:
        operations = await world.operations()
        platform = TimedPlatform(world.clock)
        task = asyncio.create_task(
            Worker(operations._engine, platform, worker="w1", impact_limit=timedelta(hours=1)).run()
        )
        await three_events(operations)
        await world.clock.advance(3 * MINUTE)
        await stopped(task)

        assert platform.begun == [
            ("web-0", EventType.REBOOT, timedelta(0)),
            ("web-0", EventType.REDEPLOY, MINUTE),
            ("web-0", EventType.FREEZE, 2 * MINUTE),
        ]
        assert operations._engine.board.scopes["web"].scope.impacts == ()

    run_in_world(main)


def test_a_blocked_impact_costs_nothing_while_it_waits() -> None:
    """A worker that tries again and again would write, or spin, for as long as the first impact
    takes.
    """

    class CountingClock(VirtualClock):
        reads = 0

        def now(self) -> datetime:
            self.reads += 1
            return super().now()

    async def reads_of(events: int) -> int:
        world = World()
        clock = world.clock = CountingClock(NOON)
        operations = await world.operations()
        task = asyncio.create_task(
            Worker(
                operations._engine,
                TimedPlatform(clock),
                worker="w1",
                impact_limit=timedelta(hours=1),
            ).run()
        )
        chosen = [operations.restart, operations.redeploy, operations.delete][:events]
        for operation in chosen:
            result = await operation("web-0", by="ann")
            assert result is not None
            await operations.approve(result.event.id, by="ann")
        await clock.advance(SECOND)
        clock.reads = 0
        await clock.advance(50 * SECOND)
        reads = clock.reads
        await stopped(task)
        return reads

    assert asyncio.run(reads_of(3)) <= asyncio.run(reads_of(1))


def test_next_impact_waits_for_the_cancelled_platform_call() -> None:
    """An operator may declare an event completed while its driver still works on the VM."""

    async def main(world: World) -> None:
        operations = await world.operations()
        platform = TimedPlatform(world.clock)
        task = asyncio.create_task(
            Worker(operations._engine, platform, worker="w1", impact_limit=timedelta(hours=1)).run()
        )
        await three_events(operations)
        await world.clock.advance(20 * SECOND)
        await operations.complete(
            operations._engine.board.scopes["web"].scope.events[0].id, by="ann"
        )
        await world.clock.advance(10 * SECOND)
        await stopped(task)

        assert [type_ for _, type_, _ in platform.begun] == [EventType.REBOOT, EventType.REDEPLOY]
        assert platform.most_at_once == 1

    run_in_world(main)


class GatedStore(MemoryStore):
    """Commits changes of scopes only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        if any(write.key.startswith("scope/") for write in writes):
            await self.gate.wait()
        return await super().commit(writes, checks, entries)


def test_event_completed_together_with_its_claim_is_not_carried_out() -> None:
    """Both may be in one commit. From its response on, the operator may use the VM."""

    async def main(world: World) -> None:
        assert isinstance(world.store, GatedStore)
        operations = await world.operations()
        platform = TimedPlatform(world.clock)
        first = await operations.restart("web-0", by="ann")
        other = await operations.restart("web-1", by="ann")
        assert first is not None
        assert other is not None
        await operations.approve(first.event.id, by="ann")
        world.store.gate.clear()
        approving = asyncio.create_task(operations.approve(other.event.id, by="ann"))
        await world.clock.advance(timedelta(0))  # its commit waits at the gate
        work = asyncio.create_task(
            Worker(operations._engine, platform, worker="w1", impact_limit=timedelta(hours=1)).run()
        )
        await world.clock.advance(timedelta(0))  # the claim waits for that commit
        completing = asyncio.create_task(operations.complete(first.event.id, by="ann"))
        await world.clock.advance(timedelta(0))
        world.store.gate.set()
        await asyncio.gather(approving, completing)
        await world.clock.advance(SECOND)
        await stopped(work)

        assert [name for name, _, _ in platform.begun] == ["web-1"]

    run_in_world(main, GatedStore())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


def test_polls_pass_while_a_worker_looks_at_all_scopes_again() -> None:
    """After a lost lease, all impacts that it dropped are due again. With 200,000 scopes, looking
    at them takes a second.
    """

    class CountingClock(VirtualClock):
        """Counts how often it is read in one turn of the event loop."""

        reads = most_reads = 0

        def now(self) -> datetime:
            self.reads += 1
            self.most_reads = max(self.most_reads, self.reads)
            return super().now()

        async def count_by_turn(self) -> None:
            while True:  # ends when cancelled
                self.reads = 0
                await asyncio.sleep(0)

    async def main() -> None:
        clock, store = CountingClock(NOON), MemoryStore()
        engine = Engine(store, clock, Timing())
        for number in range(2000):
            engine.board.publish(Scope(name=f"scope-{number}"), 1)
        work = asyncio.create_task(
            Worker(engine, QuickPlatform(), worker="w1", impact_limit=MINUTE).run()
        )
        await clock.advance(timedelta(0))
        counting = asyncio.create_task(clock.count_by_turn())
        clock.most_reads = 0
        await store.expire("server/w1")
        await clock.advance(MINUTE)

        assert (await store.get("lease/server/w1-2")).value is not None
        assert clock.most_reads < 500
        await stopped(work, counting)

    asyncio.run(main())


class CountingStore(MemoryStore):
    """Counts what is written."""

    commits, size = 0, 0

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        self.commits += 1
        self.size += sum(len(write.value or b"") for write in writes) + len(entries or b"")
        return await super().commit(writes, checks, entries)


class QuickPlatform:
    """Does everything at once."""

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        return ImpactResult()


async def cost_of_an_event(count: int, type_: EventType) -> tuple[int, int]:
    """The commits and the bytes that one event of so many VMs writes, from its announcement to its
    end.
    """
    store = CountingStore()
    engine = Engine(store, VirtualClock(NOON), Timing())
    operations = Operations(engine, lambda: guid(7))
    scope = Scope(
        name="big",
        kind=ScopeKind.SCALE_SET,
        vms=tuple(vm(f"vm-{number:04}") for number in range(count)),
    )
    await operations.apply(Fleet(scopes=(scope,), hosts=()), by="ann")
    task = asyncio.create_task(
        Worker(engine, QuickPlatform(), worker="w1", impact_limit=MINUTE).run()
    )
    for _ in range(10):
        await asyncio.sleep(0)  # it acquires its lease
    store.commits = store.size = 0
    (result,) = await operations.maintain("host-a", type=type_, by="ann")
    await operations.approve(result.event.id, by="ann")
    await asyncio.wait_for(until(lambda: not engine.board.events), 60)
    await stopped(task)
    return store.commits, store.size


@pytest.mark.parametrize("type_", [EventType.FREEZE, EventType.REDEPLOY])
def test_the_cost_of_an_event_grows_in_proportion_to_its_vms(type_: EventType) -> None:
    """An event of n VMs that writes its scope for each of them writes n squared bytes: 336 MB for
    1,000 VMs.

    A server carries out 256 impacts at a time, so 1,000 VMs take four rounds where 100 take one.
    """
    few_commits, few_bytes = asyncio.run(cost_of_an_event(100, type_))
    commits, size = asyncio.run(cost_of_an_event(1000, type_))

    assert commits <= 4 * few_commits
    assert size <= 2.5 * 10 * few_bytes


def test_the_worker_asks_for_all_due_impacts_of_a_scope_at_once() -> None:
    """So that they fall into one commit: the announcement, the start, one commit of claims and one
    of ends.
    """
    commits, _ = asyncio.run(cost_of_an_event(100, EventType.FREEZE))

    assert commits <= 5
