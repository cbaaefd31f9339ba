"""One tree of problems. A problem is expected and is answered; a bug is an assert.

    Problem
    ├── Invalid             what came cannot be read: bad field, bad file, bad option
    ├── NotFound
    │   ├── UnknownScope  UnknownVm  UnknownHost  UnknownEvent  UnknownToken  UnknownCampaign
    │   └── EventEnded      it existed, and is over
    ├── Unauthorized        nobody knows who the caller is
    ├── Forbidden           the caller may not
    ├── Refused             well-formed, but the rules say no
    │   ├── AlreadyPending  TooManyOperations  NoticeTooShort
    │   ├── WrongStatus  ScopeBusy  VmBusy  VmDown
    │   ├── TooManyCampaigns  CampaignOver  OverBudget
    │   └── FleetChanged    the fleet is no longer the one that was read
    ├── ImpactFailed        the platform could not do it
    └── Unavailable         try again later
        ├── Conflict        somebody else wrote first (settled inside the engine)
        ├── StoreLost       the store does not answer; the write may or may not have happened
        │   └── Compacted   deletions since then are no longer known; load again
        └── StoreUnusable   the store is damaged, read-only, full, or from the future
            ├── StoreDenied this user may not read and write the store's files
            └── RecordUnreadable   one record is: what it holds cannot be changed here

HTTP statuses live in `web/http_status.py` and exit codes in `cli/`, nowhere else. Standard library
only: the guest uses it too.
"""

from typing import ClassVar


class Error(Exception):
    """Something expected went wrong.

    `code` is for machines and never changes; the message is for a person.
    """

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
