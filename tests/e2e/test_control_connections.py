"""One client without a token cannot take the control listener from the others."""

import select
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.service import Service

HALF = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"\r\n"
DESCRIPTORS = 1024
CONNECTIONS_MAX = DESCRIPTORS // 8
"""Of operators: see `share_descriptors`."""


def status_of(port: int, source: str) -> int:
    """The status of a health check from this address; 0 if the connection was reset."""
    address = ("127.0.0.1", port)
    with socket.create_connection(address, timeout=10, source_address=(source, 0)) as client:
        try:
            client.sendall(WHOLE)
            return int(client.recv(65536).split()[1])
        except (OSError, IndexError):
            return 0


def test_half_requests_of_one_address_do_not_lock_others_out(tmp_path: Path) -> None:
    """Operators, host daemons and the health check of a load balancer use this listener. Without
    it a load balancer would take the server from the guests.
    """
    service = Service(tmp_path, descriptors_max=DESCRIPTORS).start()
    port = urlsplit(service.control).port or 0
    try:
        with ExitStack() as stack:
            for _ in range(3 * CONNECTIONS_MAX):
                half = socket.create_connection(
                    ("127.0.0.1", port), timeout=10, source_address=("127.0.0.66", 0)
                )
                stack.enter_context(half)
                half.sendall(HALF)
            assert [status_of(port, "127.0.0.1") for _ in range(20)] == [200] * 20
            assert status_of(port, "127.0.0.66") == 200  # the oldest half request goes
    finally:
        service.kill()


def test_half_requests_of_many_addresses_do_not_lock_others_out(tmp_path: Path) -> None:
    """Together they reach the limit of the listener: the oldest half request is closed."""
    service = Service(tmp_path, descriptors_max=DESCRIPTORS).start()
    port = urlsplit(service.control).port or 0
    try:
        with ExitStack() as stack:
            for number in range(2 * CONNECTIONS_MAX):
                half = socket.create_connection(
                    ("127.0.0.1", port), timeout=10, source_address=(f"127.0.1.{number % 16}", 0)
                )
                stack.enter_context(half)
                half.sendall(HALF)
            assert [status_of(port, "127.0.0.1") for _ in range(20)] == [200] * 20
    finally:
        service.kill()


def connect(stack: ExitStack, port: int, source: str) -> socket.socket:
    address = ("127.0.0.1", port)
    client = socket.create_connection(address, timeout=10, source_address=(source, 0))
    return stack.enter_context(client)


def status_after(client: socket.socket, request: bytes) -> int:
    client.sendall(request)
    return int(client.recv(65536).split()[1])


@pytest.mark.parametrize("has_token", [True, False])
def test_address_with_a_valid_token_may_hold_more_idle_connections(
    tmp_path: Path, *, has_token: bool
) -> None:
    """Such as that of a proxy for all operators. Others get an eighth of the connections."""
    service = Service(tmp_path, descriptors_max=DESCRIPTORS).start()
    port, source = urlsplit(service.control).port or 0, "127.0.0.66"
    try:
        _, made = service.ask("POST", "/tokens", {"name": "root", "role": "admin"})
        token = made["text"] if has_token else "fw_root_" + 64 * "0"
        lines = "GET /api/v1/hosts HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}"
        with ExitStack() as stack:
            first = connect(stack, port, source)
            request = "\r\n".join([*lines, "", ""]).encode()
            assert status_after(first, request) == (200 if has_token else 401)
            idle = [connect(stack, port, source) for _ in range(CONNECTIONS_MAX // 8 + 8)]
            last = connect(stack, port, source)
            assert status_after(last, WHOLE) == 200  # those before it have been accepted
            closed, _, _ = select.select(idle, [], [], 0)
            assert (closed == []) is has_token
    finally:
        service.kill()
