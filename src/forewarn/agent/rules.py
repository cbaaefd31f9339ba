"""Rules: which events they match, their steps, when they approve, and how time is shared. Pure.

The first rule that matches an event applies to it. Its fields are the keys of `[[rule]]` in the
configuration file.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated

from forewarn.agent.config_reader import (
    Key,
    SettingError,
    checked,
    names,
    non_empty,
    number,
    read,
    settings_of,
    tables,
)
from forewarn.agent.steps import KINDS, make_step
from forewarn.agent.steps.base import ReversibleStep, Step, WorkflowPhase
from forewarn.client import Document, Event
from forewarn.errors import Invalid

TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
DELETING_TYPES = {"preempt", "terminate"}
SOURCES = ("Platform", "User")
STEPS_MAX = 64
LIMIT_SECONDS_MAX = 7 * 24 * 3600


class Concerns(StrEnum):
    """Which VMs the event affects: this VM, only others, any."""

    OWN = "own"
    PEER = "peer"
    ANY = "any"


class ApproveWhen(StrEnum):
    """When the event is approved. Quiet: no other VM of the scope has a Started event."""

    NEVER = "never"
    AT_ONCE = "at-once"
    WHEN_PREPARED = "when-prepared"
    WHEN_PREPARED_AND_LEADER = "when-prepared-and-leader"
    WHEN_PREPARED_AND_QUIET = "when-prepared-and-quiet"


class OnFailure(StrEnum):
    """After a step that failed or was cut: continue, or skip the rest of the phase and do not
    approve.
    """

    CONTINUE = "continue"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Bounds:
    """From `least` to `most`, both included."""

    least: Annotated[float, Key("min"), number(0)] = 0.0
    most: Annotated[float, Key("max"), number(0)] = math.inf

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise SettingError("", "a min that is not above its max")

    def contain(self, value: float) -> bool:
        return self.least <= value <= self.most


ANY = Bounds()


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, its share of the time (`weight`), its own limit, and what its failure means."""

    step: Annotated[Step, lambda step, path: step]
    weight: Annotated[float, number(0.01, 1000)] = 1.0
    limit_seconds: Annotated[float | None, number(0.1, LIMIT_SECONDS_MAX)] = None
    on_failure: OnFailure = OnFailure.CONTINUE

    @classmethod
    def from_table(cls, table: Mapping[str, object], path: str) -> "PlannedStep":
        """A table with the options and one more key, the kind of step."""
        kinds = [key for key in table if key == "step" or key not in settings_of(PlannedStep)]
        if len(kinds) != 1:
            got = ", ".join(kinds) or "none"
            expected = f"one kind of step ({', '.join(KINDS)})"
            raise Invalid(f"{path}: expected {expected}, got {got}", field=path)
        options = dict(table)
        step = make_step(kinds[0], options.pop(kinds[0]), f"{path}.{kinds[0]}")
        return read(cls, {**options, "step": step}, path)


Steps = Annotated[tuple[PlannedStep, ...], tables(PlannedStep.from_table, STEPS_MAX)]


@dataclass(frozen=True, slots=True)
class Rule:
    """An empty condition matches everything. `hold`: this agent never approves the event, whatever
    `approve` says.
    """

    name: Annotated[str, non_empty("a unique name")]
    types: Annotated[tuple[str, ...], names(f"a list of {', '.join(TYPES)}", among=TYPES)] = ()
    sources: Annotated[tuple[str, ...], names("a list of Platform, User", among=SOURCES)] = ()
    concerns: Concerns = Concerns.OWN
    duration_seconds: Bounds = ANY
    lead_seconds: Bounds = ANY
    scope: tuple[str, ...] = ()
    approve: ApproveWhen = ApproveWhen.NEVER
    leader: Annotated[str, checked("'first'", lambda value: value == "first")] = "first"
    hold: bool = False
    applications: bool = True
    prepare: Steps = ()
    start: Steps = ()
    recover: Steps = ()

    def __post_init__(self) -> None:
        """A recover step that is for another target undoes nothing: the node would stay cordoned.

        One that may be for the same target is only warned of, as `left_changed`.
        """
        changed = (*self._reversible(WorkflowPhase.PREPARE), *self._reversible(WorkflowPhase.START))
        for step in self._reversible(WorkflowPhase.RECOVER):
            if changed and all(step.is_for_another(each) for each in changed):
                target = min(each.target() for each in changed)
                raise SettingError("recover", f"the same target as in prepare or start, {target}")

    @property
    def left_changed(self) -> tuple[str, ...]:
        """What prepare or start changes and recover does not change back. A VM that is deleted
        never recovers.
        """
        if self.types and not {*map(str.casefold, self.types)} - DELETING_TYPES:
            return ()
        changed = self._targets(WorkflowPhase.PREPARE) | self._targets(WorkflowPhase.START)
        return tuple(sorted(changed - self._targets(WorkflowPhase.RECOVER)))

    def _targets(self, phase: WorkflowPhase) -> set[str]:
        return {step.target() for step in self._reversible(phase)}

    def _reversible(self, phase: WorkflowPhase) -> list[ReversibleStep]:
        steps = (planned.step for planned in self.steps(phase))
        return [step for step in steps if isinstance(step, ReversibleStep)]

    def steps(self, phase: WorkflowPhase) -> tuple[PlannedStep, ...]:
        steps: tuple[PlannedStep, ...] = getattr(self, phase)
        return steps

    @property
    def may_approve(self) -> bool:
        return not self.hold and self.approve is not ApproveWhen.NEVER


def first_match(
    rules: Iterable[Rule], event: Event, *, vm: str, lead_seconds: float
) -> Rule | None:
    """The rule for an event first seen `lead_seconds` before its NotBefore by this VM."""
    matching = (rule for rule in rules if matches(rule, event, vm=vm, lead_seconds=lead_seconds))
    return next(matching, None)


def matches(rule: Rule, event: Event, *, vm: str, lead_seconds: float) -> bool:
    return (
        _is_among(event.type, rule.types)
        and _is_among(event.source, rule.sources)
        and rule.concerns in (Concerns.ANY, Concerns.OWN if event.concerns(vm) else Concerns.PEER)
        # An unknown duration is -1, which no bounds contain.
        and (rule.duration_seconds == ANY or rule.duration_seconds.contain(event.duration_seconds))
        and rule.lead_seconds.contain(lead_seconds)
        and _is_in_scope(rule.scope, event)
    )


def is_first(event: Event, vm: str) -> bool:
    """Whether this VM is the first of Resources: the leader that Azure's documentation proposes."""
    return any(_is_same_vm(name, vm) for name in event.resources[:1])


def is_quiet(document: Document, vm: str) -> bool:
    """Whether no Started event affects a VM other than this one."""
    started = (event for event in document.events if event.is_started)
    return all(_is_same_vm(name, vm) for event in started for name in event.resources)


def seconds_to_not_before(event: Event, now: datetime) -> float:
    """At least 0. An event without NotBefore may start at any time."""
    return 0.0 if event.not_before is None else max(0.0, (event.not_before - now).total_seconds())


def _is_same_vm(name: str, vm: str) -> bool:
    return Event("", "", "", resources=(name,)).concerns(vm)


def _is_among(value: str, accepted: tuple[str, ...]) -> bool:
    return not accepted or value.casefold() in {name.casefold() for name in accepted}


def _is_in_scope(patterns: tuple[str, ...], event: Event) -> bool:
    names = [name.casefold().removeprefix("_") for name in event.resources]
    return not patterns or any(
        fnmatchcase(name, pattern.casefold()) for name in names for pattern in patterns
    )


# How long each step may take.
#
# The time to NotBefore, less a reserve for the approval, is shared among the remaining steps by
# weight. Time that a step does not use goes to the steps after it. No step gets less than
# STEP_SECONDS_MIN: when time is short, the first steps run and the last ones are cut. Start and
# recover have no deadline; there each step has its own limit, or DEFAULT_LIMIT_SECONDS.

STEP_SECONDS_MIN = 0.5
DEFAULT_LIMIT_SECONDS = 300.0
RESERVE_SHARE = 0.1
RESERVE_SECONDS_MAX = 5.0


def prepare_deadline(not_before: float, now: float) -> float:
    """When the steps must be done, so that the event can be approved before it may start."""
    reserve = min(RESERVE_SHARE * max(0.0, not_before - now), RESERVE_SECONDS_MAX)
    return not_before - reserve


def seconds_for_step(
    deadline: float, weights_left: Sequence[float], limit_seconds: float | None, now: float
) -> float:
    """How long the first of the remaining steps may take. 0: it is cut. A phase without a deadline
    has an infinite one.
    """
    left = deadline - now
    if left == math.inf:
        return DEFAULT_LIMIT_SECONDS if limit_seconds is None else limit_seconds
    if left < STEP_SECONDS_MIN:
        return 0.0
    share = max(STEP_SECONDS_MIN, min(left, left * weights_left[0] / sum(weights_left)))
    return share if limit_seconds is None else min(share, limit_seconds)
