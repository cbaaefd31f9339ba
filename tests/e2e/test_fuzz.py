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
from urllib.parse import urlsplit

import pytest

from tests.e2e.bridge_world import ALIAS, BridgeWorld, in_namespace
from tests.e2e.fuzz import send_connection
from tests.e2e.metadata_world import TARGET
from tests.e2e.service import call, running
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
    b"/api/v1/vms/none/restart",
    b"/api/v1/history?after=x",
    b"/api/v1/stream?after=-1",
    b"/api/v1/hosts/h/work",
    b"//api/v1//x",
    b"http://h/healthz",
    b"*",
)


def send_all(targets: tuple[bytes, ...], connect: Callable[[], socket.socket], log: Path) -> None:
    """Send all connections. The log stays as it is."""
    random, before = Random(SEED), log.read_text()
    for number in range(CONNECTIONS):
        sent = send_connection(random, targets, connect)
        written = log.read_text()[len(before) :]
        assert written == "", f"seed {SEED}, connection {number} or just before: {sent[:500]!r}"


def connector(url: str) -> Callable[[], socket.socket]:
    port = urlsplit(url).port
    return lambda: socket.create_connection(("127.0.0.1", port or 0), timeout=10)


@pytest.mark.parametrize("listener", ["metadata", "control"])
def test_malformed_requests_leave_the_log_of_a_server_empty(tmp_path: Path, listener: str) -> None:
    """A client could fill the disk with it, or hide what matters."""
    targets = METADATA if listener == "metadata" else CONTROL
    with running(tmp_path, "--identify", "address") as service:
        service.poll()  # the first one enables the scope
        url = service.metadata if listener == "metadata" else service.control
        send_all(targets, connector(url), tmp_path / "log.txt")
        assert call("GET", f"{service.control}/readyz", headers={})[0] == 200
        assert service.poll()["Events"] == []
        assert service.stop() == 0


@pytest.mark.system
@pytest.mark.xdist_group("relay")
def test_malformed_requests_leave_the_log_of_a_relay_empty(tmp_path: Path) -> None:
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
        send_all(METADATA, connect, tmp_path / "relay.txt")
        assert world.poll(guest).status == 200
