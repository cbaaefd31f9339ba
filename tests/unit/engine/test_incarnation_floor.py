"""DocumentIncarnation over the end of a scope: one number never means two documents, or an old ETag
would get a wrong 304.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

import pytest

from forewarn.core import command as ask
from forewarn.core.event import EventType
from forewarn.core.fleet import Policy, Scope, ScopeKind
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.fleetfile.parser import Fleet
from forewarn.store.base import RevisionCheck, Write
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, vm
from tests.unit.engine.test_engine import FLEET, World, run_in_world

WITHOUT_DB = Fleet(scopes=FLEET.scopes[:1], hosts=FLEET.hosts)
SHOWN_LAST = 3
"""The incarnation of `db` while its deletion is under way: 1 empty, 2 Scheduled, 3 Started."""

Vanish = Callable[[Operations, Engine, str], Awaitable[object]]


async def server(world: World) -> tuple[Operations, Engine]:
    engine = await world.engine()
    return Operations(engine, world.make_id), engine


async def deleting(world: World) -> tuple[Operations, Engine, str]:
    """A server with the fleet, whose standalone VM `db` has been polled and is being deleted; and
    the event's id.
    """
    operations, engine = await server(world)
    await operations.apply(FLEET, by="ann")
    await engine.submit("db", ask.Seen(), by="poll")
    deletion = await operations.delete("db", by="ann")
    assert deletion is not None
    await operations.approve(deletion.event.id, by="ann")
    assert incarnation(engine) == SHOWN_LAST
    return operations, engine, deletion.event.id


def incarnation(engine: Engine, scope: str = "db") -> int:
    return engine.board.find_scope(scope).scope.incarnation


async def by_its_impact(operations: Operations, engine: Engine, event_id: str) -> None:
    await engine.submit("db", ask.Claim(event_id=event_id, vm="db", worker="w1"), by="w1")
    await engine.submit("db", ask.Finish(event_id=event_id, vm="db", worker="w1", tries=1), by="w1")


async def by_an_operator(operations: Operations, engine: Engine, event_id: str) -> None:
    await operations.complete(event_id, by="ann")


async def by_the_fleet_file(operations: Operations, engine: Engine, event_id: str) -> None:
    await operations.apply(WITHOUT_DB, by="ann")


async def by_losing_its_vm(operations: Operations, engine: Engine, event_id: str) -> None:
    await engine.submit("db", ask.SetMembers(kind=ScopeKind.VM, policy=Policy(), vms=()), by="ann")


@pytest.mark.parametrize(
    "vanish", [by_its_impact, by_an_operator, by_the_fleet_file, by_losing_its_vm]
)
def test_standalone_vm_that_comes_back_repeats_no_number(vanish: Vanish) -> None:
    """A guest may still hold any ETag of the VM's earlier life, however that life ended."""

    async def main(world: World) -> None:
        operations, engine, event_id = await deleting(world)
        await vanish(operations, engine, event_id)
        assert "db" not in engine.board.scopes
        again, later = await server(world)
        await again.apply(FLEET, by="ann")

        assert incarnation(later) > SHOWN_LAST

    run_in_world(main)


def test_server_that_missed_a_deletion_reuses_no_number() -> None:
    """The floor is that of the store, not of what this server has seen so far."""

    async def main(world: World) -> None:
        operations, engine, event_id = await deleting(world)
        late, later = await server(world)
        await by_its_impact(operations, engine, event_id)
        replacement = Scope(name="database", kind=ScopeKind.VM, vms=FLEET.scopes[1].vms)
        wanted = Fleet(scopes=(FLEET.scopes[0], replacement), hosts=FLEET.hosts)
        await late.apply(wanted, by="bob")

        assert incarnation(later, "database") > SHOWN_LAST

    run_in_world(main)


def test_scope_that_replaces_another_starts_above_it() -> None:
    """A scope that is renamed keeps its VMs, and they hold the old scope's ETag."""

    async def main(world: World) -> None:
        operations, engine, _ = await deleting(world)
        renamed = Scope(name="database", kind=ScopeKind.VM, vms=FLEET.scopes[1].vms)
        await operations.apply(
            Fleet(scopes=(FLEET.scopes[0], renamed), hosts=FLEET.hosts), by="ann"
        )

        assert incarnation(engine, "database") > SHOWN_LAST

    run_in_world(main)


class ChangesMeanwhile(MemoryStore):
    """Runs `meanwhile` once, right before a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], Awaitable[object]]] = []

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        if self.meanwhile:
            await self.meanwhile.pop()()
        return await super().commit(writes, checks, entries)


def test_event_announced_during_a_removal_counts() -> None:
    """What matters is the number in the commit that ends the scope, not the one that was read
    before.
    """

    async def main(world: World) -> None:
        assert isinstance(world.store, ChangesMeanwhile)
        operations, _ = await server(world)
        await operations.apply(FLEET, by="ann")
        other = await world.engine()
        await other.submit("db", ask.Seen(), by="poll")
        restart = ask.Restart(vm="db", event_id=world.make_id())
        world.store.meanwhile = [lambda: other.submit("db", restart, by="bob")]
        await operations.apply(WITHOUT_DB, by="ann")
        assert incarnation(other) == 2
        again, later = await server(world)
        await again.apply(FLEET, by="ann")

        assert incarnation(later) > 2

    run_in_world(main, ChangesMeanwhile())


def test_two_servers_that_delete_at_once_keep_the_higher_number() -> None:
    """Both raise the floor: the one that comes second reads it again."""

    async def main(world: World) -> None:
        fleet = Fleet(
            scopes=tuple(
                Scope(name=name, kind=ScopeKind.VM, vms=(vm(name, host=name),)) for name in "ab"
            ),
            hosts=(),
        )
        servers = [await server(world), await server(world)]
        await servers[0][0].apply(fleet, by="ann")
        await servers[1][1].load()
        deletions = []
        for (operations, engine), name, count in zip(servers, "ab", (4, 1), strict=True):
            await engine.submit(name, ask.Seen(), by="poll")
            for _ in range(count):  # announced and canceled: two numbers each
                (freeze,) = await operations.maintain(
                    name, type=EventType.FREEZE, by="ann", not_before=NOON + timedelta(days=1)
                )
                await operations.cancel(freeze.event.id, by="ann")
            deletion = await operations.delete(name, by="ann")
            assert deletion is not None
            await operations.approve(deletion.event.id, by="ann")
            deletions.append(operations.complete(deletion.event.id, by="ann"))
        highest = incarnation(servers[0][1], "a")
        await asyncio.gather(*deletions)
        again, later = await server(world)
        assert again.fleet().scopes == ()
        await again.apply(fleet, by="ann")

        assert min(incarnation(later, name) for name in "ab") > highest

    run_in_world(main)
