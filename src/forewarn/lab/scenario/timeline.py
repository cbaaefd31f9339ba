"""What a scenario has come to so far, as monitors and conditions need it: events by name, and each
entry looked at once.
"""

import datetime as dt
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import msgspec

from forewarn import duration
from forewarn.client.errors import InvalidDocument
from forewarn.client.models import Document, read_document
from forewarn.engine.operations import Told
from forewarn.errors import Invalid
from forewarn.lab.transcript import Entry, Kind
from forewarn.wire import approval

BY = "scenario"
ENDS = ("completed", "canceled", "failed")
GOOD = (200, 304)
LATE = {"first-call", "latency"}
GRACE = dt.timedelta(seconds=1)


class Known(msgspec.Struct, frozen=True):
    """An event, or an operation that nobody was told of, as it was when it came.

    `members` are the VMs that see it.
    """

    id: str
    name: str
    at: dt.datetime
    type: str = ""
    resources: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.type} of {', '.join(self.resources)} ({self.id[:8]})"
            if self.type
            else self.id[:8]
        )


class Story:
    """The events that have come. `find` gives a live event by its id; `rate` is how much faster
    than told the times are.

    On a virtual clock limits are exact. On the real one (`is_real`) every limit has a grace:
    NotBefore has whole seconds, and a program that polls each second is a little late each time.
    """

    def __init__(
        self,
        start: dt.datetime,
        find: Callable[[str], Told | None],
        *,
        rate: float = 1.0,
        is_real: bool = False,
    ) -> None:
        self.start = start
        self.rate = rate
        self.grace = GRACE if is_real else dt.timedelta(0)
        self.events: dict[str, Known] = {}
        self._find = find
        self._course: dict[str, set[str]] = {}

    def see(self, entry: Entry) -> "Happening":
        """Learn from an entry, and give it with what can be read from it."""
        if entry.kind is Kind.CHANGE and entry.what in ("scheduled", "executed_silently"):
            told = self._find(entry.event)
            self.events[entry.event] = Known(
                id=entry.event,
                name=name_in(entry.by),
                at=entry.at,
                type=str(told.event.type) if told else "",
                resources=told.event.resources if told else (entry.vm,),
                members=tuple(vm.name for vm in told.scope.vms) if told else (entry.vm,),
            )
        if entry.kind is Kind.CHANGE and entry.event in self.events:
            self._course.setdefault(entry.event, set()).add(entry.what)
        return Happening(entry, self)

    def have_all(self, name: str, what: str) -> bool:
        """Whether this has become true of every event of a name, but for those that ended in
        another way.
        """
        courses = [self._course[known.id] for known in self.events.values() if known.name == name]
        return all(
            what in course for course in courses if what in course or course.isdisjoint(ENDS)
        )

    def span(self, since: dt.datetime, until: dt.datetime) -> dt.timedelta:
        """How long it was in the scenario's time."""
        return (until - since) * self.rate

    def clock(self, moment: dt.datetime) -> str:
        """A moment in the scenario's time, for a person."""
        return "+" + shown(self.span(self.start, moment))

    def patience(self, told: str) -> dt.timedelta:
        """How long on the lab's clock a length of the scenario's time may last."""
        return duration.parse_duration(told) / self.rate + self.grace


class Happening:
    """An entry, and what can be read from it, read at most once."""

    def __init__(self, entry: Entry, story: Story) -> None:
        self.entry = entry
        self.at = entry.at
        self.known = story.events.get(entry.event)
        self.story = story
        self.change = entry.what if entry.kind is Kind.CHANGE else ""

    @cached_property
    def is_good(self) -> bool:
        """Whether a request was answered as it should be, if maybe late."""
        return self.entry.status in GOOD and set(self.entry.faults) <= LATE

    @cached_property
    def is_poll(self) -> bool:
        return is_poll(self.entry)

    @cached_property
    def document(self) -> Document | None:
        """The document that a poll was answered with, if a client could read it."""
        if self.is_poll and self.entry.status == 200 and self.entry.answered:
            with suppress(InvalidDocument):
                return read_document(self.entry.answered.encode())
        return None

    @cached_property
    def approvals(self) -> tuple[tuple[str, Known], ...]:
        """Who approved what.

        A VM whose answer was lost on the way has approved all the same: the change tells it.
        """
        entry, events = self.entry, self.story.events
        if entry.kind is Kind.REQUEST and entry.method == "POST" and entry.status == 200:
            with suppress(Invalid):
                ids = approval.parse(entry.asked.encode())
                return tuple((entry.vm, events[event_id]) for event_id in ids if event_id in events)
        if self.change == "approved" and self.known is not None and entry.by.startswith("vm "):
            return ((entry.detail, self.known),)
        return ()


def is_poll(entry: Entry) -> bool:
    """Whether somebody asked for the document."""
    return (
        entry.kind is Kind.REQUEST
        and entry.method == "GET"
        and "/scheduledevents" in entry.path.lower()
    )


def name_in(by: str) -> str:
    """The name that the step which did it gave to what it made."""
    author, _, name = by.partition(": ")
    return name if author == BY else ""


def shown(span: dt.timedelta) -> str:
    """A length of time, for a person."""
    seconds = round(span.total_seconds(), 1)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    parts = (
        [f"{hours}h"] * bool(hours)
        + [f"{minutes}m"] * bool(minutes)
        + [f"{seconds:g}s"] * bool(seconds)
    )
    return "".join(parts) or "0s"
