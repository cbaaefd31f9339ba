"""Which daemon acts for a host, and when it counts as lost."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from forewarn.engine.engine import CLOCK_SKEW_SECONDS_MAX
from forewarn.engine.fleet_apply import Commands
from forewarn.engine.machine_binding import MERGE_AFTER
from forewarn.engine.managed_hosts import HOST_KEY
from forewarn.errors import Unavailable
from forewarn.fleetfile.parser import parse
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import Write
from tests.unit.engine.hostd_world import (
    GIB,
    NOON,
    SECOND,
    Daemon,
    Server,
    SlowStore,
    World,
    reported,
    run,
    vm_id,
)

ROOT_URL = "/api/v1/hosts/host-a"


async def start_slow_server(world: World, name: str) -> tuple[Server, SlowStore]:
    store = SlowStore(world.store)
    server = Server(store, world.clock, name)  # type: ignore[arg-type]
    await server.start()
    await world.settle()
    return server, store


async def stop(*servers: Server) -> None:
    for server in servers:
        await server.stop()
        await server.engine.close()


def root(world: World) -> dict[str, str]:
    return {"authorization": f"Bearer fw_root_{world.secret}"}


async def forget(world: World) -> int:
    url = f"{ROOT_URL}/daemon?fenced=true"
    response = await world.servers[0].client.delete(url, headers=root(world))
    await world.settle()
    return response.status_code


async def show(world: World) -> Any:
    return (await world.servers[1].client.get(ROOT_URL, headers=root(world))).json()


def details(entries: Sequence[Any]) -> list[str]:
    return [entry.detail for entry in entries if entry.host == "host-a"]


# --- a host belongs to a machine


def test_daemon_of_another_machine_is_refused_while_the_first_is_connected() -> None:
    """It would act on VMs of another libvirt under the same name."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        for server in world.servers:
            second = Daemon(world, "host-a", "s2", machine="another")
            second.server = server
            bodies: list[dict[str, Any]] = [{}, {"inventory": {"vms": []}}, {"is_leaving": True}]
            for body in bodies:
                refused = await second.send(**body)
                assert (refused.status_code, refused.json()["error"]) == (409, "host_taken")
                assert refused.json()["message"] == (
                    "host-a belongs to another machine; expected the daemon of that machine, or"
                    " `forewarn host forget host-a --fenced` when that machine is off"
                )
        assert world.servers[1].vm("web-0").host == "host-a"
        assert (await first.send()).status_code == 200

    run(test)


def test_daemon_of_another_machine_is_accepted_only_after_the_host_is_forgotten() -> None:
    """However long the first one is silent: its machine may only be cut off."""

    async def test(world: World) -> None:
        await world.daemon("host-a")
        second = Daemon(world, "host-a", "s2", machine="another")
        await world.pass_time(timedelta(minutes=2))
        assert world.servers[0].is_unreachable("host-a")
        assert (await second.send()).status_code == 409
        assert await forget(world) == 200
        assert (await second.send()).status_code == 200

    run(test)


def test_server_that_loses_its_lease_gives_no_host_away() -> None:
    """Its daemon may carry out an impact, and finds another server within seconds."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        await first.take()
        second = Daemon(world, "host-a", "s2", machine="another")
        second.server = first.server = world.servers[1]
        await world.store.expire("server/server-1")
        await world.settle()
        assert world.servers[1].is_unreachable("host-a")
        assert (await second.send()).status_code == 409
        assert (await first.send()).json()["cancel"] == []

    run(test)


def test_restarted_daemon_replaces_its_last_run_at_once() -> None:
    """A machine lets one daemon run, so the last one has ended. The new one gets its impact when
    its report counts: a clone of the machine would be noticed before.
    """

    async def test(world: World) -> None:
        old = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        first = await old.take()
        new = await world.daemon("host-a", reported("web-0"), session="s2", server=1)
        assert not world.servers[0].is_unreachable("host-a")
        assert (await new.work())["impacts"] == []
        await world.pass_time(MERGE_AFTER, new)
        again = await new.take()
        assert (again["event_id"], again["tries"]) == (first["event_id"], 2)
        assert await new.finish(again)
        assert len(await world.history("impacted")) == 1
        assert await world.history("impact-failed") == []

    run(test)


def test_late_request_of_the_last_run_is_refused_and_changes_nothing() -> None:
    """It was on its way when its daemon ended, and may arrive twice."""

    async def test(world: World) -> None:
        old = await world.daemon("host-a", reported("web-0"))
        new = Daemon(world, "host-a", "s2")
        await new.work(number=1)
        for number in (8, 8, 7):
            refused = await old.send(number=number)
            assert (refused.status_code, refused.json()["error"]) == (409, "host_taken")
        assert not world.servers[0].is_unreachable("host-a")
        await new.work(number=2)

    run(test)


async def clone(world: World) -> tuple[Daemon, Daemon]:
    """Daemons on two machines with one id, after both have sent requests."""
    first = await world.daemon("host-a", reported("web-0"))
    second = Daemon(world, "host-a", "s2")
    second.server = world.servers[1]
    await second.work(number=1)
    assert (await first.send(number=5)).status_code == 409
    assert (await first.send(number=6)).status_code == 409
    await world.settle()
    return first, second


def test_machines_with_one_id_are_both_refused(caplog: pytest.LogCaptureFixture) -> None:
    """They act on different VMs, and nothing tells which one is right."""

    async def test(world: World) -> None:
        for daemon in await clone(world):
            refused = await daemon.send(number=9)
            assert (refused.status_code, refused.json()["error"]) == (409, "host_taken")
            assert refused.json()["message"].startswith(
                "2 machines with one id run a daemon for host-a, and none of them is served"
            )
        shown = await show(world)
        assert (shown["state"], shown["daemon"]["is_connected"]) == ("unreachable", False)
        assert shown["daemon"]["problem"] == (
            "2 machines with one id run its daemon; none is served"
        )
        assert details(await world.history("updated"))[-1] == (
            "2 machines with the same id run the daemon of host-a"
        )

    run(test)
    assert "no daemon is served" in [each.message for each in caplog.records]


def test_cloned_machine_is_served_again_when_the_other_stays_away() -> None:
    """Requests of both arrive at different servers, so the record says when each has sent some."""

    async def test(world: World) -> None:
        first, second = await clone(world)
        for number in range(10, 40):
            assert (await second.send(number=number)).status_code == 409
            assert (await first.send(number=number)).status_code == 409
            await world.clock.advance(SECOND)
            await world.settle()
        for number in range(40, 49):
            assert (await first.send(number=number)).status_code == 409
            await world.clock.advance(SECOND)
            await world.settle()
        await world.clock.advance(6 * SECOND)
        await first.work(number=60)
        await world.settle()
        assert not world.servers[1].is_unreachable("host-a")
        assert (await second.send(number=60)).status_code == 409
        assert (await second.send(number=61)).status_code == 409
        await world.settle()
        assert world.servers[1].is_unreachable("host-a"), "it sends requests again"

    run(test)


def test_machines_with_one_id_are_refused_although_each_asks_another_server() -> None:
    """Each server has refused a request of the first one, which could have come late."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = Daemon(world, "host-a", "s2")
        await second.work(number=1)
        for server, number in zip(world.servers, (2, 3), strict=True):
            first.server = server
            assert (await first.send(number=number)).status_code == 409
            await world.settle()
        assert (await show(world))["daemon"]["problem"] == (
            "2 machines with one id run its daemon; none is served"
        )

    run(test)


def test_three_machines_with_one_id_are_all_refused() -> None:
    """Each of them replaces another one, so that none is the last that was replaced."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        others = [Daemon(world, "host-a", session) for session in ("s2", "s3")]
        for number in range(2, 5):
            statuses = [
                (await daemon.send(number=number)).status_code for daemon in (first, *others)
            ]
        assert statuses == [409, 409, 409]
        assert (await show(world))["daemon"]["problem"] == (
            "3 machines with one id run its daemon; none is served"
        )

    run(test)


def test_host_of_an_earlier_version_belongs_to_the_machine_that_connects_first() -> None:
    """Its record names no machine. An upgrade must not ask operators to forget every host."""

    async def test(world: World) -> None:
        key, vms = HOST_KEY.format("host-a"), {vm_id("web-0"): (GIB, True)}
        value = {"host": "host-a", "session": "s0", "server": "gone", "since": NOON, "vms": vms}
        record = msgspec.json.encode({"format": 1, "value": value | {"number": 7}})
        await world.store.commit([Write(key, record, 0)])
        await world.settle()
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.pass_time(MERGE_AFTER, daemon)
        await daemon.report(reported("web-0"))
        await world.restart("web-0")
        assert await daemon.finish(await daemon.take())
        another = Daemon(world, "host-a", "s2", machine="another")
        assert (await another.send()).status_code == 409

    run(test)


def test_operator_ends_the_state_of_cloned_machines() -> None:
    async def test(world: World) -> None:
        first, second = await clone(world)
        assert await forget(world) == 200
        first.machine = "a new one"
        await first.work(number=20)
        assert (await second.send(number=20)).status_code == 409

    run(test)


def test_report_of_a_clone_removes_no_vms() -> None:
    """The clone has no VMs, or others. It is refused before its report counts."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = Daemon(world, "host-a", "s2")
        empty = {"vms": [], "memory_bytes": 0}
        for number in range(1, 3):
            work = await second.work(inventory=empty, number=number)
            assert not work["is_merged"]
            assert (await first.send(number=number)).status_code == 409
            await world.pass_time(SECOND)
        assert (await second.send(inventory=empty, number=3)).status_code == 409
        assert world.servers[0].vm("web-0").host == "host-a"

    run(test)


EMPTY = {"vms": [], "memory_bytes": 0}


def test_report_of_a_restarted_daemon_counts_after_ten_seconds() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        new = Daemon(world, "host-a", "s2")
        assert not (await new.work(inventory=EMPTY))["is_merged"]
        await world.pass_time(9 * SECOND, new)
        assert not (await new.work(inventory=EMPTY))["is_merged"]
        await world.pass_time(SECOND, new)
        assert (await new.work(inventory=EMPTY))["is_merged"]
        await world.settle()
        assert "web-0" not in world.servers[0].board.vms

    run(test)


def test_report_of_a_clone_that_restarts_does_not_count_sooner() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        new = Daemon(world, "host-a", "s2")
        await new.work(is_leaving=True)
        await world.pass_time(SECOND)
        again = Daemon(world, "host-a", "s3")
        assert not (await again.work(inventory=EMPTY))["is_merged"]
        assert "web-0" in world.servers[0].board.vms

    run(test)


def test_report_of_a_clone_does_not_count_sooner_if_the_server_of_the_original_is_lost() -> None:
    """The daemon of the original looks for another server."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.expire(world.servers[0])
        clone = Daemon(world, "host-a", "s2")
        clone.server = world.servers[1]
        assert not (await clone.work(inventory=EMPTY))["is_merged"]
        assert "web-0" in world.servers[1].board.vms

    run(test)


class Ahead:
    """A clock that is ahead of that of the other servers, by less than they tolerate."""

    jump_seconds = 0.0

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._by = clock, timedelta(seconds=CLOCK_SKEW_SECONDS_MAX - 0.1)

    def now(self) -> datetime:
        return self._clock.now() + self._by

    async def sleep_until(self, time: datetime) -> None:
        await self._clock.sleep_until(time - self._by)


def test_report_of_a_clone_does_not_count_sooner_at_a_server_whose_clock_is_ahead() -> None:
    """The daemon of the original has 5 seconds to send a request."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        ahead = Server(world.store, Ahead(world.clock), "server-3")
        await ahead.start()
        async with ahead.client:
            await world.settle()
            clone = Daemon(world, "host-a", "s2")
            await clone.work(inventory=EMPTY)
            clone.server = ahead
            for _ in range(5):
                await clone.work(inventory=EMPTY)
                await world.pass_time(SECOND)
            assert "web-0" in world.servers[0].board.vms
            await stop(ahead)

    run(test)


def test_server_whose_watch_is_late_takes_no_host_from_another_server() -> None:
    """It does not know the lease of a server that has just started: the commit compares it."""

    async def test(world: World) -> None:
        late, store = await start_slow_server(world, "server-4")
        store.watches.clear()
        new, _ = await start_slow_server(world, "server-5")
        daemon = Daemon(world, "host-a")
        daemon.server = new
        await daemon.work(number=1)
        daemon.server = late
        refused = await daemon.send(number=1)  # a copy of the same request, which came late
        assert refused.status_code == 409
        assert refused.json()["message"] == "a later request of the daemon of host-a has arrived"
        store.watches.set()
        await world.settle()
        record = late.hosts.managed.find("host-a")
        assert record is not None
        assert record.server == "server-5"
        await stop(late, new)

    run(test)


def test_server_that_loses_its_lease_while_it_commits_takes_no_host() -> None:
    """It held the lease when it decided: the commit compares it."""

    async def test(world: World) -> None:
        late, store = await start_slow_server(world, "server-4")
        daemon, key = Daemon(world, "host-a"), HOST_KEY.format("host-a")
        daemon.server = late
        held = store.hold_next(key)
        request = asyncio.create_task(daemon.send())
        await world.settle()
        await world.store.expire("server/server-4")
        held.set()
        assert (await request).status_code == 503
        assert (await world.store.get(key)).value is None
        await stop(late)

    run(test)


def test_first_report_of_a_host_may_be_some_seconds_old() -> None:
    """It was listed before the daemon had connected, and nothing has been moved there since."""

    async def test(world: World) -> None:
        for host, age, is_merged in (("host-a", 14, True), ("host-b", 16, False)):
            inventory = {"vms": [], "memory_bytes": 0, "age_seconds": age}
            work = await Daemon(world, host).work(inventory=inventory)
            assert work["is_merged"] is is_merged

    run(test)


# --- a host that cannot act


def test_impacts_wait_while_the_daemon_says_that_it_cannot_act() -> None:
    """Without libvirt it can carry out nothing, but it is there, and says why."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await daemon.work(problem="libvirt does not answer")
        await world.settle()
        revision = world.servers[0].engine.records.get("hostd/host-a/").revision
        await world.restart("web-0")
        for _ in range(20):
            work = await daemon.work(problem="libvirt does not answer")
            assert work["impacts"] == []
            await world.clock.advance(SECOND)
            await world.settle()
        assert world.servers[0].engine.records.get("hostd/host-a/").revision == revision
        shown = await show(world)
        assert (shown["state"], shown["daemon"]["is_connected"]) == ("unreachable", True)
        assert shown["daemon"]["problem"] == "libvirt does not answer"

        assert await daemon.finish(await daemon.take())
        assert (await show(world))["daemon"]["problem"] == ""
        assert details(await world.history("updated")) == [
            "daemon of host-a connected",
            "daemon of host-a cannot act: libvirt does not answer",
            "daemon of host-a can act again",
        ]

    run(test)


def test_failed_try_of_a_daemon_that_cannot_act_does_not_count() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.restart("web-0")
        impact = await daemon.take()
        daemon.running[0]["result"] = {"problem": "libvirt: connection lost"}
        await daemon.work(problem="libvirt does not answer")
        await world.settle()
        assert await world.history("impact-failed") == []
        daemon.running = []
        again = await daemon.take()
        assert (again["event_id"], again["tries"]) == (impact["event_id"], 2)

    run(test)


# --- when a daemon counts as lost


def test_daemon_whose_request_is_being_processed_is_not_silent() -> None:
    """It waits for the response, and cannot send anything meanwhile."""

    async def test(world: World) -> None:
        server, store = await start_slow_server(world, "server-4")
        daemon = Daemon(world, "host-a")
        daemon.server = server
        await daemon.report(reported("web-0"))
        store.commits.clear()
        request = asyncio.create_task(daemon.work(inventory={"vms": [], "memory_bytes": 0}))
        await world.pass_time(20 * SECOND)
        assert not request.done()
        assert not server.is_unreachable("host-a")
        store.commits.set()
        await request
        await world.pass_time(14 * SECOND)
        assert not server.is_unreachable("host-a")
        await world.pass_time(2 * SECOND)
        assert server.is_unreachable("host-a")
        await stop(server)

    run(test)


def test_report_does_not_wait_for_an_apply_of_the_fleet() -> None:
    """An apply of a large fleet takes long. The report is sent again, and the work goes on."""

    async def test(world: World) -> None:
        server, store = await start_slow_server(world, "server-4")
        daemon = Daemon(world, "host-a")
        daemon.server = server
        await daemon.report()
        fleet = parse(b"scopes: [{name: old, vms: [{name: old-0, host: host-z}]}]", "fleet")
        store.commits.clear()
        apply = asyncio.create_task(server.operations.apply(fleet, by="ann"))
        await world.settle()

        async def no_commands() -> Commands:
            return []

        with pytest.raises(Unavailable, match="the fleet is being changed"):
            await server.operations.merge(no_commands, by="host-a")
        store.commits.set()
        assert (await apply).added == ("old",)
        assert (await daemon.report(reported("web-0"))) == []
        assert "web-0" in server.board.vms
        await stop(server)

    run(test)


def test_daemon_that_sends_something_before_it_is_recorded_as_lost_keeps_its_impacts() -> None:
    """The commit that says so is late, and another one of the same host comes first."""

    async def test(world: World) -> None:
        server, store = await start_slow_server(world, "server-4")
        daemon = Daemon(world, "host-a")
        daemon.server = server
        await daemon.report(reported("web-0"))
        await world.restart("web-0")
        await daemon.take()
        await world.pass_time(14 * SECOND)
        held = store.hold_next("hostd/host-a/")
        await world.pass_time(2 * SECOND)
        await daemon.report(reported("web-0"), reported("web-1"))
        held.set()
        await world.settle()
        assert not server.is_unreachable("host-a")
        (impact,) = server.scope("web-0").impacts
        assert (impact.claimed_by, impact.tries) == ("server-4", 1)
        updates = details(await world.history("updated"))
        assert not any("unreachable" in update for update in updates)
        await stop(server)

    run(test)
