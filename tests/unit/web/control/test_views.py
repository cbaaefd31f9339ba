"""Lists and numbers of a large fleet: what is asked for is what is worked for, however large the
fleet is.
"""

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.web.control import lists, views
from forewarn.web.control.app import make_app
from forewarn.web.control.dependencies import PageRequest
from forewarn.web.control.routes.metrics import make_metrics_route
from forewarn.web.http.admission import Limits
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from tests.builders import NOON, restart, run, scope_of, vm
from tests.unit.web.control_world import World, make_client
from tests.unit.web.guest import BY_ADDRESS
from tests.work_count import Name, work_of

SMALL, LARGE = 100, 5000


@dataclass(eq=False)
class IdleConnection:
    """A connection as the guard counts it."""

    address: str
    due_at: float = 0.0
    is_evictable: bool = True

    def time_out(self) -> None: ...

    def abort(self) -> None: ...


def standalone(number: int) -> Scope:
    """One VM on its own host, with an event."""
    member = Vm(name=Name(f"vm-{number:05}"), host=Name(f"host-{number:05}"))
    scope = Scope(name=Name(f"scope-{number:05}"), vms=(member,), seen_at=NOON)
    return run(scope, restart(member.name, number), at=NOON + timedelta(seconds=number))


def fleet_of(size: int) -> World:
    world = World()
    for number in range(size):
        world.engine.board.publish(standalone(number), 1)
    return world


async def first_page(world: World, path: str) -> int:
    """The work for it, when nothing is new any more: a first request has its own costs."""
    for _ in range(2):
        assert (await world.request("GET", path)).is_success
    return await work_of(world.request("GET", path))


async def list_vms(world: World, limit: int) -> views.VmList:
    return await lists.vm_list(world.engine, world.service.hosts.problems, PageRequest(limit))


@pytest.mark.parametrize("kind", ["vms", "scopes", "hosts", "events"])
def test_page_cost_does_not_grow_with_the_fleet(kind: str) -> None:
    """Polls wait for a page that is made on the event loop, and anybody with a viewer's token may
    ask for one.
    """

    async def measure() -> tuple[int, int]:
        small, large = fleet_of(SMALL), fleet_of(LARGE)
        path = f"/api/v1/{kind}?limit=1"
        return await first_page(small, path), await first_page(large, path)

    small, large = asyncio.run(measure())
    assert large < 1.2 * small


def test_scrape_cost_does_not_grow_with_the_fleet() -> None:
    """Prometheus asks every few seconds."""

    async def scrape(world: World) -> int:
        polls = Polls(world.engine, BY_ADDRESS, Limits())
        for number in range(len(world.engine.board.vms)):
            assert polls.admit(IdleConnection(Name(f"10.0.{number // 250}.{number % 250}")))
        handler = make_metrics_route(world.service, Metadata(world.engine, BY_ADDRESS), polls)
        world.client = make_client(make_app(world.service, more=[handler], delay_seconds=0))
        return await first_page(world, "/metrics")

    async def measure() -> tuple[int, int]:
        return await scrape(fleet_of(SMALL)), await scrape(fleet_of(LARGE))

    small, large = asyncio.run(measure())
    assert large < 1.2 * small


def test_page_of_vms_reads_each_scope_once() -> None:
    """Else a scope of a thousand VMs would be read a thousand times for one page."""

    def crowd(size: int) -> World:
        members = [
            vm(Name(f"vm-{number:05}"), host=f"host-{number % 10}") for number in range(size)
        ]
        scope = replace(scope_of(*members), kind=ScopeKind.SCALE_SET)
        for number in range(20):
            scope = run(scope, restart(f"vm-{number:05}", number))
        everybody = tuple(one.name for one in members)
        scope = replace(
            scope, events=tuple(replace(event, resources=everybody) for event in scope.events)
        )
        world = World()
        world.engine.board.publish(scope, 1)
        return world

    async def measure() -> tuple[int, int]:
        small, large = crowd(20), crowd(200)
        for world in (small, large):
            await list_vms(world, 1)
        return await work_of(list_vms(small, 1000)), await work_of(list_vms(large, 1000))

    small, large = asyncio.run(measure())
    assert large < 15 * small


def test_building_a_large_page_does_not_block_polls() -> None:
    """A page may have 10,000 entries."""

    async def measure() -> tuple[int, int]:
        world, turns, is_over = fleet_of(2000), 0, False

        async def poll() -> None:
            nonlocal turns
            while not is_over:  # until the page is made
                turns += 1
                await asyncio.sleep(0)

        polling = asyncio.create_task(poll())
        shown = await lists.vm_list(world.engine, world.service.hosts.problems, PageRequest(10_000))
        is_over = True
        await polling
        return len(shown.vms), turns

    shown, turns = asyncio.run(measure())
    assert shown == 2000
    assert turns >= 10


def test_lists_stay_in_order_while_the_fleet_changes() -> None:
    """The order is kept with each change and not made for each page, so a change that is missed
    would never heal.
    """

    async def walk(world: World) -> list[list[str]]:
        board = world.engine.board
        vms, scopes = (
            await lists.vm_list(world.engine, world.service.hosts.problems, PageRequest(99)),
            await lists.scope_list(world.engine, PageRequest(99)),
        )
        managed, problems = world.service.hosts.managed, world.service.hosts.problems
        hosts, events = (
            await lists.host_list(board, managed, problems, PageRequest(99)),
            await lists.event_list(board, problems, PageRequest(99)),
        )
        assert [vms.total, scopes.total, hosts.total, events.total] == [
            len(vms.vms), len(scopes.scopes), len(hosts.hosts), len(events.events)
        ]  # fmt: skip
        return [
            [one.name for one in vms.vms],
            [one.name for one in scopes.scopes],
            [one.name for one in hosts.hosts],
            [one.scope for one in events.events],
        ]

    async def change() -> None:
        world = World()
        board = world.engine.board
        assert await walk(world) == [[], [], [], []]
        for number in (3, 1, 2):
            board.publish(standalone(number), 1)
        expected = [f"vm-{number:05}" for number in (1, 2, 3)]
        assert (await walk(world))[0] == expected
        board.declare_hosts((), ("host-00002", "host-00000"))
        moved = standalone(1)
        board.publish(replace(moved, vms=(replace(moved.vms[0], host="host-00009"),)), 2)
        board.withdraw("scope-00002", 2)
        assert await walk(world) == [
            ["vm-00001", "vm-00003"],
            ["scope-00001", "scope-00003"],
            ["host-00000", "host-00002", "host-00003", "host-00009"],
            ["scope-00001", "scope-00003"],
        ]
        board.declare_hosts(("host-00002", "host-00000"), ())
        taken = replace(
            standalone(3), vms=(*standalone(3).vms, *moved.vms)
        )  # it has moved, and its old scope is published late
        board.publish(taken, 3)
        board.publish(replace(moved, vms=(), events=()), 4)
        assert await walk(world) == [
            ["vm-00001", "vm-00003"],
            ["scope-00001", "scope-00003"],
            ["host-00001", "host-00003"],
            ["scope-00003"],
        ]

    asyncio.run(change())
