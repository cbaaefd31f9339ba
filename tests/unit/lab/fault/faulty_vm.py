"""A VM whose endpoint misbehaves: the real metadata application behind the filter, without a
socket.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random
from typing import Any

from forewarn.core.command import Approve, Cancel, Restart
from forewarn.core.fleet import Vm
from forewarn.lab.fault.active import ActiveFault, FaultSet, parse_fault
from forewarn.lab.fault.filter import FaultFilter
from forewarn.lab.fault.tcp import EXTENSION
from forewarn.lab.transcript import Transcript
from forewarn.web.http.message import Message, Receive, Send, plain_address
from tests.builders import NOON, guid
from tests.unit.web.guest import EVENTS, TRUE, WEB_0, WEB_1, Guest, GuestResponse

POLL = (EVENTS, TRUE)
NO_EVENTS = b'{"DocumentIncarnation":1,"Events":[]}'
AT_1215 = "Wed, 04 Mar 2026 12:15:00 GMT"


def entry(
    number: int = 1, vm: str = "web-0", not_before: str = AT_1215, status: str = "Scheduled"
) -> str:
    """An event as it stands on the wire."""
    return (
        f'{{"EventId":"{guid(number)}","EventStatus":"{status}","EventType":"Reboot","ResourceType":"VirtualMachine",'
        f'"Resources":["{vm}"],"NotBefore":"{not_before}",'
        '"Description":"Virtual machine is going to be restarted as requested by authorized user.",'
        '"EventSource":"User","DurationInSeconds":-1}'
    )


def body(number: int, *entries: str) -> bytes:
    return f'{{"DocumentIncarnation":{number},"Events":[{",".join(entries)}]}}'.encode()


class FakeConnection:
    """A connection that notes its delays and how it ended. A client that `is_gone` disconnects
    during a delay.
    """

    def __init__(self) -> None:
        self.end = ""
        self.slept: list[float] = []
        self.sleeps_for_good = False
        self.is_gone = False

    async def sleep(self, seconds: float) -> bool:
        self.slept.append(seconds)
        if self.sleeps_for_good:
            await asyncio.get_running_loop().create_future()
        return not self.is_gone

    async def reset(self) -> None:
        self.end = "reset"

    async def close(self) -> None:
        self.end = "close"


class Filtered(Guest):
    """A VM whose requests arrive on `connection`."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        self.inner = self.application
        self.faults = FaultSet()
        self.transcript = Transcript(self.clock.now)
        self.connection = FakeConnection()
        self.filter = FaultFilter(
            self.inner, self.faults, self.transcript, self.clock, Random(seed), self.get_vm
        )
        self.application: Callable[[Message, Receive, Send], Awaitable[None]] = self.call_filter  # type: ignore[assignment]

    async def call_filter(self, scope: Message, receive: Receive, send: Send) -> None:
        scope["extensions"] = {EXTENSION: self.connection}
        await self.filter(scope, receive, send)

    def get_vm(self, scope: Message) -> str:
        return self.engine.board.addresses.get(plain_address(scope["client"][0]), "")

    def add(self, kind: str, **members: Any) -> ActiveFault:
        spelt = {name.removesuffix("_"): value for name, value in members.items()}
        return self.faults.add(parse_fault({"fault": kind, **spelt}), self.clock.now())

    async def poll(self, known: str = "", **more: Any) -> GuestResponse:
        conditional = [(b"if-none-match", known.encode())] if known else []
        return await self.call(*POLL, *conditional, **more)

    async def bodies(self, count: int) -> list[bytes]:
        return [(await self.poll()).body for _ in range(count)]

    async def restarts(self, number: int = 1, vm: str = "web-0") -> None:
        await self.engine.submit("web", Restart(vm=vm, event_id=guid(number)), by="test")

    async def starts(self, number: int = 1) -> None:
        await self.engine.submit("web", Approve(event_ids=(guid(number),), vm="web-0"), by="test")

    async def cancels(self, number: int = 1) -> None:
        await self.engine.submit("web", Cancel(event_id=guid(number)), by="test")

    async def pass_time(self, **span: float) -> None:
        await self.clock.advance(timedelta(**span))


def run(main: Callable[[Filtered], Awaitable[None]], seed: int = 7) -> None:
    """Run a story with a VM that has polled once."""

    async def whole() -> None:
        guest = Filtered(seed)
        await guest.enrol("web", WEB_0, WEB_1)
        await guest.enrol("db", Vm(name="db-0", address="10.0.1.1"))
        assert (await guest.poll()).body == NO_EVENTS
        await main(guest)

    asyncio.run(whole())


__all__ = ["AT_1215", "NOON", "NO_EVENTS", "Filtered", "body", "entry", "run"]
