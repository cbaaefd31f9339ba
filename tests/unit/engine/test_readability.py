"""Notice does not pass while no server shows what was committed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest

from forewarn.core.command import Approve, Seen, SetMembers
from forewarn.core.event import Event, EventType, Gap
from forewarn.core.fleet import DEFAULT_POLICY, ScopeKind, Vm
from forewarn.engine.engine import SHOWN_KEY
from forewarn.engine.readability import Readability
from forewarn.engine.record import SHOWN, Shown
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Conflict, Error, StoreLost
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import RevisionCheck, Store, Write
from forewarn.store.memory import MemoryStore
from tests.history import entries_of
from tests.unit.engine.hostd_world import NOON, SECOND, SETTLE_TURNS, Path, Server, SlowStore

MINUTE = timedelta(minutes=1)


class QuorumStore(MemoryStore):
    """A store that may lose its quorum: then its leader keeps commits, and applies them later."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False
        self.log: list[tuple[Sequence[Write], Sequence[RevisionCheck], bytes | None]] = []

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        if not self.is_lost:
            return await super().commit(writes, checks, entries)
        self.log.append((writes, checks, entries))
        raise StoreLost("no leader")

    async def get(self, key: str) -> Any:
        if self.is_lost:
            raise StoreLost("no leader")
        return await super().get(key)

    async def recover(self) -> None:
        """The quorum is back: what is in the log is applied before anything else."""
        self.is_lost, log = False, self.log
        self.log = []
        for writes, checks, entries in log:
            try:
                await super().commit(writes, checks, entries)
            except Conflict:
                continue


class World:
    """Servers on one store, a VM in each of the scopes `v` and `w`, and a clock."""

    def __init__(self) -> None:
        self.store, self.clock = QuorumStore(), VirtualClock(NOON)
        self.servers: list[Server] = []
        self._stack = AsyncExitStack()

    async def start(self, store: Store | None = None) -> Server:
        name = f"server-{len(self.servers) + 1}"
        server = Server(store or self.store, self.clock, name, is_confirming=True)
        await server.start()
        self._stack.push_async_callback(server.stop)
        self.servers.append(server)
        await self.settle()
        return server

    async def settle(self) -> None:
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    async def advance(self, duration: timedelta) -> None:
        await self.clock.advance(duration)
        await self.settle()

    async def suspend(self, duration: timedelta) -> None:
        """Every process stops for this time, and continues."""
        await self.clock.jump(self.clock.now() + duration)
        await self.settle()

    async def apply(self, server: Server, *, polls: bool = True) -> None:
        for name in ("v", "w"):
            members = SetMembers(kind=ScopeKind.VM, policy=DEFAULT_POLICY, vms=(Vm(name),))
            await server.engine.submit(name, members, "test")
            if polls:
                await server.engine.submit(name, Seen(), "test")
        await self.settle()

    async def shown(self) -> Shown | None:
        value = (await self.store.get(SHOWN_KEY)).value
        return None if value is None else SHOWN.decode(value)

    def event(self, scope: str = "v", server: int = -1) -> Event:
        (event,) = self.servers[server].scope(scope).events
        return event

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def open_world(servers: int = 1) -> AsyncIterator[World]:
    world = World()
    try:
        for _ in range(servers):
            await world.start()
        await world.apply(world.servers[0])
        yield world
    finally:
        await world.close()


def run(test: Callable[[World], Awaitable[None]], servers: int = 1) -> None:
    async def main() -> None:
        async with open_world(servers) as world:
            await test(world)

    asyncio.run(main())


async def announce_in_outage(world: World, operation: Callable[..., Awaitable[object]]) -> None:
    """An operation whose commit stays in the log of the store for ten minutes."""
    world.store.is_lost = True
    request = asyncio.ensure_future(operation("v", by="ann"))
    await world.settle()
    for _ in range(600):
        await world.clock.advance(SECOND)
    await world.store.recover()
    with pytest.raises(Error):
        await request
    await world.advance(3 * SECOND)


def test_announcement_that_the_store_commits_late_has_all_its_notice() -> None:
    """The operator saw an error; etcd commits it ten minutes later, with the quorum."""

    async def test(world: World) -> None:
        await announce_in_outage(world, world.servers[0].operations.restart)
        left = world.event().not_before - (NOON + 600 * SECOND)
        assert 15 * MINUTE <= left <= 15 * MINUTE + 3 * SECOND
        (entry,) = [each for each in await entries_of(world.store) if each.what == "extended"]
        assert entry.detail.endswith("it could not be read for 10m")

    run(test)


def test_preempt_that_the_store_commits_late_is_not_started() -> None:
    """Its 30 seconds had passed before anybody could read it."""

    async def test(world: World) -> None:
        await announce_in_outage(world, world.servers[0].operations.evict)
        assert world.event().status == "Scheduled"
        assert world.event().not_before >= NOON + 630 * SECOND
        await world.advance(world.event().not_before - world.clock.now() - SECOND)
        assert world.event().status == "Scheduled"
        await world.advance(2 * SECOND)
        assert world.servers[0].scope("v").events == ()

    run(test)


def test_preempt_that_is_committed_while_a_server_confirms_is_not_started() -> None:
    """The server has looked at the scope before it came: the Tick is not for this event."""

    async def main() -> None:
        world = World()
        path = SlowStore(world.store)
        server = await world.start(cast("Store", path))
        both = SetMembers(
            kind=ScopeKind.CLOUD_SERVICE, policy=DEFAULT_POLICY, vms=(Vm("a"), Vm("b"))
        )
        await server.engine.submit("web", both, "test")
        await server.engine.submit("web", Seen(), "test")
        await server.operations.restart("a", by="ann")
        await world.advance(14 * MINUTE + 30 * SECOND)
        world.store.is_lost = True
        request = asyncio.ensure_future(server.operations.evict("b", by="ann"))
        for _ in range(35):
            await world.advance(SECOND)
        await asyncio.gather(request, return_exceptions=True)
        late, world.store.log = world.store.log[0], []
        held = path.hold_next(SHOWN_KEY)
        path.watches.clear()
        world.store.is_lost = False
        await world.advance(SECOND)
        await world.store.commit(*late)
        held.set()
        await world.settle()
        path.watches.set()
        await world.advance(3 * SECOND)
        _, preempt = server.scope("web").events
        assert (preempt.type, preempt.status) == ("Preempt", "Scheduled")
        assert preempt.not_before >= NOON + 15 * MINUTE + 36 * SECOND
        await world.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["suspended", "killed"])
def test_only_server_was_away_and_its_events_get_their_notice(how: str) -> None:
    """The machine was suspended, or the process was down, until long after NotBefore."""

    async def test(world: World) -> None:
        await world.servers[0].operations.restart("v", by="ann")
        await world.advance(5 * MINUTE)
        if how == "suspended":
            await world.suspend(20 * MINUTE)
        else:
            await world.servers[0].stop()
            await world.advance(20 * MINUTE)
            await world.start()
        await world.advance(3 * SECOND)
        assert world.event().status == "Scheduled"
        assert 35 * MINUTE <= world.event().not_before - NOON <= 35 * MINUTE + 6 * SECOND
        await world.advance(NOON + 35 * MINUTE - world.clock.now() - SECOND)
        assert world.event().status == "Scheduled"
        await world.advance(10 * SECOND)
        assert world.servers[-1].scope("v").events == ()

    run(test)


def test_preempt_makes_up_for_a_few_seconds_without_a_server() -> None:
    """Its whole notice is 30 seconds."""

    async def test(world: World) -> None:
        await world.servers[0].operations.evict("v", by="ann")
        await world.advance(10 * SECOND)
        await world.suspend(6 * SECOND)
        await world.advance(2 * SECOND)
        assert 36 * SECOND <= world.event().not_before - NOON <= 38 * SECOND

    run(test)


def test_preempt_makes_up_for_a_gap_that_was_found_right_before_an_outage() -> None:
    """The server that found it was killed before it had stored that with the event."""

    async def test(world: World) -> None:
        await world.servers[0].operations.evict("v", by="ann")
        await world.advance(5 * SECOND)
        await world.servers[0].stop()
        await world.advance(10 * SECOND)
        store = SlowStore(world.store)
        store.hold_next(SCOPE_KEY.format("v"))
        await world.start(cast("Store", store))
        await world.advance(SECOND)
        assert world.event().not_before == NOON + 30 * SECOND
        await world.servers[-1].stop()
        await world.advance(5 * MINUTE)
        await world.start()
        await world.advance(SECOND)
        unread = 5 * MINUTE + 10 * SECOND
        left = world.event().not_before - (NOON + 30 * SECOND + unread)
        assert timedelta(0) <= left <= 3 * SECOND

    run(test)


def test_short_restart_of_the_only_server_changes_no_document() -> None:
    async def test(world: World) -> None:
        await world.servers[0].operations.restart("v", by="ann")
        await world.advance(5 * MINUTE)
        before = world.servers[0].scope("v")
        await world.servers[0].stop()
        await world.advance(9 * SECOND)
        await world.start()
        await world.advance(MINUTE)
        assert world.servers[-1].scope("v") == before

    run(test)


def test_one_of_three_servers_that_is_cut_off_changes_no_document() -> None:
    """The other two show what was committed. It says that its own documents are old."""

    async def test(world: World) -> None:
        path = Path(world.store)
        cut = await world.start(cast("Store", path))
        path.is_cut = True
        await world.servers[0].operations.restart("v", by="ann")
        await world.advance(MINUTE)
        before = world.servers[0].scope("v")
        assert cut.scope("v").events == ()
        assert cut.engine.age_seconds >= 60
        await world.advance(10 * MINUTE)
        path.is_cut = False
        await world.advance(MINUTE)
        assert (cut.scope("v"), cut.engine.age_seconds) == (before, 0)
        assert world.servers[0].scope("v") == before
        await world.advance(3 * MINUTE + SECOND)
        assert world.servers[0].scope("v").events == ()

    run(test, servers=2)


def test_approval_of_another_event_does_not_start_one_that_missed_its_notice() -> None:
    """It may be the first command after an outage, before any server has looked at its events."""

    async def test(world: World) -> None:
        both = SetMembers(
            kind=ScopeKind.CLOUD_SERVICE, policy=DEFAULT_POLICY, vms=(Vm("a"), Vm("b"))
        )
        server = world.servers[0]
        await server.engine.submit("web", both, "test")
        await server.engine.submit("web", Seen(), "test")
        await server.operations.restart("a", by="ann")
        later = await server.operations.restart("b", by="ann", not_before=NOON + 90 * MINUTE)
        assert later is not None
        await server.stop()
        await world.clock.advance(30 * MINUTE)
        again = Server(world.store, world.clock, "server-9")
        await again.engine.load()
        await again.engine.submit("web", Approve(event_ids=(later.event.id,), vm="b"), "b")
        assert [event.status for event in again.scope("web").events] == ["Scheduled", "Started"]

    run(test)


def test_event_of_a_scope_that_nobody_polls_is_not_delayed() -> None:
    """A VM that never polls delays nothing."""

    async def main() -> None:
        world = World()
        server = await world.start()
        await world.apply(server, polls=False)
        vm = Vm("v", host="host-a")
        await server.engine.submit(
            "v", SetMembers(kind=ScopeKind.VM, policy=DEFAULT_POLICY, vms=(vm,)), "test"
        )
        await server.operations.maintain("host-a", type=EventType.REBOOT, by="ann")
        await world.advance(5 * MINUTE)
        await world.suspend(20 * MINUTE)
        await world.advance(SECOND)
        assert server.scope("v").events == ()
        await world.close()

    asyncio.run(main())


def test_event_that_was_announced_long_before_is_not_delayed() -> None:
    async def test(world: World) -> None:
        not_before = NOON + 60 * MINUTE
        await world.servers[0].operations.restart("v", by="ann", not_before=not_before)
        await world.advance(5 * MINUTE)
        await world.suspend(20 * MINUTE)
        assert world.event().not_before == not_before

    run(test)


def test_nothing_is_confirmed_while_no_event_is_scheduled() -> None:
    """An idle fleet costs no writes."""

    async def test(world: World) -> None:
        await world.advance(60 * MINUTE)
        assert await world.shown() is None

    run(test, servers=3)


def test_one_of_several_servers_confirms_every_five_seconds() -> None:
    async def test(world: World) -> None:
        await world.servers[0].operations.restart("v", by="ann")
        await world.advance(10 * SECOND)
        before = await revision(world.store)
        await world.advance(5 * MINUTE)
        written = await revision(world.store) - before
        assert 60 <= written <= 60 + 3 * 11, "and each server writes its clock twice a minute"
        shown = await world.shown()
        assert shown is not None
        assert len(shown.gaps) == 1, "the time before the announcement"

    run(test, servers=3)


async def revision(store: Store) -> int:
    return (await store.get("nothing")).revision


def test_another_server_confirms_when_the_first_is_gone() -> None:
    async def test(world: World) -> None:
        await world.servers[0].operations.restart("v", by="ann")
        await world.advance(MINUTE)
        shown = await world.shown()
        assert shown is not None
        first, other = world.servers
        if shown.server != first.name:
            first, other = other, first
        await first.stop()
        await world.advance(10 * MINUTE)
        (event,) = other.scope("v").events
        assert event.not_before == NOON + 15 * MINUTE
        shown = await world.shown()
        assert shown is not None
        assert shown.server == other.name
        assert len(shown.gaps) == 1

    run(test, servers=2)


def test_late_announcement_is_refused_if_a_server_has_confirmed_since() -> None:
    """Only its own server was cut off: the others showed a document without it."""

    async def test(world: World) -> None:
        await world.servers[0].operations.restart("w", by="ann")
        await world.advance(SECOND)
        world.store.is_lost = True
        request = asyncio.ensure_future(world.servers[0].operations.restart("v", by="ann"))
        await world.settle()
        late, world.store.log = world.store.log[:1], []
        world.store.is_lost = False
        await world.advance(20 * SECOND)
        await asyncio.gather(request, return_exceptions=True)
        for writes, checks, entries in late:
            with pytest.raises(Conflict):
                await world.store.commit(writes, checks, entries)

    run(test, servers=2)


def test_server_that_does_not_serve_vms_yet_starts_nothing() -> None:
    """Its listeners come last: until then no VM can read what it shows."""

    async def main() -> None:
        world = World()
        server = await world.start()
        await world.apply(server)
        await server.operations.restart("v", by="ann")
        await server.stop()
        await world.clock.advance(30 * MINUTE)
        deaf = Server(world.store, world.clock, "server-9", is_confirming=True)
        deaf.is_serving = False
        await deaf.start()
        await world.advance(MINUTE)
        (event,) = deaf.scope("v").events
        assert (event.status, event.not_before) == ("Scheduled", NOON + 15 * MINUTE)
        deaf.is_serving = True
        await world.advance(3 * SECOND)
        (event,) = deaf.scope("v").events
        assert event.not_before >= NOON + 46 * MINUTE
        await deaf.stop()
        await world.close()

    asyncio.run(main())


def test_server_whose_clock_is_off_waits_until_it_is_right() -> None:
    """It confirms nothing, and does not try again every second for as long as that lasts."""

    async def main() -> None:
        world = World()
        server = Server(world.store, world.clock, "server-9")
        await server.start()
        await world.settle()
        await world.apply(server)
        await server.operations.restart("v", by="ann")
        answers, asked = [False], list[bool]()

        def is_right() -> bool:
            asked.append(answers[-1])
            return answers[-1]

        readability = Readability(server.engine, server.hosts.contacts)
        running = asyncio.create_task(readability.run("server-9", is_right))
        await world.advance(14 * MINUTE)
        assert await world.shown() is None
        assert len(asked) <= 2
        answers.append(True)
        readability.on_clock_compared()
        await world.settle()
        assert await world.shown() is not None
        running.cancel()
        await server.stop()

    asyncio.run(main())


def test_gap_that_ends_in_the_future_delays_nothing() -> None:
    """The clock of the only server was ten hours ahead until a restart corrected it."""

    async def test(world: World) -> None:
        wrong = Shown(NOON - SECOND, (Gap(NOON - MINUTE, NOON + 600 * MINUTE),), "server-1")
        engine = world.servers[0].engine
        await engine.update([SHOWN_KEY], lambda each: each.put(SHOWN_KEY, wrong), by="test")
        await world.servers[0].operations.restart("v", by="ann")
        await world.advance(10 * SECOND)
        assert world.event().not_before == NOON + 15 * MINUTE
        shown = await world.shown()
        assert shown is not None
        assert shown.gaps == (), "it does not come back when that time is reached"

    run(test)


def test_confirmation_of_a_time_to_come_is_not_believed() -> None:
    """A server whose clock was an hour ahead wrote it: for that hour no gap would be noticed."""

    async def test(world: World) -> None:
        server = await world.start()
        await world.apply(server)
        wrong = Shown(NOON + 60 * MINUTE, (), "server-1")
        await server.engine.update([SHOWN_KEY], lambda each: each.put(SHOWN_KEY, wrong), by="test")
        await server.operations.restart("v", by="ann")
        await world.advance(MINUTE)
        await world.suspend(13 * MINUTE)
        await world.advance(2 * MINUTE)
        (event,) = server.scope("v").events
        assert event.status == "Scheduled"
        assert event.not_before >= NOON + 28 * MINUTE

    run(test)


def test_damaged_confirmation_ends_no_server() -> None:
    """A time without a zone compares with no other. Events wait until the record is repaired."""

    async def test(world: World) -> None:
        engine = world.servers[0].engine
        await world.servers[0].operations.restart("v", by="ann")
        for at in (NOON.replace(tzinfo=None), NOON):
            shown = Shown(at, (), "server-1")
            write = partial(Transaction.put, key=SHOWN_KEY, value=shown)
            await engine.update([SHOWN_KEY], write, by="test")
            await world.advance(2 * MINUTE)
        confirmed = await world.shown()
        assert confirmed is not None
        assert confirmed.at > NOON + 3 * MINUTE, "the server goes on to confirm"

    run(test)


def test_scope_that_no_server_can_compute_does_not_stop_the_others() -> None:
    """Its record is damaged and can be decoded: a time without a zone compares with no other."""

    async def main() -> None:
        world = World()
        server = await world.start()
        await world.apply(server)
        for name in ("v", "w"):
            await server.operations.restart(name, by="ann")
        await server.stop()
        record = await world.store.get("scope/v/")
        assert record.value is not None
        damaged = record.value.replace(
            b'"not_before":"2030-01-31T12:15:00Z"', b'"not_before":"2030-01-31T12:15:00"'
        )
        assert damaged != record.value
        await world.store.commit([Write("scope/v/", damaged, record.revision)])
        again = await world.start()
        await world.advance(MINUTE)
        await world.suspend(MINUTE)
        await world.advance(15 * MINUTE)
        assert again.scope("w").events == ()
        assert not again.has_ended
        await world.close()

    asyncio.run(main())
