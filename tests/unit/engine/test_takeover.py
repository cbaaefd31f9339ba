"""Two tries of one impact never act at the same time, whatever the platform needs to stop."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest

from forewarn.config import Config
from forewarn.core.event import ImpactState
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.lease import LATE_SECONDS, takeover_delay
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.lab.clock import VirtualClock
from forewarn.option_kind import ExecCommand
from forewarn.platform.base import COMMAND_GRACE_SECONDS, ImpactRequest, ImpactResult
from forewarn.platform.exec import ExecPlatform
from forewarn.platform.threads import LAST_CALL_SECONDS, CallThreads
from forewarn.platform.watchdog import SILENT_SECONDS
from forewarn.store.base import HELD_SHARE, Lease
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND, guid
from tests.unit.engine.test_follow import TTL_SECONDS, DistantStore
from tests.unit.engine.test_lease import fail_host

EXEC_SECONDS = SILENT_SECONDS + COMMAND_GRACE_SECONDS
LIBVIRT_SECONDS = Config().libvirt_call_seconds_max + LAST_CALL_SECONDS


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
        self.first_ended_at: datetime | None = None
        self.tries_begun = 0

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        self.began_at = self._clock.now()
        self.tries_begun += 1
        try:
            await self._clock.sleep_until(self.began_at + 60 * MINUTE)
        except asyncio.CancelledError:
            stop = timedelta(seconds=self.stop_seconds)
            await self._clock.sleep_until(self._clock.now() + stop)
            raise
        finally:
            self.ended_at = self._clock.now()
            self.first_ended_at = self.first_ended_at or self.ended_at
        return ImpactResult()


class ThreadPlatform(StubbornPlatform):
    """Acts in a thread until `go` is set, as the libvirt platform does: nothing cancels that."""

    def __init__(self, clock: VirtualClock, stop_seconds: float) -> None:
        super().__init__(clock, stop_seconds)
        self.acts, self.go = threading.Event(), threading.Event()

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        await CallThreads().call("a", self._act, 60.0, on_cancel=lambda: None)
        return ImpactResult()

    def _act(self) -> None:
        self.acts.set()
        assert self.go.wait(60)


def states_of(engine: Engine) -> list[ImpactState]:
    scopes = engine.board.scopes.values()
    return [impact.state for published in scopes for impact in published.scope.impacts]


class World:
    """Two servers on one store; the first has begun an impact when the second starts."""

    def __init__(self, stop_seconds: float) -> None:
        self.clock, self.shared = VirtualClock(NOON), MemoryStore()
        self.store = PunctualStore(self.shared, self.clock)
        self.first = StubbornPlatform(self.clock, stop_seconds)
        self.second = StubbornPlatform(self.clock, stop_seconds)

    @asynccontextmanager
    async def server(
        self,
        name: str,
        platform: StubbornPlatform,
        stop_seconds_max: float = 60.0,
        impact_limit: timedelta = 120 * MINUTE,
    ) -> AsyncIterator[Engine]:
        store = self.store if platform is self.first else PunctualStore(self.shared, self.clock)
        engine = Engine(store, self.clock, Timing())
        await engine.load()
        worker = Worker(
            engine,
            platform,
            worker=name,
            impact_limit=impact_limit,
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


def test_server_that_stops_leaves_a_claim_whose_thread_still_acts() -> None:
    """The task of a call can be canceled, and its thread cannot."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        platform = world.first = ThreadPlatform(world.clock, LIBVIRT_SECONDS)
        async with world.server("w1", platform, stop_seconds_max=0.01) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            assert await asyncio.to_thread(platform.acts.wait, 30)
        async with world.server("w2", world.second):
            await world.clock.advance(timedelta(seconds=LIBVIRT_SECONDS - 4))
            assert world.second.began_at is None
        platform.go.set()

    asyncio.run(run())


def test_try_after_a_time_limit_begins_when_the_last_one_has_ended() -> None:
    """A call that takes too long is canceled, and may act for a while after that."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        platform = world.first
        async with world.server("w1", platform, impact_limit=MINUTE) as engine:
            await fail_host(engine)
            await world.clock.advance(MINUTE + timedelta(seconds=LIBVIRT_SECONDS))
            assert platform.ended_at == NOON + MINUTE + timedelta(seconds=LIBVIRT_SECONDS)
            assert platform.tries_begun == 1
            await world.clock.advance(5 * SECOND)

            assert platform.tries_begun == 2
            assert platform.began_at == platform.ended_at + 5 * SECOND

    asyncio.run(run())


def test_try_after_a_time_limit_waits_no_longer_than_the_platform_may_act() -> None:
    """A platform that ignores a cancel must not keep the impact from being tried again."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        platform = world.first = ThreadPlatform(world.clock, LIBVIRT_SECONDS)
        async with world.server("w1", platform, 0.01, impact_limit=MINUTE) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            assert await asyncio.to_thread(platform.acts.wait, 30)
            await world.clock.advance(MINUTE + timedelta(seconds=LIBVIRT_SECONDS - 2))
            assert states_of(engine) == [ImpactState.CLAIMED]
            await world.clock.advance(SECOND)

            assert states_of(engine) == [ImpactState.WAITING]
        platform.go.set()

    asyncio.run(run())


async def complete_and_restart(engine: Engine) -> None:
    """An operator completes the event whose impact runs, and restarts its VM."""
    operations = Operations(engine, lambda: guid(2))
    (event_id,) = engine.board.events
    await operations.complete(event_id, by="ann")
    assert await operations.restart("web-1", by="ann") is None


def test_impact_after_a_completed_event_begins_when_its_call_has_ended() -> None:
    """The call is canceled when the event is completed, and may act for a while after that."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        platform = world.first
        async with world.server("w1", platform) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            await complete_and_restart(engine)
            for _ in range(int(LIBVIRT_SECONDS) + 2):
                await world.clock.advance(SECOND)

            assert platform.tries_begun == 2
            assert platform.first_ended_at == NOON + timedelta(seconds=1 + LIBVIRT_SECONDS)
            assert platform.began_at is not None
            assert platform.first_ended_at <= platform.began_at

    asyncio.run(run())


@pytest.mark.parametrize("impact_limit", [120 * MINUTE, SECOND])
def test_impact_after_a_completed_event_waits_no_longer_than_its_call_may_act(
    impact_limit: timedelta,
) -> None:
    """A call may have reached its time limit before, and be waited for already."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        platform = world.first = ThreadPlatform(world.clock, LIBVIRT_SECONDS)
        async with world.server("w1", platform, 0.01, impact_limit=impact_limit) as engine:
            await fail_host(engine)
            await world.clock.advance(2 * SECOND)
            assert await asyncio.to_thread(platform.acts.wait, 30)
            await complete_and_restart(engine)
            await world.clock.advance(timedelta(seconds=LIBVIRT_SECONDS - 1))
            assert states_of(engine) == [ImpactState.WAITING]
            await world.clock.advance(2 * SECOND)

            assert states_of(engine) == [ImpactState.CLAIMED]
        platform.go.set()

    asyncio.run(run())


def test_server_that_stops_does_not_wait_for_the_call_of_a_completed_event() -> None:
    """A server that stops waits for a few seconds, whatever the platform may take."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        platform = world.first = ThreadPlatform(world.clock, LIBVIRT_SECONDS)
        async with world.server("w1", platform, stop_seconds_max=0.01) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            assert await asyncio.to_thread(platform.acts.wait, 30)
            await complete_and_restart(engine)
            await world.clock.advance(SECOND)
        assert states_of(engine) == [ImpactState.WAITING]
        platform.go.set()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("is_lost", [False, True])
def test_other_server_begins_when_the_call_of_a_completed_event_has_ended(is_lost: bool) -> None:
    """The event is over in the store, and the server that made the call may be cut off from it."""

    async def run() -> None:
        world = World(LIBVIRT_SECONDS)
        async with world.server("w1", world.first) as engine:
            await fail_host(engine)
            await world.clock.advance(SECOND)
            async with world.server("w2", world.second) as other:
                if is_lost:
                    world.store.lose()
                await complete_and_restart(other)
                for _ in range(60):
                    await world.clock.advance(SECOND)

                ended_at = world.first.first_ended_at
                assert ended_at is not None
                began_at = max(filter(None, (world.first.began_at, world.second.began_at)))
                assert ended_at <= began_at <= ended_at + 4 * SECOND

    asyncio.run(run())


def test_delay_and_head_start_cover_the_time_to_stop() -> None:
    """The last third of the ttl is the head start, less a second for noticing the loss."""
    head_start = timedelta(seconds=TTL_SECONDS / 3 - 1)
    assert takeover_delay(2.0) == timedelta(0)
    assert takeover_delay(EXEC_SECONDS) + head_start == timedelta(seconds=EXEC_SECONDS)
    assert takeover_delay(LIBVIRT_SECONDS) + head_start == timedelta(seconds=LIBVIRT_SECONDS)


def test_command_of_a_stopped_server_has_ended_before_the_next_try_begins() -> None:
    """The server could not renew its lease, and was stopped (SIGSTOP) just before it noticed."""
    command = ExecCommand("Reboot", ("true",))
    platform = ExecPlatform([command], seconds_max=60, environ=dict(os.environ))
    renewed_at = NOON
    stopped_at = renewed_at + timedelta(seconds=TTL_SECONDS * HELD_SHARE + LATE_SECONDS)
    killed_at = stopped_at + timedelta(seconds=SILENT_SECONDS + COMMAND_GRACE_SECONDS)
    lease_ends_at = renewed_at + timedelta(seconds=TTL_SECONDS)
    assert killed_at <= lease_ends_at + takeover_delay(platform.stop_seconds)
