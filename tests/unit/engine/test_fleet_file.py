"""Where VMs are, when a fleet is applied: by the file that a server starts with, by an operator, by
a sync.
"""

from pathlib import Path

import pytest
from msgspec.structs import astuple, replace

from forewarn.core import command as ask
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.fleetfile.parser import Fleet, dump_json, parse
from forewarn.server import apply_fleet_file
from tests.unit.engine.test_engine import FLEET, World, run_in_world


def placed(web_0: str = "host-a", web_1: str = "host-b", **more: object) -> Fleet:
    """The fleet with its web VMs on these hosts; `more` is of web-1."""
    web, db = FLEET.scopes
    first, second = web.vms
    return replace(
        FLEET,
        scopes=(
            replace(web, vms=(replace(first, host=web_0), replace(second, host=web_1, **more))),
            db,
        ),
    )


def hosts(operations: Operations) -> dict[str, str]:
    return {
        vm.name: vm.host
        for scope in operations.fleet().scopes
        for vm in scope.vms
        if scope.name == "web"
    }


async def moved(operations: Operations, engine: Engine, vm: str, host: str) -> None:
    """A Redeploy that a platform has carried out."""
    result = await operations.redeploy(vm, by="ann")
    assert result
    event = result.event.id
    await operations.approve(event, by="ann")
    await engine.submit("web", ask.Claim(event_id=event, vm=vm, worker="w"), by="w")
    await engine.submit(
        "web", ask.Finish(event_id=event, vm=vm, worker="w", tries=1, host=host), by="w"
    )


async def with_file(world: World) -> tuple[Operations, Engine]:
    """A server that was started with the fleet as its file; its first scope is polled."""
    engine = await world.engine()
    operations = Operations(engine, world.make_id)
    await operations.apply(FLEET, by="fleet file", digest="1")
    await engine.seen(engine.board.scopes["web"])
    return operations, engine


def test_fleet_file_does_not_undo_the_move_of_a_vm() -> None:
    """The file says where a VM was when it was written.

    Moved back on paper, the VM would miss what awaits its real host.
    """

    async def main(world: World) -> None:
        operations, engine = await with_file(world)
        await moved(operations, engine, "web-0", "host-c")
        await operations.apply(placed(address="10.0.0.9"), by="fleet file", digest="2")
        assert hosts(operations) == {"web-0": "host-c", "web-1": "host-b"}

        await operations.apply(placed(address="10.0.0.10"), by="fleet file", digest="3")
        assert hosts(operations) == {"web-0": "host-c", "web-1": "host-b"}

    run_in_world(main)


def test_fleet_file_never_moves_a_vm_that_exists() -> None:
    """Not even to a host that is new in the file: a VM is where its hypervisor runs it."""

    async def main(world: World) -> None:
        operations, engine = await with_file(world)
        await moved(operations, engine, "web-0", "host-c")
        await operations.apply(placed(web_0="host-b"), by="fleet file", digest="2")
        assert hosts(operations) == {"web-0": "host-c", "web-1": "host-b"}

    run_in_world(main)


def test_fleet_file_does_not_move_a_vm_that_a_sync_has_added() -> None:
    async def main(world: World) -> None:
        operations = Operations(await world.engine(), world.make_id)
        await operations.apply(placed(web_0="host-c", web_1=""), by="sync")
        await operations.apply(placed(), by="fleet file", digest="1")
        assert hosts(operations) == {"web-0": "host-c", "web-1": "host-b"}

    run_in_world(main)


@pytest.mark.parametrize("digest", ["2", None])
def test_vm_that_changes_its_scope_stays_on_its_host(digest: str | None) -> None:
    """Without a host in the definition, or if the definition is the fleet file."""

    async def main(world: World) -> None:
        operations, engine = await with_file(world)
        await moved(operations, engine, "web-0", "host-c")
        web, db = placed(web_0="host-a" if digest else "").scopes
        scopes = (replace(web, vms=web.vms[1:]), replace(db, vms=(*db.vms, web.vms[0])))
        await operations.apply(replace(FLEET, scopes=scopes), by="ann", digest=digest)
        published, web_0 = engine.board.find_vm("web-0")
        assert (published.scope.name, web_0.host) == (db.name, "host-c")

    run_in_world(main)


def test_restart_after_a_redeploy_leaves_the_vm_where_it_is(tmp_path: Path) -> None:
    """Whether or not the file was edited meanwhile."""

    async def main(world: World) -> None:
        file = tmp_path / "fleet.json"
        file.write_bytes(dump_json(FLEET))
        engine = await world.engine()
        operations = Operations(engine, world.make_id)
        await apply_fleet_file(operations, file)
        await engine.seen(engine.board.scopes["web"])
        await moved(operations, engine, "web-0", "host-c")
        for fleet in (FLEET, placed(address="10.0.0.9")):
            file.write_bytes(dump_json(fleet))
            restarted = Operations(await world.engine(), world.make_id)
            await apply_fleet_file(restarted, file)
            assert hosts(restarted) == {"web-0": "host-c", "web-1": "host-b"}
        assert "10.0.0.9" in dump_json(restarted.fleet()).decode()

    run_in_world(main)


def test_fleet_file_does_not_undo_a_manual_apply() -> None:
    """A sync with libvirt tells where VMs are. A file that was written before knows less."""

    async def main(world: World) -> None:
        operations, _ = await with_file(world)
        await operations.apply(placed(web_0="host-c", web_1="host-c"), by="sync")
        await operations.apply(placed(address="10.0.0.9"), by="fleet file", digest="2")
        assert hosts(operations) == {"web-0": "host-c", "web-1": "host-c"}

        await operations.apply(placed(), by="sync")
        assert hosts(operations) == {"web-0": "host-a", "web-1": "host-b"}

    run_in_world(main)


def test_a_vm_without_a_host_in_the_definition_stays_where_it_is() -> None:
    """A fleet whose hosts come from libvirt, or from redeploys, is written without them."""

    async def main(world: World) -> None:
        operations, _ = await with_file(world)
        await operations.apply(placed(web_0=""), by="ann")
        assert hosts(operations) == {"web-0": "host-a", "web-1": "host-b"}

        await operations.apply(placed(web_0=""), by="fleet file", digest="2")
        assert hosts(operations) == {"web-0": "host-a", "web-1": "host-b"}

    run_in_world(main)


def test_applying_an_exported_fleet_changes_nothing() -> None:
    """Export, look, apply: nothing may come of it, whatever has moved since the file."""

    async def main(world: World) -> None:
        operations, engine = await with_file(world)
        await moved(operations, engine, "web-0", "host-c")
        shown = parse(dump_json(operations.fleet()), "shown")
        revision = (await world.store.load()).revision

        assert not any(astuple(await operations.apply(shown, by="ann")))
        assert (await world.store.load()).revision == revision

    run_in_world(main)


def test_fleet_file_is_compared_with_the_store_during_a_move() -> None:
    """Another server may finish a Redeploy between our look and our commit."""

    async def main(world: World) -> None:
        operations, _ = await with_file(world)
        other = await world.engine()
        await moved(Operations(other, world.make_id), other, "web-0", "host-c")
        await operations.apply(placed(address="10.0.0.9"), by="fleet file", digest="2")
        assert hosts(operations) == {"web-0": "host-c", "web-1": "host-b"}

    run_in_world(main)
