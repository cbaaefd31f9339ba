"""Approving by Azure's own API: paths, bodies and errors as Azure Resource Manager has them."""

from typing import Any

import pytest

from tests.unit.web.control_world import FLEET, World, main

SCOPES = b"""
  - name: db
    vms:
      - name: db-0
        host: host-a
        instance: {subscription: 8D10DA13-8125-4ba9-a717-bf7490507b3d, resource_group: Shop}
  - name: api
    kind: scale-set
    vms: [{name: api_0, host: host-a}]
"""
FLEET_OF_ALL_KINDS = FLEET.replace(b"\nhosts:", SCOPES + b"hosts:")
SINGLE, BULK = "2023-10-01-preview", "2025-10-01-preview"
DECLARED = "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/shop"
ANY = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/any"


def events_of(resource: str, group: str = ANY) -> str:
    compute = f"{group}/providers/Microsoft.Compute/{resource}"
    return f"{compute}/providers/Microsoft.Maintenance/scheduledevents"


def acknowledge(event: str, resource: str, group: str = ANY, version: str = SINGLE) -> str:
    return f"{events_of(resource, group)}/{event}/acknowledge?api-version={version}"


async def restart(world: World, vm: str) -> str:
    event: str = (await world.json("POST", f"/api/v1/vms/{vm}/restart"))["event"]["id"]
    return event


async def status_of(world: World, event: str) -> str:
    status: str = (await world.json("GET", f"/api/v1/events/{event}"))["status"]
    return status


async def refused(world: World, path: str, **more: Any) -> tuple[int, str, str]:
    """Status, code and message; nothing was approved."""
    response = await world.request("POST", path, **more)
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["code", "message"]
    listed = await world.json("GET", "/api/v1/events")
    assert {event["status"] for event in listed["events"]} <= {"Scheduled"}
    return response.status_code, body["error"]["code"], body["error"]["message"]


def run(act: Any) -> None:
    main(act, FLEET_OF_ALL_KINDS)


@pytest.mark.parametrize(
    ("vm", "resource", "group"),
    [
        ("db-0", "virtualMachines/db-0", DECLARED),
        ("db-0", "VIRTUALMACHINES/DB-0", DECLARED.upper()),
        ("web-0", "availabilitySets/web", ANY),
        ("api_0", "virtualMachineScaleSets/api", ANY),
        ("FrontEnd_IN_0", "cloudServices/shop", ANY),
    ],
)
def test_event_is_approved_by_the_id_of_its_resource(vm: str, resource: str, group: str) -> None:
    """Paths are as Azure's tools write them, in any letter case."""

    async def act(world: World) -> None:
        event = await restart(world, vm)
        response = await world.request("POST", acknowledge(event.lower(), resource, group))
        assert response.status_code == 200
        assert response.content == b'{"value":"Successfully Approved"}'
        assert await status_of(world, event) == "Started"
        again = await world.request("POST", acknowledge(event, resource, group))
        assert again.status_code == 200, "an approval that was lost is repeated"

    run(act)


@pytest.mark.parametrize(
    ("resource", "group"),
    [
        ("virtualMachines/db-1", DECLARED),
        ("availabilitySets/db-0", DECLARED),
        ("virtualMachines/db-0", ANY),
        ("virtualMachines/db-0", DECLARED.replace("shop", "sho")),
        ("disks/db-0", DECLARED),
        ("virtualMachines/*", DECLARED),
    ],
)
def test_event_of_another_resource_is_not_approved(resource: str, group: str) -> None:
    """A tool that mixes up its resources must not start maintenance of another one."""

    async def act(world: World) -> None:
        event = await restart(world, "db-0")
        status, code, message = await refused(world, acknowledge(event, resource, group))
        assert (status, code) == (404, "unknown_event")
        assert message.endswith(f"{resource.lower()} has no event {event}")

    run(act)


@pytest.mark.parametrize("version", ["", "2020-07-01", "2023-04-01", "2024-07-01"])
def test_api_version_that_has_no_acknowledgement_is_refused(version: str) -> None:
    async def act(world: World) -> None:
        event = await restart(world, "db-0")
        path = acknowledge(event, "virtualMachines/db-0", DECLARED, version)
        assert await refused(world, path) == (
            400,
            "invalid",
            f"api-version: expected {SINGLE} or {BULK} or 2025-11-01, got {version!r}",
        )
        status, _, message = await refused(world, path.partition("?")[0])
        assert (status, message.partition(" for ")[0]) == (
            400,
            "Missing required query parameter 'api-version'",
        )

    run(act)


def test_unknown_event_is_refused() -> None:
    async def act(world: World) -> None:
        path = acknowledge("x", "virtualMachines/db-0", DECLARED)
        assert await refused(world, path) == (404, "unknown_event", "there is no event 'x'")

    run(act)


def test_several_events_of_a_resource_are_approved_at_once() -> None:
    async def act(world: World) -> None:
        events = [await restart(world, vm) for vm in ("web-0", "web-1")]
        path = f"{events_of('availabilitySets/web')}?api-version={BULK}"
        before = world.engine.board.scopes["web"].scope.incarnation
        response = await world.request("POST", path, json={"value": [e.lower() for e in events]})
        assert (response.status_code, response.json()) == (200, {"value": "Successfully Approved"})
        assert [await status_of(world, event) for event in events] == ["Started", "Started"]
        assert world.engine.board.scopes["web"].scope.incarnation == before + 1

    run(act)


def test_list_with_a_wrong_event_approves_none() -> None:
    """All or nothing, as the POST of a VM."""

    async def act(world: World) -> None:
        mine, other = await restart(world, "web-0"), await restart(world, "db-0")
        path = f"{events_of('availabilitySets/web')}?api-version={BULK}"
        for wrong in (other, "x"):
            status, code, _ = await refused(world, path, json={"value": [mine, wrong]})
            assert (status, code) == (404, "unknown_event")

    run(act)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body.value: expected a list of 1 to 1000 event ids, got nothing"),
        ({"value": []}, "body.value: expected a list of 1 to 1000 event ids, got []"),
        ({"value": "x"}, "body.value: expected a list of 1 to 1000 event ids, got 'x'"),
        ({"value": [1]}, "body.value[0]: expected the id of an event, got 1"),
        ({"values": ["x"]}, "body.values"),
    ],
)
def test_malformed_list_is_refused(body: dict[str, Any], message: str) -> None:
    async def act(world: World) -> None:
        path = f"{events_of('availabilitySets/web')}?api-version={BULK}"
        status, code, text = await refused(world, path, json=body)
        assert (status, code) == (400, "invalid")
        assert text.startswith(message)

    run(act)


def test_first_api_version_has_no_list() -> None:
    async def act(world: World) -> None:
        path = f"{events_of('availabilitySets/web')}?api-version={SINGLE}"
        status, _, message = await refused(world, path, json={"value": ["x"]})
        assert (status, message) == (
            400,
            "api-version: expected 2025-10-01-preview or 2025-11-01, got '2023-10-01-preview'",
        )

    run(act)


def test_author_of_the_approval_is_in_the_history() -> None:
    async def act(world: World) -> None:
        event = await restart(world, "db-0")
        await world.json("POST", acknowledge(event, "virtualMachines/db-0", DECLARED))
        found = await world.json("GET", f"/api/v1/history?event={event}&what=approved")
        assert [(one["by"], one["detail"]) for one in found["history"]] == [
            ("operator", "operator")
        ]

    run(act)


def test_errors_are_described_as_azure_sends_them() -> None:
    """Generated clients read them."""

    async def act(world: World) -> None:
        document = await world.json("GET", "/api/openapi.json")
        operations = {
            path: item["post"]
            for path, item in document["paths"].items()
            if path.startswith("/subscriptions/")
        }
        assert [one["x-role"] for one in operations.values()] == ["operator", "operator"]
        for one in operations.values():
            names = [each["name"] for each in one["parameters"] if each["in"] == "path"]
            assert names == sorted(names)
            error = one["responses"]["404"]["content"]["application/json"]["schema"]
            assert error["properties"]["error"]["properties"]["code"] == {
                "enum": ["unknown_event", "event_ended", "not_found"]
            }

    run(act)
