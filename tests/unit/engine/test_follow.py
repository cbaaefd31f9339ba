"""A server that has lost its store shows what it knows, and resumes where it was."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta

import pytest

from forewarn.core.change import ChangeKind
from forewarn.core.command import Restart, Seen
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import Compacted, StoreLost
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import Lease, Record, RevisionCheck, Snapshot, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND, guid
from tests.history import entries_of
from tests.unit.engine.test_engine import FLEET, World

TTL_SECONDS = 10.0


class DistantStore:
    """One server's connection to a store that others share. `is_lost` cuts it.

    Its leases are renewed by the simulated clock while the connection holds.
    """

    def __init__(self, inner: MemoryStore, clock: VirtualClock) -> None:
        self._inner, self._clock = inner, clock
        self._cut = asyncio.Event()
        self.loads = 0
        self.is_compacted = False
        self.batches_pass = asyncio.Event()
        self.batches_pass.set()
        self.history, self.latest, self.trim = inner.history, inner.latest, inner.trim

    @property
    def is_lost(self) -> bool:
        return self._cut.is_set()

    def lose(self) -> None:
        self._cut.set()

    def restore(self) -> None:
        self._cut.clear()

    def _check(self) -> None:
        if self.is_lost:
            raise StoreLost("no route to host")

    async def first_of_newest(self, commits: int) -> int:
        return await self._inner.first_of_newest(commits)

    async def get(self, key: str) -> Record:
        self._check()
        return await self._inner.get(key)

    async def load(self, prefix: str = "") -> Snapshot:
        self._check()
        self.loads += 1
        return await self._inner.load(prefix)

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        self._check()
        return await self._inner.commit(writes, checks, entries)

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        self._check()
        if self.is_compacted:
            self.is_compacted = False
            raise Compacted("load again")
        batches = self._inner.watch(after)
        while True:
            batch = asyncio.ensure_future(anext(batches))
            cut = asyncio.ensure_future(self._cut.wait())
            try:
                await asyncio.wait((batch, cut), return_when=asyncio.FIRST_COMPLETED)
                self._check()
                await self.batches_pass.wait()
                yield batch.result()
            finally:
                cut.cancel()
                batch.cancel()
                with suppress(asyncio.CancelledError):
                    await batch

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        self._check()
        inner = await self._inner.lease(name, ttl_seconds)
        if inner is None:
            return None

        def seconds() -> float:
            return (self._clock.now() - NOON).total_seconds()

        lease = Lease(name, inner.revision, ttl_seconds, seconds, delete=inner.delete)
        asyncio.get_running_loop().create_task(self._renew(lease))
        return lease

    async def _renew(self, lease: Lease) -> None:
        """Renew it every third of its ttl, and delete it after a ttl without renewal."""
        renewed_at = self._clock.now()
        ttl = timedelta(seconds=lease.ttl_seconds)
        while self._clock.now() < renewed_at + ttl:
            if lease.is_held() and not self.is_lost:
                renewed_at = self._clock.now()
                lease.renew((renewed_at - NOON).total_seconds())
            await self._clock.sleep_until(self._clock.now() + ttl / 3)
        lease.end()
        await self._inner.expire(lease.name)

    async def close(self) -> None:
        """The shared store stays open for the others."""


class RecordingPlatform:
    """Takes a minute for an impact, and remembers when each began."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.began_at: list[datetime] = []

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        self.began_at.append(self._clock.now())
        await self._clock.sleep_until(self._clock.now() + MINUTE)
        return ImpactResult()


class Server:
    """A server at work behind a connection that can be cut."""

    def __init__(self, world: World, platform: RecordingPlatform) -> None:
        self.store = DistantStore(world.store, world.clock)
        self.engine = Engine(self.store, world.clock, Timing())
        self.operations = Operations(self.engine, world.make_id)
        self._platform = platform

    @asynccontextmanager
    async def at_work(self, name: str) -> AsyncIterator[None]:
        await self.engine.load()
        worker = Worker(self.engine, self._platform, worker=name, impact_limit=10 * MINUTE)
        task = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[World, Server, Server, RecordingPlatform]]:
    """Both follow the store; the first has declared the fleet, whose scope `web` is polled."""
    world = World()
    platform = RecordingPlatform(world.clock)
    one, two = Server(world, platform), Server(world, platform)
    async with one.at_work("one"), two.at_work("two"):
        await one.operations.apply(FLEET, by="ann")
        await one.engine.submit("web", Seen(), by="poll")
        await world.clock.advance(SECOND)
        yield world, one, two, platform


def test_server_resumes_after_a_loss_without_reading_everything() -> None:
    """A fleet may have a million VMs, and the network may be cut ten times a day."""

    async def main() -> None:
        async with two_servers() as (world, one, two, _):
            loads = two.store.loads
            for number in range(3):
                two.store.lose()
                await world.clock.advance(5 * SECOND)
                await one.engine.submit("web", Restart(vm="web-0", event_id=guid(number)), by="ann")
                assert not two.engine.board.events
                two.store.restore()
                await world.clock.advance(2 * SECOND)
                assert list(two.engine.board.events) == [guid(number)]
                await one.operations.cancel(guid(number), by="ann")
                await world.clock.advance(SECOND)
            assert two.store.loads == loads

    asyncio.run(main())


def test_server_reads_everything_when_the_store_has_compacted() -> None:
    async def main() -> None:
        async with two_servers() as (world, one, two, _):
            loads = two.store.loads
            two.store.lose()
            await world.clock.advance(5 * SECOND)
            await one.engine.submit("web", Restart(vm="web-0", event_id=guid(1)), by="ann")
            two.store.is_compacted = True
            two.store.restore()
            await world.clock.advance(3 * SECOND)

            assert two.engine.board.scopes["web"].scope.events[0].id == guid(1)
            assert two.store.loads == loads + 1
            assert two.engine.is_ready

    asyncio.run(main())


def test_stale_time_begins_with_the_loss_and_ends_when_caught_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ready means that this server shows what the others have promised."""
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with two_servers() as (world, one, two, _):
            caplog.clear()
            engine = two.engine
            assert (engine.is_ready, engine.stale_since, engine.stale_seconds) == (True, None, 0)
            lost_at = world.clock.now()
            two.store.lose()
            await world.clock.advance(30 * SECOND)
            assert (engine.is_ready, engine.stale_since) == (False, lost_at)
            assert engine.stale_seconds == 30

            await one.engine.submit("web", Restart(vm="web-0", event_id=guid(1)), by="ann")
            two.store.batches_pass.clear()
            two.store.restore()
            await world.clock.advance(10 * SECOND)
            assert (engine.is_ready, engine.stale_since) == (False, lost_at)

            two.store.batches_pass.set()
            await world.clock.advance(timedelta(0))
            assert (engine.is_ready, engine.stale_since, engine.stale_seconds) == (True, None, 0)

    asyncio.run(main())

    lines = [
        (record.getMessage(), record.__dict__["facts"])
        for record in caplog.records
        if record.getMessage().startswith("store ")
    ]
    assert lines == [
        (
            "store not reachable; polls are answered from memory",
            {"since": "2026-03-04T12:00:01+00:00", "problem": "no route to host"},
        ),
        ("store reachable again", {"stale_seconds": 40.0}),
    ]


@pytest.mark.parametrize("lost", ["both", "the one that works"])
def test_nothing_starts_early_or_twice_after_the_store_returns(lost: str) -> None:
    """NotBefore passes while the store is lost. The event starts after it, and once."""

    async def main() -> None:
        async with two_servers() as (world, one, two, platform):
            event = (await one.operations.restart("web-0", by="ann")).event  # type: ignore[union-attr]
            await world.clock.advance(15 * MINUTE - 5 * SECOND)
            cut = [one, two] if lost == "both" else [one]
            for server in cut:
                server.store.lose()
            await world.clock.advance(5 * MINUTE)
            if lost == "both":
                assert platform.began_at == []
            for server in cut:
                server.store.restore()
            await world.clock.advance(10 * MINUTE)

            assert len(platform.began_at) == 1
            assert platform.began_at[0] >= event.not_before
            entries = [entry for entry in await entries_of(world.store) if entry.event == event.id]
            started = [entry.at for entry in entries if entry.what is ChangeKind.STARTED]
            assert len(started) == 1
            assert started[0] >= event.not_before
            assert entries[-1].what is ChangeKind.COMPLETED
            for server in (one, two):
                assert server.engine.is_ready
                assert server.engine.board.scopes["web"].scope.events == ()

    asyncio.run(main())


def test_impact_claimed_before_the_loss_is_not_carried_out_twice_at_once() -> None:
    """The server that lost the store stops before another one takes its impact over."""

    async def main() -> None:
        async with two_servers() as (world, one, two, platform):
            event = (await one.operations.restart("web-0", by="ann")).event  # type: ignore[union-attr]
            await one.operations.approve(event.id, by="ann")
            await world.clock.advance(SECOND)
            assert len(platform.began_at) == 1
            (impact,) = one.engine.board.scopes["web"].scope.impacts
            holder = one if impact.claimed_by == "one" else two
            holder.store.lose()
            await world.clock.advance(10 * MINUTE)
            first, second = platform.began_at
            assert second - first >= timedelta(seconds=TTL_SECONDS * 2 / 3)
            holder.store.restore()
            await world.clock.advance(10 * MINUTE)

            done = [e for e in await entries_of(world.store) if e.what is ChangeKind.IMPACTED]
            assert len(done) == 1
            assert len(platform.began_at) == 2

    asyncio.run(main())
