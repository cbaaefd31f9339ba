"""What a scenario can expect, each kind a type with the words for a person. The types are the
parser and the JSON Schema.

`monitor.py` knows who watches over them. `within` counts from when the event was Scheduled, or from
the start where no event is named.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from forewarn.core.event import EventType, Source, Status
from forewarn.duration import Duration
from forewarn.fleetfile.schema import Name
from forewarn.lab.scenario.step import Called

OWN = "own"
LEADER = "leader"
Who = Annotated[
    Name, Meta(description="a VM; own: one that the event names; leader: the first that it names")
]
Vms = Annotated[tuple[Name, ...], Meta(max_length=10_000, description="a list of names of VMs")]


class Becomes(StrEnum):
    APPROVED = "approved"
    STARTED = "started"
    COMPLETED = "completed"
    CANCELED = "canceled"
    FAILED = "failed"


class Expected(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="expect"
):
    """What all have: a kind, and `words`, the expectation as a sentence."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class Approval(Expected, frozen=True, kw_only=True, tag="approval"):
    """A VM approves each event of that name, not sooner than `after` and not later than `within`."""

    of: Called
    by: Who | None = None
    after: Duration | None = None
    within: Duration | None = None

    def words(self) -> str:
        soon = f" no sooner than {self.after}" if self.after else ""
        late = f" within {self.within}" if self.within else ""
        return f"{who(self.by)} approves {self.of}{soon}{' and' if soon and late else ''}{late}"


class NoApproval(Expected, frozen=True, kw_only=True, tag="no-approval"):
    """No VM, or not this one, approves any event of that name."""

    of: Called
    by: Name | None = None

    def words(self) -> str:
        return f"{self.by or 'no VM'} {'never approves' if self.by else 'approves'} {self.of}"


class NoForeignApproval(Expected, frozen=True, kw_only=True, tag="no-foreign-approval"):
    """None of these VMs (nobody named: no VM at all) approves an event whose Resources do not name
    it.
    """

    vms: Vms = ()

    def words(self) -> str:
        return f"{', '.join(self.vms) or 'no VM'} {'never approves' if self.vms else 'approves'} an event of other VMs"


class Order(Expected, frozen=True, kw_only=True, tag="order"):
    """The first approvals of these VMs come in this order; with `of`, of the events of that name."""

    vms: Annotated[
        tuple[Name, ...],
        Meta(min_length=2, max_length=10_000, description="a list of two or more names of VMs"),
    ]
    of: Called | None = None

    def words(self) -> str:
        return f"approvals{f' of {self.of}' if self.of else ''} come in the order {', '.join(self.vms)}"


class Shows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event in a document. What is not said may be anything."""

    event: Called | None = None
    type: EventType | None = None
    status: Status | None = None
    source: Source | None = None

    def words(self) -> str:
        said = [str(part) for part in (self.status, self.source, self.type) if part]
        return " ".join([*said, *([f"event {self.event}"] if self.event else [])]) or "event"


class Document(Expected, frozen=True, kw_only=True, tag="document"):
    """A VM is given a document that shows such an event."""

    vm: Name
    shows: Shows
    within: Duration | None = None

    def words(self) -> str:
        shown = self.shows.words()
        article = "an" if shown.startswith("event") else "a"
        return (
            f"{self.vm} is shown {article} {shown}{f' within {self.within}' if self.within else ''}"
        )


class Course(Expected, frozen=True, kw_only=True, tag="event"):
    """Each event of that name becomes so."""

    of: Called
    becomes: Becomes
    within: Duration | None = None

    def words(self) -> str:
        return f"{self.of} is {self.becomes}{f' within {self.within}' if self.within else ''}"


class OneAtATime(Expected, frozen=True, kw_only=True, tag="one-at-a-time"):
    """Events of that name are never Started at once."""

    of: Called

    def words(self) -> str:
        return f"events of {self.of} are Started one at a time"


class Together(Expected, frozen=True, kw_only=True, tag="together"):
    """Events of that name are Started at the same moment."""

    of: Called

    def words(self) -> str:
        return f"events of {self.of} are Started together"


class Polls(Expected, frozen=True, kw_only=True, tag="polls"):
    """The VM asks for the document at least so often, from the start to the end."""

    vm: Name
    every: Duration

    def words(self) -> str:
        return f"{self.vm} polls at least every {self.every}"


class Recovery(Expected, frozen=True, kw_only=True, tag="recovery"):
    """After every bad answer the VM asks again within this time, until it has a good one."""

    vm: Name
    within: Duration

    def words(self) -> str:
        return f"{self.vm} asks again within {self.within} of a bad answer, until it has a good one"


Expectation = (
    Approval
    | NoApproval
    | NoForeignApproval
    | Order
    | Document
    | Course
    | OneAtATime
    | Together
    | Polls
    | Recovery
)
EXPECTATIONS: tuple[type[Expected], ...] = Expectation.__args__


def who(by: str | None) -> str:
    return {None: "a VM", OWN: "a VM of its own", LEADER: "its first VM"}.get(by, by or "")
