"""Campaigns over the API: plan, start, show, list, pause, resume, cancel, and errors."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from forewarn.campaign.model import EventRef, operation_id_of
from forewarn.campaign.rules import reconcile, set_announced
from forewarn.core.command import Approve, Maintain
from forewarn.core.event import EventType
from forewarn.core.scheduling import event_id_of
from forewarn.web.control.routes.campaign import NewCampaign
from forewarn.web.control.routes.host import Maintenance
from tests.unit.web.control_world import World, main

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
        assert response == {"campaign": None, "plan": plan}
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
