"""What a recording says about the promises of the service. A pure function.

It never believes a server about time: an event counts as started when a client saw it Started, or
when the platform's command ran for it. A response that was lost counts as "may have happened, or
may still happen"; everything else counts.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.history import (
    OPERATIONS,
    POLLS,
    VM_OPERATIONS,
    Call,
    HistoryEntry,
    Kind,
    Recording,
    Shown,
    Stage,
)

ENDS = ("completed", "canceled", "failed")
STARTED = "Started"
CLOCK_ERROR_SECONDS_MAX = 1.0
SHOWN_LATE_SECONDS_MAX = 3.0
"""How late a server of a busy machine may show what another has committed. Outages take longer."""
UNREAD_SECONDS = 8.0
"""If there are dozens of polls a second and none is answered for so long with what was committed,
guests could not read anything. The machine may be busy, so this is longer than what the servers
count.
"""


class Promise(StrEnum):
    """What can be broken."""

    KEPT = "an acknowledged command is never lost"
    NOTICE = "no event starts before its NotBefore without approval"
    READ = "an event starts by time only after guests could read it for its notice"
    DONE = "every impact is carried out at least once"
    RECORDED_ONCE = "every impact is recorded exactly once"
    NEVER_FALLS = "incarnations never fall for a client that stays with one server"
    SAME_BYTES = "one incarnation of a scope is the same document on all servers"
    CONVERGED = "all servers end with the same documents, without events"
    AT_MOST_ONCE = "an operation happens at most once"


class Violation(NamedTuple):
    promise: Promise
    detail: str


def check(recording: Recording) -> list[Violation]:
    """Every broken promise, in the order of `Promise`."""
    facts = Facts(recording)
    rules: tuple[Callable[[Facts], Iterator[Violation]], ...] = (
        check_kept,
        check_notice,
        check_read,
        check_impacts,
        check_incarnations,
        check_bytes,
        check_convergence,
        check_at_most_once,
    )
    return [violation for rule in rules for violation in rule(facts)]


class Facts:
    """A recording, arranged by event."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.entries: dict[str, list[HistoryEntry]] = defaultdict(list)
        for entry in recording.entries:
            if entry.event:
                self.entries[entry.event].append(entry)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        for call in recording.calls:
            if call.kind not in POLLS:
                for event in call.events:
                    self.calls[event.id].append(call)
        faults = recording.run.faults
        self.skew_seconds = max((abs(fault.clock_seconds) for fault in faults), default=0.0)

    def clock_error_seconds(self, call: Call) -> float:
        """How wrong a server may be about the time of the others.

        One whose own clock is wrong knows theirs only as they arrive over the store.
        """
        is_wrong = any(
            fault.clock_seconds
            and fault.target == call.server
            and fault.began_at <= call.answered_at <= fault.recovered_at
            for fault in self.recording.run.faults
        )
        return CLOCK_ERROR_SECONDS_MAX if is_wrong else 0.0

    def has(self, event: str, what: str) -> bool:
        return any(entry.what == what for entry in self.entries.get(event, ()))

    def scheduled(self) -> Iterator[HistoryEntry]:
        return (entry for entry in self.recording.entries if entry.what == "scheduled")


# --- acknowledged commands


def check_kept(facts: Facts) -> Iterator[Violation]:
    """Every acknowledged command is in the history, and every event came to the right end."""
    for call in facts.recording.calls:
        if call.is_acknowledged:
            for event in call.events:
                problem = problem_of(facts, call, event)
                if problem:
                    yield Violation(Promise.KEPT, f"{describe(call, event.id)}: {problem}")
    for event_id, entries in facts.entries.items():
        ends = [entry.what for entry in entries if entry.what in ENDS]
        if len(ends) != 1:
            was = ", ".join(ends) or "has not ended"
            yield Violation(Promise.KEPT, f"event {event_id} {was}; expected one end")
        if "canceled" in ends and not any(
            call.kind is Kind.CANCEL and not call.is_refused for call in facts.calls[event_id]
        ):
            yield Violation(Promise.KEPT, f"event {event_id} was canceled, but not by a client")


def problem_of(facts: Facts, call: Call, event: Shown) -> str:
    """What the history lacks of an acknowledged command; empty if nothing."""
    if call.kind in OPERATIONS and not facts.has(event.id, "scheduled"):
        return "the history has no such event"
    if call.kind is Kind.CANCEL and not facts.has(event.id, "canceled"):
        return "the event was not canceled"
    entries = facts.entries.get(event.id, ())
    if call.kind is Kind.EXTEND and not any(
        entry.what == "extended" and entry.not_before >= call.not_before for entry in entries
    ):
        return "the event was not extended"
    if call.kind is Kind.APPROVE:
        over_by = call.answered_at + facts.skew_seconds
        is_kept = any(entry.what == "approved" and entry.vm == call.vm for entry in entries)
        # After the start an approval changes nothing, and is not recorded.
        was_over = any(
            entry.what in ("started", *ENDS) and entry.at <= over_by for entry in entries
        )
        if not is_kept and not was_over:
            return f"no approval by {call.vm or 'an operator'} is recorded"
    return ""


def describe(call: Call, event_id: str) -> str:
    subject = call.vm or call.scope
    return f"{call.client} {call.kind} {subject} at {call.asked_at:.3f}, event {event_id}"


# --- notice


def check_notice(facts: Facts) -> Iterator[Violation]:
    """Events start at NotBefore, or when the approvals that were sent by then suffice."""
    promised = latest_not_before(facts)
    for event_id, (at, source) in sorted(first_starts(facts).items()):
        not_before = promised.get(event_id, 0.0)
        if at < not_before and not may_start_early(facts, event_id, at):
            yield Violation(
                Promise.NOTICE,
                f"event {event_id} {source} {not_before - at:.3f} s before NotBefore at {at:.3f}",
            )
    asked_at: dict[str, float] = {}  # of the first try, where an operation was repeated
    for call in facts.recording.calls:
        first_at = asked_at.setdefault(call.key, call.asked_at) if call.key else call.asked_at
        notice = facts.recording.run.notice_seconds.get(call.kind, 0.0)
        for event in call.events if call.is_acknowledged and call.kind in OPERATIONS else ():
            given = event.not_before - first_at
            if given < notice - facts.clock_error_seconds(call):
                yield Violation(
                    Promise.NOTICE,
                    f"{describe(call, event.id)}: {given:.3f} s of notice, not {notice:g} s",
                )


def latest_not_before(facts: Facts) -> dict[str, float]:
    """The latest NotBefore that each event was seen with: it only ever moves later."""
    promised: dict[str, float] = defaultdict(float)
    for shown in all_shown(facts.recording):
        promised[shown.id] = max(promised[shown.id], shown.not_before)
    for entry in facts.recording.entries:
        promised[entry.event] = max(promised[entry.event], entry.not_before)
    return promised


def all_shown(recording: Recording) -> Iterator[Shown]:
    for view in recording.views.values():
        yield from view
    for call in recording.calls:
        yield from call.events if call.is_acknowledged else ()


def first_starts(facts: Facts) -> dict[str, tuple[float, str]]:
    """When each event is first known to have started, and from what."""
    starts: dict[str, tuple[float, str]] = {}

    def learn(event_id: str, at: float, source: str) -> None:
        if at < starts.get(event_id, (float("inf"), ""))[0]:
            starts[event_id] = (at, source)

    for call in facts.recording.calls:
        shown = facts.recording.views[call.view] if call.view else ()
        for event in (*shown, *call.events):
            if event.status == STARTED and (call.kind in POLLS or call.is_acknowledged):
                learn(event.id, call.answered_at, f"was Started on {call.server}")
    for impact in facts.recording.impacts:
        learn(impact.event, impact.at, f"was carried out on {impact.vm} by {impact.server}")
    return starts


def may_start_early(facts: Facts, event_id: str, at: float) -> bool:
    """Whether the approvals sent by then are enough for the policy.

    An approval that was refused changed nothing; any other may have been committed.
    """
    sent = [
        call
        for call in facts.calls[event_id]
        if call.kind is Kind.APPROVE and call.asked_at <= at and not call.is_refused
    ]
    if any(not call.vm for call in sent):
        return True  # an operator's is enough
    members = next((facts.recording.run.fleet[call.scope] for call in sent if call.scope), None)
    if members is None:
        return False
    votes = len({call.vm for call in sent} & set(members.vms))
    needed = {"any": 1, "quorum": len(members.vms) // 2 + 1, "all": len(members.vms)}
    return votes >= needed[members.approval]


def check_read(facts: Facts) -> Iterator[Violation]:
    """The notice as guests saw it: from the last document without the event until its start.

    Times in which no guest got an answer do not count, and neither do times in which all answers
    have an Age. An outage concerns all scopes, and one scope may not be polled for seconds when the
    machine is busy.
    """
    polls, starts = polls_by_scope(facts.recording), first_starts(facts)
    confirmed = sorted(call.answered_at for call in facts.recording.calls if call.is_confirmed_read)
    promised = latest_not_before(facts)
    for entry in facts.scheduled():
        at, _ = starts.get(entry.event, (0.0, ""))
        notice = facts.recording.run.notice_seconds.get(kind_of(entry), 0.0)
        if at < promised[entry.event] or may_start_early(facts, entry.event, at):
            continue  # it has not started, or `check_notice` judges it
        since = last_without(facts.recording, polls[entry.scope], entry.event, at)
        read = read_seconds(confirmed, since, at)
        if read < notice - SHOWN_LATE_SECONDS_MAX:
            yield Violation(
                Promise.READ,
                f"event {entry.event} started at {at:.3f}; guests could read it for {read:.3f} s,"
                f" not {notice:g} s",
            )


def polls_by_scope(recording: Recording) -> dict[str, list[Call]]:
    """The polls of each scope that were answered, in the order of their answers."""
    polls: dict[str, list[Call]] = defaultdict(list)
    for call in sorted(recording.calls, key=lambda call: call.answered_at):
        if call.is_poll_response:
            polls[call.scope].append(call)
    return polls


def kind_of(entry: HistoryEntry) -> str:
    """The operation that has announced an event."""
    return VM_OPERATIONS.get(entry.cause, Kind.MAINTAIN)


def last_without(recording: Recording, polls: Sequence[Call], event_id: str, at: float) -> float:
    """When the last document without an event was asked for, before any guest saw the event.

    With the benefit of the doubt: it may have appeared right after that.
    """
    since = 0.0
    for call in polls:
        shown = recording.views[call.view] if call.view else None
        if shown is None:
            continue
        if call.answered_at > at or any(event.id == event_id for event in shown):
            break
        since = max(since, call.asked_at)
    return since


def read_seconds(confirmed: Sequence[float], since: float, at: float) -> float:
    """For how long guests could read between two times, given all confirmed reads."""
    between = confirmed[bisect_right(confirmed, since) : bisect_left(confirmed, at)]
    steps = pairwise([since, *between, at])
    return sum(later - before for before, later in steps if later - before < UNREAD_SECONDS)


# --- impacts


def check_impacts(facts: Facts) -> Iterator[Violation]:
    """Each VM of a completed event was impacted, by the command and once in the history."""
    done = {
        (impact.event, impact.vm)
        for impact in facts.recording.impacts
        if impact.stage is Stage.DONE
    }
    recorded: dict[tuple[str, str], int] = defaultdict(int)
    for entry in facts.recording.entries:
        if entry.what == "impacted":
            recorded[entry.event, entry.vm] += 1
    due = set(done) | set(recorded)
    for entry in facts.scheduled():
        if facts.has(entry.event, "completed"):
            due |= {(entry.event, vm) for vm in entry.resources}
        if facts.has(entry.event, "failed"):
            yield Violation(Promise.DONE, f"event {entry.event} failed, but no command did")
    for event_id, vm in sorted(due):
        times = recorded[event_id, vm]
        if (event_id, vm) not in done:
            yield Violation(Promise.DONE, f"event {event_id} on {vm}: no command was finished")
        if times != 1:
            yield Violation(
                Promise.RECORDED_ONCE, f"event {event_id} on {vm} is recorded {times} times"
            )


# --- documents


def check_incarnations(facts: Facts) -> Iterator[Violation]:
    highest: dict[tuple[str, str, str], int] = defaultdict(int)
    for call in facts.recording.calls:
        if call.kind not in POLLS or not call.incarnation:
            continue
        key = (call.client, call.server, call.scope)
        if call.incarnation < highest[key]:
            yield Violation(
                Promise.NEVER_FALLS,
                f"{call.client} saw {call.scope} fall from {highest[key]} to {call.incarnation}"
                f" on {call.server} at {call.answered_at:.3f}",
            )
        highest[key] = max(highest[key], call.incarnation)


def check_bytes(facts: Facts) -> Iterator[Violation]:
    """One incarnation has one view of each kind (bytes, or as our client understands them)."""
    views: dict[tuple[str, int, str], dict[str, Call]] = defaultdict(dict)
    for call in facts.recording.calls:
        if call.view:
            kind = call.view.partition("-")[0]
            views[call.scope, call.incarnation, kind].setdefault(call.view, call)
    for (scope, incarnation, _), found in sorted(views.items()):
        if len(found) > 1:
            seen = ", ".join(f"{call.server} at {call.answered_at:.3f}" for call in found.values())
            yield Violation(
                Promise.SAME_BYTES, f"{scope} {incarnation} is {len(found)} documents: {seen}"
            )


def check_convergence(facts: Facts) -> Iterator[Violation]:
    """The last document of each scope, as each server showed it after the load."""
    run = facts.recording.run
    last = {
        (call.scope, call.server): (call.incarnation, call.view)
        for call in facts.recording.calls
        if call.kind is Kind.FINAL
    }
    for scope in run.fleet:
        found = {server: last.get((scope, server), (0, "")) for server in run.servers}
        if len(set(found.values())) > 1 or (0, "") in found.values():
            shown = ", ".join(f"{server} {number}" for server, (number, _) in found.items())
            yield Violation(Promise.CONVERGED, f"{scope} is at different documents: {shown}")
        for server, (_, view) in found.items():
            if view and facts.recording.views[view]:
                ids = ", ".join(event.id for event in facts.recording.views[view])
                yield Violation(Promise.CONVERGED, f"{scope} on {server} still shows {ids}")


# --- operations


def check_at_most_once(facts: Facts) -> Iterator[Violation]:
    """Each event belongs to one operation, and each operation has at most one event of a place.

    An event that no acknowledged operation names must belong to one whose response was lost, and
    that was sent before the event existed.
    """
    yield from check_maintenance(facts)
    operations = operations_by_subject(facts.recording.calls)
    events: dict[tuple[str, str], list[HistoryEntry]] = defaultdict(list)
    for entry in facts.scheduled():
        if entry.cause in VM_OPERATIONS:
            events[VM_OPERATIONS[entry.cause], entry.resources[0]].append(entry)
    for subject, found in sorted(events.items()):
        asked = operations.get(subject, [])
        named = {event.id for calls in asked for call in calls for event in call.events}
        lost = [calls for calls in asked if not any(call.events for call in calls)]
        for entry in sorted(found, key=lambda entry: entry.at):
            if entry.event in named:
                continue
            sent_by = entry.at + facts.skew_seconds
            cause = next((calls for calls in lost if calls[0].asked_at <= sent_by), None)
            if cause is None:
                yield Violation(
                    Promise.AT_MOST_ONCE,
                    f"event {entry.event} ({' '.join(subject)}) was not asked for",
                )
            else:
                lost.remove(cause)
        for calls in asked:
            ids = {event.id for call in calls for event in call.events}
            if len(ids) > 1:
                yield Violation(
                    Promise.AT_MOST_ONCE, f"{describe(calls[0], ', '.join(sorted(ids)))}"
                )


def operations_by_subject(calls: Iterable[Call]) -> dict[tuple[str, str], list[list[Call]]]:
    """The operations on each VM that were not refused; repeated ones are one."""
    operations: dict[tuple[str, str], dict[str, list[Call]]] = defaultdict(dict)
    for number, call in enumerate(calls):
        if call.kind in VM_OPERATIONS.values() and not call.is_refused:
            key = call.key or f"call {number}"
            operations[call.kind, call.vm].setdefault(key, []).append(call)
    return {subject: list(by_key.values()) for subject, by_key in operations.items()}


def check_maintenance(facts: Facts) -> Iterator[Violation]:
    """The description tells which operation a maintenance event is of."""
    places: dict[tuple[str, str], int] = defaultdict(int)
    for entry in facts.scheduled():
        for vm in entry.resources if entry.cause == "maintenance" else ():
            places[entry.description, vm] += 1
    asked = {call.text for call in facts.recording.calls if call.kind is Kind.MAINTAIN}
    for (text, vm), count in sorted(places.items()):
        if count > 1 or text not in asked:
            problem = f"maintenance {text!r} of {vm} was scheduled {count} times"
            yield Violation(Promise.AT_MOST_ONCE, problem)


def summarize(violations: Sequence[Violation]) -> dict[Promise, int]:
    """How often each promise was broken."""
    counts: dict[Promise, int] = defaultdict(int)
    for violation in violations:
        counts[violation.promise] += 1
    return dict(counts)
