"""The lab inside a test:

`with Lab() as lab:`. Its server is in a thread of its own; all here may be called from any thread.
"""

import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from forewarn.core.command import Seen
from forewarn.engine.clock import VirtualClock
from forewarn.errors import Invalid, Refused, UnknownVm
from forewarn.fleetfile import parser as wire
from forewarn.lab.fault.active import Fault, parse
from forewarn.lab.service import RATE_MAX, RATE_MIN, Setup
from forewarn.lab.transcript import Transcript
from forewarn.server import read_file
from forewarn.testing.ledger import Approval
from forewarn.testing.objects import BY, LabEvent, LabFault, LabHost, LabVm, span
from forewarn.testing.thread import LOOPBACK, LabThread

TIMEOUT_SECONDS, TIMEOUT_SECONDS_MAX = 10.0, 3600
SCOPE = "lab"
"""The scope of the VMs that are made when they are asked for."""
DOMAINS = 100
ENVIRONMENT = {
    "SCHEDULEDEVENTSIP": "{address}",
    "AZURE_SCHEDULEDEVENTS_URL": "http://{address}/metadata/scheduledevents?api-version=2019-08-01",
    "AZURE_METADATAINSTANCE_URL": "http://{address}/metadata/instance?api-version=2019-08-01",
}
"""Where clients look for the endpoint:

Forewarn's own and Azure's Python sample first, then azure-scheduledevents-manager.
"""

FleetLike = wire.Fleet | Mapping[str, Any] | str | os.PathLike[str]


class Lab:
    """A platform of one's own. Without a fleet, each VM is made when it is first asked for.

    The clock is virtual and stands still: `advance` moves it. With `rate` it is the real one, and
    all notices and durations are that many times shorter. `seed` settles the ids. Each call is
    given at most `timeout_seconds` of real time.
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
                f"start is {start} and rate is {rate}: the real clock starts now; expected one of the two"
            )
        if start is not None:
            check_moment("start", start)
        if rate is not None and not (
            isinstance(rate, int | float) and RATE_MIN <= rate <= RATE_MAX
        ):
            raise Invalid(
                f"rate is {rate!r}; expected a number from {RATE_MIN} to {RATE_MAX}", rate=rate
            )
        if not (
            isinstance(timeout_seconds, int | float) and 0 < timeout_seconds <= TIMEOUT_SECONDS_MAX
        ):
            expected = f"a number above 0, at most {TIMEOUT_SECONDS_MAX}"
            raise Invalid(
                f"timeout_seconds is {timeout_seconds!r}; expected {expected}",
                timeout_seconds=timeout_seconds,
            )
        self._makes_vms = fleet is None
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
        self._silent: set[str] = set()
        """The scopes that a test asked not to enable."""
        self._control_url = ""

    def __enter__(self) -> Self:
        """Start it. Returns when the endpoint answers."""
        if self._running is not None:
            raise Refused(
                "this lab has been used already; expected a new one, as in `with Lab() as lab:`"
            )
        self._running = LabThread(self._setup, self._timeout_seconds)
        self._running.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it: no thread, socket or task is left. Events and the transcript stay readable."""
        self._thread.stop()

    @property
    def _thread(self) -> LabThread:
        if self._running is None:
            raise Refused("this lab is not open; expected a call inside `with Lab() as lab:`")
        return self._running

    @property
    def url(self) -> str:
        """The endpoint that all share.

        Who calls is the first VM made (in a fleet: that at 127.0.0.1), or `/as/NAME`.
        """
        return self._thread.url

    @property
    def control_url(self) -> str:
        """The operators' API of this lab, opened when it is first asked for."""
        if not self._control_url:
            self._thread.call("control_url", self._open_control)
        return self._control_url

    def vm(self, name: str, *, enabled: bool | None = None) -> LabVm:
        """A VM of the fleet, or where none was given, a new one.

        A VM that was not asked for before counts as if it had polled, so that its scope is told of
        what users do. With `enabled=False` the scope is left as it is, by this and later calls,
        until one says `enabled=True`.
        """
        self._thread.call("vm", lambda: self._prepare(name, enabled=enabled))
        return self._vms[name]

    def host(self, name: str) -> LabHost:
        """A host of the fleet. That of a VM is `vm.host`."""

        async def check() -> None:  # in the lab's own thread, where the board changes
            self._thread.laboratory.engine.board.scopes_on(name)

        self._thread.call("host", check)
        return LabHost(name, self._thread)

    @property
    def events(self) -> list[LabEvent]:
        """All events there ever were, the oldest first."""
        return [LabEvent(event_id, self._thread) for event_id in self._thread.ledger.ids()]

    @property
    def approvals(self) -> tuple[Approval, ...]:
        """All approvals in their order: `at`, `by`, `event_id`. Approving again is no approval."""
        return self._thread.ledger.approvals()

    @property
    def now(self) -> datetime:
        """The lab's time."""
        return self._thread.laboratory.clock.now()

    def advance(
        self,
        by: timedelta | None = None,
        *,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Let the time pass.

        Returns when all that was due meanwhile has been done, in its order.
        """
        asked = span(by, hours=hours, minutes=minutes, seconds=seconds)
        self._thread.call("advance", lambda: self._thread.laboratory.advance(asked))

    def jump(self, moment: datetime) -> None:
        """Be at a later moment at once: all that was due meanwhile is due now."""
        check_moment("moment", moment)
        self._thread.call("jump", lambda: self._thread.laboratory.jump(moment))

    def resume(self) -> None:
        """Let the clock follow the real time from now on."""
        self._run(is_running=True)

    def pause(self) -> None:
        """Let the clock stand still again."""
        self._run(is_running=False)

    def fault(self, kind: str, *, vm: str = "", **members: Any) -> LabFault:
        """Let the endpoint misbehave, for one VM or for all, until the fault is removed or has had
        its requests or time.
        """
        befalls = {"vms": [vm]} if vm else {}
        asked = parse({"fault": kind, **befalls, **members})
        return LabFault(self._thread, self._thread.call("fault", lambda: self._add_fault(asked)))

    @property
    def transcript(self) -> Transcript:
        """Every request with its answer, every change, every fault.

        `str()` of it is for a person, `entries` for a program.
        """
        return self._thread.laboratory.transcript

    def environment(self, name: str) -> dict[str, str]:
        """The variables that common clients read, so that one which is started with them asks here,
        as this VM.
        """
        address = self.vm(name).url.removeprefix("http://")
        return {variable: value.format(address=address) for variable, value in ENVIRONMENT.items()}

    def _run(self, *, is_running: bool) -> None:
        async def run() -> None:
            laboratory = self._thread.laboratory
            laboratory.run(is_running=is_running)
            assert isinstance(laboratory.clock, VirtualClock), "any other has been refused"
            await laboratory.clock.advance(
                timedelta(0)
            )  # a stride that was under way has ended then

        self._thread.call("resume" if is_running else "pause", run)

    async def _open_control(self) -> None:
        if not self._control_url:  # another thread may have asked first
            self._control_url = f"http://{await self._thread.laboratory.control(LOOPBACK)}"

    async def _add_fault(self, asked: Fault) -> str:
        added = self._thread.laboratory.add_fault(asked)
        await self._thread.laboratory.enforce_faults()
        return added.id

    async def _prepare(self, name: str, *, enabled: bool | None) -> None:
        engine = self._thread.laboratory.engine
        is_new = name not in engine.board.vms or name not in self._vms
        if name not in engine.board.vms:  # never made, or deleted since
            await self._make(name)
        self._vms.setdefault(name, LabVm(name, self._thread))
        scope = engine.board.vms[name].scope.name
        if enabled is False:
            self._silent.add(scope)
        elif enabled:
            self._silent.discard(scope)
        if enabled or (enabled is None and is_new and scope not in self._silent):
            await engine.submit(scope, Seen(), by=BY)

    async def _make(self, name: str) -> None:
        """A VM in an update domain and on a host of its own, and a spare host for it to move to."""
        operations, known_as = self._thread.laboratory.operations, list(self._vms)
        number = known_as.index(name) if name in known_as else len(known_as)
        if not self._makes_vms:
            known = ", ".join(sorted(self._thread.laboratory.engine.board.vms)) or "none"
            raise UnknownVm(f"there is no VM {name!r} in this fleet; it has {known}", vm=name)
        entry = {"name": name, "update_domain": number % DOMAINS, "host": f"host-{number}"}
        address = {} if number else {"address": str(LOOPBACK.host)}
        scope = {"name": SCOPE, "kind": "availability-set", "vms": [{**entry, **address}]}
        made = read_fleet({"scopes": [scope], "hosts": [f"host-{number}", f"host-{number}-spare"]})
        before = operations.fleet()
        members = tuple(vm for one in before.scopes for vm in one.vms) + made.scopes[0].vms
        grown = wire.Fleet(
            scopes=(replace(made.scopes[0], vms=members),),
            hosts=(*before.hosts, *(host for host in made.hosts if host not in before.hosts)),
        )
        await operations.apply(grown, by=BY)


def check_moment(what: str, moment: datetime) -> None:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise Invalid(
            f"{what} is {moment!r}; expected a moment with a time zone, as in datetime(…, tzinfo=UTC)"
        )


def read_fleet(fleet: FleetLike) -> wire.Fleet:
    """A fleet from a file, or from what would stand in one."""
    if isinstance(fleet, wire.Fleet):
        return fleet
    if isinstance(fleet, Mapping):
        return wire.parse(msgspec.json.encode(fleet), "fleet")
    if isinstance(fleet, str | os.PathLike):
        return wire.parse(read_file(Path(fleet), "fleet file"), str(fleet))
    raise Refused(f"a fleet is a path or a mapping, not {type(fleet).__name__}")
