"""The way from a simulated daemon to the servers: loses, delays and cuts."""

import asyncio
from random import Random
from typing import Any, Protocol

import msgspec

from forewarn.errors import Error, Unavailable
from forewarn.hostd.upstream import Request, Response, ServerLost, Upstream
from forewarn.platform.remote import WorkRequest
from forewarn.store.base import Lease
from forewarn.store.memory import MemoryStore
from tests.sim.hostd_rules import CommitChecker
from tests.sim.hypervisors import Actor
from tests.sim.world import FlakyStore, Manners
from tests.unit.engine.hostd_world import Server

GOOD_MANNERS = Manners(0, 0, 0.2, 0, 0, 0)


class Network(Protocol):
    """What is up, and how bad the ways between are."""

    servers: list[Server | None]
    loss: float
    cut_until: dict[tuple[str, int], float]
    handlers: dict[asyncio.Task[Any], Server]
    checker: CommitChecker


class ServerStore(FlakyStore):
    """One server's way to the store. A killed server commits nothing any more."""

    def __init__(self, inner: MemoryStore, chance: Random, checker: CommitChecker) -> None:
        super().__init__(inner, chance, GOOD_MANNERS, checker)  # type: ignore[arg-type]

    async def commit(self, *arguments: Any, **more: Any) -> int:
        if self.is_dead:
            await asyncio.Event().wait()
        return await super().commit(*arguments, **more)

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        if self.is_dead:
            await asyncio.Event().wait()
        return await super().lease(name, ttl_seconds)


class LossyNetwork(Upstream):
    """For one run of a daemon."""

    def __init__(self, world: Network, host: str, actor: Actor, chance: Random) -> None:
        super().__init__([])
        self._world, self._host, self._actor, self._chance = world, host, actor, chance
        self._first = 0

    @property
    def current(self) -> str:
        return f"server {self._first}"

    @property
    def count(self) -> int:
        return 2

    def skip(self) -> None:
        self._first = 1 - self._first

    async def send(self, request: Request) -> Response:
        for number in (self._first, 1 - self._first):
            try:
                response = await self._send_to(number, request)
            except ServerLost:
                continue
            if response.status != 503:
                self._first = number
                return response
        raise ServerLost("no server can be reached")

    def _is_lost(self, number: int) -> bool:
        is_cut = self._world.cut_until.get((self._host, number), 0) > loop_time()
        return is_cut or self._actor.is_dead or self._chance.random() < self._world.loss

    async def _send_to(self, number: int, request: Request) -> Response:
        world, chance = self._world, self._chance
        await asyncio.sleep(chance.uniform(0.001, 0.2))
        server = world.servers[number]
        if server is None or self._is_lost(number):
            await asyncio.sleep(chance.choice((0, 3)))
            raise ServerLost("the request is lost")
        assert request.body is not None
        is_late = chance.random() < world.loss / 4
        handler = asyncio.create_task(
            self._handle(server, request.body, chance.uniform(3, 30) if is_late else 0)
        )
        world.handlers[handler] = server
        handler.add_done_callback(world.handlers.pop)
        if is_late:
            await asyncio.sleep(3)
            raise ServerLost("the server takes too long")
        try:
            response = await asyncio.shield(handler)  # it goes on if the daemon has gone
        except asyncio.CancelledError:
            if handler.cancelled():
                raise ServerLost("the server was killed") from None
            raise
        if chance.random() < world.loss / 2:
            await asyncio.sleep(chance.uniform(0, 5))
        if self._is_lost(number):
            raise ServerLost("the response is lost")
        return response

    async def _handle(self, server: Server, body: bytes, late_seconds: float) -> Response:
        await asyncio.sleep(late_seconds)
        sent = msgspec.json.decode(body, type=WorkRequest)
        self._world.checker.readers.hear(self._host)
        try:
            work = await server.hosts.work(self._host, sent, by="token")
        except Unavailable:
            return Response(503, [], b"{}")
        except Error as error:
            content = msgspec.json.encode({"error": error.code, "message": error.message})
            return Response(409, [], content)
        return Response(200, [], msgspec.json.encode(work))

    def close(self) -> None:
        """Nothing to close."""


def loop_time() -> float:
    return asyncio.get_running_loop().time()
