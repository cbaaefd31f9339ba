"""Operations of a whole host: asked again they complete what is missing.

And VMs that change their scope.
"""

import pytest
from msgspec.structs import astuple, replace

from forewarn.core import command as ask
from forewarn.core.event import EventType
from forewarn.core.fleet import Power, Scope, ScopeKind
from forewarn.engine.operations import Operations, ScopedEvent
from forewarn.errors import AlreadyPending, StoreUnusable
from forewarn.fleetfile.parser import Fleet
from tests.builders import MINUTE, guid, vm
from tests.unit.engine.test_bad_days import FailsAt
from tests.unit.engine.test_engine import FLEET, World, run_in_world


def shown(result: list[ScopedEvent]) -> list[str]:
    return [
        f"{one.scope.name}: {one.event.type} {one.event.status} {','.join(one.event.resources)}"
        for one in result
    ]


def pending(operations: Operations) -> list[str]:
    """All events of the fleet, scope by scope."""
    scopes = sorted(operations._engine.board.scopes.items())
    return shown(
        [ScopedEvent(place.scope, event) for _, place in scopes for event in place.scope.events]
    )


def test_half_done_host_operation_is_completed_by_a_retry() -> None:
    """The store failed after the first scope.

    Its VMs have their event; those of the other scope must get theirs.
    """

    async def main(world: World) -> None:
        assert isinstance(world.store, FailsAt)
        operations = await world.operations()
        world.store.fails_at = world.store.calls + 2
        with pytest.raises(StoreUnusable):
            await operations.maintain("host-a", type=EventType.REBOOT, by="ann")
        assert pending(operations) == ["db: Reboot Scheduled db"]

        assert shown(await operations.maintain("host-a", type=EventType.REBOOT, by="ann")) == [
            "web: Reboot Scheduled web-0"
        ]
        assert pending(operations) == ["db: Reboot Scheduled db", "web: Reboot Scheduled web-0"]

    run_in_world(main, FailsAt())


def test_repeated_host_operation_lists_all_its_events() -> None:
    """A client that repeats a request with its Idempotency-Key wants the response of the whole
    request.
    """

    async def main(world: World) -> None:
        assert isinstance(world.store, FailsAt)
        operations = await world.operations()
        same = operations.repeating(guid(500))
        world.store.fails_at = world.store.calls + 2
        with pytest.raises(StoreUnusable):
            await same.degrade("host-a", by="ann")

        both = ["db: Redeploy Scheduled db", "web: Redeploy Scheduled web-0"]
        assert shown(await same.degrade("host-a", by="ann")) == both
        assert shown(await same.degrade("host-a", by="ann")) == both
        assert pending(operations) == both

    run_in_world(main, FailsAt())


def test_vm_moved_onto_a_degraded_host_gets_its_event() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        await operations.degrade("host-b", by="ann")
        web, db = FLEET.scopes
        await operations.apply(
            Fleet(
                scopes=(web, replace(db, vms=(replace(db.vms[0], host="host-b"),))),
                hosts=FLEET.hosts,
            ),
            by="ann",
        )

        assert shown(await operations.degrade("host-b", by="ann")) == ["db: Redeploy Scheduled db"]
        assert pending(operations) == ["db: Redeploy Scheduled db", "web: Redeploy Scheduled web-1"]

    run_in_world(main)


def test_failed_host_reaches_vms_that_have_no_event_yet() -> None:
    """Hardware that has failed is a fact; that one scope was told of it before must not hide it
    from the others.
    """

    async def main(world: World) -> None:
        operations = await world.operations()
        await operations.degrade("host-a", by="ann")
        assert shown(await operations.fail("host-a", by="ann")) == [
            "db: Reboot Started db",
            "web: Reboot Started web-0",
        ]
        web, db = FLEET.scopes
        grown = replace(web, vms=(web.vms[0], replace(web.vms[1], host="host-a")))
        await operations.apply(Fleet(scopes=(grown, db), hosts=FLEET.hosts), by="ann")

        assert shown(await operations.fail("host-a", by="ann")) == ["web: Reboot Started web-1"]
        assert pending(operations) == [
            "db: Reboot Started db",
            "web: Reboot Started web-0",
            "web: Reboot Started web-1",
        ]

    run_in_world(main)


def test_host_operation_is_refused_if_every_vm_has_its_event() -> None:
    """Also if a scope on the host has nobody to announce it to: nothing new would happen."""

    async def main(world: World) -> None:
        operations = await world.operations()
        first = await operations.maintain("host-a", type=EventType.REBOOT, by="ann")
        idle = Scope(name="a-idle", kind=ScopeKind.VM, vms=(vm("idle", power=Power.DEALLOCATED),))
        await operations.apply(Fleet(scopes=(*FLEET.scopes, idle), hosts=FLEET.hosts), by="ann")

        with pytest.raises(AlreadyPending) as caught:
            await operations.maintain("host-a", type=EventType.REBOOT, by="ann")
        assert caught.value.facts == {"vm": "db", "event": first[0].event.id}

    run_in_world(main)


def test_a_host_operation_is_refused_only_on_what_the_store_says() -> None:
    """Another server has cancelled the event that this one still shows as pending."""

    async def main(world: World) -> None:
        operations = await world.operations()
        other = Operations(await world.engine(), world.make_id)
        result = await operations.maintain("host-b", type=EventType.REBOOT, by="ann")
        await other._engine.load()
        await operations.cancel(result[0].event.id, by="ann")

        assert shown(await other.maintain("host-b", type=EventType.REBOOT, by="bob")) == [
            "web: Reboot Scheduled web-1"
        ]

    run_in_world(main)


def test_a_vm_keeps_its_power_when_it_moves_to_another_scope() -> None:
    """An evicted VM does not run again because its owner groups it differently; quorum and budgets
    count what runs.
    """

    async def main(world: World) -> None:
        operations = await world.operations()
        engine, (web, db) = operations._engine, FLEET.scopes
        result = await operations.evict("web-0", by="ann")
        assert result is not None
        await world.clock.advance(MINUTE)
        await engine.submit("web", ask.Tick(), by="clock")
        await engine.submit("web", ask.Complete(event_id=result.event.id), by="ann")
        bigger = Scope(name="db", kind=ScopeKind.SCALE_SET, vms=(*db.vms, web.vms[0]))
        await operations.apply(
            Fleet(scopes=(replace(web, vms=web.vms[1:]), bigger), hosts=FLEET.hosts), by="ann"
        )

        moved = (await world.engine()).board.scopes["db"].scope
        assert [member.power for member in moved.vms] == [Power.RUNNING, Power.DEALLOCATED]
        await engine.seen(engine.board.scopes["db"])
        assert not any(astuple(await operations.apply(operations.fleet(), by="ann")))

    run_in_world(main)


def test_vm_keeps_its_power_when_its_scope_is_deleted() -> None:
    async def main(world: World) -> None:
        operations = await world.operations()
        web, db = FLEET.scopes
        stopped = replace(db, vms=(replace(db.vms[0], power=Power.STOPPED),))
        await operations.apply(Fleet(scopes=(), hosts=()), by="ann")
        await operations.apply(Fleet(scopes=(web, stopped), hosts=FLEET.hosts), by="ann")
        joined = Scope(name="web", kind=web.kind, vms=(*web.vms, db.vms[0]))
        await operations.apply(Fleet(scopes=(joined,), hosts=FLEET.hosts), by="ann")

        assert operations._engine.board.scopes["web"].scope.vms[-1].power is Power.STOPPED

    run_in_world(main)
