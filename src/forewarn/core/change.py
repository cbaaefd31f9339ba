"""What became true.

Changes go into the history and to whoever listens; the rules never read them back.
"""

from datetime import datetime
from enum import StrEnum

import msgspec

from forewarn.core.event import Cause, EventType


class ChangeKind(StrEnum):
    ORDERED = "ordered"
    """An operation runs at once, and nobody needs to be told."""
    SCHEDULED = "scheduled"
    APPROVED = "approved"
    STARTED = "started"
    CLAIMED = "claimed"
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
    AMENDED = "amended"
    RETIRED = "retired"
    CAMPAIGN = "campaign"
    """Something became true of a campaign; the detail tells which and what."""
    TOKEN_CREATED = "token-created"  # noqa: S105
    TOKEN_REVOKED = "token-revoked"  # noqa: S105
    RESTORED = "restored"
    """The store is a backup: what happened after it was made is not in this history."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that became true of an event, of a VM, or of the scope itself.

    The rules tell the first four members; the rest is what it concerns, and is filled in by
    `concern.py`. `host` is where it happens, `host_before` where a VM that moved was. `not_before`
    and `description` are told when they are new. For APPROVED, `vm` is the VM that approved; it is
    empty if an operator or a policy did.
    """

    what: ChangeKind
    event_id: str = ""
    vm: str = ""
    detail: str = ""
    type: EventType | None = None
    cause: Cause | None = None
    resources: tuple[str, ...] = ()
    host: str = ""
    host_before: str = ""
    not_before: datetime | None = None
    description: str = ""
