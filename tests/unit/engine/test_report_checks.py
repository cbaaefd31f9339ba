"""A host's token is limited to what `--scope` says, and its reports leave a fleet that a fleet file
can describe.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.core.fleet import Power, Vm
from forewarn.engine.inventory import HostInventory
from forewarn.engine.managed_hosts import HOST_KEY, ManagedHost
from forewarn.engine.transaction import Transaction
from forewarn.fleetfile.parser import dump_json, parse
from tests.unit.engine.hostd_world import SECOND, Daemon, World, encoded, reported, run, vm_id

FLEET = f"""
scopes:
  - {{name: web, kind: scale-set, vms: []}}
  - name: db
    kind: scale-set
    vms:
      - {{name: db-0, id: "{vm_id("db-0")}", host: host-z}}
      - {{name: db-1, host: host-z}}
      - {{name: db-2}}
  - {{name: solo, vms: [{{name: solo, id: "{vm_id("solo")}", host: host-z}}]}}
  - {{name: plain, vms: [{{name: plain, host: host-z}}]}}
  - {{name: free, vms: [{{name: free, id: "{vm_id("free")}"}}]}}
  - {{name: bare, vms: [{{name: bare}}]}}
""".encode()
EXPECTED = "expected a scope of its own, or one of the token's 1, such as web"


async def apply_fleet(world: World) -> None:
    await world.servers[0].operations.apply(parse(FLEET, "fleet"), by="test")
    await world.settle()


async def limited(world: World, *vms: dict[str, Any]) -> Daemon:
    """The daemon of host-b, whose token is for the scope web."""
    await world.limit_token("host-b", "web")
    return await world.daemon("host-b", *vms)


def home_of(world: World, name: str) -> tuple[str, str, str]:
    """The scope, the host and the id of a VM, as the server knows them that was not called."""
    published, vm = world.servers[1].board.find_vm(name)
    return published.scope.name, vm.host, vm.id


# --- VMs of hosts without a daemon


@pytest.mark.parametrize("power", ["running", "stopped"])
@pytest.mark.parametrize("scope", ["", "web", "db", "other"])
@pytest.mark.parametrize(
    ("name", "known_id"),
    [
        ("db-0", vm_id("db-0")),
        ("renamed", vm_id("db-0")),
        ("db-0", vm_id("made-up")),
        ("db-1", vm_id("made-up")),
        ("db-2", vm_id("made-up")),
    ],
    ids=["by id", "by id, renamed", "by name", "by name, without an id", "without a host"],
)
def test_limited_token_cannot_take_a_vm_of_another_scope(
    name: str, known_id: str, scope: str, power: str
) -> None:
    """Not by naming an allowed scope either: its events would be canceled, and the next report
    without it would remove it from the fleet.
    """

    async def test(world: World) -> None:
        server = world.servers[0]
        await apply_fleet(world)
        await world.poll("db")
        await server.operations.restart("db-0", by="ann")
        before = server.scope("db")
        stolen = {**reported(name, scope=scope, power=power), "id": known_id}
        daemon = await limited(world, reported("web-0", scope="web"))
        problems = await daemon.report(reported("web-0", scope="web"), stolen)
        assert len(problems) == 1, problems
        await daemon.report(reported("web-0", scope="web"))
        assert world.servers[1].scope("db") == before
        assert home_of(world, "web-0")[:2] == ("web", "host-b")

    run(test)


@pytest.mark.parametrize("scope", ["", "web", "solo"])
@pytest.mark.parametrize("name", ["solo", "plain", "free", "bare"])
def test_limited_token_cannot_take_a_standalone_vm_of_a_host_without_a_daemon(
    name: str, scope: str
) -> None:
    """Nothing shows that it has moved; an operator who wants that lists its scope."""

    async def test(world: World) -> None:
        await apply_fleet(world)
        before = home_of(world, name)
        daemon = await limited(world)
        (problem,) = await daemon.report(reported(name, scope=scope))
        assert problem.startswith(f"VM '{name}': ")
        assert home_of(world, name) == before
        await daemon.report()
        assert home_of(world, name) == before

    run(test)


@pytest.mark.parametrize("is_fenced", [True, False])
def test_limited_token_gets_a_standalone_vm_of_a_forgotten_host_if_that_is_fenced(
    *, is_fenced: bool
) -> None:
    """Otherwise it may still run there, without a daemon that could report it."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("solo"))
        daemon = await limited(world)
        await world.pass_time(20 * SECOND, daemon)
        power = Power.STOPPED if is_fenced else Power.UNKNOWN
        await world.servers[0].hosts.removal.forget("host-a", by="ann", power=power)
        await world.settle()
        refusal = f"VM 'solo': it is on host-a, which has no daemon; {EXPECTED}"
        assert await daemon.report(reported("solo")) == [refusal] * (not is_fenced)
        assert home_of(world, "solo")[1] == ("host-b" if is_fenced else "host-a")

    run(test)


def test_refused_vm_is_named_with_what_is_expected() -> None:
    async def test(world: World) -> None:
        await apply_fleet(world)
        daemon = await limited(world)
        problems = await daemon.report(
            reported("db-0", scope="web"), reported("solo", scope="web"), reported("plain")
        )
        assert problems == [
            f"VM 'db-0': the token of host-b is not for the scope 'db'; {EXPECTED}",
            f"VM 'solo': the token of host-b is not for the scope 'solo'; {EXPECTED}",
            f"VM 'plain': it is on host-z, which has no daemon; {EXPECTED}",
        ]

    run(test)


def test_scope_that_changes_while_a_report_is_read_is_compared_again() -> None:
    """Between the first look at a report and its merge, another server may change the fleet."""

    async def test(world: World) -> None:
        await limited(world)
        server = world.servers[0]
        stolen = reported("db-0", scope="web")
        inventory = HostInventory(
            server.engine, server.hosts.managed, "host-b", encoded(stolen), frozenset(["web"])
        )
        await inventory.read()
        assert inventory.problems == []

        def describe(transaction: Transaction) -> None:
            record: ManagedHost | None = transaction.get(HOST_KEY.format("host-b"))
            assert record is not None
            transaction.put(HOST_KEY.format("host-b"), replace(record, vms=inventory.vms))

        await server.engine.update([HOST_KEY.format("host-b")], describe, by="test")
        await apply_fleet(world)
        await server.operations.merge(inventory.plan, by="test")
        await world.settle()
        assert home_of(world, "db-0")[:2] == ("db", "host-z")

    run(test)


# --- VMs of hosts with a daemon


@pytest.mark.parametrize("scope", ["", "web", "db"])
@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "lost"])
@pytest.mark.parametrize("true_power", ["running", "stopped"])
def test_limited_token_cannot_take_a_vm_of_another_scope_from_a_daemon(
    scope: str, true_power: str, *, is_connected: bool
) -> None:
    async def test(world: World) -> None:
        owner = await world.daemon("host-a", reported("db-0", scope="db", power=true_power))
        daemon = await limited(world)
        if not is_connected:
            await world.pass_time(16 * SECOND, daemon)
        problems = await daemon.report(reported("db-0", scope=scope))
        assert [each[:11] for each in problems] == ["VM 'db-0': "]
        assert home_of(world, "db-0")[:2] == ("db", "host-a")
        assert await owner.report(reported("db-0", scope="db")) == []
        assert home_of(world, "db-0")[:2] == ("db", "host-a")

    run(test)


def test_standalone_vm_that_is_stopped_for_a_moment_stays_on_its_host() -> None:
    """It could be taken while it restarts, and would not come back."""

    async def test(world: World) -> None:
        await world.limit_token("host-a", "web")
        owner = await world.daemon("host-a", reported("solo", power="stopped"))
        thief = await limited(world)
        assert await thief.report(reported("solo")) == [
            "VM 'solo': it is on host-a, and the token of host-b is not for the scope 'solo'"
        ]
        assert home_of(world, "solo")[:2] == ("solo", "host-a")
        (problem,) = await thief.report(reported("solo", scope="web"))
        assert "not for the scope 'solo'" in problem
        assert await owner.report(reported("solo")) == []
        assert home_of(world, "solo")[:2] == ("solo", "host-a")
        await thief.report()
        assert home_of(world, "solo")[:2] == ("solo", "host-a")

    run(test)


@pytest.mark.parametrize("is_owner_limited", [True, False])
def test_standalone_vm_that_was_taken_comes_back_when_its_host_runs_it(
    *, is_owner_limited: bool
) -> None:
    """While its host is away, another may have restarted it. If not, its host knows better."""

    async def test(world: World) -> None:
        if is_owner_limited:
            await world.limit_token("host-a", "web")
        owner = await world.daemon("host-a", reported("solo"))
        thief = await limited(world)
        await world.pass_time(16 * SECOND, thief)
        assert await thief.report(reported("solo")) == []
        assert home_of(world, "solo")[:2] == ("solo", "host-b")

        await owner.report(reported("solo", power="stopped"))
        assert home_of(world, "solo")[:2] == ("solo", "host-b"), "it was restarted there"
        assert await owner.report(reported("solo")) == []
        assert home_of(world, "solo")[:2] == ("solo", "host-a")
        assert len(await thief.report(reported("solo"))) == 1
        assert home_of(world, "solo")[:2] == ("solo", "host-a")

    run(test)


def test_standalone_vm_that_is_taken_keeps_its_name_and_its_event() -> None:
    """Its host restarts the daemon. A VM with another name is a new one, without the event."""

    async def test(world: World) -> None:
        owner = await world.daemon("host-a", reported("solo"))
        thief = await limited(world)
        await world.poll("solo")
        assert await world.servers[0].operations.restart("solo", by="ann")
        (event,) = world.servers[0].scope("solo").events
        await owner.work(is_leaving=True)
        await world.settle()
        await thief.report({**reported("fresh"), "id": vm_id("solo")})
        assert home_of(world, "solo")[:2] == ("solo", "host-b")
        assert world.servers[1].scope("solo").events == (event,)
        assert "fresh" not in world.servers[1].board.vms

        await owner.report(reported("solo"))
        assert home_of(world, "solo")[:2] == ("solo", "host-a")
        assert world.servers[1].scope("solo").events == (event,)

    run(test)


def test_standalone_vm_that_is_moved_by_hand_follows() -> None:
    """Its old host no longer has it. Moved on, it is as good there as on its first host."""

    async def test(world: World) -> None:
        await world.limit_token("host-a", "web")
        source = await world.daemon("host-a", reported("solo"))
        target = await limited(world, reported("solo"))
        assert home_of(world, "solo")[:2] == ("solo", "host-a")
        await source.report()
        assert home_of(world, "solo")[:2] == ("solo", "host-b")
        assert await target.report(reported("solo")) == []
        await source.report(reported("solo"))
        await target.report(reported("solo", power="stopped"))
        assert home_of(world, "solo")[:2] == ("solo", "host-b"), "it is a claim of the source now"
        assert await world.history("left") == []

    run(test)


def test_limited_token_may_rename_and_place_what_is_on_its_host() -> None:
    async def test(world: World) -> None:
        daemon = await limited(world, reported("solo"), reported("web-0", scope="web"))
        renamed = {**reported("solo", scope="web"), "name": "web-1"}
        assert await daemon.report(renamed, reported("web-0", scope="web")) == []
        assert home_of(world, "web-1") == ("web", "host-b", vm_id("solo"))

    run(test)


# --- names


ANOTHER = "expected another name"
CLASHES: list[tuple[list[dict[str, Any]], str]] = [
    (
        [reported(vm_id("db-0"))],
        f"VM '{vm_id('db-0')}': its name is the id of VM 'db-0'; expected another name",
    ),
    (
        [reported(vm_id("db-0").upper())],
        f"VM '{vm_id('db-0').upper()}': its name is the id of VM 'db-0'; expected another name",
    ),
    (
        [{**reported("new"), "id": vm_id("named")}],
        f"VM 'new': its id is the name of VM '{vm_id('named')}'; expected another id",
    ),
    (
        [reported("DB-0")],
        "VM 'DB-0': the name of VM 'db-0' differs only in case; expected another name",
    ),
    (
        [reported("upper-0")],
        "VM 'upper-0': the name of VM 'UPPER-0' differs only in case; expected another name",
    ),
    (
        [reported("new", scope="Db")],
        "VM 'new': the name of scope 'db' differs from 'Db' only in case; expected another name",
    ),
    (
        [reported("Mixed")],
        f"VM 'Mixed': the name of scope 'MIXED' differs from 'Mixed' only in case; {ANOTHER}",
    ),
    (
        [reported("new"), {**reported("NEW"), "id": vm_id("x")}],
        "VM 'NEW': the name of VM 'new' differs only in case; expected another name",
    ),
    (
        [reported("a", scope="s"), reported("b", scope="S")],
        "VM 'b': the name of scope 's' differs from 'S' only in case; expected another name",
    ),
    (
        [reported(vm_id("second")), reported("second")],
        f"VM 'second': its id is the name of VM '{vm_id('second')}'; expected another id",
    ),
    (
        [reported("second"), reported(vm_id("second"))],
        f"VM '{vm_id('second')}': its name is the id of VM 'second'; expected another name",
    ),
]


@pytest.mark.parametrize(("vms", "problem"), CLASHES)
def test_report_cannot_make_a_fleet_that_cannot_be_written(
    vms: list[dict[str, Any]], problem: str
) -> None:
    """An operator reads the fleet, changes a line and writes it: that must not fail elsewhere."""

    async def test(world: World) -> None:
        await world.daemon(
            "host-a",
            reported("db-0", scope="db"),
            reported("UPPER-0"),
            reported("m", scope="MIXED"),
            {**reported(vm_id("named")), "id": vm_id("other")},
        )
        daemon = await world.daemon("host-b")
        assert await daemon.report(*vms) == [problem]
        operations = world.servers[0].operations
        fleet = parse(dump_json(operations.fleet()), "fleet")
        difference = await operations.apply(fleet, by="ann")
        assert (difference.added, difference.changed, difference.removed) == ((), (), ())

    run(test)


def test_vm_may_be_named_like_its_own_id() -> None:
    async def test(world: World) -> None:
        vm = {**reported("x"), "name": vm_id("x"), "id": vm_id("x").upper()}
        daemon = await world.daemon("host-a", vm)
        assert await daemon.report(vm) == []
        assert world.servers[1].vm(vm_id("x")) == Vm(name=vm_id("x"), id=vm_id("x"), host="host-a")

    run(test)


def test_limited_token_creates_no_scope_that_the_vms_of_others_could_join() -> None:
    """Its VM would approve their events."""

    async def test(world: World) -> None:
        squatter = {**reported("payments"), "kind": "availability-set"}
        daemon = await limited(world, squatter, reported("alone"))
        assert "payments" not in world.servers[1].board.scopes
        assert home_of(world, "alone")[0] == "alone"
        (problem,) = await daemon.report(squatter, reported("alone"))
        assert problem.endswith(
            "the token of host-b is not for all scopes, and a scope of the kind availability-set"
            f" can have several VMs; {EXPECTED}"
        )

        owner = await world.daemon(
            "host-a", {**reported("pay-0", scope="payments"), "kind": "availability-set"}
        )
        await owner.work()
        assert home_of(world, "pay-0")[0] == "payments"

    run(test)
