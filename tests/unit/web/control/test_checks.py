"""What the control API refuses: everything malformed gets a 4xx in the one form there is, and
changes nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forewarn.errors import Error
from forewarn.platform.remote import HostReport, ReportedVm
from forewarn.web.http_status import status_of
from tests.unit.web.control_world import FLEET, World, main

DOCS = Path(__file__).parents[4] / "docs"
RESTART, MAINTAIN = "/api/v1/vms/web-0/restart", "/api/v1/hosts/host-a/maintain"
JSON = {"content-type": "application/json"}
FLEET_BYTES_MAX = 64 * 1024 * 1024
EARLIEST_START = "the earliest start, such as 2030-01-31T12:00:00Z; at least the minimum notice"
DURATION = "the length of the impact in whole seconds; -1 if unknown"
TYPES = "one of Freeze, Reboot, Redeploy"
NO_BODY = "body: expected none, or {}: the path says it all"


def error_of(method: str, path: str, **more: Any) -> tuple[int, str, str]:
    """Status, code and message; nothing has changed."""
    found: list[tuple[int, str, str]] = []

    async def act(world: World) -> None:
        found.append(await world.error(method, path, **more))

    main(act)
    return found[0]


@pytest.mark.parametrize(
    "host", ["a:b", "a:1:b", "a:-1", "a:99999999", "127.0.0.1:65536", "127.0.0.1:b", "[", "a b"]
)
@pytest.mark.parametrize("path", ["/api/v1/vms?limit=x", "/healthz", "/x", "/", RESTART])
def test_malformed_host_writes_nothing_to_the_log(
    host: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a token, 30 bytes became 4 KB of traceback. The connection refuses most of these;
    what gets here must not be a bug either.
    """
    status, _, _ = error_of("GET", path, headers={"host": host})
    assert 400 <= status < 500
    assert caplog.records == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (RESTART, b'{"when": 1}', "body.when: unknown member; expected one of not_before"),
        (
            RESTART,
            b'{"not_befor": 1}',
            "body.not_befor: unknown member; did you mean 'not_before'?",
        ),
        (RESTART, b'{"not_before": 0}', f"body.not_before: expected {EARLIEST_START}, got 0"),
        (
            RESTART,
            b'{"not_before": "soon"}',
            f"body.not_before: expected {EARLIEST_START}, got 'soon'",
        ),
        (RESTART, b"[]", "body: expected a mapping with not_before, got []"),
        (RESTART, b"null", "body: expected a mapping with not_before, got nothing"),
        (RESTART, b"{", "body: Input data was truncated"),
        (RESTART, b"\xff", "body: JSON is malformed: invalid character (byte 0)"),
        (
            RESTART,
            b"not_before=2030-01-31T13:00:00Z",
            "body: JSON is malformed: invalid character (byte 4)",
        ),
        (
            RESTART,
            b'{"not_before":' * 1100,
            "body: maximum recursion depth exceeded while deserializing an object",
        ),
        (
            RESTART,
            b'{"not_before":' * 4000,  # it is not decoded again to find out what was expected
            "body.not_before: expected `datetime | null`, got `object`",
        ),
        (MAINTAIN, b"", f"body.type: expected {TYPES}, got nothing"),
        (MAINTAIN, b'{"type": "Freez"}', f"body.type: expected {TYPES}, got 'Freez'"),
        (MAINTAIN, b'{"type": "Preempt"}', f"body.type: expected {TYPES}, got 'Preempt'"),
        (
            MAINTAIN,
            b'{"type": "Freeze", "duration_seconds": "9"}',
            f"body.duration_seconds: expected {DURATION}, got '9'",
        ),
        (
            MAINTAIN,
            b'{"type": "Freeze", "duration_seconds": 1.5}',
            f"body.duration_seconds: expected {DURATION}, got 1.5",
        ),
        (
            MAINTAIN,
            b'{"type": "Freeze", "description": 5}',
            "body.description: expected text that VMs read, got 5",
        ),
        ("/api/v1/hosts/host-a/fail", b'{"not_before": null}', NO_BODY),
        ("/api/v1/events/X/cancel", b'{"vm": "web-0"}', NO_BODY),
    ],
)
def test_invalid_body_is_rejected_by_field(path: str, body: bytes, message: str) -> None:
    """An ignored field would be an ignored request."""
    assert error_of("POST", path, content=body, headers=JSON) == (400, "invalid", message)


@pytest.mark.parametrize(
    "not_before",
    [
        "2030-01-31T13:00:00",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        "2031-06-01T00:00:00Z",
    ],
)
def test_impossible_not_before_is_rejected(not_before: str) -> None:
    """Without a time zone, before all time, after it, or further away than anybody can mean."""
    status, code, message = error_of("POST", RESTART, json={"not_before": not_before})

    assert (status, code) in ((400, "invalid"), (409, "notice_too_short")), message


@pytest.mark.parametrize(
    ("actual", "part"),
    [
        ({"duration_seconds": -2}, "duration_seconds is -1 (unknown) to"),
        ({"duration_seconds": 10**30}, "duration_seconds is -1 (unknown) to"),
        ({"description": "x" * 10_000}, "a description has at most"),
    ],
)
def test_maintenance_out_of_range_is_rejected(actual: dict[str, Any], part: str) -> None:
    """Everything has a limit, and the message names it."""
    status, code, message = error_of("POST", MAINTAIN, json={"type": "Freeze"} | actual)

    assert (status, code) == (400, "invalid")
    assert part in message


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("dryrun=true", "unknown query parameter 'dryrun'; accepted: dry_run"),
        ("dry_run=true&dry_run=false", "duplicate query parameter 'dry_run'"),
        ("limit=5", "unknown query parameter 'limit'; accepted: dry_run"),
        ("dry_run=maybe", "dry_run: Expected `bool`, got 'maybe'"),
    ],
)
def test_a_misspelt_dry_run_never_changes_the_fleet(query: str, message: str) -> None:
    """The one parameter whose being ignored would delete a fleet."""
    assert error_of("PUT", f"/api/v1/fleet?{query}", content=b"scopes: []") == (
        400,
        "invalid",
        message,
    )


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "many", ""])
def test_limit_out_of_range_is_rejected(limit: str) -> None:
    """Nothing is unlimited."""
    status, code, message = error_of("GET", f"/api/v1/vms?limit={limit}")

    assert (status, code) == (400, "invalid")
    assert message.startswith("limit: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body:1: expected a mapping with scopes, hosts, got nothing"),
        (b"scopes: [", "body:1: not valid YAML or JSON"),
        (b"scopes:\n- name: a\n  kind: pool\n", "body:3: scopes[0].kind: expected one of"),
        (b'{"scopes": [], "hots": []}', "body:1: hots: unknown member; did you mean 'hosts'?"),
        (b"\xff", "body:1: expected UTF-8, got the byte 0xff"),
        (b"scopes: " + b"[" * 100_000, "body:1: "),
    ],
)
def test_invalid_fleet_is_rejected_by_line_and_field(body: bytes, message: str) -> None:
    """Half of a fleet is worse than none."""
    status, code, actual = error_of("PUT", "/api/v1/fleet", content=body)

    assert (status, code) == (400, "invalid")
    assert actual.startswith(message)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/api/v1/scopes/nope", "unknown_scope"),
        ("GET", "/api/v1/vms/nope", "unknown_vm"),
        ("POST", "/api/v1/vms/nope/restart", "unknown_vm"),
        ("GET", "/api/v1/hosts/nope", "unknown_host"),
        ("POST", "/api/v1/hosts/nope/fail", "unknown_host"),
        ("GET", "/api/v1/events/nope", "unknown_event"),
        ("POST", "/api/v1/events/00000000-0000-4000-8000-00000000FFFF/approve", "unknown_event"),
        ("GET", "/api/v1/vms/web-0%2F..%2Fweb-1", "not_found"),
        ("GET", "/api/v2/vms", "not_found"),
        ("GET", "/%00", "not_found"),
    ],
)
def test_unknown_names_and_paths_have_the_error_form(method: str, path: str, code: str) -> None:
    """A script reads the code; it must not need to know whose 404 it is."""
    assert error_of(method, path)[:2] == (404, code)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("DELETE", "/api/v1/vms", "GET"), ("GET", RESTART, "POST"), ("POST", "/healthz", "GET")],
)
def test_wrong_method_gets_405_with_allow(method: str, path: str, allow: str) -> None:
    """A 405 must have Allow (RFC 9110, 15.5.6)."""

    async def act(world: World) -> None:
        response = await world.request(method, path)

        assert (response.status_code, response.json()["error"]) == (405, "method_not_allowed")
        assert allow in response.headers["allow"].split(", ")

    main(act)


def test_body_one_byte_too_large_is_rejected() -> None:
    """64 KiB, and 64 MiB for a fleet: clients cannot fill our memory."""
    body = b'{"not_before": null' + b" " * (64 * 1024)

    assert error_of("POST", RESTART, content=body[: 64 * 1024] + b"}", headers=JSON) == (
        413, "body_too_large", "the body is too large; at most 65536 bytes are accepted",
    )  # fmt: skip
    assert error_of(
        "PUT", "/api/v1/fleet", content=FLEET + b" " * (FLEET_BYTES_MAX + 1 - len(FLEET))
    )[:2] == (
        413,
        "body_too_large",
    )


def test_body_of_maximum_size_is_accepted() -> None:
    """A limit that is off by one refuses what it promises to take."""

    async def act(world: World) -> None:
        body = b'{"not_before": null' + b" " * (64 * 1024 - 20) + b"}"
        assert len(body) == 64 * 1024
        assert (await world.request("POST", RESTART, content=body, headers=JSON)).status_code == 202

    main(act)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "192.0.2.1:8081", "[::1", ""]
)
def test_foreign_host_name_is_rejected(host: str) -> None:
    """A page whose name was rebound to 127.0.0.1 still says its own name in Host."""
    assert error_of("GET", "/api/v1/vms", headers={"host": host})[:2] == (403, "forbidden")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8081", "127.0.0.1", "127.0.0.2:1", "[::1]:8081", "LOCALHOST"]
)
def test_loopback_names_are_accepted(host: str) -> None:
    """People forward ports and type what they are used to."""

    async def act(world: World) -> None:
        assert (
            await world.request("GET", "/api/v1/vms", headers={"host": host})
        ).status_code == 200

    main(act)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1:80819"]
)
def test_foreign_origin_is_rejected(origin: str) -> None:
    """A browser sends simple requests across sites without asking;

    Origin tells whose page it was.
    """
    assert error_of("POST", RESTART, headers={"origin": origin})[:2] == (403, "forbidden")
    assert error_of("PUT", "/api/v1/fleet", content=FLEET, headers={"origin": origin})[:2] == (
        403,
        "forbidden",
    )


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_cross_site_requests_are_rejected(site: str) -> None:
    """Newer browsers send Sec-Fetch-Site with every request, also without an Origin."""
    assert error_of("POST", RESTART, headers={"sec-fetch-site": site})[:2] == (403, "forbidden")


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain;json",
        "",
    ],
)
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_simple_cross_site_requests_are_rejected(kind: str, body: bytes) -> None:
    """These are the types of a simple request, and an old browser sends a form without Origin.

    The form may be empty, too.
    """
    assert error_of("POST", RESTART, content=body, headers={"content-type": kind})[:2] == (
        415,
        "unsupported_media_type",
    )


def test_body_without_content_type_is_rejected() -> None:
    """A script can send a body of no type across sites, and calls it simple."""
    status, code, message = error_of("POST", RESTART, content=b"{}")

    assert (status, code, message) == (
        415,
        "unsupported_media_type",
        "Content-Type is ''; expected application/json",
    )


def test_own_origin_is_accepted() -> None:
    """The console will be served from here."""

    async def act(world: World) -> None:
        assert (
            await world.request("POST", RESTART, headers={"origin": "http://127.0.0.1:8081"})
        ).status_code == 202

    main(act)


def test_every_error_code_is_documented_with_its_status() -> None:
    """A code that is not documented cannot be handled."""
    rows = [
        line for line in (DOCS / "control.md").read_text().splitlines() if line.startswith("| `")
    ]

    for problem in tree(Error):
        if problem.__module__ == "forewarn.errors":
            assert any(
                f"`{problem.code}`" in row.split("|")[1] and f" {status_of(problem)} " in row
                for row in rows
            ), problem.code


def test_every_field_of_an_inventory_is_documented() -> None:
    """Without that, a daemon of another make cannot report it."""
    lines = (DOCS / "control.md").read_text().splitlines()
    [row] = [line for line in lines if line.startswith("| `inventory` |")]

    fields = (*ReportedVm.__struct_fields__, *HostReport.__struct_fields__)
    assert [field for field in fields if f"`{field}`" not in row] == []


def tree(kind: type[Error]) -> Iterator[type[Error]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


@pytest.mark.parametrize(
    ("method", "path", "more", "field"),
    [
        ("GET", "/api/v1/vms?limit=0", {}, "limit"),
        ("GET", "/api/v1/vms?limit=x", {}, "limit"),
        ("GET", "/api/v1/stream?after=-1", {}, "after"),
        ("GET", "/api/v1/stream", {"headers": {"last-event-id": "x"}}, "Last-Event-ID"),
        (
            "POST",
            "/api/v1/vms/web-0/restart",
            {"json": {"not_before": "2030-01-31T13:00:00"}},
            "not_before",
        ),
    ],
)
def test_errors_name_the_field_for_programs(
    method: str, path: str, more: dict[str, Any], field: str
) -> None:
    """A program that fills in a form shows the message beside the field."""

    async def act(world: World) -> None:
        body = (await world.request(method, path, **more)).json()

        assert (body["error"], body["facts"]) == ("invalid", {"field": field})

    main(act)
