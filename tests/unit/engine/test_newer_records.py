"""A rolling upgrade: an older server among newer ones.

It serves what it can read, and never overwrites what it cannot.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from datetime import timedelta

import pytest

from forewarn.auth.tokens import Role, Tokens
from forewarn.campaign.model import CampaignState
from forewarn.campaign.service import Campaigns
from forewarn.core import command as ask
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import RecordUnreadable
from forewarn.fleetfile.parser import Fleet
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import Record, Snapshot, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, vm
from tests.unit.engine.test_engine import FLEET, World, run_in_world

NEWER_SCOPE = b'{"format":1,"value":{"name":"web","colour":"red"}}'
NEWER_FORMAT = b'{"format":99,"value":{}}'


async def stored(store: MemoryStore, key: str) -> Record:
    (found,) = (one for one in (await store.load(key)).records if one.key == key)
    return found


async def rewrite(store: MemoryStore, key: str, value: bytes) -> None:
    """As a newer server does."""
    await store.commit([Write(key, value, (await stored(store, key)).revision)])


async def server(world: World) -> tuple[Operations, Engine]:
    engine = await world.engine()
    operations = Operations(engine, world.make_id)
    await operations.apply(FLEET, by="ann")
    await engine.submit("web", ask.Seen(), by="poll")
    return operations, engine


@pytest.mark.parametrize("record", [NEWER_SCOPE, NEWER_FORMAT])
def test_unreadable_scope_stays_as_last_known_after_a_reload(record: bytes) -> None:
    """A server that reads everything again, after a second without its store, must come back as it
    was before.
    """

    async def main(world: World) -> None:
        operations, engine = await server(world)
        result = await operations.restart("web-0", by="ann")
        assert result is not None
        await rewrite(world.store, "scope/web/", record)
        await engine.load()

        assert engine.board.find_scope("web").scope.events == (result.event,)
        assert await operations.restart("db", by="ann") is None  # the other scopes go on

    run_in_world(main)


@pytest.mark.parametrize("record", [NEWER_SCOPE, NEWER_FORMAT])
def test_command_on_an_unreadable_scope_writes_nothing(record: bytes) -> None:
    """Deciding on what it last showed, an older server would undo what the newer one did."""

    async def main(world: World) -> None:
        _, engine = await server(world)
        await rewrite(world.store, "scope/web/", record)
        fresh = await world.engine()
        assert "web" not in fresh.board.scopes
        await engine.load()
        before = await stored(world.store, "scope/web/")
        for each in (engine, fresh):
            for command in (
                ask.Restart(vm="web-0", event_id=world.make_id()),
                ask.Tick(),
                ask.Seen(),
                ask.Retire(),
                ask.SetMembers(
                    kind=FLEET.scopes[0].kind,
                    policy=FLEET.scopes[0].policy,
                    vms=FLEET.scopes[0].vms,
                ),
            ):
                with pytest.raises(
                    RecordUnreadable,
                    match=r"scope web was written by a newer version of Forewarn.*upgrade",
                ):
                    await each.submit("web", command, by="ann")

        assert await stored(world.store, "scope/web/") == before

    run_in_world(main)


def test_scope_that_becomes_unreadable_is_not_overwritten() -> None:
    """The record may change between the decision and the commit: the refusal must not turn into a
    retry without end.
    """

    async def main(world: World) -> None:
        operations, _ = await server(world)
        await rewrite(world.store, "scope/web/", NEWER_SCOPE)
        before = await stored(world.store, "scope/web/")
        with pytest.raises(RecordUnreadable, match="scope web"):
            await operations.restart("web-0", by="ann")

        assert await stored(world.store, "scope/web/") == before

    run_in_world(main)


def test_fleet_is_not_changed_while_part_of_it_cannot_be_read() -> None:
    """A VM of the scope that is not known here could end up in two scopes."""

    async def main(world: World) -> None:
        await server(world)
        await rewrite(world.store, "scope/web/", NEWER_SCOPE)
        fresh = await world.engine()
        with pytest.raises(RecordUnreadable, match="scope web"):
            await Operations(fresh, world.make_id).apply(
                Fleet(scopes=FLEET.scopes[1:], hosts=()), by="ann"
            )

    run_in_world(main)


def test_fleet_record_of_a_newer_server_is_never_overwritten() -> None:
    """Its declared hosts stay as they were last known; applying a fleet is refused."""

    async def main(world: World) -> None:
        operations, engine = await server(world)
        await rewrite(
            world.store, "fleet", b'{"format":1,"value":{"names":["host-a"],"colour":"red"}}'
        )
        before = await stored(world.store, "fleet")
        await engine.load()
        assert engine.declared_hosts() == FLEET.hosts
        with pytest.raises(
            RecordUnreadable, match="the fleet record was written by a newer version"
        ):
            await operations.apply(Fleet(scopes=FLEET.scopes[:1], hosts=()), by="ann")

        assert await stored(world.store, "fleet") == before

    run_in_world(main)


def test_scope_is_writable_again_once_its_record_can_be_read() -> None:
    """The newer server may be rolled back, or the scope may be declared anew."""

    async def main(world: World) -> None:
        operations, engine = await server(world)
        readable = (await stored(world.store, "scope/web/")).value
        assert readable is not None
        await rewrite(world.store, "scope/web/", NEWER_SCOPE)
        await engine.load()
        await rewrite(world.store, "scope/web/", readable)

        assert await operations.restart("web-0", by="ann") is not None

        await rewrite(world.store, "scope/web/", NEWER_SCOPE)
        await engine.load()
        await world.store.commit(
            [Write("scope/web/", None, (await stored(world.store, "scope/web/")).revision)]
        )
        await engine.load()
        await operations.apply(FLEET, by="ann")
        assert await operations.restart("db", by="ann") is None

    run_in_world(main)


class Idle:
    """A platform that has nothing to do."""

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        raise AssertionError(order)


def test_server_leaves_unreadable_scopes_to_the_newer_one() -> None:
    """Following, reloading and waiting for NotBefore: one strange scope costs neither readiness nor
    a read every second.
    """

    class Counts(MemoryStore):
        loads = 0

        async def load(self, prefix: str = ""):  # type: ignore[no-untyped-def]
            self.loads += 1
            return await super().load(prefix)

    async def main(world: World) -> None:
        assert isinstance(world.store, Counts)
        operations, engine = await server(world)
        await operations.restart("web-0", by="ann")
        work = asyncio.create_task(Worker(engine, Idle(), worker="w1", impact_limit=MINUTE).run())
        await rewrite(world.store, "scope/web/", NEWER_SCOPE)
        await world.clock.advance(14 * MINUTE)
        before = world.store.loads
        await world.clock.advance(10 * MINUTE)

        assert engine.can_serve
        assert world.store.loads - before <= 2
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    run_in_world(main, Counts())


class OneAtATime:
    """A platform whose first impact takes a minute."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self.vms: list[str] = []

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        self.vms.append(order.vm.name)
        if len(self.vms) == 1:
            await self._clock.sleep_until(self._clock.now() + MINUTE)
        return ImpactResult()


@pytest.mark.parametrize("is_followed", [True, False])
def test_impact_in_an_unreadable_scope_does_not_delay_others(is_followed: bool) -> None:
    """Its claim cannot be committed before the newer server is gone, which may take days.

    The worker may know that before it claims the impact, or only because of the claim.
    """

    async def main(world: World) -> None:
        assert isinstance(world.store, Unwatched)
        world.store.is_followed = is_followed
        operations, engine = await server(world)
        platform = OneAtATime(world)
        work = asyncio.create_task(
            Worker(engine, platform, worker="w1", impact_limit=2 * MINUTE, impacts_max=1).run()
        )
        for name in ("web-0", "web-1"):
            result = await operations.restart(name, by="ann")
            assert result is not None
            await operations.approve(result.event.id, by="ann")
        await world.clock.advance(MINUTE / 2)
        await rewrite(world.store, "scope/web/", NEWER_SCOPE)
        await operations.delete("db", by="ann")
        await world.clock.advance(10 * MINUTE)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

        assert platform.vms == ["web-0", "db"]

    run_in_world(main, Unwatched())


class Unwatched(MemoryStore):
    """A store whose watch may report nothing."""

    is_followed = True

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        if not self.is_followed:
            await asyncio.Event().wait()
        async for batch in super().watch(after):
            yield batch


def test_record_that_cannot_be_read_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        _, engine = await server(world)
        await rewrite(world.store, "scope/web/", NEWER_SCOPE)
        for _ in range(3):
            await engine.load()
            await world.clock.advance(timedelta(hours=1))
        assert len(engine.unreadable) == 1

    with caplog.at_level(logging.WARNING, "forewarn"):
        run_in_world(main)

    assert [record.__dict__["facts"]["record"] for record in caplog.records] == ["scope web"]


def test_token_of_a_newer_server_opens_nothing_and_keeps_auth_on() -> None:
    """With the only token not read, a server would take itself for one without tokens, and let
    everybody in.
    """

    async def main(world: World) -> None:
        maker = Tokens(await world.engine())
        _, text = await maker.create("boss", Role.ADMIN, secret="5" * 64, by="ann")
        await rewrite(world.store, "token/boss/", b'{"format":2,"value":{}}')
        engine = Engine(world.store, world.clock, Timing())
        fresh = Tokens(engine)
        await engine.load()

        assert fresh
        assert fresh.authenticate(text) is None
        with pytest.raises(RecordUnreadable):
            await fresh.revoke("boss", by="ann")
        assert (await stored(world.store, "token/boss/")).value == b'{"format":2,"value":{}}'

    run_in_world(main)


def test_campaign_of_a_newer_server_does_not_stop_a_reload() -> None:
    async def main(world: World) -> None:
        _, engine = await server(world)
        campaigns = Campaigns(engine)
        await world.store.commit([Write("campaign/c9/", NEWER_FORMAT, 0)])
        await engine.load()

        assert engine.board.find_scope("web").scope.name == "web"
        with pytest.raises(RecordUnreadable):
            await campaigns.set_state("c9", CampaignState.PAUSED, by="ann")

    run_in_world(main)


def test_failed_host_reaches_scopes_after_an_unreadable_one() -> None:
    """The hardware of all of them has failed.

    The operator learns of the scope that this server could not change.
    """

    async def main(world: World) -> None:
        engine = await world.engine()
        operations = Operations(engine, world.make_id)
        scopes = tuple(Scope(name=name, kind=ScopeKind.VM, vms=(vm(name),)) for name in "abc")
        await operations.apply(Fleet(scopes=scopes, hosts=()), by="ann")
        await rewrite(world.store, "scope/b/", NEWER_FORMAT)
        with pytest.raises(RecordUnreadable, match="scope b"):
            await operations.fail("host-a", by="ann")

        assert [len(engine.board.find_scope(name).scope.events) for name in "abc"] == [1, 0, 1]

    run_in_world(main)
