"""The kinds of expectations: their members, their sentence, and how each is checked.

An expectation about events that never came is unmet: a test that observed nothing proves nothing.
"""

from abc import abstractmethod
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Literal

import msgspec

from forewarn.client.models import Event as ShownEvent
from forewarn.core.event import EventType, Source, Status
from forewarn.duration import Duration, format_duration, parse_duration
from forewarn.lab.names import LEADER, OWN, Approver, EventName, TwoVmNames, VmName, VmNames, count
from forewarn.lab.scenario.timeline import ENDINGS, Timeline, TrackedEvent, is_good, is_poll
from forewarn.lab.scenario.verdict import AnyExpectation, Unmet
from forewarn.lab.transcript import TranscriptEntry


class EachEvent(AnyExpectation, frozen=True, kw_only=True):
    """Holds for each event of a name, `within` a time after it was Scheduled."""

    within: Duration | None = None

    def _describe_limit(self) -> str:
        return f" within {self.within}" if self.within else ""

    def _find_limit(self, since: datetime, timeline: Timeline) -> datetime:
        return timeline.planned_end if self.within is None else since + timeline.limit(self.within)

    def _is_in_time(self, event: TrackedEvent, timeline: Timeline, at: datetime) -> bool:
        return self.within is None or at <= self._find_limit(event.at, timeline)

    def _describe_time(self, took: timedelta, timeline: Timeline) -> str:
        """Format a time that met the limit, maybe only thanks to the grace."""
        text = format_duration(took)
        if self.within is None or took <= parse_duration(self.within):
            return text
        grace = format_duration(timeline.grace * timeline.rate)
        return f"{text} (limit {self.within}, and {grace} of grace at rate {timeline.rate:g})"

    @abstractmethod
    def _find(self, event: TrackedEvent, timeline: Timeline) -> datetime | str | None:
        """Return when it came true, or what happened instead; None if the event does not count."""

    def may_break(self, timeline: Timeline) -> bool:
        return False

    def _explain(self, event: TrackedEvent, timeline: Timeline) -> str:
        """Return what else happened, for the reason of the verdict."""
        return ""

    def _check_each(self, done: str, timeline: Timeline) -> str:
        name = self.subject or ""
        durations, more = [], ""
        for event in timeline.get_events(name):
            found = self._find(event, timeline)
            if found is None:
                continue
            more = more or self._explain(event, timeline)
            if isinstance(found, str) or not self._is_in_time(event, timeline, found):
                if isinstance(found, str):
                    is_open = self._is_in_time(event, timeline, timeline.end)
                    how = f"never {done}" if is_open else f"not {done} in time"
                    how += f": {found}" if found else ""
                else:
                    how = f"{done} after {format_duration(timeline.measure(event.at, found))}"
                scheduled = f"{event}, Scheduled at {timeline.format_time(event.at)}"
                raise Unmet(f"{scheduled}, was {how}{more}", self._find_limit(event.at, timeline))
            durations.append(timeline.measure(event.at, found))
        if not durations:
            raise Unmet(f"nothing named {name} was {done}: no event came, or all were cancelled")
        longest, times = self._describe_time(max(durations), timeline), len(durations)
        return (f"after {longest}" if times == 1 else f"{times} times, at most {longest}") + more


class ApprovalExpectation(EachEvent, frozen=True, kw_only=True, tag="approval"):
    """A VM approves each event of that name, not sooner than `after`, within `within`."""

    of: EventName
    by: Approver | None = None
    after: Duration | None = None

    def describe(self) -> str:
        after = f" no sooner than {self.after}" if self.after else ""
        both = " and" if self.after and self.within else ""
        return f"{self._approver} approves {self.of}{after}{both}{self._describe_limit()}"

    @property
    def _approver(self) -> str:
        words = {None: "a VM", OWN: "one of its VMs", LEADER: "its first VM"}
        return words.get(self.by, self.by or "")

    def check(self, timeline: Timeline) -> str:
        return self._check_each(f"approved by {self._approver}", timeline)

    def _explain(self, event: TrackedEvent, timeline: Timeline) -> str:
        vms = (self.by,) if self.by in event.vms else event.vms
        return timeline.describe_refusals(vms, event.at)

    def _find(self, event: TrackedEvent, timeline: Timeline) -> datetime | str | None:
        if self.by not in (None, OWN, LEADER, *event.vms):
            return None
        refuse_silent(event, timeline)
        approvals = [each for each in event.approvals if self._is_expected(each.vm, event)]
        canceled_at, started_at = event.find_change("canceled"), event.find_change("started")
        if canceled_at and not approvals and self._is_in_time(event, timeline, canceled_at):
            return None  # it needs no approval, unless that was already late
        if (
            started_at
            and all(each.at > started_at for each in event.approvals)
            and self._is_in_time(event, timeline, started_at)
        ):
            start = timeline.format_time(started_at)
            raise Unmet(f"{event} was Started at {start} without approval by a VM")
        if not approvals:
            others = [timeline.format_approval(each, "it") for each in event.approvals]
            return others[-1] if others else ""
        at = approvals[0].at
        if at < event.at + parse_duration(self.after or "0s") / timeline.rate - timeline.grace:
            took = format_duration(timeline.measure(event.at, at))
            soon = f"{took} after it was Scheduled, at {timeline.format_time(at)}"
            raise Unmet(f"{approvals[0].vm} approved {event} too soon: {soon}")
        return at

    def _is_expected(self, vm: str, event: TrackedEvent) -> bool:
        if self.by == OWN:
            return vm in event.resources
        return self.by in (None, vm) or (self.by == LEADER and vm == event.resources[0])


class Shows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event in a document. Members that are left out may have any value."""

    event: EventName | None = None
    type: EventType | None = None
    status: Status | None = None
    source: Source | None = None

    def matches(self, shown: ShownEvent) -> bool:
        members = ("type", "status", "source")
        return all(getattr(self, each) in (None, getattr(shown, each)) for each in members)


class DocumentExpectation(EachEvent, frozen=True, kw_only=True, tag="document"):
    """A VM is shown such an event."""

    vm: VmName
    shows: Shows

    @property
    def subject(self) -> str | None:
        return self.shows.event

    def describe(self) -> str:
        shows = self.shows
        words = [str(part) for part in (shows.status, shows.source, shows.type) if part]
        article = "a" if words else "an"
        event = " ".join([article, *words, "event", *filter(None, [shows.event])])
        return f"{self.vm} is shown {event}{self._describe_limit()}"

    def check(self, timeline: Timeline) -> str:
        if self.shows.event is not None:
            return self._check_each("shown like this", timeline)
        shown = [each for each in timeline.sightings if each.vm == self.vm]
        first = next((each for each in shown if self.shows.matches(each.event)), None)
        limit = self._find_limit(timeline.start, timeline)
        if first is None:
            raise Unmet(f"no document of {self.vm} showed one", limit)
        if first.at > limit:
            raise Unmet(f"the first one was shown at {timeline.format_time(first.at)}")
        took = timeline.measure(timeline.start, first.at)
        return f"after {self._describe_time(took, timeline)}"

    def _find(self, event: TrackedEvent, timeline: Timeline) -> datetime | str | None:
        if self.vm not in event.vms:
            return None
        refuse_silent(event, timeline)
        note = ""
        for each in timeline.sightings:
            if (each.vm, each.event.key) == (self.vm, event.id):
                if self.shows.matches(each.event):
                    return each.at
                since = timeline.format_time(each.at)
                note = f"shown as {each.event.status} {each.event.type} since {since}"
        return note


class EventExpectation(EachEvent, frozen=True, kw_only=True, tag="event"):
    """Each event of that name reaches this state."""

    of: EventName
    becomes: Literal["approved", "started", "completed", "canceled", "failed"]

    def describe(self) -> str:
        return f"{self.of} is {self.becomes}{self._describe_limit()}"

    def check(self, timeline: Timeline) -> str:
        return self._check_each(self.becomes, timeline)

    def _find(self, event: TrackedEvent, timeline: Timeline) -> datetime | str | None:
        note = ""
        for change in event.changes:
            at = timeline.format_time(change.at)
            if change.what == self.becomes:
                return change.at
            if change.what in ENDINGS and self._is_in_time(event, timeline, change.at):
                raise Unmet(f"{event} was {change.what} at {at} instead")
            if change.what in ("started", "impact-failed", "extended"):
                detail = f" ({change.detail})" if change.detail else ""
                note = f"{change.what} at {at}{detail}"
        return note


def refuse_silent(event: TrackedEvent, timeline: Timeline) -> None:
    if event.is_silent:
        at = timeline.format_time(event.at)
        raise Unmet(f"{event.name} ran at {at} without an event: its scope was not polled")


class NoApproval(AnyExpectation, frozen=True, kw_only=True, tag="no-approval"):
    """No VM, or not this one, approves an event of that name."""

    of: EventName
    by: VmName | None = None

    def describe(self) -> str:
        return f"{f'{self.by} never' if self.by else 'no VM'} approves {self.of}"

    def check(self, timeline: Timeline) -> str:
        for each in timeline.approvals:
            if each.event.name == self.of and self.by in (None, each.vm):
                raise Unmet(timeline.format_approval(each))
        if all(event.is_silent for event in timeline.get_events(self.of)):
            raise Unmet(f"there was no event named {self.of}")
        return "none came"


class NoForeignApproval(AnyExpectation, frozen=True, kw_only=True, tag="no-foreign-approval"):
    """None of these VMs (none given: no VM) approves an event that does not name it."""

    vms: VmNames = ()

    def describe(self) -> str:
        who = f"{', '.join(self.vms)} never" if self.vms else "no VM"
        return f"{who} approves an event of other VMs"

    def check(self, timeline: Timeline) -> str:
        approvals = [each for each in timeline.approvals if not self.vms or each.vm in self.vms]
        for each in approvals:
            if each.vm not in each.event.resources:
                raise Unmet(f"{timeline.format_approval(each)}, which does not name it")
        times = len({(each.vm, each.event.id) for each in approvals})
        if not times:
            return "no approvals"
        return f"{count(times, 'approval')}, each by a VM that the event names"


class Order(AnyExpectation, frozen=True, kw_only=True, tag="order"):
    """The first approvals of these VMs come in this order."""

    vms: TwoVmNames
    of: EventName | None = None

    def describe(self) -> str:
        of = f" of {self.of}" if self.of else ""
        return f"approvals{of} come in the order {', '.join(self.vms)}"

    def check(self, timeline: Timeline) -> str:
        remaining = list(self.vms)
        for each in timeline.approvals:
            if self.of not in (None, each.event.name) or each.vm not in remaining:
                continue
            if each.vm != remaining[0]:
                raise Unmet(f"{timeline.format_approval(each)}, before {remaining[0]}")
            del remaining[0]
        if remaining:
            raise Unmet(f"{remaining[0]} never approved", timeline.while_unsettled(self.of))
        return "they did"

    def may_break(self, timeline: Timeline) -> bool:
        return False


class OneAtATime(AnyExpectation, frozen=True, kw_only=True, tag="one-at-a-time"):
    """Events of that name are never Started at the same time."""

    of: EventName

    def describe(self) -> str:
        return f"events of {self.of} are Started one at a time"

    def check(self, timeline: Timeline) -> str:
        starts = list_starts(self.of, timeline)
        for (_, first), (at, second) in pairwise(starts):
            ended_at = first.find_change(*ENDINGS)
            if ended_at is None or at < ended_at:
                when = f"at {timeline.format_time(at)}, while {first} was still Started"
                raise Unmet(f"{second} was Started {when}")
        return f"{len(starts)} starts"


class Together(AnyExpectation, frozen=True, kw_only=True, tag="together"):
    """Events of that name are Started at the same time."""

    of: EventName

    def describe(self) -> str:
        return f"events of {self.of} are Started together"

    def check(self, timeline: Timeline) -> str:
        starts = list_starts(self.of, timeline)
        (first_at, first), (last_at, last) = starts[0], starts[-1]
        if last_at > first_at + timeline.limit("1s"):
            but = f"but {first} at {timeline.format_time(first_at)}"
            raise Unmet(f"{last} was Started at {timeline.format_time(last_at)}, {but}")
        return f"{len(starts)} starts"


def list_starts(name: str, timeline: Timeline) -> list[tuple[datetime, TrackedEvent]]:
    """Return the starts of the events of a name, in order."""
    times = ((event.find_change("started"), event) for event in timeline.get_events(name))
    starts = [(at, event) for at, event in times if at is not None]
    if len(starts) < 2:
        reason = f"{count(len(starts), 'start')} of {name}; expected two or more"
        raise Unmet(reason, timeline.while_unsettled(name))
    return sorted(starts, key=lambda start: start[0])


class RequestsExpectation(AnyExpectation, frozen=True, kw_only=True):
    """About all requests of a VM, so that it holds only at the end."""

    vm: VmName

    def may_break(self, timeline: Timeline) -> bool:
        return True


class PollsExpectation(RequestsExpectation, frozen=True, kw_only=True, tag="polls"):
    """The VM polls at least this often, from start to end."""

    every: Duration

    def describe(self) -> str:
        return f"{self.vm} polls at least every {self.every}"

    def check(self, timeline: Timeline) -> str:
        end = timeline.left_at.get(self.vm, timeline.end)
        requests = timeline.requests[self.vm]
        polls = [each.at for each in requests if is_poll(each) and each.at <= end]
        for last, at in pairwise([timeline.start, *polls, end]):
            if at > last + timeline.limit(self.every):
                gap = f"{timeline.format_time(last)} to {timeline.format_time(at)}"
                raise Unmet(f"it did not poll from {gap}")
        return count(len(polls), "poll")


class Recovery(RequestsExpectation, frozen=True, kw_only=True, tag="recovery"):
    """After every bad response the VM retries within this time, until it gets a good one."""

    within: Duration

    def describe(self) -> str:
        return f"{self.vm} retries within {self.within} until it gets a good response"

    def check(self, timeline: Timeline) -> str:
        requests = timeline.requests[self.vm]
        for bad, retry in pairwise(requests):
            if not is_good(bad) and retry.at > bad.at + timeline.limit(self.within):
                until = timeline.format_time(retry.at)
                raise Unmet(f"{describe_no_retry(bad, timeline)} until {until}")
        if requests and not is_good(requests[-1]):
            limit = requests[-1].at + timeline.limit(self.within)
            raise Unmet(describe_no_retry(requests[-1], timeline), limit)
        times = sum(not is_good(each) for each in requests)
        if not times:
            raise Unmet(f"{self.vm} never got a bad response", timeline.planned_end)
        return f"{count(times, 'bad response')}, then good ones"


def describe_no_retry(request: TranscriptEntry, timeline: Timeline) -> str:
    response = f"the response {request.status}" if request.status else "the missing response"
    faults = f" ({', '.join(request.faults)})" if request.faults else ""
    return f"it did not retry after {response}{faults} at {timeline.format_time(request.at)}"


Expectation = (
    ApprovalExpectation
    | NoApproval
    | NoForeignApproval
    | Order
    | DocumentExpectation
    | EventExpectation
    | OneAtATime
    | Together
    | PollsExpectation
    | Recovery
)
