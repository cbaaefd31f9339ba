"""What to do about which events: rules, of which the first that matches wins. Pure.

A rule says what it is for (type, source, whom it hits, how long, how soon), the steps of each
phase, and when to approve.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from forewarn.agent.step import Phase, Step
from forewarn.client import Document, Event

UNKNOWN_DURATION = -1


class Concerns(StrEnum):
    """Whom the event hits: this VM, only others, whomever."""

    OWN = "own"
    PEER = "peer"
    ANY = "any"


class Approve(StrEnum):
    """When the event is approved. Quiet: no other VM of the scope is Started."""

    NEVER = "never"
    AT_ONCE = "at-once"
    WHEN_PREPARED = "when-prepared"
    WHEN_PREPARED_AND_LEADER = "when-prepared-and-leader"
    WHEN_PREPARED_AND_QUIET = "when-prepared-and-quiet"


class Leader(StrEnum):
    """Who leads: the first of Resources, or who holds the lease file."""

    FIRST = "first"
    LEASE = "lease"


class OnFailure(StrEnum):
    """After a step that failed or was cut: go on, or skip the rest of the phase and do not approve."""

    CONTINUE = "continue"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Bounds:
    """From `least` to `most`, both included; None is no bound."""

    least: float | None = None
    most: float | None = None

    @property
    def is_open(self) -> bool:
        return self.least is None and self.most is None

    def hold(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with its share of the time (`weight`), its own limit, and what its failure means."""

    step: Step
    weight: float = 1.0
    limit_seconds: float | None = None
    on_failure: OnFailure = OnFailure.CONTINUE


@dataclass(frozen=True, slots=True)
class Rule:
    """What is left empty matches everything.

    `hold` means never approved by us, whatever `approve` says.
    """

    name: str
    types: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    concerns: Concerns = Concerns.OWN
    duration_seconds: Bounds = Bounds()
    lead_seconds: Bounds = Bounds()
    scope: tuple[str, ...] = ()
    approve: Approve = Approve.NEVER
    leader: Leader = Leader.FIRST
    hold: bool = False
    applications: bool = True
    prepare: tuple[PlannedStep, ...] = ()
    start: tuple[PlannedStep, ...] = ()
    recover: tuple[PlannedStep, ...] = ()

    def steps(self, phase: Phase) -> tuple[PlannedStep, ...]:
        return {Phase.PREPARE: self.prepare, Phase.START: self.start, Phase.RECOVER: self.recover}[
            phase
        ]

    @property
    def may_approve(self) -> bool:
        return not self.hold and self.approve is not Approve.NEVER


def first_match(
    rules: Iterable[Rule], event: Event, *, name: str, lead_seconds: float
) -> Rule | None:
    """The rule for an event first seen `lead_seconds` before its NotBefore by the VM of this name."""
    return next(
        (rule for rule in rules if matches(rule, event, name=name, lead_seconds=lead_seconds)), None
    )


def matches(rule: Rule, event: Event, *, name: str, lead_seconds: float) -> bool:
    return (
        _is_among(event.type, rule.types)
        and _is_among(event.source, rule.sources)
        and _concerns(rule.concerns, event, name)
        and _lasts(rule.duration_seconds, event.duration_seconds)
        and rule.lead_seconds.hold(lead_seconds)
        and _is_of_scope(rule.scope, event)
    )


def is_first(event: Event, name: str) -> bool:
    """Whether this VM is the first of Resources, and so the leader that Azure's documents propose."""
    return any(_is_own(shown, name) for shown in event.resources[:1])


def is_quiet(document: Document, name: str) -> bool:
    """Whether no event that has Started hits another VM than this one."""
    started = (event for event in document.events if event.is_started)
    return all(_is_own(shown, name) for event in started for shown in event.resources)


def _is_own(shown: str, name: str) -> bool:
    return Event("", "", "", resources=(shown,)).concerns(name)


def _is_among(value: str, wanted: tuple[str, ...]) -> bool:
    return not wanted or value.casefold() in {one.casefold() for one in wanted}


def _concerns(wanted: Concerns, event: Event, name: str) -> bool:
    return wanted is Concerns.ANY or event.concerns(name) == (wanted is Concerns.OWN)


def _lasts(bounds: Bounds, seconds: int) -> bool:
    """A duration that nobody knows is within no bounds."""
    return bounds.is_open or (seconds > UNKNOWN_DURATION and bounds.hold(seconds))


def _is_of_scope(patterns: tuple[str, ...], event: Event) -> bool:
    names = [shown.casefold().removeprefix("_") for shown in event.resources]
    return not patterns or any(
        fnmatchcase(name, pattern.casefold()) for name in names for pattern in patterns
    )
