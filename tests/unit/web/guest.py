"""A VM without a socket: its requests go to the application directly."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from forewarn.config import Config
from forewarn.core.command import Restart, SetMembers
from forewarn.core.fleet import Policy, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.board import PublishedScope
from forewarn.errors import Error, StoreLost
from forewarn.lab.clock import VirtualClock
from forewarn.store.memory import MemoryStore
from forewarn.web.http.message import Message
from forewarn.web.metadata.app import Metadata
from forewarn.web.service import build_service
from tests.builders import NOON

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
TRUE = (b"metadata", b"true")
EVENT_ID = "602D9444-D2CD-49C7-8624-8643E7171297"
BY_ADDRESS = Config()
WEB_0, WEB_1 = Vm(name="web-0", address="10.0.0.1"), Vm(name="web-1", address="10.0.0.2")


class LostStore(MemoryStore):
    """A store whose commits can fail."""

    is_lost = False
    error: Error = StoreLost("the store does not answer")

    async def commit(self, writes: Any, checks: Any = (), entries: Any = None) -> int:
        if self.is_lost:
            raise self.error
        return await super().commit(writes, checks, entries)


class Guest:
    """`web-0` at 10.0.0.1, with `web-1` in the scope `web`."""

    def __init__(self, config: Config = BY_ADDRESS) -> None:
        self.store = LostStore()
        self.clock = VirtualClock(NOON)
        self.service = build_service(self.store, self.clock, Timing(), lambda: EVENT_ID)
        self.engine = self.service.engine
        self.errors: list[tuple[str, int, str]] = []
        self.application = Metadata(
            self.engine, config, on_error=lambda *error: self.errors.append(error)
        )
        self.is_gone = asyncio.Event()

    async def enrol(self, scope: str, *vms: Vm) -> None:
        await self.engine.submit(
            scope, SetMembers(kind=ScopeKind.AVAILABILITY_SET, policy=Policy(), vms=vms), by="test"
        )

    async def restart(self, vm: str = "web-0", scope: str = "web") -> None:
        await self.engine.submit(scope, Restart(vm=vm, event_id=EVENT_ID), by="test")

    @property
    def place(self) -> PublishedScope:
        return self.engine.board.scopes["web"]

    async def call(
        self,
        target: str,
        *headers: tuple[bytes, bytes],
        method: str = "GET",
        body: bytes = b"",
        address: str = "10.0.0.1",
        meanwhile: Callable[[], Awaitable[None]] | None = None,
    ) -> "GuestResponse":
        """The response of the application. `meanwhile` runs while it waits for the body."""
        path, _, query = target.partition("?")
        scope: Message = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": list(headers),
            "client": (address, 1234),
        }
        sent: list[Message] = []
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if pieces:
                if meanwhile:
                    await meanwhile()
                return pieces.pop()
            await self.is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.application(scope, receive, send)
        return GuestResponse(sent)


class GuestResponse:
    def __init__(self, sent: list[Message]) -> None:
        self.is_nothing = not sent
        self.status = sent[0]["status"] if sent else 0
        self.headers = (
            {name.decode(): value.decode() for name, value in sent[0]["headers"]} if sent else {}
        )
        self.body = sent[1]["body"] if sent else b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def run(
    main: Callable[[Guest], Awaitable[None]],
    config: Config = BY_ADDRESS,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a story with a guest whose scope is enrolled."""

    async def whole() -> None:
        guest = Guest(config)
        await guest.enrol("web", WEB_0, WEB_1)
        await main(guest)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(whole())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
