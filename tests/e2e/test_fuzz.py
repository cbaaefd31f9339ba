"""Nothing that a client sends is logged, on any of the three listeners.

    FUZZ_SEED=7 FUZZ_CONNECTIONS=20000 pytest -n 0 tests/e2e/test_fuzz.py

runs longer, with another seed.
"""

import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.bridge_world import ALIAS, BridgeWorld, in_namespace
from tests.e2e.fuzz import authorize, draw_requests, known_requests, send_randomly, send_whole
from tests.e2e.metadata_world import TARGET
from tests.e2e.service import Service, call, running
from tests.e2e.test_relay import FLEET, SERVERS, WEB_0
from tests.e2e.waiting import eventually

SEED = int(os.environ.get("FUZZ_SEED", "1"))
CONNECTIONS = int(os.environ.get("FUZZ_CONNECTIONS", "400"))
METADATA = (
    TARGET.encode(),
    b"/metadata/scheduledevents",
    b"/as/web-0" + TARGET.encode(),
    b"/metadata/instance?api-version=2021-02-01",
    b"/metadata/versions",
    b"/%ff/\xff",
    b"http://h/metadata/versions",
    b"*",
    b"?",
)
CONTROL = (
    b"/api/v1/session",
    b"/healthz",
    b"/readyz",
    b"/",
    b"/x",
    b"/metrics",
    b"/api/v1/fleet",
    b"/api/v1/vms?limit=\xff",
    b"/api/v1/vms?limit=x",
    b"/api/v1/vms/none/restart",
    b"/api/v1/hosts/none/maintain",
    b"/api/v1/events/none/extend",
    b"/api/v1/campaigns",
    b"/api/v1/tokens",
    b"/api/v1/history?after=x",
    b"/api/v1/stream?after=-1",
    b"/api/v1/hosts/h/work",
    b"//api/v1//x",
    b"http://h/healthz",
    b"*",
)


class EmptyLogs:
    """Nothing has been written to these files since this was made."""

    def __init__(self, *files: Path) -> None:
        self._before = {file: file.read_text() for file in files}

    def check(self, when: str) -> None:
        written = [file.read_text()[len(before) :] for file, before in self._before.items()]
        assert written == [""] * len(written), f"seed {SEED}, {when}"


def send_all(
    targets: tuple[bytes, ...], connect: Callable[[], socket.socket], logs: EmptyLogs, token: str
) -> None:
    """Send all connections, each request with the token if there is one. The logs stay empty."""
    for known in known_requests(targets):
        send_whole(authorize(known, token), connect)
        logs.check(f"at {known!r} or just before")
    random = Random(SEED)
    for number in range(CONNECTIONS):
        requests = draw_requests(random, targets)
        send_randomly(random, b"".join(authorize(each, token) for each in requests), connect)
        logs.check(f"at connection {number} or just before: {requests!r}")


def connector(url: str) -> Callable[[], socket.socket]:
    port = urlsplit(url).port
    return lambda: socket.create_connection(("127.0.0.1", port or 0), timeout=10)


def create_operator(service: Service) -> str:
    """The text of a token; the first one must be an admin's."""
    _, admin = service.ask("POST", "/tokens", {"name": "admin", "role": "admin"})
    body = {"name": "operator", "role": "operator"}
    status, created = service.ask("POST", "/tokens", body, token=admin["text"])
    assert status == 201
    text: str = created["text"]
    return text


@pytest.mark.parametrize("listener", ["metadata", "control", "control with a token"])
def test_malformed_requests_leave_the_log_of_a_server_empty(tmp_path: Path, listener: str) -> None:
    """A client could fill the disk with it, or hide what matters."""
    targets = METADATA if listener == "metadata" else CONTROL
    with running(tmp_path, "--identify", "address") as service:
        service.poll()  # the first one enables the scope
        token = create_operator(service) if "token" in listener else ""
        url = service.metadata if listener == "metadata" else service.control
        logs = EmptyLogs(tmp_path / "log.txt")
        send_all(targets, connector(url), logs, token)
        assert call("GET", f"{service.control}/readyz", headers={})[0] == 200
        assert service.poll()["Events"] == []
        assert service.stop() == 0
        logs.check("after the last connection")


WORK: dict[str, Any] = {
    "session": "s1",
    "machine": "m1",
    "running": [{"event_id": "E", "vm": "web-0", "tries": 1, "result": {"problem": ""}}],
    "inventory": {
        "vms": [
            {
                "name": "web-0",
                "id": "00000000-0000-4000-8000-000000000001",
                "macs": ["52:54:00:00:00:01"],
                "addresses": ["192.0.2.1"],
                "power": "running",
                "memory_bytes": 1,
                "scope": "web",
                "kind": "scale-set",
                "update_domain": 0,
                "unmovable": "why",
            }
        ],
        "memory_bytes": 1,
        "age_seconds": 0.5,
    },
    "number": 1,
    "refusals": {"not-a-vm": 1},
    "refused": [{"guest": "id", "reason": "in-doubt", "seconds": 1}],
    "unserved": [{"bridge": "br0", "problem": "why", "vms": 1}],
    "unconfirmed_seconds": 1,
    "no_server_seconds": 1,
}
WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 63,
    10**400,
    1e308,
    "",
    "\0",
    "\ud800",
    "x" * 9000,
    [],
    {},
    [[]],
)


def change_randomly(random: Random, value: Any) -> Any:
    """The value with a wrong one at a random place in it."""
    if not value or not isinstance(value, dict | list) or random.random() < 0.1:
        return random.choice(WRONG)
    changed = value.copy()
    key = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
    changed[key] = change_randomly(random, value[key])
    return changed


def test_work_requests_of_a_hostile_daemon_write_no_traceback(tmp_path: Path) -> None:
    """They have a valid token. What is wrong with a VM may be logged, in a line."""
    with running(tmp_path, "--identify", "address") as service:
        _, admin = service.ask("POST", "/tokens", {"name": "admin", "role": "admin"})
        body = {"name": "h", "role": "host", "host": "h"}
        _, created = service.ask("POST", "/tokens", body, token=admin["text"])
        random, statuses = Random(SEED), set[int]()
        for _ in range(CONNECTIONS):
            work = change_randomly(random, WORK)
            status, _ = service.ask("POST", "/hosts/h/work", work, token=created["text"])
            statuses.add(status)
        assert {200, 400} <= statuses <= {200, 400, 409, 429}
        assert service.stop() == 0
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


@pytest.mark.system
@pytest.mark.xdist_group("relay")
def test_malformed_requests_leave_the_log_of_a_relay_empty(tmp_path: Path) -> None:
    """Nor does anything of it reach the log of the server behind the relay."""
    with ExitStack() as stack:
        (tmp_path / "fleet.yaml").write_text(json.dumps(FLEET))
        world = BridgeWorld(stack, tmp_path)
        world.add_bridge("br0", "192.168.122.1/24")
        world.servers.append(world.start_server(0, "--fleet", str(tmp_path / "fleet.yaml")))
        token = world.create_host_token("h")
        assert world.start_relay(SERVERS[0], token=token) == "ready\n"
        guest = world.add_guest("br0", "192.168.122.64/24", vm=WEB_0)

        def connect() -> socket.socket:
            address = (ALIAS, 80)
            return in_namespace(
                guest.namespace, lambda: socket.create_connection(address, timeout=10)
            )

        eventually(lambda: world.poll(guest).status, lambda status: status == 200)
        logs = EmptyLogs(tmp_path / "relay.txt", tmp_path / "log.txt")
        send_all(METADATA, connect, logs, token="")
        assert world.poll(guest).status == 200
        logs.check("after the last connection")
