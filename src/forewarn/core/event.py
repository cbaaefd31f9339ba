"""Events, which a VM sees, and impacts, which are done to it, as values.

No rules here: those are in `machine.py`.
"""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

Time = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time that is stored. One without a time zone is damaged: it cannot be compared with others."""


class EventType(StrEnum):
    FREEZE = "Freeze"
    REBOOT = "Reboot"
    REDEPLOY = "Redeploy"
    PREEMPT = "Preempt"
    TERMINATE = "Terminate"


class Status(StrEnum):
    SCHEDULED = "Scheduled"
    STARTED = "Started"


class Source(StrEnum):
    PLATFORM = "Platform"
    USER = "User"


class Cause(StrEnum):
    """Why the event exists.

    It decides the description that a VM reads (protocol 2.5) and what the platform does.
    """

    MAINTENANCE = "maintenance"
    INFRASTRUCTURE = "infrastructure"
    LIVE_MIGRATION = "live-migration"
    DEGRADED = "degraded-hardware"
    FAILED = "failed-hardware"
    EVICTION = "eviction"
    RESTART = "user-restart"
    REDEPLOY = "user-redeploy"
    DELETION = "user-delete"


DESCRIPTION = {
    Cause.MAINTENANCE: "Host server is undergoing maintenance.",
    Cause.INFRASTRUCTURE: "Host Server infrastructure is undergoing maintenance.",
    Cause.LIVE_MIGRATION: (
        "Virtual machine is being paused because of a memory-preserving Live Migration operation."
    ),
    Cause.DEGRADED: "Host server is undergoing an emergency repair.",
    Cause.FAILED: "Virtual machine has encountered a failure.",
    Cause.EVICTION: "",
    Cause.RESTART: "Virtual machine is going to be restarted as requested by authorized user.",
    Cause.REDEPLOY: "Virtual machine is going to be redeployed as requested by authorized user.",
    Cause.DELETION: "Virtual machine is going to be deleted as requested by authorized user.",
}

MAINTENANCE_CAUSES = (Cause.MAINTENANCE, Cause.INFRASTRUCTURE, Cause.LIVE_MIGRATION)
USER_CAUSES = (Cause.RESTART, Cause.REDEPLOY, Cause.DELETION)


def is_move(type_: EventType, cause: Cause) -> bool:
    """Whether the VM should be on another host after the impact."""
    is_live_migration = type_ is EventType.FREEZE and cause is Cause.LIVE_MIGRATION
    return type_ is EventType.REDEPLOY or cause is Cause.FAILED or is_live_migration


UNKNOWN_SECONDS = -1
DURATION_SECONDS = dict.fromkeys(EventType, UNKNOWN_SECONDS) | {EventType.FREEZE: 9}
"""The duration that an event announces unless the operator sets one (protocol 2.2)."""


class ImpactState(StrEnum):
    """The states are described at the top of `machine.py`."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    BOOTING = "booting"
    DONE = "done"
    FAILED = "failed"


class Impact(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The work on one VM, for a Started event or for a silent operation (one without an event).

    `event_id` is the id of the event, or of the silent operation. `claimed_by` is the worker that
    holds it; `due_at` is when it may be claimed, or was; while its VM boots, it is when the wait
    ends. `tries` identifies the attempt. `first_failed_at` is when the retry window began; `lost`
    counts the claims that never finished: their server was lost, or a bug ended the try.
    `stop_seconds` is how long the platform may still act after the server that holds the claim was
    lost. `host` is the host whose daemon carries out the last try; empty if a server does.
    """

    event_id: str
    vm: str
    type: EventType
    cause: Cause
    due_at: Time
    state: ImpactState = ImpactState.WAITING
    claimed_by: str = ""
    tries: int = 0
    failures: int = 0
    detail: str = ""
    first_failed_at: Time | None = None
    lost: int = 0
    stop_seconds: float = 0.0
    host: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in (ImpactState.DONE, ImpactState.FAILED)

    @property
    def is_held(self) -> bool:
        """Whether a worker holds the claim. One that was released is claimed, but not held."""
        return self.state is ImpactState.CLAIMED and self.claimed_by != ""


class Gap(NamedTuple):
    """A time in which a VM could not read what was committed."""

    since: Time
    until: Time


class Event(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the VMs of a scope see. All its resources are in one scope and one update domain.

    `host` is the host under maintenance, empty for an event of the VM itself. `is_timed`: the
    requester chose NotBefore, so only an approval by a guest or an operator starts it earlier.
    `notice` is the minimum notice that was announced. Its VMs could not read the event in `gaps`,
    and cannot since `unreadable_since`: see `readability.py`. Of many gaps, those until
    `unread_until` are only in `unread_total`. `has_had_notice`: NotBefore was reached, so it starts
    as soon as no other update domain holds it.
    """

    id: str
    type: EventType
    status: Status
    source: Source
    cause: Cause
    resources: tuple[str, ...]
    update_domain: int
    not_before: Time
    duration_seconds: int
    description: str
    created_at: Time
    host: str = ""
    started_at: Time | None = None
    approvals: tuple[str, ...] = ()
    is_approved: bool = False
    is_timed: bool = False
    notice: timedelta = timedelta(0)
    gaps: tuple[Gap, ...] = ()
    unreadable_since: Time | None = None
    has_had_notice: bool = False
    unread_total: timedelta = timedelta(0)
    unread_until: Time | None = None


class EndReason(StrEnum):
    """How an event ended."""

    COMPLETED = "completed"
    CANCELED = "canceled"
    FAILED = "failed"


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event that left the document. Remembered, because an approval may arrive after the end."""

    id: str
    how: EndReason
    at: Time


class NoEventCode(StrEnum):
    NOT_POLLED = "not-polled"
    VM_DOWN = "vm-down"
    NO_NOTICE = "no-notice"
    ENDED = "ended"


class NoEvent(msgspec.Struct, frozen=True):
    """Why an operation has no event: it ran at once, or the event had ended before."""

    code: NoEventCode
    message: str


def ended_before(what: str) -> NoEvent:
    return NoEvent(NoEventCode.ENDED, f"{what} before")
