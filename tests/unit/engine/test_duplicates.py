"""VMs that two hosts run, and VMs that nothing may start because another host may run them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from forewarn.auth.tokens import Role
from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Power
from forewarn.engine.managed_hosts import HOST_KEY
from forewarn.errors import Error, HostUnreachable
from forewarn.fleetfile.parser import parse
from forewarn.platform.base import make_request
from forewarn.store.base import WRITES_MAX, Record, Write
from forewarn.store.memory import MemoryStore
from tests.unit.engine.hostd_world import SECOND, Daemon, Server, World, reported, run, vm_id

HANDED_OUT_SECONDS_MAX = 5.0
"""What is handed out although it has to wait never ends: no daemon takes it."""


def root(world: World) -> dict[str, str]:
    return {"authorization": f"Bearer fw_root_{world.secret}"}


async def forget(world: World, host: str, query: str = "") -> Any:
    url = f"/api/v1/hosts/{host}/daemon{query}"
    response = await world.servers[0].client.delete(url, headers=root(world))
    await world.settle()
    return response


async def two_copies(world: World) -> tuple[Daemon, Daemon]:
    """Host A was dead, web-0 was started on B, and A has started it again."""
    first = await world.daemon("host-a", reported("web-0"))
    second = await world.daemon("host-b", reported("web-0"), server=1)
    return first, second


async def report_for(world: World, seconds: int, *daemons: Daemon, age: float = 0) -> list[bool]:
    """Report the same VMs each second; whether servers want them again at the end."""
    again = []
    for _ in range(seconds):
        await world.clock.advance(SECOND)
        await world.settle()
        again = [
            not (await each.work(inventory={**each.inventory, "age_seconds": age}))["is_merged"]  # type: ignore[dict-item]
            for each in daemons
        ]
        await world.settle()
    return again


def hosts_of(world: World, vm: str = "web-0") -> list[tuple[str, ...]]:
    """As each server sees it."""
    return [each.hosts.duplicates.hosts_of(each.vm(vm).id) for each in world.servers]


def test_vm_that_two_hosts_run_is_a_duplicate_after_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both copies write to its disk. Forewarn is the only one that sees both."""

    async def test(world: World) -> None:
        both = await two_copies(world)
        assert await report_for(world, 10, *both) == [True, True], "until it is settled"
        assert hosts_of(world) == [(), ()]
        assert await report_for(world, 2, *both) == [False, False]
        assert hosts_of(world) == [("host-a", "host-b")] * 2
        assert [each.hosts.duplicates.count() for each in world.servers] == [1, 1]
        await report_for(world, 30, *both)
        entries = await world.history("updated")
        assert [(e.vm, e.scope, e.detail) for e in entries if e.vm] == [
            ("web-0", "web-0", "runs on host-a and host-b")
        ]

        await both[0].report(reported("web-0", power="stopped"))
        assert hosts_of(world) == [(), ()]
        assert world.servers[0].vm("web-0").host == "host-b"
        last = [e.detail for e in await world.history("updated") if e.vm][-1]
        assert last == "no longer runs on both host-a and host-b"

    run(test)
    logged = [(each.levelname, each.message) for each in caplog.records]
    assert ("ERROR", "VM runs on two hosts") in logged


def test_every_duplicate_of_a_host_is_in_the_history() -> None:
    """A host that was taken for dead returns with all its VMs."""

    async def test(world: World) -> None:
        vms = [reported(f"vm-{number:03}") for number in range(120)]
        first = await world.daemon("host-a", *vms)
        second = await world.daemon("host-b", *vms, server=1)
        await report_for(world, 13, first, second)
        entries = [e for e in await world.history("updated") if e.vm]
        assert {e.detail for e in entries} == {"runs on host-a and host-b"}
        assert [e.vm for e in entries] == [vm["name"] for vm in vms]

    run(test)


def test_vms_that_more_hosts_run_than_a_commit_compares_are_duplicates() -> None:
    """A store accepts at most 120 writes and checks in a commit."""

    async def test(world: World) -> None:
        vms = {f"host-{number:03}": reported(f"vm-{number:03}") for number in range(WRITES_MAX)}
        tokens = world.servers[0].service.tokens
        for host in vms:
            await tokens.create(host, Role.HOST, secret=world.secret, by="test", host=host)
        first = await world.daemon("host-a", *vms.values())
        others = [await world.daemon(host, vm) for host, vm in vms.items()]
        for each in (first, *others):
            await each.work(inventory=each.inventory)
        await world.pass_time(11 * SECOND)
        for each in (*others, first):
            await each.work(inventory=each.inventory)
        duplicates = world.servers[0].hosts.duplicates
        assert duplicates.count() == WRITES_MAX
        assert len([e for e in await world.history("updated") if e.vm]) == WRITES_MAX

    run(test)


def test_reports_from_before_do_not_confirm_a_duplicate() -> None:
    """The VM may have been stopped there since they were taken."""

    async def test(world: World) -> None:
        both = await two_copies(world)
        await report_for(world, 30, *both, age=60)
        assert hosts_of(world) == [(), ()]

    run(test)


def test_host_that_is_not_connected_confirms_no_duplicate() -> None:
    """Its last report says what was true before: the VM was started elsewhere since."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.pass_time(16 * SECOND)
        second = await world.daemon("host-b", reported("web-0"))
        assert await report_for(world, 2, second) == [False], "no more reports are wanted"
        await report_for(world, 20, second)
        assert hosts_of(world) == [(), ()]

    run(test)


def test_duplicate_stays_one_while_one_of_its_hosts_is_unreachable() -> None:
    """It may only be cut off, and its copy writes on. It reports, or an operator forgets it."""

    async def test(world: World) -> None:
        first, second = await two_copies(world)
        await report_for(world, 12, first, second)
        await report_for(world, 40, first)
        assert world.servers[0].is_unreachable("host-b")
        assert hosts_of(world) == [("host-a", "host-b")] * 2
        await second.report(reported("web-0", power="stopped"))
        assert hosts_of(world) == [(), ()]

    run(test)


def test_fenced_host_runs_no_duplicate() -> None:
    async def test(world: World) -> None:
        first, second = await two_copies(world)
        await report_for(world, 12, first, second)
        await report_for(world, 40, first)
        assert (await forget(world, "host-b", "?fenced=true")).status_code == 200
        assert hosts_of(world) == [(), ()]
        assert world.servers[0].vm("web-0").host == "host-a"

    run(test)


def test_vm_that_moves_is_no_duplicate() -> None:
    async def test(world: World) -> None:
        source = await world.daemon("host-a", reported("web-0"))
        target = await world.daemon("host-b", server=1)
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        impact = await source.take()
        await target.report(reported("web-0"))
        await report_for(world, 30, source, target)
        assert hosts_of(world) == [(), ()]
        await source.report()
        assert await source.finish(impact, host="host-b")
        await report_for(world, 15, target)
        assert hosts_of(world) == [(), ()]

    run(test)


def test_no_impact_acts_on_a_duplicate() -> None:
    """It waits until only one host reports the VM as running."""

    async def test(world: World) -> None:
        first, second = await two_copies(world)
        await report_for(world, 12, first, second)
        await world.restart("web-0")
        for each in (first, second):
            assert (await each.work())["impacts"] == []
        server = world.servers[0]
        scope = server.scope("web-0")
        ((_, reason),) = server.hosts.problems.waits(scope, scope.impacts[0].event_id)
        assert reason == "other hosts: it runs on host-a and host-b: stop all but one"

        await second.report(reported("web-0", power="stopped"))
        await world.settle()
        assert len((await first.work())["impacts"]) == 1

    run(test)


async def plan_redeploy(world: World) -> None:
    assert await world.servers[0].operations.redeploy("web-0", by="ann") is None


async def plan_live_migration(world: World) -> None:
    operations = world.servers[0].operations
    (placed,) = await operations.maintain(
        "host-a", type=EventType.FREEZE, cause=Cause.LIVE_MIGRATION, by="ann"
    )
    await operations.approve(placed.event.id, by="ann")


@pytest.mark.parametrize("plan", [plan_redeploy, plan_live_migration])
def test_move_that_waits_for_a_duplicate_does_not_hide_it(
    plan: Callable[[World], Awaitable[None]],
) -> None:
    """It has not begun. A move of one copy would act on the disk of both."""

    async def test(world: World) -> None:
        both = await two_copies(world)
        await report_for(world, 12, *both)
        await plan(world)
        await world.settle()
        await report_for(world, 30, *both)
        assert hosts_of(world) == [("host-a", "host-b")] * 2
        assert [(await each.work())["impacts"] for each in both] == [[], []]
        details = [e.detail for e in await world.history("updated") if e.vm]
        assert details == ["runs on host-a and host-b"]

        await both[1].report(reported("web-0", power="stopped"))
        await world.settle()
        assert len((await both[0].work())["impacts"]) == 1

    run(test)


def test_duplicate_is_noticed_between_two_tries_of_a_move() -> None:
    """Nothing moves the VM then, and the next try would act on both copies."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await plan_redeploy(world)
        await world.settle()
        for pause in (5, 10, 0):
            await first.finish(await first.take(), problem="no route to host")
            await world.pass_time(pause * SECOND, first, second)
        await second.report(reported("web-0"))
        await report_for(world, 12, first, second)
        assert hosts_of(world) == [("host-a", "host-b")] * 2
        await report_for(world, 30, first, second)
        assert (await first.work())["impacts"] == []

    run(test)


def test_impact_whose_vm_became_a_duplicate_after_its_claim_is_not_handed_out() -> None:
    """Another server may have confirmed it between the claim and the call."""

    async def test(world: World) -> None:
        first, second = await two_copies(world)
        await report_for(world, 12, first, second)
        await world.restart("web-0")
        server = world.servers[0]
        scope = server.scope("web-0")
        request = make_request(scope, scope.impacts[0], 1.0)
        assert request is not None
        with pytest.raises(HostUnreachable, match="it runs on host-a and host-b"):
            async with asyncio.timeout(HANDED_OUT_SECONDS_MAX):
                await server.hosts.run_impact(request)

    run(test)


def test_duplicate_is_a_problem_of_the_vm_on_every_server() -> None:
    async def test(world: World) -> None:
        both = await two_copies(world)
        await report_for(world, 12, *both)
        for server in world.servers:
            response = await server.client.get("/api/v1/vms/web-0", headers=root(world))
            assert response.json()["problems"] == [
                {
                    "code": "duplicate",
                    "message": "it runs on host-a and host-b: stop all but one",
                }
            ]
        await both[1].report(reported("web-0", power="stopped"))
        response = await world.servers[0].client.get("/api/v1/vms/web-0", headers=root(world))
        assert response.json()["problems"] == []

    run(test)


async def hosts_with_others(world: World) -> dict[str, Any]:
    """The problems of each host, and the VMs that run there although the fleet has them elsewhere,
    if there are any. All servers agree.
    """
    seen = []
    for server in world.servers:
        response = await server.client.get("/api/v1/hosts", headers=root(world))
        hosts = response.json()["hosts"]
        shown = {
            host["name"]: ([each["message"] for each in host["problems"]], host["other_vms"])
            for host in hosts
        }
        seen.append({name: found for name, found in shown.items() if any(found)})
    assert seen[0] == seen[1]
    return seen[0]


def test_duplicate_is_a_problem_of_both_hosts() -> None:
    """Otherwise the host with the second copy looks empty: the fleet has the VM on the other."""

    async def test(world: World) -> None:
        both = await two_copies(world)
        assert await hosts_with_others(world) == {"host-b": ([], ["web-0"])}
        await report_for(world, 12, *both)
        message = "web-0 runs on host-a and host-b: stop all but one"
        assert await hosts_with_others(world) == {
            "host-a": ([message], []),
            "host-b": ([message], ["web-0"]),
        }
        await both[1].report(reported("web-0", power="stopped"))
        assert await hosts_with_others(world) == {}

    run(test)


def test_host_names_a_limited_number_of_duplicates() -> None:
    """A cloned host may have 2,000, and a list has many hosts."""

    async def test(world: World) -> None:
        vms = [reported(f"w{number:02}") for number in range(23)]
        both = await world.daemon("host-a", *vms), await world.daemon("host-b", *vms)
        await report_for(world, 12, *both)
        for messages, _ in (await hosts_with_others(world)).values():
            assert len(messages) == 21
            assert messages[0] == "w00 runs on host-a and host-b: stop all but one"
            assert messages[-1] == "3 more VMs have two copies"

    run(test)


@pytest.mark.parametrize("is_known_there", [False, True], ids=["new", "taken while away"])
def test_claim_to_a_vm_of_another_scope_makes_no_duplicate(*, is_known_there: bool) -> None:
    """Otherwise any host could stop all impacts on a VM that its token is not for."""

    async def test(world: World) -> None:
        await world.limit_token("host-b", "lab")
        owner = await world.daemon("host-a", reported("web-0"))
        thief = await world.daemon("host-b")
        if is_known_there:
            await world.pass_time(20 * SECOND, thief)
            await thief.report(reported("web-0"))
            assert world.servers[0].vm("web-0").host == "host-b"
        await owner.report(reported("web-0"))
        await thief.report(reported("web-0"))
        assert await report_for(world, 30, owner, thief) == [False, False], "nothing is in doubt"
        assert hosts_of(world) == [(), ()]
        assert world.servers[0].vm("web-0").host == "host-a"
        await world.restart("web-0")
        assert (await thief.work())["impacts"] == []
        assert len((await owner.work())["impacts"]) == 1

    run(test)


# --- copies on hosts that may not have the VM

NOT_ACCEPTED = {
    "code": "duplicate-not-accepted",
    "message": (
        "a copy that is not accepted runs on host-b, too: stop it there, or correct the token of"
        " that host; impacts are not blocked"
    ),
}


async def problems_of(world: World, vm: str) -> list[list[dict[str, str]]]:
    """As each server shows them."""
    path = f"/api/v1/vms/{vm}"
    responses = [await each.client.get(path, headers=root(world)) for each in world.servers]
    return [response.json()["problems"] for response in responses]


def count_not_accepted(world: World) -> list[int]:
    return [each.hosts.duplicates.count_not_accepted() for each in world.servers]


async def refused_copy(world: World) -> tuple[Daemon, Daemon, str]:
    """A VM in a scope that the second host's token is not for."""
    owner = await world.daemon("host-a", reported("db-0", scope="db", kind="scale-set"))
    return owner, await world.daemon("host-b", reported("db-0")), "db-0"


async def claimed_copy(world: World) -> tuple[Daemon, Daemon, str]:
    """A standalone VM."""
    owner = await world.daemon("host-a", reported("web-0"))
    return owner, await world.daemon("host-b", reported("web-0")), "web-0"


@pytest.mark.parametrize("report_copy", [refused_copy, claimed_copy])
def test_copy_on_a_host_that_may_not_have_the_vm_is_shown_and_blocks_nothing(
    caplog: pytest.LogCaptureFixture,
    report_copy: Callable[[World], Awaitable[tuple[Daemon, Daemon, str]]],
) -> None:
    """It writes to the disk as any other copy does. But a host must not be able to stop the
    impacts on a VM that its token is not for.
    """

    async def test(world: World) -> None:
        await world.limit_token("host-b", "web")
        owner, other, vm = await report_copy(world)
        await world.pass_time(10 * SECOND, owner, other)
        assert await problems_of(world, vm) == [[], []]
        await world.pass_time(6 * SECOND, owner, other)
        assert await problems_of(world, vm) == [[NOT_ACCEPTED]] * 2
        of_hosts, message = await hosts_with_others(world), NOT_ACCEPTED["message"]
        for host, others in (("host-a", []), ("host-b", [vm])):
            assert message.replace("a copy", f"a copy of {vm}") in of_hosts[host][0]
            assert of_hosts[host][1] == others
        assert count_not_accepted(world) == [1, 1]
        assert hosts_of(world, vm) == [(), ()]

        await world.restart(vm)
        assert (await other.work())["impacts"] == []
        assert await owner.finish(await owner.take())
        assert [e.vm for e in await world.history("impacted")] == [vm]

        await other.report()
        assert await problems_of(world, vm) == [[], []]
        assert await hosts_with_others(world) == {}
        assert count_not_accepted(world) == [0, 0]

    run(test)
    warnings = [each for each in caplog.records if each.message == "VM may run on two hosts"]
    assert {each.levelname for each in warnings} == {"WARNING"}
    assert len(warnings) == 2, "one of each server"


def test_copy_that_may_be_gone_is_not_shown() -> None:
    """A host that is away, or has not reported since, says nothing about now."""

    async def test(world: World) -> None:
        await world.limit_token("host-b", "web")
        owner, other, vm = await refused_copy(world)
        await world.pass_time(16 * SECOND, owner, other)
        assert count_not_accepted(world) == [1, 1]
        await world.pass_time(22 * SECOND, owner)
        assert count_not_accepted(world) == [0, 0]
        await other.work()
        await world.pass_time(16 * SECOND, owner, other)
        assert count_not_accepted(world) == [0, 0]
        await other.report(reported(vm))
        await world.pass_time(16 * SECOND, owner, other)
        assert count_not_accepted(world) == [1, 1]

    run(test)


def test_refused_vm_that_runs_once_is_no_copy() -> None:
    """The host that has it reports it as stopped: it is only not accepted on the other one."""

    async def test(world: World) -> None:
        await world.limit_token("host-b", "web")
        owner, other, vm = await refused_copy(world)
        await owner.report(reported("db-0", scope="db", kind="scale-set", power="stopped"))
        await world.pass_time(20 * SECOND, owner, other)
        assert (await problems_of(world, vm), count_not_accepted(world)) == ([[], []], [0, 0])

    run(test)


def test_vm_that_moves_to_a_host_that_may_not_have_it_is_no_copy() -> None:
    """Both have it for a while, and the impact says so."""

    async def test(world: World) -> None:
        await world.limit_token("host-b", "lab")
        source = await world.daemon("host-a", reported("web-0"))
        target = await world.daemon("host-b")
        await plan_redeploy(world)
        await world.settle()
        impact = await source.take()
        await target.report(reported("web-0"))
        await world.pass_time(30 * SECOND, source, target)
        assert count_not_accepted(world) == [0, 0]
        await source.report()
        assert await source.finish(impact, host="host-b")
        await world.pass_time(20 * SECOND, source, target)
        assert count_not_accepted(world) == [0, 0]

    run(test)


# --- what may be started


def test_vm_is_not_started_while_a_host_that_may_run_it_is_away() -> None:
    """host-b was away when web-0 was still running: somebody may have moved it there since."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await world.pass_time(20 * SECOND, first)
        await first.report(reported("web-0", power="stopped"))
        await world.restart("web-0")
        assert (await first.work())["impacts"] == []
        server = world.servers[0]
        (impact,) = server.scope("web-0").impacts
        reason = server.hosts.duplicates.reason_to_wait(server.vm("web-0"), impact.cause, 0)
        assert reason == (
            "it may run on host-b, which is unreachable:"
            " its daemon has been away since 2030-01-31T12:00:00Z"
        )
        await second.report()
        assert (await first.take())["may_run_on"] == []

    run(test)


async def come_back_without_a_report(world: World, daemon: Daemon) -> None:
    assert not (await daemon.work())["is_merged"], "it is asked for one"
    assert not world.servers[0].is_unreachable("host-b")


async def come_back_with_a_problem(world: World, daemon: Daemon) -> None:
    await daemon.work(problem="libvirt does not answer")
    assert world.servers[0].is_unreachable("host-b")


async def come_back_and_go(world: World, daemon: Daemon) -> None:
    await daemon.work(problem="libvirt does not answer")
    await world.pass_time(16 * SECOND)


async def come_back_after_a_problem(world: World, daemon: Daemon) -> None:
    await daemon.work(problem="libvirt does not answer")
    await world.pass_time(SECOND)
    await daemon.work()


async def come_back_to_another_server(world: World, daemon: Daemon) -> None:
    daemon.server = world.servers[1]
    await daemon.work()
    daemon.server = world.servers[0]
    await daemon.work()


async def come_back_with_an_old_list(world: World, daemon: Daemon) -> None:
    inventory = {"memory_bytes": 1, "vms": [], "age_seconds": 60}
    assert not (await daemon.work(inventory=inventory))["is_merged"]


@pytest.mark.parametrize(
    "come_back",
    [
        come_back_without_a_report,
        come_back_with_a_problem,
        come_back_and_go,
        come_back_after_a_problem,
        come_back_to_another_server,
        come_back_with_an_old_list,
    ],
)
def test_vm_is_not_started_before_a_host_that_was_away_has_reported(
    come_back: Callable[[World, Daemon], Awaitable[None]],
) -> None:
    """It may run the VM, and only a report of its VMs says that it does not."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await world.pass_time(20 * SECOND, first)
        await first.report(reported("web-0", power="stopped"))
        await world.restart("web-0")
        assert (await first.work())["impacts"] == []
        await world.pass_time(SECOND, first)
        await come_back(world, second)
        await world.settle()
        await first.work()
        await world.settle()
        assert (await first.work())["impacts"] == []
        await second.report()
        assert (await first.take())["may_run_on"] == []

    run(test)


def test_vm_is_not_started_while_a_host_that_may_run_it_has_lost_its_server() -> None:
    """Nothing is written when a server is lost: the record says only which one had contact."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b", server=1)
        await world.expire(world.servers[1])
        await first.report(reported("web-0", power="stopped"))
        await world.restart("web-0")
        await first.work()
        await world.settle()
        assert (await first.work())["impacts"] == []
        second.server = world.servers[0]
        await second.report()
        assert (await first.take())["may_run_on"] == []

    run(test)


def test_impact_says_that_it_waits_for_the_report_of_a_host_that_is_back() -> None:
    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await world.pass_time(20 * SECOND, first)
        await first.report(reported("web-0", power="stopped"))
        await world.restart("web-0")
        await second.work()
        await world.settle()
        server = world.servers[0]
        scope = server.scope("web-0")
        ((_, reason),) = server.hosts.problems.waits(scope, scope.impacts[0].event_id)
        assert reason == (
            "other hosts: it may run on host-b, which is back and has not reported its VMs yet"
        )

    run(test)


def test_vm_that_is_held_is_looked_at_again_only_when_its_other_host_changes() -> None:
    """Otherwise each change of any host would cost as much as all VMs that wait."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await world.pass_time(20 * SECOND, first)
        await first.report(reported("web-0", power="stopped"))
        await world.restart("web-0")
        looked_at = set[str]()
        world.servers[0].hosts.on_change = looked_at.update
        third = await world.daemon("host-c", reported("db-0"))
        await third.report(reported("db-0", power="stopped"))
        assert looked_at == {"db-0"}
        await second.work()
        assert looked_at == {"db-0", "web-0"}

    run(test)


def test_vm_is_not_started_while_a_host_that_has_it_is_away() -> None:
    """It was off on both when that host was in contact. Somebody may have started it there."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0", power="stopped"))
        second = await world.daemon("host-b", reported("web-0", power="stopped"))
        await world.pass_time(20 * SECOND, first)
        await world.restart("web-0")
        assert (await first.work())["impacts"] == []
        await second.report(reported("web-0", power="stopped"))
        assert (await first.take())["may_run_on"] == ["host-b"]

    run(test)


@pytest.mark.parametrize("has_reported", [True, False])
def test_vm_is_started_if_a_host_that_went_away_has_reported_after_it_was_stopped(
    *, has_reported: bool
) -> None:
    """Contact is not enough: the VM may have been started there just before it was lost."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await world.pass_time(SECOND, first)
        await first.report(reported("web-0", power="stopped"))
        await world.pass_time(2 * SECOND, first, second)
        if has_reported:
            await second.report()
        await world.pass_time(20 * SECOND, first)
        assert world.servers[0].is_unreachable("host-b")
        await world.restart("web-0")
        assert len((await first.work())["impacts"]) == has_reported

    run(test)


def test_running_vm_waits_for_no_other_host() -> None:
    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b")
        await world.pass_time(20 * SECOND, first)
        await world.restart("web-0")
        assert (await first.take())["may_run_on"] == []

    run(test)


def test_vm_that_boots_after_a_move_may_be_a_duplicate() -> None:
    """Something starts the old copy again. To wait until the VM is back can take minutes."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await world.poll("web-0")
        placed = await world.servers[0].operations.redeploy("web-0", by="ann")
        assert placed is not None
        await world.servers[0].operations.approve(placed.event.id, by="ann")
        await world.settle()
        impact = await first.take()
        await second.report(reported("web-0"))
        assert await first.finish(impact, host="host-b", is_back=False)
        (booting,) = world.servers[0].scope("web-0").impacts
        assert booting.state == "booting"
        await report_for(world, 14, first, second)
        assert hosts_of(world) == [("host-a", "host-b")] * 2

    run(test)


def test_fenced_host_may_run_nothing() -> None:
    """An operator says so by forgetting it, and the VM is started."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b", reported("db-0"))
        await world.pass_time(20 * SECOND, first)
        await first.report(reported("web-0", power="stopped"))
        await world.restart("web-0")
        assert (await first.work())["impacts"] == []
        assert (await forget(world, "host-b", "?fenced=true")).status_code == 200
        assert len((await first.work())["impacts"]) == 1
        assert world.servers[1].vm("db-0").power == "stopped"

    run(test)


def test_vm_of_a_fenced_host_belongs_to_the_host_with_its_copy() -> None:
    """An operator says that it is off, and may be started elsewhere."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        copy = reported("web-0", power="stopped")
        second = await world.daemon("host-b", copy)
        await world.pass_time(20 * SECOND, second)
        assert (await forget(world, "host-a", "?fenced=true")).status_code == 200
        await second.report(copy)
        vm = world.servers[1].vm("web-0")
        assert (vm.host, vm.power) == ("host-b", "stopped")
        await world.restart("web-0")
        assert (await second.take())["may_run_on"] == []

    run(test)


def test_copy_that_is_off_takes_no_vm_from_a_host_that_may_run_it() -> None:
    """An old definition stays behind when a VM is moved by hand. It would be started there."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        copy = reported("web-0", power="stopped")
        second = await world.daemon("host-b", copy)
        await world.pass_time(20 * SECOND, second)
        await second.report(copy)
        assert world.servers[0].vm("web-0").host == "host-a"
        response = await forget(world, "host-a", "?still_running=true")
        assert response.status_code == 200
        await second.report(copy)
        vm = world.servers[0].vm("web-0")
        assert (vm.host, vm.power) == ("host-a", "unknown")
        await world.servers[0].operations.restart("web-0", by="ann")
        await world.pass_time(SECOND, second)
        assert (await second.work())["impacts"] == []
        await second.report(reported("web-0"))
        vm = world.servers[0].vm("web-0")
        assert (vm.host, vm.power) == ("host-b", "running"), "it is there if it runs there"

    run(test)


def test_vm_that_its_host_no_longer_has_belongs_to_the_host_with_its_copy() -> None:
    """A VM that was off was moved by hand."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0", power="stopped"))
        await world.daemon("host-b", reported("web-0", power="stopped"))
        await first.report()
        assert world.servers[0].vm("web-0").host == "host-b"

    run(test)


def test_running_vm_that_its_host_no_longer_has_is_not_taken_by_a_copy_that_is_off() -> None:
    """An operator has moved it to a host without a daemon: the old definition must not start it."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b", reported("web-0", power="stopped"), server=1)
        await first.report()
        await second.report(reported("web-0", power="stopped"))
        assert world.servers[0].vm("web-0").power == "unknown"
        for (problem,) in await problems_of(world, "web-0"):
            assert problem["code"] == "missing"
            assert problem["message"].startswith("it ran on host-a, which no longer has it")
        await world.restart("web-0")
        await world.pass_time(20 * SECOND, first, second)
        assert not (await first.work())["impacts"]
        assert not (await second.work())["impacts"]

        await second.report(reported("web-0"))
        await world.pass_time(20 * SECOND, first)
        assert await second.finish(await second.take()), "it runs there"
        await second.report(reported("web-0"))
        assert world.servers[0].vm("web-0").host == "host-b"

    run(test)


def test_vm_that_a_failed_move_left_off_belongs_to_the_host_with_its_copy() -> None:
    """Its daemon was killed between the definition on the target and the start there.

    Nobody else has moved it: it is not missing, and stays in reach of the next event.
    """

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await fail_move(world, first)
        await second.report(reported("web-0", power="stopped"))
        await first.report()
        await second.report(reported("web-0", power="stopped"))
        vm = world.servers[0].vm("web-0")
        assert (vm.host, vm.power) == ("host-b", "stopped")

    run(test)


def test_vm_that_ran_after_a_failed_move_and_is_gone_now_is_missing() -> None:
    """The move of last month says nothing about where it is today."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await fail_move(world, first)
        await second.report(reported("web-0", power="stopped"))
        await first.report(reported("web-0"))
        assert world.servers[0].scope("web-0").tried_moves == ()

        await first.report()
        await second.report(reported("web-0", power="stopped"))
        vm = world.servers[0].vm("web-0")
        assert (vm.host, vm.power) == ("host-a", "unknown")

    run(test)


async def fail_move(world: World, daemon: Daemon) -> None:
    """A Redeploy of web-0 fails at its first try, and an operator completes it."""
    await world.poll("web-0")
    operations = world.servers[0].operations
    placed = await operations.redeploy("web-0", by="ann")
    assert placed is not None
    await operations.approve(placed.event.id, by="ann")
    await world.settle()
    await daemon.finish(await daemon.take(), problem="host-b did not respond")
    await operations.complete(placed.event.id, by="ann")
    await world.settle()
    assert [each.vm for each in world.servers[0].scope("web-0").tried_moves] == ["web-0"]


def test_missing_vm_is_gone_with_its_last_copy() -> None:
    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b", reported("web-0", power="stopped"))
        await first.report()
        vm = world.servers[0].vm("web-0")
        assert (vm.host, vm.power) == ("host-a", "unknown")
        await second.report()
        await first.report()
        assert "web-0" not in world.servers[0].engine.board.vms

    run(test)


def test_copy_that_is_off_takes_no_vm_before_its_host_has_reported() -> None:
    """The fleet file says that web-0 is on host-a, whose daemon has just been installed."""

    async def test(world: World) -> None:
        file = b"scopes: [{name: web-0, vms: [{name: web-0, host: host-a, id: %s}]}]"
        fleet = parse(file % vm_id("web-0").encode(), "fleet")
        await world.servers[0].operations.apply(fleet, by="test")
        first = Daemon(world, "host-a")
        await first.work()
        await world.daemon("host-b", reported("web-0", power="stopped"))
        assert world.servers[0].vm("web-0").host == "host-a"
        await first.report(reported("web-0"))
        assert world.servers[0].vm("web-0").host == "host-a"

    run(test)


def test_host_with_vms_is_forgotten_only_if_the_operator_says_what_they_do() -> None:
    """Retiring a daemon from a live host, and a host that is switched off, differ in that."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"), reported("web-1", power="stopped"))
        await world.pass_time(20 * SECOND)
        response = await forget(world, "host-a")
        assert (response.status_code, response.json()["error"]) == (409, "refused")
        assert response.json()["message"] == (
            "VMs may run on host-a, such as web-0, and nothing else may start them meanwhile;"
            " expected `fenced`, if they are off and stay off, or `still_running`, if only the"
            " daemon goes"
        )
        response = await forget(world, "host-a", "?fenced=true&still_running=true")
        assert response.status_code == 400
        assert world.servers[0].vm("web-0").power == "running"
        assert (await forget(world, "host-a", "?still_running=true")).status_code == 200
        assert {world.servers[1].vm(vm).power for vm in ("web-0", "web-1")} == {"unknown"}

    run(test)


class LateStore(MemoryStore):
    """The store of another server, where something happens just before a host is read again."""

    def __init__(self, store: MemoryStore, happen: Callable[[], Awaitable[object]]) -> None:
        self.__dict__ = store.__dict__
        self._happen = happen

    async def get(self, key: str) -> Record:
        if key == HOST_KEY.format("host-a"):
            await self._happen()
        return await super().get(key)


@pytest.mark.parametrize(
    ("vms", "problem"),
    [
        (None, "VMs may run on host-a, such as web-0"),
        (Power.STOPPED, "host-a or its VM web-0 has just changed"),
    ],
)
def test_host_whose_daemon_goes_meanwhile_is_not_forgotten_without_a_statement(
    vms: Power | None, problem: str
) -> None:
    """The first look at its record finds contact, and the next one does not."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        store = LateStore(world.store, lambda: daemon.work(is_leaving=True))
        late = Server(store, world.clock, "server-3")
        await late.engine.load()
        with pytest.raises(Error, match=problem):
            await late.hosts.removal.forget("host-a", by="ann", power=vms)
        await world.settle()
        assert world.servers[0].is_unreachable("host-a")
        assert world.servers[0].vm("web-0").power == "running"

    run(test)


class LateCommits(MemoryStore):
    """The store of another server, where something happens once, just before a scope is written."""

    def __init__(self, store: MemoryStore, happen: Callable[[], Awaitable[object]]) -> None:
        self.__dict__ = store.__dict__
        self._events = [happen]

    async def commit(
        self, writes: Sequence[Write], checks: Any = (), entries: bytes | None = None
    ) -> int:
        if any(write.key.startswith("scope/") for write in writes) and self._events:
            await self._events.pop()()
        return await super().commit(writes, checks, entries)


@pytest.mark.parametrize("is_restarted", [True, False])
def test_host_whose_daemon_returns_meanwhile_keeps_its_impacts_and_power(
    is_restarted: bool,
) -> None:
    """What is written about its VMs is true only while the daemon is away."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.pass_time(20 * SECOND)
        if is_restarted:
            await world.restart("web-0")
        late = Server(LateCommits(world.store, daemon.work), world.clock, "server-3")
        await late.engine.load()
        with pytest.raises(Error, match="the daemon of host-a is connected; stop it first"):
            await late.hosts.removal.forget(
                "host-a", by="ann", power=Power.STOPPED, fail_impacts=True
            )
        await world.settle()
        assert world.servers[0].vm("web-0").power == "running"
        assert await world.history("impact-failed") == []
        await daemon.report(reported("web-0"))
        assert len((await daemon.work())["impacts"]) == is_restarted

    run(test)


def test_vm_of_unknown_power_gets_notice() -> None:
    """It may run: an operation without notice could hit it."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        await world.pass_time(timedelta(seconds=20))
        await forget(world, "host-a", "?still_running=true")
        placed = await world.servers[0].operations.restart("web-0", by="ann")
        assert placed is not None

    run(test)
