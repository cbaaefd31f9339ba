"""The control API on a real engine, without sockets and with a virtual clock."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from typing import Any

import httpx

from forewarn.core.command import Seen
from forewarn.core.timing import Timing
from forewarn.fleetfile.parser import parse
from forewarn.lab.clock import VirtualClock
from forewarn.store.memory import MemoryStore
from forewarn.web.control.app import make_app
from forewarn.web.service import build_service

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
FLEET = b"""
scopes:
  - name: web
    kind: availability-set
    vms:
      - {name: web-0, address: 10.0.0.10, update_domain: 0, host: host-a}
      - {name: web-1, address: 10.0.0.11, update_domain: 1, host: host-b}
  - name: shop
    kind: cloud-service
    policy: {approval: all}
    vms:
      - {name: FrontEnd_IN_0, update_domain: 0, host: host-a}
      - {name: BackEnd_IN_0, update_domain: 1, host: host-b}
hosts: [host-c]
"""
PLAIN_FLEET = FLEET.replace(b"hosts: [host-c]\n", b"")
"""Without declared hosts."""


class World:
    """A service without sockets."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        # Descending, so that an order by id is not mistaken for an order by age.
        numbers = count(9, -1)
        self.clock = VirtualClock(NOON)
        self.service = build_service(
            store or MemoryStore(),
            self.clock,
            Timing(),
            lambda: f"00000000-0000-4000-8000-{next(numbers):012X}",
        )
        self.engine, self.operations = self.service.engine, self.service.operations
        self.client = make_client(make_app(self.service, delay_seconds=0))

    async def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.client.request(method, path, **more)

    async def json(self, method: str, path: str, **more: Any) -> Any:
        """The body of a successful response."""
        response = await self.request(method, path, **more)
        assert response.is_success, response.text
        return response.json()

    async def error(self, method: str, path: str, **more: Any) -> tuple[int, str, str]:
        """Status, code and message of an error response; nothing has changed."""
        before = self._state()
        response = await self.request(method, path, **more)
        body = response.json()
        assert list(body) == ["error", "message", "facts"]
        assert self._state() == before
        return response.status_code, body["error"], body["message"]

    def _state(self) -> Any:
        board = self.engine.board
        return {name: (place.revision, place.scope) for name, place in board.scopes.items()}


def make_client(application: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(application), base_url="http://127.0.0.1:8081"
    )


@asynccontextmanager
async def start(
    fleet: bytes = FLEET, *, is_polled: bool = True, store: MemoryStore | None = None
) -> AsyncIterator[World]:
    world = World(store)
    await world.operations.apply(parse(fleet, "fleet"), by="test")
    for scope in list(world.engine.board.scopes) if is_polled else ():
        await world.engine.submit(scope, Seen(), by="test")
    async with world.client:
        yield world
    await world.engine.close()


def main(
    act: Callable[[World], Awaitable[None]], fleet: bytes = FLEET, *, is_polled: bool = True
) -> None:
    """Run a test on a new world."""

    async def run() -> None:
        async with start(fleet, is_polled=is_polled) as world:
            await act(world)

    asyncio.run(run())
