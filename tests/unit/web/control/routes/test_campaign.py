"""Campaigns over the API: planned, started, shown, paused, resumed, canceled, refused."""

from datetime import timedelta
from typing import Any

import pytest

from forewarn.campaign.model import Announce, Announced, Claimed, Look, Told
from forewarn.campaign.service import Campaigns
from forewarn.core.command import Approve, Maintain
from forewarn.core.event import EventType
from forewarn.core.scheduling import event_id_of
from forewarn.web.control.routes.campaign import NewCampaign
from forewarn.web.control.routes.fleet import Maintenance
from tests.unit.web.control_world import World, story

PATH = "/api/v1/campaigns"


async def start(world: World, **more: object) -> Any:
    return (await world.told("POST", PATH, json={"type": "Reboot", "hosts": ["host-*"]} | more))[
        "campaign"
    ]


def test_a_campaign_is_started_and_shown_with_all_that_is_known_of_it() -> None:
    """Nothing has been done yet: the loop gives the first host its turn."""

    async def tell(world: World) -> None:
        made = await start(world, name="kernel", max_hosts=2, max_unavailable="50%")

        assert (made["id"], made["name"], made["state"], made["max_unavailable"]) == (
            "c1",
            "kernel",
            "running",
            "50%",
        )
        assert made["hosts"] == {
            "total": 3,
            "done": 0,
            "under_way": 0,
            "waiting": 3,
            "skipped": 0,
            "failed": 0,
        }
        assert made["estimated_end"] == "2030-01-31T12:50:00Z", "two waves of a notice and a reboot"
        assert await world.told("GET", f"{PATH}/C1") == made

    story(tell)


def test_a_plan_tells_the_waves_and_does_nothing() -> None:
    """host-a and host-b have VMs of two update domains of the same scopes; host-c has none and goes
    with either.
    """

    async def tell(world: World) -> None:
        answer = await world.told(
            "POST", PATH, json={"type": "Reboot", "hosts": ["host-*"], "max_hosts": 3, "plan": True}
        )

        waves = [["host-a", "host-c"], ["host-b"]]
        assert answer == {
            "campaign": None,
            "plan": {"waves": waves, "too_large": [], "waiting": [], "total": 3},
        }
        assert (await world.told("GET", PATH))["campaigns"] == []

    story(tell)


TIGHT = b"""
scopes:
  - name: web
    kind: scale-set
    policy: {max_unavailable: 40%}
    vms: [{name: a, host: host-a}, {name: b, host: host-a}, {name: c, host: host-b}]
"""


def test_a_host_too_large_is_marked_in_the_plan_and_refused_at_the_start() -> None:
    """40 % of three VMs is one; host-a has two."""

    async def tell(world: World) -> None:
        asked = {"type": "Reboot", "hosts": ["*"]}
        why = "host-a alone takes 2 VMs of web down at once; max_unavailable there is 1"
        plan = (await world.told("POST", PATH, json=asked | {"plan": True}))["plan"]

        assert plan["too_large"] == [{"host": "host-a", "scope": "web", "why": why}]
        assert (plan["waves"], plan["total"]) == ([["host-b"]], 2)
        assert await world.refused("POST", PATH, json=asked) == (409, "over_budget", why)
        assert (await world.told("GET", "/api/v1/scopes/web"))["policy"]["max_unavailable"] == "40%"

    story(tell, TIGHT)


async def announce(world: World) -> str:
    """The turn of host-a is announced in web, as the loop does it; the id of the event."""
    (order,) = [
        one
        for one in (await world.service.campaigns.tell("c1", Look())).orders
        if isinstance(one, Announce)
    ]
    command = Maintain(host="host-a", operation_id=order.operation_id, type=EventType.REBOOT)
    await world.engine.submit("web", command, by="test")
    event_id = event_id_of(command.operation_id, "web", 0)
    await world.service.campaigns.tell("c1", Announced("host-a", (Told("web", event_id),)))
    return event_id


def test_a_host_under_way_tells_what_it_waits_for_and_until_when() -> None:
    """First its notice, then the impact, then the health command."""

    async def tell(world: World) -> None:
        await start(world, hosts=["host-a"])
        desk = Campaigns(
            world.engine, world.service.campaigns.cache, health_limit=timedelta(seconds=60)
        )
        await desk.tell("c1", Look())
        seen = [(await world.told("GET", f"{PATH}/c1"))["under_way"]]
        event_id = await announce(world)
        seen.append((await world.told("GET", f"{PATH}/c1"))["under_way"])
        await world.engine.submit("web", Approve(event_ids=(event_id,)), by="test")
        seen.append((await world.told("GET", f"{PATH}/c1"))["under_way"])
        await world.told("POST", f"/api/v1/events/{event_id}/complete")
        await desk.tell("c1", Look())
        await desk.tell("c1", Claimed("host-a", "w1"))
        seen.append((await world.told("GET", f"{PATH}/c1"))["under_way"])

        assert [(one["phase"], one["waiting_for"], one["until"]) for (one,) in seen] == [
            ("ordered", "its events", None),
            ("announced", "1 event to start", "2030-01-31T12:15:00Z"),
            ("announced", "1 event to end", "2030-01-31T12:10:00Z"),
            ("checking", "the health command", "2030-01-31T12:01:30Z"),
        ]

    story(tell)


def test_why_the_next_host_has_to_wait_is_told() -> None:
    async def tell(world: World) -> None:
        event = (await world.told("POST", "/api/v1/vms/web-1/restart"))["event"]["id"]
        await world.told("POST", f"/api/v1/events/{event}/approve")
        made = await start(world, hosts=["host-a"])

        assert made["waiting_for"] == "host-a: another update domain of web is under way"
        assert (await world.told("GET", PATH))["campaigns"][0]["waiting_for"] == "", (
            "of many, it would take too long"
        )

    story(tell)


def test_the_verbs_said_twice_are_said_once_and_the_history_tells_who_said_them() -> None:
    async def tell(world: World) -> None:
        await start(world)
        states = []
        for verb in ("pause", "pause", "resume", "resume", "cancel", "cancel"):
            states.append((await world.told("POST", f"{PATH}/c1/{verb}"))["campaign"]["state"])
        entries = (await world.told("GET", "/api/v1/history?what=campaign"))["history"]

        assert states == ["paused", "paused", "running", "running", "canceled", "canceled"]
        assert [f"{one['by']}: {one['detail']}" for one in reversed(entries)] == [
            "operator: c1 started: Reboot of 3 hosts",
            "operator: c1 paused",
            "operator: c1 resumed",
            "operator: c1 canceled",
        ]
        message = "campaign c1 is canceled; expected one that is running or paused"
        assert await world.refused("POST", f"{PATH}/c1/resume") == (409, "campaign_over", message)

    story(tell)


def test_campaigns_are_listed_the_latest_first_page_by_page() -> None:
    async def tell(world: World) -> None:
        for _ in range(11):
            await start(world)
        first = await world.told("GET", f"{PATH}?limit=6")
        second = await world.told("GET", f"{PATH}?limit=6&cursor={first['next']}")

        assert [one["id"] for one in first["campaigns"]] == ["c11", "c10", "c9", "c8", "c7", "c6"]
        assert [one["id"] for one in second["campaigns"]] == ["c5", "c4", "c3", "c2", "c1"]
        assert (first["total"], second["next"]) == (11, None)

    story(tell)


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
        {"hosts": ["nobody-*"]},
        {"wave": 1},
    ],
)
def test_a_wish_that_makes_no_sense_is_a_bad_request(wrong: dict[str, object]) -> None:
    async def tell(world: World) -> None:
        status, code, message = await world.refused(
            "POST", PATH, json={"type": "Reboot", "hosts": ["host-*"]} | wrong
        )

        assert (status, code) == (400, "invalid")
        assert message
        assert (await world.told("GET", PATH))["total"] == 0

    story(tell)


def test_a_campaign_that_is_not_there_is_not_found() -> None:
    async def tell(world: World) -> None:
        assert await world.refused("GET", f"{PATH}/c9") == (
            404,
            "unknown_campaign",
            "there is no campaign 'c9'",
        )
        assert (await world.refused("POST", f"{PATH}/c9/pause"))[:2] == (404, "unknown_campaign")
        assert (await world.refused("POST", f"{PATH}/c9/pause", json={"why": "lunch"}))[:2] == (
            400,
            "invalid",
        )

    story(tell)


@pytest.mark.parametrize("field", ["health_command", "health_seconds_max"])
def test_a_request_cannot_name_a_command_to_run_on_the_server(field: str) -> None:
    """Every local user reaches a loopback listener without tokens; a command in a request would run
    as the service.
    """

    async def tell(world: World) -> None:
        asked = {"type": "Reboot", "hosts": ["host-*"], field: "/usr/bin/touch /tmp/executed"}

        for plan in (False, True):
            assert await world.refused("POST", PATH, json=asked | {"plan": plan}) == (
                400,
                "invalid",
                f"body: {field} is not accepted over HTTP; it is the server's option campaign_{field}",
            )
        assert (await world.told("GET", PATH))["total"] == 0

    story(tell)


def test_the_end_of_an_impact_is_expected_when_its_operator_says() -> None:
    async def tell(world: World) -> None:
        await start(world, hosts=["host-a"], duration_seconds=3600)
        await world.engine.submit("web", Approve(event_ids=(await announce(world),)), by="test")

        (host,) = (await world.told("GET", f"{PATH}/c1"))["under_way"]
        assert host["until"] == "2030-01-31T13:00:00Z"

    story(tell)


def test_a_campaign_may_do_what_maintenance_may() -> None:
    told, known = NewCampaign.__annotations__, Maintenance.__annotations__

    assert (told["type"], told["cause"]) == (known["type"], known["cause"])
