"""Which uvicorn can be used: tried on a connection without a socket."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from forewarn.config import Config
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.errors import Unavailable
from forewarn.option_kind import Address
from forewarn.store.memory import MemoryStore
from forewarn.web.http.admission import Limits
from forewarn.web.http.compatibility import probe
from forewarn.web.http.connection import Connection, ConnectionPolicy
from forewarn.web.http.listener import Listener
from forewarn.web.metadata.fast_path import PollConnection, Polls


class ClosesItsTransport(Connection):
    """As if uvicorn closed the transport of every connection that has ended."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.transport.close()


class KeepsNoHeaders(Connection):
    """As if uvicorn kept the headers elsewhere."""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.elsewhere = (name, value)


class HasNoUrl(Connection):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        del self.url


def run(make: type[Connection]) -> tuple[bool, ConnectionPolicy, ServerState]:
    async def nowhere(scope: Any, receive: Any, send: Any) -> None: ...

    async def work() -> tuple[bool, ConnectionPolicy, ServerState]:
        policy, state = ConnectionPolicy(Limits(), lambda error: b""), ServerState()
        config = uvicorn.Config(
            nowhere, ws="none", lifespan="off", interface="asgi3", log_config=None
        )
        can_replace = probe(partial(make, policy, config=config, server_state=state, app_state={}))
        return can_replace, policy, state

    return asyncio.run(work())


def test_installed_uvicorn_lets_connections_be_replaced() -> None:
    """The probe itself leaves no connection behind."""
    can_replace, policy, state = run(Connection)
    assert can_replace
    assert (policy.connections_count, state.connections) == (0, set())


def test_connection_that_closes_its_transport_cannot_be_replaced() -> None:
    assert run(ClosesItsTransport)[0] is False


@pytest.mark.parametrize("make", [KeepsNoHeaders, HasNoUrl])
def test_uvicorn_without_what_limits_need_is_refused(make: type[Connection]) -> None:
    """A listener without its limits would be worse than none."""
    with pytest.raises(Unavailable, match=rf"uvicorn {uvicorn.__version__} is not supported"):
        run(make)


class Recorded(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def connector_of(*, can_replace: bool) -> tuple[Callable[[], asyncio.Protocol], list[str]]:
    engine = Engine(MemoryStore(), RealClock(), Timing())
    polls = Polls(engine, Config(), Limits())
    polls.can_replace = can_replace
    recorded, logger = Recorded(), logging.getLogger("forewarn")
    logger.addHandler(recorded)
    try:
        return polls.connector(server_state=ServerState()), recorded.lines
    finally:
        logger.removeHandler(recorded)


def test_without_replacement_polls_take_the_ordinary_path_with_limits() -> None:
    connector, lines = connector_of(can_replace=False)
    assert isinstance(connector, partial)
    assert connector.func is Connection
    assert lines == ["no fast path with this uvicorn"]


def test_with_replacement_polls_take_the_fast_path_without_a_word() -> None:
    connector, lines = connector_of(can_replace=True)
    assert isinstance(connector, partial)
    assert connector.func is PollConnection
    assert lines == []


def test_listener_decides_with_the_installed_uvicorn() -> None:
    async def work() -> bool:
        policy = ConnectionPolicy(Limits(), lambda error: b"")
        policy.can_replace = False

        async def application(scope: Any, receive: Any, send: Any) -> None: ...

        listener = Listener(application, Address("127.0.0.1", 0), policy, server_name="test")
        await listener.start()
        await listener.stop()
        return policy.can_replace

    assert asyncio.run(work())
