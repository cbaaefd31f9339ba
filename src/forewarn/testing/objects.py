"""What a test holds of a lab:

VMs, hosts, events and faults. They ask the lab, and keep nothing but names and ids.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from forewarn.core.event import Cause, EventType
from forewarn.engine.operations import ScopedEvent
from forewarn.errors import Invalid, Refused
from forewarn.testing.ledger import STATUSES, Approval
from forewarn.testing.thread import LabThread

BY = "test"
"""Whose doing it was, in the transcript."""
LIVE_MIGRATION_SECONDS = 5
WAIT_SECONDS = 10.0

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, repr=False)
class LabEvent:
    """An event, from its announcement until long after its end: what it was last stays readable,
    also when the lab is closed.
    """

    id: str
    _lab: LabThread = field(compare=False)

    @property
    def type(self) -> str:
        """Freeze, Reboot, Redeploy, Preempt or Terminate."""
        return str(self._lab.ledger.find(self.id).event.type)

    @property
    def source(self) -> str:
        """Platform or User."""
        return str(self._lab.ledger.find(self.id).event.source)

    @property
    def status(self) -> str:
        """Scheduled, Started, then Completed, Canceled or Failed."""
        return self._lab.ledger.find(self.id).status

    @property
    def is_over(self) -> bool:
        """Whether it has left the document."""
        return self._lab.ledger.find(self.id).end != ""

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the VMs that it concerns."""
        return self._lab.ledger.find(self.id).event.resources

    @property
    def not_before(self) -> datetime:
        """When it starts at the earliest, unless it is approved."""
        return self._lab.ledger.find(self.id).event.not_before

    @property
    def description(self) -> str:
        """The words that the VM reads."""
        return self._lab.ledger.find(self.id).event.description

    @property
    def approvals(self) -> tuple[str, ...]:
        """Who approved it, in their order:

        VMs, and perhaps `operator` (by `approve()`) or `policy`.
        """
        return self._lab.ledger.find(self.id).event.approvals

    @property
    def approved_by(self) -> str | None:
        """The first VM that approved it, if one did."""
        first = self._first_of_a_vm()
        return first.vm if first else None

    @property
    def approved_at(self) -> datetime | None:
        """When that VM did so, by the lab's clock."""
        first = self._first_of_a_vm()
        return first.at if first else None

    def _first_of_a_vm(self) -> Approval | None:
        return next(
            (approval for approval in self._lab.ledger.approvals(self.id) if approval.vm), None
        )

    def approve(self, vm: str = "") -> None:
        """Let it start now: an operator's word, which suffices, or that VM's word, which counts as
        the scope's policy says.
        """
        self._lab.call(
            "approve", lambda: self._lab.laboratory.operations.approve(self.id, by=BY, vm=vm)
        )

    def cancel(self) -> None:
        """Take it back. Only while it is Scheduled."""
        self._lab.call("cancel", lambda: self._lab.laboratory.operations.cancel(self.id, by=BY))

    def complete(self) -> None:
        """End it now.

        Only while it is Started; by itself it ends when its time has passed on the lab's clock.
        """
        self._lab.call("complete", lambda: self._lab.laboratory.operations.complete(self.id, by=BY))

    def extend(
        self,
        by: timedelta | None = None,
        *,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Put NotBefore off by so much. Only while it is Scheduled."""
        later = self.not_before + span(by, hours=hours, minutes=minutes, seconds=seconds)
        self._lab.call(
            "extend",
            lambda: self._lab.laboratory.operations.extend(self.id, by=BY, not_before=later),
        )

    def wait_for(self, status: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait, in real time, until it is so or was so;

        AssertionError if it does not come. For software that acts by itself.
        """
        if status not in STATUSES:
            raise Invalid(
                f"there is no status {status!r}; it is one of {', '.join(STATUSES)}", status=status
            )
        course = self._lab.ledger.wait(self.id, status, seconds)
        if not course.has_reached(status):
            why = "is over" if course.end else f"is still so after {seconds:g} s"
            raise AssertionError(f"waited for {status}, but {self!r} {why}")

    def __repr__(self) -> str:
        """As a failed assertion shows it."""
        approved = (
            f"approved by {', '.join(self.approvals)}" if self.approvals else "approved by nobody"
        )
        return (
            f"<{self.type} {self.id[:8]} of {', '.join(self.resources)}: {self.status}, {approved}>"
        )


@dataclass(frozen=True)
class LabHost:
    """A host.

    What befalls it is told to every VM on it: one event for each scope and update domain.
    """

    name: str
    _lab: LabThread = field(repr=False, compare=False)

    def maintain(
        self,
        type: str = EventType.FREEZE,
        *,
        cause: str = Cause.MAINTENANCE,
        duration_seconds: int | None = None,
        description: str | None = None,
        not_before: datetime | None = None,
    ) -> list[LabEvent]:
        """Freeze, Reboot or Redeploy all VMs on it; the cause may also be `infrastructure` or
        `live-migration`.
        """
        operations, type_, why = (
            self._lab.laboratory.operations,
            choice(EventType, type),
            choice(Cause, cause),
        )
        return self._told(
            self._lab.call(
                "maintain",
                lambda: operations.maintain(
                    self.name,
                    type=type_,
                    cause=why,
                    by=BY,
                    duration_seconds=duration_seconds,
                    description=description,
                    not_before=not_before,
                ),
            )
        )

    def degrade(self, *, not_before: datetime | None = None) -> list[LabEvent]:
        """Its hardware is expected to fail: Redeploy, with seven days of notice."""
        operations = self._lab.laboratory.operations
        return self._told(
            self._lab.call(
                "degrade", lambda: operations.degrade(self.name, by=BY, not_before=not_before)
            )
        )

    def fail(self) -> list[LabEvent]:
        """Its hardware has failed: Reboot, Started at once."""
        return self._told(
            self._lab.call("fail", lambda: self._lab.laboratory.operations.fail(self.name, by=BY))
        )

    def _told(self, told: Iterable[ScopedEvent]) -> list[LabEvent]:
        return [LabEvent(one.event.id, self._lab) for one in told]


@dataclass(frozen=True)
class LabVm:
    """A VM.

    What the platform does to it befalls its host: VMs that a fleet file put on the same host are
    told too.
    """

    name: str
    _lab: LabThread = field(repr=False, compare=False)

    @property
    def url(self) -> str:
        """An endpoint of its own, `http://127.0.0.1:PORT`: whoever calls there is this VM."""
        return self._lab.call("url", lambda: self._lab.laboratory.door(self.name))

    @property
    def host(self) -> LabHost:
        """The host that it is on now; a Redeploy moves it."""
        _, vm = self._lab.laboratory.engine.board.find_vm(self.name)
        if not vm.host:
            raise Refused(
                f"{self.name} is on no host, so nothing can befall it; give it a `host` in the fleet",
                vm=self.name,
            )
        return LabHost(vm.host, self._lab)

    @property
    def events(self) -> list[LabEvent]:
        """All events that ever concerned it, the oldest first."""
        found = (LabEvent(event_id, self._lab) for event_id in self._lab.ledger.ids())
        return [event for event in found if self.name in event.resources]

    def freeze(
        self, duration_seconds: int | None = None, *, not_before: datetime | None = None
    ) -> LabEvent:
        """The host is updated under it: paused for some seconds."""
        return self._own(
            self.host.maintain(
                EventType.FREEZE, duration_seconds=duration_seconds, not_before=not_before
            )
        )

    def live_migrate(
        self, duration_seconds: int = LIVE_MIGRATION_SECONDS, *, not_before: datetime | None = None
    ) -> LabEvent:
        """It is moved while it runs: paused for some seconds."""
        cause, host = Cause.LIVE_MIGRATION, self.host
        told = host.maintain(
            EventType.FREEZE, cause=cause, duration_seconds=duration_seconds, not_before=not_before
        )
        return self._own(told)

    def reboot(self, *, not_before: datetime | None = None) -> LabEvent:
        """The host is maintained, and it is rebooted."""
        return self._own(self.host.maintain(EventType.REBOOT, not_before=not_before))

    def redeploy(self, *, not_before: datetime | None = None) -> LabEvent:
        """The host is maintained, and it is moved to another; what was on local disks is lost."""
        return self._own(self.host.maintain(EventType.REDEPLOY, not_before=not_before))

    def degrade(self, *, not_before: datetime | None = None) -> LabEvent:
        """The host's hardware is expected to fail."""
        return self._own(self.host.degrade(not_before=not_before))

    def fail(self) -> LabEvent:
        """The host's hardware has failed: it is rebooted elsewhere, at once."""
        return self._own(self.host.fail())

    def preempt(self, *, not_before: datetime | None = None) -> LabEvent:
        """The platform takes a spot VM's place back."""
        operations = self._lab.laboratory.operations
        told = self._lab.call(
            "preempt", lambda: operations.evict(self.name, by=BY, not_before=not_before)
        )
        assert told is not None, "an eviction is always told"
        return LabEvent(told.event.id, self._lab)

    def terminate(self, *, not_before: datetime | None = None) -> LabEvent | None:
        """A user deletes it, or scales its set in.

        None, as for all that users do, if it is done at once and nobody is told.
        """
        operations = self._lab.laboratory.operations
        return self._asked(
            self._lab.call(
                "terminate", lambda: operations.delete(self.name, by=BY, not_before=not_before)
            )
        )

    def user_restart(self, *, not_before: datetime | None = None) -> LabEvent | None:
        """A user restarts it."""
        operations = self._lab.laboratory.operations
        return self._asked(
            self._lab.call(
                "user_restart", lambda: operations.restart(self.name, by=BY, not_before=not_before)
            )
        )

    def user_redeploy(self, *, not_before: datetime | None = None) -> LabEvent | None:
        """A user moves it to another host."""
        operations = self._lab.laboratory.operations
        return self._asked(
            self._lab.call(
                "user_redeploy",
                lambda: operations.redeploy(self.name, by=BY, not_before=not_before),
            )
        )

    def _own(self, told: list[LabEvent]) -> LabEvent:
        for event in told:
            if self.name in event.resources:
                return event
        raise Refused(f"{self.name} has been told of this already, or is deallocated", vm=self.name)

    def _asked(self, told: ScopedEvent | None) -> LabEvent | None:
        return None if told is None else LabEvent(told.event.id, self._lab)


class LabFault(AbstractContextManager["LabFault"]):
    """A fault that was asked for. Inside `with` it is in force; or until `remove()`."""

    def __init__(self, lab: LabThread, fault_id: str) -> None:
        self.id = fault_id
        self._lab = lab

    def remove(self) -> None:
        """Let the endpoint behave again. One that is over already stays over."""

        async def remove() -> None:
            if self.id in self._lab.laboratory.faults.standing:
                self._lab.laboratory.remove_fault(self.id)
            await self._lab.laboratory.enforce_faults()

        self._lab.call("remove", remove)

    def __exit__(self, *ended: object) -> None:
        """Remove it."""
        self.remove()


def span(whole: timedelta | None, *, hours: float, minutes: float, seconds: float) -> timedelta:
    """A time as a test says it: as a timedelta, or in parts, or both."""
    if not isinstance(whole, timedelta | None):
        raise Invalid(f"a time is given as a timedelta or by name, as in minutes=15; got {whole!r}")
    try:
        asked = (whole or timedelta()) + timedelta(hours=hours, minutes=minutes, seconds=seconds)
    except (TypeError, ValueError, OverflowError):
        got = f"hours={hours!r}, minutes={minutes!r}, seconds={seconds!r}"
        raise Invalid(f"a time is given in numbers, as in minutes=15; got {got}") from None
    if asked <= timedelta(0):
        raise Invalid(
            f"time goes forward only: asked for {asked.total_seconds():g} s, expected more than nothing, as in minutes=15"
        )
    return asked


def choice(kind: type[Choice], name: str) -> Choice:
    try:
        return kind(name)
    except ValueError:
        raise Invalid(
            f"there is no {kind.__name__} {name!r}; it is one of {', '.join(kind)}", value=name
        ) from None
