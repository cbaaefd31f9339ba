"""The errors of Forewarn. An expected problem is an Error; a bug is an assert.

    Error
    ├── Invalid             malformed input: a field, a file, an option
    ├── NotFound
    │   ├── UnknownScope  UnknownVm  UnknownHost  UnknownEvent  UnknownToken  UnknownCampaign
    │   └── EventEnded      the event existed, and has ended
    ├── Unauthorized        the client did not authenticate
    ├── Forbidden           the client's role is not sufficient
    ├── Refused             well-formed, but against the rules
    │   ├── AlreadyPending  TooManyOperations  NoticeTooShort
    │   ├── WrongStatus  ScopeBusy  VmBusy  VmDown
    │   ├── TooManyCampaigns  CampaignOver  OverBudget
    │   └── FleetChanged    the fleet was changed since it was read
    ├── ImpactFailed        the platform could not carry out an impact
    └── Unavailable         try again later
        ├── Conflict        another write came first (the engine retries)
        ├── StoreLost       the store does not answer; the write may or may not have happened
        │   └── Compacted   deletions since then are no longer known; load again
        └── StoreUnusable   the store is damaged, read-only, full, or of a newer version
            ├── StoreDenied this user may not read and write the store's files
            └── RecordUnreadable   one record is unreadable, and cannot be changed

HTTP statuses are in `web/http_status.py`, exit codes in `cli/exit_codes.py`, and nowhere else.
Standard library only: the guest uses this module too.
"""

from typing import ClassVar


class Error(Exception):
    """An expected problem. `code` is for programs and never changes; the message is for people."""

    code: ClassVar[str] = "problem"

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts


class Invalid(Error):
    code = "invalid"


class NotFound(Error):
    code = "not_found"


class UnknownScope(NotFound):
    code = "unknown_scope"


class UnknownVm(NotFound):
    code = "unknown_vm"


class UnknownHost(NotFound):
    code = "unknown_host"


class UnknownEvent(NotFound):
    code = "unknown_event"


class UnknownToken(NotFound):
    code = "unknown_token"


class UnknownCampaign(NotFound):
    code = "unknown_campaign"


class EventEnded(NotFound):
    code = "event_ended"


class Unauthorized(Error):
    code = "unauthorized"


class Forbidden(Error):
    code = "forbidden"


class Refused(Error):
    code = "refused"


class AlreadyPending(Refused):
    code = "already_pending"


class TooManyOperations(Refused):
    code = "too_many_operations"


class NoticeTooShort(Refused):
    code = "notice_too_short"


class WrongStatus(Refused):
    code = "wrong_status"


class ScopeBusy(Refused):
    code = "scope_busy"


class VmBusy(Refused):
    code = "vm_busy"


class VmDown(Refused):
    code = "vm_down"


class TooManyCampaigns(Refused):
    code = "too_many_campaigns"


class CampaignOver(Refused):
    code = "campaign_over"


class OverBudget(Refused):
    code = "over_budget"


class FleetChanged(Refused):
    code = "fleet_changed"


class ImpactFailed(Error):
    code = "impact_failed"


class Unavailable(Error):
    code = "unavailable"


class Conflict(Unavailable):
    code = "conflict"


class StoreLost(Unavailable):
    code = "store_lost"


class Compacted(StoreLost):
    code = "compacted"


class StoreUnusable(Unavailable):
    code = "store_unusable"


class StoreDenied(StoreUnusable):
    code = "store_denied"


class RecordUnreadable(StoreUnusable):
    code = "record_unreadable"
