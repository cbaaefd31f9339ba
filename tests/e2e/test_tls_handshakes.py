"""Clients that open TLS connections and never send their part of the handshake."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from forewarn.option_kind import Address
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import ConnectionPolicy
from forewarn.web.http.listener import SERVER_CONTROL, Listener
from forewarn.web.http.message import Message, Receive, Send
from forewarn.web.http.tls import Certificate
from forewarn.web.http_status import control_body
from tests.e2e.service import Service
from tests.e2e.test_control_security import make_pair

DESCRIPTORS = 512
WHOLE = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"
LOOPS = pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop])
Factory = Callable[[], asyncio.AbstractEventLoop]


def connect(stack: ExitStack, port: int, source: str) -> socket.socket:
    address = ("127.0.0.1", port)
    client = socket.create_connection(address, timeout=10, source_address=(source, 0))
    return stack.enter_context(client)


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def status_over_tls(port: int, source: str, certificate: Path) -> int:
    with (
        socket.create_connection(
            ("127.0.0.1", port), timeout=10, source_address=(source, 0)
        ) as plain,
        trusting(certificate).wrap_socket(plain, server_hostname="127.0.0.1") as client,
    ):
        client.sendall(WHOLE)
        return int(client.recv(65536).split()[1])


@pytest.mark.parametrize("addresses", [1, 64])
def test_half_handshakes_lock_nobody_out(tmp_path: Path, addresses: int) -> None:
    """They take file descriptors that VMs and health checks need."""
    certificate, key = make_pair(tmp_path, "live")
    files = ("--control-certificate-file", str(certificate), "--control-key-file", str(key))
    service = Service(tmp_path, *files, "--identify", "path", descriptors_max=DESCRIPTORS).start()
    assert service.process is not None
    port, descriptors = urlsplit(service.control).port or 0, Path(f"/proc/{service.process.pid}/fd")
    try:
        with ExitStack() as stack:
            before = len(list(descriptors.iterdir()))
            for number in range(DESCRIPTORS + 100):
                connect(stack, port, f"127.0.1.{number % addresses}")
            assert status_over_tls(port, "127.0.0.1", certificate) == 200
            assert len(list(descriptors.iterdir())) - before <= DESCRIPTORS // 8 // 2
            assert status_over_tls(port, "127.0.1.0", certificate) == 200
            assert service.poll()["DocumentIncarnation"] >= 1
    finally:
        service.kill()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("limit of TLS handshakes reached") == 1
    assert "Traceback" not in log


async def hello(scope: Message, receive: Receive, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
    )
    await send({"type": "http.response.body", "body": b"hello"})


def listener(folder: Path) -> Listener:
    return Listener(
        hello,
        Address("127.0.0.1", 0),
        ConnectionPolicy(Limits(connections_max=32), control_body),
        server_name=SERVER_CONTROL,
        certificate=Certificate(*make_pair(folder, "live")),
        stop_seconds_max=0.2,
    )


async def get_over_tls(address: Address, folder: Path) -> bytes:
    context = trusting(folder / "live.pem")
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    response = await reader.read()
    writer.close()
    return response


@LOOPS
def test_oldest_half_handshake_is_closed_for_a_new_one(tmp_path: Path, factory: Factory) -> None:
    async def main() -> None:
        one = listener(tmp_path)
        await one.start()
        halves = [await asyncio.open_connection(*one.address) for _ in range(16)]
        response = await get_over_tls(one.address, tmp_path)
        assert response.endswith(b"hello")
        assert await halves[0][0].read() == b""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await halves[1][0].read()
        assert one.policy.limits_reached["address"] == 1
        await one.stop()
        assert await halves[1][0].read() == b"", "a stop does not wait for handshakes"
        for _, writer in halves:
            writer.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@LOOPS
def test_handshakes_that_have_ended_are_not_counted(
    tmp_path: Path, factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither good ones nor those that failed; and none of them is logged."""

    async def main() -> None:
        one = listener(tmp_path)
        await one.start()
        for _ in range(20):
            assert (await get_over_tls(one.address, tmp_path)).endswith(b"hello")
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()
        assert one.policy.limits_reached == {"address": 0, "unknown": 0, "total": 0}
        await one.stop()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert caplog.text == ""
