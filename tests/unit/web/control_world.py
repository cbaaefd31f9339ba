"""A control API over the real engine, without sockets and with a clock that is told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from typing import Any

import httpx

from forewarn.core.command import Seen
from forewarn.core.timing import Timing
from forewarn.engine.clock import VirtualClock
from forewarn.fleetfile.parser import parse
from forewarn.store.memory import MemoryStore
from forewarn.web.control.routes.fleet import app
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
    """A service without sockets: ask it over its API, look at its board, let its time pass."""

    def __init__(self) -> None:
        numbers = count(9, -1)  # falling: an order by id is not mistaken for an order by age
        self.clock = VirtualClock(NOON)
        self.service = build_service(
            MemoryStore(),
            self.clock,
            Timing(),
            lambda: f"00000000-0000-4000-8000-{next(numbers):012X}",
        )
        self.engine, self.operations = self.service.engine, self.service.operations
        self.client = calling(app(self.service, delay_seconds=0))

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.client.request(method, path, **more)

    async def told(self, method: str, path: str, **more: Any) -> Any:
        """What a request that is granted answers."""
        response = await self.ask(method, path, **more)
        assert response.is_success, response.text
        return response.json()

    async def refused(self, method: str, path: str, **more: Any) -> tuple[int, str, str]:
        """Status, code and message of a request that is refused; its body has the one form there
        is, and nothing changed.
        """
        before = (
            self.engine.board.revision,
            {name: place.scope for name, place in self.engine.board.scopes.items()},
        )
        response = await self.ask(method, path, **more)
        answer = response.json()
        assert list(answer) == ["error", "message", "facts"]
        assert before == (
            self.engine.board.revision,
            {name: place.scope for name, place in self.engine.board.scopes.items()},
        )
        return response.status_code, answer["error"], answer["message"]


def calling(application: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(application), base_url="http://127.0.0.1:8081"
    )


@asynccontextmanager
async def world(fleet: bytes = FLEET, *, is_polled: bool = True) -> AsyncIterator[World]:
    made = World()
    await made.operations.apply(parse(fleet, "fleet"), by="test")
    for scope in list(made.engine.board.scopes) if is_polled else ():
        await made.engine.submit(scope, Seen(), by="test")
    async with made.client:
        yield made
    await made.engine.close()


def story(
    tell: Callable[[World], Awaitable[None]], fleet: bytes = FLEET, *, is_polled: bool = True
) -> None:
    async def run() -> None:
        async with world(fleet, is_polled=is_polled) as made:
            await tell(made)

    asyncio.run(run())
