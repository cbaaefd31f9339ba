"""Sessions of the console over the real engine: what starts, carries and ends one."""

from datetime import timedelta

import httpx

from forewarn.auth.sessions import SESSION_DURATION, SESSIONS_PER_TOKEN_MAX
from forewarn.auth.tokens import Role, hash_secret
from forewarn.web.control.auth import COOKIE
from forewarn.web.control.routes.stream import make_permission
from tests.unit.web.control_world import NOON, World, main

SECRET = "5ec4e7" + "0" * 58
SAME_ORIGIN = {"origin": "http://127.0.0.1:8081"}
URL = "/api/v1/session"


async def sign_in(world: World, role: Role = Role.OPERATOR) -> str:
    """A token of this role, and the session of a browser that has signed in with it."""
    if not world.service.tokens:
        await world.service.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
    _, text = await world.service.tokens.create(role, role, secret=SECRET, by="test")
    response = await world.request("POST", URL, json={"token": text}, headers=SAME_ORIGIN)
    assert response.status_code == 200, response.text
    world.client.cookies.clear()
    return response.cookies[COOKIE]


def cookie(session: str) -> dict[str, str]:
    return {"cookie": f"{COOKIE}={session}", **SAME_ORIGIN}


async def status(world: World, session: str, method: str = "GET", path: str = "vms") -> int:
    response = await world.request(method, f"/api/v1/{path}", headers=cookie(session))
    return response.status_code


def test_cookie_cannot_be_read_by_scripts_or_sent_by_other_sites() -> None:
    async def act(world: World) -> None:
        await world.service.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        body = {"token": f"fw_root_{SECRET}"}
        plain = await world.request("POST", URL, json=body)
        over_tls = await world.request("POST", f"https://127.0.0.1:8081{URL}", json=body)

        value, *attributes = plain.headers["set-cookie"].lower().split("; ")
        assert set(attributes) == {"httponly", "samesite=strict", "path=/", "max-age=43200"}
        assert "; secure" in over_tls.headers["set-cookie"].lower()
        assert SECRET not in value

    main(act)


def test_session_has_the_role_of_its_token() -> None:
    async def act(world: World) -> None:
        session = await sign_in(world, Role.VIEWER)
        shown = await world.json("GET", URL, headers=cookie(session))

        assert (shown["name"], shown["role"], shown["is_required"]) == (
            "token viewer",
            "viewer",
            True,
        )
        assert (shown["now"], shown["is_lab"]) == ("2030-01-31T12:00:00Z", False)
        assert shown["notice_seconds"]["Reboot"] == 900
        assert await status(world, session) == 200
        assert await status(world, session, "POST", "vms/web-0/restart") == 403

    main(act)


def test_without_tokens_everybody_has_a_session() -> None:
    async def act(world: World) -> None:
        shown = await world.json("GET", URL)

        assert (shown["name"], shown["role"], shown["is_required"]) == ("operator", "admin", False)

    main(act)


def test_session_ends_at_its_time_and_not_a_second_earlier() -> None:
    async def act(world: World) -> None:
        session = await sign_in(world)
        await world.clock.jump(NOON + SESSION_DURATION - timedelta(seconds=1))
        assert await status(world, session) == 200
        await world.clock.jump(NOON + SESSION_DURATION)
        assert await status(world, session) == 401

    main(act)


def test_signing_out_ends_the_session_on_the_server() -> None:
    """A copy of the cookie is worth nothing afterwards; another session of the token goes on."""

    async def act(world: World) -> None:
        session = await sign_in(world)
        other = await world.request(
            "POST", URL, json={"token": f"fw_operator_{SECRET}"}, headers=SAME_ORIGIN
        )
        assert await status(world, session, "DELETE", "session") == 200
        assert await status(world, session) == 401
        assert await status(world, other.cookies[COOKIE]) == 200

    main(act)


def test_session_ends_with_its_token() -> None:
    """Also if a token with the same name is created again."""

    async def act(world: World) -> None:
        session = await sign_in(world)
        await world.service.tokens.revoke("operator", by="test")
        assert await status(world, session) == 401
        await world.service.tokens.create("operator", Role.OPERATOR, secret="0" * 64, by="test")
        assert await status(world, session) == 401

    main(act)


def test_stream_ends_with_its_session() -> None:
    async def act(world: World) -> None:
        session = await sign_in(world)
        is_allowed = make_permission(world.service, "", session)
        assert is_allowed()
        await world.service.sessions.end(session)
        assert not is_allowed()

    main(act)


def test_change_by_cookie_needs_the_origin_of_the_page() -> None:
    """A browser sends a cookie by itself: the cookie alone does not show who wants the change."""

    async def act(world: World) -> None:
        session = await sign_in(world)
        restart = "/api/v1/vms/web-0/restart"
        for headers in (
            {},
            {"origin": "https://evil.example"},
            {**SAME_ORIGIN, "sec-fetch-site": "cross-site"},
        ):
            refused = {"cookie": f"{COOKIE}={session}", **headers}
            code, error, _ = await world.error("POST", restart, headers=refused)
            assert (code, error) == (403, "forbidden"), headers
        assert await status(world, session, "POST", "vms/web-0/restart") == 202

    main(act)


def test_bad_token_and_bad_cookie_start_nothing() -> None:
    async def act(world: World) -> None:
        session = await sign_in(world)
        bad = {"token": f"fw_operator_{'f' * 64}"}
        assert (await world.error("POST", URL, json=bad))[:2] == (401, "unauthorized")
        assert world.service.tokens.refused_count == 1
        for text in ("", "x", session[:-1], f"{session}0", "a" * 5000):
            assert await status(world, text) == 401

    main(act)


def test_daemon_of_a_host_cannot_sign_in() -> None:
    async def act(world: World) -> None:
        tokens = world.service.tokens
        await tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        _, text = await tokens.create("kvm", Role.HOST, secret=SECRET, by="test", host="host-a")
        assert (await world.error("POST", URL, json={"token": text}))[:2] == (403, "forbidden")

    main(act)


def test_store_has_no_session_that_could_be_used() -> None:
    async def act(world: World) -> None:
        session = await sign_in(world)
        snapshot = await world.engine.store.load("")
        stored = "".join(f"{record.key} {record.value!r}" for record in snapshot.records)

        assert hash_secret(session) in stored
        assert session not in stored

    main(act)


def test_old_sessions_make_room_for_new_ones() -> None:
    """Only of the same token: one person must not sign the others out."""

    async def act(world: World) -> None:
        other = await sign_in(world, Role.VIEWER)
        session = await sign_in(world)
        token = world.service.tokens.find_valid("operator")
        assert token is not None
        for number in range(SESSIONS_PER_TOKEN_MAX):
            await world.clock.advance(timedelta(milliseconds=1))
            await world.service.sessions.start(token, f"{number:064x}")
        kept = len(list(world.engine.records.values("session")))
        assert (kept, await status(world, session)) == (SESSIONS_PER_TOKEN_MAX + 1, 401)
        assert await status(world, other) == 200
        await world.clock.advance(SESSION_DURATION)
        for number in range(10):
            await world.service.sessions.start(token, f"{number:064d}")
        assert len(list(world.engine.records.values("session"))) == 10

    main(act)


def test_response_of_a_sign_in_is_not_kept_for_a_retry() -> None:
    """It holds a secret."""

    async def act(world: World) -> None:
        await world.service.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        headers = {"idempotency-key": "k"}
        responses: list[httpx.Response] = [
            await world.request("POST", URL, json={"token": f"fw_root_{SECRET}"}, headers=headers)
            for _ in range(2)
        ]
        assert responses[0].cookies[COOKIE] != responses[1].cookies[COOKIE]

    main(act)
