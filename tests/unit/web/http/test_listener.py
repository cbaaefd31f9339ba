"""Starting and stopping a listener, and why it cannot start."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import uvloop

from forewarn.errors import Error, Invalid, Unavailable
from forewarn.option_kind import Address
from forewarn.web.http.admission import Limits, TimedConnection
from forewarn.web.http.connection import Connection, ConnectionPolicy
from forewarn.web.http.listener import SERVER_CONTROL, SERVER_METADATA, Listener
from forewarn.web.http.message import Message, Receive, Send
from forewarn.web.http_status import control_body, metadata_body
from tests.unit.web.instant_loop import EagerLoop

LOOPBACK = Address("127.0.0.1", 0)


async def hello(scope: Message, receive: Receive, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
    )
    await send({"type": "http.response.body", "body": b"hello"})


def listener(
    address: Address = LOOPBACK, application: Callable[..., Awaitable[None]] = hello
) -> Listener:
    return Listener(
        application,
        address,
        ConnectionPolicy(Limits(), metadata_body),
        server_name=SERVER_METADATA,
        stop_seconds_max=0.2,
    )


async def get(address: Address) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    return response


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_started_listener_has_its_real_port(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        one = listener()
        await one.start()
        assert one.address.port > 0
        response = await get(one.address)
        assert response.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
        assert b"server: Forewarn-IMDS/" in response
        assert response.endswith(b"connection: close\r\n\r\nhello")
        await one.stop()
        with pytest.raises(ConnectionRefusedError):
            await get(one.address)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def test_two_listeners_share_a_loop() -> None:
    async def main() -> None:
        first = listener()
        second = Listener(
            hello, LOOPBACK, ConnectionPolicy(Limits(), control_body), server_name=SERVER_CONTROL
        )
        await first.start()
        await second.start()
        assert b"server: Forewarn/" in await get(second.address)
        await first.stop()
        assert (await get(second.address)).endswith(b"hello")
        await second.stop()

    asyncio.run(main())


def test_listener_installs_no_signal_handlers() -> None:
    """Who stops the service is decided by the service."""

    async def main() -> None:
        one = listener()
        await one.start()
        assert signal.getsignal(signal.SIGTERM) == before
        await one.stop()

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())


def test_listener_whose_start_is_cancelled_does_not_listen() -> None:
    """Nobody stops a listener that has not started, as when the lab's time limit has passed."""

    async def main() -> None:
        one = listener()
        starting = asyncio.create_task(one.start())
        await asyncio.sleep(0)
        assert one.address.port, "it is bound"
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*one.address)

    asyncio.run(main())


def test_stop_is_idempotent() -> None:
    async def main() -> None:
        one = listener()
        await one.stop()
        await one.start()
        await one.stop()
        await one.stop()

    asyncio.run(main())


@pytest.mark.parametrize("has_connection", [False, True])
def test_idle_listener_stops_at_once(*, has_connection: bool) -> None:
    """A test suite opens a listener in every test; a pause of 100 ms at each end would add up to
    minutes.
    """

    async def main() -> float:
        one = listener()
        await one.start()
        streams = [await asyncio.open_connection(*one.address)] if has_connection else []
        began = loop.time()
        await one.stop()
        took = loop.time() - began
        for reader, writer in streams:
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        return took

    loop = EagerLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(main()) < 0.05


def test_slow_requests_are_aborted_at_stop() -> None:
    async def forever(scope: Message, receive: Receive, send: Send) -> None:
        has_begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def main() -> None:
        one = listener(application=forever)
        await one.start()
        asking = asyncio.create_task(get(one.address))
        await has_begun.wait()
        await one.stop()
        assert await asking == b""

    has_begun = asyncio.Event()
    asyncio.run(main())


def test_wait_returns_when_the_listener_ends() -> None:
    async def main() -> None:
        one = listener()
        await one.start()
        waiting = asyncio.create_task(one.wait())
        await asyncio.sleep(0)
        await one.stop()
        await waiting

    asyncio.run(main())


async def fetch_all(policy: ConnectionPolicy, *requests: bytes) -> list[bytes]:
    """The responses to the requests, each on its own connection."""
    one = Listener(hello, LOOPBACK, policy, server_name=SERVER_CONTROL, stop_seconds_max=0.2)
    await one.start()
    read = []
    for request in requests:
        reader, writer = await asyncio.open_connection(*one.address)
        writer.write(request)
        read.append(await reader.read())
        writer.close()
        await writer.wait_closed()
    await one.stop()
    return read


@pytest.mark.parametrize("target", [b"a://b", b"http://h?q", b"http://u:p@h", b"http://[::1]"])
def test_url_without_a_path_is_rejected_and_not_logged(
    target: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """On the control listener too, where nobody has shown a token yet: bytes alone must not fill
    the log.
    """
    caplog.set_level(logging.INFO)
    request = b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n"
    [response] = asyncio.run(fetch_all(ConnectionPolicy(Limits(), control_body), request))
    assert response.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert (
        b'{"error":"invalid","message":"Bad request. The URL of the request has no path"'
        in response
    )
    assert caplog.records == []


class BrokenConnection(Connection):
    def start_request(self) -> None:
        raise KeyError("ours")


class BrokenPolicy(ConnectionPolicy):
    """Its connections have a bug that every request meets."""

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(BrokenConnection, self, **arguments)


def test_bug_in_a_connection_is_a_500_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It must be logged, but a client must not be able to fill the log."""
    request = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    read = asyncio.run(fetch_all(BrokenPolicy(Limits(), control_body), *[request] * 3))
    assert [response[:12] for response in read] == [b"HTTP/1.1 500"] * 3
    assert [record.getMessage() for record in caplog.records] == ["request failed"]
    assert "KeyError: 'ours'" in caplog.text


class BrokenAdmission(ConnectionPolicy):
    """It has a bug that every new connection meets, except the one that a listener tries first."""

    is_started = False

    def admit(self, connection: TimedConnection) -> bool:
        if self.is_started:
            raise KeyError("ours")
        return super().admit(connection)


class UnidentifiedConnection(Connection):
    def identify(self) -> str:
        if getattr(self.policy, "is_started", False):
            raise KeyError("ours")
        return super().identify()


class BrokenIdentity(ConnectionPolicy):
    """The same in its connections."""

    is_started = False

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(UnidentifiedConnection, self, **arguments)


class UnnamedSocket:
    def getsockname(self) -> None:
        raise KeyError("ours")


class UnnamedTransport:
    """As of a socket whose own address cannot be read: uvicorn asks for it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        is_socket = name == "socket"
        return UnnamedSocket() if is_socket else self._transport.get_extra_info(name, default)


class UnnamedConnection(Connection):
    def connection_made(self, transport: Any) -> None:
        if getattr(self.policy, "is_started", False):
            transport = UnnamedTransport(transport)
        super().connection_made(transport)


class BrokenTransport(ConnectionPolicy):
    """The same before a connection is identified."""

    is_started = False

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(UnnamedConnection, self, **arguments)


@pytest.mark.parametrize("policy_class", [BrokenAdmission, BrokenIdentity, BrokenTransport])
@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_connection_that_fails_where_it_begins_leaves_nothing_open(
    factory: Callable[[], asyncio.AbstractEventLoop],
    policy_class: type[BrokenAdmission | BrokenIdentity | BrokenTransport],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An event loop logs what `connection_made` raises, each time, and does not close the socket:
    any client could fill the log and use up the descriptors.
    """
    unhandled: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        policy = policy_class(Limits(), control_body)
        one = Listener(hello, LOOPBACK, policy, server_name=SERVER_CONTROL, stop_seconds_max=0.2)
        await one.start()
        policy.is_started = True
        before = len(os.listdir("/proc/self/fd"))
        try:
            for _ in range(3):
                with suppress(ConnectionResetError):
                    assert await asyncio.wait_for(get(one.address), timeout=5) == b""
            assert (len(os.listdir("/proc/self/fd")), policy.connections_count) == (before, 0)
        finally:
            await one.stop()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert unhandled == []
    assert [record.getMessage() for record in caplog.records] == ["connection failed"]
    assert "KeyError: 'ours'" in caplog.text


def refusal(address: Address) -> Error:
    with pytest.raises(Error) as refused:
        asyncio.run(listener(address).start())
    return refused.value


def test_address_in_use_is_reported() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        error = refusal(Address("127.0.0.1", holder.getsockname()[1]))
    assert isinstance(error, Unavailable)
    assert "in use" in error.message


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (Address("192.0.2.1", 0), "192.0.2.1:0"),
        (Address("no such host", 0), "no such host:0"),
        (Address("2001:db8::1", 8080), "[2001:db8::1]:8080"),
    ],
)
def test_address_that_cannot_be_bound_is_reported(address: Address, shown: str) -> None:
    error = refusal(address)
    assert isinstance(error, Invalid)
    assert error.message.startswith(f"cannot listen on {shown}: ")
    assert "\n" not in error.message
