"""What a host daemon may send: only for its own host, and nothing that is not understood."""

import json
from typing import Any

import pytest

from forewarn.auth.tokens import Role
from tests.unit.engine.hostd_world import Daemon, World, reported, run

BODIES = {
    ("PUT", "inventory"): {"session": "s1", "vms": []},
    ("POST", "work"): {"session": "s1"},
    ("POST", "results"): {"session": "s1", "results": []},
    ("DELETE", "session?session=s1"): None,
}


@pytest.mark.parametrize("call", list(BODIES))
def test_token_of_another_host_is_forbidden(call: tuple[str, str]) -> None:
    """A stolen token must not reach beyond its host."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        thief = {"authorization": f"Bearer fw_host-b_{world.secret}"}
        url = f"/api/v1/hosts/host-a/{call[1]}"
        client = world.servers[0].client
        response = await client.request(call[0], url, json=BODIES[call], headers=thief)
        assert response.status_code == 403
        message = "token host-b is for the host host-b, not for 'host-a'"
        assert response.json()["message"] == message
        assert not world.servers[0].is_unreachable("host-a")

    run(test)


@pytest.mark.parametrize("call", list(BODIES))
@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_other_roles_cannot_act_as_a_daemon(call: tuple[str, str], role: str) -> None:
    async def test(world: World) -> None:
        tokens = world.servers[0].service.tokens
        await tokens.create(role, Role(role), secret=world.secret, by="test")
        holder = {"authorization": f"Bearer fw_{role}_{world.secret}"}
        url = f"/api/v1/hosts/host-a/{call[1]}"
        client = world.servers[0].client
        response = await client.request(call[0], url, json=BODIES[call], headers=holder)
        assert response.status_code == 403
        assert response.json()["facts"] == {"role": role, "needed": "host"}
        assert world.servers[0].hosts.managed.find("host-a") is None

    run(test)


def test_daemon_cannot_act_on_the_vms_of_another_host() -> None:
    """Neither by a result, nor by saying that one of its VMs is its own and does not run."""

    async def test(world: World) -> None:
        victim = await world.daemon("host-a", reported("web-0", scope="web"))
        thief = await world.daemon("host-b", server=1)
        await world.restart("web-0")
        impact = await victim.take()
        assert await thief.finish(impact) == 0
        thief.running = victim.running
        assert (await thief.work())["cancel"] == thief.running
        await thief.report(reported("web-0", scope="other", power="stopped"))
        vm = world.servers[1].vm("web-0")
        assert (vm.host, vm.power, world.servers[1].board.vms["web-0"].scope.name) == (
            "host-a",
            "running",
            "web",
        )
        assert await victim.finish(impact) == 1

    run(test)


FORGED_HOST = {"event_id": "e", "vm": "web-0", "tries": 1, "host": "../x"}
BAD: list[tuple[str, str, Any, str]] = [
    ("PUT", "inventory", b"{", "body: Input data was truncated"),
    ("PUT", "inventory", b"[]", "body: expected"),
    (
        "PUT",
        "inventory",
        {"vms": []},
        "body.session: expected a text of 1",
    ),
    ("PUT", "inventory", {"session": "s", "vms": [7]}, "body.vms[0]: expected"),
    ("PUT", "inventory", {"session": "s", "vms": "x"}, "body.vms: expected"),
    ("PUT", "inventory", {"session": "s", "vms": [{}] * 2001}, "body.vms: expected"),
    ("PUT", "inventory", {"session": "s", "vms": [], "memory_bytes": -1}, "body.memory_bytes:"),
    ("PUT", "inventory", {"session": "", "vms": []}, "body.session: expected"),
    ("PUT", "inventory", {"session": "s" * 65, "vms": []}, "body.session: expected"),
    ("PUT", "inventory", {"session": "s", "vms": [], "x": 1}, "body.x: unknown member"),
    ("POST", "work", {"session": "s", "wait_seconds": 31}, "body.wait_seconds: expected"),
    ("POST", "work", {"session": "s", "running": [{"vm": "a"}]}, "body.running[0]"),
    ("POST", "work", b"\xff", "body: "),
    ("POST", "results", {"session": "s", "results": [{"vm": 1}]}, "body.results[0]"),
    ("POST", "results", {"session": "s", "results": [FORGED_HOST]}, "body.results[0].host"),
    ("DELETE", "session", None, "Missing required query parameter 'session'"),
    ("DELETE", "session?session=s&x=1", None, "unknown query parameter 'x'"),
]


@pytest.mark.parametrize(("method", "path", "body", "message"), BAD)
def test_malformed_call_is_a_400_with_one_line(
    method: str, path: str, body: Any, message: str
) -> None:
    async def test(world: World) -> None:
        daemon = Daemon(world, "host-a")
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
        more: Any = {"content": content, "headers": {**daemon.headers, "content-type": JSON}}
        response = await daemon.server.client.request(method, daemon.url(path), **more)
        assert response.status_code == 400, response.text
        found = response.json()["message"]
        assert found.startswith(message), found
        assert "\n" not in found
        assert world.servers[0].hosts.managed.find("host-a") is None

    run(test)


JSON = "application/json"


@pytest.mark.parametrize(
    ("method", "path", "size"),
    [("PUT", "inventory", 1 << 20), ("POST", "work", 1 << 16), ("POST", "results", 1 << 16)],
)
def test_oversized_body_is_a_413(method: str, path: str, size: int) -> None:
    async def test(world: World) -> None:
        daemon = Daemon(world, "host-a")
        more: Any = {
            "content": b" " * (size + 1),
            "headers": {**daemon.headers, "content-type": JSON},
        }
        response = await daemon.server.client.request(method, daemon.url(path), **more)
        assert (response.status_code, response.json()["facts"]) == (413, {"size_max": size})

    run(test)
