"""The timeline of a run: what happened, reduced to what conditions and verdicts need.

Each transcript entry becomes an `Observation`, which conditions and the console look at as it
happens. The timeline keeps no bodies, since a run may see millions of polls.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from forewarn.client import models
from forewarn.core.event import Event, EventType, Status
from forewarn.duration import format_duration, parse_duration
from forewarn.engine.board import PublishedScope
from forewarn.errors import Invalid
from forewarn.fleetfile.yaml_source import FieldError, Path
from forewarn.lab.names import EVENT, VM, count, shorten_list
from forewarn.lab.transcript import TranscriptEntry, TranscriptKind, read_shown
from forewarn.wire.approval import parse as parse_approval

BY = "scenario"
"""The author of what steps do. `scenario: NAME` gives the new events a name."""
ENDINGS = ("completed", "canceled", "failed")
DELAYS = {"first-call", "latency"}
GRACE = timedelta(seconds=1)
END_MAX = datetime.max.replace(tzinfo=UTC)
REFUSALS_SHOWN_MAX = 2
REASON_CHARS_MAX = 120


@dataclass(eq=False)
class TrackedEvent:
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
    changes: list[TranscriptEntry] = field(default_factory=list)
    approvals: list["ObservedApproval"] = field(default_factory=list)

    def find_change(self, *whats: str) -> datetime | None:
        """Return the time of its first change of these kinds."""
        return next((change.at for change in self.changes if change.what in whats), None)

    def __str__(self) -> str:
        if not self.type:
            return self.id[:8]
        return f"{self.type} of {', '.join(self.resources)} ({self.id[:8]})"


class ObservedApproval(NamedTuple):
    """An approval by a VM. The request and the change that it causes are two of them."""

    at: datetime
    vm: str
    event: TrackedEvent


class RefusedApproval(NamedTuple):
    """A POST that approved nothing, and how it was refused."""

    at: datetime
    vm: str
    how: str


class Sighting(NamedTuple):
    """A VM was shown an event, for the first time like this."""

    at: datetime
    vm: str
    event: models.Event


class Observation(NamedTuple):
    """A transcript entry and what can be read from it.

    `event` is that of a change, `document` what a poll returned, if a client could read it.
    """

    entry: TranscriptEntry
    event: TrackedEvent | None
    document: models.Document | None
    approvals: tuple[ObservedApproval, ...]


@dataclass(eq=False)
class Timeline:
    """The record of a run. `find` looks up a live event.

    On a virtual clock limits are exact. On the real clock (`is_real`) every limit has a grace:
    NotBefore has whole seconds, and a program that polls every second is always a little late.
    """

    start: datetime
    find: Callable[[str], tuple[PublishedScope, Event] | None]
    rate: float = 1.0
    is_real: bool = False

    def __post_init__(self) -> None:
        self.planned_end = END_MAX
        self.end = self.start
        """How far it goes: now, until the run is over."""
        self.is_cut = False
        """The run has ended before its time."""
        self.coming: Counter[str | None] = Counter()
        """How many steps will still run, by the name of the events that they create; or None."""
        self.grace = GRACE if self.is_real else timedelta(0)
        self.events: dict[str, TrackedEvent] = {}
        self.approvals: list[ObservedApproval] = []
        self.refusals: list[RefusedApproval] = []
        self.marks: list[TranscriptEntry] = []
        """Steps and faults."""
        self.requests: dict[str, list[TranscriptEntry]] = defaultdict(list)
        self.sightings: list[Sighting] = []
        self.left_at: dict[str, datetime] = {}
        """When VMs left the fleet."""
        self._shown: dict[tuple[str, str], tuple[str, str, str]] = {}

    def add(self, entry: TranscriptEntry) -> Observation:
        """Record an entry, and return it with what can be read from it."""
        document = None
        if entry.kind is TranscriptKind.CHANGE:
            self._add_change(entry)
        elif entry.kind is TranscriptKind.REQUEST:
            self.requests[entry.vm].append(replace(entry, request_body="", response_body=""))
            if is_poll(entry) and entry.status == 200:
                document = read_shown(entry.response_body.encode())
            if document is not None:
                self._add_sightings(entry, document)
            if entry.method == "POST" and entry.status != 200:
                self.refusals.append(read_refusal(entry))
        elif entry.kind in (TranscriptKind.STEP, TranscriptKind.FAULT):
            self.marks.append(entry)
        approvals = tuple(self._read_approvals(entry))
        self.approvals += approvals
        for approval in approvals:
            approval.event.approvals.append(approval)
        return Observation(entry, self.events.get(entry.event), document, approvals)

    def _add_change(self, entry: TranscriptEntry) -> None:
        if entry.what in ("scheduled", "executed-silently"):
            self.events[entry.event] = self._track(entry)
        if entry.what == "left":
            self.left_at.setdefault(entry.vm, entry.at)
        if entry.event in self.events:
            self.events[entry.event].changes.append(entry)

    def _track(self, entry: TranscriptEntry) -> TrackedEvent:
        published, event = self.find(entry.event) or (None, None)
        author, _, name = entry.by.partition(": ")
        return TrackedEvent(
            id=entry.event,
            name=name if author == BY else "",
            at=entry.at,
            type=str(event.type) if event else "",
            resources=event.resources if event else (entry.vm,),
            vms=tuple(vm.name for vm in published.scope.vms) if published else (entry.vm,),
            is_silent=entry.what == "executed-silently",
        )

    def _add_sightings(self, entry: TranscriptEntry, document: models.Document) -> None:
        for event in document.events:
            shown = (event.type, event.status, event.source)
            if self._shown.get((entry.vm, event.key)) != shown:
                self._shown[entry.vm, event.key] = shown
                self.sightings.append(Sighting(entry.at, entry.vm, event))

    def _read_approvals(self, entry: TranscriptEntry) -> list[ObservedApproval]:
        """Return the approvals by VMs that an entry reports.

        The change counts too: a VM whose response was lost has approved all the same.
        """
        vm, ids = entry.vm, list[str]()
        if entry.kind is TranscriptKind.REQUEST and entry.method == "POST" and entry.status == 200:
            with suppress(Invalid):  # a long body is cut in the transcript
                ids = list(parse_approval(entry.request_body.encode()))
        elif entry.what == "approved" and entry.by.startswith("vm "):
            vm, ids = entry.detail, [entry.event]
        events = [self.events[event_id] for event_id in ids if event_id in self.events]
        return [ObservedApproval(entry.at, vm, event) for event in events]

    def get_events(self, name: str) -> list[TrackedEvent]:
        """Return the events that steps gave this name, the oldest first."""
        return [event for event in self.events.values() if event.name == name]

    def may_come(self, name: str | None) -> bool:
        """Return whether a step will still create events of this name (None: of any name)."""
        if name is not None:
            return self.coming[name] > 0
        return any(count for each, count in self.coming.items() if each is not None)

    def is_settled(self, name: str | None) -> bool:
        """Return whether all events of this name (None: of any name) have come and ended."""
        events = self.events.values() if name is None else self.get_events(name)
        return not self.may_come(name) and all(
            event.is_silent or event.find_change(*ENDINGS) is not None for event in events
        )

    def while_unsettled(self, name: str | None) -> datetime | None:
        """Return the planned end until events of this name have come and ended; then None."""
        return None if self.is_settled(name) else self.planned_end

    def describe_refusals(self, vms: Collection[str], since: datetime) -> str:
        """Return how often approvals of these VMs were refused, for the most frequent reason."""
        refusals = (each for each in self.refusals if each.vm in vms and each.at >= since)
        counts = Counter(each.how for each in refusals)
        return "".join(
            f"; {count(times, 'approval')} {how if times == 1 else how.replace('was', 'were', 1)}"
            for how, times in counts.most_common(REFUSALS_SHOWN_MAX)
        )

    def measure(self, since: datetime, until: datetime) -> timedelta:
        """Return a duration in the scenario's time."""
        return (until - since) * self.rate

    @property
    def seconds(self) -> float:
        """How long it is, in the scenario's time."""
        return self.measure(self.start, self.end).total_seconds()

    def format_time(self, time: datetime) -> str:
        """Format a time as the scenario's time since its start."""
        return "+" + format_duration(self.measure(self.start, time))

    def format_approval(self, approval: ObservedApproval, event: str = "") -> str:
        event = event or str(approval.event)
        return f"{approval.vm} approved {event} at {self.format_time(approval.at)}"

    def limit(self, duration: str) -> timedelta:
        """Return how long a duration of the scenario may last on the lab's clock."""
        return parse_duration(duration) / self.rate + self.grace


def is_poll(entry: TranscriptEntry) -> bool:
    is_get = entry.kind is TranscriptKind.REQUEST and entry.method == "GET"
    return is_get and "/scheduledevents" in entry.path.lower()


def read_refusal(entry: TranscriptEntry) -> RefusedApproval:
    """The reason is the error in the body, unless a fault made it."""
    reason = entry.response_body
    with suppress(msgspec.DecodeError, LookupError, TypeError):
        reason = str(msgspec.json.decode(reason)["error"])
    how = f"was refused with {entry.status}: {reason}" if entry.status else "got no response"
    if entry.faults:
        faults = ", ".join(f"`{fault}`" for fault in entry.faults)
        how = f"got {entry.status or 'no response'} from the fault {faults}"
    return RefusedApproval(entry.at, entry.vm, how[:REASON_CHARS_MAX])


def is_good(entry: TranscriptEntry) -> bool:
    """Return whether a request got the right response, even if late."""
    return entry.status in (200, 304) and set(entry.faults) <= DELAYS


# --- conditions: what `when` of a step waits for

FORMS = (
    "VM approved",
    "VM approved NAME",
    "VM polled",
    "VM sees TYPE STATUS",
    "NAME scheduled|approved|started|completed|canceled|failed",
)
"""VM is a VM of the fleet, NAME a name that a step gives with `as`."""

CHANGES = ("scheduled", "approved", "started", *ENDINGS)

Condition = Callable[[Observation, Timeline], bool]
"""Whether an observation makes it true."""


def parse_condition(text: str, names: Mapping[str, Collection[str]], at: Path) -> Condition:
    """Parse a condition. `names` has those of each kind; `at` is the path for an error."""
    vms, events = names[VM], names[EVENT]
    match text.split():
        case [vm, "approved"] if vm in vms:
            return lambda seen, _: any(each.vm == vm for each in seen.approvals)
        case [vm, "approved", name] if vm in vms and name in events:
            approver = (vm, name)
            return lambda seen, _: any(
                (each.vm, each.event.name) == approver for each in seen.approvals
            )
        case [vm, "polled"] if vm in vms:
            return lambda seen, _: is_poll(seen.entry) and seen.entry.vm == vm
        case [vm, "sees", type_, status] if (
            vm in vms and type_ in list(EventType) and status in list(Status)
        ):
            shown = (type_, status)
            return lambda seen, _: (
                seen.entry.vm == vm
                and seen.document is not None
                and any((event.type, event.status) == shown for event in seen.document.events)
            )
        case [name, change] if name in events and change in CHANGES:
            return lambda seen, timeline: _have_all(seen, timeline, name, change)
    subjects = f"with {shorten_list(vms)} for VM and {shorten_list(events)} for NAME"
    raise FieldError(at, f"one of: {'; '.join(FORMS)}; {subjects}")


def _have_all(seen: Observation, timeline: Timeline, name: str, change: str) -> bool:
    """Return whether this is the change of the last event of a name that can still have it."""
    if seen.event is None or seen.event.name != name or seen.entry.what != change:
        return False
    events = timeline.get_events(name)
    return all(event.find_change(change, *ENDINGS) is not None for event in events)
