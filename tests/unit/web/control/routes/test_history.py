"""The history over the control API."""

import pytest

from tests.unit.web.control_world import PLAIN_FLEET, World, main

EVENT = "00000000-0000-4000-8000-000000000009"


def test_history_is_newest_first_with_all_fields() -> None:
    async def act(world: World) -> None:
        await world.json("POST", "/api/v1/vms/web-0/restart")
        await world.json("POST", f"/api/v1/events/{EVENT}/approve")
        page = await world.json("GET", "/api/v1/history?limit=3")

        started, approved, scheduled = page["history"]
        assert [one["what"] for one in (started, approved, scheduled)] == [
            "started",
            "approved",
            "scheduled",
        ]
        assert page["next"]
        assert (approved["by"], approved["detail"]) == ("operator", "operator")
        assert scheduled == {
            "number": scheduled["number"],
            "at": "2030-01-31T12:00:00Z",
            "by": "operator",
            "what": "scheduled",
            "scope": "web",
            "event": EVENT,
            "type": "Reboot",
            "cause": "user-restart",
            "resources": ["web-0"],
            "vm": "",
            "host": "host-a",
            "host_before": "",
            "not_before": "2030-01-31T12:15:00Z",
            "description": "Virtual machine is going to be restarted"
            " as requested by authorized user.",
            "duration_seconds": -1,
            "detail": "Reboot of web-0",
        }

    main(act, PLAIN_FLEET)


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("vm=web-0", 2),
        ("scope=shop", 3),
        ("host=host-b", 2),
        ("host=host-b&scope=web", 1),
        (f"event={EVENT}", 1),
        (f"event={EVENT.lower()}", 1),
        ("what=enabled", 2),
        ("since=2030-01-31T12:00:00Z", 7),
        ("since=2030-01-31T13:00:00%2B01:00&until=2030-01-31T12:00:01Z", 7),
        ("until=2030-01-31T12:00:00Z", 0),
        ("vm=absent", 0),
    ],
)
def test_history_is_filtered_by_every_parameter(query: str, count: int) -> None:
    async def act(world: World) -> None:
        await world.json("POST", "/api/v1/vms/web-0/restart")

        assert len((await world.json("GET", f"/api/v1/history?{query}"))["history"]) == count

    main(act, PLAIN_FLEET)


def test_history_pages_follow_their_cursors() -> None:
    async def act(world: World) -> None:
        numbers, cursor = [], ""
        while cursor is not None:
            page = await world.json(
                "GET", f"/api/v1/history?limit=2{cursor and f'&cursor={cursor}'}"
            )
            numbers += [one["number"] for one in page["history"]]
            cursor = page["next"]

        assert numbers == [12288, 8192, 4099, 4098, 4097, 4096]

    main(act, PLAIN_FLEET)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("what=statred", "what: expected one of executed-silently, scheduled"),
        (
            "since=yesterday",
            "since: expected a time with its zone, such as 2030-01-31T12:00:00Z, got 'yesterday'",
        ),
        ("since=2030-01-31T12:00:00", "since: expected a time"),
        ("until=9999-12-31T23:59:59-12:00", "until: expected a time"),
        ("cursor=7", "cursor: expected the `next` of an earlier page"),
        ("cursor=WyJ4Il0", "cursor: expected the `next` of an earlier page"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("vms=web-0", "unknown query parameter 'vms'"),
    ],
)
def test_invalid_query_is_rejected_with_the_expected_value(query: str, message: str) -> None:
    async def act(world: World) -> None:
        status, code, actual = await world.error("GET", f"/api/v1/history?{query}")

        assert (status, code) == (400, "invalid")
        assert message in actual

    main(act, PLAIN_FLEET)
