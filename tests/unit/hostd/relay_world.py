"""A relay on loopback, in its own thread, with recording servers behind it."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Self, TypeVar

import uvloop

from forewarn.errors import Unavailable
from forewarn.hostd.moves import Moves
from forewarn.hostd.ports import SAVE_FROM_ETHERNET, TCP_SAVE_SYN, BridgePorts, Peer
from forewarn.hostd.relay import LIMITS, Relay, RelayPolicy
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import Upstream
from forewarn.option_kind import Address
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Listener
from tests.e2e.metadata_world import Client, RawResponse
from tests.unit.hostd.recording_server import RecordingServer

T = TypeVar("T")
SECONDS_MAX = 20.0
TOKEN = HostToken("hostd", "", b"key")
MINUTE = 1_800_000_000


class LoopbackPorts(BridgePorts):
    """The VM of a peer depends on its address, and the test may change it.

    `peers` are those that were looked up. `on_lookup` is called for each.
    """

    def __init__(self) -> None:
        self.vms = {f"127.0.0.{number}": f"id-{number}" for number in range(1, 9)}
        self.problem: Exception | None = None
        self.peers: list[Peer] = []
        self.on_lookup: Callable[[], None] = lambda: None

    def vm_of(self, peer: Peer, now: float) -> str:
        self.peers.append(peer)
        self.on_lookup()
        if peer.address and not peer.has_syn:
            raise Unavailable("in doubt, as for a peer without a MAC")
        if self.problem is not None:
            raise self.problem
        return self.vms.get(peer.address, "")


class RelayWorld:
    """The guest at 127.0.0.N has the id `id-N`, for N up to 8.

    With `saves_syn` False, connections have lost their first packets, as with SYN cookies.
    """

    def __init__(
        self,
        *servers: RecordingServer,
        limits: Limits = LIMITS,
        connections_max: int = 64,
        token: HostToken = TOKEN,
        saves_syn: bool = True,
    ) -> None:
        self.servers = servers
        self._saves_syn = saves_syn
        self._token = token
        self.ports = LoopbackPorts()
        self.moves = Moves()
        self.ahead_seconds = 0.0
        self._limits = limits
        self._connections_max = connections_max
        self._broken: list[dict[str, Any]] = []
        self._stack = AsyncExitStack()
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(lambda _, broken: self._broken.append(broken))
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self._start())
        return self

    async def _start(self) -> None:
        for server in self.servers:
            await self._stack.enter_async_context(server)
        urls = [server.url for server in self.servers]
        self.upstream = Upstream(urls, connections_max=self._connections_max)
        relay = Relay(self.upstream, self._token, self.moves, self._now, lambda: MINUTE + 7.5)
        self.relay = relay
        self.refusals, self.unconfirmed = relay.refusals, relay.unconfirmed
        policy = RelayPolicy(self.ports, self._limits, relay.refusals)
        bound = socket.create_server(("127.0.0.1", 0))
        if self._saves_syn:
            bound.setsockopt(socket.IPPROTO_TCP, TCP_SAVE_SYN, SAVE_FROM_ETHERNET)
        address = Address(*bound.getsockname())
        self.listener = Listener(relay, address, policy, server_name=SERVER_METADATA, bound=bound)
        await self.listener.start()

    def _now(self) -> float:
        return self._loop.time() + self.ahead_seconds

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert self._broken == []

    async def _stop(self) -> None:
        await self.listener.stop()
        self.upstream.close()
        await self._stack.aclose()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS_MAX)

    def stop_servers(self) -> None:
        for server in self.servers:
            self.run(server.stop())

    @contextmanager
    def moving(self, vm: str) -> Iterator[None]:
        """The VM moves to another host within this."""
        move = self.moves.moving(vm)
        self.run(self._call(move.__enter__))
        try:
            yield
        finally:
            self.run(self._call(lambda: move.__exit__(None, None, None)))

    async def _call(self, act: Callable[[], object]) -> None:
        act()

    def connect(self, source: str = "127.0.0.1") -> Client:
        return Client(self.listener.address.port, source)

    def ask(self, request: bytes, source: str = "127.0.0.1") -> RawResponse:
        with self.connect(source) as client:
            client.send(request)
            return client.response()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
