"""A scope while a command is decided: the few steps that every rule is made of.

Each step changes the draft and records the change. The original scope is never modified.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

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
    NoEvent,
    Status,
    is_move,
)
from forewarn.core.fleet import Policy, Power, Scope, ScopeKind, TriedMove, Vm
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


class Draft:
    """The scope as it will be, and the changes so far.

    `vms` are by name, `events` by id, `impacts` by id and VM, `tried` by VM, each in the order of
    creation. So a step costs the same however large the scope is. `build` makes a scope of them;
    until then, `scope` is up to date in all other fields.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.vms = {vm.name: vm for vm in scope.vms}
        self.events = {event.id: event for event in scope.events}
        self.impacts: dict[tuple[str, str], Impact] = {}
        self._impact_ids: dict[str, dict[str, None]] = {}  # by VM, with some that are gone
        for impact in scope.impacts:
            self.put_impact(impact)
        self.tried = {each.vm: each for each in scope.tried_moves}
        self._is_built = True

    def begin(self, now: datetime, timing: Timing) -> None:
        """Begin a command: what was decided before it is the scope that it finds."""
        self.before, self.now, self.timing = self.build(), now, timing
        self.due_until: datetime | None = None  # a Tick sets both
        self.may_be_due: Callable[[str], bool] = lambda event_id: True
        self.changes: list[Change] = []
        self.no_event: NoEvent | None = None
        self.is_gone = False

    def build(self) -> Scope:
        """The scope as it is by now."""
        if not self._is_built:
            self._is_built = True
            self.scope = replace(
                self.scope,
                vms=tuple(self.vms.values()),
                events=tuple(self.events.values()),
                impacts=tuple(self.impacts.values()),
                tried_moves=tuple(self.tried.values()),
            )
        return self.scope

    # --- reading

    def impacts_of(self, vm: str) -> list[Impact]:
        """All impacts of a VM, in the order in which they were created."""
        found = (self.impacts.get((event_id, vm)) for event_id in self._impact_ids.get(vm, ()))
        return [impact for impact in found if impact is not None]

    def known_ids(self) -> set[str]:
        """The ids of all current and recent events and silent operations."""
        ids = {*self.events, *(ended.id for ended in self.scope.ended)}
        return ids.union([event_id for event_id, _ in self.impacts])

    # --- writing

    def set_members(self, kind: ScopeKind, policy: Policy, vms: Sequence[Vm]) -> None:
        self.scope = replace(self.scope, kind=kind, policy=policy)
        self.vms = {vm.name: vm for vm in vms}
        self._is_built = False

    def put_vm(self, vm: Vm) -> None:
        self.vms[vm.name] = vm
        self._is_built = False

    def put_event(self, event: Event) -> None:
        self.events[event.id] = event
        self._is_built = False

    def put_impact(self, impact: Impact) -> None:
        self.impacts[impact.event_id, impact.vm] = impact
        self._impact_ids.setdefault(impact.vm, {})[impact.event_id] = None
        self._is_built = False

    def record(
        self, what: ChangeKind, event: Event | Impact, *, vm: str = "", detail: str = ""
    ) -> None:
        """Record a change of an event, or of the impact of a silent operation.

        It has all that the history needs to know. The host is where the VM was before this command.
        """
        if isinstance(event, Event):
            event_id, resources, host = event.id, event.resources, event.host
            whole = None if vm else event
        else:
            event_id, resources, host, whole = event.event_id, (event.vm,), "", None
        is_new = what in (ChangeKind.SCHEDULED, ChangeKind.EXTENDED)
        if vm and what is not ChangeKind.APPROVED:
            resources = (vm,)
        self.changes.append(
            Change(
                what=what,
                event=event_id,
                vm=vm,
                detail=detail,
                type=event.type,
                cause=event.cause,
                resources=resources,
                host=host or self._host_of(resources[0]),
                not_before=whole.not_before if whole and is_new else None,
                description=whole.description if whole else "",
                duration_seconds=whole.duration_seconds if whole else None,
            )
        )

    def _host_of(self, name: str) -> str:
        vm = self.before.vm(name) or self.vms.get(name)
        return "" if vm is None else vm.host

    def approve(
        self, events: Sequence[Event], by: str, *, vm: str = "", is_sufficient: bool = True
    ) -> None:
        """Record an approval.

        `vm` goes into the history, because `by` alone does not say whether `operator` is a VM.
        """
        for event in events:
            if by in event.approvals and (event.is_approved or not is_sufficient):
                continue
            approvals = event.approvals if by in event.approvals else (*event.approvals, by)
            is_approved = event.is_approved or is_sufficient
            self.record(ChangeKind.APPROVED, event, vm=vm, detail=by)
            self.put_event(replace(event, approvals=approvals, is_approved=is_approved))

    def start(self, event: Event, reason: str) -> None:
        self.put_event(replace(event, status=Status.STARTED, started_at=self.now))
        self.record(ChangeKind.STARTED, event, detail=reason)
        for vm in event.resources:
            self._add_impact(event.id, vm, event.type, event.cause)

    def start_silently(self, operation_id: str, vm: str, type_: EventType, cause: Cause) -> None:
        impact = self._add_impact(operation_id, vm, type_, cause)
        self.record(ChangeKind.EXECUTED_SILENTLY, impact, vm=vm, detail=str(type_))

    def _add_impact(self, event_id: str, vm: str, type_: EventType, cause: Cause) -> Impact:
        impact = Impact(event_id=event_id, vm=vm, type=type_, cause=cause, due_at=self.now)
        self.put_impact(impact)
        return impact

    def finish(self, impact: Impact, host: str = "", detail: str = "") -> None:
        """The impact is done: apply its effect on the VM, and end the event if it was the last."""
        self._drop(impact)
        self.put_impact(replace(impact, state=ImpactState.DONE, claimed_by="", detail=""))
        event = self.events.get(impact.event_id, impact)
        self.record(ChangeKind.IMPACTED, event, vm=impact.vm, detail=detail)
        if impact.state is not ImpactState.BOOTING:  # applied when it was restarted
            self._apply(impact, host)
        self.end_if_over(impact.event_id)

    def boot(self, impact: Impact, host: str, detail: str) -> None:
        """The impact restarted the VM: apply its effect, and wait until the VM is back."""
        due_at = self.now + self.timing.back_limit
        booting = ImpactState.BOOTING
        self.put_impact(replace(impact, state=booting, claimed_by="", due_at=due_at, detail=""))
        event = self.events.get(impact.event_id, impact)
        self.record(ChangeKind.RESTARTED, event, vm=impact.vm, detail=detail)
        self._apply(impact, host)

    def fail(self, impact: Impact, problem: str) -> None:
        self._drop(impact)
        self.put_impact(replace(impact, state=ImpactState.FAILED, claimed_by="", detail=problem))
        self.end_if_over(impact.event_id)

    def _drop(self, impact: Impact) -> None:
        """Remember an impact that ends while a worker holds it, if its platform may act on."""
        if impact.state is ImpactState.CLAIMED:
            self.note_try(impact)
        if impact.is_held and impact.stop_seconds:
            dropped = (*self.scope.dropped, impact)
            self.scope, self._is_built = replace(self.scope, dropped=dropped), False

    def forget_dropped(
        self, worker: str, event_id: str = "", vm: str = "", tries: int | None = None
    ) -> None:
        """The platform of the worker no longer acts for this impact, or this try of it; without an
        impact, for any.
        """
        kept, gone = list[Impact](), list[Impact]()
        for each in self.scope.dropped:
            is_meant = each.claimed_by == worker and tries in (None, each.tries)
            is_gone = is_meant and (not vm or (each.event_id, each.vm) == (event_id, vm))
            (gone if is_gone else kept).append(each)
        if not gone:
            return
        for each in gone:
            self.note_try(each)
        self.scope, self._is_built = replace(self.scope, dropped=tuple(kept)), False

    def note_try(self, impact: Impact) -> None:
        """A try has ended. If it was to move the VM, that may be on another host."""
        if is_move(impact.type, impact.cause) and impact.vm in self.vms:
            self.forget_tries(impact.vm)  # so that the last try is the last one
            self.tried[impact.vm] = TriedMove(impact.vm, self.now)
            self._is_built = False

    def forget_tries(self, vm: str) -> None:
        """It is known where the VM is."""
        if self.tried.pop(vm, None) is not None:
            self._is_built = False

    def end_if_over(self, event_id: str) -> None:
        for impact in reversed(self.impacts.values()):  # the last claimed is usually the last
            if impact.event_id == event_id and not impact.is_over:
                return
        impacts = [impact for impact in self.impacts.values() if impact.event_id == event_id]
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
        # The event as it was before this command names all VMs that this command ends it for.
        event = self.before.event(event_id) or self.events.get(event_id)
        impacts = [impact for impact in self.impacts.values() if impact.event_id == event_id]
        self.events.pop(event_id, None)
        for impact in impacts:
            self._drop(self.impacts.pop((event_id, impact.vm)))
        ended = self._remember(Ended(id=event_id, how=how, at=self.now))
        self.scope, self._is_built = replace(self.scope, ended=ended), False
        self.record(ChangeKind(how.value), event or impacts[0], detail=reason)

    def _remember(self, new: Ended) -> tuple[Ended, ...]:
        ended = (*self.scope.ended, new)
        old, latest = ended[:-ENDED_MIN], ended[-ENDED_MIN:]
        recent = tuple(event for event in old if event.at > self.now - ENDED_FOR)
        return recent[ENDED_MIN - ENDED_MAX :] + latest

    def leave(self, vm: Vm) -> None:
        """The VM is no longer in this scope."""
        del self.vms[vm.name]
        self._is_built = False
        self.forget_tries(vm.name)
        self.changes.append(Change(what=ChangeKind.LEFT, vm=vm.name, host=vm.host))
        reason = f"{vm.name} has left"
        self.release_vm(vm.name, reason, lambda event: True)
        self.cancel_silent(vm.name, reason)

    def move(self, vm: Vm, host: str) -> None:
        """The VM is on another host: the events Scheduled for the old host no longer apply."""
        detail = f"{vm.host or 'no host'} to {host}"
        self.changes.append(
            Change(ChangeKind.MOVED, vm=vm.name, detail=detail, host=host, host_before=vm.host)
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
        for event in list(self.events.values()):
            if not applies(event) or vm not in event.resources:
                continue
            is_scheduled = event.status is Status.SCHEDULED
            rest = tuple(name for name in event.resources if name != vm)
            if not rest:
                how = EndReason.CANCELED if is_scheduled else EndReason.COMPLETED
                self.end(event.id, how, reason)
                continue
            self.put_event(replace(event, resources=rest))
            if (event.id, vm) in self.impacts:
                self._drop(self.impacts.pop((event.id, vm)))
            if not is_scheduled:
                self.end_if_over(event.id)

    def cancel_silent(self, vm: str, reason: str, *, but: EventType | None = None) -> None:
        """Cancel the silent operations of a VM."""
        for impact in self.impacts_of(vm):
            if impact.type is not but and impact.event_id not in self.events:
                how = EndReason.COMPLETED if impact.is_over else EndReason.CANCELED
                self.end(impact.event_id, how, reason)

    def _apply(self, impact: Impact, host: str) -> None:
        vm = self.vms.get(impact.vm)
        if vm is None:
            return
        if impact.type is EventType.TERMINATE:
            self.leave(vm)
            return
        after = replace(vm, host=host or vm.host, power=POWER_AFTER.get(impact.cause, vm.power))
        self.put_vm(after)
        if after.host != vm.host:
            self.move(vm, after.host)
        if after.power is Power.DEALLOCATED is not vm.power:
            self.deallocate(vm)
