"""Hosts over the API: maintenance while a daemon is away, and VMs that cannot move."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

from forewarn.core.event import EventType
from forewarn.core.timing import DURATION
from forewarn.platform.simulated import SimulatedPlatform
from tests.builders import guid
from tests.unit.engine.hostd_world import Daemon, Server, SlowStore, World, reported, run

AWAY = timedelta(seconds=20)
LOCAL_DISK = "disk vdb is on a local file system (ext4): /var/lib/libvirt/images/web-0.img"


async def ask(world: World, method: str, path: str, body: Any = None, key: str = "") -> Any:
    headers = {"authorization": f"Bearer fw_root_{world.secret}"}
    headers |= {"idempotency-key": key} if key else {}
    client = world.servers[0].client
    response: httpx.Response = await client.request(
        method, f"/api/v1/{path}", json=body, headers=headers
    )
    return response.json()


async def lose_host_a(world: World) -> None:
    """The daemon of host-a falls silent; that of host-b works on."""
    await world.daemon("host-a", reported("web-0", scope="web"))
    other = await world.daemon("host-b", reported("web-1", scope="web"))
    await world.pass_time(AWAY, other)
    assert world.servers[0].is_unreachable("host-a")


def test_maintenance_of_a_host_whose_daemon_is_away_is_refused() -> None:
    """Its VMs may be unable to read the event, and the impact would wait for the daemon."""

    async def test(world: World) -> None:
        await lose_host_a(world)
        refused = await ask(world, "POST", "hosts/host-a/maintain", {"type": "Reboot"})
        assert (refused["error"], refused["facts"]) == ("daemon_away", {"hosts": ["host-a"]})
        away = "host-a: its daemon has been away since 2030-01-31T12:00:"
        assert refused["message"].startswith(away)
        assert world.servers[0].scope("web").events == ()
        announced = await ask(world, "POST", "hosts/host-b/maintain", {"type": "Reboot"})
        assert [event["resources"] for event in announced["events"]] == [["web-1"]]

    run(test)


@pytest.mark.parametrize("path", ["hosts/host-a/maintain", "campaigns"])
def test_refusal_because_of_a_daemon_is_believed_only_after_reading_the_store(path: str) -> None:
    """The daemon is back at another server, and the watch of this one is late."""

    async def test(world: World) -> None:
        await lose_host_a(world)
        store = SlowStore(world.store)
        late = Server(store, world.clock, "server-4")  # type: ignore[arg-type]
        await late.start()
        await world.settle()
        store.watches.clear()
        await Daemon(world, "host-a").report(reported("web-0", scope="web"))
        assert late.is_unreachable("host-a")
        body = {"type": "Reboot"} | ({} if "hosts" in path else {"hosts": ["host-a"]})
        headers = {"authorization": f"Bearer fw_root_{world.secret}"}
        request = late.client.post(f"/api/v1/{path}", json=body, headers=headers)
        responding = asyncio.ensure_future(request)
        await world.settle()
        store.watches.set()
        assert (await responding).status_code == 202, responding.result().text
        await late.stop()
        await late.client.aclose()
        await late.engine.close()

    run(test)


def test_maintenance_is_announced_if_the_operator_allows_unreachable_hosts() -> None:
    async def test(world: World) -> None:
        await lose_host_a(world)
        body = {"type": "Reboot", "allow_unreachable": True}
        announced = await ask(world, "POST", "hosts/host-a/maintain", body)
        assert [event["resources"] for event in announced["events"]] == [["web-0"]]

    run(test)


def test_retried_maintenance_is_not_refused_because_the_daemon_left_meanwhile() -> None:
    """The reply was lost: the events are announced, and the retry has to say so."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0", scope="web"))
        body = {"type": "Reboot"}
        first = await ask(world, "POST", "hosts/host-a/maintain", body, key="k1")
        await world.pass_time(AWAY)
        assert world.servers[0].is_unreachable("host-a")
        assert await ask(world, "POST", "hosts/host-a/maintain", body, key="k1") == first

    run(test)


async def run_others(world: World) -> None:
    """host-b runs a copy of web-0, host-c a VM that the fleet cannot read; neither has others."""
    await world.daemon("host-a", reported("web-0", scope="web"))
    await world.daemon("host-b", reported("web-0", scope="web"))
    await world.daemon("host-c", reported("web-2", id="nonsense"))


OTHERS = [
    "host-b runs web-0, which the fleet does not have there: it is not notified",
    "host-c has VMs that are not accepted, and that may run: they are not notified",
]


def test_operations_on_a_host_that_runs_other_vms_than_the_fleet_has_there_say_so() -> None:
    """Without events, an operator would read that the host is empty."""

    async def test(world: World) -> None:
        await run_others(world)
        body = {"type": "Reboot"}
        for operation in ("maintain", "degrade", "fail"):
            path = f"hosts/host-{{}}/{operation}"
            sent = body if operation == "maintain" else {}
            for host, warning in zip("bc", OTHERS, strict=True):
                response = await ask(world, "POST", path.format(host), sent)
                assert response == {"events": [], "warnings": [warning]}
        assert (await ask(world, "POST", "hosts/host-a/maintain", body))["warnings"] == []

    run(test)


def test_campaign_names_hosts_that_run_other_vms_than_the_fleet_has_there() -> None:
    async def test(world: World) -> None:
        await run_others(world)
        body = {"type": "Reboot", "hosts": ["host-*"]}
        planned = await ask(world, "POST", "campaigns", body | {"plan": True})
        assert planned["warnings"] == OTHERS
        assert (await ask(world, "POST", "campaigns", body))["warnings"] == OTHERS

    run(test)


def test_several_other_vms_of_a_host_are_counted() -> None:
    async def test(world: World) -> None:
        vms = [reported(f"web-{number}", scope="web") for number in range(7)]
        await world.daemon("host-a", *vms)
        await world.daemon("host-b", *vms)
        (warning,) = (await ask(world, "POST", "hosts/host-b/maintain", {"type": "Reboot"}))[
            "warnings"
        ]
        assert warning == (
            "host-b runs web-0, web-1, web-2, web-3, web-4 and 2 more VMs, which the fleet does not"
            " have there: they are not notified"
        )

    run(test)


def test_request_is_recognized_whose_server_died_before_it_responded() -> None:
    """The events are announced, and no response is stored: another server repeats the request."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0", scope="web"))
        first, other = (world.servers[0].operations.repeating(guid(number)) for number in (1, 2))
        assert not first.is_repeated("host-a")
        await first.maintain("host-a", type=EventType.REBOOT, by="ann")
        assert (first.is_repeated("host-a"), other.is_repeated("host-a")) == (True, False)

    run(test)


def test_campaign_names_hosts_whose_daemon_is_away_and_is_refused() -> None:
    async def test(world: World) -> None:
        await lose_host_a(world)
        body = {"type": "Reboot", "hosts": ["host-*"]}
        (away,) = (await ask(world, "POST", "campaigns", body | {"plan": True}))["plan"][
            "unreachable"
        ]
        assert away["host"] == "host-a"
        assert away["why"].startswith("its daemon has been away since")
        refused = await ask(world, "POST", "campaigns", body)
        assert (refused["error"], refused["facts"]) == ("daemon_away", {"hosts": ["host-a"]})
        started = await ask(world, "POST", "campaigns", body | {"allow_unreachable": True})
        assert started["campaign"]["hosts"]["total"] == 2

    run(test)


@pytest.mark.parametrize("is_simulated", [True, False])
def test_host_that_was_left_running_counts_as_away_unless_the_server_acts_there(
    is_simulated: bool,
) -> None:
    """Its daemon is gone: impacts fail where the servers only simulate them."""

    async def test(world: World) -> None:
        await lose_host_a(world)
        if is_simulated:
            world.servers[0].hosts.local = SimulatedPlatform(
                world.clock, durations=DURATION, hosts=lambda: ()
            )
        await ask(world, "DELETE", "hosts/host-a/daemon?still_running=true")
        campaign = {"type": "Reboot", "hosts": ["host-a"]}
        planned = await ask(world, "POST", "campaigns", campaign | {"plan": True})
        started = await ask(world, "POST", "campaigns", campaign)
        announced = await ask(world, "POST", "hosts/host-a/maintain", {"type": "Reboot"})
        why = "its daemon was forgotten; what may run there is left running"
        if is_simulated:
            assert planned["plan"]["unreachable"] == [{"host": "host-a", "why": why}]
            assert (started["error"], announced["error"]) == ("daemon_away", "daemon_away")
            assert announced["message"].startswith(f"host-a: {why}; ")
            body = {"type": "Reboot", "allow_unreachable": True}
            announced = await ask(world, "POST", "hosts/host-a/maintain", body)
        else:
            assert planned["plan"]["unreachable"] == []
            assert started["campaign"]["hosts"]["total"] == 1
        assert [event["resources"] for event in announced["events"]] == [["web-0"]]

    run(test)


MIGRATION = {"type": "Freeze", "cause": "live-migration"}
NOT_MOVED = (
    "VMs of host-a are not moved: it was forgotten and left running; expected its daemon, or"
    " `forewarn host forget host-a --fenced` when they are off"
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("vms/web-0/redeploy", {}),
        ("hosts/host-a/maintain", {"type": "Redeploy", "allow_unreachable": True}),
        ("hosts/host-a/maintain", MIGRATION),
        ("hosts/host-a/degrade", {}),
        ("campaigns", {"type": "Redeploy", "hosts": ["host-*"], "allow_unreachable": True}),
        ("campaigns", {"hosts": ["host-a"], **MIGRATION}),
    ],
)
def test_vms_of_a_host_that_was_left_running_are_not_moved(path: str, body: Any) -> None:
    """The platform of the server would start elsewhere what may run there."""

    async def test(world: World) -> None:
        await lose_host_a(world)
        await ask(world, "DELETE", "hosts/host-a/daemon?still_running=true")
        refused = await ask(world, "POST", path, body)
        assert (refused["error"], refused["message"]) == ("refused", NOT_MOVED)
        assert world.servers[0].scope("web").events == ()

        await ask(world, "DELETE", "hosts/host-a/daemon?fenced=true")
        assert "error" not in await ask(world, "POST", path, body)

    run(test)


def test_move_that_was_announced_before_its_host_was_left_running_fails() -> None:
    async def test(world: World) -> None:
        await lose_host_a(world)
        body = {"type": "Redeploy", "allow_unreachable": True}
        (event,) = (await ask(world, "POST", "hosts/host-a/maintain", body))["events"]
        await ask(world, "DELETE", "hosts/host-a/daemon?still_running=true")
        await ask(world, "POST", f"events/{event['id']}/approve", {})
        await world.settle()
        assert [each.local.asked for each in world.servers] == [[], []]
        (entry,) = await world.history("impact-failed")
        assert entry.detail.endswith(NOT_MOVED)

    run(test)


def test_host_that_was_fenced_is_not_away() -> None:
    """Its VMs are off: an event of them ends nothing that runs."""

    async def test(world: World) -> None:
        await lose_host_a(world)
        await ask(world, "DELETE", "hosts/host-a/daemon?fenced=true")
        announced = await ask(world, "POST", "hosts/host-a/maintain", {"type": "Reboot"})
        assert [event["resources"] for event in announced["events"]] == [["web-0"]]

    run(test)


def test_vms_that_cannot_move_are_shown_with_the_reason() -> None:
    async def test(world: World) -> None:
        await world.daemon(
            "host-a", reported("web-0", scope="web", unmovable=LOCAL_DISK), reported("web-1")
        )
        await world.daemon("host-b", reported("db-0", unmovable="a\x1b[31m device"))
        host = await ask(world, "GET", "hosts/host-a")
        assert host["unmovable"] == [{"vm": "web-0", "why": LOCAL_DISK}]
        hosts = (await ask(world, "GET", "hosts"))["hosts"]
        assert hosts[1]["unmovable"] == [{"vm": "db-0", "why": "a [31m device"}]

    run(test)


def test_plan_of_a_move_names_the_vms_that_cannot() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0", unmovable=LOCAL_DISK))
        await world.daemon("host-b", reported("web-1"))
        unmovable = [{"host": "host-a", "vm": "web-0", "why": LOCAL_DISK}]
        for type_, cause, listed in (
            ("Redeploy", "maintenance", unmovable),
            ("Freeze", "live-migration", unmovable),
            ("Freeze", "maintenance", []),
            ("Reboot", "maintenance", []),
        ):
            body = {"type": type_, "cause": cause, "hosts": ["host-*"], "plan": True}
            assert (await ask(world, "POST", "campaigns", body))["plan"]["unmovable"] == listed

    run(test)


def test_vm_that_can_move_again_is_no_longer_listed() -> None:
    """And the same report again writes nothing."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", unmovable=LOCAL_DISK))
        record = world.servers[0].hosts.managed.find("host-a")
        await daemon.report(reported("web-0", unmovable=LOCAL_DISK))
        assert world.servers[0].hosts.managed.find("host-a") is record
        await daemon.report(reported("web-0"))
        assert (await ask(world, "GET", "hosts/host-a"))["unmovable"] == []

    run(test)


def test_move_request_has_the_method_of_the_scope() -> None:
    """The daemon knows no policies."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        await world.daemon("host-b")
        fleet = await ask(world, "GET", "fleet")
        fleet["scopes"][0]["policy"] = {"redeploy": "live-only"}
        await ask(world, "PUT", "fleet", fleet)
        assert (await ask(world, "GET", "scopes/web"))["policy"]["redeploy"] == "live-only"
        await ask(world, "POST", "vms/web-0/redeploy")
        await world.settle()
        impact = await daemon.take()
        assert (impact["method"], impact["targets"]) == ("live-only", ["host-b"])
        await daemon.finish(impact, problem="web-0 cannot leave host-a", is_final=True)
        assert len(await world.history("impact-failed")) == 1
        assert len(await world.history("failed")) == 1

    run(test)


def test_freeze_for_a_live_migration_has_targets() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", scope="web"))
        other = await world.daemon("host-b")
        body = {"type": "Freeze", "cause": "live-migration"}
        (event,) = (await ask(world, "POST", "hosts/host-a/maintain", body))["events"]
        await ask(world, "POST", f"events/{event['id']}/approve", {})
        await world.settle()
        impact = await daemon.take()
        assert (impact["type"], impact["method"]) == ("Freeze", "live-only")
        assert impact["targets"] == ["host-b"]
        await other.report(reported("web-0", scope="web"))
        await daemon.finish(impact, host="host-b", detail="migrated live to host-b")
        assert world.servers[0].vm("web-0").host == "host-b"

    run(test)
