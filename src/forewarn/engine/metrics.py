"""Counters and histograms of this server's own commits. Labels are bounded: no event ids."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from forewarn.core.change import ChangeKind
from forewarn.core.event import EventType
from forewarn.engine.board import Board
from forewarn.engine.entry import Entry

EVENT_CHANGES = (
    ChangeKind.SCHEDULED,
    ChangeKind.STARTED,
    ChangeKind.COMPLETED,
    ChangeKind.CANCELED,
    ChangeKind.FAILED,
)
IMPACT_RESULT = {ChangeKind.IMPACTED: "done", ChangeKind.IMPACT_FAILED: "failed"}
NOTICE_BOUNDS = (1, 5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 21_600, 86_400, 604_800)
OTHER_APPROVERS = ("operator", "policy")
STORE_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Histogram:
    """How many durations are up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus counts."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Metrics:
    """Counts since the server started. All begin at 0, so that the first increase is visible."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.events = Counter({(type_, what): 0 for type_ in EventType for what in EVENT_CHANGES})
        self.impacts = Counter(
            {(type_, result): 0 for type_ in EventType for result in IMPACT_RESULT.values()}
        )
        self.approvals = Counter(dict.fromkeys(("vm", *OTHER_APPROVERS), 0))
        self.notice = {type_: Histogram(NOTICE_BOUNDS) for type_ in EventType}
        self.approval = {type_: Histogram(NOTICE_BOUNDS) for type_ in EventType}
        self.store = Histogram(STORE_BOUNDS)
        self.conflicts = 0

    def count(self, entry: Entry) -> None:
        """Count a change that has been committed and published."""
        if entry.type is None:
            return
        found = self._board.find_event(entry.event)
        event = found[1] if found else None
        if entry.what in EVENT_CHANGES:
            self.events[entry.type, entry.what] += 1
        if entry.what in IMPACT_RESULT:
            self.impacts[entry.type, IMPACT_RESULT[entry.what]] += 1
        if entry.what is ChangeKind.STARTED and event is not None:
            self.notice[event.type].add((entry.at - event.created_at).total_seconds())
        if entry.what is ChangeKind.APPROVED:
            self.approvals["vm" if entry.vm else entry.detail] += 1
            if event is not None and event.approvals[:1] == (entry.detail,):
                self.approval[event.type].add((entry.at - event.created_at).total_seconds())
