"""Two tries of one impact never act at the same time, whatever the platform needs to stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest

from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.lease import takeover_delay
from forewarn.engine.worker import Worker
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import HELD_SHARE, Lease
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND
from tests.unit.engine.test_follow import TTL_SECONDS, DistantStore
from tests.unit.engine.test_lease import fail_host

EXEC_SECONDS = 5.0
LIBVIRT_SECONDS = 30.0


class PunctualStore(DistantStore):
    """Its leases are lost at two thirds of their ttl by the simulated clock, as by a real one."""

    async def _renew(self, lease: Lease) -> None:
        ttl = timedelta(seconds=lease.ttl_seconds)
        while not self.is_lost and lease.is_held():
            lease.renew((self._clock.now() - NOON).total_seconds())
            await self._clock.sleep_until(self._clock.now() + ttl / 3)
        renewed_at = self._clock.now() - ttl / 3
        await self._clock.sleep_until(renewed_at + ttl * HELD_SHARE)
        lease.end()
        await self._clock.sleep_until(renewed_at + ttl)
        await self._inner.expire(lease.name)


class StubbornPlatform:
    """Acts on the VM for an hour, and for `stop_seconds` after it was canceled."""

    def __init__(self, clock: VirtualClock, stop_seconds: float) -> None:
        self._clock = clock
        self.stop_seconds = stop_seconds
        self.began_at: datetime | None = None
        self.ended_at: datetime | None = None

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        self.began_at = self._clock.now()
        try:
            await self._clock.sleep_until(self.began_at + 60 * MINUTE)
        except asyncio.CancelledError:
            stop = timedelta(seconds=self.stop_seconds)
            await self._clock.sleep_until(self._clock.now() + stop)
            raise
        finally:
            self.ended_at = self._clock.now()
        return ImpactResult()


class World:
    """Two servers on one store; the first has begun an impact when the second starts."""

    def __init__(self, stop_seconds: float) -> None:
        self.clock, self.shared = VirtualClock(NOON), MemoryStore()
        self.store = PunctualStore(self.shared, self.clock)
        self.first = StubbornPlatform(self.clock, stop_seconds)
        self.second = StubbornPlatform(self.clock, stop_seconds)

    @asynccontextmanager
    async def server(
        self, name: str, platform: StubbornPlatform, stop_seconds_max: float = 60.0
    ) -> AsyncIterator[Engine]:
        store = self.store if platform is self.first else PunctualStore(self.shared, self.clock)
        engine = Engine(store, self.clock, Timing())
        await engine.load()
        worker = Worker(
            engine,
            platform,
            worker=name,
            impact_limit=120 * MINUTE,
            stop_seconds_max=stop_seconds_max,
        )
        work = asyncio.create_task(worker.run())
        await self.clock.advance(timedelta(0))
        try:
            yield engine
        finally:
            work.cancel()
            await self.clock.advance(timedelta(0))
            stopping = asyncio.gather(work, return_exceptions=True)
            if stop_seconds_max < 1:
                await stopping
            else:
                await self.clock.advance(timedelta(seconds=platform.stop_seconds))
                await stopping


@pytest.mark.parametrize("stop_seconds", [0.0, 2.0, EXEC_SECONDS, LIBVIRT_SECONDS])
def test_next_try_begins_soon_after_that_of_a_lost_server_has_ended(stop_seconds: float) -> None:
    """A server that is cut off from the store needs time to stop, and others do not see when it
    has. What stops at once is taken over as soon as the lease has ended.
    """

    async def run() -> None:
        world = World(stop_seconds)
        async with world.server("w1", world.first) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            async with world.server("w2", world.second):
                world.store.lose()
                lost_at = world.clock.now()
                for _ in range(120):
                    await world.clock.advance(SECOND / 2)

                assert world.first.ended_at is not None
                assert world.second.began_at is not None
                assert world.first.ended_at < world.second.began_at
                latest = timedelta(seconds=max(TTL_SECONDS, TTL_SECONDS * 2 / 3 + stop_seconds + 2))
                assert world.second.began_at <= lost_at + latest

    asyncio.run(run())


def test_server_that_stops_lets_others_begin_once_its_calls_have_ended() -> None:
    """It releases its claims itself: a rolling restart needs no wait."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        async with world.server("w1", world.first) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
        async with world.server("w2", world.second):
            await world.clock.advance(timedelta(0))

            assert world.first.ended_at == NOON + timedelta(seconds=1 + LIBVIRT_SECONDS)
            assert world.second.began_at == world.first.ended_at

    asyncio.run(run())


def test_server_that_stops_before_its_calls_have_ended_leaves_its_claims() -> None:
    """A libvirt call cannot be canceled, and a server that stops does not wait forever."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        async with world.server("w1", world.first, stop_seconds_max=0.01) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
        async with world.server("w2", world.second):
            await world.clock.advance(timedelta(seconds=LIBVIRT_SECONDS - 4))
            assert world.second.began_at is None
            await world.clock.advance(timedelta(seconds=4))

            assert world.second.began_at is not None

    asyncio.run(run())


def test_delay_and_head_start_cover_the_time_to_stop() -> None:
    """The last third of the ttl is the head start, less a second for noticing the loss."""
    head_start = timedelta(seconds=TTL_SECONDS / 3 - 1)
    assert takeover_delay(2.0) == timedelta(0)
    assert takeover_delay(EXEC_SECONDS) + head_start == timedelta(seconds=EXEC_SECONDS)
    assert takeover_delay(LIBVIRT_SECONDS) + head_start == timedelta(seconds=LIBVIRT_SECONDS)
