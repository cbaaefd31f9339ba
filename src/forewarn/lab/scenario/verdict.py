"""Verdicts: whether an expectation holds, and whether that can still change.

While the run goes on, an expectation is OPEN until nothing that may still happen changes its
verdict. The run may end when all are decided:

    OPEN -> PASSED or FAILED
    OPEN -> NOT REACHED      the run was cut short, or what creates its events did not happen
"""

from abc import abstractmethod
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

import msgspec

from forewarn.lab.scenario.timeline import Timeline
from forewarn.lab.transcript import Transcript


class VerdictOutcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_REACHED = "not reached"


class ScenarioVerdict(NamedTuple):
    """`seconds` is the scenario's time when it was decided. It may change until `open_until`."""

    expected: str
    reason: str
    outcome: VerdictOutcome
    seconds: float = 0.0
    open_until: datetime | None = None

    @property
    def is_passed(self) -> bool:
        return self.outcome is VerdictOutcome.PASSED


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """`ending` is how it ended, as a sentence; `skipped` are the steps that were not reached."""

    verdicts: tuple[ScenarioVerdict, ...]
    transcript: Transcript
    timeline: Timeline
    ending: str
    is_interrupted: bool
    skipped: tuple[str, ...]

    @property
    def is_passed(self) -> bool:
        return all(verdict.is_passed for verdict in self.verdicts)


class Unmet(Exception):
    """The expectation does not hold, for this reason; until `open_until` that may change."""

    def __init__(self, reason: str, open_until: datetime | None = None) -> None:
        super().__init__(reason)
        self.open_until = open_until


class AnyExpectation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="expect"
):
    """Each kind has its sentence, its check, and how long it has to hold."""

    @abstractmethod
    def describe(self) -> str:
        """Return what is expected, as a sentence."""

    @abstractmethod
    def check(self, timeline: Timeline) -> str:
        """Return what happened, or raise Unmet. A pure function of the timeline."""

    @property
    def subject(self) -> str | None:
        """The name of the events that it is about; None for all."""
        return getattr(self, "of", None)

    def may_break(self, timeline: Timeline) -> bool:
        """Return whether it may still be broken if it holds now, and no event will come."""
        return not timeline.is_settled(self.subject)


def judge(expectation: AnyExpectation, timeline: Timeline) -> ScenarioVerdict:
    """Return the verdict if the run ended now."""
    try:
        reason, outcome = expectation.check(timeline), VerdictOutcome.PASSED
        open_until = timeline.planned_end if expectation.may_break(timeline) else None
    except Unmet as unmet:
        reason, outcome, open_until = str(unmet), VerdictOutcome.FAILED, unmet.open_until
    name = expectation.subject
    is_coming = name is not None and timeline.may_come(name)
    if is_coming:
        open_until = timeline.planned_end
    if open_until is not None and timeline.end > open_until:
        open_until = None
    if is_coming or (timeline.is_cut and open_until):
        outcome = VerdictOutcome.NOT_REACHED
    if is_coming and not timeline.get_events(name or ""):
        reason = "the step did not run"
    return ScenarioVerdict(expectation.describe(), reason, outcome, timeline.seconds, open_until)
