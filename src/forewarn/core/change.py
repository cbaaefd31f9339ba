"""What became true. Changes go into the history and to whoever listens; the rules never read them back."""

from enum import StrEnum

import msgspec


class What(StrEnum):
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


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that became true of an event, of a VM, or of the scope itself."""

    what: What
    event_id: str = ""
    vm: str = ""
    detail: str = ""
