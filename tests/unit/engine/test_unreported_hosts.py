"""Hosts whose daemon is connected, and whose VMs are not known yet: nothing acts on them."""

from datetime import timedelta

import pytest

from forewarn.engine.machine_binding import MERGE_AFTER
from tests.unit.engine.hostd_world import SECOND, Daemon, Server, World, reported, run

OFF = reported("web-0", power="stopped")


async def waits_for(world: World, event_id: str) -> str:
    """What the API says that an impact on web-0 waits for."""
    server = world.servers[0]
    ((_, reason),) = server.hosts.problems.waits(server.scope("web-0"), event_id)
    return reason


def test_restarted_daemon_gets_no_impact_before_its_report_counts() -> None:
    """Its killed run has reported web-0 as running. It has stopped since, and was started on
    host-b, which is unreachable: it must not be started on host-a.
    """

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        other = await world.daemon("host-b")
        await world.pass_time(2 * SECOND, other)
        await other.work(is_leaving=True)
        new = await world.daemon("host-a", OFF, session="s2")
        event_id = await world.restart("web-0")
        assert (await new.work())["impacts"] == []
        assert await waits_for(world, event_id) == (
            "a report of host-a: its daemon is connected, and has not reported its VMs yet"
        )
        await world.pass_time(MERGE_AFTER, new)
        await new.report(OFF)
        assert (await new.work())["impacts"] == []
        reason = await waits_for(world, event_id)
        assert reason.startswith("other hosts: it may run on host-b, which is unreachable")

        await other.report(reported("web-0"))
        assert (await new.work())["impacts"] == []
        assert (await other.take())["event_id"] == event_id

    run(test)


def test_impact_waits_for_a_report_of_a_daemon_that_was_away() -> None:
    """The VM may have been moved, or stopped and started elsewhere, in that time."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.pass_time(16 * SECOND)
        await world.restart("web-0")
        assert not (await daemon.work())["is_merged"], "it is asked for one"
        await world.settle()
        assert (await daemon.work())["impacts"] == []
        await daemon.report(reported("web-0"))
        assert len((await daemon.work())["impacts"]) == 1

    run(test)


def test_impact_says_where_its_vm_may_run_when_it_is_handed_out() -> None:
    """The VM has stopped since the impact was claimed: now it may be started, and run twice."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b", OFF)
        await world.restart("web-0")
        await daemon.report(OFF)
        assert (await daemon.take())["may_run_on"] == ["host-b"]

    run(test)


def test_impact_that_was_claimed_is_not_handed_out_if_it_has_to_wait_now() -> None:
    """As before the claim: host-b may run the VM, which is off on its own host now."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        other = await world.daemon("host-b")
        await world.pass_time(16 * SECOND, daemon)
        event_id = await world.restart("web-0")
        assert (await daemon.work(inventory={"vms": [OFF], "memory_bytes": 1}))["impacts"] == []
        await world.settle()
        assert (await daemon.work())["impacts"] == []
        assert (await waits_for(world, event_id)).startswith("other hosts: it may run on host-b")
        await other.report()
        assert (await daemon.take())["tries"] == 2

    run(test)


def test_daemon_that_was_away_learns_where_a_vm_that_it_recovers_may_run() -> None:
    """It starts a VM that an ended event left off only if no other host runs it."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b")
        await world.pass_time(16 * SECOND)
        daemon.running = [{"event_id": "over", "vm": "web-0", "tries": 1}]
        assert [each["may_run_on"] for each in (await daemon.work())["cancel"]] == [["host-b"]]

    run(test)


def test_report_of_a_clone_does_not_count_sooner_at_another_server() -> None:
    """A daemon changes its server when a response is lost."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        clone = await world.daemon("host-a", session="s2")
        clone.server = world.servers[1]
        await clone.report()
        await world.pass_time(MERGE_AFTER - SECOND, clone)
        await clone.report()
        assert "web-0" in world.servers[0].board.vms
        await world.pass_time(SECOND, clone)
        await clone.report()
        assert world.servers[0].board.vms == {}

    run(test)


def test_host_that_runs_a_vm_and_may_not_report_it_is_asked() -> None:
    """Its token is not for the scope of the VM, of which host-a has an old copy."""

    async def test(world: World) -> None:
        await world.limit_token("host-c", "lab")
        daemon = await world.daemon("host-a", {**OFF, "scope": "web"})
        other = Daemon(world, "host-c")
        (problem,) = await other.report(reported("web-0", scope="web"))
        assert "the token of host-c is not for the scope 'web'" in problem
        await world.pass_time(16 * SECOND, daemon)
        event_id = await world.restart("web-0")
        assert (await daemon.work())["impacts"] == []
        server = world.servers[0]
        ((_, reason),) = server.hosts.problems.waits(server.scope("web"), event_id)
        assert reason.startswith("other hosts: it may run on host-c, which is unreachable")
        assert server.vm("web-0").host == "host-a"
        assert server.hosts.managed.running_on(server.vm("web-0").id) == []

        await other.report(reported("web-0", scope="web"))
        assert (await daemon.take())["may_run_on"] == ["host-c"]

    run(test)


def test_host_that_no_longer_runs_a_vm_that_it_may_not_report_is_not_asked() -> None:
    async def test(world: World) -> None:
        await world.limit_token("host-c", "lab")
        daemon = await world.daemon("host-a", {**OFF, "scope": "web"})
        other = Daemon(world, "host-c")
        await other.report(reported("web-0", scope="web"))
        await other.report({**OFF, "scope": "web"})
        await world.restart("web-0")
        assert (await daemon.take())["may_run_on"] == []

    run(test)


def test_claim_does_not_prove_that_a_vm_runs() -> None:
    """Otherwise a host could have it started while it runs on a third one."""

    async def test(world: World) -> None:
        await world.limit_token("host-c", "lab")
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b")
        thief = await world.daemon("host-c", reported("web-0"))
        await world.pass_time(16 * SECOND, daemon, thief)
        await daemon.report(OFF)
        event_id = await world.restart("web-0")
        assert [(await each.work())["impacts"] for each in (daemon, thief)] == [[], []]
        assert (await waits_for(world, event_id)).startswith("other hosts: it may run on host-b")

    run(test)


def test_clone_of_a_machine_gets_no_impact_of_the_other_one() -> None:
    """There the VM of a Terminate is not found, which counts as done: it would leave the fleet."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        await world.servers[0].operations.delete("web-0", by="ann")
        await world.settle()
        await first.take()
        clone = Daemon(world, "host-a", "s2")
        for number in (1, 2):
            assert (await clone.work(number=number))["impacts"] == []
            await clone.report()
        for number in (8, 9):
            assert (await first.send(number=number)).status_code == 409
        await world.pass_time(MERGE_AFTER)
        for daemon in (first, clone):
            assert (await daemon.send(number=10)).status_code == 409, "none of them is served"
        assert "web-0" in world.servers[1].board.vms

    run(test)


def test_vm_of_a_host_that_was_away_may_have_been_started_elsewhere() -> None:
    """While host-a was away, an operator has started web-0 on host-b, which was lost before it
    could report that.
    """

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await first.report(OFF)
        await world.pass_time(2 * SECOND, first, second)
        await second.report()
        await world.pass_time(20 * SECOND, second)
        await world.pass_time(20 * SECOND)
        await first.report(OFF)
        event_id = await world.restart("web-0")
        assert (await first.work())["impacts"] == []
        assert (await waits_for(world, event_id)).startswith("other hosts: it may run on host-b")

        await second.report(reported("web-0"))
        assert (await second.take())["event_id"] == event_id

    run(test)


def test_vm_may_run_on_a_host_whose_last_report_may_be_that_of_a_clone() -> None:
    """The clone does not run web-0, which was started on host-b by hand. Both are refused now."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await first.report(OFF)
        await world.pass_time(2 * SECOND, first, second)
        await second.report()
        clone = Daemon(world, "host-b", "s2")
        await clone.work(number=1)
        for number in (8, 9):
            assert (await second.send(number=number)).status_code == 409
        assert (await clone.send(number=9)).status_code == 409, "none of them is served"
        event_id = await world.restart("web-0")
        assert (await first.work())["impacts"] == []
        assert (await waits_for(world, event_id)).startswith("other hosts: it may run on host-b")

    run(test)


def test_vm_of_a_host_whose_daemon_restarted_waits_for_no_host_that_was_lost_before() -> None:
    """No VM is started elsewhere within seconds. A dead host would keep all VMs off."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await first.report(OFF)
        await world.pass_time(2 * SECOND, first, second)
        await second.report()
        await world.pass_time(20 * SECOND, first)
        await first.work(is_leaving=True)
        await world.pass_time(5 * SECOND)
        new = await world.daemon("host-a", OFF, session="s2")
        await world.restart("web-0")
        assert (await new.take())["may_run_on"] == []

    run(test)


async def restart_servers(world: World, duration: timedelta) -> None:
    """Stop all servers, which notice no loss of each other, and start new ones."""
    old, world.servers = world.servers, []
    for server in old:
        await server.stop()
    await world.clock.advance(duration)
    world.servers = [Server(world.store, world.clock, f"server-{number}") for number in (3, 4)]
    for server in world.servers:
        await server.start()
    await world.settle()


async def lose_servers(
    world: World, duration: timedelta, *, connected_for: timedelta = 5 * SECOND
) -> Daemon:
    """The daemon of host-a, on which web-0 is off, before it returns to servers that were restarted
    meanwhile. host-b does not return.
    """
    first = await world.daemon("host-a", reported("web-0"))
    await first.report(OFF)
    await world.pass_time(5 * SECOND, first)
    second = await world.daemon("host-b")
    await world.pass_time(2 * SECOND, first, second)
    await second.report()
    await world.pass_time(connected_for, first, second)
    await restart_servers(world, duration)
    first.server = world.servers[0]
    return first


async def report_again(world: World, daemon: Daemon) -> None:
    await world.pass_time(MERGE_AFTER, daemon)
    await daemon.report(OFF)
    await world.pass_time(3 * SECOND, daemon)


@pytest.mark.parametrize("no_server_seconds", [None, 3603])
def test_vm_of_a_host_that_had_no_server_may_have_been_started_elsewhere(
    no_server_seconds: int | None,
) -> None:
    """No server was there to note since when. A daemon of an earlier version does not say it."""

    async def test(world: World) -> None:
        first = await lose_servers(world, timedelta(hours=1))
        await world.pass_time(3 * SECOND)
        await first.work(no_server_seconds=no_server_seconds)
        await report_again(world, first)
        event_id = await world.restart("web-0")
        assert (await first.work())["impacts"] == []
        assert (await waits_for(world, event_id)).startswith("other hosts: it may run on host-b")

    run(test)


def test_vm_of_a_host_whose_daemon_restarted_without_a_server_may_run_elsewhere() -> None:
    """The new session does not know for how long the last one had no server."""

    async def test(world: World) -> None:
        first = await lose_servers(world, timedelta(hours=1))
        first.session = "s2"
        await first.work()
        await report_again(world, first)
        await world.restart("web-0")
        assert (await first.work())["impacts"] == []

    run(test)


def test_vm_of_a_host_waits_for_no_lost_host_after_a_short_restart_of_all_servers() -> None:
    """The daemon says for how long it had none: the new servers do not know when they were lost."""

    async def test(world: World) -> None:
        first = await lose_servers(world, 10 * SECOND, connected_for=timedelta(minutes=10))
        await first.work(no_server_seconds=12)
        await report_again(world, first)
        await world.restart("web-0")
        assert (await first.take())["may_run_on"] == []

    run(test)


async def begin_move(world: World) -> tuple[Daemon, Daemon]:
    """host-a has stopped web-0 for a move, and host-b has reported since that it does not have it.

    Then host-a has let host-b start it, perhaps, and host-b was lost.
    """
    first = await world.daemon("host-a", reported("web-0"))
    second = await world.daemon("host-b")
    await world.poll("web-0")
    operations = world.servers[0].operations
    placed = await operations.redeploy("web-0", by="ann")
    assert placed is not None
    await operations.approve(placed.event.id, by="ann")
    await world.settle()
    await first.take()
    await first.report(OFF)
    await world.pass_time(2 * SECOND, first, second)
    await second.report()
    await world.pass_time(20 * SECOND, first)
    assert world.servers[0].is_unreachable("host-b")
    return first, second


def test_target_of_a_failed_move_may_run_the_vm() -> None:
    """It was off when host-b reported last, and is still off on host-a."""

    async def test(world: World) -> None:
        first, second = await begin_move(world)
        (event_id,) = (each["event_id"] for each in first.running)
        (impact,) = world.servers[0].scope("web-0").impacts
        moved = {"event_id": event_id, "tries": impact.tries, "vm": {"name": "web-0"}}
        await first.finish(moved, problem="host-b did not answer")
        await world.pass_time(10 * SECOND, first)
        assert (await first.work())["impacts"] == []
        assert (await waits_for(world, event_id)).startswith("other hosts: it may run on host-b")

        await second.report()
        assert (await first.take())["may_run_on"] == []

    run(test)


def test_target_of_a_move_that_was_ended_may_run_the_vm() -> None:
    """Its event is gone. The next one must not start the VM on host-a either."""

    async def test(world: World) -> None:
        first, _ = await begin_move(world)
        (event_id,) = (each["event_id"] for each in first.running)
        operations = world.servers[0].operations
        await operations.complete(event_id, by="ann")
        await world.settle()
        first.running = []
        placed = await operations.restart("web-0", by="ann")
        assert placed is not None
        await operations.approve(placed.event.id, by="ann")
        await world.settle()
        assert (await first.work())["impacts"] == []
        assert (await waits_for(world, placed.event.id)).startswith(
            "other hosts: it may run on host-b"
        )

    run(test)


def test_target_of_a_move_that_succeeded_is_known() -> None:
    """No other host may run the VM then."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b")
        await world.servers[0].operations.redeploy("web-0", by="ann")
        await world.settle()
        impact = await first.take()
        await first.finish(impact, problem="host-b did not answer")
        await world.pass_time(10 * SECOND, first, second)
        await first.finish(await first.take(), host="host-b")
        assert world.servers[0].scope("web-0").tried_moves == ()

    run(test)
