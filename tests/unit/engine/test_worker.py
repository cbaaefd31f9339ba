"""The worker: one impact per VM at a time, never after its claim is over, and at a cost in
proportion to the VMs.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

import pytest

from forewarn.core import command as ask
from forewarn.core.event import EventType
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.core.timing import Timing
from forewarn.engine.clock import VirtualClock
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.fleetfile.parser import Fleet
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import Check, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND, guid, vm
from tests.unit.engine.test_engine import World, live


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


async def three_events(desk: Operations) -> None:
    """A restart, a redeploy and a freeze of web-0, all Started."""
    first = await desk.restart("web-0", by="ann")
    second = await desk.redeploy("web-0", by="ann")
    assert first is not None
    assert second is not None
    (third,) = [
        one
        for one in await desk.maintain("host-a", type=EventType.FREEZE, by="ann")
        if one.scope.name == "web"
    ]
    for told in (first, second, third):
        await desk.approve(told.event.id, by="ann")


def test_the_impacts_of_one_vm_run_one_after_the_other_without_a_pause() -> None:
    """The end of one is what starts the next; nobody polls for it."""

    async def story(world: World) -> None:
        desk = await world.desk()
        platform = TimedPlatform(world.clock)
        task = asyncio.create_task(
            Worker(desk._engine, platform, worker="w1", impact_limit=timedelta(hours=1)).run()
        )
        await three_events(desk)
        await world.clock.advance(3 * MINUTE)
        await stopped(task)

        assert platform.begun == [
            ("web-0", EventType.REBOOT, timedelta(0)),
            ("web-0", EventType.REDEPLOY, MINUTE),
            ("web-0", EventType.FREEZE, 2 * MINUTE),
        ]
        assert desk._engine.board.scopes["web"].scope.impacts == ()

    live(story)


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
        desk = await world.desk()
        task = asyncio.create_task(
            Worker(
                desk._engine, TimedPlatform(clock), worker="w1", impact_limit=timedelta(hours=1)
            ).run()
        )
        operations = [desk.restart, desk.redeploy, desk.delete][:events]
        for operation in operations:
            told = await operation("web-0", by="ann")
            assert told is not None
            await desk.approve(told.event.id, by="ann")
        await clock.advance(SECOND)
        clock.reads = 0
        await clock.advance(50 * SECOND)
        reads = clock.reads
        await stopped(task)
        return reads

    assert asyncio.run(reads_of(3)) <= asyncio.run(reads_of(1))


def test_the_next_impact_waits_until_the_driver_of_a_completed_one_has_stopped() -> None:
    """An operator may declare an event completed while its driver still works on the VM."""

    async def story(world: World) -> None:
        desk = await world.desk()
        platform = TimedPlatform(world.clock)
        task = asyncio.create_task(
            Worker(desk._engine, platform, worker="w1", impact_limit=timedelta(hours=1)).run()
        )
        await three_events(desk)
        await world.clock.advance(20 * SECOND)
        await desk.complete(desk._engine.board.scopes["web"].scope.events[0].id, by="ann")
        await world.clock.advance(10 * SECOND)
        await stopped(task)

        assert [type_ for _, type_, _ in platform.begun] == [EventType.REBOOT, EventType.REDEPLOY]
        assert platform.most_at_once == 1

    live(story)


class StalledStore(MemoryStore):
    """After the commit of a claim by `stalled`, something happens before that server hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stalled = ""
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    async def commit(
        self, writes: Sequence[Write], checks: Sequence[Check] = (), entries: bytes | None = None
    ) -> int:
        revision = await super().commit(writes, checks, entries)
        if self.stalled and self.stalled.encode() in (entries or b""):
            self.stalled = ""
            assert self.meanwhile is not None
            await self.meanwhile()
        return revision


def test_a_server_that_was_stalled_past_its_claim_does_not_touch_the_vm() -> None:
    """Another server has carried the impact out and the event is over: a reboot now would come
    without any notice.
    """

    async def story(world: World) -> None:
        store = world.store
        assert isinstance(store, StalledStore)
        desk = await world.desk()
        slow, quick = TimedPlatform(world.clock), TimedPlatform(world.clock)
        first = asyncio.create_task(
            Worker(desk._engine, slow, worker="slow", impact_limit=timedelta(hours=1)).run()
        )
        other = await world.engine()
        tasks = [first]

        async def take_over() -> None:
            await world.clock.jump(world.clock.now() + Timing().claim)
            tasks.append(
                asyncio.create_task(
                    Worker(other, quick, worker="quick", impact_limit=timedelta(hours=1)).run()
                )
            )
            await world.clock.advance(2 * MINUTE)

        store.stalled, store.meanwhile = "slow", take_over
        told = await desk.restart("web-0", by="ann")
        assert told is not None
        await other.load()
        await desk.approve(told.event.id, by="ann")
        await asyncio.wait_for(until(lambda: not other.board.events and len(tasks) == 2), 10)
        await world.clock.advance(MINUTE)
        await stopped(*tasks)

        assert [name for name, _, _ in quick.begun] == ["web-0"]
        assert slow.begun == []

    live(story, StalledStore())


@pytest.mark.parametrize(("stall_seconds", "renewals"), [(4.0, 0), (10.0, 1)])
def test_a_server_that_was_stalled_within_its_claim_renews_it_before_it_acts(
    stall_seconds: float, renewals: int
) -> None:
    """The wall clock may have been set back meanwhile, so the time is measured with a monotonic
    clock too.
    """

    async def story(world: World) -> None:
        store = world.store
        assert isinstance(store, StalledStore)
        desk = await world.desk()
        platform, time = TimedPlatform(world.clock), [0.0]
        loops = Worker(
            desk._engine,
            platform,
            worker="w1",
            impact_limit=timedelta(hours=1),
            monotonic=lambda: time[0],
        )
        task = asyncio.create_task(loops.run())
        revisions = list[int]()

        async def stall() -> None:
            time[0] += stall_seconds
            await world.clock.jump(NOON + SECOND)
            revisions.append((await store.load()).revision)

        store.stalled, store.meanwhile = "w1", stall
        told = await desk.restart("web-0", by="ann")
        assert told is not None
        await desk.approve(told.event.id, by="ann")
        await asyncio.wait_for(until(lambda: bool(platform.begun)), 10)

        assert (await store.load()).revision - revisions[0] == renewals
        await stopped(task)

    live(story, StalledStore())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


class CountingStore(MemoryStore):
    """Counts what is written."""

    commits, size = 0, 0

    async def commit(
        self, writes: Sequence[Write], checks: Sequence[Check] = (), entries: bytes | None = None
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
    desk = Operations(engine, lambda: guid(7))
    scope = Scope(
        name="big",
        kind=ScopeKind.SCALE_SET,
        vms=tuple(vm(f"vm-{number:04}") for number in range(count)),
    )
    await desk.apply(Fleet(scopes=(scope,), hosts=()), by="ann")
    task = asyncio.create_task(
        Worker(engine, QuickPlatform(), worker="w1", impact_limit=MINUTE).run()
    )
    store.commits = store.size = 0
    (told,) = await desk.maintain("host-a", type=type_, by="ann")
    await desk.approve(told.event.id, by="ann")
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


class SharedClock:
    """A clock that wakes all who sleep until the same time at once, as a real event loop does."""

    jump_seconds = 0.0

    def __init__(self) -> None:
        self._now = NOON
        self._sleepers: list[tuple[datetime, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        return self._now

    async def sleep_until(self, moment: datetime) -> None:
        if moment > self._now:
            sleeper = asyncio.get_running_loop().create_future()
            self._sleepers.append((moment, sleeper))
            await sleeper

    async def pass_to(self, moment: datetime) -> None:
        self._now = moment
        for wake_at, sleeper in self._sleepers:
            if wake_at <= moment and not sleeper.done():
                sleeper.set_result(None)
        for _ in range(50):
            await asyncio.sleep(0)


def test_the_renewals_of_a_scope_share_a_commit() -> None:
    """A claim is renewed every few seconds; claims that began at different times must not each
    write the scope for it.
    """

    async def run() -> None:
        store, clock = CountingStore(), SharedClock()
        engine = Engine(store, clock, Timing())
        desk = Operations(engine, lambda: guid(7))
        vms = tuple(vm(f"vm-{number}", host=f"host-{number % 4}") for number in range(40))
        await desk.apply(
            Fleet(scopes=(Scope(name="big", kind=ScopeKind.SCALE_SET, vms=vms),), hosts=()),
            by="ann",
        )
        task = asyncio.create_task(
            Worker(engine, ForeverPlatform(), worker="w1", impact_limit=10 * MINUTE).run()
        )
        for number in range(4):
            await clock.pass_to(NOON + number * timedelta(milliseconds=200))
            await engine.submit(
                "big", ask.Fail(host=f"host-{number}", operation_id=guid(number)), by="ann"
            )
        await clock.pass_to(NOON + SECOND)
        assert len(engine.board.scopes["big"].scope.impacts) == 40
        store.commits = 0
        for tenths in range(10, 310):
            await clock.pass_to(NOON + tenths * timedelta(seconds=0.1))
        await stopped(task)

        assert 5 <= store.commits <= 7

    asyncio.run(run())


class ForeverPlatform:
    """Never ends."""

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        await asyncio.Event().wait()
        return ImpactResult()
