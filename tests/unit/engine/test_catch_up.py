"""Two servers behind one address: what the first has answered, the second knows, though it has not
followed the store yet.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from forewarn.campaign.model import CampaignSpec
from forewarn.core import command as ask
from forewarn.core.event import EventType
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.core.timing import Timing
from forewarn.engine.operations import Operations, ScopedEvent
from forewarn.errors import EventEnded, StoreLost, Unavailable, UnknownEvent
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import Record, Snapshot, Store, Write
from forewarn.store.memory import MemoryStore
from forewarn.store.sqlite import SqliteStore
from forewarn.web.control.app import make_app
from forewarn.web.service import build_service
from tests.builders import NOON, guid, vm
from tests.unit.engine.test_engine import FLEET, World, run_in_world

TIMES = 20


class Server:
    """A process: an engine of its own on a store that others share.

    Its loops do not run, so it follows nothing by itself.
    """

    def __init__(self, store: Store, clock: VirtualClock, first_id: int) -> None:
        self._last_id = first_id
        self.service = build_service(store, clock, Timing(), self._make_id)
        self.engine, self.operations = self.service.engine, self.service.operations

    def _make_id(self) -> str:
        self._last_id += 1
        return guid(self._last_id)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(make_app(self.service, delay_seconds=0))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8081")


@asynccontextmanager
async def servers(folder: Path) -> AsyncGenerator[tuple[Server, Server], None]:
    """Two on one SQLite file, with the fleet; its scope `web` is polled."""
    clock, found = VirtualClock(NOON), []
    for number in range(2):
        store = await SqliteStore.open(str(folder / "store.db"))
        found.append(Server(store, clock, number * 10_000))
    one, two = found
    await one.engine.load()
    await one.operations.apply(FLEET, by="ann")
    await one.engine.submit("web", ask.Seen(), by="poll")
    await two.engine.load()
    try:
        yield one, two
    finally:
        await one.engine.close()
        await two.engine.close()


async def announced(server: Server) -> str:
    (result,) = await server.operations.maintain(
        "host-b", type=EventType.FREEZE, by="ann", not_before=NOON + timedelta(days=1)
    )
    return result.event.id


def two_servers(act: Callable[[Server, Server], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        async with servers(folder) as (one, two):
            await act(one, two)

    asyncio.run(run())


def test_event_of_one_server_is_canceled_through_another(tmp_path: Path) -> None:
    """Every script behind a load balancer does this; 10 of 10 were answered 404."""

    async def act(one: Server, two: Server) -> None:
        for _ in range(TIMES):
            event_id = await announced(one)
            canceled = await two.operations.cancel(event_id, by="ann")
            assert canceled is not None
            assert canceled.event.id == event_id
            one, two = two, one

    two_servers(act, tmp_path)


def test_event_of_one_server_is_changed_through_another(
    tmp_path: Path,
) -> None:
    async def act(one: Server, two: Server) -> None:
        for number in range(TIMES):
            event_id = await announced(one)
            later = NOON + timedelta(days=2, minutes=number)
            assert (
                await two.operations.extend(event_id, by="ann", not_before=later)
            ).event.not_before == later
            second = await one.operations.restart("web-0", by="ann")
            assert second is not None
            assert (
                await two.operations.approve(second.event.id, by="ann")
            ).event.status == "Started"
            for other in (event_id, second.event.id):
                end = one.operations.cancel if other == event_id else one.operations.complete
                assert await end(other, by="ann") is not None

    two_servers(act, tmp_path)


def test_every_get_finds_what_the_other_server_made(tmp_path: Path) -> None:
    """Read your own writes, whichever server answers: event, VM, host, scope and campaign."""

    async def act(one: Server, two: Server) -> None:
        async with two.client() as client:
            for number in range(3):
                event_id = await announced(one)
                assert (await client.get(f"/api/v1/events/{event_id}")).status_code == 200
                await one.operations.cancel(event_id, by="ann")
                name, host = f"new-{number}", f"host-{number}"
                more = Scope(name=name, kind=ScopeKind.VM, vms=(vm(name, host=host),))
                await one.engine.load()
                await one.operations.apply(
                    Fleet(scopes=(*FLEET.scopes, more), hosts=FLEET.hosts), by="ann"
                )
                kinds = {"scopes": name, "vms": name, "hosts": host}
                for kind in [*kinds, *kinds][number : number + 3]:  # whichever is asked first
                    assert (await client.get(f"/api/v1/{kind}/{kinds[kind]}")).status_code == 200
            spec = CampaignSpec(type=EventType.FREEZE, patterns=("host-b",))
            campaign = await one.service.campaigns.start(spec, "ann", "request-1")
            assert (await client.get(f"/api/v1/campaigns/{campaign.id}")).status_code == 200

    two_servers(act, tmp_path)


def test_vm_declared_on_one_server_is_operated_on_another(
    tmp_path: Path,
) -> None:
    """A host operation reaches VMs that have just arrived on the host, too."""

    async def act(one: Server, two: Server) -> None:
        more = Scope(
            name="new",
            kind=ScopeKind.SCALE_SET,
            vms=(vm("new-0", host="host-a"), vm("new-1", host="host-n")),
        )
        await one.operations.apply(Fleet(scopes=(*FLEET.scopes, more), hosts=FLEET.hosts), by="ann")
        result = await two.operations.maintain("host-a", type=EventType.REBOOT, by="ann")
        assert {one.scope.name for one in result} == {"db", "new", "web"}
        assert [each.scope.name for each in await one.operations.degrade("host-n", by="ann")] == [
            "new"
        ]

    two_servers(act, tmp_path)


def test_vm_that_changed_its_scope_is_found_in_the_new_one(tmp_path: Path) -> None:
    """The other server still shows it in the old one."""

    async def act(one: Server, two: Server) -> None:
        web, db = FLEET.scopes
        moved = Scope(name="web", kind=web.kind, vms=web.vms[:1])
        other = Scope(name="other", kind=ScopeKind.SCALE_SET, vms=web.vms[1:])
        await one.operations.apply(Fleet(scopes=(moved, other, db), hosts=FLEET.hosts), by="ann")
        await one.engine.submit("other", ask.Seen(), by="poll")
        result = await two.operations.restart("web-1", by="ann")
        assert result is not None
        assert result.scope.name == "other"

    two_servers(act, tmp_path)


class Counts(MemoryStore):
    """Counts what it is asked for, and can wait, or break, before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.watches = 0
        self.gate: asyncio.Event | None = None
        self.is_lost = False

    async def get(self, key: str) -> Record:
        self.reads += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.is_lost:
            raise StoreLost("no answer")
        return await super().get(key)

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        self.watches += 1
        async for batch in super().watch(after):
            yield batch


async def unknown(operations: Operations) -> None:
    with pytest.raises(UnknownEvent):
        await operations.event(guid(999_999))


def test_unknown_id_costs_one_small_read() -> None:
    """Whoever asks for ids that do not exist, over and over, must not make this server read its
    store.
    """

    async def main(world: World) -> None:
        assert isinstance(world.store, Counts)
        operations = await world.operations()
        await unknown(operations)  # learns what was committed so far
        world.store.reads = world.store.watches = 0
        for _ in range(50):
            await unknown(operations)

        assert (world.store.reads, world.store.watches) == (50, 0)

    run_in_world(main, Counts())


def test_read_in_progress_does_not_count_as_caught_up() -> None:
    """It may have read the revision before the event was created."""

    async def main(world: World) -> None:
        assert isinstance(world.store, Counts)
        maker = await world.operations()
        other = Operations(await world.engine(), world.make_id)
        world.store.gate = asyncio.Event()
        early = asyncio.create_task(unknown(other))
        await asyncio.sleep(0)
        result = await maker.restart("web-0", by="ann")
        assert result is not None
        late = asyncio.create_task(other.event(result.event.id))
        await asyncio.sleep(0)
        early.cancel()  # its client has left; the other must not be left without an answer
        world.store.gate.set()

        assert (await late).event.id == result.event.id

    run_in_world(main, Counts())


def test_lost_store_is_not_reported_as_unknown() -> None:
    """Another server may have created it: a 404 would be believed, a 503 is tried again."""

    async def main(world: World) -> None:
        assert isinstance(world.store, Counts)
        operations = await world.operations()
        world.store.is_lost = True
        with pytest.raises(Unavailable):
            await operations.event(guid(999_999))
        with pytest.raises(Unavailable):
            await operations.restart("nobody", by="ann")
        with pytest.raises(Unavailable):
            await operations.fail("nowhere", by="ann")

    run_in_world(main, Counts())


def test_read_that_timed_out_is_repeated() -> None:
    """A read that timed out has read nothing."""

    async def main(world: World) -> None:
        assert isinstance(world.store, Slow)
        operations, late = Operations(await world.engine(), world.make_id), await world.engine()
        await operations.apply(FLEET, by="ann")
        world.store.is_slow = True
        with pytest.raises(Unavailable):
            await late.look_up(lambda: late.board.find_vm("db"))
        world.store.is_slow = False

        assert await late.look_up(lambda: late.board.find_vm("db"))

    run_in_world(main, Slow())


class Slow(MemoryStore):
    """While it is slow, its reads end as those that timed out."""

    is_slow = False

    async def load(self, prefix: str = "") -> Snapshot:
        if self.is_slow:
            raise TimeoutError
        return await super().load(prefix)


def test_server_that_follows_does_not_load_again() -> None:
    """With a large fleet that would take seconds: the follower shows the change soon."""

    async def main(world: World) -> None:
        assert isinstance(world.store, Slow)
        maker, late = await world.operations(), await world.engine()
        following = asyncio.create_task(late.follow())
        await asyncio.sleep(0)
        world.store.is_slow = True
        result = await maker.restart("web-0", by="ann")
        assert result is not None
        found = await Operations(late, world.make_id).event(result.event.id)
        following.cancel()

        assert found.event.id == result.event.id

    run_in_world(main, Slow())


class LoadGate(MemoryStore):
    """Counts the loads of everything. They wait while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, prefix: str = "") -> Snapshot:
        self.loads += not prefix
        await self.gate.wait()
        return await super().load(prefix)


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved forward."""

    ahead_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_seconds


def test_unknown_ids_share_one_load_while_the_store_is_reloaded() -> None:
    """Each of them loading the whole store would occupy the server and its store for minutes."""

    async def main(world: World) -> None:
        assert isinstance(world.store, LoadGate)
        operations = await world.operations()  # nothing follows the store
        await world.store.commit([Write("other/x", b"1", 0)])
        world.store.gate.clear()
        world.store.loads = 0
        lookups = [asyncio.create_task(unknown(operations)) for _ in range(50)]
        await world.clock.advance(timedelta(0))
        world.store.gate.set()
        await asyncio.gather(*lookups)

        assert world.store.loads == 1

    run_in_world(main, LoadGate())


def test_lookup_does_not_wait_for_a_load_that_takes_too_long() -> None:
    """The client gets its 503 in time."""

    async def main() -> None:
        store = LoadGate()
        world = World(store)
        operations = await world.operations()
        await store.commit([Write("other/x", b"1", 0)])
        store.gate.clear()
        lookup = asyncio.create_task(operations.event(guid(999_999)))
        await world.clock.advance(timedelta(0))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FastLoop)
        loop.ahead_seconds = 2.1
        await world.clock.advance(timedelta(0))

        assert lookup.done()
        with pytest.raises(Unavailable):
            await lookup

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        runner.run(main())


def test_ended_event_is_found_without_reading_the_store() -> None:
    """It cannot come back."""

    async def main(world: World) -> None:
        assert isinstance(world.store, Counts)
        operations = await world.operations()
        result = await operations.restart("web-0", by="ann")
        assert isinstance(result, ScopedEvent)
        await operations.cancel(result.event.id, by="ann")
        world.store.reads = 0
        with pytest.raises(EventEnded):
            await operations.event(result.event.id)

        assert world.store.reads == 0

    run_in_world(main, Counts())


def test_apply_sees_what_another_server_just_changed(
    tmp_path: Path,
) -> None:
    """A scope that was removed a moment ago is made again, though this server still shows it."""

    async def act(one: Server, two: Server) -> None:
        for _ in range(3):
            await one.operations.apply(Fleet(scopes=FLEET.scopes[:1], hosts=FLEET.hosts), by="ann")
            difference = await two.operations.apply(FLEET, by="ann")
            assert difference.added == ("db",)
            one, two = two, one

    two_servers(act, tmp_path)
