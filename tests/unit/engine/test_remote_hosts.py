"""Host daemons and servers: who serves a host, and that its impacts run once."""

import asyncio
from datetime import timedelta

from forewarn.core.event import EventType
from forewarn.core.fleet import Power
from forewarn.fleetfile.parser import parse
from forewarn.platform.simulated import SimulatedPlatform
from tests.unit.engine.hostd_world import GIB, SECOND, Daemon, World, reported, run

NOTHING = {"impacts": [], "cancel": [], "problems": [], "is_merged": True}
PLAIN = b"""
scopes:
  - name: old
    vms: [{name: old-0, host: host-z}]
"""


def test_daemon_carries_out_the_impact_of_its_vm() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", addresses=["10.0.0.1"]))
        event_id = await world.restart("web-0")

        impact = await daemon.take()
        assert impact["event_id"] == event_id
        assert (impact["type"], impact["cause"]) == ("Reboot", "user-restart")
        assert (impact["scope"], impact["tries"], impact["targets"]) == ("web-0", 1, [])
        assert {key: impact["vm"][key] for key in ("name", "host", "address")} == {
            "name": "web-0",
            "host": "host-a",
            "address": "10.0.0.1",
        }
        assert await daemon.finish(impact, detail="it rebooted")
        (done,) = await world.history("impacted")
        assert (done.vm, done.detail) == ("web-0", "it rebooted")
        assert world.servers[0].local.asked == []

    run(test)


def test_failed_attempt_is_retried_and_shows_the_output() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        first = await daemon.take()
        assert await daemon.finish(first, problem="libvirt: no", detail="its output")
        (failed,) = await world.history("impact-failed")
        assert failed.detail == "libvirt: no\nits output"
        assert await daemon.work() == NOTHING

        await world.pass_time(5 * SECOND, daemon)
        again = await daemon.take()
        assert (again["event_id"], again["tries"]) == (first["event_id"], 2)

    run(test)


def test_impact_is_handed_out_until_the_daemon_has_it() -> None:
    """A lost response loses nothing, and what the daemon runs is not handed out twice."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        lost = await daemon.work()
        impact = await daemon.take()
        assert lost["impacts"] == [impact]
        assert (await daemon.work())["impacts"] == []

    run(test)


def test_result_of_another_try_does_not_count() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        impact = await daemon.take()
        assert not await daemon.finish({**impact, "tries": 7})
        assert await world.history("impacted") == []
        assert await daemon.finish(impact)
        assert len(await world.history("impacted")) == 1

    run(test)


def test_result_may_be_repeated_until_the_daemon_knows_that_it_is_recorded() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        impact = await daemon.take()
        assert await daemon.finish(impact)
        assert await daemon.finish(impact)
        assert len(await world.history("impacted")) == 1

    run(test)


def test_request_with_a_result_is_answered_when_it_is_recorded() -> None:
    """Then the daemon may drop it. The server could be lost before."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        impact = await daemon.take()
        (running,) = daemon.running
        daemon.running = [running | {"result": {"detail": "it rebooted"}}]
        assert (await daemon.work())["cancel"] == []
        assert (await daemon.work(wait=True))["cancel"] == [running]
        (done,) = await world.history("impacted")
        assert (done.event, done.detail) == (impact["event_id"], "it rebooted")

    run(test)


def test_later_request_of_a_daemon_ends_the_earlier_one() -> None:
    """The daemon has abandoned it, and a server must not keep one for each result."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first = asyncio.create_task(daemon.work(wait=True))
        await world.settle()
        second = asyncio.create_task(daemon.work(wait=True))
        await world.settle()
        assert (first.done(), second.done()) == (True, False)
        await world.restart("web-0")
        assert len((await second)["impacts"]) == 1

    run(test)


def test_request_for_work_is_answered_when_there_is_some() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        waiting = asyncio.create_task(daemon.work(wait=True))
        await world.settle()
        assert not waiting.done()
        await world.restart("web-0")
        assert len((await waiting)["impacts"]) == 1

        daemon.running = [{"event_id": "none", "vm": "web-0", "tries": 1}]
        assert (await daemon.work(wait=True))["cancel"] == daemon.running
        daemon.running = []

    run(test)


def test_request_for_work_ends_after_five_seconds() -> None:
    """It is also the sign of life: a longer one would hide that a host has lost its power."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a")
        waiting = asyncio.create_task(daemon.work(wait=True))
        await world.pass_time(4 * SECOND)
        assert not waiting.done()
        await world.pass_time(SECOND)
        assert await waiting == NOTHING

    run(test)


def test_canceled_operation_is_cancelled_at_the_daemon() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.poll("web")
        operations = world.servers[0].operations
        placed = await operations.restart("web-0", by="ann")
        assert placed is not None
        await operations.approve(placed.event.id, by="ann")
        await world.settle()
        await daemon.take()
        await operations.complete(placed.event.id, by="ann")
        await world.settle()
        assert (await daemon.work())["cancel"] == daemon.running

    run(test)


def test_second_result_says_that_a_restarted_vm_is_back() -> None:
    """Until then its event stays; another host cannot say so."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        other = await world.daemon("host-b")
        await world.poll("web")
        operations = world.servers[0].operations
        placed = await operations.restart("web-0", by="ann")
        assert placed is not None
        await operations.approve(placed.event.id, by="ann")
        await world.settle()
        impact = await daemon.take()
        assert not await daemon.finish(impact, is_back=False)
        assert not await daemon.finish(impact, is_back=False)  # the response was lost
        (booting,) = world.servers[1].scope("web").impacts
        assert booting.state == "booting"
        assert await other.finish(impact, is_back=True)  # it is not wanted
        assert len(world.servers[1].scope("web").events) == 1
        assert await daemon.finish(impact, is_back=True)
        assert world.servers[1].scope("web").events == ()

    run(test)


# --- who serves a host


def test_daemon_that_stops_is_replaced_at_once() -> None:
    async def test(world: World) -> None:
        old = await world.daemon("host-a", reported("web-0"))
        assert await old.work(is_leaving=True) == NOTHING
        await world.settle()
        assert all(server.is_unreachable("host-a") for server in world.servers)
        await world.daemon("host-a", reported("web-0"), session="s2", server=1)
        assert not any(server.is_unreachable("host-a") for server in world.servers)

    run(test)


def test_daemon_that_stops_sends_its_last_results() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        await daemon.take()
        daemon.running[0]["result"] = {"detail": "the last one"}
        await daemon.work(is_leaving=True)
        await world.settle()
        assert [entry.detail for entry in await world.history("impacted")] == ["the last one"]
        assert world.servers[1].is_unreachable("host-a")

    run(test)


def test_impacts_of_an_unreachable_host_wait_and_then_run() -> None:
    """They do not fail, and cost nothing: nothing is written while they wait."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.pass_time(16 * SECOND)
        assert all(server.is_unreachable("host-a") for server in world.servers)
        await world.restart("web-0")
        revision = world.servers[0].board.scopes["web-0"].revision
        await world.pass_time(timedelta(minutes=10))
        assert world.servers[0].board.scopes["web-0"].revision == revision
        assert world.servers[0].local.asked == world.servers[1].local.asked == []

        impact = await daemon.take()
        assert impact["tries"] == 1
        assert await daemon.finish(impact)
        details = [e.detail for e in await world.history("updated") if e.host == "host-a"]
        assert details == [
            "daemon of host-a connected",
            "daemon of host-a unreachable: no contact since 2030-01-31T12:00:00Z",
            "daemon of host-a connected",
        ]

    run(test)


def test_daemon_that_is_lost_during_an_impact_gets_it_again() -> None:
    """That is not a failed attempt, however often it happens."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        for tries in range(1, 25):
            impact = await daemon.take()
            assert impact["tries"] == tries
            daemon.running = []
            await world.pass_time(17 * SECOND)
            (state,) = world.servers[0].scope("web-0").impacts
            assert (state.failures, state.claimed_by, state.state) == (0, "", "claimed")
        assert await daemon.finish(await daemon.take())

    run(test)


def test_daemon_that_changes_to_another_server_goes_on_with_its_impact() -> None:
    """The new server hands it out with its own number of tries; the daemon does not begin again."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        first = await daemon.take()

        daemon.server = world.servers[1]
        assert not await daemon.finish(first)
        await world.settle()
        again = await daemon.take()
        assert (again["event_id"], again["tries"]) == (first["event_id"], 2)
        assert await daemon.finish(again)
        assert await world.history("impact-failed") == []
        assert not any(server.is_unreachable("host-a") for server in world.servers)

    run(test)


def test_host_of_a_lost_server_is_unreachable_until_its_daemon_finds_another() -> None:
    """Its running impact is not cancelled meanwhile, and runs only once."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        first = await daemon.take()
        await world.expire(world.servers[0])
        assert world.servers[1].is_unreachable("host-a")

        daemon.server = world.servers[1]
        work = await daemon.work()
        assert work["cancel"] == []
        await world.settle()
        again = await daemon.take()
        assert (again["event_id"], again["tries"]) == (first["event_id"], 2)
        assert not world.servers[1].is_unreachable("host-a")
        assert await daemon.finish(again)
        assert len(await world.history("impacted")) == 1

    run(test)


def test_server_without_a_lease_serves_no_daemon() -> None:
    """It could not record a result. The daemon tries another server."""

    async def test(world: World) -> None:
        await world.expire(world.servers[0])
        daemon = Daemon(world, "host-a")
        refused = await daemon.send()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

    run(test)


def test_other_hosts_use_the_platform_of_the_server() -> None:
    async def test(world: World) -> None:
        await world.servers[0].operations.apply(parse(PLAIN, "fleet"), by="test")
        await world.settle()
        await world.servers[0].operations.restart("old-0", by="ann")
        await world.pass_time(SECOND)
        asked = [vm for server in world.servers for vm in server.local.asked]
        assert asked == ["old-0"]

    run(test)


def test_forgotten_host_is_unmanaged_and_keeps_its_vms() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        root = {"authorization": f"Bearer fw_root_{world.secret}"}
        client = world.servers[0].client
        response = await client.delete("/api/v1/hosts/host-a/daemon", headers=root)
        assert response.status_code == 409
        assert response.json()["message"] == "the daemon of host-a is connected; stop it first"
        response = await client.delete("/api/v1/hosts/host-x/daemon", headers=root)
        assert (response.status_code, response.json()["error"]) == (404, "unknown_host")
        await world.pass_time(16 * SECOND)
        shown = (await client.get("/api/v1/hosts/host-a", headers=root)).json()
        assert (shown["state"], shown["daemon"]["is_connected"]) == ("unreachable", False)

        response = await client.delete("/api/v1/hosts/host-a/daemon?fenced=true", headers=root)
        assert response.status_code == 200
        await world.settle()
        shown = (await client.get("/api/v1/hosts/host-a", headers=root)).json()
        assert (shown["state"], shown["daemon"], shown["vms"]) == ("unmanaged", None, ["web-0"])
        assert world.servers[1].hosts.managed.count_unreachable() == 0
        await world.servers[0].operations.restart("web-0", by="ann")
        await world.pass_time(SECOND)
        assert [vm for server in world.servers for vm in server.local.asked] == ["web-0"]
        assert await daemon.report(reported("web-0")) == []
        shown = (await client.get("/api/v1/hosts/host-a", headers=root)).json()
        assert shown["state"] == "connected"

    run(test)


def test_host_with_open_impacts_is_forgotten_only_if_they_fail() -> None:
    """Nothing can tell whether they were carried out, so they are never recorded as done."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"), reported("db-0"))
        await world.pass_time(16 * SECOND)
        await world.restart("web-0")
        root = {"authorization": f"Bearer fw_root_{world.secret}"}
        client, url = world.servers[0].client, "/api/v1/hosts/host-a/daemon?fenced=true"
        response = await client.delete(url, headers=root)
        assert response.status_code == 409
        assert response.json()["message"] == (
            "impacts on VMs of host-a are not over: the Reboot of web-0; complete or cancel their"
            " events, or forget it with `fail_impacts`"
        )
        assert world.servers[0].is_unreachable("host-a")

        response = await client.delete(f"{url}&fail_impacts=true", headers=root)
        assert response.json() == {"host": "host-a"}
        await world.pass_time(SECOND)
        assert [e.detail for e in await world.history("impact-failed")] == [
            "host-a was forgotten: nothing can tell whether this was carried out"
        ]
        assert await world.history("impacted") == []
        assert [vm for server in world.servers for vm in server.local.asked] == []

    run(test)


def test_simulation_never_acts_for_a_host_that_had_a_daemon() -> None:
    """It would record as done what was never done to a real VM."""

    async def test(world: World) -> None:
        for server in world.servers:
            server.hosts.local = SimulatedPlatform(
                world.clock, dict.fromkeys(EventType, timedelta(0)), hosts=lambda: ()
            )
        await world.daemon("host-a", reported("web-0"))
        await world.pass_time(16 * SECOND)
        await world.servers[0].hosts.removal.forget("host-a", by="ann", power=Power.UNKNOWN)
        await world.settle()
        await world.restart("web-0")
        await world.pass_time(SECOND)
        assert await world.history("impacted") == []
        (failed, *_) = await world.history("impact-failed")
        assert failed.detail == (
            "host-a had a daemon, and a simulation would do nothing to its VMs;"
            " expected a daemon, or another `platform` of the server"
        )

    run(test)


def test_result_cannot_move_a_vm_to_a_host_that_the_server_did_not_name() -> None:
    """The server's own platform would act there, with the name that the daemon has made up."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        assert await daemon.finish(await daemon.take(), host="host-z")
        assert world.servers[1].vm("web-0").host == "host-a"
        await world.daemon("host-b", server=1)
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        assert await daemon.finish(await daemon.take(), host="host-b")
        assert world.servers[1].vm("web-0").host == "host-b"

    run(test)


def test_reports_at_the_same_time_cost_no_daemon_its_session() -> None:
    """All of them change the fleet; one that loses the race is sent again."""

    async def test(world: World) -> None:
        daemons = [Daemon(world, f"host-{name}") for name in "ab"]
        daemons[1].server = world.servers[1]
        for daemon in daemons:
            vms = [reported(f"vm-{daemon.host}")]
            daemon.inventory = {"memory_bytes": GIB, "vms": vms}
        works = await asyncio.gather(*(d.work(inventory=d.inventory) for d in daemons))
        assert False in [work["is_merged"] for work in works]
        await world.settle()
        assert not any(world.servers[0].is_unreachable(daemon.host) for daemon in daemons)
        for daemon in daemons:
            assert (await daemon.work(inventory=daemon.inventory))["is_merged"]
        await world.settle()
        assert {"vm-host-a", "vm-host-b"} <= {*world.servers[0].board.vms}

    run(test)


def test_vms_of_unreachable_hosts_are_counted_and_count_as_unavailable() -> None:
    async def test(world: World) -> None:
        alive = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.daemon("host-b", reported("web-1", scope="web"), server=1)
        server = world.servers[0]
        [summary] = server.service.campaigns.fleet.scopes_on("host-a") or []
        assert (summary.down, server.hosts.managed.count_unreachable()) == (set(), 0)
        await world.pass_time(16 * SECOND, alive)
        [summary] = server.service.campaigns.fleet.scopes_on("host-a") or []
        assert (summary.down, server.hosts.managed.count_unreachable()) == ({"web-1"}, 1)
        await world.expire(world.servers[0])
        assert world.servers[1].hosts.managed.count_unreachable() == 2

    run(test)


def test_move_goes_to_the_host_with_most_free_memory_that_answers() -> None:
    """Of those without a VM of the scope; a VM that is on its way counts there already."""

    async def test(world: World) -> None:
        source = await world.daemon(
            "host-a",
            reported("web-0", scope="web"),
            reported("db-0"),
            reported("big", memory_bytes=9 * GIB),
        )
        await source.report(
            reported("web-0", scope="web"), reported("db-0"), reported("big", memory_bytes=9 * GIB)
        )
        second = await world.daemon("host-b", reported("web-1", scope="web"))
        third = Daemon(world, "host-c")
        third.server = world.servers[1]
        await third.report(memory_bytes=8 * GIB)
        operations = world.servers[0].operations
        targets = {}
        for vm in ("web-0", "db-0", "big"):
            await operations.redeploy(vm, by="ann")
            await world.settle()
            impact = await source.take()
            targets[vm] = impact["targets"]
        assert targets == {
            "web-0": ["host-c", "host-b"],
            "db-0": ["host-b", "host-c"],
            "big": ["host-b"],
        }
        assert await second.work() == NOTHING

    run(test)


async def fail_and_move(world: World, daemon: Daemon, other: Daemon) -> None:
    """The first try of the impact of web-0 fails, and an operator moves the VM meanwhile."""
    impact = await daemon.take()
    await daemon.finish(impact, problem="libvirt: no")
    await daemon.report()
    await other.report(reported("web-0"))
    assert world.servers[0].vm("web-0").host == daemon.host, "its impact is not over"
    await world.pass_time(5 * SECOND, daemon, other)


def test_impact_goes_to_the_host_that_runs_the_vm() -> None:
    """The host that the fleet knows has no such VM: a deletion would change nothing there."""

    async def test(world: World) -> None:
        old, new = await world.daemon("host-a", reported("web-0")), await world.daemon("host-b")
        await world.restart("web-0")
        await fail_and_move(world, old, new)

        assert (await old.work())["impacts"] == []
        impact = await new.take()
        assert (impact["vm"]["host"], impact["may_run_on"]) == ("host-b", ["host-a"])
        await new.finish(impact)
        assert world.servers[0].vm("web-0").host == "host-b"

    run(test)


def test_impact_goes_to_the_host_that_runs_the_vm_through_another_server() -> None:
    async def test(world: World) -> None:
        old = await world.daemon("host-a", reported("web-0"))
        new = await world.daemon("host-b", server=1)
        await world.restart("web-0")
        await fail_and_move(world, old, new)

        assert (await old.work())["impacts"] == []
        impact = await new.take()
        assert (impact["vm"]["host"], impact["may_run_on"]) == ("host-b", ["host-a"])
        assert await new.finish(impact)
        assert world.servers[0].vm("web-0").host == "host-b"

    run(test)


def test_impact_waits_for_the_host_that_runs_the_vm() -> None:
    """That host may still carry it out while it is cut off: no other one gets it meanwhile."""

    async def test(world: World) -> None:
        old, new = await world.daemon("host-a", reported("web-0")), await world.daemon("host-b")
        event_id = await world.restart("web-0")
        await fail_and_move(world, old, new)
        first = await new.take()
        await world.pass_time(16 * SECOND, old)
        assert world.servers[0].is_unreachable("host-b")
        revision = world.servers[0].board.scopes["web-0"].revision
        await world.pass_time(60 * SECOND, old)
        assert (await old.work())["impacts"] == []
        assert world.servers[0].board.scopes["web-0"].revision == revision, "it costs no writes"

        assert (await new.work())["cancel"] == []
        again = await new.take()
        assert (again["event_id"], again["tries"]) == (event_id, first["tries"] + 1)
        assert await new.finish(again)
        assert world.servers[0].vm("web-0").host == "host-b"

    run(test)


def test_impact_goes_back_when_the_other_host_no_longer_has_the_vm() -> None:
    """Its daemon may still act on the VM, wherever that is: it goes back when it has failed."""

    async def test(world: World) -> None:
        old, new = await world.daemon("host-a", reported("web-0")), await world.daemon("host-b")
        await world.restart("web-0")
        await fail_and_move(world, old, new)
        await world.pass_time(16 * SECOND, old)
        await new.report()
        assert (await old.work())["impacts"] == []
        await new.finish(await new.take(), problem="no domain")
        await world.pass_time(10 * SECOND, old, new)
        assert (await old.take())["vm"]["host"] == "host-a"

    run(test)


def test_try_without_a_result_stays_with_its_daemon_if_the_vm_is_elsewhere() -> None:
    """It may still act on the VM, on another host: two daemons must not act at the same time."""

    async def test(world: World) -> None:
        old, new = await world.daemon("host-a", reported("web-0")), await world.daemon("host-b")
        await world.restart("web-0")
        impact = await old.take()
        await new.report(reported("web-0"))
        await world.pass_time(16 * SECOND, new)
        assert world.servers[0].is_unreachable("host-a")
        await world.pass_time(60 * SECOND, new)
        assert (await new.work())["impacts"] == []
        hosts, scope = world.servers[0].hosts, world.servers[0].scope("web-0")
        ((_, waits_for),) = hosts.problems.waits(scope, impact["event_id"])
        assert waits_for.startswith("the daemon of host-a: ")
        assert world.servers[0].vm("web-0").host == "host-b"
        await hosts.removal.forget("host-a", by="ann", power=Power.STOPPED)
        assert (await new.take())["vm"]["host"] == "host-b"

    run(test)


def test_vm_on_which_another_host_acts_is_not_started_on_its_old_host() -> None:
    """That host may have stopped it for a moment, to start it again."""

    async def test(world: World) -> None:
        old, new = await world.daemon("host-a"), await world.daemon("host-b", reported("web-0"))
        await world.restart("web-0")
        impact = await new.take()
        old.running = [{"event_id": "past", "vm": "web-0", "tries": 0}]
        assert (await old.work())["cancel"] == [], "it can wait"
        old.running = [{"event_id": "past", "vm": "web-0", "tries": 1}]
        (cancel,) = (await old.work())["cancel"]
        assert (cancel["may_start"], cancel["may_run_on"]) == (False, ["host-b"])

        await new.finish(impact)
        (cancel,) = (await old.work())["cancel"]
        assert "may_start" not in cancel

    run(test)


def test_vm_that_was_evicted_is_not_started_for_an_event_that_had_stopped_it_before() -> None:
    """The event was completed while its VM was off; then the VM was evicted."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        scheduled = await world.servers[0].operations.evict("web-0", by="ann")
        assert scheduled is not None
        await world.servers[0].operations.approve(scheduled.event.id, by="ann")
        await world.settle()
        await daemon.finish(await daemon.take())
        assert world.servers[0].vm("web-0").power == "deallocated"
        daemon.running = [{"event_id": "past", "vm": "web-0", "tries": 1}]
        (cancel,) = (await daemon.work())["cancel"]
        assert cancel["may_start"] is False

    run(test)


def test_move_that_has_filled_its_target_is_tried_again() -> None:
    """The target has no room for a second VM like this one, but the VM may be there already."""

    async def test(world: World) -> None:
        big = reported("web-0", memory_bytes=9 * GIB)
        source, target = await world.daemon("host-a", big), Daemon(world, "host-b")
        await target.report(memory_bytes=10 * GIB)
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        await source.finish(await source.take(), problem="no answer from host-b")
        await target.report(big, memory_bytes=10 * GIB)
        await world.pass_time(5 * SECOND, source, target)

        impact = await source.take()
        assert (impact["vm"]["host"], impact["tries"]) == ("host-a", 2)
        assert impact["targets"] == impact["may_run_on"] == ["host-b"]

    run(test)


def test_move_that_was_done_before_its_server_was_lost_counts_while_no_target_is_connected() -> (
    None
):
    """Its daemon has the result, which the lost server has not recorded. Without it, the move would
    have failed, and the VM would be taken for one that is on its old host.
    """

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b", server=1)
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        first = await daemon.take()
        assert (first["targets"], first["no_target"]) == (["host-b"], "")
        await world.expire(world.servers[0])
        await world.pass_time(30 * SECOND)
        daemon.server = world.servers[1]
        await daemon.report(reported("web-0"))
        await world.pass_time(SECOND, daemon)
        again = await daemon.take()
        assert (again["event_id"], again["tries"]) == (first["event_id"], 2)
        assert again["targets"] == []
        assert again["no_target"].startswith("0 of 1 other hosts answer")
        assert await daemon.finish(again, host="host-b")
        (done,) = await world.history("impacted")
        assert (done.vm, await world.history("impact-failed")) == ("web-0", [])

    run(test)


def test_move_of_another_server_counts_at_its_target() -> None:
    """That server's choice is not known here before the target reports the VM."""

    async def test(world: World) -> None:
        big = reported("big", memory_bytes=9 * GIB)
        first = await world.daemon("host-a", reported("web-0", memory_bytes=2 * GIB))
        second = await world.daemon("host-c", big, server=1)
        target = Daemon(world, "host-b")
        await target.report(memory_bytes=10 * GIB)
        await world.servers[1].operations.redeploy("big", by="ann")
        await world.settle()
        assert (await second.take())["targets"] == ["host-a", "host-b"]
        await target.report({**big, "power": "stopped"}, memory_bytes=10 * GIB)
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        assert (await first.take())["targets"] == ["host-c"]

    run(test)


def test_daemon_learns_what_is_left_of_an_earlier_run_and_not_wanted() -> None:
    """It knows by its markers that impacts have begun, and not whether their events are over."""

    async def test(world: World) -> None:
        old = await world.daemon("host-a", reported("web-0"), reported("web-1"))
        await world.restart("web-0")
        await old.take()
        await world.pass_time(16 * SECOND)
        new = Daemon(world, "host-a", "s2")
        left = [
            {"event_id": old.running[0]["event_id"], "vm": "web-0", "tries": 0},
            {"event_id": "over", "vm": "web-1", "tries": 0},
        ]
        new.running = list(left)
        assert (await new.work())["cancel"] == [left[1]]
        new.running = left[:1]
        await new.report(reported("web-0"), reported("web-1"))
        (again,) = (await new.work())["impacts"]
        assert (again["vm"]["name"], again["tries"]) == ("web-0", 2)

    run(test)


def test_daemon_keeps_what_an_earlier_run_began_until_it_is_tried_again() -> None:
    """Its marker says that the impact has stopped the VM: without it, the next try would leave a VM
    off that maintenance has stopped.
    """

    async def test(world: World) -> None:
        old = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        impact = await old.take()
        assert await old.finish(impact, problem="it does not start")
        await old.work(is_leaving=True)
        new = Daemon(world, "host-a", "s2")
        new.running = [{"event_id": impact["event_id"], "vm": "web-0", "tries": 0}]
        assert await new.work() == {**NOTHING, "is_merged": False}, "a report is wanted"
        await new.report(reported("web-0", power="stopped"))
        await world.pass_time(5 * SECOND, new)
        assert [each["tries"] for each in (await new.work())["impacts"]] == [2]

    run(test)


def test_daemon_learns_where_the_vm_of_a_cancelled_impact_may_run() -> None:
    """It would start the VM that its last try has stopped. An operator was faster, elsewhere."""

    async def test(world: World) -> None:
        old = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        impact = await old.take()
        assert await old.finish(impact, problem="it does not start")
        old.running = [{"event_id": impact["event_id"], "vm": "web-0", "tries": 0}]
        await old.report(reported("web-0", power="stopped"))
        assert (await old.work())["cancel"] == []

        await world.daemon("host-b", reported("web-0"))
        assert (await old.work())["cancel"] == [old.running[0] | {"may_run_on": ["host-b"]}]

    run(test)
