"""A server that ran with a clock far ahead and died: what it claimed is taken over in seconds, not
when its clock would say.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.event import ImpactState
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock, VirtualClock
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.memory import MemoryStore
from tests.builders import (
    NOON,
    SECOND,
    approve,
    claim,
    guid,
    outcome_of,
    restart,
    run,
    scope_of,
)
from tests.unit.engine.test_engine import FLEET

CLAIM = Timing().claim
DAY = timedelta(days=1)


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
    """Takes an hour for an impact, by the true time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.tries: list[int] = []

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        self.tries.append(order.tries)
        await self._clock.sleep_until(self._clock.now() + timedelta(hours=1))
        return ImpactResult()


@asynccontextmanager
async def server(
    store: MemoryStore, clock: Clock, driver: Driver, worker: str
) -> AsyncIterator[Engine]:
    """At work until the block ends: then it is gone, as if killed."""
    engine = Engine(store, clock, Timing())
    await engine.load()
    work = asyncio.create_task(
        Worker(engine, driver, worker=worker, impact_limit=timedelta(hours=2)).run()
    )
    try:
        yield engine
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def failed_host(engine: Engine) -> None:
    """The hardware of host-b has failed: its VM is moved at once."""
    operations = Operations(engine, lambda: guid(1))
    await operations.apply(FLEET, by="ann")
    await operations.fail("host-b", by="ann")


def test_impact_claimed_by_a_dead_server_with_a_wrong_clock_is_taken_over() -> None:
    """Its claim was good for a day, and the event stayed Started for so long."""

    async def story() -> None:
        store, clock = MemoryStore(), VirtualClock(NOON)
        dead, driver = Driver(clock), Driver(clock)
        async with server(store, Ahead(clock), dead, "dead") as engine:
            await failed_host(engine)
            await clock.advance(SECOND)
        assert dead.tries == [1]
        async with server(store, clock, driver, "w2"):
            await clock.advance(CLAIM - SECOND)
            assert driver.tries == []  # it may be alive, with a clock that is ahead
            await clock.advance(2 * SECOND)
            assert driver.tries == [2]

    asyncio.run(story())


def test_live_server_with_a_wrong_clock_keeps_what_it_claims() -> None:
    """It renews its claims, and that can be seen whatever its clock says. Nothing is done twice."""

    async def story() -> None:
        store, clock = MemoryStore(), VirtualClock(NOON)
        ahead, driver = Driver(clock), Driver(clock)
        async with (
            server(store, clock, driver, "w2"),
            server(store, Ahead(clock), ahead, "w1") as engine,
        ):
            await failed_host(engine)
            await clock.advance(timedelta(minutes=50))

        assert (ahead.tries, driver.tries) == ([1], [])

    asyncio.run(story())


def test_impact_that_waits_a_day_for_its_next_try_is_tried_again() -> None:
    """Its first try failed while the clock was wrong."""

    async def story() -> None:
        store, clock = MemoryStore(), VirtualClock(NOON)
        wrong = Engine(store, Ahead(clock), Timing())
        await failed_host(wrong)
        (impact,) = wrong.board.find_scope("web").scope.impacts
        assert (impact.state, impact.due_at) == (ImpactState.WAITING, NOON + DAY)
        driver = Driver(clock)
        async with server(store, clock, driver, "w2"):
            await clock.advance(CLAIM + SECOND)

        assert driver.tries == [1]

    asyncio.run(story())


def test_claim_lapses_only_if_it_is_still_the_one_that_was_observed() -> None:
    """Renewed in between, it belongs to somebody who is alive."""
    scope = run(scope_of(), restart(), approve("web-1"))
    claimed = run(scope, claim(), at=NOON + DAY)
    (impact,) = claimed.impacts
    seen = ask.Lapse(event_id=impact.event_id, vm=impact.vm, due_at=impact.due_at)

    assert run(claimed, seen).impacts == (replace(impact, due_at=NOON),)
    renewed = run(claimed, claim(tries=1), at=NOON + DAY + SECOND)
    assert outcome_of(renewed, seen).scope == renewed
    assert outcome_of(claimed, replace(seen, vm="nobody")).scope == claimed
    assert run(run(claimed, seen), claim(worker="w2")).impacts[0].claimed_by == "w2"
