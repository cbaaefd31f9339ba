"""The verbs of a scenario: the members of each step, and what it does."""

import random
from collections.abc import Awaitable, Callable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Power
from forewarn.duration import Duration, parse_duration
from forewarn.errors import NotFound, Refused
from forewarn.fleetfile.parser import Fleet
from forewarn.fleetfile.schema import FleetFile, Name, Text
from forewarn.lab.fault.kinds import Fault
from forewarn.lab.scenario.timeline import BY, Timeline
from forewarn.lab.service import LabService

ANY = "any"
TIMES_MAX = 100_000

NameOrAny = Annotated[
    Name, Meta(description="a name, or any: one without a pending event, chosen by the seed")
]
EventName = Annotated[Name, Meta(description="a name that a step gives with `as`")]
Times = Annotated[
    int, Meta(ge=1, le=TIMES_MAX, description=f"a whole number from 1 to {TIMES_MAX}")
]
Seconds = Annotated[
    int, Meta(ge=-1, le=86_400, description="a whole number of seconds from -1 (unknown) to 86400")
]
When = Annotated[
    str,
    Meta(max_length=400, description="a condition such as `web-0 approved` or `patch completed`"),
]


class MaintenanceType(StrEnum):
    FREEZE = "Freeze"
    REBOOT = "Reboot"
    REDEPLOY = "Redeploy"


class MaintenanceCause(StrEnum):
    """Decides the description that VMs read."""

    MAINTENANCE = "maintenance"
    INFRASTRUCTURE = "infrastructure"
    LIVE_MIGRATION = "live-migration"


class Repeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs the step `times` times in all."""

    every: Duration
    times: Times


class ScenarioStep(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"as_": "as"}
):
    """A step that the parser has checked. Members that its verb does not have keep their default.

    `number` is its position in the file, from 1.
    """

    do: str
    number: int = 0
    at: str | None = None
    when: str | None = None
    after: str | None = None
    repeat: Repeat | None = None
    vm: str | None = None
    host: str = ""
    event: str = ""
    type: str = ""
    cause: str | None = None
    duration_seconds: int | None = None
    description: str | None = None
    notice: str | None = None
    as_: str | None = None
    by: str = ""
    set: Fault | None = None
    fault: str | None = None
    text: str = ""

    @property
    def title(self) -> str:
        return f"step {self.number} ({self.do})"

    def describe(self) -> str:
        """Return its members as text, without its time and nested values."""
        if self.do == "log":
            return self.text
        members = VERBS[self.do].members
        values = msgspec.to_builtins(self).items()
        return ", ".join(
            f"{name} {value}"
            for name, value in values
            if name in members and isinstance(value, str | int)
        )


class StepRunner:
    """Runs steps against a lab. An Error says why a step could not be done."""

    def __init__(
        self,
        lab: LabService,
        timeline: Timeline,
        *,
        fleets: dict[int, Fleet],
        rng: random.Random,
        set_fault: Callable[[Fault], Awaitable[str]],
    ) -> None:
        self._lab = lab
        self._operations = lab.operations
        self._timeline = timeline
        self._fleets = fleets
        self._rng = rng
        self._set_fault = set_fault
        self._fault_ids: dict[str, str] = {}

    async def run(self, step: ScenarioStep) -> None:
        await VERBS[step.do].action(self, step)

    async def restart(self, step: ScenarioStep) -> None:
        await self._operations.restart(self._pick_vm(step), **self._options(step))

    async def redeploy(self, step: ScenarioStep) -> None:
        await self._operations.redeploy(self._pick_vm(step), **self._options(step))

    async def evict(self, step: ScenarioStep) -> None:
        await self._operations.evict(self._pick_vm(step), **self._options(step))

    async def delete(self, step: ScenarioStep) -> None:
        await self._operations.delete(self._pick_vm(step), **self._options(step))

    async def maintain(self, step: ScenarioStep) -> None:
        await self._operations.maintain(
            self._pick_host(step),
            type=EventType(step.type),
            cause=Cause(step.cause or Cause.MAINTENANCE),
            duration_seconds=step.duration_seconds,
            description=step.description,
            **self._options(step),
        )

    async def degrade(self, step: ScenarioStep) -> None:
        await self._operations.degrade(self._pick_host(step), **self._options(step))

    async def fail(self, step: ScenarioStep) -> None:
        await self._operations.fail(self._pick_host(step), by=make_author(step.as_))

    async def approve(self, step: ScenarioStep) -> None:
        for event_id in self._find_events(step):
            await self._operations.approve(event_id, by=BY, vm=step.vm or "")

    async def cancel(self, step: ScenarioStep) -> None:
        for event_id in self._find_events(step):
            await self._operations.cancel(event_id, by=BY)

    async def complete(self, step: ScenarioStep) -> None:
        for event_id in self._find_events(step):
            await self._operations.complete(event_id, by=BY)

    async def extend(self, step: ScenarioStep) -> None:
        for event_id in self._find_events(step):
            not_before = self._operations.find_event(event_id).event.not_before
            later = not_before + parse_duration(step.by) / self._lab.rate
            await self._operations.extend(event_id, by=BY, not_before=later)

    async def apply(self, step: ScenarioStep) -> None:
        await self._operations.apply(self._fleets[step.number], by=BY)

    async def set_fault(self, step: ScenarioStep) -> None:
        assert step.set is not None, "the parser requires it"
        fault_id = await self._set_fault(step.set)
        if step.as_ is not None:
            self._fault_ids[step.as_] = fault_id

    async def clear(self, step: ScenarioStep) -> None:
        name, faults = step.fault, self._lab.faults.by_id
        if name is not None and name not in self._fault_ids:
            raise NotFound(f"the fault {name} has not been set yet", fault=name)
        for fault_id in list(faults) if name is None else [self._fault_ids[name]]:
            if fault_id in faults:
                self._lab.remove_fault(fault_id)

    async def break_vm(self, step: ScenarioStep) -> None:
        self._lab.platform.failing.add(step.vm or "")

    async def mend_vm(self, step: ScenarioStep) -> None:
        self._lab.platform.failing.discard(step.vm or "")

    async def jump(self, step: ScenarioStep) -> None:
        await self._lab.jump(self._lab.clock.now() + parse_duration(step.by))

    async def log(self, step: ScenarioStep) -> None:
        """The transcript has an entry for every step, so there is nothing left to do."""

    def _options(self, step: ScenarioStep) -> dict[str, Any]:
        return {"by": make_author(step.as_), "not_before": self._not_before(step.notice)}

    def _not_before(self, notice: str | None) -> datetime | None:
        if notice is None:
            return None
        return self._lab.clock.now() + parse_duration(notice) / self._lab.rate

    def _find_events(self, step: ScenarioStep) -> list[str]:
        live = self._lab.engine.board.events
        ids = [event.id for event in self._timeline.get_events(step.event) if event.id in live]
        if not ids:
            raise NotFound(f"there is no event named {step.event} now", event=step.event)
        return ids

    def _pick_vm(self, step: ScenarioStep) -> str:
        return self._pick(step.vm or "", self._list_idle_vms, "VM")

    def _pick_host(self, step: ScenarioStep) -> str:
        return self._pick(step.host, self._list_idle_hosts, "host")

    def _pick(self, name: str, list_idle: Callable[[], list[str]], what: str) -> str:
        if name != ANY:
            return name
        idle = list_idle()
        if not idle:
            raise Refused(f"every {what} has a pending event; expected one without")
        return self._rng.choice(idle)

    def _list_idle_vms(self) -> list[str]:
        """Return the running VMs without an event or impact, sorted by name."""
        idle = []
        for published in self._lab.engine.board.scopes.values():
            scope = published.scope
            busy = {vm for event in scope.events for vm in event.resources}
            busy |= {impact.vm for impact in scope.impacts}
            idle += [
                vm.name for vm in scope.vms if vm.power is Power.RUNNING and vm.name not in busy
            ]
        return sorted(idle)

    def _list_idle_hosts(self) -> list[str]:
        idle = set(self._list_idle_vms())
        return sorted(host for host, vms in self._lab.engine.board.hosts.items() if vms <= idle)


def make_author(name: str | None) -> str:
    """Return the author of a change. The timeline reads the names of events from it."""
    return BY if name is None else f"{BY}: {name}"


class Verb(NamedTuple):
    about: str
    members: dict[str, Any]
    action: Callable[[StepRunner, ScenarioStep], Awaitable[None]]


TIMES = {
    "at": Duration | None,
    "when": When | None,
    "after": Duration | None,
    "repeat": Repeat | None,
}
"""The members of every step."""
_NAMED = {"as": Name | None}
_NOTICE = {"notice": Duration | None, "as": Name | None}

VERBS = {
    "restart": Verb("A user restarts a VM.", {"vm": NameOrAny, **_NOTICE}, StepRunner.restart),
    "redeploy": Verb(
        "A user moves a VM to another host.", {"vm": NameOrAny, **_NOTICE}, StepRunner.redeploy
    ),
    "evict": Verb("The platform evicts a spot VM.", {"vm": NameOrAny, **_NOTICE}, StepRunner.evict),
    "delete": Verb("A user deletes a VM.", {"vm": NameOrAny, **_NOTICE}, StepRunner.delete),
    "maintain": Verb(
        "The platform maintains a host: one event per scope and update domain.",
        {
            "host": NameOrAny,
            "type": MaintenanceType,
            "cause": MaintenanceCause | None,
            "duration_seconds": Seconds | None,
            "description": Text | None,
            **_NOTICE,
        },
        StepRunner.maintain,
    ),
    "degrade": Verb(
        "A host's hardware will fail: seven days' notice.",
        {"host": NameOrAny, **_NOTICE},
        StepRunner.degrade,
    ),
    "fail": Verb(
        "A host's hardware has failed: the event starts without notice.",
        {"host": NameOrAny, **_NAMED},
        StepRunner.fail,
    ),
    "approve": Verb(
        "An operator approves the events of a name, or does so on behalf of `vm`.",
        {"event": EventName, "vm": Name | None},
        StepRunner.approve,
    ),
    "cancel": Verb("A Scheduled event is cancelled.", {"event": EventName}, StepRunner.cancel),
    "complete": Verb("A Started event ends early.", {"event": EventName}, StepRunner.complete),
    "extend": Verb(
        "NotBefore is postponed.", {"event": EventName, "by": Duration}, StepRunner.extend
    ),
    "apply": Verb("Another fleet is applied.", {"fleet": FleetFile}, StepRunner.apply),
    "fault": Verb(
        "A fault begins. `as` names it for `clear`.",
        {"set": Fault, **_NAMED},
        StepRunner.set_fault,
    ),
    "clear": Verb(
        "The named fault ends; without a name, all faults end.",
        {"fault": Name | None},
        StepRunner.clear,
    ),
    "break": Verb("Impacts on this VM fail.", {"vm": Name}, StepRunner.break_vm),
    "mend": Verb("Impacts on this VM work again.", {"vm": Name}, StepRunner.mend_vm),
    "jump": Verb(
        "The clock jumps ahead, as on a machine that was suspended. Only on a virtual clock.",
        {"by": Duration},
        StepRunner.jump,
    ),
    "log": Verb("A line in the transcript.", {"text": Text}, StepRunner.log),
}
