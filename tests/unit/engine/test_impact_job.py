"""VMs that boot after an impact: who notices that they are back, and until when."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any

import pytest

from forewarn.core.event import ImpactState
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import ImpactFailed, StoreLost
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND
from tests.history import entries_of
from tests.unit.engine.test_engine import World

LIMIT = Timing().back_limit


class MutePlatform:
    """Restarts VMs at once, and cannot tell when they are back."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        return ImpactResult(host="host-c" if request.moves else "", is_back=False)


class AgentPlatform(MutePlatform):
    """Its guest agents answer at `back_at`, or cannot be asked."""

    back_at = NOON + MINUTE
    problem = ""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.asked: list[ImpactRequest] = []
        self.cancelled_at: list[datetime] = []

    async def wait_until_back(self, request: ImpactRequest) -> None:
        self.asked.append(request)
        if self.problem:
            raise ImpactFailed(self.problem)
        try:
            await self.clock.sleep_until(self.back_at)
        except asyncio.CancelledError:
            self.cancelled_at.append(self.clock.now())
            raise


class FailingStore(MemoryStore):
    is_failing = False

    async def commit(self, writes: Any, checks: Any = (), entries: Any = None) -> int:
        if self.is_failing:
            raise StoreLost("commit refused")
        return await super().commit(writes, checks, entries)


async def wait_for_restart(world: World, operations: Operations, verb: str = "restart") -> None:
    """`web-0` is restarted at noon, by a worker that runs."""
    placed = await getattr(operations, verb)("web-0", by="ann")
    await operations.approve(placed.event.id, by="ann")
    await world.clock.advance(timedelta(0))
    assert states(operations._engine) == [ImpactState.BOOTING]


def states(engine: Engine) -> list[ImpactState]:
    return [impact.state for impact in engine.board.scopes["web"].scope.impacts]


async def details(world: World) -> list[str]:
    """How the impacts that are done came to their end."""
    return [one.detail for one in await entries_of(world.store) if one.what == "impacted"]


def run_with(
    platform: type[MutePlatform],
    main: Callable[[World, Operations, Any], Coroutine[Any, Any, None]],
    store: MemoryStore | None = None,
) -> None:
    """Run the story with a worker on this platform."""

    async def whole() -> None:
        world = World(store)
        operations = await world.operations()
        made = platform(world.clock)
        worker = Worker(operations._engine, made, worker="w1", impact_limit=timedelta(hours=1))
        task = asyncio.create_task(worker.run())
        await main(world, operations, made)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(whole())


def test_restart_is_over_when_the_guest_agent_answers() -> None:
    async def main(world: World, operations: Operations, platform: AgentPlatform) -> None:
        await wait_for_restart(world, operations)
        await world.clock.advance(MINUTE - SECOND)
        assert states(operations._engine) == [ImpactState.BOOTING]
        await world.clock.advance(SECOND)

        assert states(operations._engine) == []
        assert await details(world) == ["guest agent answers"]

    run_with(AgentPlatform, main)


def test_moved_vm_is_asked_for_on_its_new_host() -> None:
    async def main(world: World, operations: Operations, platform: AgentPlatform) -> None:
        await wait_for_restart(world, operations, "redeploy")

        assert [request.vm.host for request in platform.asked] == ["host-c"]

    run_with(AgentPlatform, main)


def test_platform_is_no_longer_asked_after_the_vm_has_polled() -> None:
    """From any server: the one that polls may not be the one that restarted the VM."""

    async def main(world: World, operations: Operations, platform: AgentPlatform) -> None:
        other = await world.engine()
        await wait_for_restart(world, operations)
        await other.catch_up()
        await world.clock.advance(SECOND)
        other.back(other.board.scopes["web"], "web-0")
        await world.clock.advance(timedelta(0))

        assert states(operations._engine) == []
        assert platform.cancelled_at == [NOON + SECOND]
        assert await details(world) == ["polled again"]

    run_with(AgentPlatform, main)


@pytest.mark.parametrize("platform", [MutePlatform, AgentPlatform])
def test_restart_is_over_at_the_limit(platform: type[MutePlatform]) -> None:
    """A platform without guest agents is not asked, and one whose agents are silent is left."""

    async def main(world: World, operations: Operations, made: MutePlatform) -> None:
        if isinstance(made, AgentPlatform):
            made.back_at = NOON + 2 * LIMIT
        await wait_for_restart(world, operations)
        await world.clock.advance(LIMIT - SECOND)
        assert states(operations._engine) == [ImpactState.BOOTING]
        await world.clock.advance(SECOND)

        assert states(operations._engine) == []
        assert await details(world) == ["not back after 300 seconds"]
        if isinstance(made, AgentPlatform):
            assert made.cancelled_at == [NOON + LIMIT]

    run_with(platform, main)


def test_guest_agent_that_cannot_be_asked_leaves_it_to_the_poll() -> None:
    async def main(world: World, operations: Operations, platform: AgentPlatform) -> None:
        platform.problem = "no guest agent"
        engine = operations._engine
        await wait_for_restart(world, operations)
        assert len(platform.asked) == 1

        engine.back(engine.board.scopes["web"], "web-0")
        await world.clock.advance(timedelta(0))
        assert states(engine) == []

    run_with(AgentPlatform, main)


def test_answer_of_the_guest_agent_is_recorded_when_the_store_is_back() -> None:
    store = FailingStore()

    async def main(world: World, operations: Operations, platform: AgentPlatform) -> None:
        await wait_for_restart(world, operations)
        store.is_failing = True
        await world.clock.advance(MINUTE + SECOND)
        assert states(operations._engine) == [ImpactState.BOOTING]
        store.is_failing = False
        await world.clock.advance(2 * SECOND)

        assert states(operations._engine) == []
        assert await details(world) == ["guest agent answers"]

    run_with(AgentPlatform, main, store)


def test_poll_that_was_not_recorded_is_repeated_by_the_next() -> None:
    store = FailingStore()

    async def main(world: World, operations: Operations, platform: MutePlatform) -> None:
        engine = operations._engine
        await wait_for_restart(world, operations)
        place = engine.board.scopes["web"]
        store.is_failing = True
        engine.back(place, "web-0")
        await world.clock.advance(timedelta(0))
        assert states(engine) == [ImpactState.BOOTING]
        store.is_failing = False
        engine.back(place, "web-0")
        await world.clock.advance(timedelta(0))

        assert (states(engine), place.booting) == ([], None)

    run_with(MutePlatform, main, store)


def test_polls_of_a_booting_vm_are_recorded_once() -> None:
    """It may poll many times before the first one is committed."""

    async def main(world: World, operations: Operations, platform: MutePlatform) -> None:
        engine = operations._engine
        await wait_for_restart(world, operations)
        place = engine.board.scopes["web"]
        for _ in range(5):
            engine.back(place, "web-0")
        assert len(engine._background) == 1
        await world.clock.advance(timedelta(0))

        assert await details(world) == ["polled again"]

    run_with(MutePlatform, main)


def test_poll_of_another_vm_is_not_recorded() -> None:
    async def main(world: World, operations: Operations, platform: MutePlatform) -> None:
        engine = operations._engine
        await wait_for_restart(world, operations)
        place = engine.board.scopes["web"]
        assert place.booting == {"web-0"}
        engine.back(place, "web-1")

        assert engine._background == {}

    run_with(MutePlatform, main)


def test_server_that_starts_later_knows_who_boots() -> None:
    async def main(world: World, operations: Operations, platform: MutePlatform) -> None:
        await wait_for_restart(world, operations)
        other = await world.engine()

        assert other.board.scopes["web"].booting == {"web-0"}
        assert other.board.scopes["db"].booting is None

    run_with(MutePlatform, main)


def test_stopped_worker_stops_asking() -> None:
    """The polls and the limit remain for the server that takes over."""

    async def whole() -> None:
        world = World()
        operations = await world.operations()
        platform = AgentPlatform(world.clock)
        worker = Worker(operations._engine, platform, worker="w1", impact_limit=MINUTE)
        task = asyncio.create_task(worker.run())
        await wait_for_restart(world, operations)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert platform.cancelled_at == [NOON]
        assert states(operations._engine) == [ImpactState.BOOTING]

    asyncio.run(whole())
