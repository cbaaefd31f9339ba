"""The metadata application, without a socket."""

import json
from datetime import timedelta

import pytest

from forewarn.config import Config, NotBeforeFormat
from forewarn.core.command import Approve, Cancel, Claim, Finish, Restart, Seen, SetMembers
from forewarn.core.fleet import Policy, ScopeKind, Vm
from forewarn.engine.entry import Entry
from forewarn.errors import StoreUnusable
from tests.builders import NOON
from tests.unit.web.guest import EVENT_ID, EVENTS, TRUE, WEB_1, Guest, run, settle

APPROVAL = json.dumps({"StartRequests": [{"EventId": EVENT_ID}]}).encode()


def test_poll_gets_the_document_with_etag_and_length() -> None:
    async def main(guest: Guest) -> None:
        response = await guest.call(EVENTS, TRUE)
        assert (response.status, response.body) == (200, b'{"DocumentIncarnation":1,"Events":[]}')
        assert response.headers == {
            "content-type": "application/json; charset=utf-8",
            "etag": '"1"',
            "content-length": "37",
        }

    run(main)


def test_only_vms_of_the_scope_see_its_document() -> None:
    async def main(guest: Guest) -> None:
        await guest.enrol("db", Vm(name="db-0", address="10.0.1.1"))
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        mine, theirs = (
            await guest.call(EVENTS, TRUE),
            await guest.call(EVENTS, TRUE, address="10.0.0.2"),
        )
        assert mine.body == theirs.body
        assert mine.json["Events"][0]["EventId"] == EVENT_ID
        assert (await guest.call(EVENTS, TRUE, address="10.0.1.1")).json["Events"] == []

    run(main)


def test_first_poll_enables_the_scope_before_its_response() -> None:
    """An operator's restart right after the response must already be an event."""

    async def main(guest: Guest) -> None:
        assert guest.place.scope.seen_at is None
        await guest.call(EVENTS, TRUE)
        assert guest.place.scope.seen_at == NOON

    run(main)


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (EVENTS, ()),
        ("/metadata/scheduledevents", (TRUE,)),
        (EVENTS + "&api-version=2020-07-01", (TRUE,)),
    ],
)
def test_rejected_request_is_not_a_poll(
    target: str, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    """Only a client that can read the document should make operations wait for it."""

    async def main(guest: Guest) -> None:
        assert (await guest.call(target, *headers)).status == 400
        assert guest.place.scope.seen_at is None

    run(main)


def test_poll_of_a_known_vm_that_gets_an_error_is_reported() -> None:
    """Somebody should know that this VM reads no notice: its own log is where nobody looks."""

    async def main(guest: Guest) -> None:
        await guest.call(EVENTS)
        await guest.call(EVENTS, TRUE, (b"origin", b"http://page"))
        assert guest.errors == [
            ("web-0", 400, "Bad request. Required metadata header not specified"),
            ("web-0", 403, "Forbidden. Requests from web pages are not accepted"),
        ]

    run(main)


def test_errors_of_others_and_of_other_requests_are_not_reported_as_polls() -> None:
    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.call("/metadata/nothing", TRUE)
        await guest.call(EVENTS, method="POST")
        await guest.call(EVENTS, TRUE, address="10.9.9.9")
        signed = (b"x-forewarn-host", b"hostd")
        assert (await guest.call(EVENTS, TRUE, signed)).status == 403, "the relay counts this"
        assert guest.errors == []

    run(main)


def test_head_request_is_not_a_poll() -> None:
    async def main(guest: Guest) -> None:
        assert (await guest.call(EVENTS, TRUE, method="HEAD")).status == 200
        assert guest.place.scope.seen_at is None

    run(main)


def test_not_modified_counts_as_a_poll() -> None:
    async def main(guest: Guest) -> None:
        assert (await guest.call(EVENTS, TRUE, (b"if-none-match", b'"1"'))).status == 304
        assert guest.place.scope.seen_at == NOON

    run(main)


def test_poll_is_recorded_hourly() -> None:
    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.clock.advance(timedelta(minutes=59))
        await guest.call(EVENTS, TRUE)
        assert guest.place.scope.seen_at == NOON
        await guest.clock.advance(timedelta(minutes=1))
        await guest.call(EVENTS, TRUE)
        await settle()
        assert guest.place.scope.seen_at == NOON + timedelta(hours=1)

    run(main)


async def boot(guest: Guest) -> None:
    """`web-0` polled, and was restarted since."""
    await guest.call(EVENTS, TRUE)
    await guest.restart()
    for command in (
        Approve(event_ids=(EVENT_ID,)),
        Claim(event_id=EVENT_ID, vm="web-0", worker="w1"),
        Finish(event_id=EVENT_ID, vm="web-0", worker="w1", tries=1, is_back=False),
    ):
        await guest.engine.submit("web", command, by="test")
    assert guest.place.booting == {"web-0"}


def test_poll_of_a_booting_vm_ends_its_impact() -> None:
    """In the background: the VM gets the document as it was when it came up, without a delay."""

    async def main(guest: Guest) -> None:
        await boot(guest)
        response = await guest.call(EVENTS, TRUE)
        assert [event["EventId"] for event in response.json["Events"]] == [EVENT_ID]
        await settle()

        assert (guest.place.scope.events, guest.place.booting) == ((), None)
        assert (await guest.call(EVENTS, TRUE)).json["Events"] == []

    run(main)


@pytest.mark.parametrize(
    ("target", "method", "address"),
    [
        (EVENTS, "GET", "10.0.0.2"),
        (EVENTS, "HEAD", "10.0.0.1"),
        ("/metadata/versions", "GET", "10.0.0.1"),
        ("/metadata/scheduledevents?api-version=1999-01-01", "GET", "10.0.0.1"),
    ],
)
def test_only_a_poll_of_the_booting_vm_ends_its_impact(
    target: str, method: str, address: str
) -> None:
    async def main(guest: Guest) -> None:
        await boot(guest)
        await guest.call(target, TRUE, method=method, address=address)
        await settle()

        assert guest.place.booting == {"web-0"}

    run(main)


def test_booting_vm_is_served_while_the_store_is_down() -> None:
    """A later poll tries again to record that it is back."""

    async def main(guest: Guest) -> None:
        await boot(guest)
        guest.store.is_lost = True
        assert (await guest.call(EVENTS, TRUE)).status == 200
        await settle()
        assert guest.place.booting == {"web-0"}
        guest.store.is_lost = False
        await guest.call(EVENTS, TRUE)
        await settle()

        assert guest.place.booting is None

    run(main)


def test_polls_are_served_while_the_store_is_down() -> None:
    async def main(guest: Guest) -> None:
        guest.store.is_lost = True
        assert (await guest.call(EVENTS, TRUE)).status == 200

    run(main)


@pytest.mark.parametrize("known", [b'"1"', b"1", b'W/"1"', b'"7", "1"', b"*"])
def test_matching_etag_gets_a_304(known: bytes) -> None:
    async def main(guest: Guest) -> None:
        response = await guest.call(EVENTS, TRUE, (b"if-none-match", known))
        assert (response.status, response.body, response.headers) == (304, b"", {"etag": '"1"'})

    run(main)


@pytest.mark.parametrize("known", [b"0", b'"2"', b"11", b'"-1"'])
def test_other_etag_gets_the_document(known: bytes) -> None:
    """0 is what Microsoft's own sample sends at its start."""

    async def main(guest: Guest) -> None:
        assert (await guest.call(EVENTS, TRUE, (b"if-none-match", known))).status == 200

    run(main)


def test_client_that_is_not_a_vm_is_forbidden() -> None:
    async def main(guest: Guest) -> None:
        for target in (EVENTS, "/metadata/versions", "/nothing"):
            response = await guest.call(target, TRUE, address="10.9.9.9")
            assert (response.status, response.json) == (
                403,
                {"error": "Forbidden. 10.9.9.9 is not a VM of this fleet"},
            )

    run(main)


def test_unknown_path_is_not_found() -> None:
    async def main(guest: Guest) -> None:
        for path in (
            "/",
            "/metadata?api-version=2021-02-01",
            "/metadata/identity",
            "/metadata/attested/document",
            "/metadata/latest/scheduledevents",
            "/as/web-0" + EVENTS,
        ):
            response = await guest.call(path, TRUE)
            assert (response.status, list(response.json)) == (404, ["error"])

    run(main)


@pytest.mark.parametrize("path", ["/metadata", "/Metadata/", "/metadata?api-version=2024-07-09"])
def test_root_names_the_newest_versions(path: str) -> None:
    """Some clients probe for the service there; Azure answers like this."""

    async def main(guest: Guest) -> None:
        response = await guest.call(path, TRUE)
        assert response.status == 400
        assert response.json["newest-versions"] == ["2025-04-07", "2024-07-17", "2024-03-15"]
        bare = await guest.call(path)
        assert bare.json == {"error": "Bad request. Required metadata header not specified"}

    run(main)


TOKEN = "/metadata/identity/oauth2/token"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ((TRUE,), b"Identity not found"),
        ((), b"Required metadata header not specified"),
    ],
)
def test_token_request_learns_that_there_is_no_identity(
    headers: tuple[tuple[bytes, bytes], ...], reason: bytes
) -> None:
    """azure-identity gives up at once; after a 404 it tries again for 24 seconds."""

    async def main(guest: Guest) -> None:
        response = await guest.call(f"{TOKEN}?api-version=2018-02-01&resource=x", *headers)
        assert response.status == 400
        assert response.body == b'{"error":"invalid_request","error_description":"%b"}' % reason

    run(main)


def test_date_that_is_not_served_is_a_404_for_polls_and_approvals() -> None:
    """So OpenShift's termination handler falls back to a version that is served."""
    target = "/metadata/scheduledevents?api-version=2024-07-09"

    async def main(guest: Guest) -> None:
        for method, body in (("GET", b""), ("POST", APPROVAL)):
            response = await guest.call(target, TRUE, method=method, body=body)
            assert response.status == 404
            assert response.body == b'{"error":"Not found. Invalid version requested"}'

    run(main)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_wrong_method_gets_allow(method: str) -> None:
    async def main(guest: Guest) -> None:
        response = await guest.call(EVENTS, TRUE, method=method)
        assert (response.status, response.headers["allow"], list(response.json)) == (
            405,
            "GET, POST, HEAD",
            ["error"],
        )
        response = await guest.call("/metadata/versions", TRUE, method=method)
        assert (response.status, response.headers["allow"]) == (405, "GET, HEAD")

    run(main)


def test_legacy_path_is_served_only_if_configured() -> None:
    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        response = await guest.call("/metadata/latest/scheduledevents")
        assert response.json["Events"][0]["Resources"] == ["_web-0"]
        assert (
            await guest.call("/metadata/latest/scheduledevents", method="POST", body=APPROVAL)
        ).status == 200

    run(main, Config(legacy_path=True))


def test_not_before_can_be_iso_8601() -> None:
    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        old = await guest.call("/metadata/scheduledevents?api-version=2017-08-01", TRUE)
        new = await guest.call(EVENTS, TRUE)
        assert old.json["Events"][0]["NotBefore"] == "2026-03-04T12:15:00Z"
        assert new.json["Events"][0]["NotBefore"] == "Wed, 04 Mar 2026 12:15:00 GMT"

    run(main, Config(not_before_format=NotBeforeFormat.DOCUMENTED))


def test_approval_gets_an_empty_200() -> None:
    """An empty body, because a widely used client parses whatever else it gets."""

    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        response = await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL, address="10.0.0.2")
        assert (response.status, response.body, response.headers) == (
            200,
            b"",
            {"content-length": "0"},
        )
        event = guest.place.scope.events[0]
        assert (event.status, event.approvals) == ("Started", ("web-1",))

    run(main)


def test_approving_again_or_late_is_a_200() -> None:
    """Clients race with the end of an event, and retry what fails."""

    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        await guest.engine.submit("web", Cancel(event_id=EVENT_ID), by="test")
        for _ in range(2):
            assert (await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)).status == 200

    run(main)


def test_approval_of_an_unknown_event_is_a_400() -> None:
    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        both = json.dumps({"StartRequests": [{"EventId": EVENT_ID}, {"EventId": "X"}]}).encode()
        response = await guest.call(EVENTS, TRUE, method="POST", body=both)
        assert (response.status, list(response.json)) == (400, ["error"])
        assert guest.place.scope.events[0].approvals == ()

    run(main)


def test_a_vm_cannot_approve_an_event_of_another_scope() -> None:
    async def main(guest: Guest) -> None:
        await guest.enrol("db", Vm(name="db-0", address="10.0.1.1"))
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        assert (
            await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL, address="10.0.1.1")
        ).status == 400
        assert guest.place.scope.events[0].approvals == ()

    run(main)


def test_vm_removed_during_its_approval_approves_nothing() -> None:
    async def main(guest: Guest) -> None:
        async def leave() -> None:
            await guest.enrol("web", WEB_1)

        await guest.call(EVENTS, TRUE)
        await guest.restart("web-1")
        assert (
            await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL, meanwhile=leave)
        ).status == 403
        assert guest.place.scope.events[0].approvals == ()

    run(main)


def test_approval_is_by_the_vm_at_the_address_when_the_body_ends() -> None:
    """The body may take ten seconds: an address that was given to another VM meanwhile must not
    approve for the old one.
    """

    async def main(guest: Guest) -> None:
        async def move() -> None:
            await guest.enrol("web", WEB_1)
            await guest.enrol("db", Vm(name="db-0", address="10.0.0.1"))

        await guest.call(EVENTS, TRUE)
        await guest.restart("web-1")
        assert (
            await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL, meanwhile=move)
        ).status == 400
        assert guest.place.scope.events[0].approvals == ()

    run(main)


def test_vm_renamed_during_its_approval_approves_as_the_new_vm() -> None:
    async def main(guest: Guest) -> None:
        async def rename() -> None:
            await guest.enrol("web", WEB_1, Vm(name="web-2", address="10.0.0.1"))

        await guest.call(EVENTS, TRUE)
        await guest.restart("web-1")
        assert (
            await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL, meanwhile=rename)
        ).status == 200
        assert guest.place.scope.events[0].approvals == ("web-2",)

    run(main)


def test_vm_removed_during_its_first_poll_is_forbidden() -> None:
    """The first poll of a scope may be held for two minutes; then it is answered as what the client
    is by then.
    """

    async def main(guest: Guest) -> None:
        def leave(entry: Entry) -> None:
            guest.engine.board.withdraw("web", guest.place.revision + 1)

        guest.engine.subscribe_entries(leave)
        assert (await guest.call(EVENTS, TRUE)).status == 403

    run(main)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("version", ["2017-03-01", "2020-07-01"])
@pytest.mark.parametrize("origin", [b"http://web.example", b"http://169.254.169.254", b"null"])
def test_web_page_can_neither_read_nor_approve(method: str, version: str, origin: bytes) -> None:
    """2017-03-01 needs no header that a page could not send.

    Browsers add an Origin; no client of the protocol does.
    """

    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        target = f"/metadata/scheduledevents?api-version={version}"
        response = await guest.call(target, TRUE, (b"origin", origin), method=method, body=APPROVAL)
        assert (response.status, response.json) == (
            403,
            {"error": "Forbidden. Requests from web pages are not accepted"},
        )
        assert guest.place.scope.events[0].approvals == ()

    run(main)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"StartRequests":[]}', b'{"StartRequests":[{}]}', b"\xff"]
)
def test_malformed_approval_is_a_400(body: bytes) -> None:
    async def main(guest: Guest) -> None:
        response = await guest.call(EVENTS, TRUE, method="POST", body=body)
        assert (response.status, list(response.json)) == (400, ["error"])

    run(main)


def test_approval_that_the_store_loses_is_a_503() -> None:
    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        guest.store.is_lost = True
        response = await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)
        assert (response.status, response.headers["retry-after"], list(response.json)) == (
            503,
            "1",
            ["error"],
        )

    run(main)


def test_store_errors_are_not_shown_to_guests(caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong with which file is for the operator, who reads it in the log."""

    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        guest.store.is_lost = True
        guest.store.error = StoreUnusable("/var/lib/forewarn/store.db: the disk is full")
        response = await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)
        assert (response.status, response.json) == (
            503,
            {"error": "Service unavailable. Try again later"},
        )

    run(main)
    (line,) = [record for record in caplog.records if record.message == "guest request failed"]
    assert getattr(line, "facts", {})["problem"] == "/var/lib/forewarn/store.db: the disk is full"


def test_approval_ignores_if_none_match() -> None:
    """Microsoft's own sample sends it there too."""

    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        assert (
            await guest.call(EVENTS, TRUE, (b"if-none-match", b'"2"'), method="POST", body=APPROVAL)
        ).status == 200

    run(main)


def test_instance_name_is_the_name_in_resources() -> None:
    """Without a newline: clients compare it as it is."""

    async def main(guest: Guest) -> None:
        response = await guest.call(
            "/Metadata/Instance/Compute/name/?api-version=2021-02-01&format=text", TRUE
        )
        assert (response.status, response.body, response.headers["content-type"]) == (
            200,
            b"web-0",
            "text/plain; charset=utf-8",
        )
        response = await guest.call(
            "/metadata/instance?api-version=2021-02-01", TRUE, address="10.0.0.2"
        )
        assert response.json["compute"]["name"] == "web-1"

    run(main)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/metadata/instance/compute/name?api-version=2021-02-01", 400),
        ("/metadata/instance/compute/nothing?api-version=2021-02-01", 404),
        ("/metadata/instance?api-version=2020-07-01", 400),
        ("/metadata/instances?api-version=2021-02-01", 404),
    ],
)
def test_instance_rejects_unknown_paths(target: str, status: int) -> None:
    async def main(guest: Guest) -> None:
        assert (await guest.call(target, TRUE)).status == status

    run(main)


def test_versions_path_needs_no_api_version() -> None:
    async def main(guest: Guest) -> None:
        assert (await guest.call("/metadata/versions", TRUE)).json["apiVersions"][0] == "2017-03-01"
        assert (await guest.call("/metadata/versions")).status == 400

    run(main)


def test_too_many_requests_get_a_429() -> None:
    async def main(guest: Guest) -> None:
        responses = [await guest.call(EVENTS, TRUE) for _ in range(6)]
        assert [response.status for response in responses] == [200] * 5 + [429]
        assert (responses[5].headers["retry-after"], list(responses[5].json)) == ("1", ["error"])
        assert (await guest.call(EVENTS, TRUE, address="10.0.0.2")).status == 200

    run(main, Config(requests_per_second=5))


def test_bug_is_a_500_and_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(guest: Guest) -> None:
        guest.place.scope = None  # type: ignore[assignment]
        response = await guest.call(EVENTS, TRUE)
        assert (response.status, list(response.json)) == (500, ["error"])

    run(main)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "request failed"
    ]


def test_etag_of_a_deleted_vm_never_matches_again() -> None:
    """A guest, or a cache before it, that kept the number would take a new announcement for the one
    it has read.
    """

    async def main(guest: Guest) -> None:
        async def declare(*vms: Vm) -> None:
            await guest.engine.submit(
                "solo", SetMembers(kind=ScopeKind.VM, policy=Policy(), vms=vms), by="test"
            )

        async def announced() -> bytes:
            await guest.engine.submit("solo", Seen(), by="test")
            await guest.engine.submit("solo", Restart(vm="solo", event_id=EVENT_ID), by="test")
            response = await guest.call(EVENTS, TRUE, address="10.0.0.7")
            assert b"Reboot" in response.body
            return str(response.headers["etag"]).encode()

        await declare(Vm(name="solo", address="10.0.0.7"))
        old = await announced()
        await declare()
        await declare(Vm(name="solo", address="10.0.0.7"))
        await announced()

        assert (
            await guest.call(EVENTS, TRUE, (b"if-none-match", old), address="10.0.0.7")
        ).status == 200

    run(main)
