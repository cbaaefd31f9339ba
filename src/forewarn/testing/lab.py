"""`Lab`: a lab inside a test, in a thread of its own. It may be used from any thread."""

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from operator import methodcaller
from pathlib import Path
from typing import Any, Self

import msgspec

from forewarn.core.command import Seen
from forewarn.errors import Error, Invalid, Refused, UnknownVm
from forewarn.fleetfile import parser as fleet_parser
from forewarn.fleetfile.files import read_sources
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.environment import make_environment
from forewarn.lab.fault.active import parse_fault
from forewarn.lab.names import count
from forewarn.lab.service import RATE_MAX, RATE_MIN, Setup
from forewarn.lab.transcript import SETUP, Transcript
from forewarn.testing import intercept as interception
from forewarn.testing.ledger import LabApproval
from forewarn.testing.literals import FaultKind
from forewarn.testing.objects import BY, LabEvent, LabFault, LabHost, LabVm, make_duration
from forewarn.testing.thread import LOOPBACK, LabThread

__tracebackhide__ = methodcaller("errisinstance", Error)  # as in `objects.py`
TIMEOUT_SECONDS, TIMEOUT_SECONDS_MIN, TIMEOUT_SECONDS_MAX = 10.0, 0.001, 3600
SCOPE = "lab"
"""The scope of VMs that are created on demand."""
UPDATE_DOMAINS = 100

FleetLike = Fleet | Mapping[str, Any] | str | os.PathLike[str]


class Lab:
    """A Scheduled Events platform for one test. Without a fleet, VMs are created on demand.

    The clock is virtual and paused: `advance` moves it. With `rate` it is the real one, and all
    notices and durations are that many times shorter. `seed` determines the event ids. Each call
    may take `timeout_seconds` of real time.

    States:  NEW -> OPEN (inside `with`) -> CLOSED. A closed lab cannot be opened again.
    """

    def __init__(
        self,
        fleet: FleetLike | None = None,
        *,
        rate: float | None = None,
        start: datetime | None = None,
        seed: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if rate is not None and start is not None:
            raise Invalid(
                f"got rate {rate} and start {start}; expected one of them: the real clock"
                " starts now"
            )
        if start is not None:
            check_time("start", start)
        if rate is not None:
            check_number("rate", rate, RATE_MIN, RATE_MAX)
        check_number("timeout_seconds", timeout_seconds, TIMEOUT_SECONDS_MIN, TIMEOUT_SECONDS_MAX)
        self._timeout_seconds = timeout_seconds
        self._setup = Setup(
            fleet=None if fleet is None else read_fleet(fleet),
            is_virtual=rate is None,
            rate=1.0 if rate is None else rate,
            start=start,
            seed=seed,
        )
        self._running: LabThread | None = None
        self._vms: dict[str, LabVm] = {}
        self._disabled_scopes: set[str] = set()
        self._control_url = ""

    def __enter__(self) -> Self:
        """Start the lab. Returns when the endpoint is ready."""
        if self._running is not None:
            raise Refused("this lab was used before; expected a new one: `with Lab() as lab:`")
        self._running = LabThread(self._setup, self._timeout_seconds)
        self._running.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the lab: no thread, socket or task is left. Events and transcript stay readable."""
        self._thread.stop()

    @property
    def _thread(self) -> LabThread:
        if self._running is None:
            raise Refused("this lab is not open; expected a call inside `with Lab() as lab:`")
        return self._running

    @property
    def url(self) -> str:
        """The endpoint that all VMs share.

        Requests are those of the first VM created (with a fleet: of the VM with the address
        127.0.0.1), or of the VM in the path `/as/NAME`.
        """
        return self._thread.url

    @property
    def control_url(self) -> str:
        """The control API, started on first use."""
        if not self._control_url:
            self._thread.call(self._open_control)
        return self._control_url

    def vm(self, name: str, *, enabled: bool | None = None) -> LabVm:
        """Return a VM of the fleet or, without a fleet, create it.

        The first call for a VM enables Scheduled Events for its scope, as a poll would. With
        `enabled=False` neither this call nor later ones do, until one has `enabled=True`.
        """
        self._thread.call(self._prepare_vm, name, enabled=enabled)
        return self._vms[name]

    def host(self, name: str) -> LabHost:
        """Return a host of the fleet. The host of a VM is `vm.host`."""
        self._thread.call(self._check_host, name)
        return LabHost(name, self._thread)

    @property
    def events(self) -> list[LabEvent]:
        """All events there ever were, the oldest first."""
        return [LabEvent(event_id, self._thread) for event_id in self._thread.ledger.ids()]

    @property
    def approvals(self) -> tuple[LabApproval, ...]:
        """All approvals in order. Approving again does not count."""
        return self._thread.ledger.approvals()

    @property
    def now(self) -> datetime:
        """The lab's time."""
        return self._thread.service.clock.now()

    def advance(
        self,
        by: timedelta | None = None,
        *,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Let time pass. Returns when everything that was due is done, in order."""
        duration = make_duration(by, hours=hours, minutes=minutes, seconds=seconds)
        self._thread.call(self._thread.service.advance, duration)

    def jump(self, time: datetime) -> None:
        """Set a later time immediately: everything that was due in between is due now."""
        check_time("time", time)
        self._thread.call(self._thread.service.change_clock, time=time)

    def resume(self) -> None:
        """Let the clock follow the real time."""
        self._thread.call(self._thread.service.change_clock, is_running=True)

    def pause(self) -> None:
        """Pause the clock."""
        self._thread.call(self._thread.service.change_clock, is_running=False)

    def fault(self, kind: FaultKind, *, vm: str = "", **members: Any) -> LabFault:
        """Add a fault to the endpoint, for one VM or for all.

        It ends when it is removed, or after its number of requests or its duration.
        """
        vms = {"vms": [vm]} if vm else {}
        try:
            fault = parse_fault({"fault": kind, **vms, **members})
        except Error as error:
            raise error.with_traceback(None) from None
        return LabFault(self._thread, self._thread.call(self._thread.service.add_fault, fault).id)

    @property
    def transcript(self) -> Transcript:
        """Every request with its response, every change, every fault.

        `str()` formats the newest entries; `entries` has all of them.
        """
        return self._thread.service.transcript

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables that make common clients use the endpoint of this VM."""
        return make_environment(self.vm(name).url)

    def intercept(self, name: str) -> AbstractContextManager[None]:
        """Within a `with`, this process's connections to 169.254.169.254:80 are those of this VM.

        For code that has the address built in. All threads are affected.
        """
        if not isinstance(name, str):
            raise Invalid(f"intercept is {name!r}; expected the name of one VM")
        return interception.intercept(int(self.vm(name).url.rpartition(":")[2]))

    def __repr__(self) -> str:
        if self._running is None:
            return "<Lab, not open>"
        events = count(len(self.events), "event")
        return f"<Lab at {self.url}: {events}, now {self.now:%Y-%m-%dT%H:%M:%SZ}>"

    async def _open_control(self) -> None:
        if not self._control_url:  # another thread may have been first
            self._control_url = await self._thread.service.listen_control(LOOPBACK)

    async def _check_host(self, name: str) -> None:
        self._thread.service.engine.board.scopes_on(name)

    async def _prepare_vm(self, name: str, *, enabled: bool | None) -> None:
        engine = self._thread.service.engine
        is_new = name not in engine.board.vms or name not in self._vms
        if name not in engine.board.vms:  # never created, or deleted since
            await self._create_vm(name)
        self._vms.setdefault(name, LabVm(name, self._thread))
        scope = engine.board.vms[name].scope.name
        if enabled is False:
            self._disabled_scopes.add(scope)
        elif enabled:
            self._disabled_scopes.discard(scope)
        if enabled or (enabled is None and is_new and scope not in self._disabled_scopes):
            await engine.submit(scope, Seen(), by=BY)

    async def _create_vm(self, name: str) -> None:
        """Create a VM with its own update domain and host, and a spare host to move to."""
        operations, names = self._thread.service.operations, list(self._vms)
        number = names.index(name) if name in names else len(names)
        if self._setup.fleet is not None:
            vms = ", ".join(sorted(self._thread.service.engine.board.vms)) or "none"
            raise UnknownVm(f"there is no VM {name!r} in this fleet; it has {vms}", vm=name)
        host = f"host-{number}"
        vm = {"name": name, "update_domain": number % UPDATE_DOMAINS, "host": host}
        if number == 0:
            vm["address"] = str(LOOPBACK.host)
        before = json.loads(fleet_parser.dump_json(operations.fleet()))
        others = [vm for scope in before["scopes"] for vm in scope["vms"]]
        scope = {"name": SCOPE, "kind": "availability-set", "vms": [*others, vm]}
        hosts = [*before.get("hosts", ()), host, f"{host}-spare"]
        await operations.apply(read_fleet({"scopes": [scope], "hosts": hosts}), by=SETUP)


def check_number(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or not low <= value <= high:
        raise Invalid(f"{name} is {value!r}; expected a number from {low} to {high}")


def check_time(name: str, time: datetime) -> None:
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise Invalid(
            f"{name} is {time!r}; expected a datetime with a time zone, such as"
            " datetime(…, tzinfo=UTC)"
        )


def read_fleet(fleet: FleetLike) -> Fleet:
    """Read a fleet from a file or folder, or from a mapping like the content of a file."""
    if isinstance(fleet, Fleet):
        return fleet
    if isinstance(fleet, Mapping):
        return fleet_parser.parse(msgspec.json.encode(fleet), "fleet")
    if isinstance(fleet, str | os.PathLike):
        return fleet_parser.parse_all(read_sources(Path(fleet)))
    raise Refused(f"expected a fleet as a path or a mapping, got {type(fleet).__name__}")
