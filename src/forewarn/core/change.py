"""Changes: what became true. They go to the history and to subscribers; no rule reads them."""

from datetime import datetime
from enum import StrEnum

import msgspec

from forewarn.core.event import Cause, EventType


class ChangeKind(StrEnum):
    EXECUTED_SILENTLY = "executed-silently"
    """An operation runs immediately, without an event."""
    SCHEDULED = "scheduled"
    APPROVED = "approved"
    STARTED = "started"
    CLAIMED = "claimed"
    RESTARTED = "restarted"
    """The platform has restarted a VM, which boots: the impact is done when the VM is back."""
    IMPACTED = "impacted"
    IMPACT_FAILED = "impact-failed"
    EXTENDED = "extended"
    COMPLETED = "completed"
    CANCELED = "canceled"
    FAILED = "failed"
    ENABLED = "enabled"
    JOINED = "joined"
    LEFT = "left"
    MOVED = "moved"
    UPDATED = "updated"
    RETIRED = "retired"
    UNSERVED = "unserved"
    """A VM that polls gets only errors, or has stopped polling when it moved."""
    SERVED = "served"
    CAMPAIGN = "campaign"
    """A campaign changed; the detail has its id and what happened."""
    TOKEN_CREATED = "token-created"  # noqa: S105
    TOKEN_REVOKED = "token-revoked"  # noqa: S105
    RESTORED = "restored"
    """The store was restored from a backup; later history is missing."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of an event, of a VM, or of the scope itself.

    It is complete by itself, because the event may be gone when the history is read. `resources`
    are the VMs concerned: one VM, where the change happened to one VM of an event. `host` is where
    it happened, `host_before` where a moved VM was. `not_before` is set when it is new,
    `description` and `duration_seconds` if it happened to the whole event. For APPROVED, `vm` is
    the VM that approved; empty for an operator or a policy.
    """

    what: ChangeKind
    event: str = ""
    vm: str = ""
    detail: str = ""
    type: EventType | None = None
    cause: Cause | None = None
    resources: tuple[str, ...] = ()
    host: str = ""
    host_before: str = ""
    not_before: datetime | None = None
    description: str = ""
    duration_seconds: int | None = None
