"""The verdicts on a scenario's expectations, judged after the run. Pure.

Each kind of expectation has a sentence and a check: a function of the timeline that returns what
happened, or raises `ExpectationFailed`. An expectation about events that never came fails: a test
that observed nothing proves nothing.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import NamedTuple

from forewarn.duration import parse_duration
from forewarn.lab.scenario.schema import LEADER, OWN, Expectation
from forewarn.lab.scenario.timeline import (
    ENDINGS,
    ObservedRequest,
    ShownEvent,
    Timeline,
    TrackedEvent,
    format_duration,
)


class ScenarioVerdict(NamedTuple):
    expected: str
    reason: str
    is_passed: bool


class ExpectationFailed(Exception):
    """The expectation does not hold, for this reason."""


def judge(expectation: Expectation, timeline: Timeline) -> ScenarioVerdict:
    kind = KINDS[expectation.expect]
    sentence = kind.describe(expectation)
    try:
        return ScenarioVerdict(sentence, kind.check(expectation, timeline), is_passed=True)
    except ExpectationFailed as failure:
        return ScenarioVerdict(sentence, str(failure), is_passed=False)


# --- each event of a name: an approval, a document that shows it, a change


def describe_approval(expected: Expectation) -> str:
    after = f" no sooner than {expected.after}" if expected.after else ""
    both = " and" if expected.after and expected.within else ""
    return f"{_approver(expected)} approves {expected.of}{after}{both}{_within(expected)}"


def check_approval(expected: Expectation, timeline: Timeline) -> str:
    earliest = parse_duration(expected.after or "0s") / timeline.rate - timeline.grace
    time = timeline.format_time

    def is_expected(vm: str, event: TrackedEvent) -> bool:
        if expected.by == OWN:
            return vm in event.resources
        return expected.by in (None, vm) or (expected.by == LEADER and vm == event.resources[0])

    def is_void(event: TrackedEvent) -> bool:
        """A cancelled event needs no approval, unless the approval was already late."""
        canceled_at = timeline.find_change(event, "canceled")
        return (
            canceled_at is not None
            and not any(is_expected(each.vm, event) for each in timeline.get_approvals(event))
            and _is_in_time(expected, timeline, event, canceled_at)
        )

    def find(event: TrackedEvent) -> tuple[datetime | None, str]:
        approvals = timeline.get_approvals(event)
        started_at = timeline.find_change(event, "started")
        if (
            started_at is not None
            and all(each.at > started_at for each in approvals)
            and _is_in_time(expected, timeline, event, started_at)
        ):
            raise ExpectationFailed(
                f"{event} was Started at {time(started_at)} without approval by a VM"
            )
        note = ""
        for each in approvals:
            if is_expected(each.vm, event):
                if each.at < event.at + earliest:
                    took = format_duration(timeline.measure(event.at, each.at))
                    raise ExpectationFailed(
                        f"{each.vm} approved {event} too soon:"
                        f" {took} after it was Scheduled, at {time(each.at)}"
                    )
                return each.at, ""
            note = f"{each.vm} approved it at {time(each.at)}"
        return None, note

    concerned = [
        event
        for event in timeline.get_events(expected.of)
        if expected.by in (None, OWN, LEADER, *event.vms)
    ]
    _refuse_silent(concerned, timeline)
    events = [event for event in concerned if not is_void(event)]
    return _check_each(expected, timeline, events, find, f"approved by {_approver(expected)}")


def describe_event(expected: Expectation) -> str:
    return f"{expected.of} is {expected.becomes}{_within(expected)}"


def check_event(expected: Expectation, timeline: Timeline) -> str:
    def find(event: TrackedEvent) -> tuple[datetime | None, str]:
        note = ""
        for change in timeline.get_changes(event):
            at = timeline.format_time(change.at)
            if change.what == expected.becomes:
                return change.at, ""
            if change.what in ENDINGS and _is_in_time(expected, timeline, event, change.at):
                raise ExpectationFailed(f"{event} was {change.what} at {at} instead")
            if change.what in ("started", "impact-failed", "extended"):
                detail = f" ({change.detail})" if change.detail else ""
                note = f"{change.what} at {at}{detail}"
        return None, note

    events = timeline.get_events(expected.of)
    return _check_each(expected, timeline, events, find, expected.becomes)


def describe_document(expected: Expectation) -> str:
    shows = expected.shows
    words = [str(part) for part in (shows.status, shows.source, shows.type) if part]
    article = "a" if words else "an"
    name = f" {shows.event}" if shows.event else ""
    event = " ".join([*words, "event"])
    return f"{expected.vm} is shown {article} {event}{name}{_within(expected)}"


def check_document(expected: Expectation, timeline: Timeline) -> str:
    shows = expected.shows
    sightings = [each for each in timeline.sightings if each.vm == expected.vm]

    def is_expected(sighting: ShownEvent) -> bool:
        return (
            shows.type in (None, sighting.type)
            and shows.status in (None, sighting.status)
            and shows.source in (None, sighting.source)
        )

    def find(event: TrackedEvent) -> tuple[datetime | None, str]:
        note = ""
        for each in sightings:
            if each.event_id == event.id:
                if is_expected(each):
                    return each.at, ""
                at = timeline.format_time(each.at)
                note = f"shown as {each.status} {each.type} since {at}"
        return None, note

    if shows.event is not None:
        named = timeline.get_events(shows.event)
        events = [event for event in named if expected.vm in event.vms]
        _refuse_silent(events, timeline)
        return _check_each(expected, timeline, events, find, "shown like this")
    first = next(filter(is_expected, sightings), None)
    if first is None:
        raise ExpectationFailed(f"no document of {expected.vm} showed one")
    if expected.within is not None and first.at > timeline.start + timeline.limit(expected.within):
        raise ExpectationFailed(f"the first one was shown at {timeline.format_time(first.at)}")
    return f"after {format_duration(timeline.measure(timeline.start, first.at))}"


def _approver(expected: Expectation) -> str:
    words = {None: "a VM", OWN: "one of its VMs", LEADER: "its first VM"}
    return words.get(expected.by, expected.by or "")


def _within(expected: Expectation) -> str:
    return f" within {expected.within}" if expected.within else ""


def _is_in_time(
    expected: Expectation, timeline: Timeline, event: TrackedEvent, at: datetime
) -> bool:
    return expected.within is None or at <= event.at + timeline.limit(expected.within)


def _refuse_silent(events: Iterable[TrackedEvent], timeline: Timeline) -> None:
    for event in events:
        if event.is_silent:
            at = timeline.format_time(event.at)
            raise ExpectationFailed(
                f"{event.name} ran at {at} without an event: its scope was not polled"
            )


def _check_each(
    expected: Expectation,
    timeline: Timeline,
    events: Iterable[TrackedEvent],
    find: Callable[[TrackedEvent], tuple[datetime | None, str]],
    done: str,
) -> str:
    """Check that `find` gives a time within the limit for each event.

    Otherwise its second value is a note on what happened instead.
    """
    durations = []
    for event in events:
        at, note = find(event)
        if at is None or not _is_in_time(expected, timeline, event, at):
            is_open = _is_in_time(expected, timeline, event, timeline.end)
            how = f"never {done}" if is_open else f"not {done} in time"
            scheduled = timeline.format_time(event.at)
            raise ExpectationFailed(
                f"{event}, Scheduled at {scheduled}, was {how}{note and f': {note}'}"
            )
        durations.append(timeline.measure(event.at, at))
    if not durations:
        name = expected.of or expected.shows.event
        raise ExpectationFailed(
            f"nothing named {name} was {done}: there was no event, or all were cancelled"
        )
    longest = format_duration(max(durations))
    return (
        f"after {longest}" if len(durations) == 1 else f"{len(durations)} times, at most {longest}"
    )


# --- approvals and starts, compared with each other


def describe_no_approval(expected: Expectation) -> str:
    return f"{f'{expected.by} never' if expected.by else 'no VM'} approves {expected.of}"


def check_no_approval(expected: Expectation, timeline: Timeline) -> str:
    for each in timeline.approvals:
        if each.event.name == expected.of and expected.by in (None, each.vm):
            at = timeline.format_time(each.at)
            raise ExpectationFailed(f"{each.vm} approved {each.event} at {at}")
    if all(event.is_silent for event in timeline.get_events(expected.of)):
        raise ExpectationFailed(f"there was no event named {expected.of}")
    return "none came"


def describe_no_foreign_approval(expected: Expectation) -> str:
    who = f"{', '.join(expected.vms)} never" if expected.vms else "no VM"
    return f"{who} approves an event of other VMs"


def check_no_foreign_approval(expected: Expectation, timeline: Timeline) -> str:
    approvals = [each for each in timeline.approvals if not expected.vms or each.vm in expected.vms]
    for each in approvals:
        if each.vm not in each.event.resources:
            at = timeline.format_time(each.at)
            raise ExpectationFailed(
                f"{each.vm} approved {each.event} at {at}, which does not name it"
            )
    count = len({(each.vm, each.event.id) for each in approvals})
    return f"{count} approvals, each by a VM that the event names" if count else "no approvals"


def describe_order(expected: Expectation) -> str:
    of = f" of {expected.of}" if expected.of else ""
    return f"approvals{of} come in the order {', '.join(expected.vms)}"


def check_order(expected: Expectation, timeline: Timeline) -> str:
    remaining = list(expected.vms)
    for each in timeline.approvals:
        if expected.of not in ("", each.event.name) or each.vm not in remaining:
            continue
        if each.vm != remaining[0]:
            at = timeline.format_time(each.at)
            raise ExpectationFailed(
                f"{each.vm} approved {each.event} at {at}, before {remaining[0]}"
            )
        del remaining[0]
    if remaining:
        raise ExpectationFailed(f"{remaining[0]} never approved")
    return "they did"


def describe_one_at_a_time(expected: Expectation) -> str:
    return f"events of {expected.of} are Started one at a time"


def check_one_at_a_time(expected: Expectation, timeline: Timeline) -> str:
    started: dict[str, TrackedEvent] = {}
    for change in timeline.changes:
        event = change.event
        if event is None or event.name != expected.of:
            continue
        if change.what in ENDINGS:
            started.pop(event.id, None)
        if change.what == "started":
            for other in started.values():
                at = timeline.format_time(change.at)
                raise ExpectationFailed(
                    f"{event} was Started at {at}, while {other} was still Started"
                )
            started[event.id] = event
    return f"{len(_list_starts(expected, timeline))} starts"


def describe_together(expected: Expectation) -> str:
    return f"events of {expected.of} are Started together"


def check_together(expected: Expectation, timeline: Timeline) -> str:
    first_at, first = _list_starts(expected, timeline)[0]
    for at, event in _list_starts(expected, timeline):
        if at > first_at + timeline.limit("1s"):
            raise ExpectationFailed(
                f"{event} was Started at {timeline.format_time(at)},"
                f" but {first} at {timeline.format_time(first_at)}"
            )
    return f"{len(_list_starts(expected, timeline))} starts"


def _list_starts(expected: Expectation, timeline: Timeline) -> list[tuple[datetime, TrackedEvent]]:
    starts = [
        (change.at, change.event)
        for change in timeline.changes
        if change.what == "started" and change.event and change.event.name == expected.of
    ]
    if len(starts) < 2:
        raise ExpectationFailed(
            f"{len(starts)} events of {expected.of} were Started; expected two or more"
        )
    return starts


# --- requests of a VM


def describe_polls(expected: Expectation) -> str:
    return f"{expected.vm} polls at least every {expected.every}"


def check_polls(expected: Expectation, timeline: Timeline) -> str:
    left_at = next(
        (
            change.at
            for change in timeline.changes
            if change.what == "left" and change.vm == expected.vm
        ),
        timeline.end,
    )
    requests = timeline.requests[expected.vm]
    polls = [each.at for each in requests if each.is_poll and each.at <= left_at]
    last = timeline.start
    for at in [*polls, left_at]:
        if at > last + timeline.limit(expected.every):
            gap = f"{timeline.format_time(last)} to {timeline.format_time(at)}"
            raise ExpectationFailed(f"it did not poll from {gap}")
        last = at
    return f"{len(polls)} polls"


def describe_recovery(expected: Expectation) -> str:
    return f"{expected.vm} retries within {expected.within} until it gets a good response"


def check_recovery(expected: Expectation, timeline: Timeline) -> str:
    bad: ObservedRequest | None = None
    count = 0
    for each in timeline.requests[expected.vm]:
        if bad is not None and each.at > bad.at + timeline.limit(expected.within or "0s"):
            at = timeline.format_time(each.at)
            raise ExpectationFailed(
                f"it did not retry after {_describe_bad(bad, timeline)} until {at}"
            )
        bad = None if each.is_good else each
        count += not each.is_good
    if bad is not None:
        raise ExpectationFailed(f"it did not retry after {_describe_bad(bad, timeline)}")
    if not count:
        raise ExpectationFailed(f"{expected.vm} never got a bad response")
    return f"{count} bad responses, then good ones"


def _describe_bad(request: ObservedRequest, timeline: Timeline) -> str:
    response = f"the response {request.status}" if request.status else "the missing response"
    faults = f" ({', '.join(request.faults)})" if request.faults else ""
    return f"{response}{faults} at {timeline.format_time(request.at)}"


class ExpectationKind(NamedTuple):
    describe: Callable[[Expectation], str]
    check: Callable[[Expectation, Timeline], str]


KINDS = {
    "approval": ExpectationKind(describe_approval, check_approval),
    "no-approval": ExpectationKind(describe_no_approval, check_no_approval),
    "no-foreign-approval": ExpectationKind(describe_no_foreign_approval, check_no_foreign_approval),
    "order": ExpectationKind(describe_order, check_order),
    "document": ExpectationKind(describe_document, check_document),
    "event": ExpectationKind(describe_event, check_event),
    "one-at-a-time": ExpectationKind(describe_one_at_a_time, check_one_at_a_time),
    "together": ExpectationKind(describe_together, check_together),
    "polls": ExpectationKind(describe_polls, check_polls),
    "recovery": ExpectationKind(describe_recovery, check_recovery),
}
