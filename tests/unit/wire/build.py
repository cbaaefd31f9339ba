"""Small values for the tests of this room."""

from datetime import UTC, datetime

from forewarn.core.event import Cause, Event, EventType, Source, Status
from forewarn.core.fleet import Scope, ScopeKind, Vm

NOT_BEFORE = datetime(2021, 7, 22, 4, 50, 17, tzinfo=UTC)
EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"


def reboot(
    *,
    id: str = EVENT_ID,
    type: EventType = EventType.REBOOT,
    status: Status = Status.SCHEDULED,
    not_before: datetime = NOT_BEFORE,
    description: str = "",
    duration_seconds: int = -1,
    resources: tuple[str, ...] = ("flatcar-vm1",),
) -> Event:
    """The event of the capture in protocol 2.1, or one like it."""
    return Event(
        id=id,
        type=type,
        status=status,
        source=Source.USER,
        cause=Cause.RESTART,
        resources=resources,
        update_domain=0,
        not_before=not_before,
        duration_seconds=duration_seconds,
        description=description,
        created_at=NOT_BEFORE,
    )


def holding(*events: Event, kind: ScopeKind = ScopeKind.VM, incarnation: int = 2) -> Scope:
    return Scope(
        name="web", kind=kind, vms=(Vm("flatcar-vm1"),), events=events, incarnation=incarnation
    )
