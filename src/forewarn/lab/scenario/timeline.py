"""The timeline of a run: what happened, reduced to what conditions and verdicts need.

Each transcript entry becomes an `ObservedEntry`, which conditions and the console look at as it
happens. The timeline keeps only small records, since a run may see millions of polls.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cached_property
from typing import NamedTuple

from forewarn.client.errors import InvalidDocument
from forewarn.client.models import Document, read_document
from forewarn.duration import parse_duration
from forewarn.engine.operations import ScopedEvent
from forewarn.errors import Invalid
from forewarn.lab.transcript import TranscriptEntry, TranscriptKind
from forewarn.wire.approval import parse as parse_approval

BY = "scenario"
"""The author of what steps do. `scenario: NAME` gives the new events a name."""
ENDINGS = ("completed", "canceled", "failed")
GOOD_STATUSES = (200, 304)
DELAYS = {"first-call", "latency"}
GRACE = timedelta(seconds=1)


class TrackedEvent(NamedTuple):
    """An event as it was in the beginning. `vms` are all VMs of its scope: those that see it.

    `is_silent`: a user's operation without an event, because the scope was not polled.
    """

    id: str
    name: str
    at: datetime
    type: str
    resources: tuple[str, ...]
    vms: tuple[str, ...]
    is_silent: bool

    def __str__(self) -> str:
        if not self.type:
            return self.id[:8]
        return f"{self.type} of {', '.join(self.resources)} ({self.id[:8]})"


class ObservedChange(NamedTuple):
    at: datetime
    what: str
    event: TrackedEvent | None
    vm: str
    detail: str


class ObservedApproval(NamedTuple):
    """An approval by a VM. The request and the change that it causes are two of them."""

    at: datetime
    vm: str
    event: TrackedEvent


class ObservedRequest(NamedTuple):
    at: datetime
    is_poll: bool
    is_good: bool
    status: int
    faults: tuple[str, ...]


class ShownEvent(NamedTuple):
    """A VM was shown an event, for the first time like this."""

    at: datetime
    vm: str
    event_id: str
    type: str
    status: str
    source: str


class Timeline:
    """The record of a run. `find` looks up a live event.

    On a virtual clock limits are exact. On the real clock (`is_real`) every limit has a grace:
    NotBefore has whole seconds, and a program that polls every second is always a little late.
    """

    def __init__(
        self,
        start: datetime,
        find: Callable[[str], ScopedEvent | None],
        *,
        rate: float = 1.0,
        is_real: bool = False,
    ) -> None:
        self.start = start
        self.end = start
        self.rate = rate
        self.grace = GRACE if is_real else timedelta(0)
        self.events: dict[str, TrackedEvent] = {}
        self.changes: list[ObservedChange] = []
        self.approvals: list[ObservedApproval] = []
        self.requests: dict[str, list[ObservedRequest]] = defaultdict(list)
        self.sightings: list[ShownEvent] = []
        self._find = find
        self._changes_by_event: dict[str, list[ObservedChange]] = defaultdict(list)
        self._approvals_by_event: dict[str, list[ObservedApproval]] = defaultdict(list)
        self._shown: dict[tuple[str, str], tuple[str, str, str]] = {}

    def add(self, entry: TranscriptEntry) -> "ObservedEntry":
        """Record an entry, and return it with what can be read from it."""
        self.end = max(self.end, entry.at)
        if entry.kind is TranscriptKind.CHANGE and entry.what in ("scheduled", "executed-silently"):
            self._track(entry)
        observation = ObservedEntry(entry, self)
        if entry.kind is TranscriptKind.CHANGE:
            event = observation.event
            change = ObservedChange(entry.at, entry.what, event, entry.vm, entry.detail)
            self.changes.append(change)
            if event is not None:
                self._changes_by_event[event.id].append(change)
        if entry.kind is TranscriptKind.REQUEST:
            self._add_request(observation)
        for vm, event in observation.approvals:
            approval = ObservedApproval(entry.at, vm, event)
            self.approvals.append(approval)
            self._approvals_by_event[event.id].append(approval)
        return observation

    def _track(self, entry: TranscriptEntry) -> None:
        found = self._find(entry.event)
        self.events[entry.event] = TrackedEvent(
            id=entry.event,
            name=_read_name(entry.by),
            at=entry.at,
            type=str(found.event.type) if found else "",
            resources=found.event.resources if found else (entry.vm,),
            vms=tuple(vm.name for vm in found.scope.vms) if found else (entry.vm,),
            is_silent=entry.what == "executed-silently",
        )

    def _add_request(self, observation: "ObservedEntry") -> None:
        entry = observation.entry
        self.requests[entry.vm].append(
            ObservedRequest(
                entry.at, observation.is_poll, observation.is_good, entry.status, entry.faults
            )
        )
        for event in observation.document.events if observation.document else ():
            shown = (event.type, event.status, event.source)
            if self._shown.get((entry.vm, event.key)) != shown:
                self._shown[entry.vm, event.key] = shown
                self.sightings.append(ShownEvent(entry.at, entry.vm, event.key, *shown))

    def get_events(self, name: str) -> list[TrackedEvent]:
        """Return the events that steps gave this name, the oldest first."""
        return [event for event in self.events.values() if event.name == name]

    def get_changes(self, event: TrackedEvent) -> list[ObservedChange]:
        return self._changes_by_event[event.id]

    def get_approvals(self, event: TrackedEvent) -> list[ObservedApproval]:
        return self._approvals_by_event[event.id]

    def find_change(self, event: TrackedEvent, what: str) -> datetime | None:
        """Return the time of an event's first change of this kind."""
        return next((each.at for each in self.get_changes(event) if each.what == what), None)

    def has_all(self, name: str, what: str) -> bool:
        """Return whether this change has come for every event of a name that can still have it."""
        reached = [
            {change.what for change in self.get_changes(event)} for event in self.get_events(name)
        ]
        return all(what in changes or not changes.isdisjoint(ENDINGS) for changes in reached)

    def measure(self, since: datetime, until: datetime) -> timedelta:
        """Return a duration in the scenario's time."""
        return (until - since) * self.rate

    def format_time(self, time: datetime) -> str:
        """Format a time as the scenario's time since its start."""
        return "+" + format_duration(self.measure(self.start, time))

    def limit(self, duration: str) -> timedelta:
        """Return how long a duration of the scenario may last on the lab's clock."""
        return parse_duration(duration) / self.rate + self.grace


class ObservedEntry:
    """A transcript entry, and what can be read from it, parsed at most once."""

    def __init__(self, entry: TranscriptEntry, timeline: Timeline) -> None:
        self.entry = entry
        self.event = timeline.events.get(entry.event)
        self.change = entry.what if entry.kind is TranscriptKind.CHANGE else ""
        self.timeline = timeline

    @property
    def is_poll(self) -> bool:
        return is_poll(self.entry)

    @property
    def is_good(self) -> bool:
        """Whether a request got the right response, even if late."""
        return self.entry.status in GOOD_STATUSES and set(self.entry.faults) <= DELAYS

    @cached_property
    def document(self) -> Document | None:
        """The document in the response, if a client could read it."""
        if self.is_poll and self.entry.status == 200 and self.entry.response_body:
            with suppress(InvalidDocument):
                return read_document(self.entry.response_body.encode())
        return None

    @cached_property
    def approvals(self) -> tuple[tuple[str, TrackedEvent], ...]:
        """The VMs and the events that they approved.

        The change counts too: a VM whose response was lost has approved all the same.
        """
        entry, events = self.entry, self.timeline.events
        if entry.kind is TranscriptKind.REQUEST and entry.method == "POST" and entry.status == 200:
            with suppress(Invalid):
                ids = parse_approval(entry.request_body.encode())
                return tuple((entry.vm, events[event_id]) for event_id in ids if event_id in events)
        if self.change == "approved" and self.event and entry.by.startswith("vm "):
            return ((entry.detail, self.event),)
        return ()


def is_poll(entry: TranscriptEntry) -> bool:
    is_get = entry.kind is TranscriptKind.REQUEST and entry.method == "GET"
    return is_get and "/scheduledevents" in entry.path.lower()


def _read_name(by: str) -> str:
    author, _, name = by.partition(": ")
    return name if author == BY else ""


def format_duration(duration: timedelta) -> str:
    """Format a duration as files write it, such as 1h30m."""
    minutes, seconds = divmod(round(duration.total_seconds(), 1), 60)
    hours, minutes = divmod(int(minutes), 60)
    parts = ((hours, "h"), (minutes, "m"), (seconds, "s"))
    return "".join(f"{value:g}{unit}" for value, unit in parts if value) or "0s"
