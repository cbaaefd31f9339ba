"""A report cannot take another VM's address: guests without a daemon are identified by it."""

from typing import Any

import pytest

from forewarn.config import Config, Identify
from forewarn.engine.index import VmKeys
from forewarn.errors import Forbidden
from forewarn.fleetfile.parser import dump_json, parse
from forewarn.web.metadata.client_identity import identify
from forewarn.web.metadata.request import MetadataRequest
from tests.unit.engine.hostd_world import SECOND, Daemon, World, reported, run, vm_id

X, Y = "10.0.0.5", "10.0.0.6"
FLEET = f"""
scopes:
  - name: db
    kind: scale-set
    vms: [{{name: db-0, id: "{vm_id("db-0")}", host: host-z, address: {X}}}]
""".encode()


async def limited(world: World, *vms: dict[str, Any]) -> Daemon:
    """The daemon of host-b, whose token is for the scope web."""
    await world.limit_token("host-b", "web")
    return await world.daemon("host-b", *vms)


async def apply_fleet(world: World) -> None:
    await world.servers[0].operations.apply(parse(FLEET, "fleet"), by="test")
    await world.settle()


def at(world: World, address: str) -> str:
    """The VM that a request from this address counts as; empty if it is refused."""
    request = MetadataRequest("GET", "", "/metadata/scheduledevents", b"", {}, address)
    config = Config(identify=(Identify.ADDRESS,))
    try:
        return identify(request, world.servers[1].board, config, b"").vm
    except Forbidden:
        return ""


def addresses(world: World) -> dict[str, str]:
    scopes = world.servers[1].board.scopes.values()
    return {vm.name: vm.address for published in scopes for vm in published.scope.vms}


@pytest.mark.parametrize("scope", ["", "web"])
@pytest.mark.parametrize("owner", ["no daemon", "running", "stopped", "lost"])
def test_limited_token_cannot_take_the_address_of_a_vm_elsewhere(owner: str, scope: str) -> None:
    """The VM that had it would be refused, and restarted without having read of it."""

    async def test(world: World) -> None:
        thief = await limited(world)
        if owner == "no daemon":
            await apply_fleet(world)
        else:
            power = "stopped" if owner == "stopped" else "running"
            db_0 = reported("db-0", scope="db", addresses=[X], power=power)
            daemon = await world.daemon("host-a", db_0)
        if owner == "lost":
            await world.pass_time(16 * SECOND, thief)
        for _ in range(2):
            (problem,) = await thief.report(reported("ghost", scope=scope, addresses=[X, Y]))
            assert problem == (
                f"VM 'ghost': {X} is the address of VM 'db-0', which keeps it,"
                " and the token of host-b is not for the scope of that VM"
            )
            assert (at(world, X), at(world, Y)) == ("db-0", "ghost")
        if owner == "stopped":
            assert await daemon.report(reported("db-0", scope="db", addresses=[X])) == []
            assert at(world, X) == "db-0"
        assert addresses(world) == {"db-0": X, "ghost": Y}

    run(test)


def test_address_of_a_vm_without_a_daemon_stays_with_it_and_is_a_problem() -> None:
    """Also with a token that is not limited: the guest of the other VM has nothing else."""

    async def test(world: World) -> None:
        await apply_fleet(world)
        daemon = await world.daemon("host-b")
        problem = (
            f"VM 'ghost': {X} is the address of VM 'db-0' on host-z, which keeps it;"
            " expected unique addresses"
        )
        for _ in range(2):
            assert await daemon.report(reported("ghost", addresses=[X])) == [problem]
            assert at(world, X) == "db-0"
        assert await daemon.report() == []
        assert at(world, X) == "db-0"

    run(test)


def test_same_address_on_two_hosts_with_daemons_is_no_problem() -> None:
    """Each has its own NAT network, and its daemon knows its guests by where they are plugged in.
    The first keeps its address for requests that come without a daemon.
    """

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("a", addresses=[X]))
        daemon = await world.daemon("host-b")
        for _ in range(2):
            assert await daemon.report(reported("b", addresses=[X])) == []
            assert addresses(world) == {"a": X, "b": X}
            assert at(world, X) == "a"
        operations = world.servers[0].operations
        read = parse(dump_json(operations.fleet()), "fleet")
        difference = await operations.apply(read, by="ann")
        assert (difference.added, difference.changed, difference.removed) == ((), (), ())
        assert at(world, X) == "a"

    run(test)


def test_vm_that_moves_keeps_its_address() -> None:
    async def test(world: World) -> None:
        web_0 = reported("web-0", scope="web", addresses=[X])
        source = await world.daemon("host-a", web_0)
        target = await limited(world, web_0)
        await source.report()
        assert await target.report(web_0) == []
        assert (world.servers[1].vm("web-0").host, at(world, X)) == ("host-b", "web-0")
        renamed = {**web_0, "name": "web-1"}
        assert await target.report(renamed) == []
        assert at(world, X) == "web-1"

    run(test)


@pytest.mark.parametrize("host", ["host-a", "host-b"])
def test_address_that_dhcp_gives_to_another_vm_is_that_vms(host: str) -> None:
    """Its lease has ended while its first VM was stopped, on the same host or on another."""

    async def test(world: World) -> None:
        old, new = reported("old", addresses=[X]), reported("new", addresses=[X])
        daemons = {each: await world.daemon(each) for each in ("host-a", "host-b")}
        await daemons["host-a"].report(old)
        stopped = {**old, "power": "stopped", "addresses": []}
        await daemons["host-a"].report(stopped)
        assert at(world, X) == "old"
        await daemons[host].report(new, *([stopped] if host == "host-a" else []))
        assert at(world, X) == "new"
        started = {**old, "addresses": [Y]}
        await daemons["host-a"].report(started, *([new] if host == "host-a" else []))
        assert (at(world, X), at(world, Y)) == ("new", "old")

    run(test)


def test_vm_that_returns_to_its_address_has_it_before_the_one_that_took_it() -> None:
    """A VM that is stopped for a moment does not lose its address to a report of another host."""

    async def test(world: World) -> None:
        db_0 = reported("db-0", scope="db", addresses=[X])
        owner = await world.daemon("host-a", {**db_0, "power": "stopped"})
        await world.daemon("host-b", reported("ghost", addresses=[X]))
        assert at(world, X) == "ghost"
        await owner.report(db_0)
        assert at(world, X) == "db-0"
        await owner.report()
        assert at(world, X) == "ghost"

    run(test)


def test_two_vms_of_a_host_with_one_address_leave_a_fleet_that_can_be_written() -> None:
    """On two bridges of a host, they are two guests. A fleet file has an address once on a host."""

    async def test(world: World) -> None:
        both = [reported("b", addresses=[X]), reported("a", addresses=[X])]
        daemon = await world.daemon("host-a", both[1])
        for _ in range(2):
            (problem,) = await daemon.report(*both)
            assert problem == (
                f"VM 'b': {X} is the address of VM 'a' on this host too, which keeps it;"
                " expected unique addresses"
            )
            assert addresses(world) == {"a": X, "b": ""}
        parse(dump_json(world.servers[0].operations.fleet()), "fleet")

    run(test)


def test_address_with_a_scope_id_is_refused_as_in_a_fleet_file() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a")
        (problem,) = await daemon.report(reported("a", addresses=["fe80::1%eth0"]))
        assert problem.startswith("VM 'a': addresses")
        await daemon.report(reported("a", addresses=["::ffff:10.0.0.5"]))
        assert addresses(world) == {"a": X}

    run(test)


def test_key_belongs_to_the_vm_of_the_highest_rank() -> None:
    keys = VmKeys()
    for name, rank in (("a", 1), ("b", 1), ("c", 3), ("d", 3)):
        keys.assign("k", name, rank)
    assert (keys["k"], keys.shared) == ("", {"k": {"c", "d"}})
    assert (keys.count("k"), keys.has("k", "a"), keys.has("k", "e")) == (4, True, False)
    keys.release("k", "d")
    assert (keys["k"], keys.shared) == ("c", {})
    keys.assign("k", "c", 0)
    assert (keys["k"], keys.shared) == ("", {"k": {"a", "b"}})
    keys.release("k", "a")
    assert (keys["k"], keys.holders("k")) == ("b", {"b", "c"})
    keys.release("k", "b")
    keys.release("k", "c")
    assert (keys, keys.shared, keys.holders("k"), keys.count("k")) == ({}, {}, set(), 0)
