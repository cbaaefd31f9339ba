"""A scope while it is being decided on: the few moves that every rule is made of.

The scope it began with is never touched.
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
"""What ended is remembered for an hour, at most a thousand and at least the last hundred: guests'
words may come late.
"""

WHY_LENGTH_MAX = 4000
ENDED_AS = {
    EndReason.COMPLETED: ChangeKind.COMPLETED,
    EndReason.CANCELED: ChangeKind.CANCELED,
    EndReason.FAILED: ChangeKind.FAILED,
}

T = TypeVar("T")


class Places:
    """Where VMs and impacts are in their tuples, so that commands that are decided in a row need
    not search them each time.

    Only a hint: it is checked against the tuple at every use, and made again where the tuple has
    changed.
    """

    def __init__(self) -> None:
        self._vms: tuple[Vm, ...] = ()
        self._vm_at: dict[str, int] = {}
        self._impacts: tuple[Impact, ...] = ()
        self._impacts_at: dict[str, list[int]] = {}

    def of_vm(self, vms: tuple[Vm, ...], name: str) -> int | None:
        at = self._vm_at.get(name)
        if at is not None and at < len(vms) and vms[at].name == name:
            return at
        if vms is not self._vms:
            self._vms, self._vm_at = vms, {vm.name: place for place, vm in enumerate(vms)}
            return self._vm_at.get(name)
        return None

    def of_impacts(self, impacts: tuple[Impact, ...], vm: str) -> Sequence[int]:
        """Those of one VM, in order."""
        if impacts is not self._impacts:
            self._impacts, self._impacts_at = impacts, {}
            for place, impact in enumerate(impacts):
                self._impacts_at.setdefault(impact.vm, []).append(place)
        return self._impacts_at.get(vm, ())

    def keep_impacts(self, before: tuple[Impact, ...], after: tuple[Impact, ...]) -> None:
        """One impact was replaced: all are where they were."""
        if before is self._impacts:
            self._impacts = after


class Draft:
    """The scope as it will be, and what became true on the way."""

    def __init__(self, scope: Scope, now: datetime, timing: Timing, places: Places) -> None:
        self.scope = scope
        self.places = places
        self.now = now
        self.timing = timing
        self.changes: list[Change] = []
        self.is_gone = False

    def tell(self, what: ChangeKind, *, event_id: str = "", vm: str = "", detail: str = "") -> None:
        self.changes.append(Change(what=what, event_id=event_id, vm=vm, detail=detail))

    def knows(self, event_id: str) -> bool:
        """Whether this event or silent operation exists or did so recently: asked twice is asked
        once.
        """
        return event_id in self.known_ids()

    def known_ids(self) -> set[str]:
        """The ids of all events and silent operations that exist or did so recently."""
        scope = self.scope
        ids = {event.id for event in scope.events}
        ids.update([impact.event_id for impact in scope.impacts])
        ids.update([ended.id for ended in scope.ended])
        return ids

    def vm(self, name: str) -> Vm | None:
        place = self.places.of_vm(self.scope.vms, name)
        return None if place is None else self.scope.vms[place]

    def impacts_of(self, vm: str) -> list[Impact]:
        """All impacts of a VM, in the order in which they were started."""
        return [
            self.scope.impacts[place] for place in self.places.of_impacts(self.scope.impacts, vm)
        ]

    def impact(self, event_id: str, vm: str) -> Impact | None:
        return next((impact for impact in self.impacts_of(vm) if impact.event_id == event_id), None)

    def put_vm(self, vm: Vm) -> None:
        place = self.places.of_vm(self.scope.vms, vm.name)
        if place is not None:
            self.scope = replace(self.scope, vms=with_item(self.scope.vms, place, vm))

    def put_event(self, event: Event) -> None:
        self.put_events([event])

    def put_events(self, events: Sequence[Event]) -> None:
        if events:
            changed = {event.id: event for event in events}
            self.scope = replace(
                self.scope, events=tuple([changed.get(old.id, old) for old in self.scope.events])
            )

    def put_impact(self, impact: Impact) -> None:
        before = self.scope.impacts
        for place in self.places.of_impacts(before, impact.vm):
            if before[place].event_id == impact.event_id:
                self.scope = replace(self.scope, impacts=with_item(before, place, impact))
                self.places.keep_impacts(before, self.scope.impacts)
                return

    def schedule(self, event: Event) -> None:
        self.scope = replace(self.scope, events=(*self.scope.events, event))
        self.tell(
            ChangeKind.SCHEDULED,
            event_id=event.id,
            detail=f"{event.type} of {', '.join(event.resources)}",
        )

    def start(self, event: Event, why: str) -> None:
        self.put_event(replace(event, status=Status.STARTED, started_at=self.now))
        self.tell(ChangeKind.STARTED, event_id=event.id, detail=why)
        self.add_impacts(
            *(
                Impact(
                    event_id=event.id, vm=vm, type=event.type, cause=event.cause, due_at=self.now
                )
                for vm in event.resources
            )
        )

    def add_impacts(self, *impacts: Impact) -> None:
        self.scope = replace(self.scope, impacts=self.scope.impacts + impacts)

    def finish(self, impact: Impact, host: str = "", detail: str = "") -> None:
        """The impact is done: record it and what it did to the VM, and end the event if it was the
        last one.
        """
        self.put_impact(replace(impact, state=ImpactState.DONE, claimed_by="", detail=""))
        self.tell(ChangeKind.IMPACTED, event_id=impact.event_id, vm=impact.vm, detail=detail)
        vm = self.vm(impact.vm)
        if vm is not None:
            self._take_effect(impact, vm, host)
        self.end_if_over(impact.event_id)

    def fail(self, impact: Impact, problem: str) -> None:
        self.put_impact(replace(impact, state=ImpactState.FAILED, claimed_by="", detail=problem))
        self.end_if_over(impact.event_id)

    def end_if_over(self, event_id: str) -> None:
        for impact in reversed(
            self.scope.impacts
        ):  # the last to be claimed is mostly the last to end
            if impact.event_id == event_id and not impact.is_over:
                return
        mine = [impact for impact in self.scope.impacts if impact.event_id == event_id]
        if mine:
            failed = [
                f"{impact.vm}: {impact.detail}"
                for impact in mine
                if impact.state is ImpactState.FAILED
            ]
            self.end(
                event_id,
                EndReason.FAILED if failed else EndReason.COMPLETED,
                "; ".join(failed)[:WHY_LENGTH_MAX],
            )

    def end(self, event_id: str, how: EndReason, why: str = "") -> None:
        """Take the event, or the silent operation, out; remember for a while how it ended."""
        scope = self.scope
        self.scope = replace(
            scope,
            events=tuple(event for event in scope.events if event.id != event_id),
            impacts=tuple(impact for impact in scope.impacts if impact.event_id != event_id),
            ended=self._remembered((*scope.ended, Ended(id=event_id, how=how, at=self.now))),
        )
        self.tell(ENDED_AS[how], event_id=event_id, detail=why)

    def _remembered(self, ended: tuple[Ended, ...]) -> tuple[Ended, ...]:
        old = max(len(ended) - ENDED_MIN, 0)
        return (
            tuple(one for one in ended[:old] if one.at > self.now - ENDED_FOR)[
                ENDED_MIN - ENDED_MAX :
            ]
            + ended[old:]
        )

    def leave(self, vm: Vm) -> None:
        """The VM is no longer of this scope: nothing here is about it any more."""
        self.scope = replace(
            self.scope, vms=tuple(old for old in self.scope.vms if old.name != vm.name)
        )
        self.tell(ChangeKind.LEFT, vm=vm.name)
        why = f"{vm.name} has left"
        self.excuse(vm.name, why, lambda event: True)
        self.drop_silent(vm.name, why)

    def excuse(self, vm: str, why: str, applies: Callable[[Event], bool]) -> None:
        """Take the VM out of the events that no longer concern it; an event that concerns nobody
        ends.
        """
        for event in self.scope.events:
            if not applies(event) or vm not in event.resources:
                continue
            rest = tuple(name for name in event.resources if name != vm)
            if not rest:
                self.end(
                    event.id,
                    EndReason.CANCELED if event.status is Status.SCHEDULED else EndReason.COMPLETED,
                    why,
                )
                continue
            self.put_event(replace(event, resources=rest))
            self._drop_impact(event.id, vm)
            if event.status is Status.STARTED:
                self.end_if_over(event.id)

    def drop_silent(self, vm: str, why: str, *, but: EventType | None = None) -> None:
        """What was to be done to the VM without an event is not done any more."""
        for impact in self.scope.impacts:
            if (
                impact.vm == vm
                and impact.type is not but
                and self.scope.event(impact.event_id) is None
            ):
                self.end(
                    impact.event_id,
                    EndReason.COMPLETED if impact.is_over else EndReason.CANCELED,
                    why,
                )

    def move(self, vm: Vm, host: str) -> None:
        """The VM is on another host: what awaits the old host no longer awaits the VM."""
        self.tell(ChangeKind.MOVED, vm=vm.name, detail=f"{vm.host or 'nowhere'} to {host}")
        why = f"{vm.name} has moved to {host}"
        self.excuse(
            vm.name,
            why,
            lambda event: event.host == vm.host != "" and event.status is Status.SCHEDULED,
        )

    def deallocate(self, vm: Vm) -> None:
        """The VM has given up its place: only its deletion can still befall it.

        What is under way for it is over.
        """
        why = f"{vm.name} has given up its place"
        self.excuse(
            vm.name, why, lambda event: event.type not in (EventType.TERMINATE, EventType.PREEMPT)
        )
        self.drop_silent(vm.name, why, but=EventType.TERMINATE)

    def _take_effect(self, impact: Impact, vm: Vm, host: str) -> None:
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

    def _drop_impact(self, event_id: str, vm: str) -> None:
        kept = tuple(
            impact
            for impact in self.scope.impacts
            if (impact.event_id, impact.vm) != (event_id, vm)
        )
        self.scope = replace(self.scope, impacts=kept)


POWER_AFTER = {
    Cause.RESTART: Power.RUNNING,
    Cause.REDEPLOY: Power.RUNNING,
    Cause.EVICTION: Power.DEALLOCATED,
}
"""A user's restart starts a VM that did not run; maintenance leaves it as it was."""


def with_item(items: tuple[T, ...], place: int, item: T) -> tuple[T, ...]:
    """The items with another one in this place.

    Slices are copied at once, where a comprehension would look at each.
    """
    return (*items[:place], item, *items[place + 1 :])
