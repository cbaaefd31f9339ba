"""What a host daemon may send: only for its own host, and nothing that is not understood."""

import json
from typing import Any

import pytest

from forewarn.auth.tokens import Role
from tests.unit.engine.hostd_world import Daemon, World, reported, run
from tests.unit.web import control_world

BODIES: list[dict[str, Any]] = [
    {"session": "s1", "machine": "m1"},
    {"session": "s1", "machine": "m1", "inventory": {"vms": []}},
    {"session": "s1", "machine": "m1", "is_leaving": True},
]


@pytest.mark.parametrize("body", BODIES)
def test_token_of_another_host_is_forbidden(body: dict[str, Any]) -> None:
    """A stolen token must not reach beyond its host."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        thief = {"authorization": f"Bearer fw_host-b_{world.secret}"}
        client = world.servers[0].client
        response = await client.post("/api/v1/hosts/host-a/work", json=body, headers=thief)
        assert response.status_code == 403
        message = "token host-b is for the host host-b, not for 'host-a'"
        assert response.json()["message"] == message
        assert not world.servers[0].is_unreachable("host-a")

    run(test)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_other_roles_cannot_act_as_a_daemon(body: dict[str, Any], role: str) -> None:
    async def test(world: World) -> None:
        tokens = world.servers[0].service.tokens
        await tokens.create(role, Role(role), secret=world.secret, by="test")
        holder = {"authorization": f"Bearer fw_{role}_{world.secret}"}
        client = world.servers[0].client
        response = await client.post("/api/v1/hosts/host-a/work", json=body, headers=holder)
        assert response.status_code == 403
        assert response.json()["facts"] == {"role": role, "needed": "host"}
        assert world.servers[0].hosts.managed.find("host-a") is None

    run(test)


def test_without_tokens_no_client_can_act_as_a_daemon() -> None:
    """Its token names the host: whose reports these are, and whose bytes are counted."""

    async def test(world: control_world.World) -> None:
        response = await world.request("POST", "/api/v1/hosts/host-a/work", json=BODIES[0])
        assert response.status_code == 403
        assert response.json()["facts"] == {"role": "admin", "needed": "host"}

    control_world.main(test)


def test_daemon_cannot_act_on_the_vms_of_another_host() -> None:
    """Neither by a result, nor by saying that one of its VMs is its own and does not run."""

    async def test(world: World) -> None:
        victim = await world.daemon("host-a", reported("web-0", scope="web"))
        thief = await world.daemon("host-b", server=1)
        await world.restart("web-0")
        impact = await victim.take()
        assert await thief.finish(impact)  # it is not wanted
        assert await world.history("impacted") == []
        await thief.report(reported("web-0", scope="other", power="stopped"))
        vm = world.servers[1].vm("web-0")
        assert (vm.host, vm.power, world.servers[1].board.vms["web-0"].scope.name) == (
            "host-a",
            "running",
            "web",
        )
        assert await victim.finish(impact)

    run(test)


def test_idempotency_key_of_a_daemon_is_ignored_and_not_stored() -> None:
    """Its calls may be repeated without one, and its keys must not push out those of operators."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        headers = daemon.headers | {"idempotency-key": "k"}
        for power in ("running", "stopped"):
            inventory = {"vms": [reported("web-0", power=power)]}
            body = {"session": "s1", "machine": daemon.machine, "inventory": inventory}
            response = await daemon.server.client.post(
                daemon.url("work"), headers=headers, json=body
            )
            assert response.status_code == 200
            assert "idempotency-replayed" not in response.headers
        await world.settle()
        assert world.servers[1].vm("web-0").power == "stopped"
        assert (await world.store.load("answer/")).records == ()

    run(test)


RUNNING = {"event_id": "e", "vm": "web-0", "tries": 1}
FORGED = {**RUNNING, "result": {"host": "../x"}}
S: dict[str, Any] = {"session": "s", "machine": "m"}
BAD: list[tuple[Any, str]] = [
    (b"{", "body: Input data was truncated"),
    (b"[]", "body: expected"),
    (b"\xff", "body: "),
    (b'{"session": "\xff"}', "body: 'utf-8' codec can't decode"),
    ({"wait": True}, "body.session: expected a text of 1"),
    ({"session": ""}, "body.session: expected"),
    ({"session": "s" * 65}, "body.session: expected"),
    (S | {"x": 1}, "body.x: unknown member"),
    (S | {"wait": 5}, "body.wait: expected"),
    (S | {"inventory": {"vms": "x"}}, "body.inventory.vms: expected"),
    (S | {"inventory": {"vms": [{}] * 2001}}, "body.inventory.vms: expected"),
    (S | {"inventory": {"vms": [], "memory_bytes": -1}}, "body.inventory.memory_bytes:"),
    (S | {"inventory": {"vms": [], "x": 1}}, "body.inventory.x: unknown member"),
    (S | {"running": [{"vm": "a"}]}, "body.running[0]"),
    (S | {"running": [RUNNING] * 2001}, "body.running: expected"),
    (S | {"running": [{**RUNNING, "result": 1}]}, "body.running[0].result"),
    (S | {"running": [FORGED]}, "body.running[0].result"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_malformed_call_is_a_400_with_one_line(body: Any, message: str) -> None:
    async def test(world: World) -> None:
        daemon = Daemon(world, "host-a")
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        more: Any = {"content": content, "headers": {**daemon.headers, "content-type": JSON}}
        response = await daemon.server.client.post(daemon.url("work"), **more)
        assert response.status_code == 400, response.text
        found = response.json()["message"]
        assert found.startswith(message), found
        assert "\n" not in found
        assert world.servers[0].hosts.managed.find("host-a") is None

    run(test)


JSON = "application/json"


def test_oversized_body_is_a_413() -> None:
    async def test(world: World) -> None:
        daemon, size = Daemon(world, "host-a"), 4 << 20
        more: Any = {
            "content": b" " * (size + 1),
            "headers": {**daemon.headers, "content-type": JSON},
        }
        response = await daemon.server.client.post(daemon.url("work"), **more)
        assert (response.status_code, response.json()["facts"]) == (413, {"size_max": size})

    run(test)
