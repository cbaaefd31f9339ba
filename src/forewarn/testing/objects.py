"""Handles that a test uses: VMs, hosts, events and faults. They keep only names and ids."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from operator import methodcaller
from typing import TypeVar, cast

from forewarn.core.event import Cause, EventType
from forewarn.engine.operations import ScopedEvent
from forewarn.errors import Error, Invalid, Refused
from forewarn.testing import literals
from forewarn.testing.ledger import STATUSES, EventRecord, LabApproval
from forewarn.testing.thread import LabThread

# pytest shows the line of the test that a misuse is in, not what it went through here.
__tracebackhide__ = methodcaller("errisinstance", (AssertionError, Error))
BY = "test"
"""The author of a test's operations in the transcript."""
LIVE_MIGRATION_SECONDS = 5
WAIT_SECONDS = 10.0

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, repr=False)
class LabEvent:
    """An event. Its last state stays readable after its end and after the lab is closed."""

    id: str
    _lab: LabThread = field(compare=False)

    @property
    def _record(self) -> EventRecord:
        return self._lab.ledger.find(self.id)

    @property
    def type(self) -> literals.EventKind:
        """Freeze, Reboot, Redeploy, Preempt or Terminate."""
        return cast("literals.EventKind", str(self._record.event.type))

    @property
    def source(self) -> literals.EventSource:
        """Platform or User."""
        return cast("literals.EventSource", str(self._record.event.source))

    @property
    def status(self) -> literals.EventStatus:
        """Scheduled, Started, then Completed, Canceled or Failed."""
        return self._record.status

    @property
    def is_over(self) -> bool:
        """Whether it has left the document."""
        return self._record.ending != ""

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of its VMs."""
        return self._record.event.resources

    @property
    def not_before(self) -> datetime:
        """The earliest start, unless it is approved."""
        return self._record.event.not_before

    @property
    def description(self) -> str:
        """The description that the VM reads."""
        return self._record.event.description

    @property
    def approvals(self) -> tuple[str, ...]:
        """Who approved it, in order: VMs, `operator` (by `approve()`) or `policy`."""
        return self._record.event.approvals

    @property
    def approved_by(self) -> str | None:
        """The first VM that approved it, or None."""
        return next((approval.vm for approval in self._approvals_by_vms), None)

    @property
    def approved_at(self) -> datetime | None:
        """When that VM approved it, by the lab's clock."""
        return next((approval.at for approval in self._approvals_by_vms), None)

    @property
    def _approvals_by_vms(self) -> list[LabApproval]:
        return [approval for approval in self._lab.ledger.approvals(self.id) if approval.vm]

    def approve(self, vm: str = "") -> None:
        """Approve it as an operator, which is enough to start it, or on behalf of a VM."""
        self._lab.call(self._lab.service.operations.approve, self.id, by=BY, vm=vm)

    def cancel(self) -> None:
        """Cancel it. Only while it is Scheduled."""
        self._lab.call(self._lab.service.operations.cancel, self.id, by=BY)

    def complete(self) -> None:
        """End it now. Only while it is Started; without this it ends after its usual duration."""
        self._lab.call(self._lab.service.operations.complete, self.id, by=BY)

    def extend(
        self,
        by: timedelta | None = None,
        *,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Postpone NotBefore. Only while it is Scheduled."""
        later = self.not_before + make_duration(by, hours=hours, minutes=minutes, seconds=seconds)
        self._lab.call(self._lab.service.operations.extend, self.id, by=BY, not_before=later)

    def wait_for(self, status: literals.EventStatus, seconds: float = WAIT_SECONDS) -> None:
        """Wait in real time until it reaches a status, for software that acts by itself.

        Raises AssertionError if it does not.
        """
        if status not in STATUSES:
            raise Invalid(
                f"unknown status {status!r}; expected one of {', '.join(STATUSES)}", status=status
            )
        record = self._lab.ledger.wait(self.id, status, seconds)
        if not record.has_reached(status):
            reason = "is over" if record.ending else f"did not get there within {seconds:g} s"
            raise AssertionError(f"waited for {status}, but {self!r} {reason}")

    def __repr__(self) -> str:
        approved = f"approved by {', '.join(self.approvals)}" if self.approvals else "not approved"
        vms = ", ".join(self.resources)
        return f"<{self.type} {self.id[:8]} of {vms}: {self.status}, {approved}>"


@dataclass(frozen=True)
class LabHost:
    """A host. Its events concern every VM on it: one per scope and update domain."""

    name: str
    _lab: LabThread = field(repr=False, compare=False)

    def maintain(
        self,
        type: literals.MaintenanceKind = "Freeze",
        *,
        cause: literals.MaintenanceCause = "maintenance",
        duration_seconds: int | None = None,
        description: str | None = None,
        not_before: datetime | None = None,
    ) -> list[LabEvent]:
        """Freeze, Reboot or Redeploy all VMs on it.

        The cause is `maintenance`, `infrastructure` or `live-migration`.
        """
        return self._call(
            self._lab.service.operations.maintain,
            type=choose(EventType, type),
            cause=choose(Cause, cause),
            duration_seconds=duration_seconds,
            description=description,
            not_before=not_before,
        )

    def degrade(self, *, not_before: datetime | None = None) -> list[LabEvent]:
        """Its hardware is expected to fail: Redeploy with seven days of notice."""
        return self._call(self._lab.service.operations.degrade, not_before=not_before)

    def fail(self) -> list[LabEvent]:
        """Its hardware has failed: Reboot, Started without notice."""
        return self._call(self._lab.service.operations.fail)

    def _call(
        self, operation: Callable[..., Awaitable[list[ScopedEvent]]], **options: object
    ) -> list[LabEvent]:
        events = self._lab.call(operation, self.name, by=BY, **options)
        return [LabEvent(each.event.id, self._lab) for each in events]


@dataclass(frozen=True)
class LabVm:
    """A VM. Platform events are events of its host, so other VMs on the host get them too."""

    name: str
    _lab: LabThread = field(repr=False, compare=False)

    @property
    def url(self) -> str:
        """Its own endpoint, `http://127.0.0.1:PORT`. Requests there are requests of this VM."""
        return self._lab.call(self._lab.service.listen_vm, self.name)

    @property
    def host(self) -> LabHost:
        """Its current host. A Redeploy changes it."""
        _, vm = self._lab.service.engine.board.find_vm(self.name)
        if not vm.host:
            raise Refused(
                f"{self.name} has no host, so it has no platform events; give it a `host` in the"
                " fleet",
                vm=self.name,
            )
        return LabHost(vm.host, self._lab)

    @property
    def events(self) -> list[LabEvent]:
        """All events that ever concerned it, the oldest first."""
        events = (LabEvent(event_id, self._lab) for event_id in self._lab.ledger.ids())
        return [event for event in events if self.name in event.resources]

    def freeze(
        self, duration_seconds: int | None = None, *, not_before: datetime | None = None
    ) -> LabEvent:
        """Update its host: the VM is paused for some seconds."""
        freezes = self.host.maintain(duration_seconds=duration_seconds, not_before=not_before)
        return self._find_own(freezes)

    def live_migrate(
        self, duration_seconds: int = LIVE_MIGRATION_SECONDS, *, not_before: datetime | None = None
    ) -> LabEvent:
        """Move it while it runs: it is paused for some seconds."""
        freezes = self.host.maintain(
            cause="live-migration", duration_seconds=duration_seconds, not_before=not_before
        )
        return self._find_own(freezes)

    def reboot(self, *, not_before: datetime | None = None) -> LabEvent:
        """Reboot it for maintenance of its host."""
        return self._find_own(self.host.maintain("Reboot", not_before=not_before))

    def redeploy(self, *, not_before: datetime | None = None) -> LabEvent:
        """Move it to another host for maintenance; its local disks are lost."""
        return self._find_own(self.host.maintain("Redeploy", not_before=not_before))

    def degrade(self, *, not_before: datetime | None = None) -> LabEvent:
        """The hardware of its host is expected to fail."""
        return self._find_own(self.host.degrade(not_before=not_before))

    def fail(self) -> LabEvent:
        """The hardware of its host has failed: it is rebooted on another host without notice."""
        return self._find_own(self.host.fail())

    def preempt(self, *, not_before: datetime | None = None) -> LabEvent:
        """Evict it as a spot VM."""
        event = self._call(self._lab.service.operations.evict, not_before)
        assert event is not None, "an eviction always has an event"
        return event

    def terminate(self, *, not_before: datetime | None = None) -> LabEvent | None:
        """Delete it as a user, or scale its set in.

        None, as for all operations of users, if it runs immediately and without an event.
        """
        return self._call(self._lab.service.operations.delete, not_before)

    def user_restart(self, *, not_before: datetime | None = None) -> LabEvent | None:
        """Restart it as a user."""
        return self._call(self._lab.service.operations.restart, not_before)

    def user_redeploy(self, *, not_before: datetime | None = None) -> LabEvent | None:
        """Move it to another host as a user."""
        return self._call(self._lab.service.operations.redeploy, not_before)

    def _find_own(self, events: list[LabEvent]) -> LabEvent:
        for event in events:
            if self.name in event.resources:
                return event
        raise Refused(f"{self.name} already has this event, or is deallocated", vm=self.name)

    def _call(
        self, operation: Callable[..., Awaitable[ScopedEvent | None]], not_before: datetime | None
    ) -> LabEvent | None:
        created = self._lab.call(operation, self.name, by=BY, not_before=not_before)
        return None if created is None else LabEvent(created.event.id, self._lab)


class LabFault(AbstractContextManager["LabFault"]):
    """A fault that was added. It ends with `remove()`, or at the end of a `with`."""

    def __init__(self, lab: LabThread, fault_id: str) -> None:
        self.id = fault_id
        self._lab = lab

    def remove(self) -> None:
        """Remove it. Does nothing if it is over already."""
        self._lab.call(self._remove)

    async def _remove(self) -> None:
        if self.id in self._lab.service.faults.by_id:
            self._lab.service.remove_fault(self.id)

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        fault = self._lab.service.faults.by_id.get(self.id)
        return f"<fault {self.id}: {fault.fault.kind if fault else 'over'}>"


def make_duration(
    total: timedelta | None, *, hours: float, minutes: float, seconds: float
) -> timedelta:
    """Add up a duration that a test gives as a timedelta, in parts, or both."""
    if not isinstance(total, timedelta | None):
        raise Invalid(f"expected a timedelta, or numbers as in minutes=15; got {total!r}")
    try:
        total = (total or timedelta()) + timedelta(hours=hours, minutes=minutes, seconds=seconds)
    except (TypeError, ValueError, OverflowError):
        got = f"hours={hours!r}, minutes={minutes!r}, seconds={seconds!r}"
        raise Invalid(f"expected numbers, as in minutes=15; got {got}") from None
    if total <= timedelta(0):
        raise Invalid(f"expected a duration above 0 s, got {total.total_seconds():g} s")
    return total


def choose(kind: type[Choice], name: str) -> Choice:
    try:
        return kind(name)
    except ValueError:
        raise Invalid(
            f"unknown {kind.__name__} {name!r}; expected one of {', '.join(kind)}", value=name
        ) from None
