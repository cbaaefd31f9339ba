"""The control API in process, over the real engine: what an operator asks, what becomes of it, and
what is shown.
"""

import json
from datetime import timedelta
from typing import Any

import pytest

from forewarn.config import Config, Identify
from forewarn.core.command import Claim, Finish
from forewarn.core.event import MAINTENANCE_CAUSES
from forewarn.core.scheduling import MAINTENANCE_TYPES
from forewarn.engine.operations import Operations
from forewarn.web.control.app import make_app
from forewarn.web.control.routes.host import Maintenance
from forewarn.web.metadata.app import Metadata
from forewarn.wire.versions import VERSIONS
from tests.unit.web.control_world import FLEET, NOON, World, main, make_client

EVENT_MEMBERS = (
    "id type status source scope update_domain resources not_before duration_seconds description"
    " created_at started_at approvals is_approved impacts cause unreadable_since"
    " unreadable_seconds waits_for"
)


def test_restart_returns_the_scheduled_event() -> None:
    """Consoles and scripts are written against these members; they stay put."""

    async def act(world: World) -> None:
        response = await world.request("POST", "/api/v1/vms/web-0/restart")

        assert response.status_code == 202
        assert response.json() == {
            "event": {
                "id": "00000000-0000-4000-8000-000000000009",
                "type": "Reboot",
                "status": "Scheduled",
                "source": "User",
                "scope": "web",
                "update_domain": 0,
                "resources": ["web-0"],
                "not_before": "2030-01-31T12:15:00Z",
                "duration_seconds": -1,
                "description": "Virtual machine is going to be restarted"
                " as requested by authorized user.",
                "created_at": "2030-01-31T12:00:00Z",
                "started_at": None,
                "approvals": [],
                "is_approved": False,
                "impacts": [],
                "cause": "user-restart",
                "unreadable_since": None,
                "unreadable_seconds": 0,
                "waits_for": "",
            },
            "reason": None,
            "waits_for": "",
        }
        assert list(response.json()["event"]) == EVENT_MEMBERS.split()

    main(act)


def test_lists_can_be_limited_to_some_names() -> None:
    """A reader of the stream reads again what changed, and some of it may be gone already."""

    async def act(world: World) -> None:
        event = await world.json("POST", "/api/v1/vms/web-0/restart")
        await world.json("POST", "/api/v1/vms/web-1/restart")
        event_id = event["event"]["id"].lower()
        paths = {
            "vms": "names=web-1,gone,BackEnd_IN_0,web-1",
            "scopes": "names=web,gone",
            "hosts": "names=host-b,gone",
            "events": f"ids={event_id},gone",
        }
        found = [
            (await world.json("GET", f"/api/v1/{kind}?{query}"))[kind]
            for kind, query in paths.items()
        ]
        shown = [[one.get("name") or one["resources"][0] for one in items] for items in found]
        assert shown == [["BackEnd_IN_0", "web-1"], ["web"], ["host-b"], ["web-0"]]
        many = ",".join(f"v{number}" for number in range(101))
        assert (await world.request("GET", f"/api/v1/vms?names={many}")).status_code == 400

    main(act)


def test_restart_without_polling_vms_has_no_event() -> None:
    """A scope that never polled is not enabled: the operation runs at once."""

    async def act(world: World) -> None:
        assert await world.json("POST", "/api/v1/vms/web-0/restart") == {
            "event": None,
            "reason": {
                "code": "not-polled",
                "message": "no VM of web has polled in the last 24h",
            },
            "waits_for": "",
        }

    main(act, is_polled=False)


@pytest.mark.parametrize(
    ("verb", "type_", "minutes"),
    [
        ("restart", "Reboot", 15),
        ("redeploy", "Redeploy", 10),
        ("evict", "Preempt", 0.5),
        ("delete", "Terminate", 5),
    ],
)
def test_each_operation_on_a_vm_has_its_type_and_notice(
    verb: str, type_: str, minutes: float
) -> None:
    """The four verbs of section 7, each with the notice that Azure gives."""

    async def act(world: World) -> None:
        event = (await world.json("POST", f"/api/v1/vms/web-0/{verb}"))["event"]

        assert (event["type"], event["not_before"]) == (
            type_,
            f"{NOON + timedelta(minutes=minutes):%Y-%m-%dT%H:%M:%SZ}",
        )

    main(act)


def test_more_notice_is_accepted_and_less_rejected() -> None:
    """NotBefore is a promise to the guest: an operator may extend the notice, not shorten it."""

    async def act(world: World) -> None:
        path = "/api/v1/vms/web-0/restart"
        status, code, _ = await world.error(
            "POST", path, json={"not_before": "2030-01-31T12:14:59Z"}
        )
        assert (status, code) == (409, "notice_too_short")

        event = (await world.json("POST", path, json={"not_before": "2030-01-31T14:00:00+01:00"}))[
            "event"
        ]
        assert event["not_before"] == "2030-01-31T13:00:00Z"

    main(act)


def test_second_restart_is_rejected_with_the_pending_id() -> None:
    """The operator wants to know what became of the first."""

    async def act(world: World) -> None:
        first = (await world.json("POST", "/api/v1/vms/web-0/restart"))["event"]["id"]

        response = await world.request("POST", "/api/v1/vms/web-0/restart")

        assert response.status_code == 409
        assert response.json()["error"] == "already_pending"
        assert response.json()["facts"] == {"vm": "web-0", "event": first}

    main(act)


def test_maintenance_is_one_event_per_scope_and_domain() -> None:
    """A guest sees only its own scope, and two domains never go down together."""

    async def act(world: World) -> None:
        request = {
            "type": "Freeze",
            "cause": "live-migration",
            "duration_seconds": 5,
            "description": "moving",
        }
        response = await world.request("POST", "/api/v1/hosts/host-a/maintain", json=request)

        assert response.status_code == 202
        events = response.json()["events"]
        assert [(event["scope"], event["resources"]) for event in events] == [
            ("shop", ["FrontEnd_IN_0"]),
            ("web", ["web-0"]),
        ]
        assert {
            (event["type"], event["cause"], event["duration_seconds"], event["description"])
            for event in events
        } == {("Freeze", "live-migration", 5, "moving")}

    main(act)


def test_host_can_be_degraded_or_failed() -> None:
    """Degraded hardware gives days, failed hardware gives nothing."""

    async def act(world: World) -> None:
        degraded = (await world.json("POST", "/api/v1/hosts/host-a/degrade"))["events"]
        failed = (await world.json("POST", "/api/v1/hosts/host-b/fail"))["events"]

        assert {(event["status"], event["not_before"]) for event in degraded} == {
            ("Scheduled", "2030-02-07T12:00:00Z")
        }
        assert {(event["status"], event["started_at"]) for event in failed} == {
            ("Started", "2030-01-31T12:00:00Z")
        }
        assert [impact["state"] for event in failed for impact in event["impacts"]] == [
            "waiting",
            "waiting",
        ]

    main(act)


def test_host_without_vms_has_no_events() -> None:
    """It is known from the fleet file, so it is no mistake to name it."""

    async def act(world: World) -> None:
        response = await world.json("POST", "/api/v1/hosts/host-c/fail")
        assert response == {"events": [], "warnings": []}

    main(act)


def test_operator_approval_starts_an_event_once() -> None:
    """An operator may approve under every policy, and retry after a lost response."""

    async def act(world: World) -> None:
        id_ = (await world.json("POST", "/api/v1/vms/FrontEnd_IN_0/restart"))["event"]["id"]

        event = (await world.json("POST", f"/api/v1/events/{id_.lower()}/approve"))["event"]
        incarnation = world.engine.board.find_scope("shop").scope.incarnation
        again = (await world.json("POST", f"/api/v1/events/{id_}/approve"))["event"]

        assert (event["status"], event["approvals"]) == ("Started", ["operator"])
        assert again == event
        assert world.engine.board.find_scope("shop").scope.incarnation == incarnation

    main(act)


def test_approval_for_a_vm_follows_the_policy() -> None:
    """Under `all` one VM is not enough; a VM of another scope has no say at all."""

    async def act(world: World) -> None:
        id_ = (await world.json("POST", "/api/v1/vms/FrontEnd_IN_0/restart"))["event"]["id"]
        path = f"/api/v1/events/{id_}/approve"

        status, code, _ = await world.error("POST", path, json={"vm": "web-0"})
        assert (status, code) == (403, "forbidden")
        one = (await world.json("POST", path, json={"vm": "FrontEnd_IN_0"}))["event"]
        both = (await world.json("POST", path, json={"vm": "BackEnd_IN_0"}))["event"]

        assert (one["status"], both["status"]) == ("Scheduled", "Started")
        assert both["approvals"] == ["FrontEnd_IN_0", "BackEnd_IN_0"]

    main(act)


def test_cancel_returns_the_last_state_of_the_event() -> None:
    """The code distinguishes an ended event from an unknown one."""

    async def act(world: World) -> None:
        event = (await world.json("POST", "/api/v1/vms/web-0/restart"))["event"]

        cancel = f"/api/v1/events/{event['id']}/cancel"
        assert (await world.json("POST", cancel))["event"] == event
        again = await world.json("POST", cancel.lower())
        response = await world.request("GET", f"/api/v1/events/{event['id']}")

        assert (response.status_code, response.json()["error"]) == (404, "event_ended")
        assert response.json()["facts"]["how"] == "canceled"
        message = f"event {event['id']} was canceled before"
        assert again == {"event": None, "reason": {"code": "ended", "message": message}}

    main(act)


def test_only_a_started_event_can_be_completed() -> None:
    """Complete says that it is done; what has not begun cannot be."""

    async def act(world: World) -> None:
        id_ = (await world.json("POST", "/api/v1/vms/web-0/restart"))["event"]["id"]

        assert (await world.error("POST", f"/api/v1/events/{id_}/complete"))[:2] == (
            409,
            "wrong_status",
        )
        await world.json("POST", f"/api/v1/events/{id_}/approve")
        assert (await world.error("POST", f"/api/v1/events/{id_}/cancel"))[:2] == (
            409,
            "wrong_status",
        )
        await world.json("POST", f"/api/v1/events/{id_}/complete")

        assert await world.json("GET", "/api/v1/events") == {"events": [], "total": 0, "next": None}

    main(act)


def test_scopes_vms_and_hosts_reference_each_other() -> None:
    """From any of them an operator finds the way to the others."""

    async def act(world: World) -> None:
        id_ = (await world.json("POST", "/api/v1/vms/web-0/restart"))["event"]["id"]

        scope = await world.json("GET", "/api/v1/scopes/web")
        vm = await world.json("GET", "/api/v1/vms/web-0")
        host = await world.json("GET", "/api/v1/hosts/host-a")

        assert (scope["vms"], scope["events"], scope["is_enabled"]) == (
            ["web-0", "web-1"],
            [id_],
            True,
        )
        assert (scope["incarnation"], scope["seen_at"], scope["policy"]["approval"]) == (
            2,
            "2030-01-31T12:00:00Z",
            "any",
        )
        assert (vm["scope"], vm["host"], vm["power"], vm["events"]) == (
            "web",
            "host-a",
            "running",
            [id_],
        )
        assert host == {
            "name": "host-a",
            "vms": ["FrontEnd_IN_0", "web-0"],
            "scopes": ["shop", "web"],
            "events": [id_],
            "state": "unmanaged",
            "daemon": None,
            "problems": [],
            "unmovable": [],
            "other_vms": [],
        }

    main(act)


def test_lists_have_order_limit_and_total() -> None:
    """A fleet of 100,000 must not be sent for one look."""

    async def act(world: World) -> None:
        listed = await world.json("GET", "/api/v1/vms?limit=3")

        assert [vm["name"] for vm in listed["vms"]] == ["BackEnd_IN_0", "FrontEnd_IN_0", "web-0"]
        assert listed["total"] == 4
        assert [
            scope["name"] for scope in (await world.json("GET", "/api/v1/scopes"))["scopes"]
        ] == ["shop", "web"]
        assert [host["name"] for host in (await world.json("GET", "/api/v1/hosts"))["hosts"]] == [
            "host-a",
            "host-b",
            "host-c",
        ]

    main(act)


def test_events_are_listed_oldest_first() -> None:
    """What has waited longest is most likely what is looked for; of one moment, the order is by id
    and always the same.
    """

    async def act(world: World) -> None:
        await world.json("POST", "/api/v1/vms/web-1/restart")
        await world.clock.advance(timedelta(minutes=1))
        await world.json("POST", "/api/v1/vms/FrontEnd_IN_0/restart")
        await world.json("POST", "/api/v1/vms/web-0/restart")

        listed = await world.json("GET", "/api/v1/events")

        assert [event["resources"] for event in listed["events"]] == [
            ["web-1"],
            ["web-0"],
            ["FrontEnd_IN_0"],
        ]

    main(act)


def test_fleet_can_be_read_and_put_back() -> None:
    """Export, edit, apply: the round trip of every operator."""

    async def act(world: World) -> None:
        shown = await world.json("GET", "/api/v1/fleet")
        names = (
            "added",
            "changed",
            "removed",
            "vms_joined",
            "vms_left",
            "hosts_added",
            "hosts_removed",
            "details",
        )
        nothing = {**{name: [] for name in names}, "dry_run": False}

        assert await world.json("PUT", "/api/v1/fleet", json=shown) == nothing
        assert (
            await world.json(
                "PUT", "/api/v1/fleet", content=FLEET, headers={"content-type": "application/yaml"}
            )
            == nothing
        )

    main(act)


def test_dry_run_returns_the_difference_and_changes_nothing() -> None:
    """Look before you leap."""

    async def act(world: World) -> None:
        web = (
            "{name: web, kind: availability-set, vms: [{name: web-0, host: host-a}, {name: web-2}]}"
        )
        wanted = f"scopes: [{web}, {{name: new, kind: scale-set}}]"
        difference = {
            "added": ["new"],
            "changed": ["web"],
            "removed": ["shop"],
            "vms_joined": ["web-2"],
            "details": [
                {
                    "scope": "web",
                    "vm": "web-0",
                    "fields": [{"field": "address", "before": "10.0.0.10", "after": ""}],
                }
            ],
        }
        hosts = {"hosts_added": [], "hosts_removed": ["host-c"]}
        left = {"vms_left": ["BackEnd_IN_0", "FrontEnd_IN_0", "web-1"], **hosts}
        before = await world.json("GET", "/api/v1/fleet")

        assert await world.json(
            "PUT", "/api/v1/fleet?dry_run=true", content=wanted
        ) == difference | left | {"dry_run": True}
        assert await world.json("GET", "/api/v1/fleet") == before
        assert await world.json("PUT", "/api/v1/fleet", content=wanted) == difference | left | {
            "dry_run": False
        }
        assert sorted(world.engine.board.scopes) == ["new", "web"]

    main(act)


def test_dry_run_says_what_changes_from_what_to_what() -> None:
    """Of scopes and VMs that stay, also in another scope; as a fleet file writes it."""

    async def act(world: World) -> None:
        wanted = (
            FLEET.replace(b"approval: all", b"approval: any, max_unavailable: 20%")
            .replace(b"update_domain: 1, host: host-b}\n  - name", b"host: host-z}\n  - name")
            .replace(b"      - {name: FrontEnd_IN_0, update_domain: 0, host: host-a}\n", b"")
            .replace(
                b"    vms:\n      - {name: web-0",
                b"    vms:\n      - {name: FrontEnd_IN_0, "
                b"host: host-a, instance: {size: big}}\n      - {name: web-0",
            )
        )
        body = await world.json("PUT", "/api/v1/fleet?dry_run=true", content=wanted)

        assert [
            (item["scope"], item["vm"], [tuple(field.values()) for field in item["fields"]])
            for item in body["details"]
        ] == [
            ("web", "FrontEnd_IN_0", [("scope", "shop", "web"), ("instance.size", "", "big")]),
            ("web", "web-1", [("update_domain", 1, 0), ("host", "host-b", "host-z")]),
            (
                "shop",
                "",
                [("policy.approval", "all", "any"), ("policy.max_unavailable", None, "20%")],
            ),
        ]

    main(act)


def test_declared_host_is_in_the_difference_and_the_history() -> None:
    """Every change is a note in the same commit, also one that concerns no VM."""

    async def act(world: World) -> None:
        wanted = FLEET.replace(b"hosts: [host-c]", b"hosts: [host-d]")
        body = await world.json(
            "PUT", "/api/v1/fleet", content=wanted, headers={"content-type": "application/yaml"}
        )
        assert (body["hosts_added"], body["hosts_removed"], body["changed"]) == (
            ["host-d"],
            ["host-c"],
            [],
        )
        (note,) = (await world.json("GET", "/api/v1/history?host=host-d"))["history"]
        assert (note["what"], note["detail"]) == ("updated", "host host-d declared")

    main(act)


def test_put_with_an_outdated_if_match_is_rejected() -> None:
    """Two who edit what they read would undo each other, and a sync would undo a move that ended
    meanwhile.
    """

    async def act(world: World) -> None:
        read = await world.request("GET", "/api/v1/fleet")
        tag, wanted = read.headers["etag"], read.json()
        await world.json("PUT", "/api/v1/fleet", content=FLEET.replace(b"10.0.0.11", b"10.0.0.12"))

        stale = await world.error("PUT", "/api/v1/fleet", json=wanted, headers={"if-match": tag})
        assert stale[:2] == (412, "fleet_changed")
        stale = await world.error(
            "PUT", "/api/v1/fleet?dry_run=true", json=wanted, headers={"if-match": tag}
        )
        assert stale[:2] == (412, "fleet_changed")

        fresh = (await world.request("GET", "/api/v1/fleet")).headers["etag"]
        assert fresh != tag
        await world.json(
            "PUT", "/api/v1/fleet", json=wanted, headers={"if-match": f'"other", {fresh}'}
        )
        assert (await world.request("GET", "/api/v1/fleet")).headers["etag"] == tag
        await world.json("PUT", "/api/v1/fleet", json=wanted, headers={"if-match": "*"})

    main(act)


def test_fleet_etag_changes_with_vms_not_with_events() -> None:
    """A busy fleet could never be put if every event were a change of it."""

    async def act(world: World) -> None:
        tag = (await world.request("GET", "/api/v1/fleet")).headers["etag"]
        event = (await world.json("POST", "/api/v1/vms/web-0/redeploy"))["event"]["id"]
        assert (await world.request("GET", "/api/v1/fleet")).headers["etag"] == tag

        await world.json("POST", f"/api/v1/events/{event}/approve")
        await world.engine.submit("web", Claim(event_id=event, vm="web-0", worker="w"), by="w")
        moved = Finish(event_id=event, vm="web-0", worker="w", tries=1, host="host-c")
        await world.engine.submit("web", moved, by="w")
        assert (await world.request("GET", "/api/v1/fleet")).headers["etag"] != tag

    main(act)


def test_fleet_schema_is_published() -> None:
    """Editors check a fleet file while it is written."""

    async def act(world: World) -> None:
        assert (await world.json("GET", "/api/v1/fleet/schema"))[
            "$schema"
        ] == "https://json-schema.org/draft/2020-12/schema"

    main(act)


def test_only_readyz_waits_for_the_store() -> None:
    """A load balancer must not send anybody to a server that knows no fleet; a supervisor must not
    kill it either.
    """

    async def act(world: World) -> None:
        assert (await world.error("GET", "/readyz"))[:2] == (503, "unavailable")
        assert await world.json("GET", "/healthz") == {"status": "ok"}
        world.engine.is_ready = True
        assert await world.json("GET", "/readyz") == {"status": "ready"}
        world.engine.clock_skew_seconds = 30.04
        assert await world.json("GET", "/readyz") == {
            "status": "ready",
            "problem": "starts no events: its clock is +30.0 s from the other servers'",
        }
        world.engine.stale_since = NOON
        response = await world.request("GET", "/readyz")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {
            "error": "unavailable",
            "message": "the store has not been reachable since 2030-01-31T12:00:00+00:00;"
            " polls are answered from memory",
            "facts": {"since": "2030-01-31T12:00:00+00:00"},
        }

    main(act)


def test_landing_lists_the_entry_points() -> None:
    """For a person who opens the port in a browser."""

    async def act(world: World) -> None:
        body = await world.json("GET", "/")

        assert (body["service"], body["api"], body["openapi"]) == (
            "forewarn",
            "/api/v1",
            "/api/openapi.json",
        )

    main(act)


def test_bug_is_a_500_without_a_traceback() -> None:
    """What is wrong inside belongs in the log, not on the wire."""

    class Broken(Operations):
        def definitions(self) -> Any:
            raise RuntimeError("the secret inside")

    async def act(world: World) -> None:
        async with make_client(
            make_app(world.service._replace(operations=Broken(world.engine, lambda: "")))
        ) as client:
            response = await client.get("/api/v1/fleet")

        assert response.status_code == 500
        assert response.json()["error"] == "problem"
        assert "secret" not in response.text

    main(act)


def test_every_operation_is_described_with_its_errors() -> None:
    """OpenAPI is how other people's tools learn of this API."""

    async def act(world: World) -> None:
        described = await world.json("GET", "/api/openapi.json")

        operations = {
            f"{verb.upper()} {path}": operation
            for path, item in described["paths"].items()
            for verb, operation in item.items()
        }
        assert len(operations) == 44
        for name, operation in operations.items():
            assert operation["description"].endswith("."), name
            assert name.endswith(("/", "healthz")) or "400" in operation["responses"], name
        assert operations["POST /api/v1/vms/{vm}/restart"]["responses"]["409"][
            "description"
        ].startswith("already_pending")
        assert operations["POST /api/v1/vms/{vm}/restart"]["requestBody"]["required"] is False
        assert list(operations["PUT /api/v1/fleet"]["requestBody"]["content"]) == [
            "application/json",
            "application/yaml",
        ]
        assert "Litestar" not in json.dumps(described)

    main(act)


def test_maintenance_types_match_the_rules() -> None:
    """The types and causes stand in the API's description by name; the rules own them."""
    body = Maintenance.__annotations__

    assert body["type"].__args__ == MAINTENANCE_TYPES
    assert body["cause"].__args__ == MAINTENANCE_CAUSES


def test_document_of_a_scope_is_what_its_vms_read() -> None:
    """Byte for byte, in every api-version; and reading it does not count as a poll."""

    async def act(world: World) -> None:
        await world.json("POST", "/api/v1/vms/web-0/restart")
        guest = make_client(Metadata(world.engine, Config(identify=(Identify.PATH,))))
        for version in VERSIONS:
            target = f"/as/web-0/metadata/scheduledevents?api-version={version.name}"
            read = await guest.get(target, headers={"metadata": "true"})
            query = f"?api_version={version.name}"
            shown = await world.request("GET", f"/api/v1/scopes/web/document{query}")
            assert (shown.status_code, shown.content) == (200, read.content), version.name
        bad = await world.error("GET", "/api/v1/scopes/web/document?api_version=2016-01-01")
        unknown = await world.error("GET", "/api/v1/scopes/nothing/document")

        assert bad[:2] == (400, "invalid")
        assert unknown[:2] == (404, "unknown_scope")

    main(act)
