"""Carrying the steps of a scenario out, in an operator's words."""

import random
from collections.abc import Awaitable, Callable
from datetime import datetime

from forewarn import duration
from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Power
from forewarn.engine.operations import Told
from forewarn.errors import NotFound, Refused
from forewarn.lab.scenario import step as do
from forewarn.lab.scenario.schema import Scenario
from forewarn.lab.scenario.timeline import BY, Story
from forewarn.lab.service import LabService


class Actions:
    """Does what steps say. Who is `any` is chosen by `chance`, from those that nothing awaits."""

    def __init__(
        self, scenario: Scenario, lab: LabService, story: Story, chance: random.Random
    ) -> None:
        self._scenario = scenario
        self._lab = lab
        self._story = story
        self._chance = chance
        self._faults: dict[str, str] = {}

    async def run_impact(self, number: int, step: do.Step) -> None:
        """One step. A Problem says why it could not be done."""
        match step:
            case do.OnVm():
                await self._operate(step)
            case do.Maintain() | do.Degrade() | do.Fail():
                await self._befall(step)
            case do.OnEvent():
                for event_id in self._standing(step.event):
                    await self._speak(step, event_id)
            case do.Apply():
                await self._lab.operations.apply(self._scenario.fleets[number], by=BY)
            case do.Clear():
                self._clear(step.fault)
            case do.Break():
                self._lab.platform.failing.add(step.vm)
            case do.Mend():
                self._lab.platform.failing.discard(step.vm)
            case do.Jump():
                await self._lab.jump(self._lab.clock.now() + duration.parse_duration(step.by))

    def name_fault(self, name: str, fault_id: str) -> None:
        self._faults[name] = fault_id

    async def _operate(self, step: do.OnVm) -> None:
        vm = self._chosen(step.vm, self._free_vms, "VM")
        operations = self._lab.operations
        operate: dict[type[do.OnVm], Callable[..., Awaitable[Told | None]]] = {
            do.Restart: operations.restart,
            do.Redeploy: operations.redeploy,
            do.Evict: operations.evict,
            do.Delete: operations.delete,
        }
        await operate[type(step)](vm, by=by(step.as_), not_before=self._not_before(step.notice))

    async def _befall(self, step: do.OnHost) -> None:
        host = self._chosen(step.host, self._free_hosts, "host")
        operations, author = self._lab.operations, by(step.as_)
        match step:
            case do.Maintain():
                await operations.maintain(
                    host,
                    type=EventType(step.type),
                    by=author,
                    cause=Cause(step.cause),
                    duration_seconds=step.duration_seconds,
                    description=step.description,
                    not_before=self._not_before(step.notice),
                )
            case do.Degrade():
                await operations.degrade(host, by=author, not_before=self._not_before(step.notice))
            case do.Fail():
                await operations.fail(host, by=author)

    async def _speak(self, step: do.OnEvent, event_id: str) -> None:
        operations = self._lab.operations
        match step:
            case do.Approve():
                await operations.approve(event_id, by=BY, vm=step.vm or "")
            case do.Cancel():
                await operations.cancel(event_id, by=BY)
            case do.Complete():
                await operations.complete(event_id, by=BY)
            case do.Extend():
                later = (
                    operations.find_event(event_id).event.not_before
                    + duration.parse_duration(step.by) / self._lab.rate
                )
                await operations.extend(event_id, by=BY, not_before=later)

    def _standing(self, name: str) -> list[str]:
        live = self._lab.engine.board.events
        found = [
            known.id
            for known in self._story.events.values()
            if known.name == name and known.id in live
        ]
        if not found:
            raise NotFound(f"no event named {name} stands", event=name)
        return found

    def _clear(self, name: str | None) -> None:
        if name is not None and name not in self._faults:
            raise NotFound(f"the fault {name} has not been set", fault=name)
        standing = self._lab.faults.standing
        for fault_id in list(standing) if name is None else [self._faults[name]]:
            if fault_id in standing:
                self._lab.remove_fault(fault_id)

    def _not_before(self, notice: str | None) -> datetime | None:
        return (
            None
            if notice is None
            else self._lab.clock.now() + duration.parse_duration(notice) / self._lab.rate
        )

    def _chosen(self, name: str, free: Callable[[], list[str]], what: str) -> str:
        if name != do.ANY:
            return name
        names = free()
        if not names:
            raise Refused(f"something awaits every {what}; expected one that nothing awaits")
        return self._chance.choice(names)

    def _free_vms(self) -> list[str]:
        """The running VMs that nothing awaits and nothing is done to, by name."""
        free = []
        for place in self._lab.engine.board.scopes.values():
            scope = place.scope
            busy = {vm for event in scope.events for vm in event.resources} | {
                impact.vm for impact in scope.impacts
            }
            free += [
                vm.name for vm in scope.vms if vm.power is Power.RUNNING and vm.name not in busy
            ]
        return sorted(free)

    def _free_hosts(self) -> list[str]:
        free = set(self._free_vms())
        return sorted(host for host, vms in self._lab.engine.board.hosts.items() if vms <= free)


def by(name: str | None) -> str:
    """How the history calls us; what it says is how events get their names."""
    return BY if name is None else f"{BY}: {name}"
