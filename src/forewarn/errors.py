"""The errors of Forewarn. An expected problem is an Error; a bug is an assert.

    Error
    ├── Invalid
    ├── NotFound
    │   ├── UnknownScope  UnknownVm  UnknownHost  UnknownEvent  UnknownToken  UnknownCampaign
    │   └── EventEnded
    ├── Unauthorized  Forbidden
    ├── Refused
    │   ├── AlreadyPending  TooManyOperations  NoticeTooShort
    │   ├── WrongStatus  ScopeBusy  VmBusy  VmDown
    │   ├── TooManyCampaigns  CampaignOver  OverBudget
    │   └── FleetChanged  HostTaken  DaemonAway
    ├── ImpactFailed
    └── Unavailable
        ├── HostUnreachable
        ├── Conflict
        ├── StoreLost
        │   └── Compacted
        └── StoreUnusable
            └── StoreDenied  RecordUnreadable

HTTP statuses are in `web/http_status.py`, exit codes in `cli/exit_codes.py`, and nowhere else.
Standard library only: the guest uses this module too.
"""

from typing import ClassVar


class Error(Exception):
    """An expected problem. `code` is for programs and never changes; the message is for people."""

    code: ClassVar[str] = "problem"

    def __init_subclass__(cls, *, code: str = "") -> None:
        if code:
            cls.code = code

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts


class Invalid(Error, code="invalid"):
    """Malformed input: a field, a file, an option."""


class NotFound(Error, code="not_found"):
    """What a request names does not exist."""


class UnknownScope(NotFound, code="unknown_scope"):
    """The fleet has no scope of this name."""


class UnknownVm(NotFound, code="unknown_vm"):
    """The fleet has no VM of this name."""


class UnknownHost(NotFound, code="unknown_host"):
    """The fleet has no host of this name."""


class UnknownEvent(NotFound, code="unknown_event"):
    """No event has had this id, or it was too long ago."""


class UnknownToken(NotFound, code="unknown_token"):
    """The store has no token of this name."""


class UnknownCampaign(NotFound, code="unknown_campaign"):
    """The store has no campaign of this id."""


class EventEnded(NotFound, code="event_ended"):
    """The event existed, and has ended."""


class Unauthorized(Error, code="unauthorized"):
    """The client did not authenticate."""


class Forbidden(Error, code="forbidden"):
    """The client's role is not sufficient."""


class Refused(Error, code="refused"):
    """Well-formed, but against the rules."""


class AlreadyPending(Refused, code="already_pending"):
    """The VM already has a scheduled event of this kind."""


class TooManyOperations(Refused, code="too_many_operations"):
    """The scope has as many scheduled operations of users as it may have."""


class NoticeTooShort(Refused, code="notice_too_short"):
    """`not_before` leaves less time than the event type needs."""


class WrongStatus(Refused, code="wrong_status"):
    """The event or campaign is not in a status that allows this."""


class ScopeBusy(Refused, code="scope_busy"):
    """An event of the scope prevents the change."""


class VmBusy(Refused, code="vm_busy"):
    """An event of the VM prevents the change."""


class VmDown(Refused, code="vm_down"):
    """The VM is not running."""


class TooManyCampaigns(Refused, code="too_many_campaigns"):
    """As many campaigns are running as may run."""


class CampaignOver(Refused, code="campaign_over"):
    """The campaign has ended."""


class OverBudget(Refused, code="over_budget"):
    """More VMs would be unavailable than the budget allows."""


class FleetChanged(Refused, code="fleet_changed"):
    """The fleet was changed since it was read."""


class HostTaken(Refused, code="host_taken"):
    """Another daemon is connected for the host."""


class DaemonAway(Refused, code="daemon_away"):
    """Nothing can be done to the VMs of a host at present: its daemon is away, or cannot act."""


class ImpactFailed(Error, code="impact_failed"):
    """The platform could not carry out an impact."""


class Unavailable(Error, code="unavailable"):
    """Try again later."""


class HostUnreachable(Unavailable, code="host_unreachable"):
    """The daemon of a host was lost. Its impacts wait for it."""


class Conflict(Unavailable, code="conflict"):
    """Another write came first. The engine retries."""


class StoreLost(Unavailable, code="store_lost"):
    """The store does not answer; the write may or may not have happened."""


class Compacted(StoreLost, code="compacted"):
    """Not every change since then is still known; load again."""


class StoreUnusable(Unavailable, code="store_unusable"):
    """The store is damaged, read-only, full, or of a newer version."""


class StoreDenied(StoreUnusable, code="store_denied"):
    """This user may not read and write the store's files."""


class RecordUnreadable(StoreUnusable, code="record_unreadable"):
    """One record is unreadable, and cannot be changed."""
