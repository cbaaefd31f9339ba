"""The status port, over real sockets."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from forewarn.agent.limited_server import LimitedServer
from forewarn.agent.status import AgentStatus
from forewarn.agent.status_http import StatusPort
from forewarn.errors import Unavailable
from tests.unit.agent.agent_status import agent_status, workflow

CONNECTIONS_MAX = LimitedServer.connections_max


@contextmanager
def listening(get_status: Callable[[], AgentStatus] = agent_status) -> Iterator[tuple[str, int]]:
    port = StatusPort("127.0.0.1:0", get_status)
    try:
        host, _, number = port.address.rpartition(":")
        yield host, int(number)
    finally:
        port.stop()


def call(address: tuple[str, int], request: bytes) -> str:
    """The whole response, until the connection ends."""
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(request)
        with client.makefile("rb") as response:
            return response.read().decode()


def get(address: tuple[str, int], path: str, method: str = "GET") -> str:
    return call(address, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("path", "status", "code", "body"),
    [
        ("/healthz", agent_status(contact_seconds=None), 200, "alive"),
        ("/readyz", agent_status(), 200, "ready"),
        ("/readyz", agent_status(contact_seconds=None, last_problem="timeout"), 503, "timeout"),
        ("/readyz", agent_status(config_error="wrong"), 503, "wrong"),
        ("/readyz", agent_status(config_error="\ud800 is odd"), 503, "? is odd"),
        ("/drainz", agent_status(), 200, "in service"),
        ("/drainz", agent_status(workflow()), 503, "drained"),
        ("/metrics", agent_status(), 200, "# TYPE"),
        ("/", agent_status(), 404, "expected /healthz"),
        ("/healthz/", agent_status(), 404, "expected /healthz"),
    ],
)
def test_each_path_responds_with_its_status(
    path: str, status: AgentStatus, code: int, body: str
) -> None:
    """Probes check nothing but the status code; the body is for people."""
    with listening(lambda: status) as address:
        head, _, content = get(address, path).partition("\r\n\r\n")

    assert head.startswith(f"HTTP/1.1 {code} ")
    assert content.startswith(body)


def test_response_is_complete_http_and_ends_the_connection() -> None:
    with listening() as address:
        head, _, body = get(address, "/readyz?full=1").partition("\r\n\r\n")

    assert head.splitlines()[0] == "HTTP/1.1 200 OK"
    assert "Content-Length: 6" in head
    assert "Connection: close" in head
    assert body == "ready\n"


def test_head_has_no_body() -> None:
    with listening() as address:
        response = get(address, "/readyz", "HEAD")

    assert response.startswith("HTTP/1.1 200 OK")
    assert response.endswith("\r\n\r\n")


def test_other_methods_are_rejected() -> None:
    with listening() as address:
        response = get(address, "/metrics", "POST")

    assert response.startswith("HTTP/1.1 501 ")


@pytest.mark.parametrize("request_", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"G" * 70_000])
def test_invalid_http_is_rejected(request_: bytes) -> None:
    """A request line without an end is not collected, and TLS is not HTTP."""
    with listening() as address:
        assert "Error code: 4" in call(address, request_)


def test_bug_costs_one_response_and_not_the_port() -> None:
    statuses = iter([agent_status()])
    with listening(lambda: next(statuses)) as address:
        assert get(address, "/readyz").startswith("HTTP/1.1 200")
        assert get(address, "/readyz") == ""
        assert get(address, "/healthz").startswith("HTTP/1.1 200")


def test_connections_over_the_limit_are_closed() -> None:
    """A client that opens connections and sends nothing must not use up the threads."""
    with listening() as address, ExitStack() as clients:
        silent = [
            clients.enter_context(socket.create_connection(address, timeout=20))
            for _ in range(CONNECTIONS_MAX)
        ]
        late = clients.enter_context(socket.create_connection(address, timeout=20))

        assert late.recv(100) == b""
        silent[0].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert silent[0].recv(100).startswith(b"HTTP/1.1 200 OK")


def test_address_in_use_is_reported() -> None:
    with (
        listening() as (host, number),
        pytest.raises(Unavailable, match=f"cannot listen on {host}:{number}: Address already in"),
    ):
        StatusPort(f"{host}:{number}", agent_status)


def test_slot_is_released_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the port would stay closed after a while without memory."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with listening() as address:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            for _ in range(CONNECTIONS_MAX):
                assert get(address, "/healthz") == ""

        assert get(address, "/healthz").startswith("HTTP/1.1 200")
