"""Servers compare their clocks. One whose clock is off starts nothing, and breaks no promise."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from forewarn.core.change import ChangeKind
from forewarn.core.command import Extend, Seen
from forewarn.core.event import Event, EventType
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Entry
from forewarn.engine.operations import Operations
from forewarn.engine.record import CLOCK, ClockReading
from forewarn.engine.worker import Worker
from forewarn.errors import StoreLost, Unavailable
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import Store, Write
from forewarn.store.memory import MemoryStore
from forewarn.store.sqlite import SqliteStore
from tests.builders import MINUTE, NOON, SECOND, guid
from tests.history import entries_of
from tests.unit.engine.test_engine import FLEET

HOUR = timedelta(hours=1)


class OffClock(VirtualClock):
    """The clock of a server that is some seconds ahead of the true time, or behind."""

    def __init__(self, true: VirtualClock, seconds: float) -> None:
        super().__init__(NOON)
        self._true = true
        self.seconds = seconds
        self.sleeps = 0

    def now(self) -> datetime:
        return self._true.now() + timedelta(seconds=self.seconds)

    async def sleep_until(self, time: datetime) -> None:
        self.sleeps += 1
        await self._true.sleep_until(time - timedelta(seconds=self.seconds))


class Server:
    """A server with a clock of its own. `began_at` is when its impacts began, by the true time."""

    def __init__(self, store: Store, true: VirtualClock, seconds: float) -> None:
        self.clock = OffClock(true, seconds)
        self.engine = Engine(store, self.clock, Timing())
        ids = map(guid, count(1))
        self.operations = Operations(self.engine, lambda: next(ids))
        self.began_at: list[datetime] = []
        self._true = true

    async def run_impact(self, _: ImpactRequest) -> ImpactResult:
        self.began_at.append(self._true.now())
        return ImpactResult()

    @asynccontextmanager
    async def at_work(self, name: str) -> AsyncIterator["Server"]:
        await self.engine.load()
        work = Worker(self.engine, self, worker=name, impact_limit=HOUR).run()
        task = asyncio.create_task(work)
        await self._true.advance(timedelta(0))
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def skew(self) -> float:
        return self.engine.clock_skew_seconds


class World:
    """One store, the true time, and servers whose clocks may be off."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = VirtualClock(NOON)
        self.count = 0

    def server(self, seconds: float = 0) -> Server:
        return Server(self.store, self.clock, seconds)

    @asynccontextmanager
    async def servers(self, *seconds: float) -> AsyncIterator[list[Server]]:
        async with AsyncExitStack() as stack:
            servers = []
            for each in seconds:
                self.count += 1
                working = self.server(each).at_work(f"s{self.count}")
                servers.append(await stack.enter_async_context(working))
            await self.clock.advance(timedelta(0))
            yield servers

    async def clock_keys(self) -> list[str]:
        return [record.key for record in (await self.store.load("clock/")).records]


async def restart(server: Server) -> Event:
    """A restart of a VM that polls, announced by this server."""
    await server.operations.apply(FLEET, by="ann")
    await server.engine.submit("web", Seen(), by="poll")
    outcome = await server.operations.restart("web-0", by="ann")
    assert outcome is not None
    return outcome.event


@pytest.mark.parametrize(
    ("clocks", "skews"),
    [
        ([0, 0], [0, 0]),
        ([0, 30], [0, 30]),
        ([0, -30], [30, 0]),
        ([0, 2], [0, 2]),
        ([0, 0, 30], [0, 0, 30]),
        ([0, -30, 0], [0, -30, 0]),
        ([1, 2, 3], [-1, 0, 1]),
        ([0, 0, 30, 30], [0, 0, 30, 30]),
    ],
)
def test_skew_is_the_distance_from_the_lower_median(
    clocks: Sequence[float], skews: Sequence[float]
) -> None:
    """Of two servers the one that is ahead is off: late is safe, early is not."""

    async def main() -> None:
        async with World().servers(*clocks) as servers:
            assert [server.skew for server in servers] == skews
            is_off = [server.engine.is_clock_off for server in servers]
            assert is_off == [abs(skew) > 5 for skew in skews]

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [30, 3600, -30, -3600])
def test_server_whose_clock_is_off_starts_nothing(seconds: float) -> None:
    """The others start the event, at its NotBefore."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0, seconds) as (one, two, off):
            event = await restart(one)
            await world.clock.advance(2 * HOUR)

            assert off.began_at == []
            assert one.began_at + two.began_at == [event.not_before]

    asyncio.run(main())


def test_of_two_servers_the_later_clock_decides() -> None:
    """Nobody knows which one is right. By both clocks nothing starts early."""

    async def main() -> None:
        world = World()
        async with world.servers(0, -30) as (ahead, behind):
            event = await restart(behind)
            await world.clock.advance(HOUR)

            assert ahead.began_at == []
            assert behind.began_at == [event.not_before + 30 * SECOND]

    asyncio.run(main())


def test_command_at_a_server_that_is_ahead_starts_nothing_early() -> None:
    """Every command starts what is due in its scope, so it must not go by the wrong clock."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0, 3600) as (one, _, off):
            event = await restart(one)
            later = event.not_before + MINUTE
            extend = Extend(event_id=event.id, not_before=later)
            await off.engine.submit("web", extend, by="ann")
            await off.operations.apply(FLEET, by="ann")
            await off.engine.submit("web", Seen(), by="poll")
            await world.clock.advance(timedelta(0))

            scope = one.engine.board.scopes["web"].scope
            statuses = [(each.status, each.not_before) for each in scope.events]
            assert statuses == [("Scheduled", later)]

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [30, -30])
def test_server_whose_clock_is_off_announces_nothing(seconds: float) -> None:
    """The notice would begin at a time that is wrong, or that only seems to be right."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0, seconds) as (one, _, off):
            await restart(one)
            revision = (await world.store.load()).revision
            announce = [
                off.operations.restart("web-1", by="ann"),
                off.operations.maintain("host-b", type=EventType.FREEZE, by="ann"),
                off.operations.degrade("host-b", by="ann"),
            ]
            for operation in announce:
                with pytest.raises(Unavailable, match=rf"clock is \{seconds:+.1f} s .* another"):
                    await operation
            assert (await world.store.load()).revision == revision

    asyncio.run(main())


def test_server_that_was_stopped_never_announces_in_the_past() -> None:
    """It reads the record of a server that started meanwhile late, so its own clock seems ahead."""

    async def main() -> None:
        world = World()
        async with world.servers(0) as (stopped,):
            await restart(stopped)
            await world.store.lease("server/s2", 10)
            await write_clock(world.store, "s2", NOON - 20 * SECOND)
            await world.clock.advance(timedelta(0))
            assert stopped.engine.is_clock_off
            with pytest.raises(Unavailable):
                await stopped.operations.restart("web-1", by="ann")
            await write_clock(world.store, "s2", NOON)
            await world.clock.advance(timedelta(0))
            outcome = await stopped.operations.restart("web-1", by="ann")
            assert outcome is not None
            assert outcome.event.not_before == NOON + 15 * MINUTE

    asyncio.run(main())


def test_server_resumes_when_its_clock_is_right_again(caplog: pytest.LogCaptureFixture) -> None:
    """One line when it begins, one when it ends, however often they compare."""

    async def main() -> None:
        world = World()
        async with world.servers(30) as (off,):
            async with world.servers(0, 0) as (one, _):
                event = await restart(one)
                await world.clock.advance(5 * MINUTE)
                assert off.engine.is_clock_off
                off.clock.seconds = 0
                await world.clock.advance(2 * MINUTE)
                assert not off.engine.is_clock_off
            await world.clock.advance(HOUR)
            assert off.began_at == [event.not_before]

    caplog.set_level(logging.WARNING)
    asyncio.run(main())
    lines = [record for record in caplog.records if record.getMessage().startswith("clock ")]
    assert [(line.levelname, line.getMessage()) for line in lines] == [
        ("ERROR", "clock differs from the other servers; no events start here"),
        ("WARNING", "clock agrees with the other servers again"),
    ]
    assert lines[0].__dict__["facts"] == {"seconds": 30.0, "seconds_max": 5.0}


def test_server_that_starts_with_a_wrong_clock_never_ticks() -> None:
    """An event is due by its clock in the moment in which it starts."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0) as (one, _):
            event = await restart(one)
            async with world.servers(3600) as (off,):
                await world.clock.advance(MINUTE)
                assert off.began_at == []
                assert not await started(world)
            await world.clock.advance(HOUR)
            assert [entry.at for entry in await started(world)] == [event.not_before]

    asyncio.run(main())


async def started(world: World) -> list[Entry]:
    return [e for e in await entries_of(world.store) if e.what is ChangeKind.STARTED]


def test_server_waits_five_seconds_for_one_that_does_not_answer() -> None:
    """It may hang, or be of a version that does not compare."""

    async def main() -> None:
        world = World()
        first = world.server()
        await first.engine.load()
        event = await restart(first)
        await world.store.lease("server/silent", 10)
        await world.clock.advance(15 * MINUTE)
        async with world.servers(0) as (server,):
            await world.clock.advance(4 * SECOND)
            assert server.began_at == []
            await world.clock.advance(2 * SECOND)
            assert len(server.began_at) == 1
            assert server.began_at[0] >= event.not_before

    asyncio.run(main())


def test_server_does_not_wait_longer_because_a_commit_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for comparing may pass during the commit."""

    async def main() -> None:
        world = World()
        first = world.server()
        await first.engine.load()
        await restart(first)
        await world.store.lease("server/silent", 10)
        await world.clock.advance(15 * MINUTE)
        commit = world.store.commit

        async def commit_slowly(writes: Sequence[Write], *others: Any) -> int:
            if any(write.key.startswith("clock/") for write in writes):
                await world.clock.sleep_until(world.clock.now() + 2.1 * SECOND)
            return await commit(writes, *others)

        monkeypatch.setattr(world.store, "commit", commit_slowly)
        async with world.servers(0) as (server,):
            for _ in range(9):
                await world.clock.advance(SECOND)
            assert len(server.began_at) == 1

    asyncio.run(main())


def test_lone_server_writes_nothing() -> None:
    """The lab, and most installations: no commit, and no timer in its virtual time."""

    async def main() -> None:
        world = World()
        async with world.servers(0) as (server,):
            await restart(server)
            revision = (await world.store.load()).revision
            await world.clock.advance(14 * MINUTE)
            assert (await world.store.load()).revision == revision
            assert await world.clock_keys() == []

    asyncio.run(main())


def test_servers_write_twice_a_minute_and_clean_up_after_the_dead() -> None:
    async def main() -> None:
        world = World()
        async with world.servers(0, 0):
            async with world.servers(0):
                assert await world.clock_keys() == ["clock/s1/", "clock/s2/", "clock/s3/"]
            await world.clock.advance(MINUTE)
            assert await world.clock_keys() == ["clock/s1/", "clock/s2/"]
            revision = (await world.store.load()).revision
            await world.clock.advance(10 * MINUTE)
            assert (await world.store.load()).revision == revision + 2 * 20

    asyncio.run(main())


def test_record_that_arrives_late_does_not_stop_a_server() -> None:
    """A record that is 20 s old on arrival looks like a clock that is 20 s behind."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0) as (one, two):
            await write_clock(world.store, "s2", NOON - 20 * SECOND)
            await world.clock.advance(timedelta(0))
            assert (one.skew, two.skew) == (0, 0)
            for _ in range(3):
                await write_clock(world.store, "s2", NOON - 20 * SECOND)
                await world.clock.advance(timedelta(0))
            assert one.skew == 20

    asyncio.run(main())


def test_record_read_after_a_loss_of_the_store_is_not_compared() -> None:
    """It is as old as the loss was long."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0) as (one, _):
            one.engine.is_ready = False
            for _ in range(3):
                await write_clock(world.store, "s2", NOON - 20 * SECOND)
                await world.clock.advance(timedelta(0))
            assert one.skew == 0

    asyncio.run(main())


def test_server_that_has_lost_its_store_waits_before_it_writes_its_time_again() -> None:
    """It used a whole core until it lost its lease, too."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0) as (one, _):
            one.engine.is_ready = False
            await world.clock.advance(40 * SECOND)
            begun = one.clock.sleeps
            for _ in range(100):
                await asyncio.sleep(0)
            assert one.clock.sleeps - begun < 5, "no time has passed"

    asyncio.run(main())


async def write_clock(store: Store, server: str, at: datetime) -> None:
    """Write the record of another server, as if it came late."""
    key = f"clock/{server}/"
    known = await store.get(key)
    value = CLOCK.encode(ClockReading(server, at))
    await store.commit([Write(key, value, known.revision if known.value else 0)])


def test_clocks_are_compared_through_a_file(tmp_path: Path) -> None:
    """Servers on one machine share a clock; the delay of the store does not look like skew."""

    async def main() -> None:
        clock = VirtualClock(NOON)
        stores = [await SqliteStore.open(str(tmp_path / "store.db")) for _ in range(2)]
        one, two = (Server(store, clock, 30 * n) for n, store in enumerate(stores))
        async with one.at_work("one"), two.at_work("two"):
            async with asyncio.timeout(20):
                while not two.engine.is_clock_off:
                    await asyncio.sleep(0.01)
            assert (one.skew, two.skew) == (0, 30)
        for store in stores:
            await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [-30, 2])
def test_a_command_waits_until_the_clock_has_been_compared(seconds: float) -> None:
    """A server that starts would give notice, and start events, by a clock that may be off."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0) as (first, _):
            await first.operations.apply(FLEET, by="ann")
            await first.engine.submit("web", Seen(), by="poll")
            starting = world.server(seconds)
            starting.engine.clock_compared.clear()
            await starting.engine.load()
            asking = asyncio.create_task(starting.operations.restart("web-0", by="ann"))
            await world.clock.advance(timedelta(0))
            assert not asking.done()
            async with starting.at_work("starting"):
                if abs(seconds) > 5:
                    with pytest.raises(Unavailable):
                        await asking
                else:
                    assert await asking is not None

    asyncio.run(main())


def test_a_command_waits_for_a_server_that_does_not_compare_only_a_while() -> None:
    """One that has died holds its lease for ten seconds."""

    async def main() -> None:
        world = World()
        first = world.server()
        await first.engine.load()
        await restart(first)
        await world.store.lease("server/dead", 10)
        starting = world.server()
        starting.engine.clock_compared.clear()
        async with starting.at_work("starting"):
            asking = asyncio.create_task(starting.operations.restart("web-1", by="ann"))
            await world.clock.advance(4 * SECOND)
            assert not asking.done()
            await world.clock.advance(2 * SECOND)
            assert await asking is not None

    asyncio.run(main())


def test_command_is_refused_by_a_server_that_could_not_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lease may be blocked, so it knows nothing of the other clocks."""
    monkeypatch.setattr("forewarn.engine.engine.CLOCK_COMPARED_SECONDS_MAX", 0.05)

    async def main() -> None:
        world = World()
        async with world.servers(0, 0) as (first, _):
            await first.operations.apply(FLEET, by="ann")
            await first.engine.submit("web", Seen(), by="poll")
            starting = world.server(-3600)
            starting.engine.clock_compared.clear()
            await starting.engine.load()
            with pytest.raises(Unavailable, match="has not compared its clock"):
                await starting.operations.restart("web-0", by="ann")

    asyncio.run(main())


def test_server_that_is_ahead_starts_nothing_early_when_the_others_leave() -> None:
    """It is alone then, but it still knows that its clock is wrong. Nobody else would start it."""

    async def main() -> None:
        world = World()
        async with world.servers(3600) as (off,):
            async with world.servers(0, 0) as (one, _):
                event = await restart(one)
                await world.clock.advance(MINUTE)
            await world.clock.advance(MINUTE)
            assert off.engine.is_clock_off
            assert off.began_at == []
            await world.clock.advance(HOUR)
            assert off.began_at == [event.not_before]

    asyncio.run(main())


def test_server_asks_again_if_the_first_answers_were_lost() -> None:
    """Its watch is cut while the others answer. Else it would tick by a clock that is wrong."""

    async def main() -> None:
        world = World()
        async with world.servers(0, 0) as (one, _):
            event = await restart(one)
            off = world.server(3600)
            await off.engine.load()
            off.engine.is_ready = False
            worker = Worker(off.engine, off, worker="off", impact_limit=HOUR)
            cut = cut_watch_once(off.engine)
            task = asyncio.create_task(worker.run())
            for _ in range(10):
                await world.clock.advance(SECOND)
            assert cut == ["cut"]
            assert off.engine.is_clock_off
            await world.clock.advance(HOUR)
            assert off.began_at == []
            assert [entry.at for entry in await started(world)] == [event.not_before]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def cut_watch_once(engine: Engine) -> list[str]:
    """Let the first watch of this engine fail; the result says that it did."""
    watch, cuts = engine._watch, list[str]()

    async def cut_once() -> None:
        if not cuts:
            cuts.append("cut")
            raise StoreLost("cut")
        await watch()

    engine._watch = cut_once  # type: ignore[method-assign]
    return cuts


def test_many_dead_servers_do_not_end_the_comparison() -> None:
    """A commit holds 120 writes; some records are deleted at a time."""

    async def main() -> None:
        world = World()
        for number in range(130):
            await write_clock(world.store, f"dead{number}", NOON)
        async with world.servers(0, 0, 30) as (_, _, off):
            await world.clock.advance(5 * MINUTE)
            assert off.engine.is_clock_off
            assert await world.clock_keys() == ["clock/s1/", "clock/s2/", "clock/s3/"]

    asyncio.run(main())
