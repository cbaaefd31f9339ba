"""The service as a lab: a virtual clock, ids from a seed, a simulated platform, faults.

Not a second implementation: rules, engine, workers and metadata application are the service's.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from forewarn import server
from forewarn.config import Config, Identify
from forewarn.core.timing import Timing
from forewarn.duration import parse_duration
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.engine.replica import SEEN_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, Refused
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import Scheduler, VirtualClock
from forewarn.lab.fault.active import ActiveFault, FaultSet
from forewarn.lab.fault.filter import FaultFilter
from forewarn.lab.fault.kinds import EnablementLapse, Fault
from forewarn.lab.fault.response import NO_RESPONSE, Ending, FaultyResponse
from forewarn.lab.fault.tcp import FilteredPolls
from forewarn.lab.transcript import SETUP, Transcript, TranscriptKind
from forewarn.option_kind import Address
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.store.memory import MemoryStore
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Application, Listener
from forewarn.web.http.message import Header, Message, Receive, Send, plain_address
from forewarn.web.metadata import request as metadata_request
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.client_identity import ClientIdentity
from forewarn.web.service import Service

ADVANCE_MAX = timedelta(days=366)
START_MIN, END_MAX = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
RATE_MIN, RATE_MAX = 0.001, 1_000_000
LISTENERS_MAX = 256


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a lab.

    A virtual clock is paused unless `is_running`; `rate` shortens every notice and duration.
    """

    fleet: Fleet | None = None
    is_virtual: bool = True
    is_running: bool = False
    start: datetime | None = None
    rate: float = 1.0
    seed: int = 0


@asynccontextmanager
async def open_lab(setup: Setup) -> AsyncIterator["LabService"]:
    """Run a lab; everything that it opened is closed at the end."""
    clock = make_clock(setup)
    rng = random.Random(f"ids {setup.seed}")
    async with (
        server.open_service(
            MemoryStore(), clock, make_timing(setup.rate), partial(make_id, rng)
        ) as service,
        Scheduler(clock) as scheduler,
    ):
        lab = LabService(setup, clock, service, scheduler)
        if setup.fleet is not None:
            await lab.operations.apply(setup.fleet, by=SETUP)
        service.engine.subscribe_entries(lab.transcript.add_change)
        workers = server.make_workers(Config(), service, lab.platform, "platform")
        async with server.run_together(*workers):
            if isinstance(clock, VirtualClock):
                scheduler.start(clock.run())
            await asyncio.sleep(0)  # the workers start
            try:
                yield lab
            finally:
                await lab.close_listeners()


class LabService:
    """A running lab. Created by `open_lab`."""

    def __init__(
        self, setup: Setup, clock: VirtualClock | RealClock, service: Service, scheduler: Scheduler
    ) -> None:
        self.service = service
        self.clock = clock
        self.scheduler = scheduler
        self.engine = service.engine
        self.rate = setup.rate
        self.operations = service.operations
        self.transcript = Transcript(clock.now)
        self.faults = FaultSet()
        self.config = Config(identify=(Identify.PATH, Identify.ADDRESS))
        platform = server.make_platform(self.config, service)
        assert isinstance(platform, SimulatedPlatform), "the default of the option"
        self.platform = platform
        self._application = LabMetadata(self.engine, self.config, self.faults)
        self.metadata = FaultFilter(
            self._application,
            faults=self.faults,
            transcript=self.transcript,
            clock=clock,
            random=random.Random(f"faults {setup.seed}"),
            get_vm=self._get_vm,
        )
        self._listeners: list[Listener] = []
        self._vm_listeners: dict[str, Listener] = {}
        self._opening = asyncio.Lock()

    # --- the clock

    def scale(self, duration: str) -> timedelta:
        """Convert a duration of a scenario to the lab's clock."""
        return parse_duration(duration) / self.rate

    async def advance(
        self, duration: timedelta, may_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Let time pass until `may_stop`. Returns when everything that was due is done."""
        clock, seconds = self._require_virtual_clock(), duration.total_seconds()
        if not timedelta(0) <= duration <= min(ADVANCE_MAX, END_MAX - clock.now()):
            limits = f"0 to {ADVANCE_MAX.days} days, and a time before the year {END_MAX.year}"
            raise Invalid(
                f"the clock cannot advance by {seconds:g} s; expected {limits}", seconds=seconds
            )
        self.transcript.add(TranscriptKind.CLOCK, what="advance", detail=str(duration))
        await clock.advance(duration, may_stop)

    async def change_clock(
        self,
        *,
        rate: float | None = None,
        time: datetime | None = None,
        is_running: bool | None = None,
    ) -> None:
        """Change the clock; if one of the changes is refused, none is made.

        `rate` shortens the notices and durations of new events; `time` is jumped to, as on a
        machine that was suspended; a clock that `is_running` follows the real time.
        """
        record = partial(self.transcript.add, TranscriptKind.CLOCK)
        timing = None if rate is None else make_timing(rate)
        if time is not None:
            self._check_jump(time)
        if is_running is not None:
            self._require_virtual_clock()
        if rate is not None and timing is not None:
            self.rate = rate
            self.engine.retime(timing)
            self.platform.durations = timing.duration
            record(what="rate", detail=f"{rate:g}")
        if time is not None:
            record(what="jump", detail=time.isoformat())
            await self._require_virtual_clock().jump(time.astimezone(UTC))
        if is_running is not None:
            clock = self._require_virtual_clock()
            clock.is_running = is_running
            record(what="resume" if is_running else "pause")
            await clock.advance(timedelta(0))  # waits for a move that has begun

    def _check_jump(self, time: datetime) -> None:
        now = self._require_virtual_clock().now()
        latest = min(now + ADVANCE_MAX, END_MAX)
        if time.tzinfo is None or not now <= time <= latest:
            is_past = time.tzinfo is not None and time < now
            wrong = "is in the past" if is_past else "is too far ahead, or has no time zone"
            expected = f"a time from {now.isoformat()} to {latest.isoformat()}"
            raise Invalid(f"{time.isoformat()} {wrong}; expected {expected}", now=time)

    def _require_virtual_clock(self) -> VirtualClock:
        if isinstance(self.clock, VirtualClock):
            return self.clock
        raise Refused("this lab has the real clock, of which only the rate can be set")

    # --- faults

    async def add_fault(self, fault: Fault, rate: float = 1.0) -> ActiveFault:
        """Add a fault. One that begins now is in effect when this returns.

        `rate` is that of a scenario, which shortens how long it lasts.
        """
        for vm in fault.vms:
            self.engine.board.find_vm(vm)
        added = self.faults.add(fault, self.clock.now(), rate)
        self._record_fault("added", added)
        if added.ends_at is not None:
            end = partial(self._end_fault, added.id)
            added.end = self.scheduler.run_at(added.ends_at, end)
        if isinstance(fault, EnablementLapse):
            begin = partial(self._begin_lapse, added)
            if added.begins_at <= self.clock.now():
                await begin()
            else:
                self.scheduler.run_at(added.begins_at, begin)
        return added

    def remove_fault(self, fault_id: str) -> ActiveFault:
        removed = self.faults.remove(fault_id)
        if removed.end is not None:
            removed.end.cancel()
        self._record_fault("removed", removed)
        return removed

    async def _end_fault(self, fault_id: str) -> None:
        if fault_id in self.faults.by_id:  # not if it was over and another was added since
            self.remove_fault(fault_id)

    def _record_fault(self, what: str, added: ActiveFault) -> None:
        vms, detail = ", ".join(added.fault.vms), f"{added.id} {added.fault.kind}"
        self.transcript.add(TranscriptKind.FAULT, vm=vms, what=what, detail=detail)

    async def _begin_lapse(self, lapse: ActiveFault) -> None:
        """Forget the polls of its scopes, if it still exists; LabMetadata ignores new ones."""
        board, now = self.engine.board, self.clock.now()
        if lapse.id not in self.faults.by_id:
            return
        vms = [vm for vm in board.vms if lapse.is_active(vm, now)]
        for name in sorted({board.vms[vm].scope.name for vm in vms}):
            await self._forget_polls(board.scopes[name])

    async def _forget_polls(self, published: PublishedScope) -> None:
        """Disable the scope, as if it had not been polled for a day."""
        key = SEEN_KEY.format(published.scope.name)

        def forget(transaction: Transaction) -> None:
            if transaction.get(key) is not None:
                transaction.put(key, None)

        await self.engine.update([key], forget, by="fault")
        published.fresh_until = 0.0

    # --- requests and listeners

    async def request(
        self, vm: str, method: str, target: str, body: bytes = b"", headers: Sequence[Header] = ()
    ) -> FaultyResponse:
        """Send a request of a VM without a socket, for guests that live on the lab's clock.

        Status 0: the connection was dropped.
        """
        path, _, query = target.partition("?")
        scope: Message = {
            "type": "http",
            "method": method,
            "path": f"/as/{vm}{path}",
            "query_string": query.encode(),
            "headers": [(b"host", b"lab"), *headers],
            "client": None,
        }
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return inbox.pop() if inbox else await asyncio.get_running_loop().create_future()

        async def sleep(seconds: float) -> bool:
            await self.clock.sleep_until(self.clock.now() + timedelta(seconds=seconds))
            return True

        response = await self.metadata.respond(scope, receive, sleep)
        return response if response.ending is Ending.WHOLE else NO_RESPONSE

    async def listen_metadata(self, address: Address) -> str:
        """Open the metadata listener that all VMs share. Returns its URL."""
        return await self._open(self._make_listener(self.metadata, address))

    async def listen_control(self, address: Address) -> str:
        """Open the control API with the routes of the lab. Returns its URL."""
        from forewarn.lab.api import make_router  # its framework is slow to import

        server.require_token_outside_loopback(self.service.tokens, address)
        more = [make_router(self)]
        return await self._open(server.make_control_listener(self.service, address, more=more))

    async def listen_vm(self, vm: str) -> str:
        """Open the listener of a VM, once. Returns its URL.

        Every request on it is a request of that VM. Listeners of deleted VMs are closed first.
        """
        board, listeners = self.engine.board, self._vm_listeners
        board.find_vm(vm)
        async with self._opening:
            for gone in listeners.keys() - board.vms.keys():
                await listeners.pop(gone).stop()
            if vm not in listeners and len(listeners) >= LISTENERS_MAX:
                raise Refused(
                    f"{LISTENERS_MAX} VMs have a listener already;"
                    f" use /as/{vm} on the shared listener",
                    listeners_max=LISTENERS_MAX,
                )
            if vm not in listeners:
                application = partial(self._serve_vm, vm)
                listener = self._make_listener(application, Address("127.0.0.1", 0))
                await listener.start()
                listeners[vm] = listener
            return f"http://{listeners[vm].address}"

    async def listen_vms(self) -> dict[str, str]:
        """Open a listener for every VM, up to the limit. Returns all URLs."""
        names = sorted(self.engine.board.vms, key=lambda vm: (vm not in self._vm_listeners, vm))
        for vm in names[:LISTENERS_MAX]:
            await self.listen_vm(vm)
        return self.vm_urls()

    def vm_urls(self) -> dict[str, str]:
        """Return the URLs of the open VM listeners, sorted by VM."""
        listeners = sorted(self._vm_listeners.items())
        vms = self.engine.board.vms
        return {vm: f"http://{listener.address}" for vm, listener in listeners if vm in vms}

    async def close_listeners(self) -> None:
        """Answer waiting requests and accept no more."""
        self._application.stop()
        listeners = (*self._listeners, *self._vm_listeners.values())
        stops = (listener.stop() for listener in listeners)
        await asyncio.gather(*stops, return_exceptions=True)

    def _get_vm(self, scope: Message) -> str:
        """Return the VM of a request; empty if it is not a VM of the fleet."""
        name, _ = metadata_request.split(scope["path"])
        if not name and scope["client"]:
            name = self.engine.board.addresses.get(plain_address(scope["client"][0]), "")
        return name if name in self.engine.board.vms else ""

    async def _serve_vm(self, vm: str, scope: Message, receive: Receive, send: Send) -> None:
        await self.metadata({**scope, "path": f"/as/{vm}{scope['path']}"}, receive, send)

    def _make_listener(self, application: Application, address: Address) -> Listener:
        policy = FilteredPolls(self.engine, self.config, Limits())
        return Listener(
            application, address, policy, server_name=SERVER_METADATA, stop_seconds_max=1.0
        )

    async def _open(self, listener: Listener) -> str:
        await listener.start()
        self._listeners.append(listener)
        return f"http://{listener.address}"


class LabMetadata(Metadata):
    """The service's metadata application, except that polls do not count during a lapse."""

    def __init__(self, engine: Engine, config: Config, faults: FaultSet) -> None:
        super().__init__(engine, config)
        self._faults = faults

    async def _record(self, client: ClientIdentity) -> None:
        now = self._engine.clock.now()
        if not any(self._faults.is_lapsing(vm.name, now) for vm in client.place.scope.vms):
            await super()._record(client)


def make_clock(setup: Setup) -> VirtualClock | RealClock:
    if not setup.is_virtual:
        return RealClock()
    if setup.start is not None and not START_MIN <= setup.start <= END_MAX:
        expected = f"{START_MIN.isoformat()} to {END_MAX.isoformat()}"
        raise Invalid(
            f"the clock cannot start at {setup.start.isoformat()}; expected {expected}",
            start=setup.start,
        )
    clock = VirtualClock((setup.start or datetime.now(UTC)).replace(microsecond=0))
    clock.is_running = setup.is_running
    return clock


def make_timing(rate: float) -> Timing:
    if not RATE_MIN <= rate <= RATE_MAX:
        raise Invalid(f"the rate is {rate:g}; expected {RATE_MIN} to {RATE_MAX}", rate=rate)
    return Timing.at_rate(rate)


def make_id(rng: random.Random) -> str:
    """Return the next EventId of a seed."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4)).upper()
