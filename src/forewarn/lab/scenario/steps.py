"""The verbs of a scenario: the members of each step, and what it does."""

import random
from abc import abstractmethod
from datetime import datetime
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Power
from forewarn.duration import Duration
from forewarn.errors import NotFound, Refused
from forewarn.fleetfile import parser as fleet_parser
from forewarn.fleetfile.schema import FleetFile, Name, Text, number_from
from forewarn.lab.fault.kinds import Fault
from forewarn.lab.names import ANY, EventName, FaultName, HostOrAny, VmName, VmOrAny
from forewarn.lab.scenario.timeline import BY, Timeline
from forewarn.lab.service import LabService

Seconds = Annotated[
    int, Meta(ge=-1, le=86_400, description="a whole number of seconds from -1 (unknown) to 86400")
]
When = Annotated[
    str,
    Meta(max_length=400, description="a condition such as `web-0 approved` or `patch completed`"),
]


class Repeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs the step `times` times in all."""

    every: Duration
    times: Annotated[int, number_from(1, 100_000)]


class Stage(NamedTuple):
    """What steps act on."""

    lab: LabService
    timeline: Timeline
    rng: random.Random
    fault_ids: dict[str, str]
    """The ids of faults, by the name that a step gave them."""

    def get_not_before(self, notice: str | None) -> datetime | None:
        return None if notice is None else self.lab.clock.now() + self.lab.scale(notice)

    def find_events(self, name: str) -> list[str]:
        live = self.lab.engine.board.events
        ids = [event.id for event in self.timeline.get_events(name) if event.id in live]
        if not ids:
            raise NotFound(f"there is no event named {name} now", event=name)
        return ids

    def pick_vm(self, vm: str) -> str:
        return self._choose(self._list_idle_vms(), "VM") if vm == ANY else vm

    def pick_host(self, host: str) -> str:
        if host != ANY:
            return host
        idle, hosts = set(self._list_idle_vms()), self.lab.engine.board.hosts
        return self._choose([name for name, vms in hosts.items() if vms and vms <= idle], "host")

    def _choose(self, idle: list[str], what: str) -> str:
        if not idle:
            raise Refused(f"every {what} has a pending event; expected one without")
        return self.rng.choice(sorted(idle))

    def _list_idle_vms(self) -> list[str]:
        """Return the running VMs without an event or impact."""
        idle = []
        for published in self.lab.engine.board.scopes.values():
            scope = published.scope
            busy = {vm for event in scope.events for vm in event.resources}
            busy |= {impact.vm for impact in scope.impacts}
            running = (vm.name for vm in scope.vms if vm.power is Power.RUNNING)
            idle += [vm for vm in running if vm not in busy]
        return idle


class AnyStep(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="do",
    rename={"as_": "as"},
):
    """The members of every step. `run` raises an Error that says why it could not be done."""

    at: Duration | None = None
    when: When | None = None
    after: Duration | None = None
    repeat: Repeat | None = None

    @property
    def verb(self) -> str:
        return str(self.__struct_config__.tag)

    async def operate(self, stage: Stage, target: str, **options: object) -> None:
        """Carry out the operation that its verb names.

        The timeline reads the name of the new events from the author.
        """
        name = getattr(self, "as_", None)
        author = BY if name is None else f"{BY}: {name}"
        await getattr(stage.lab.operations, self.verb)(target, by=author, **options)

    def describe(self) -> str:
        """Return its members as text, without its verb, its time and nested values."""
        hidden = {"do", *AnyStep.__struct_fields__}
        return ", ".join(
            f"{name} {value}"
            for name, value in msgspec.to_builtins(self).items()
            if name not in hidden and isinstance(value, str | int)
        )

    @abstractmethod
    async def run(self, stage: Stage) -> None:
        """Carry out the step."""


class VmStep(AnyStep, frozen=True, kw_only=True):
    """Does what its verb says to a VM."""

    vm: VmOrAny
    notice: Duration | None = None
    as_: Name | None = None

    async def run(self, stage: Stage) -> None:
        vm, not_before = stage.pick_vm(self.vm), stage.get_not_before(self.notice)
        await self.operate(stage, vm, not_before=not_before)


class RestartStep(VmStep, frozen=True, kw_only=True, tag="restart"):
    """A user restarts a VM."""


class RedeployStep(VmStep, frozen=True, kw_only=True, tag="redeploy"):
    """A user moves a VM to another host."""


class EvictStep(VmStep, frozen=True, kw_only=True, tag="evict"):
    """The platform evicts a spot VM."""


class DeleteStep(VmStep, frozen=True, kw_only=True, tag="delete"):
    """A user deletes a VM."""


class MaintainStep(AnyStep, frozen=True, kw_only=True, tag="maintain"):
    """The platform maintains a host: one event per scope and update domain."""

    host: HostOrAny
    type: Literal["Freeze", "Reboot", "Redeploy"]
    cause: Literal["maintenance", "infrastructure", "live-migration"] = "maintenance"
    duration_seconds: Seconds | None = None
    description: Text | None = None
    notice: Duration | None = None
    as_: Name | None = None

    async def run(self, stage: Stage) -> None:
        await self.operate(
            stage,
            stage.pick_host(self.host),
            type=EventType(self.type),
            cause=Cause(self.cause),
            duration_seconds=self.duration_seconds,
            description=self.description,
            not_before=stage.get_not_before(self.notice),
        )


class DegradeStep(AnyStep, frozen=True, kw_only=True, tag="degrade"):
    """A host's hardware will fail: seven days' notice."""

    host: HostOrAny
    notice: Duration | None = None
    as_: Name | None = None

    async def run(self, stage: Stage) -> None:
        host, not_before = stage.pick_host(self.host), stage.get_not_before(self.notice)
        await self.operate(stage, host, not_before=not_before)


class FailStep(AnyStep, frozen=True, kw_only=True, tag="fail"):
    """A host's hardware has failed: the event starts without notice."""

    host: HostOrAny
    as_: Name | None = None

    async def run(self, stage: Stage) -> None:
        await self.operate(stage, stage.pick_host(self.host))


class EventStep(AnyStep, frozen=True, kw_only=True):
    """Does what its verb says to each live event of a name."""

    event: EventName

    async def run(self, stage: Stage) -> None:
        for event_id in stage.find_events(self.event):
            await self.change(event_id, stage)

    async def change(self, event_id: str, stage: Stage) -> None:
        """Do it to one event."""
        await self.operate(stage, event_id)


class ApproveStep(EventStep, frozen=True, kw_only=True, tag="approve"):
    """An operator approves the events of a name, or does so on behalf of `vm`."""

    vm: VmName | None = None

    async def change(self, event_id: str, stage: Stage) -> None:
        await self.operate(stage, event_id, vm=self.vm or "")


class CancelStep(EventStep, frozen=True, kw_only=True, tag="cancel"):
    """A Scheduled event is cancelled."""


class CompleteStep(EventStep, frozen=True, kw_only=True, tag="complete"):
    """A Started event ends early."""


class ExtendStep(EventStep, frozen=True, kw_only=True, tag="extend"):
    """NotBefore is postponed."""

    by: Duration

    async def change(self, event_id: str, stage: Stage) -> None:
        not_before = stage.lab.operations.find_event(event_id).event.not_before
        await self.operate(stage, event_id, not_before=not_before + stage.lab.scale(self.by))


class ApplyStep(AnyStep, frozen=True, kw_only=True, tag="apply"):
    """Another fleet is applied."""

    fleet: FleetFile

    async def run(self, stage: Stage) -> None:
        await stage.lab.operations.apply(fleet_parser.build(self.fleet), by=BY)


class FaultStep(AnyStep, frozen=True, kw_only=True, tag="fault"):
    """A fault begins. `as` names it for `clear`."""

    set: Fault
    as_: Name | None = None

    async def run(self, stage: Stage) -> None:
        added = await stage.lab.add_fault(self.set, rate=stage.lab.rate)
        if self.as_ is not None:
            stage.fault_ids[self.as_] = added.id


class ClearStep(AnyStep, frozen=True, kw_only=True, tag="clear"):
    """The named fault ends; without a name, all faults end."""

    fault: FaultName | None = None

    async def run(self, stage: Stage) -> None:
        name, faults = self.fault, stage.lab.faults.by_id
        if name is not None and name not in stage.fault_ids:
            raise NotFound(f"the fault {name} has not been set yet", fault=name)
        for fault_id in list(faults) if name is None else [stage.fault_ids[name]]:
            if fault_id in faults:
                stage.lab.remove_fault(fault_id)


class BreakStep(AnyStep, frozen=True, kw_only=True, tag="break"):
    """Impacts on this VM fail."""

    vm: VmName

    async def run(self, stage: Stage) -> None:
        stage.lab.platform.failing.add(self.vm)


class MendStep(AnyStep, frozen=True, kw_only=True, tag="mend"):
    """Impacts on this VM work again."""

    vm: VmName

    async def run(self, stage: Stage) -> None:
        stage.lab.platform.failing.discard(self.vm)


class JumpStep(AnyStep, frozen=True, kw_only=True, tag="jump"):
    """The clock jumps ahead, as on a machine that was suspended. Only on a virtual clock."""

    by: Duration

    async def run(self, stage: Stage) -> None:
        await stage.lab.change_clock(time=stage.lab.clock.now() + stage.lab.scale(self.by))


class WriteLogStep(AnyStep, frozen=True, kw_only=True, tag="log"):
    """A line in the transcript."""

    text: Text

    def describe(self) -> str:
        return self.text

    async def run(self, stage: Stage) -> None:
        """The transcript has an entry for every step, so there is nothing left to do."""


ScenarioStep = (
    RestartStep
    | RedeployStep
    | EvictStep
    | DeleteStep
    | MaintainStep
    | DegradeStep
    | FailStep
    | ApproveStep
    | CancelStep
    | CompleteStep
    | ExtendStep
    | ApplyStep
    | FaultStep
    | ClearStep
    | BreakStep
    | MendStep
    | JumpStep
    | WriteLogStep
)
