"""The service as a lab: a clock of one's own, ids from a seed, a simulated platform, faults at the
endpoint, a transcript.

Nothing is implemented twice: the rules, the engine, the loops and the metadata application are the
service's own.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import NamedTuple
from urllib.parse import unquote

from msgspec.structs import replace

from forewarn import server
from forewarn.config import Address, Config, Identify
from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import RealClock, VirtualClock
from forewarn.engine.engine import Engine
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, Refused, Unavailable
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.fault.active import Fault, Faults, Standing
from forewarn.lab.fault.filter import Dropped, FaultFilter, FilteredPolls
from forewarn.lab.listeners import DOORS_MAX, Doors
from forewarn.lab.transcript import Kind, Transcript
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.store.memory import MemoryStore
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Application, Listener
from forewarn.web.http.message import plain_address
from forewarn.web.metadata import request as ask
from forewarn.web.metadata.app import Message, Metadata, Receive, Send
from forewarn.web.service import Service

SPAN_MAX = timedelta(days=366)
START_MIN, END_MAX = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
RATE_MIN, RATE_MAX = 0.001, 1_000_000
CLAIM = timedelta(days=1)
"""One server works on a lab's store, so nobody takes a claim over, and renewing one only costs
time.
"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a lab is made of.

    A virtual clock stands still unless `is_running`; `rate` shortens every notice and duration.
    """

    fleet: Fleet | None = None
    is_virtual: bool = True
    is_running: bool = False
    start: datetime | None = None
    rate: float = 1.0
    seed: int = 0


class Answer(NamedTuple):
    """What a request got. Status 0: the connection was dropped."""

    status: int
    headers: dict[str, str]
    body: bytes


@asynccontextmanager
async def laboratory(setup: Setup) -> AsyncIterator["LabService"]:
    """A lab at work; everything that it opened is closed at the end."""
    clock = make_clock(setup)
    timing = timing_at(setup.rate)
    chance = random.Random(f"ids {setup.seed}")
    async with server.open_service(
        MemoryStore(), clock, timing, partial(make_id, chance)
    ) as service:
        lab = LabService(setup, clock, service)
        if setup.fleet is not None:
            await lab.operations.apply(setup.fleet, by="lab")
        service.engine.subscribe_entries(lab.transcript.hear)
        async with server.run_workers(Config(), service, lab.platform, "platform"):
            works = [lab.keep_faults(), *([clock.run()] if isinstance(clock, VirtualClock) else [])]
            tasks = [asyncio.create_task(work) for work in works]
            try:
                yield lab
            finally:
                await lab.close_doors()
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end


class LabService:
    """The parts of a lab, for whoever drives it. Made by `laboratory`."""

    RETRY_SECONDS = 1.0
    """How long until a door that could not be opened is tried again."""

    def __init__(self, setup: Setup, clock: VirtualClock | RealClock, service: Service) -> None:
        self.service = service
        self.clock = clock
        self.engine = engine = service.engine
        self.rate = setup.rate
        self.operations = service.operations
        self.transcript = Transcript(clock.now)
        self.faults = Faults()
        self._faults_count = 0
        self._faults_changed = asyncio.Event()
        self._enforcing = asyncio.Lock()
        self._lapsed: set[str] = set()
        board = engine.board
        self.platform = SimulatedPlatform(
            clock,
            durations=engine.timing.duration,
            hosts=lambda: chain(board.hosts, board.declared_hosts),
            avoid=service.campaigns.cache.host_priorities,
        )
        self.config = Config(identify=(Identify.PATH, Identify.ADDRESS))
        self.metadata_inner = LabMetadata(engine, self.config, self.faults)
        self.metadata = FaultFilter(
            self.metadata_inner,
            faults=self.faults,
            transcript=self.transcript,
            clock=clock,
            random=random.Random(f"faults {setup.seed}"),
            vm_of=self._vm_of,
        )
        self._listeners: list[Listener] = []
        self._doors = Doors(lambda vm, address: self._listener(partial(self._as, vm), address))

    async def advance(self, span: timedelta) -> None:
        """Let the time pass; returns when all that was due has been done."""
        clock, seconds = self._virtual(), span.total_seconds()
        if not timedelta(0) <= span <= SPAN_MAX:
            raise Invalid(
                f"the clock cannot advance by {seconds:g} s; expected 0 to {SPAN_MAX.days} days",
                seconds=seconds,
            )
        if span > END_MAX - clock.now():
            raise Invalid(
                f"the clock cannot advance by {seconds:g} s: it ends in the year {END_MAX.year}",
                seconds=seconds,
            )
        self.transcript.add(Kind.CLOCK, what="advance", detail=str(span))
        await clock.advance(span)
        await self.enforce_faults()

    async def jump(self, moment: datetime) -> None:
        """Be at a later moment at once, as a machine that slept."""
        clock = self._checked_for(moment)
        self.transcript.add(Kind.CLOCK, what="jump", detail=moment.isoformat())
        await clock.jump(moment.astimezone(UTC))
        await self.enforce_faults()

    async def change_clock(
        self, *, rate: float | None, moment: datetime | None, is_running: bool | None
    ) -> None:
        """Several at once; all of it is done, or none if one is refused."""
        if rate is not None:
            timing_at(rate)
        if moment is not None:
            self._checked_for(moment)
        if is_running is not None:
            self._virtual()
        if rate is not None:
            self.set_rate(rate)
        if moment is not None:
            await self.jump(moment)
        if is_running is not None:
            self.run(is_running=is_running)

    def _checked_for(self, moment: datetime) -> VirtualClock:
        """The clock, if it can jump there."""
        clock = self._virtual()
        now = clock.now()
        if moment.tzinfo is None or not now <= moment <= min(now + SPAN_MAX, END_MAX):
            expected = (
                f"a moment with a time zone, from {now.isoformat()} to {SPAN_MAX.days} days later"
            )
            limit = f", and not after {END_MAX.isoformat()}" if now + SPAN_MAX > END_MAX else ""
            raise Invalid(
                f"the clock cannot jump to {moment.isoformat()}; expected {expected}{limit}",
                now=moment,
            )
        return clock

    def run(self, *, is_running: bool) -> None:
        """Let a virtual clock follow the real time, or stand still."""
        self._virtual().is_running = is_running
        self.transcript.add(Kind.CLOCK, what="resume" if is_running else "pause")

    def set_rate(self, rate: float) -> None:
        """Shorten the notices and durations of what is asked from now on; what is announced keeps
        its time.
        """
        self.engine.retime(timing_at(rate))
        self.rate = rate
        self.platform.durations = self.engine.timing.duration
        self.transcript.add(Kind.CLOCK, what="rate", detail=f"{rate:g}")

    def add_fault(self, fault: Fault) -> Standing:
        """From its moment on, the endpoint misbehaves so.

        With `enforce_faults`, it does so before anything else happens.
        """
        for vm in fault.vms:
            self.engine.board.find_vm(vm)
        self._faults_count += 1
        added = self.faults.add(f"f{self._faults_count}", fault, self.clock.now())
        self._tell_fault("added", added)
        return added

    def remove_fault(self, fault_id: str) -> Standing:
        removed = self.faults.remove(fault_id)
        self._tell_fault("removed", removed)
        return removed

    def _tell_fault(self, what: str, standing: Standing) -> None:
        fault = standing.fault
        self.transcript.add(
            Kind.FAULT, vm=", ".join(fault.vms), what=what, detail=f"{standing.id} {fault.kind}"
        )
        self._faults_changed.set()

    async def ask(
        self,
        vm: str,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """A request of a VM, without a socket: for guests that live inside the lab, in its time."""
        path, _, query = target.partition("?")
        told = [
            (name.lower().encode(), value.encode()) for name, value in (("host", "lab"), *headers)
        ]
        scope: Message = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": f"/as/{vm}{unquote(path)}",
            "query_string": query.encode(),
            "headers": told,
            "client": None,
            "extensions": {"forewarn.sleep": self.sleep},
        }
        sent: list[Message] = []
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return inbox.pop() if inbox else await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            await self.metadata(scope, receive, send)
        except Dropped:
            return Answer(0, {}, b"")
        return _answer(sent)

    async def sleep(self, seconds: float) -> None:
        await self.clock.sleep_until(self.clock.now() + timedelta(seconds=seconds))

    async def listen(self, metadata: Address, control: Address | None) -> server.Addresses:
        """Open the listeners that all VMs, and the operators, share."""
        shared = self._listener(self.metadata, metadata)
        await self._open(shared)
        if control is None:
            return server.Addresses(shared.address, shared.address)
        operators = await self.control(control)
        return server.Addresses(shared.address, operators)

    async def control(self, address: Address) -> Address:
        """Open the control API, with the lab's own routes."""
        from forewarn.lab.api import (
            routes,  # its framework takes longer to import than all the rest
        )

        operators = server.make_control_listener(self.service, address, more=[routes(self)])
        await self._open(operators)
        return operators.address

    async def door(self, vm: str) -> str:
        """The URL of a listener of its own for a VM: whoever calls there is that VM."""
        self.engine.board.find_vm(vm)
        is_new = vm not in self._doors
        door = await self._doors.of(vm, self.engine.board.vms)
        if is_new:
            await self.enforce_faults()
        return f"http://{door.address}"

    async def doors(self) -> dict[str, str]:
        """The doors of all VMs; of the first ones, and of those that have one, where there are too
        many VMs.
        """
        names = sorted(self.engine.board.vms, key=lambda vm: (vm not in self._doors, vm))[
            :DOORS_MAX
        ]
        return {vm: await self.door(vm) for vm in sorted(names)}

    def door_urls(self) -> dict[str, str]:
        """The URLs of the doors that there are already, by VM."""
        return {
            vm: f"http://{address}"
            for vm, address in self._doors.addresses().items()
            if vm in self.engine.board.vms
        }

    async def keep_faults(self) -> None:
        """Enforce faults as they come and go, until cancelled."""
        told = ""
        while True:  # ends when cancelled
            try:
                since = await self.enforce_faults()
            except Unavailable as problem:  # somebody has taken the port of a door that was shut
                if problem.message != told:
                    self.transcript.add(Kind.FAULT, what="not ended", detail=problem.message)
                told = problem.message
                await asyncio.sleep(self.RETRY_SECONDS)
            else:
                told = ""
                await self._until_faults_change(since)

    async def enforce_faults(self) -> datetime:
        """What is done outside requests: doors of refused VMs are shut, enablement lapses.

        For which moment, is told.
        """
        async with self._enforcing:
            now = self.clock.now()
            lapsing = {vm for vm in self.engine.board.vms if self.faults.is_lapsing(vm, now)}
            for name in sorted(
                {self.engine.board.vms[vm].scope.name for vm in lapsing - self._lapsed}
            ):
                await self._forget_polls(self.engine.board.scopes[name])
            self._lapsed = lapsing
            await self._doors.move(lambda vm: self.faults.is_refusing(vm, now))
            return now

    async def _until_faults_change(self, since: datetime) -> None:
        """`since` is the moment for which they were enforced last; that took a while."""
        waits: list[asyncio.Task[object]] = [asyncio.ensure_future(self._faults_changed.wait())]
        moment = self.faults.next_edge(since)
        if moment is not None:
            waits.append(asyncio.ensure_future(self.clock.sleep_until(moment)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            self._faults_changed.clear()

    async def _forget_polls(self, place: PublishedScope) -> None:
        """As if nobody had polled for a day: the next poll enables the scope again."""
        key = SCOPE_KEY.format(place.scope.name)

        def forget(transaction: Transaction) -> None:
            scope: Scope | None = transaction.get(key)
            if scope is not None and scope.seen_at is not None:
                transaction.put(key, replace(scope, seen_at=None))

        await self.engine.update([key], forget, by="fault")
        place.fresh_until = 0.0

    def _vm_of(self, scope: Message) -> str:
        """The VM that a request comes from; empty if it is none of the fleet."""
        named, _ = ask.split(scope["path"])
        name = named or self.engine.board.addresses.get(
            plain_address(scope["client"][0]) if scope["client"] else "", ""
        )
        return name if name in self.engine.board.vms else ""

    def _virtual(self) -> VirtualClock:
        if isinstance(self.clock, VirtualClock):
            return self.clock
        raise Refused(
            "the clock is the real one, and only its rate can be set; expected a lab with a virtual clock"
        )

    def _listener(self, application: Application, address: Address) -> Listener:
        guard = FilteredPolls(self.engine, self.config, Limits())
        return Listener(
            application, address, guard, server_name=SERVER_METADATA, stop_seconds_max=1.0
        )

    async def _open(self, listener: Listener) -> None:
        await listener.start()
        self._listeners.append(listener)

    async def close_doors(self) -> None:
        """Answer all who wait, and take no more calls."""
        self.metadata_inner.stop()
        await asyncio.gather(
            *(listener.stop() for listener in self._listeners),
            self._doors.close(),
            return_exceptions=True,
        )

    async def _as(self, vm: str, scope: Message, receive: Receive, send: Send) -> None:
        await self.metadata({**scope, "path": f"/as/{vm}{scope['path']}"}, receive, send)


class LabMetadata(Metadata):
    """The service's metadata application. While enablement lapses, a poll counts for nothing."""

    def __init__(self, engine: Engine, config: Config, faults: Faults) -> None:
        super().__init__(engine, config)
        self._faults = faults

    async def _record(self, place: PublishedScope) -> None:
        now = self._engine.clock.now()
        if not any(self._faults.is_lapsing(vm.name, now) for vm in place.scope.vms):
            await super()._record(place)


def make_clock(setup: Setup) -> VirtualClock | RealClock:
    if not setup.is_virtual:
        return RealClock()
    if setup.start is not None and not START_MIN <= setup.start <= END_MAX:
        expected = f"a moment from {START_MIN.isoformat()} to {END_MAX.isoformat()}"
        raise Invalid(
            f"the clock cannot start at {setup.start.isoformat()}; expected {expected}",
            start=setup.start,
        )
    clock = VirtualClock((setup.start or datetime.now(UTC)).replace(microsecond=0))
    clock.is_running = setup.is_running
    return clock


def timing_at(rate: float) -> Timing:
    if not RATE_MIN <= rate <= RATE_MAX:
        raise Invalid(f"the rate is {rate:g}; expected {RATE_MIN} to {RATE_MAX}", rate=rate)
    return replace(Timing.at_rate(rate), claim=CLAIM)


def make_id(chance: random.Random) -> str:
    """The next EventId of a seed."""
    return str(uuid.UUID(int=chance.getrandbits(128), version=4)).upper()


def _answer(sent: list[Message]) -> Answer:
    if not sent:
        return Answer(0, {}, b"")
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in sent[0]["headers"]
    }
    return Answer(
        sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])
    )
