"""Campaigns over the API: plan, start, show, list, pause, resume, cancel, and errors."""

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.campaign.model import (
    Campaign,
    CampaignSpec,
    EventRef,
    HostPhase,
    HostRun,
    operation_id_of,
)
from forewarn.campaign.rules import reconcile, set_announced
from forewarn.core.command import Approve, Maintain
from forewarn.core.event import EventType, Status
from forewarn.core.scheduling import event_id_of
from forewarn.engine.managed_hosts import HOST_KEY, MANAGED_HOST, HostedVm, ManagedHost
from forewarn.engine.turns import yield_once
from forewarn.store.base import Record
from forewarn.web.control.routes.campaign import HostRunViews, NewCampaign, view_campaign
from forewarn.web.control.routes.host import Maintenance
from tests.builders import NOON, guid, maintain, scope_of, vm
from tests.builders import run as after
from tests.unit.engine import hostd_world
from tests.unit.web.control.routes.test_host import ask, lose_host_a
from tests.unit.web.control_world import World, main
from tests.work_count import work_of_turns

PATH = "/api/v1/campaigns"
BODY: dict[str, object] = {"type": "Reboot", "hosts": ["host-*"]}


async def start(world: World, **more: object) -> Any:
    return (await world.json("POST", PATH, json=BODY | more))["campaign"]


async def show(world: World) -> Any:
    return await world.json("GET", f"{PATH}/c1")


def test_started_campaign_is_shown_with_everything_known() -> None:
    """Nothing has been done yet: the worker starts the first host."""

    async def act(world: World) -> None:
        campaign = await start(world, name="kernel", max_hosts=2, max_unavailable="50%")

        assert (campaign["id"], campaign["name"], campaign["state"]) == ("c1", "kernel", "running")
        assert campaign["max_unavailable"] == "50%"
        assert campaign["hosts"] == {
            "total": 3,
            "done": 0,
            "in_progress": 0,
            "waiting": 3,
            "skipped": 0,
            "failed": 0,
        }
        assert campaign["estimated_end"] == "2030-01-31T12:50:00Z", "two waves"
        assert (campaign["pause_reason"], campaign["paused_by_failure"]) == ("", False)
        assert (campaign["in_progress"], campaign["skipped_hosts"]) == ([], [])
        assert await world.json("GET", f"{PATH}/C1") == campaign

    main(act)


def test_waves_are_done_when_none_of_their_hosts_is_left() -> None:
    """Planned are host-a with host-c, which has no VMs, and then host-b."""

    async def act(world: World) -> None:
        campaigns = world.service.campaigns

        async def finish(host: str) -> None:
            """As if it had no VMs: nothing is announced, and so all of it is over."""
            run = next(run for run in campaigns.find("c1").in_progress if run.host == host)
            await campaigns.apply("c1", partial(set_announced, run=run))
            await campaigns.apply("c1", reconcile)

        def progress(shown: Any) -> Any:
            return shown["waves"], shown["waves_done"], [one["host"] for one in shown["done_hosts"]]

        assert progress(await start(world, max_hosts=2)) == (2, 0, [])
        await campaigns.apply("c1", reconcile)
        await finish("host-c")
        assert progress(await show(world)) == (2, 0, ["host-c"])
        await finish("host-a")
        assert progress(await show(world)) == (2, 1, ["host-c", "host-a"])
        assert (await show(world))["estimated_end"] == "2030-01-31T12:25:00Z", "not now"
        listed = (await world.json("GET", PATH))["campaigns"]
        assert [progress(each) for each in listed] == [(2, None, [])]
        await finish("host-b")
        assert progress(await show(world)) == (2, 2, ["host-c", "host-a", "host-b"])

    main(act)


def test_plan_has_the_waves_and_starts_nothing() -> None:
    """host-a and host-b have two update domains of the same scopes; host-c has no VMs."""

    async def act(world: World) -> None:
        response = await world.json("POST", PATH, json=BODY | {"max_hosts": 3, "plan": True})

        waves = [["host-a", "host-c"], ["host-b"]]
        plan = {"waves": waves, "too_large": [], "waiting": [], "total": 3}
        plan |= {"unreachable": [], "unmovable": []}
        assert response == {"campaign": None, "plan": plan, "warnings": []}
        assert (await world.json("GET", PATH))["campaigns"] == []

    main(act)


TIGHT = b"""
scopes:
  - name: web
    kind: scale-set
    policy: {max_unavailable: 40%}
    vms: [{name: a, host: host-a}, {name: b, host: host-a}, {name: c, host: host-b}]
"""


def test_host_that_is_too_large_is_planned_as_such_and_refused() -> None:
    """40 % of three VMs is one; host-a has two."""

    async def act(world: World) -> None:
        why = "host-a alone takes 2 VMs of web down at once; its max_unavailable is 1"
        plan = (await world.json("POST", PATH, json=BODY | {"plan": True}))["plan"]

        assert plan["too_large"] == [{"host": "host-a", "scope": "web", "why": why}]
        assert (plan["waves"], plan["total"]) == ([["host-b"]], 2)
        assert await world.error("POST", PATH, json=BODY) == (409, "over_budget", why)
        assert (await world.json("GET", "/api/v1/scopes/web"))["policy"]["max_unavailable"] == "40%"

    main(act, TIGHT)


async def announce(world: World) -> str:
    """Announce host-a in web, as the worker does; returns the id of the event."""
    campaigns = world.service.campaigns
    campaign = await campaigns.apply("c1", reconcile)
    (run,) = campaign.in_progress
    operation_id = operation_id_of(campaign, "host-a")
    command = Maintain(host="host-a", operation_id=operation_id, type=EventType.REBOOT)
    await world.engine.submit("web", command, by="test")
    event_id = event_id_of(command.operation_id, "web", 0)
    events = (EventRef("web", event_id),)
    await campaigns.apply("c1", partial(set_announced, run=run, events=events))
    return event_id


def test_host_in_progress_shows_what_it_waits_for_and_until_when() -> None:
    """First its notice, then the impact, then the health command."""

    async def act(world: World) -> None:
        await start(world, hosts=["host-a"])
        campaigns = world.service.campaigns
        await campaigns.apply("c1", reconcile)
        seen = [await show(world)]
        event_id = await announce(world)
        seen.append(await show(world))
        await world.engine.submit("web", Approve(event_ids=(event_id,)), by="test")
        seen.append(await show(world))
        await world.json("POST", f"/api/v1/events/{event_id}/complete")
        await campaigns.apply("c1", partial(reconcile, health_limit=timedelta(seconds=60)))
        seen.append(await show(world))

        runs = [campaign["in_progress"][0] for campaign in seen]
        assert [(run["phase"], run["waiting_for"], run["until"]) for run in runs] == [
            ("ordered", "its events", None),
            ("announced", "1 event to start", "2030-01-31T12:15:00Z"),
            ("announced", "1 event to end", "2030-01-31T12:10:00Z"),
            ("checking", "the health command", "2030-01-31T12:01:00Z"),
        ]

    main(act)


def test_requested_duration_decides_when_an_impact_should_end() -> None:
    async def act(world: World) -> None:
        await start(world, hosts=["host-a"], duration_seconds=3600)
        await world.engine.submit("web", Approve(event_ids=(await announce(world),)), by="test")

        (run,) = (await show(world))["in_progress"]
        assert run["until"] == "2030-01-31T13:00:00Z"

    main(act)


async def start_without_daemon(world: hostd_world.World) -> str:
    """Announce host-a, whose daemon is away; returns the reason of that."""
    await lose_host_a(world)
    await world.poll("web")
    body = BODY | {"hosts": ["host-a"], "allow_unreachable": True}
    await ask(world, "POST", "campaigns", body)
    await world.settle()
    (problem,) = (await ask(world, "GET", "hosts/host-a"))["problems"]
    return str(problem["message"])


async def progress(world: hostd_world.World) -> tuple[str, bool, bool]:
    """What its host waits for, and whether an end is estimated, of that and of the campaign."""
    campaign = await ask(world, "GET", "campaigns/c1")
    (listed,) = (await ask(world, "GET", "campaigns"))["campaigns"]
    (host,) = campaign["in_progress"]
    assert (listed["in_progress"], listed["estimated_end"]) == ([host], campaign["estimated_end"])
    return host["waiting_for"], bool(host["until"]), bool(campaign["estimated_end"])


def test_host_whose_daemon_is_away_shows_that_and_no_estimate() -> None:
    """Its VMs cannot read the event, and the impact would wait: no time is known."""

    async def act(world: hostd_world.World) -> None:
        reason = await start_without_daemon(world)
        away = f"the daemon of host-a: {reason}"
        assert reason.startswith("its daemon has been away since 2030-01-31T12:00:")
        assert await progress(world) == (away, False, False)
        await world.pass_time(timedelta(minutes=16))
        (event,) = (await ask(world, "GET", "events"))["events"]
        assert event["status"] == "Started"
        assert await progress(world) == (away, False, False)

        daemon = hostd_world.Daemon(world, "host-a")
        await daemon.work()
        waiting_for, *estimates = await progress(world)
        assert waiting_for.startswith("a report of host-a: its daemon is connected, and has not")
        assert estimates == [False, False]
        await daemon.report(hostd_world.reported("web-0", scope="web"))
        assert await progress(world) == ("1 event to end", True, True)

    hostd_world.run(act)


def test_host_whose_vms_cannot_read_shows_that_and_no_estimate() -> None:
    """Its event does not start at NotBefore, however soon that is."""

    async def act(world: hostd_world.World) -> None:
        daemon = await world.daemon("host-a", hostd_world.reported("web-0", scope="web"))
        await world.poll("web")
        await ask(world, "POST", "campaigns", BODY | {"hosts": ["host-a"]})
        await world.settle()
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(timedelta(minutes=2), daemon)

        assert await progress(world) == (
            (
                "host-a: guests there have had no response from a metadata server since"
                " 2030-01-31T12:00:00Z"
            ),
            False,
            False,
        )

    hostd_world.run(act, is_confirming=True)


def set_in_progress(world: World, name: str, hosts: int) -> tuple[HostRun, ...]:
    """Publish a set with a VM on each of these hosts, each with an event that has started."""
    members = tuple(vm(f"{name}-{n}", domain=n, host=f"{name}-host-{n}") for n in range(hosts))
    scope = after(scope_of(members[0]), maintain(members[0].host, EventType.REBOOT))
    scope = after(scope, Approve(event_ids=(scope.events[0].id,)))
    (event,), (impact,) = scope.events, scope.impacts
    assert event.status is Status.STARTED
    ids = [guid(n) for n in range(hosts)]
    events = (
        replace(event, id=id_, resources=(member.name,))
        for id_, member in zip(ids, members, strict=True)
    )
    impacts = (
        replace(impact, event_id=id_, vm=member.name)
        for id_, member in zip(ids, members, strict=True)
    )
    scope = replace(
        scope, name=name, vms=members, events=tuple(events), impacts=tuple(impacts), dropped=()
    )
    world.engine.board.publish(scope, 1)
    return tuple(
        HostRun(member.host, NOON, HostPhase.ANNOUNCED, (EventRef(name, id_),))
        for id_, member in zip(ids, members, strict=True)
    )


async def view_work(world: World, *runs: HostRun) -> list[int]:
    """The work for the hosts in progress of a campaign, by turns."""
    spec = CampaignSpec(type=EventType.REBOOT, patterns=("*",))
    campaign = Campaign(id="c1", spec=spec, started_at=NOON, total=len(runs), in_progress=runs)
    hosts = HostRunViews(world.service, yield_once)
    return await work_of_turns(view_campaign(world.service, campaign, hosts, is_listed=True))


def test_cost_of_hosts_in_progress_is_linear_in_their_events() -> None:
    """Their VMs are in the same sets: a set is read once, and not for each host."""

    async def act() -> None:
        world = World()
        few, many = set_in_progress(world, "few", 20), set_in_progress(world, "many", 200)
        await view_work(world, *few)  # a first view has its own costs
        assert sum(await view_work(world, *many)) < 12 * sum(await view_work(world, *few))

    asyncio.run(act())


def test_polls_pass_between_hosts_in_progress() -> None:
    """A campaign may have 250, in as many sets."""

    async def act() -> None:
        world = World()
        runs = [run for n in range(50) for run in set_in_progress(world, f"set-{n}", 1)]
        await view_work(world, *runs)
        few, many = await view_work(world, *runs[:5]), await view_work(world, *runs)
        assert max(many) < 2 * max(few)
        assert len(many) > len(runs)

    asyncio.run(act())


@pytest.mark.parametrize("plan", [True, False], ids=["plan", "start"])
def test_polls_pass_between_the_hosts_of_a_new_campaign(plan: bool) -> None:
    """It may have 5,000, each with 2,000 VMs, and all VMs are compared with the fleet."""

    async def longest_turn(hosts: int) -> int:
        world, body = World(), BODY | {"type": "Redeploy", "plan": plan}
        world.engine.learn(Record("lease/server/alive", b"", 1))
        vms = {
            guid(n): HostedVm(1, is_running=True, unmovable="a PCI device" if n % 2 else "")
            for n in range(50)
        }
        for number in range(hosts):
            host = ManagedHost(f"host-{number}", "s1", "alive", NOON, vms=vms)
            content = MANAGED_HOST.encode(host)
            world.engine.learn(Record(HOST_KEY.format(host.host), content, 1))
        found = await world.json("POST", PATH, json=BODY | {"plan": True})  # has its own costs
        assert (found["plan"]["total"], len(found["warnings"])) == (hosts, hosts)
        return max(await work_of_turns(world.json("POST", PATH, json=body)))

    async def act() -> None:
        assert await longest_turn(200) < 1.5 * await longest_turn(20)

    asyncio.run(act())


def test_campaign_shows_why_the_next_host_waits() -> None:
    """Not in the list: for many campaigns it would take too long."""

    async def act(world: World) -> None:
        event = (await world.json("POST", "/api/v1/vms/web-1/restart"))["event"]["id"]
        await world.json("POST", f"/api/v1/events/{event}/approve")
        campaign = await start(world, hosts=["host-a"])

        assert campaign["waiting_for"] == "host-a: another update domain of web is in progress"
        assert (await world.json("GET", PATH))["campaigns"][0]["waiting_for"] == ""

    main(act)


def test_repeated_commands_change_nothing_and_name_the_author() -> None:
    async def act(world: World) -> None:
        await start(world)
        states = []
        for verb in ("pause", "pause", "resume", "resume", "cancel", "cancel"):
            states.append((await world.json("POST", f"{PATH}/c1/{verb}"))["campaign"]["state"])
        entries = (await world.json("GET", "/api/v1/history?what=campaign"))["history"]

        assert states == ["paused", "paused", "running", "running", "canceled", "canceled"]
        assert [f"{entry['by']}: {entry['detail']}" for entry in reversed(entries)] == [
            "operator: c1 started: Reboot of 3 hosts",
            "operator: c1 paused",
            "operator: c1 resumed",
            "operator: c1 canceled",
        ]
        message = "campaign c1 is canceled; expected one that is running or paused"
        assert await world.error("POST", f"{PATH}/c1/resume") == (409, "campaign_over", message)

    main(act)


def test_list_has_the_latest_campaign_first_in_pages() -> None:
    async def act(world: World) -> None:
        for _ in range(11):
            await start(world)
        first = await world.json("GET", f"{PATH}?limit=6")
        second = await world.json("GET", f"{PATH}?limit=6&cursor={first['next']}")

        ids = [[campaign["id"] for campaign in page["campaigns"]] for page in (first, second)]
        assert ids == [["c11", "c10", "c9", "c8", "c7", "c6"], ["c5", "c4", "c3", "c2", "c1"]]
        assert (first["total"], second["next"]) == (11, None)

    main(act)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "Terminate"},
        {"hosts": []},
        {"hosts": [""]},
        {"hosts": ["x" * 129]},
        {"hosts": ["h"] * 101},
        {"max_hosts": 0},
        {"max_hosts": 251},
        {"max_unavailable": 0},
        {"max_unavailable": "0%"},
        {"max_unavailable": "101%"},
        {"max_unavailable": "all"},
        {"name": "a\nb"},
        {"name": "x" * 65},
        {"hosts": ["unknown-*"]},
        {"wave": 1},
    ],
)
def test_invalid_request_is_a_400(wrong: dict[str, object]) -> None:
    async def act(world: World) -> None:
        status, code, message = await world.error("POST", PATH, json=BODY | wrong)

        assert (status, code) == (400, "invalid")
        assert message
        assert (await world.json("GET", PATH))["total"] == 0

    main(act)


def test_unknown_campaign_is_a_404() -> None:
    async def act(world: World) -> None:
        unknown = (404, "unknown_campaign", "there is no campaign 'c9'")
        assert await world.error("GET", f"{PATH}/c9") == unknown
        assert await world.error("POST", f"{PATH}/c9/pause") == unknown
        body = {"why": "lunch"}
        assert (await world.error("POST", f"{PATH}/c9/pause", json=body))[0] == 400

    main(act)


@pytest.mark.parametrize("field", ["health_command", "health_seconds_max"])
def test_request_cannot_name_a_command_to_run_on_the_server(field: str) -> None:
    """Every local user reaches a loopback listener without tokens."""

    async def act(world: World) -> None:
        for plan in (False, True):
            body = BODY | {field: "/usr/bin/touch /tmp/executed", "plan": plan}
            status, code, message = await world.error("POST", PATH, json=body)
            assert (status, code) == (400, "invalid")
            assert message.startswith(f"body.{field}: unknown member; expected one of type, hosts")
        assert (await world.json("GET", PATH))["total"] == 0

    main(act)


def test_campaign_accepts_the_types_and_causes_of_maintenance() -> None:
    campaign, maintenance = NewCampaign.__annotations__, Maintenance.__annotations__

    assert campaign["type"] == maintenance["type"]
    assert campaign["cause"] == maintenance["cause"]
