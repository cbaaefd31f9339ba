"""The fleet follows what host daemons report, and nothing else of it changes."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.core.fleet import Approval, Power, ScopeKind
from forewarn.engine.fleet_apply import Commands
from forewarn.engine.inventory import HostInventory
from forewarn.errors import Unavailable
from forewarn.fleetfile.parser import Fleet, dump_json, parse
from tests.unit.engine.hostd_world import GIB, SECOND, World, encoded, reported, run, vm_id
from tests.work_count import Name, work_of, work_of_turns

MAC = "52:54:00:00:00:01"
OTHER_MAC = "52:54:00:00:00:99"
NAME = "a name of 1 to 128 letters, digits, '.', '_' and '-', not starting with '.' or '-'"
UNIQUE = 'expected unique names, or metadata with ignore="yes" for one'
OTHER_SCOPE = "expected metadata with another kind or scope"
FLEET = b"""
scopes:
  - name: web
    kind: scale-set
    policy: {approval: all}
    vms:
      - {name: web-0, host: host-a, update_domain: 3, instance: {location: here}}
      - {name: web-9, host: host-z, update_domain: 4}
"""
NO_ID = b"""
scopes:
  - {name: old, kind: availability-set, vms: [{name: old-0, host: host-z}]}
"""


def shape(world: World) -> dict[str, list[str]]:
    """The VMs of each scope with their host, as the server knows it that was not called."""
    scopes = world.servers[1].board.scopes
    return {
        name: [f"{vm.name}@{vm.host}" for vm in published.scope.vms]
        for name, published in scopes.items()
    }


def test_vms_join_the_scope_of_their_metadata_or_one_of_their_own() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon(
            "host-a",
            reported("web-0", scope="web", update_domain=1, fault_domain=2, macs=[MAC, OTHER_MAC]),
            reported("web-1", scope="web", kind="scale-set", addresses=["10.0.0.2", "10.0.0.3"]),
            reported("solo", power="stopped"),
        )
        assert shape(world) == {"web": ["web-0@host-a", "web-1@host-a"], "solo": ["solo@host-a"]}
        server = world.servers[1]
        assert [server.scope(name).kind for name in ("web", "solo")] == [
            ScopeKind.SCALE_SET,
            ScopeKind.VM,
        ]
        web_0, web_1 = server.scope("web").vms
        assert (web_0.id, web_0.update_domain, web_0.fault_domain) == (vm_id("web-0"), 1, 2)
        assert web_0.instance.mac == MAC
        assert web_1.address == "10.0.0.2"
        assert (server.vm("solo").power, web_0.power) == (Power.STOPPED, Power.RUNNING)
        joined = await world.history("joined")
        assert {(e.vm, e.host, e.by) for e in joined} == {
            (vm, "host-a", "token host-a") for vm in ("web-0", "web-1", "solo")
        }
        assert await daemon.report() == []
        assert shape(world) == {}
        assert {e.vm for e in await world.history("left")} == {"web-0", "web-1", "solo"}

    run(test)


def test_known_vms_keep_their_scope_and_the_vms_of_other_hosts_stay() -> None:
    """As with `fleet sync`: metadata that is not there overrides nothing."""

    async def test(world: World) -> None:
        await world.servers[0].operations.apply(parse(FLEET, "fleet"), by="test")
        await world.daemon("host-a", reported("web-0"))
        assert shape(world) == {"web": ["web-0@host-a", "web-9@host-z"]}
        scope = world.servers[1].scope("web")
        assert (scope.policy.approval, scope.kind) == ("all", ScopeKind.SCALE_SET)
        vm = scope.vms[0]
        assert (vm.id, vm.update_domain, vm.instance.location) == (vm_id("web-0"), 3, "here")

    run(test)


def test_same_report_writes_nothing() -> None:
    async def test(world: World) -> None:
        vms = [reported("web-0", scope="web"), reported("solo", power="stopped")]
        daemon = await world.daemon("host-a", *vms)
        revision = (await world.store.get("nothing")).revision
        assert await daemon.report(*vms) == []
        assert (await world.store.get("nothing")).revision == revision

    run(test)


def test_power_follows_and_is_in_the_history() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await daemon.report(reported("web-0", power="stopped"))
        assert world.servers[1].vm("web-0").power is Power.STOPPED
        await daemon.report(reported("web-0"))
        assert world.servers[1].vm("web-0").power is Power.RUNNING
        updates = [e.detail for e in await world.history("updated") if e.vm]
        assert updates == ["running to stopped", "stopped to running"]

    run(test)


@pytest.mark.parametrize("by", ["forewarn", "libvirt"])
def test_deallocated_vm_stays_deallocated_until_it_is_started(by: str) -> None:
    """Its domain is still defined, so it is reported; a late report must not bring it back."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        operations = world.servers[0].operations
        placed = await operations.evict("web-0", by="ann")
        assert placed is not None
        await operations.approve(placed.event.id, by="ann")
        await world.settle()
        assert await daemon.finish(await daemon.take())
        off, on = ({"vms": [reported("web-0", power=power)]} for power in ("stopped", "running"))
        await daemon.work(number=2, inventory=off)
        assert (await daemon.send(number=1, inventory=on)).status_code == 409
        await world.settle()
        assert world.servers[1].vm("web-0").power is Power.DEALLOCATED
        if by == "forewarn":
            await world.restart("web-0")
            assert await daemon.finish(await daemon.take())
        else:
            await daemon.report(reported("web-0"))
            (update,) = [e for e in await world.history("updated") if e.vm]
            assert (update.vm, update.detail) == ("web-0", "deallocated to running")
        assert world.servers[1].vm("web-0").power is Power.RUNNING

    run(test)


def test_vm_under_impact_stays_as_it_is_and_is_looked_at_afterwards() -> None:
    """A reboot stops a VM for a moment, and a deletion undefines it: the result counts."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"), reported("solo"))
        await world.restart("solo")
        impact = await daemon.take()
        await daemon.report(
            reported("web-0", scope="web"),
            {**reported("solo", power="stopped", scope="web", update_domain=7), "name": "other"},
        )
        assert shape(world) == {"web": ["web-0@host-a"], "solo": ["solo@host-a"]}
        assert world.servers[1].vm("solo").power is Power.RUNNING
        await daemon.report(reported("web-0", scope="web"))
        assert "solo" in shape(world)

        assert await daemon.finish(impact)
        await world.pass_time(61 * SECOND, daemon)
        assert shape(world) == {"web": ["web-0@host-a"]}

    run(test)


def test_update_domain_is_fixed_while_an_event_is_pending() -> None:
    """The VMs of an event share one update domain. The other changes are applied at once."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.poll("web")
        placed = await world.servers[0].operations.restart("web-0", by="ann")
        assert placed is not None
        await daemon.report(reported("web-0", scope="web", update_domain=2, addresses=["10.0.0.9"]))
        scope = world.servers[1].scope("web")
        assert scope.vms[0].update_domain == 0
        assert scope.vms[0].address == "10.0.0.9"

        await world.servers[0].operations.cancel(placed.event.id, by="ann")
        await world.pass_time(61 * SECOND, daemon)
        assert world.servers[1].scope("web").vms[0].update_domain == 2

    run(test)


def test_report_does_not_change_the_kind_of_a_scope() -> None:
    """The scope may have VMs of other hosts, which the token of this one must not touch."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        problems = await daemon.report(reported("web-0", scope="web", kind="scale-set"))
        (problem,) = problems
        assert problem == (
            "scope 'web' is of the kind availability-set, not scale-set, and a report does not"
            " change that; expected a fleet file with its new kind"
        )
        assert world.servers[1].scope("web").kind is ScopeKind.AVAILABILITY_SET

    run(test)


def test_host_cannot_create_scopes_without_a_limit() -> None:
    """A scope that a report has created goes with its last VM: else the store would grow."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a")
        for wave in "abc":
            named = [reported(f"{wave}-{n}", scope=f"{wave}{n}") for n in range(20)]
            own = [reported(f"{wave}-own-{n}", kind="availability-set") for n in range(20)]
            assert await daemon.report(*named, *own) == []
            assert len(shape(world)) == 40
        await daemon.report()
        assert shape(world) == {}

    run(test)


def test_scope_that_a_fleet_defines_stays_when_a_report_empties_it() -> None:
    """Its policy was somebody's decision. Writing the fleet as it is decides nothing."""

    async def test(world: World) -> None:
        server = world.servers[0]
        await server.operations.apply(parse(FLEET, "fleet"), by="test")
        daemon = await world.daemon("host-a", reported("lab-0", scope="lab"), reported("db-0"))
        read = dump_json(server.operations.fleet())
        difference = await server.operations.apply(parse(read, "fleet"), by="test")
        assert (difference.added, difference.changed, difference.removed) == ((), (), ())
        await daemon.report()
        assert shape(world) == {"web": ["web-9@host-z"]}

        await daemon.report(reported("lab-0", scope="lab"))
        lab = server.scope("lab")
        policy = replace(lab.policy, approval=Approval.ALL)
        scopes = (server.scope("web"), replace(lab, policy=policy))
        await server.operations.apply(Fleet(scopes), by="test")
        await daemon.report()
        assert shape(world) == {"web": ["web-9@host-z"], "lab": []}

    run(test)


# --- a token that is limited to scopes


def test_token_limited_to_scopes_places_vms_only_there() -> None:
    """Whoever is in a scope reads and approves its events. VMs without a scope harm no other."""

    async def test(world: World) -> None:
        await world.servers[0].operations.apply(parse(NO_ID, "fleet"), by="test")
        await world.limit_token("host-a", "cache", "web")
        db = reported("db-1", scope="db", power="stopped")
        await world.daemon("host-b", reported("db-0", scope="db"), db)
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        problems = await daemon.report(
            reported("web-0", scope="web"),
            reported("solo"),
            reported("spy", scope="db"),
            {**reported("spy2", scope="lab"), "kind": "scale-set"},
            reported("db-1"),
            reported("old-0"),
        )
        expected = "expected a scope of its own, or one of the token's 2, such as cache, web"
        assert problems == [
            f"VM 'spy': the token of host-a is not for the scope 'db'; {expected}",
            f"VM 'spy2': the token of host-a is not for the scope 'lab'; {expected}",
            f"VM 'db-1': the token of host-a is not for the scope 'db'; {expected}",
            f"VM 'old-0': the token of host-a is not for the scope 'old'; {expected}",
        ]
        assert shape(world) == {
            "db": ["db-0@host-b", "db-1@host-b"],
            "old": ["old-0@host-z"],
            "web": ["web-0@host-a"],
            "solo": ["solo@host-a"],
        }

    run(test)


def test_limited_token_leaves_the_vms_of_its_host_where_they_are() -> None:
    """A fleet file, a redeploy or an earlier token has put them there. It cannot move them on."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("db-0", scope="db"))
        await world.daemon("host-b", reported("own"))
        await world.pass_time(16 * SECOND, daemon)
        await world.limit_token("host-a", "web")
        off = reported("db-0", scope="db", power="stopped")
        assert await daemon.report(off, reported("own")) == []
        assert shape(world) == {"db": ["db-0@host-a"], "own": ["own@host-a"]}
        assert world.servers[1].vm("db-0").power is Power.STOPPED
        (problem,) = await daemon.report(reported("db-0", scope="lab"), reported("own"))
        assert "not for the scope 'lab'" in problem
        assert shape(world) == {"db": ["db-0@host-a"], "own": ["own@host-a"]}

    run(test)


# --- requests that arrive late


@pytest.mark.parametrize("server", [0, 1], ids=["same server", "another server"])
def test_report_that_arrives_after_a_later_request_changes_nothing(server: int) -> None:
    """The daemon has given it up, and repeats in a later one what is still true."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        old, new = ({"vms": [reported("web-0", power=power)]} for power in ("running", "stopped"))
        daemon.server = world.servers[server]
        await daemon.work(number=8, inventory=new)
        daemon.server = world.servers[0]
        await world.settle()
        late = await daemon.send(number=7, inventory=old)
        assert (late.status_code, late.json()["error"]) == (409, "refused")
        assert late.json()["message"] == "a later request of the daemon of host-a has arrived"
        await world.settle()
        assert world.servers[1].vm("web-0").power is Power.STOPPED
        record = world.servers[0].hosts.managed.find("host-a")
        assert record is not None
        assert record.server == world.servers[server].name
        assert not record.vms[vm_id("web-0")].is_running

        daemon.server = world.servers[server]
        assert (await daemon.work(number=8, inventory=old))["is_merged"], "it was sent again"
        await daemon.work(inventory=new)  # an earlier version of the daemon sends no numbers
        await world.settle()
        assert world.servers[0].vm("web-0").power is Power.STOPPED

    run(test)


def test_late_copy_of_a_request_does_not_take_the_host_back() -> None:
    """It was sent to one server without an answer, and then to the next, which serves the host."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first, second = world.servers
        daemon.server = second
        for number in (9, 10):
            await daemon.work(number=number)
        await world.settle()
        daemon.server = first
        assert (await daemon.send(number=9)).status_code == 409
        record = first.hosts.managed.find("host-a")
        assert record is not None
        assert record.server == second.name
        await daemon.work(number=11)  # the daemon has chosen this server
        await world.settle()
        record = second.hosts.managed.find("host-a")
        assert record is not None
        assert record.server == first.name

    run(test)


def test_result_of_a_late_request_does_not_count() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        await daemon.take()
        await daemon.work(number=3)
        (running,) = daemon.running
        daemon.running = [running | {"result": {"problem": "an old one"}}]
        assert (await daemon.send(number=2)).status_code == 409
        await world.settle()
        assert await world.history("impact-failed") == []

    run(test)


# --- a VM on two hosts


def test_vm_that_an_admin_moves_belongs_where_it_runs() -> None:
    """While it moves, both hosts run it; at the end the source has it no longer, or stopped."""

    async def test(world: World) -> None:
        source = await world.daemon("host-a", reported("web-0", scope="web"))
        target = await world.daemon("host-b", reported("web-0", scope="web"), server=1)
        assert shape(world) == {"web": ["web-0@host-a"]}
        await source.report(reported("web-0", scope="web", power="stopped"))
        assert shape(world) == {"web": ["web-0@host-b"]}
        assert world.servers[0].vm("web-0").power is Power.RUNNING
        await source.report()
        assert shape(world) == {"web": ["web-0@host-b"]}
        (moved,) = await world.history("moved")
        assert (moved.vm, moved.host_before, moved.host) == ("web-0", "host-a", "host-b")

        await target.report(reported("web-0", scope="web", power="stopped"))
        await source.report(reported("web-0", scope="web", power="stopped"))
        assert shape(world) == {"web": ["web-0@host-b"]}
        await target.report()
        assert shape(world) == {"web": ["web-0@host-a"]}
        assert [e.vm for e in await world.history("left")] == []

    run(test)


def test_source_that_has_lost_its_vm_first_does_not_delete_it() -> None:
    async def test(world: World) -> None:
        source = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.daemon("host-b", reported("web-0", scope="web"), server=1)
        await source.report()
        assert shape(world) == {"web": ["web-0@host-b"]}

    run(test)


@pytest.mark.parametrize("order", ["result first", "target first", "source first"])
def test_inventory_does_not_fight_with_a_redeploy(order: str) -> None:
    """The reports of both hosts and the result arrive in any order; the VM is never lost."""

    async def test(world: World) -> None:
        source = await world.daemon("host-a", reported("web-0", scope="web"))
        target = await world.daemon("host-b", server=1)
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        impact = await source.take()
        assert impact["targets"] == ["host-b"]
        steps: dict[str, Any] = {
            "result first": lambda: source.finish(impact, host="host-b"),
            "target first": lambda: target.report(reported("web-0", scope="web")),
            "source first": source.report,
        }
        for step in (order, *(each for each in steps if each != order)):
            await steps[step]()
            assert len(shape(world)["web"]) == 1
        assert shape(world) == {"web": ["web-0@host-b"]}
        assert await world.history("left") == []
        (moved,) = await world.history("moved")
        assert moved.host == "host-b"

    run(test)


@pytest.mark.parametrize("operation", ["redeploy", "restart"])
def test_vm_of_a_lost_host_that_runs_elsewhere_is_there(operation: str) -> None:
    """A waiting impact that was to move it is done; another one runs where the VM is now."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0", scope="web"))
        await world.pass_time(16 * SECOND)
        await getattr(world.servers[0].operations, operation)("web-0", by="ann")
        await world.settle()
        rescue = await world.daemon("host-b", reported("web-0", scope="web"))
        assert shape(world) == {"web": ["web-0@host-b"]}
        if operation == "redeploy":
            (done,) = await world.history("impacted")
            assert done.detail == "found running on host-b"
            assert (await rescue.work())["impacts"] == []
        else:
            assert await rescue.finish(await rescue.take())

    run(test)


def test_vm_that_a_running_impact_of_a_lost_host_had_moved_is_found() -> None:
    async def test(world: World) -> None:
        source = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        impact = await source.take()
        target = await world.daemon("host-b", reported("web-0", scope="web"), server=1)
        assert shape(world) == {"web": ["web-0@host-a"]}
        await world.pass_time(70 * SECOND, target)
        assert shape(world) == {"web": ["web-0@host-b"]}
        assert [e.detail for e in await world.history("impacted")] == ["found running on host-b"]
        source.session = "s2"
        source.running = [{"event_id": impact["event_id"], "vm": "web-0", "tries": 1}]
        assert (await source.work())["cancel"] == [source.running[0] | {"may_run_on": ["host-b"]}]

    run(test)


def test_move_is_not_taken_for_done_because_the_server_of_its_daemon_is_lost() -> None:
    """The daemon goes on at another server, and still cleans up: no other impact acts meanwhile."""

    async def test(world: World) -> None:
        source = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        impact = await source.take()
        await world.expire(world.servers[0])
        target = await world.daemon("host-b", reported("web-0", scope="web"), server=1)
        assert await world.history("impacted") == []
        source.server = world.servers[1]
        impact = await source.take()
        assert await source.finish(impact, host="host-b", detail="moved")
        assert [e.detail for e in await world.history("impacted")] == ["moved"]
        assert target

    run(test)


# --- what does not fit


def test_vm_with_the_name_of_one_that_has_moved_is_not_accepted() -> None:
    """The host from which that one was moved by hand has another VM with its name."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.daemon("host-b", reported("web-0", scope="web"))
        problems = await first.report(reported("web-0", id=vm_id("stray")))
        assert shape(world) == {"web": ["web-0@host-b"]}
        assert len(problems) == 1
        assert "web-0" in problems[0]

    run(test)


PROBLEMS = f"""
VM 'known': kind: expected one of availability-set, cloud-service, scale-set, vm, got 'herd'
VM '../../etc': name: expected {NAME}, got '../../etc'
VM 'x\\nforged': name: expected {NAME}, got 'x\\nforged'
VM 'no-id': id: expected a UUID, got '7'
VM 'domain': update_domain: expected a whole number from 0 to 99, got 100
VM 'memory': memory_bytes: expected a whole number from 0 to {1 << 60}, got -1
VM 'unmovable': unmovable: expected a text of at most 200 characters, got '{"x" * 59}…
VM 'empty-id': id: expected a UUID, got nothing
VM 'address': addresses: 'here' does not appear to be an IPv4 or IPv6 address
two VMs are named 'taken': {vm_id("other")} on host-a and {vm_id("taken")} on host-b; {UNIQUE}
domain 'web' names no scope, and a scope 'web' already exists; expected metadata with a scope
scope 'single' is of the kind vm, which has one VM, not single, alien; {OTHER_SCOPE}
"""


def test_vm_that_does_not_fit_is_named_and_the_others_are_applied() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-b", reported("taken"))
        daemon = await world.daemon("host-a", reported("known", scope="web"), reported("single"))
        problems = await daemon.report(
            reported("good", scope="web"),
            {**reported("known"), "kind": "herd"},
            reported("../../etc"),
            reported("x\nforged"),
            {**reported("no-id"), "id": "7"},
            reported("domain", update_domain=100),
            reported("memory", memory_bytes=-1),
            reported("unmovable", unmovable="x" * 201),
            {**reported("empty-id"), "id": "", "addresses": ["here"]},
            reported("address", addresses=["here"]),
            {**reported("taken"), "id": vm_id("other")},
            reported("web"),
            reported("single"),
            reported("alien", scope="single"),
        )
        assert all("\n" not in problem for problem in problems)
        assert sorted(problems) == sorted(PROBLEMS.strip().splitlines())
        assert shape(world) == {
            "taken": ["taken@host-b"],
            "web": ["known@host-a", "good@host-a"],
            "single": ["single@host-a"],
        }

    run(test)


def test_vm_under_impact_keeps_its_name_although_its_host_no_longer_has_it() -> None:
    """Another VM with that name would be a second one in the fleet: its impact would not end."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", power="stopped"))
        await world.restart("web-0")
        impact = await daemon.take()
        other = {**reported("web-0", scope="web"), "id": vm_id("other")}
        (problem,) = await daemon.report(other)
        assert problem.startswith("two VMs are named 'web-0'")
        assert shape(world) == {"web-0": ["web-0@host-a"]}

        await daemon.finish(impact)
        assert await daemon.report(other) == []
        assert shape(world) == {"web": ["web-0@host-a"]}

    run(test)


def test_vm_of_a_fleet_file_stays_if_its_report_is_refused() -> None:
    """It is known by its name until a report gives it an id. Its events would go with it."""

    async def test(world: World) -> None:
        names = ("web-0", "web-1", "web-2")
        vms = ", ".join(f"{{name: {name}, host: host-a}}" for name in names)
        fleet = parse(f"scopes: [{{name: web, kind: scale-set, vms: [{vms}]}}]".encode(), "fleet")
        await world.servers[0].operations.apply(fleet, by="ann")
        await world.daemon(
            "host-a",
            reported("web-0", update_domain=-5),
            reported("web-1"),
            reported("web-2", addresses=["nowhere"]),
        )
        assert shape(world) == {"web": [f"{name}@host-a" for name in names]}
        assert [world.servers[0].vm(name).id for name in names] == ["", vm_id("web-1"), ""]

    run(test)


def test_fleet_that_is_applied_without_the_vms_of_a_daemon_gets_them_back() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.servers[1].operations.apply(parse(b"scopes: []", "fleet"), by="ann")
        await world.settle()
        assert shape(world) == {}
        await world.pass_time(61 * SECOND, daemon)
        assert shape(world) == {"web": ["web-0@host-a"]}
        assert world.servers[0].board.hosts["host-a"] == {"web-0"}
        assert [e.detail for e in await world.history("updated") if "declared" in e.detail] == []

    run(test)


def test_free_memory_is_that_of_the_vms_that_run() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"), reported("off", power="stopped"))
        assert world.servers[1].hosts.managed.free_bytes("host-a", but="") == 63 * GIB

    run(test)


def test_work_of_a_report_does_not_grow_with_the_fleet() -> None:
    """A fleet of 100,000 VMs changes somewhere every second."""

    async def work_in(world: World, other_scopes: int) -> int:
        scopes = [
            {"name": f"s{n}", "vms": [{"name": Name(f"vm-{n}"), "host": f"other-{n % 100}"}]}
            for n in range(other_scopes)
        ]
        fleet = parse(json.dumps({"scopes": scopes}).encode(), "fleet")
        await world.servers[0].operations.apply(fleet, by="test")
        server, daemon = world.servers[0], await world.daemon("host-a", reported("web-0"))
        await daemon.report(reported("web-0", power="stopped"))
        inventory = HostInventory(
            server.engine, server.hosts.managed, "host-a", encoded(reported("web-0"))
        )
        await inventory.read()
        return await work_of(server.operations.merge(inventory.plan, by="test"))

    async def test(world: World) -> None:
        small = await work_in(world, 10)
        assert await work_in(world, 1000) < 1.2 * small

    run(test)


def test_work_of_a_report_does_not_depend_on_what_is_wrong_with_it() -> None:
    """2,000 VMs that are not valid must not hold up polls longer than 2,000 that are."""

    async def test(world: World) -> None:
        server = world.servers[0]

        async def read(name: str) -> None:
            vms = encoded(*(reported(name.format(number)) for number in range(20)))
            await HostInventory(server.engine, server.hosts.managed, "host-a", vms).read()

        valid, invalid = await work_of(read("vm-{}")), await work_of(read("bad name {}"))
        assert invalid < 10 * valid

    run(test)


@pytest.mark.parametrize("name", ["vm-{}", "bad name {}"], ids=["valid", "invalid"])
@pytest.mark.parametrize("scope", ["", "scope-of-{}"], ids=["own", "named"])
def test_report_with_many_vms_leaves_turns_to_polls(name: str, scope: str) -> None:
    """All of its work is done in small parts: the longest does not grow with the report."""

    async def longest_turn(world: World, vms: int) -> int:
        server, prefix = world.servers[1], f"{vms}-"
        report = (
            reported(prefix + name.format(n), scope=scope and prefix + scope.format(n))
            for n in range(vms)
        )
        inventory = HostInventory(server.engine, server.hosts.managed, "host-a", encoded(*report))

        async def merge() -> None:
            await inventory.read()
            await server.operations.merge(inventory.plan, by="test")

        turns = await work_of_turns(merge())
        await world.settle()
        is_valid = not inventory.problems
        assert is_valid == (f"{prefix}vm-{vms - 1}" in server.board.vms)
        return max(turns)

    async def test(world: World) -> None:
        few = await longest_turn(world, 100)
        assert await longest_turn(world, 300) < 1.3 * few

    run(test)


def test_fleet_that_changes_while_a_report_is_planned_is_not_changed_by_it() -> None:
    """The plan was made for a fleet that no longer is: the daemon sends its report again."""

    async def test(world: World) -> None:
        server = world.servers[0]
        vms = encoded(*(reported(f"vm-{n}") for n in range(100)))
        inventory = HostInventory(server.engine, server.hosts.managed, "host-a", vms)
        await inventory.read()

        async def plan_slowly() -> Commands:
            commands = await inventory.plan()
            await world.servers[1].operations.apply(parse(NO_ID, "fleet"), by="ann")
            await world.settle()
            return commands[:0]

        with pytest.raises(Unavailable, match="the fleet has changed meanwhile"):
            await server.operations.merge(plan_slowly, by="test")

    run(test)
