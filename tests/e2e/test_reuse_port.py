"""Several `forewarn serve` of one machine that share a port and a store."""

import http.client
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cli_service import forewarn_process
from tests.e2e.service import Service, call, steady_port
from tests.e2e.waiting import eventually

SHARED = ("--identify", "path", "--reuse-port")
POLL = "/as/web-0/metadata/scheduledevents?api-version=2020-07-01"
CONNECTIONS = 64
"""The kernel spreads connections by a hash of their addresses: that one of two servers gets none of
64 happens once in 2^63 runs.
"""


@contextmanager
def sharing(folder: Path, control: str = "") -> Iterator[tuple[Service, Service]]:
    """Two servers with one metadata port and one store. Each has a control port of its own, so that
    a test can ask one of them, unless all share `control`.
    """
    metadata = f"127.0.0.1:{steady_port()}"
    store = f"sqlite:///{folder}/shared.db"
    servers = []
    try:
        for name in ("one", "two"):
            (folder / name).mkdir()
            own = control or f"127.0.0.1:{steady_port()}"
            addresses = ("--metadata", metadata, "--control", own, "--store", store)
            servers.append(Service(folder / name, *SHARED, *addresses))
            servers[-1].start()
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.kill()


def metric(server: Service, name: str) -> float:
    _, text = call("GET", f"{server.control}/metrics", headers={})
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text.decode(), re.MULTILINE)))


@contextmanager
def polling(server: Service) -> Iterator[list[http.client.HTTPConnection]]:
    """Connections to the port of a server that have been answered once."""
    address = server.metadata.removeprefix("http://")
    connections = [http.client.HTTPConnection(address, timeout=30) for _ in range(CONNECTIONS)]
    try:
        for connection in connections:
            poll(connection)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def poll(connection: http.client.HTTPConnection) -> bytes:
    connection.request("GET", POLL, headers={"Metadata": "true"})
    response = connection.getresponse()
    body = response.read()
    assert response.status == 200, body
    return body


def wait_for_event(connection: http.client.HTTPConnection, event_id: str) -> None:
    eventually(lambda: poll(connection), lambda body: event_id.encode() in body)


def test_servers_that_share_a_port_share_its_connections(tmp_path: Path) -> None:
    """So that every core of the machine answers polls."""
    with sharing(tmp_path) as servers, polling(servers[0]):
        open_at = [metric(server, "forewarn_connections") for server in servers]
        polls_at = [metric(server, "forewarn_requests_total") for server in servers]

    assert min(open_at) > 0
    assert sum(open_at) == sum(polls_at) == CONNECTIONS


def test_change_through_one_server_is_seen_on_every_connection(tmp_path: Path) -> None:
    """Servers that share a store are one service, so it does not matter which of them answers."""
    with sharing(tmp_path) as servers, polling(servers[0]) as connections:
        for server, vm in zip(servers, ("web-0", "web-1"), strict=True):
            status, response = server.ask("POST", f"/vms/{vm}/restart")
            assert status == 202
            for connection in connections:
                wait_for_event(connection, response["event"]["id"])
        documents = {poll(connection) for connection in connections}

    assert len(documents) == 1


def test_killed_server_leaves_the_port_to_the_others(tmp_path: Path) -> None:
    """No load balancer has to notice it: the kernel offers it no more connections."""
    with sharing(tmp_path) as (one, two):
        one.kill()
        with polling(two):
            assert metric(two, "forewarn_connections") == CONNECTIONS
        one.start()
        with polling(two):
            assert metric(one, "forewarn_connections") > 0


def test_servers_can_share_the_control_port_too(tmp_path: Path) -> None:
    """A token, a change and a retried request are in the store, so any server can go on with it."""
    with sharing(tmp_path, control=f"127.0.0.1:{steady_port()}") as (one, two):
        assert one.control == two.control
        one.poll()
        url = f"{one.control}/api/v1/vms/web-0/restart"
        headers = {"Content-Type": "application/json", "Idempotency-Key": "once"}
        responses = {call("POST", url, b"{}", headers=headers) for _ in range(20)}
        one.kill()
        responses |= {call("POST", url, b"{}", headers=headers) for _ in range(20)}

    ((status, _),) = responses
    assert status == 202


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ((), (), "the address is in use"),
        (("--reuse-port",), (), "the address is in use"),
        (
            (),
            ("--reuse-port",),
            "the address is in use by a program without reuse_port, or of another user",
        ),
    ],
)
def test_port_is_shared_only_if_both_servers_want_it(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], reason: str
) -> None:
    """A server that was started twice by mistake is an error, as before."""
    taken, control = f"127.0.0.1:{steady_port()}", f"127.0.0.1:{steady_port()}"
    server = Service(tmp_path, *first, "--metadata", taken, "--control", control).start()
    try:
        addresses = ("--metadata", taken, "--control", f"127.0.0.1:{steady_port()}")
        refused = forewarn_process("serve", *second, "--store", "memory", *addresses, cwd=tmp_path)
    finally:
        server.kill()

    assert refused.returncode == 4
    assert refused.stderr == f"forewarn: cannot listen on {taken}: {reason}\n"


@pytest.mark.system
@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ,
    reason="only root can start a program as another user",
)
def test_another_user_cannot_share_the_port(tmp_path: Path) -> None:
    """It would receive connections of VMs, and answer them."""
    with sharing(tmp_path) as (server, _):
        port = server.metadata.rpartition(":")[2]
        become_nobody = "os.setgroups([]); os.setgid(65534); os.setuid(65534)"
        bind = f"socket.create_server(('127.0.0.1', {port}), reuse_port=True)"
        program = f"import os, socket; {become_nobody}; {bind}"
        command = [sys.executable, "-I", "-c", program]
        as_nobody = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        with socket.create_server(("127.0.0.1", int(port)), reuse_port=True):
            pass  # the same user could, so it is the user that is refused

    assert "Address already in use" in as_nobody.stderr
