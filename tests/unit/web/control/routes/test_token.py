"""Who may call the control API: tokens over the real engine, role by role, and what becomes of
those that are none.
"""

import asyncio
import logging
from datetime import timedelta
from typing import Any

import httpx
import pytest

from forewarn.auth.tokens import Role
from forewarn.web.control.app import make_app
from forewarn.web.service import build_service
from tests.history import entries_of
from tests.unit.web.control_world import World, main, make_client

SECRET = "5ec4e7" + "0" * 58
ADMIN = {"authorization": f"Bearer fw_root_{SECRET}"}


async def token(world: World, name: str, role: str, **more: Any) -> dict[str, str]:
    """A new token, as the header that shows it."""
    body = await world.json(
        "POST", "/api/v1/tokens", json={"name": name, "role": role, **more}, headers=ADMIN
    )
    return {"authorization": f"Bearer {body['text']}"}


ARM = (
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/web-0"
    "/providers/Microsoft.Maintenance/scheduledevents"
)


async def with_admin(world: World) -> None:
    await world.service.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("GET", "/api/v1/vms", "viewer"),
        ("GET", "/api/v1/fleet", "viewer"),
        ("HEAD", "/api/v1/events", "viewer"),
        ("POST", "/api/v1/vms/web-0/restart", "operator"),
        ("POST", "/api/v1/hosts/host-a/fail", "operator"),
        ("POST", f"{ARM}/x/acknowledge?api-version=2023-10-01-preview", "operator"),
        ("POST", f"{ARM}?api-version=2025-10-01-preview", "operator"),
        ("PUT", "/api/v1/fleet?dry_run=true", "operator"),
        ("PUT", "/api/v1/fleet", "admin"),
        ("GET", "/api/v1/tokens", "admin"),
        ("POST", "/api/v1/tokens", "admin"),
        ("DELETE", "/api/v1/tokens/viewer", "admin"),
    ],
)
def test_roles_allow_their_routes_and_no_others(method: str, path: str, needs: str) -> None:
    """The table of docs/security.md, request by request."""

    async def act(world: World) -> None:
        await with_admin(world)
        roles = ["viewer", "operator", "admin"]
        holders = {role: await token(world, role, role) for role in roles}

        statuses = {
            role: (await world.request(method, path, headers=holders[role])).status_code
            for role in roles
        }

        assert [statuses[role] == 403 for role in roles] == [
            roles.index(role) < roles.index(needs) for role in roles
        ], statuses

    main(act)


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"authorization": "Basic cm9vdDpyb290"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer fw_root_" + "0" * 64},
        {"authorization": "Bearer fw_nobody_" + SECRET},
        {"authorization": f"Bearer fw_root_{SECRET}0"},
        {"authorization": f"Bearer fw_root_{SECRET.upper()}"},
        {"authorization": SECRET},
        {"authorization": "Bearer \u00e9".encode("latin-1").decode("latin-1")},
    ],
)
def test_first_token_makes_tokens_required(shown: dict[str, str]) -> None:
    """Loopback is not enough any more: other users of the machine reach it too.

    The response does not say what was wrong.
    """

    async def act(world: World) -> None:
        await with_admin(world)
        response = await world.client.get(
            "/api/v1/vms", headers=[(k.encode(), v.encode("latin-1")) for k, v in shown.items()]
        )

        assert (response.status_code, response.json()["error"]) == (401, "unauthorized")
        assert response.headers["www-authenticate"] == 'Bearer realm="forewarn"'
        assert "Authorization: Bearer TOKEN" in response.json()["message"]

    main(act)


@pytest.mark.parametrize("path", ["/", "/healthz", "/api/openapi.json", "/api/docs"])
def test_public_paths_need_no_token(path: str) -> None:
    """A load balancer has none, and a browser cannot show one before it has a page."""

    async def act(world: World) -> None:
        await with_admin(world)
        assert (await world.request("GET", path)).status_code == 200

    main(act)


def test_all_other_paths_need_a_token() -> None:
    """A new route needs a token unless it is marked as public."""

    async def act(world: World) -> None:
        await with_admin(world)
        described = await world.json("GET", "/api/openapi.json")
        for path, item in described["paths"].items():
            for verb, operation in item.items():
                where = path.replace("{", "").replace("}", "")
                status = (await world.request(verb.upper(), where)).status_code
                is_open = operation["security"] == []
                assert (status != 401) == is_open, f"{verb} {path}"
                is_sign_in = (verb, path) == ("post", "/api/v1/session")
                assert is_open == (path in ("/", "/healthz", "/readyz") or is_sign_in), path

    main(act)


def test_token_is_ignored_while_none_is_required() -> None:
    """FOREWARN_TOKEN may be set for another service."""

    async def act(world: World) -> None:
        assert (
            await world.request("GET", "/api/v1/vms", headers={"authorization": "Bearer old"})
        ).status_code == 200
        assert world.service.tokens.refused_count == 0

    main(act)


def test_beyond_loopback_a_token_is_always_required() -> None:
    """Revoking the last token must not open the API to everybody."""

    async def act(world: World) -> None:
        await with_admin(world)
        await world.service.tokens.revoke("root", by="test")
        async with make_client(make_app(world.service, host="0.0.0.0", delay_seconds=0)) as outside:
            assert (
                await outside.get("/api/v1/vms", headers={"host": "ops.example"})
            ).status_code == 401
            assert (await outside.get("/api/v1/vms", headers=ADMIN)).status_code == 401
            assert (
                await outside.get("/healthz", headers={"host": "10.1.2.3:8081"})
            ).status_code == 200

    main(act)


def test_request_with_a_token_may_use_any_host_name() -> None:
    """The Host check is for DNS rebinding, and such a page has no token."""

    async def act(world: World) -> None:
        await with_admin(world)
        assert (
            await world.request("GET", "/api/v1/vms", headers=ADMIN | {"host": "ops.example"})
        ).status_code == 200
        assert (
            await world.request("GET", "/api/v1/vms", headers={"host": "ops.example"})
        ).status_code == 403
        strange = ADMIN | {"origin": "http://evil.example"}
        assert (
            await world.request("POST", "/api/v1/vms/web-0/restart", headers=strange)
        ).status_code == 403

    main(act)


def test_history_names_the_token() -> None:
    """Who did it, not from which address."""

    async def act(world: World) -> None:
        await world.json("POST", "/api/v1/vms/web-1/restart")
        await with_admin(world)
        holder = await token(world, "ci-7", "operator")
        await world.json("POST", "/api/v1/vms/web-0/restart", headers=holder)

        entries = await entries_of(world.engine.store)

        assert [(entry.by, str(entry.what), entry.detail) for entry in entries[-4:]] == [
            ("operator", "scheduled", "Reboot of web-1"),
            ("test", "token-created", "root (admin)"),
            ("token root", "token-created", "ci-7 (operator)"),
            ("token ci-7", "scheduled", "Reboot of web-0"),
        ]

    main(act)


def test_token_is_shown_once_and_stored_as_a_digest() -> None:
    """The store, the list and backups do not contain the token."""

    async def act(world: World) -> None:
        await with_admin(world)
        key = {"idempotency-key": "k1"}
        request = {"name": "ci", "role": "operator", "expires": "12h"}
        body = await world.json("POST", "/api/v1/tokens", json=request, headers=ADMIN | key)
        secret = body["text"].removeprefix("fw_ci_")

        listed = await world.json("GET", "/api/v1/tokens", headers=ADMIN)
        stored = b"".join(one.value or b"" for one in (await world.engine.store.load()).records)

        assert len(secret) == 64
        assert secret.encode() not in stored
        assert secret not in str(listed)
        assert [(one["name"], one["role"], one["expires_at"]) for one in listed["tokens"]] == [
            ("ci", "operator", "2030-02-01T00:00:00Z"),
            ("root", "admin", None),
        ]

    main(act)


def test_expired_token_is_rejected_and_keeps_auth_on() -> None:
    """One second early it is good.

    When all have expired, no request is accepted.
    """

    async def act(world: World) -> None:
        await world.json(
            "POST", "/api/v1/tokens", json={"name": "root", "role": "admin", "expires": "60s"}
        )
        text = (
            await world.service.tokens.create(
                "short", Role.VIEWER, secret=SECRET, by="t", expires_in=timedelta(minutes=1)
            )
        )[1]
        holder = {"authorization": f"Bearer {text}"}

        await world.clock.advance(timedelta(seconds=59))
        assert (await world.request("GET", "/api/v1/vms", headers=holder)).status_code == 200
        await world.clock.advance(timedelta(seconds=1))
        assert (await world.request("GET", "/api/v1/vms", headers=holder)).status_code == 401
        assert (await world.request("GET", "/api/v1/vms")).status_code == 401

    main(act)


def test_revoked_token_is_rejected_at_once() -> None:
    """A person has left, or a laptop was stolen."""

    async def act(world: World) -> None:
        await with_admin(world)
        holder = await token(world, "ci", "viewer")
        assert (await world.request("GET", "/api/v1/vms", headers=holder)).status_code == 200
        await world.json("DELETE", "/api/v1/tokens/ci", headers=ADMIN)
        assert (await world.request("GET", "/api/v1/vms", headers=holder)).status_code == 401

    main(act)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            {"name": "CI", "role": "viewer"},
            400,
            "name: expected 1 to 63 of a-z, 0-9 and -, got 'CI'",
        ),
        ({"name": "", "role": "viewer"}, 400, "name: expected 1 to 63 of a-z, 0-9 and -, got ''"),
        ({"name": "a" * 64, "role": "viewer"}, 400, "name: expected 1 to 63 of a-z"),
        ({"name": "a/b", "role": "viewer"}, 400, "name: expected 1 to 63 of a-z"),
        (
            {"name": "ci", "role": "owner"},
            400,
            "body.role: expected one of admin, host, operator, viewer, got 'owner'",
        ),
        (
            {"name": "kvm-1", "role": "host"},
            400,
            (
                "host: expected the name of a host for the role host, and none for other roles;"
                " got role host with no host"
            ),
        ),
        (
            {"name": "ci", "role": "admin", "host": "host-a"},
            400,
            (
                "host: expected the name of a host for the role host, and none for other roles;"
                " got role admin with host host-a"
            ),
        ),
        (
            {"name": "ci", "role": "admin", "scopes": ["web"]},
            400,
            "scopes: expected none for the role admin, got web",
        ),
        (
            {"name": "kvm-1", "role": "host", "host": "../host-a"},
            400,
            "body.host: expected a name of 1 to 128 letters",
        ),
        (
            {"name": "ci", "role": "viewer", "expires": "soon"},
            400,
            "body.expires: expected a duration such as 90s",
        ),
        (
            {"name": "ci", "role": "viewer", "expires": "0s"},
            400,
            "expires: expected at most 3660 days from now",
        ),
        (
            {"name": "ci", "role": "viewer", "expires": "9999d"},
            400,
            "expires: expected at most 3660 days from now",
        ),
        ({"name": "root", "role": "viewer"}, 409, "token 'root' already exists"),
    ],
)
def test_invalid_token_request_is_rejected(body: dict[str, Any], status: int, message: str) -> None:
    """The name stands in keys, logs and the token itself; a second one of a name would hide the
    first.
    """

    async def act(world: World) -> None:
        await with_admin(world)
        refused = await world.error("POST", "/api/v1/tokens", json=body, headers=ADMIN)
        assert refused[0] == status
        assert refused[2].startswith(message)

    main(act)


def test_token_of_a_host_cannot_read_or_change_anything_else() -> None:
    """A stolen one must be of no use beyond its host: every route of the API, one by one."""

    async def act(world: World) -> None:
        await with_admin(world)
        stolen = await token(world, "kvm-a", "host", host="host-a")
        described = await world.json("GET", "/api/openapi.json")
        for path, item in described["paths"].items():
            for verb, operation in item.items():
                if operation["security"] == [] or operation["x-role"] == "host":
                    continue
                where = path.replace("{host}", "host-a").replace("{", "").replace("}", "")
                response = await world.request(verb.upper(), where, headers=stolen)
                assert response.status_code == 403, f"{verb} {path}"
                assert "token kvm-a has the role host; this needs the role " in response.text

    main(act)


def test_token_of_a_host_is_listed_with_its_host() -> None:
    async def act(world: World) -> None:
        await with_admin(world)
        await token(world, "kvm-a", "host", host="host-a")
        listed = await world.json("GET", "/api/v1/tokens", headers=ADMIN)
        assert {one["name"]: (one["role"], one["host"]) for one in listed["tokens"]} == {
            "kvm-a": ("host", "host-a"),
            "root": ("admin", ""),
        }
        last = (await entries_of(world.service.engine.store))[-1]
        assert (last.what, last.detail, last.host) == ("token-created", "kvm-a (host)", "host-a")

    main(act)


def test_first_token_is_admin_and_last_admin_goes_last() -> None:
    """Otherwise one command would lock everybody out."""

    async def act(world: World) -> None:
        status, code, _ = await world.error(
            "POST", "/api/v1/tokens", json={"name": "ci", "role": "viewer"}
        )
        assert (status, code) == (409, "refused")
        await with_admin(world)
        await token(world, "ci", "viewer")

        assert (await world.error("DELETE", "/api/v1/tokens/root", headers=ADMIN))[:2] == (
            409,
            "refused",
        )
        assert (await world.error("DELETE", "/api/v1/tokens/nobody", headers=ADMIN))[:2] == (
            404,
            "unknown_token",
        )
        await world.json("DELETE", "/api/v1/tokens/ci", headers=ADMIN)
        await world.json("DELETE", "/api/v1/tokens/root", headers=ADMIN)
        assert (await world.request("GET", "/api/v1/vms")).status_code == 200

    main(act)


def test_bad_tokens_are_delayed_counted_and_limited() -> None:
    """Trying is slow and seen; who tries in a flood does not even hold a connection open.

    A good token always passes.
    """

    async def act(world: World) -> None:
        await with_admin(world)
        bad = {"authorization": "Bearer fw_root_guess"}
        async with make_client(make_app(world.service, delay_seconds=0.2)) as client:
            start = asyncio.get_running_loop().time()
            requests = [client.get("/api/v1/vms", headers=bad) for _ in range(20)]
            statuses = [response.status_code for response in await asyncio.gather(*requests)]
            took = asyncio.get_running_loop().time() - start
            good = await client.get("/api/v1/vms", headers=ADMIN)

        assert {401, 429} == set(statuses)
        assert statuses.count(401) in (5, 6)
        assert took >= 0.2
        assert world.service.tokens.refused_count == 20
        assert good.status_code == 200

    main(act)


def test_tokens_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A log is read by many and kept for long."""
    caplog.set_level(logging.DEBUG)

    async def act(world: World) -> None:
        await with_admin(world)
        holder = await token(world, "ci", "operator")
        await world.request(
            "GET", "/api/v1/vms", headers={"authorization": "Bearer fw_ci_" + "f00d" * 16}
        )
        await world.request("POST", "/api/v1/vms/web-0/restart", headers=holder)
        request = caplog.text + "".join(str(record.__dict__) for record in caplog.records)

        assert "token-created" in request
        for secret in (SECRET, "f00d" * 16, holder["authorization"].rpartition("_")[2]):
            assert secret not in request

    main(act)


def test_tokens_and_revocations_reach_every_server() -> None:
    """Servers share a store; each must know the tokens created by another."""

    async def act(world: World) -> None:
        other = build_service(world.engine.store, world.clock, world.engine.timing, lambda: "")
        await with_admin(world)
        await other.engine.load()
        async with make_client(make_app(other, delay_seconds=0)) as elsewhere:
            assert await status_of(elsewhere) == 200
            await world.service.tokens.revoke("root", by="test")
            await other.engine.load()
            assert await status_of(elsewhere, {}) == 200, (
                "no tokens are left, and it is on loopback"
            )
            assert not other.tokens

    main(act)


async def status_of(client: httpx.AsyncClient, headers: dict[str, str] = ADMIN) -> int:
    return (await client.get("/api/v1/vms", headers=headers)).status_code
