"""The numbers of a run, and its report as Markdown."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from tests.chaos.checker import Violation
from tests.chaos.fleet import ANNOUNCER
from tests.chaos.history import (
    OPERATIONS,
    POLLS,
    VM_OPERATIONS,
    Call,
    Fault,
    HistoryEntry,
    Kind,
    Recording,
    Stage,
)

SETTLED_SECONDS = 2.0
"""How long before and after a change there must be no fault, for its propagation to count."""
WARM_UP_SECONDS = 5.0
"""At first the clients are only being started."""
WRITES = (*OPERATIONS, Kind.APPROVE, Kind.CANCEL, Kind.EXTEND)


class Lag(NamedTuple):
    """An operation on one server, and when another server showed its event."""

    call: Call
    server: str
    shown_at: float

    @property
    def since_request(self) -> float:
        return self.shown_at - self.call.asked_at

    @property
    def since_response(self) -> float:
        """0 if the other server was faster than the response."""
        return max(self.shown_at - self.call.answered_at, 0.0)


class Numbers(NamedTuple):
    """`quiet_seconds` and `stale_seconds` are the longest by fault; the key "" is no fault.

    `settled` are the lags in periods without faults. A server is stale from a change elsewhere
    until it shows it.
    """

    quiet_seconds: dict[str, float]
    stale_seconds: dict[str, float]
    settled: list[Lag]
    not_ready_seconds: dict[str, float]


def measure(recording: Recording) -> Numbers:
    lags = measure_lags(recording)
    stale: dict[str, float] = defaultdict(float)
    for lag in lags:
        name = fault_during(recording, lag.call.asked_at, lag.shown_at)
        stale[name] = max(stale[name], lag.since_response)
    return Numbers(
        quiet_seconds=measure_quiet(recording),
        stale_seconds=dict(stale),
        settled=[lag for lag in lags if is_settled(recording, lag)],
        not_ready_seconds=measure_not_ready(recording),
    )


def fault_during(recording: Recording, began_at: float, ended_at: float) -> str:
    """The fault that overlaps this time, the one that began last; "" if there is none."""
    names = [
        fault.name
        for fault in recording.run.faults
        if fault.began_at <= ended_at and fault.recovered_at >= began_at
    ]
    return names[-1] if names else ""


def is_settled(recording: Recording, lag: Lag) -> bool:
    began_at, ended_at = lag.call.asked_at - SETTLED_SECONDS, lag.shown_at + SETTLED_SECONDS
    is_warm = lag.call.asked_at >= recording.run.began_at + WARM_UP_SECONDS
    return is_warm and not fault_during(recording, began_at, ended_at)


def is_plain_poll(recording: Recording, call: Call) -> bool:
    """Whether it is a poll in a period without faults: it takes as long as the machine is busy."""
    return call.kind is Kind.POLL and not fault_during(recording, call.asked_at, call.answered_at)


def measure_quiet(recording: Recording) -> dict[str, float]:
    """The longest time between two acknowledged writes of any client, by fault."""
    times = sorted(
        call.answered_at for call in recording.calls if call.kind in WRITES and call.is_acknowledged
    )
    longest: dict[str, float] = defaultdict(float)
    for before, after in pairwise(times):
        name = fault_during(recording, before, after)
        longest[name] = max(longest[name], after - before)
    return dict(longest)


def measure_lags(recording: Recording) -> list[Lag]:
    """When each other server showed the change of an acknowledged operation, or a later one.

    Only for scopes that every server has a long poll for, which is repeated immediately. A server
    that was cut off may never show an event: then it has caught up with a later incarnation.
    """
    place: dict[str, tuple[str, int]] = {}
    shown: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in sorted(recording.calls, key=lambda call: call.answered_at):
        if call.kind is Kind.WAIT and call.view.startswith("bytes-"):
            shown[call.server, call.scope].append(call)
            for event in recording.views[call.view]:
                earliest = min(call.incarnation, place.get(event.id, ("", call.incarnation))[1])
                place[event.id] = (call.scope, earliest)
    lags = []
    for call in recording.calls:
        created = call.events if call.kind in OPERATIONS and call.is_acknowledged else ()
        others = [server for server in recording.run.servers if server != call.server]
        for event, server in product(created, others):
            scope, incarnation = place.get(event.id, ("", 0))
            calls = shown[server, scope]
            index = bisect_left(calls, incarnation, key=lambda call: call.incarnation)
            if index < len(calls):
                lags.append(Lag(call, server, calls[index].answered_at))
    return lags


def measure_not_ready(recording: Recording) -> dict[str, float]:
    """How long each server reported itself not ready, or did not respond at all."""
    total: dict[str, float] = dict.fromkeys(recording.run.servers, 0.0)
    for server in recording.run.servers:
        probes = [
            call for call in recording.calls if call.kind is Kind.READY and call.server == server
        ]
        for before, after in pairwise(probes):
            if not before.is_acknowledged:
                total[server] += after.asked_at - before.asked_at
    return total


def find_late(recording: Recording, fault: Fault) -> list[HistoryEntry]:
    """The events whose announcement failed during a fault, and was committed all the same."""
    calls = [call for call in recording.calls if call.client.endswith(ANNOUNCER)]
    known = {event.id for call in calls for event in call.events}
    failed = {
        (call.kind, call.vm)
        for call in calls
        if fault.began_at <= call.asked_at and call.answered_at <= fault.ended_at
        if not call.is_acknowledged and not call.is_refused
    }
    return [
        entry
        for entry in recording.entries
        if entry.what == "scheduled" and entry.cause in VM_OPERATIONS
        if fault.began_at <= entry.at <= fault.ended_at and entry.event not in known
        if (VM_OPERATIONS[entry.cause], entry.resources[0]) in failed
    ]


def quantiles(seconds: Iterable[float]) -> str:
    """The median, the 99th percentile and the maximum, in words."""
    values = sorted(seconds)
    if not values:
        return "not measured"
    shares = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
    found = {
        name: values[min(int(len(values) * share), len(values) - 1)]
        for name, share in shares.items()
    }
    return ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in found.items())


def render(recording: Recording, violations: Sequence[Violation]) -> str:
    """The report as Markdown."""
    run, numbers = recording.run, measure(recording)
    minutes = (run.ended_at - run.began_at) / 60
    settled, quiet = numbers.settled, numbers.quiet_seconds
    events = {entry.event for entry in recording.entries if entry.what == "scheduled"}
    done = Counter(
        (impact.event, impact.vm) for impact in recording.impacts if impact.stage is Stage.DONE
    )
    late = sum(len(find_late(recording, fault)) for fault in run.faults)
    calls = recording.calls
    writes = [call for call in calls if call.kind in WRITES]
    rows = {
        "polls and long polls": f"{sum(call.kind in POLLS for call in calls):,}",
        "operations, approvals, cancellations and extensions": f"{len(writes):,}",
        "of them acknowledged": f"{sum(call.is_acknowledged for call in writes):,}",
        "of them without a response, or with a 5xx": f"{count_lost(writes):,}",
        "events": f"{len(events):,}",
        "of them committed late: their announcement had failed": f"{late:,}",
        "impacts carried out": f"{len(done):,}",
        "of them more than once, after a fault": f"{sum(n > 1 for n in done.values()):,}",
        "changes timed on another server, without a fault": f"{len(settled):,}",
        "from the response to the document on another server": quantiles(
            lag.since_response for lag in settled
        ),
        "from the request to the document on another server": quantiles(
            lag.since_request for lag in settled
        ),
        "a poll of the same server, for comparison": quantiles(
            call.answered_at - call.asked_at for call in calls if is_plain_poll(recording, call)
        ),
        "longest time without a write": f"{max(quiet.values(), default=0):.1f} s",
        "longest time without a write, without a fault": f"{quiet.get('', 0):.1f} s",
    }
    rows |= {
        f"{server} not ready, in total": f"{seconds:.0f} s"
        for server, seconds in numbers.not_ready_seconds.items()
    }
    begin = f"{minutes:.1f} minutes, seed {run.seed}, faults: {len(run.faults)}"
    lines = [f"{begin}, broken promises: {len(violations)}", "", "| what | number |", "|---|---|"]
    lines += [f"| {what} | {number} |" for what, number in rows.items()]
    lines += ["", "| fault | times | until ready again | longest without writes | stale |"]
    lines += ["|---|---|---|---|---|"]
    for name in dict.fromkeys(fault.name for fault in run.faults):
        faults = [fault for fault in run.faults if fault.name == name]
        lines.append(
            f"| {name} | {len(faults)} | {longest_recovery(faults):.1f} s"
            f" | {quiet.get(name, 0):.1f} s"
            f" | {numbers.stale_seconds.get(name, 0):.1f} s |"
        )
    if violations:
        lines += ["", *(f"- {each.promise}: {each.detail}" for each in violations)]
    return "\n".join(lines) + "\n"


def count_lost(writes: Sequence[Call]) -> int:
    return sum(not call.status or call.status >= 500 for call in writes)


def longest_recovery(faults: Sequence[Fault]) -> float:
    """From the end of a fault until all servers were ready."""
    return max(fault.recovered_at - fault.ended_at for fault in faults)
