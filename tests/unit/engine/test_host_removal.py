"""Hosts that were forgotten: one that was left running may run what no other host reports."""

import asyncio

import pytest
from msgspec.structs import replace

from forewarn.engine.machine_binding import MERGE_AFTER
from forewarn.engine.managed_hosts import HOST_KEY, HostedVm, ManagedHost
from forewarn.engine.transaction import Transaction
from tests.unit.engine.hostd_world import GIB, NOON, SECOND, Daemon, World, reported, run, vm_id
from tests.unit.engine.test_duplicates import forget, hosts_of, report_for, root, two_copies
from tests.unit.engine.test_host_sessions import start_slow_server, stop

STILL_RUNNING, FENCED = "?still_running=true", "?fenced=true"
OFF = reported("web-0", power="stopped")


async def hold(world: World, *vms: str) -> tuple[Daemon, Daemon]:
    """host-b is away with these VMs, and web-0 of host-a, which is off, waits for it."""
    first = await world.daemon("host-a", reported("web-0"))
    second = await world.daemon("host-b", *map(reported, vms))
    await world.pass_time(20 * SECOND, first)
    await first.report(OFF)
    await world.restart("web-0")
    assert (await first.work())["impacts"] == []
    return first, second


async def impacts_of(world: World, daemon: Daemon) -> list[object]:
    """A server claims what waited only when it has looked again."""
    await daemon.work()
    await world.settle()
    impacts: list[object] = (await daemon.work())["impacts"]
    return impacts


@pytest.mark.parametrize("vms", [(), ("db-0",)])
def test_vm_that_may_run_on_a_host_that_was_left_running_is_not_started(
    vms: tuple[str, ...],
) -> None:
    """The operator has just said that the host is alive. Nobody knows what was moved to it."""

    async def test(world: World) -> None:
        first, _ = await hold(world, *vms)
        assert (await forget(world, "host-b", STILL_RUNNING)).status_code == 200
        assert await impacts_of(world, first) == []
        server = world.servers[1]
        ((_, reason),) = server.hosts.problems.waits(
            server.scope("web-0"), server.scope("web-0").impacts[0].event_id
        )
        assert reason == (
            "other hosts: it may run on host-b, which was forgotten and left running; expected its"
            " daemon, or `forewarn host forget host-b --fenced` when it is off"
        )

        assert (await forget(world, "host-b", FENCED)).status_code == 200
        assert len(await impacts_of(world, first)) == 1

    run(test)


def test_host_that_was_left_running_fails_only_after_it_is_fenced() -> None:
    """A failed host restarts its VMs: with a command of the operator, perhaps elsewhere."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.pass_time(20 * SECOND)
        assert (await forget(world, "host-a", STILL_RUNNING)).status_code == 200
        client = world.servers[1].client
        response = await client.post("/api/v1/hosts/host-a/fail", headers=root(world))
        assert (response.status_code, response.json()["error"]) == (409, "refused")
        assert "`forewarn host forget host-a --fenced` first" in response.json()["message"]
        assert not world.servers[0].scope("web-0").events

        assert (await forget(world, "host-a", FENCED)).status_code == 200
        response = await client.post("/api/v1/hosts/host-a/fail", headers=root(world))
        assert response.status_code == 202

    run(test)


def test_host_that_is_left_running_meanwhile_at_another_server_does_not_fail() -> None:
    """The commit compares it: the platform of a server would start VMs that may run there."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.pass_time(20 * SECOND)
        forgetting, forgetting_store = await start_slow_server(world, "server-3")
        failing, failing_store = await start_slow_server(world, "server-4")
        url = "/api/v1/hosts/host-a"
        forgotten = forgetting_store.hold_next("hostd/host-a/")
        call = forgetting.client.delete(f"{url}/daemon{STILL_RUNNING}", headers=root(world))
        forget_ = asyncio.create_task(call)
        await world.settle()
        failed = failing_store.hold_next("scope/web-0/")
        fail = asyncio.create_task(failing.client.post(f"{url}/fail", headers=root(world)))
        await world.settle()
        forgotten.set()
        assert (await forget_).status_code == 200
        failed.set()

        response = await fail
        assert response.status_code == 409
        assert "`forewarn host forget host-a --fenced` first" in response.json()["message"]
        assert not world.servers[0].scope("web-0").impacts
        await stop(forgetting, failing)

    run(test)


def test_host_without_vms_that_was_left_running_does_not_fail() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a")
        await world.pass_time(20 * SECOND)
        assert (await forget(world, "host-a", STILL_RUNNING)).status_code == 200
        client = world.servers[1].client
        response = await client.post("/api/v1/hosts/host-a/fail", headers=root(world))
        assert response.status_code == 409

    run(test)


def test_clone_of_a_host_that_was_left_running_does_not_say_what_runs_there() -> None:
    """Its daemon connects first: the one that may run web-0 looks for a server, as when both were
    refused before the host was forgotten.
    """

    async def test(world: World) -> None:
        first, second = await hold(world)
        assert (await forget(world, "host-b", STILL_RUNNING)).status_code == 200
        clone = Daemon(world, "host-b", "clone")
        await clone.report()
        assert await impacts_of(world, first) == []
        await world.pass_time(5 * SECOND, first, clone)
        await second.send(number=8)
        assert (await clone.send(number=9)).status_code == 409
        assert (await clone.send(number=10)).status_code == 409
        assert await impacts_of(world, first) == []

    run(test)


def test_vm_is_started_when_a_host_that_was_left_running_reports_again() -> None:
    """Not when its daemon connects: only a report says what runs there."""

    async def test(world: World) -> None:
        first, second = await hold(world)
        await forget(world, "host-b", STILL_RUNNING)
        await world.pass_time(60 * SECOND, first)
        second = Daemon(world, "host-b", "s2")
        await second.work()
        await world.pass_time(MERGE_AFTER, first, second)
        assert await impacts_of(world, first) == []
        await second.report()
        assert len(await impacts_of(world, first)) == 1

    run(test)


def test_vm_with_a_copy_on_a_host_that_was_left_running_is_not_started() -> None:
    """Its last report names the copy. When it was taken does not matter."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", OFF)
        second = await world.daemon("host-b", OFF)
        await world.pass_time(20 * SECOND, first)
        await forget(world, "host-b", STILL_RUNNING)
        await first.report(reported("web-0"))
        await world.pass_time(SECOND, first)
        await first.report(OFF)
        await world.restart("web-0")
        assert await impacts_of(world, first) == []
        assert world.servers[0].hosts.managed.may_run_on("web-0", but="host-a") == ("host-b",)

        second.session = "s2"
        await second.work()
        await world.pass_time(MERGE_AFTER, first, second)
        await second.report()
        assert len(await impacts_of(world, first)) == 1

    run(test)


def test_host_without_known_vms_is_forgotten_only_with_a_statement() -> None:
    """A VM may have been moved to it since its last report."""

    async def test(world: World) -> None:
        first, _ = await hold(world)
        response = await forget(world, "host-b")
        assert (response.status_code, response.json()["error"]) == (409, "refused")
        assert response.json()["message"] == (
            "VMs may run on host-b, and nothing else may start them meanwhile; expected `fenced`,"
            " if they are off and stay off, or `still_running`, if only the daemon goes"
        )
        assert await impacts_of(world, first) == []

    run(test)


def test_duplicate_stays_one_if_one_of_its_hosts_is_left_running() -> None:
    """Both hosts are alive, and both copies write to the disk."""

    async def test(world: World) -> None:
        first, second = await two_copies(world)
        await report_for(world, 12, first, second)
        await report_for(world, 40, first)
        assert (await forget(world, "host-b", STILL_RUNNING)).status_code == 200
        await report_for(world, 12, first)
        assert hosts_of(world) == [("host-a", "host-b")] * 2

        await first.report(OFF)
        assert hosts_of(world) == [(), ()]
        entries = await world.history("updated")
        assert [e.detail for e in entries if e.vm and "host-b" in (e.detail or "")] == [
            "runs on host-a and host-b",
            "no longer runs on both host-a and host-b",
        ]
        await world.restart("web-0")
        assert await impacts_of(world, first) == [], "the other copy may run"

    run(test)


def test_host_that_was_left_running_and_is_fenced_runs_no_duplicate() -> None:
    async def test(world: World) -> None:
        first, second = await two_copies(world)
        await report_for(world, 12, first, second)
        await report_for(world, 40, first)
        for query in (STILL_RUNNING, FENCED):
            assert (await forget(world, "host-b", query)).status_code == 200
        assert hosts_of(world) == [(), ()]
        entries = await world.history("updated")
        assert [e.detail for e in entries if e.vm][-1] == "no longer runs on both host-a and host-b"

    run(test)


def test_forgetting_a_host_again_changes_nothing() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-b", reported("db-0"))
        await world.pass_time(20 * SECOND)
        for query in (STILL_RUNNING, FENCED):
            for _ in range(2):
                assert (await forget(world, "host-b", query)).status_code == 200
        entries = await world.history("updated")
        assert [e.detail for e in entries if e.host == "host-b" and not e.vm][-2:] == [
            "host host-b is no longer managed by a daemon",
            "host host-b is fenced",
        ]

    run(test)


def test_what_was_said_of_a_forgotten_host_can_be_corrected() -> None:
    async def test(world: World) -> None:
        first, _ = await hold(world, "db-0")
        await world.pass_time(30 * SECOND, first)
        for query, power, impacts in (
            (FENCED, "stopped", 1),
            (STILL_RUNNING, "unknown", 0),
            (FENCED, "stopped", 1),
        ):
            assert (await forget(world, "host-b", query)).status_code == 200
            assert world.servers[0].vm("db-0").power == power
            may_run_on = world.servers[0].hosts.managed.may_run_on("web-0", but="host-a")
            assert may_run_on == ("host-b",) * (not impacts)
        assert len(await impacts_of(world, first)) == 1

    run(test)


def test_vm_that_a_host_left_running_was_refused_for_is_not_started() -> None:
    """Its token does not cover the scope of the VM that it runs."""

    async def test(world: World) -> None:
        await world.limit_token("host-c", "lab")
        first = await world.daemon("host-a", {**reported("web-0"), "scope": "web"})
        await world.pass_time(SECOND, first)
        await first.report({**OFF, "scope": "web"})
        await world.pass_time(2 * SECOND, first)
        (problem,) = await Daemon(world, "host-c").report(reported("web-0", scope="web"))
        assert "not for the scope" in problem
        await world.pass_time(16 * SECOND, first)
        assert (await forget(world, "host-c", STILL_RUNNING)).status_code == 200
        await world.restart("web-0")
        assert await impacts_of(world, first) == []

    run(test)


def test_vm_of_a_fenced_host_with_a_copy_on_one_that_was_left_running_is_not_started() -> None:
    """The platform of the server would start it."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b", OFF)
        await world.pass_time(20 * SECOND, first)
        await world.pass_time(20 * SECOND)
        await forget(world, "host-b", STILL_RUNNING)
        await forget(world, "host-a", FENCED)
        await world.restart("web-0")
        await world.pass_time(2 * SECOND)
        assert [vm for server in world.servers for vm in server.local.asked] == []

        await forget(world, "host-b", FENCED)
        await world.pass_time(2 * SECOND)
        assert [vm for server in world.servers for vm in server.local.asked] == ["web-0"]

    run(test)


def test_host_with_many_scopes_and_duplicates_on_many_hosts_is_forgotten() -> None:
    """A commit compares a limited number of records."""

    async def test(world: World) -> None:
        names = [f"vm-{number:03}" for number in range(120)]
        await world.daemon("host-a", *map(reported, names))
        await world.pass_time(20 * SECOND)
        server = world.servers[0]

        def put_duplicates(t: Transaction) -> None:
            copies = {vm_id(name): HostedVm(GIB, is_running=True, is_double=True) for name in names}
            known = t.get(HOST_KEY.format("host-a"))
            assert known is not None
            t.put(HOST_KEY.format("host-a"), replace(known, vms=copies))
            for name in names[:60]:
                other = ManagedHost(f"other-{name}", "s1", "", NOON)
                vms = {vm_id(name): copies[vm_id(name)]}
                t.put(HOST_KEY.format(other.host), replace(other, vms=vms))

        await server.engine.update([HOST_KEY.format("host-a")], put_duplicates, by="test")
        assert server.hosts.duplicates.count() == 60
        response = await forget(world, "host-a", FENCED)
        assert response.status_code == 200, response.json()
        assert server.hosts.duplicates.count() == 0

    run(test)


@pytest.mark.parametrize("query", [FENCED, STILL_RUNNING])
def test_host_without_vms_is_forgotten_and_that_is_corrected(query: str) -> None:
    async def test(world: World) -> None:
        first, _ = await hold(world)
        for each in (FENCED, query, query):
            assert (await forget(world, "host-b", each)).status_code == 200
        assert len(await impacts_of(world, first)) == (query == FENCED)

    run(test)


@pytest.mark.parametrize(
    ("queries", "is_refused"),
    [
        ((STILL_RUNNING,), True),
        ((FENCED, STILL_RUNNING), True),
        ((STILL_RUNNING, FENCED), False),
        ((FENCED,), False),
    ],
)
def test_host_that_was_left_running_stays_with_its_machine(
    queries: tuple[str, ...], *, is_refused: bool
) -> None:
    """Another one with its name would report that it has none of the VMs."""

    async def test(world: World) -> None:
        await world.daemon("host-b", reported("db-0"))
        await world.pass_time(20 * SECOND)
        for query in queries:
            await forget(world, "host-b", query)
        response = await Daemon(world, "host-b", "s2", machine="another").send()
        assert response.status_code == (409 if is_refused else 200)
        if is_refused:
            assert response.json()["message"] == (
                "host-b belongs to another machine; expected the daemon of that machine, or"
                " `forewarn host forget host-b --fenced` when that machine is off"
            )
            again = await world.daemon("host-b", session="s3")
            await world.pass_time(MERGE_AFTER, again)
            await again.report(reported("db-0"))
            assert world.servers[0].vm("db-0").power == "running"

    run(test)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_list_of_vms_from_before_a_host_is_back_does_not_count(*, is_forgotten: bool) -> None:
    """web-0 ran on host-a after that list: it may have been moved since."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        again = await world.daemon("host-b")
        await world.pass_time(20 * SECOND, first)
        if is_forgotten:
            assert (await forget(world, "host-b", STILL_RUNNING)).status_code == 200
            again = Daemon(world, "host-b", "s2")
        await world.pass_time(80 * SECOND, first)
        await first.report(reported("web-0"))
        await first.report(OFF)
        await world.restart("web-0")
        await again.work()
        await world.pass_time(MERGE_AFTER, first, again)
        old = {"memory_bytes": 1, "vms": [], "age_seconds": 80}
        assert not (await again.work(inventory=old))["is_merged"]
        assert await impacts_of(world, first) == []
        await again.report()
        assert len(await impacts_of(world, first)) == 1

    run(test)


def test_impact_on_a_host_that_was_left_running_waits_for_no_daemon() -> None:
    """The platform of the server carries it out."""

    async def test(world: World) -> None:
        await world.daemon("host-b", reported("db-0"))
        await world.pass_time(20 * SECOND)
        await forget(world, "host-b", STILL_RUNNING)
        for server in world.servers:
            server.local.problem = "it does not answer"
        event = await world.restart("db-0")
        await world.settle()
        server = world.servers[0]
        ((_, reason),) = server.hosts.problems.waits(server.scope("db-0"), event)
        assert reason.startswith("its next try at ")
        (problem,) = server.hosts.problems.of_host("host-b")
        assert problem.code == "left-running"

    run(test)


def test_daemon_that_returns_to_a_host_that_was_left_running_keeps_its_vms() -> None:
    """Until it reports, its VMs are where they were."""

    async def test(world: World) -> None:
        await world.daemon("host-b", reported("db-0"))
        await world.pass_time(20 * SECOND)
        await forget(world, "host-b", STILL_RUNNING)
        again = Daemon(world, "host-b", "s2")
        await again.work()
        await world.settle()
        await world.pass_time(MERGE_AFTER, again)
        assert world.servers[0].hosts.managed.running_on(vm_id("db-0")) == ["host-b"]
        await again.report(reported("db-0"))
        assert world.servers[0].vm("db-0").power == "running"

    run(test)
