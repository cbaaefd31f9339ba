"""A scope while a command is decided: the few steps that every rule is made of.

Each step changes the draft and records the change. The original scope is never modified.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import (
    Cause,
    Ended,
    EndReason,
    Event,
    EventType,
    Impact,
    ImpactState,
    Status,
)
from forewarn.core.fleet import Power, Scope, Vm
from forewarn.core.timing import Timing

ENDED_MIN, ENDED_MAX = 100, 1000
ENDED_FOR = timedelta(hours=1)
"""Ended events are remembered for an hour, at least the last 100 and at most 1,000."""

DETAIL_LENGTH_MAX = 4000

POWER_AFTER = {
    Cause.RESTART: Power.RUNNING,
    Cause.REDEPLOY: Power.RUNNING,
    Cause.EVICTION: Power.DEALLOCATED,
}
"""A user's restart starts a stopped VM; maintenance leaves it as it was."""

T = TypeVar("T")


class Draft:
    """The scope as it will be, and the changes so far."""

    def __init__(self, scope: Scope, now: datetime, timing: Timing, positions: "Positions") -> None:
        self.before = scope
        self.scope = scope
        self.positions = positions
        self.now = now
        self.timing = timing
        self.changes: list[Change] = []
        self.is_gone = False

    def record(
        self,
        what: ChangeKind,
        *,
        event: Event | Impact | None = None,
        vm: str = "",
        detail: str = "",
        host: str = "",
        host_before: str = "",
    ) -> None:
        """Record a change with all that the history needs to know about it.

        `event` is the event, or the impact of a silent operation. The host is the one where the VM
        was before this command.
        """
        if event is None:
            self.changes.append(
                Change(what=what, vm=vm, detail=detail, host=host, host_before=host_before)
            )
            return
        if isinstance(event, Event):
            event_id, host, resources = event.id, event.host, event.resources
            if vm and what is not ChangeKind.APPROVED:
                resources = (vm,)
        else:
            event_id, resources = event.event_id, (event.vm,)
        not_before, description = None, ""
        if isinstance(event, Event) and what in (ChangeKind.SCHEDULED, ChangeKind.EXTENDED):
            not_before, description = event.not_before, event.description
        self.changes.append(
            Change(
                what=what,
                event_id=event_id,
                vm=vm,
                detail=detail,
                type=event.type,
                cause=event.cause,
                resources=resources,
                host=host or self._host_of(resources[0]),
                not_before=not_before,
                description=description,
            )
        )

    def _host_of(self, name: str) -> str:
        for vms in (self.before.vms, self.scope.vms):
            position = self.positions.of_vm(vms, name)
            if position is not None:
                return vms[position].host
        return ""

    # --- reading

    def known_ids(self) -> set[str]:
        """The ids of all current and recent events and silent operations."""
        scope = self.scope
        ids = {event.id for event in scope.events}
        ids.update([impact.event_id for impact in scope.impacts])
        ids.update([ended.id for ended in scope.ended])
        return ids

    def vm(self, name: str) -> Vm | None:
        position = self.positions.of_vm(self.scope.vms, name)
        return None if position is None else self.scope.vms[position]

    def impacts_of(self, vm: str) -> list[Impact]:
        """All impacts of a VM, in the order in which they were created."""
        impacts = self.scope.impacts
        return [impacts[position] for position in self.positions.of_impacts(impacts, vm)]

    def impact(self, event_id: str, vm: str) -> Impact | None:
        return next((impact for impact in self.impacts_of(vm) if impact.event_id == event_id), None)

    # --- writing

    def put_vm(self, vm: Vm) -> None:
        position = self.positions.of_vm(self.scope.vms, vm.name)
        if position is not None:
            self.scope = replace(self.scope, vms=with_item(self.scope.vms, position, vm))

    def put_events(self, *events: Event) -> None:
        if events:
            changed = {event.id: event for event in events}
            self.scope = replace(
                self.scope, events=tuple([changed.get(old.id, old) for old in self.scope.events])
            )

    def put_impact(self, impact: Impact) -> None:
        before = self.scope.impacts
        for position in self.positions.of_impacts(before, impact.vm):
            if before[position].event_id == impact.event_id:
                self.scope = replace(self.scope, impacts=with_item(before, position, impact))
                self.positions.keep_impacts(before, self.scope.impacts)
                return

    def schedule(self, event: Event) -> None:
        self.scope = replace(self.scope, events=(*self.scope.events, event))
        detail = f"{event.type} of {', '.join(event.resources)}"
        self.record(ChangeKind.SCHEDULED, event=event, detail=detail)

    def approve(
        self, events: Sequence[Event], by: str, *, vm: str = "", is_sufficient: bool = True
    ) -> None:
        """Record an approval.

        `vm` goes into the history, because `by` alone does not say whether `operator` is a VM.
        """
        approved = []
        for event in events:
            if by in event.approvals and (event.is_approved or not is_sufficient):
                continue
            approvals = event.approvals if by in event.approvals else (*event.approvals, by)
            is_approved = event.is_approved or is_sufficient
            approved.append(replace(event, approvals=approvals, is_approved=is_approved))
            self.record(ChangeKind.APPROVED, event=event, vm=vm, detail=by)
        self.put_events(*approved)

    def start(self, event: Event, reason: str) -> None:
        self.put_events(replace(event, status=Status.STARTED, started_at=self.now))
        self.record(ChangeKind.STARTED, event=event, detail=reason)
        impacts = (self.new_impact(event.id, vm, event.type, event.cause) for vm in event.resources)
        self.scope = replace(self.scope, impacts=(*self.scope.impacts, *impacts))

    def start_silently(self, operation_id: str, vm: str, type_: EventType, cause: Cause) -> None:
        impact = self.new_impact(operation_id, vm, type_, cause)
        self.scope = replace(self.scope, impacts=(*self.scope.impacts, impact))
        self.record(ChangeKind.EXECUTED_SILENTLY, event=impact, vm=vm, detail=str(type_))

    def new_impact(self, event_id: str, vm: str, type_: EventType, cause: Cause) -> Impact:
        return Impact(event_id=event_id, vm=vm, type=type_, cause=cause, due_at=self.now)

    def finish(self, impact: Impact, host: str = "", detail: str = "") -> None:
        """The impact is done: apply its effect on the VM, and end the event if it was the last."""
        self.put_impact(replace(impact, state=ImpactState.DONE, claimed_by="", detail=""))
        event = self.scope.event(impact.event_id) or impact
        self.record(ChangeKind.IMPACTED, event=event, vm=impact.vm, detail=detail)
        vm = self.vm(impact.vm)
        if vm is not None:
            self._apply(impact, vm, host)
        self.end_if_over(impact.event_id)

    def fail(self, impact: Impact, problem: str) -> None:
        self.put_impact(replace(impact, state=ImpactState.FAILED, claimed_by="", detail=problem))
        self.end_if_over(impact.event_id)

    def end_if_over(self, event_id: str) -> None:
        for impact in reversed(self.scope.impacts):  # the last claimed is usually the last to end
            if impact.event_id == event_id and not impact.is_over:
                return
        impacts = [impact for impact in self.scope.impacts if impact.event_id == event_id]
        if not impacts:
            return
        failed = [
            f"{impact.vm}: {impact.detail}"
            for impact in impacts
            if impact.state is ImpactState.FAILED
        ]
        how = EndReason.FAILED if failed else EndReason.COMPLETED
        self.end(event_id, how, "; ".join(failed)[:DETAIL_LENGTH_MAX])

    def end(self, event_id: str, how: EndReason, reason: str = "") -> None:
        """Remove the event or the silent operation, and remember for a while how it ended."""
        scope = self.scope
        # The event as it was before this command names all VMs that this command ends it for.
        event = (
            self.before.event(event_id)
            or scope.event(event_id)
            or next(impact for impact in scope.impacts if impact.event_id == event_id)
        )
        self.scope = replace(
            scope,
            events=tuple(event for event in scope.events if event.id != event_id),
            impacts=tuple(impact for impact in scope.impacts if impact.event_id != event_id),
            ended=self._remember(Ended(id=event_id, how=how, at=self.now)),
        )
        self.record(ChangeKind(how.value), event=event, detail=reason)

    def _remember(self, new: Ended) -> tuple[Ended, ...]:
        ended = (*self.scope.ended, new)
        old, latest = ended[:-ENDED_MIN], ended[-ENDED_MIN:]
        recent = tuple(event for event in old if event.at > self.now - ENDED_FOR)
        return recent[ENDED_MIN - ENDED_MAX :] + latest

    def leave(self, vm: Vm) -> None:
        """The VM is no longer in this scope."""
        self.scope = replace(
            self.scope, vms=tuple(old for old in self.scope.vms if old.name != vm.name)
        )
        self.record(ChangeKind.LEFT, vm=vm.name, host=vm.host)
        reason = f"{vm.name} has left"
        self.release_vm(vm.name, reason, lambda event: True)
        self.cancel_silent(vm.name, reason)

    def move(self, vm: Vm, host: str) -> None:
        """The VM is on another host: the events Scheduled for the old host no longer apply."""
        self.record(
            ChangeKind.MOVED,
            vm=vm.name,
            detail=f"{vm.host or 'no host'} to {host}",
            host=host,
            host_before=vm.host,
        )
        self.release_vm(
            vm.name,
            f"{vm.name} has moved to {host}",
            lambda event: event.host == vm.host != "" and event.status is Status.SCHEDULED,
        )

    def deallocate(self, vm: Vm) -> None:
        """The VM is no longer on a host, so only its deletion still applies."""
        reason = f"{vm.name} was deallocated"
        kept = (EventType.TERMINATE, EventType.PREEMPT)
        self.release_vm(vm.name, reason, lambda event: event.type not in kept)
        self.cancel_silent(vm.name, reason, but=EventType.TERMINATE)

    def release_vm(self, vm: str, reason: str, applies: Callable[[Event], bool]) -> None:
        """Remove the VM from these events. An event without resources ends."""
        for event in self.scope.events:
            if not applies(event) or vm not in event.resources:
                continue
            is_scheduled = event.status is Status.SCHEDULED
            rest = tuple(name for name in event.resources if name != vm)
            if not rest:
                how = EndReason.CANCELED if is_scheduled else EndReason.COMPLETED
                self.end(event.id, how, reason)
                continue
            self.put_events(replace(event, resources=rest))
            impacts = self.scope.impacts
            kept = tuple(i for i in impacts if (i.event_id, i.vm) != (event.id, vm))
            self.scope = replace(self.scope, impacts=kept)
            if not is_scheduled:
                self.end_if_over(event.id)

    def cancel_silent(self, vm: str, reason: str, *, but: EventType | None = None) -> None:
        """Cancel the silent operations of a VM."""
        for impact in self.scope.impacts:
            if impact.vm != vm or impact.type is but or self.scope.event(impact.event_id):
                continue
            how = EndReason.COMPLETED if impact.is_over else EndReason.CANCELED
            self.end(impact.event_id, how, reason)

    def _apply(self, impact: Impact, vm: Vm, host: str) -> None:
        if impact.type is EventType.TERMINATE:
            self.leave(vm)
            return
        after = replace(vm, host=host or vm.host, power=POWER_AFTER.get(impact.cause, vm.power))
        if after != vm:
            self.put_vm(after)
        if after.host != vm.host:
            self.move(vm, after.host)
        if after.power is Power.DEALLOCATED is not vm.power:
            self.deallocate(vm)


class Positions:
    """The positions of VMs and impacts in their tuples, shared by commands decided in a row.

    Only a hint: each use is checked against the tuple, and the index is rebuilt if the tuple has
    changed.
    """

    def __init__(self) -> None:
        self._vms: tuple[Vm, ...] = ()
        self._of_vm: dict[str, int] = {}
        self._impacts: tuple[Impact, ...] = ()
        self._of_impacts: dict[str, list[int]] = {}

    def of_vm(self, vms: tuple[Vm, ...], name: str) -> int | None:
        position = self._of_vm.get(name)
        if position is not None and position < len(vms) and vms[position].name == name:
            return position
        if vms is self._vms:
            return None
        self._vms, self._of_vm = vms, {vm.name: index for index, vm in enumerate(vms)}
        return self._of_vm.get(name)

    def of_impacts(self, impacts: tuple[Impact, ...], vm: str) -> Sequence[int]:
        """The impacts of one VM, in order."""
        if impacts is not self._impacts:
            self._impacts, self._of_impacts = impacts, {}
            for position, impact in enumerate(impacts):
                self._of_impacts.setdefault(impact.vm, []).append(position)
        return self._of_impacts.get(vm, ())

    def keep_impacts(self, before: tuple[Impact, ...], after: tuple[Impact, ...]) -> None:
        """One impact was replaced, so all positions are still right."""
        if before is self._impacts:
            self._impacts = after


def with_item(items: tuple[T, ...], position: int, item: T) -> tuple[T, ...]:
    """The items with one replaced. Slices are faster than a comprehension over all items."""
    return (*items[:position], item, *items[position + 1 :])
