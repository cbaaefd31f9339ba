"""How far the workflow of one event has come: a pure fold of the journal's entries, and the fewest
entries that fold to the same.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event

TEXT_BYTES_MAX = 4096

Facts = Mapping[str, object]
StepKey = tuple[WorkflowPhase, int]
"""A step of a rule: its phase, and its index there."""


class EntryKind(StrEnum):
    """What a journal entry records.

    Written before the agent acts on it (begun, approving), or as soon as it is known.
    """

    SEEN = "seen"
    BEGUN = "begun"
    STEP_BEGUN = "step-begun"
    STEP_DONE = "step-done"
    STEP_FAILED = "step-failed"
    STEP_CUT = "step-cut"
    ENDED = "ended"
    LATE = "late"
    APPROVING = "approving"
    APPROVED = "approved"
    FINISHED = "finished"


MARKS = (EntryKind.LATE, EntryKind.APPROVING, EntryKind.APPROVED, EntryKind.FINISHED)


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known about one event.

    `steps` has the last entry of each step, `durations` the seconds of those that were done, and
    `step_names` their descriptions: the configuration may change before the next start. A phase in
    `stopped` was ended by a failed step. `resources` are those first seen: an event loses names
    over time, and recover is for all of them.
    """

    event: Event
    rule: str
    begun: frozenset[WorkflowPhase] = frozenset()
    ended: frozenset[WorkflowPhase] = frozenset()
    stopped: frozenset[WorkflowPhase] = frozenset()
    steps: Mapping[StepKey, EntryKind] = field(default_factory=dict)
    durations: Mapping[StepKey, float] = field(default_factory=dict)
    marks: frozenset[EntryKind] = frozenset()
    resources: tuple[str, ...] = ()
    step_names: Mapping[StepKey, str] = field(default_factory=dict)

    def is_step_over(self, phase: WorkflowPhase, index: int, name: str) -> bool:
        """A step that began and has no end recorded is in doubt, and runs again."""
        if self.step_names.get((phase, index), name) != name:
            return False
        return self.steps.get((phase, index), EntryKind.STEP_BEGUN) is not EntryKind.STEP_BEGUN

    def has_step_failed(self, phase: WorkflowPhase, index: int) -> bool:
        return self.steps.get((phase, index)) in (EntryKind.STEP_FAILED, EntryKind.STEP_CUT)

    @property
    def is_prepared(self) -> bool:
        """Whether everything is done that an approval waits for."""
        return WorkflowPhase.PREPARE in self.ended and WorkflowPhase.PREPARE not in self.stopped

    @property
    def is_finished(self) -> bool:
        return EntryKind.FINISHED in self.marks

    @property
    def is_done(self) -> bool:
        """Whether the event is over, and recovered from if anything had begun."""
        return self.is_finished and (not self.begun or WorkflowPhase.RECOVER in self.ended)

    @property
    def original_event(self) -> Event:
        """The event with the resources first seen."""
        return replace(self.event, resources=self.resources)


def fold(progress: Progress | None, kind: EntryKind, facts: Facts) -> Progress:
    """The progress after one more entry. A repeated entry changes nothing.

    Raises ValueError for an entry that is not valid.
    """
    if kind is EntryKind.SEEN:
        event, rule = parse_event(facts.get("event")), _text(facts, "rule")
        if progress is not None:
            return replace(progress, event=event)
        return Progress(event, rule, resources=_resources(facts, event))
    if progress is None:
        raise ValueError(f"{kind} for an event that was never seen")
    if kind in MARKS:
        return replace(progress, marks=progress.marks | {kind})
    phase = WorkflowPhase(_text(facts, "phase"))
    if kind is EntryKind.BEGUN:
        return replace(progress, begun=progress.begun | {phase})
    if kind is EntryKind.ENDED:
        stopped = progress.stopped | ({phase} if facts.get("is_stopped") is True else set())
        return replace(progress, ended=progress.ended | {phase}, stopped=stopped)
    return _fold_step(progress, kind, phase, facts)


def _fold_step(progress: Progress, kind: EntryKind, phase: WorkflowPhase, facts: Facts) -> Progress:
    index, name, seconds = facts.get("index"), facts.get("step"), facts.get("seconds")
    if not isinstance(index, int):
        raise ValueError(f"index is {index!r}; expected a whole number")
    key = (phase, index)
    durations, step_names = dict(progress.durations), dict(progress.step_names)
    if isinstance(seconds, int | float):
        if not math.isfinite(seconds):
            raise ValueError(f"seconds is {seconds!r}; expected a finite number")
        durations[key] = float(seconds)
    if isinstance(name, str):
        step_names[key] = name
    steps = {**progress.steps, key: kind}
    return replace(progress, steps=steps, durations=durations, step_names=step_names)


def minimal_entries(progress: Progress) -> Iterator[tuple[EntryKind, Facts]]:
    """The fewest entries that fold to this."""
    seen = {"event": event_to_json(progress.event), "rule": progress.rule}
    yield EntryKind.SEEN, {**seen, "resources": list(progress.resources)}
    for phase in sorted(progress.begun):
        yield EntryKind.BEGUN, {"phase": phase}
    for (phase, index), kind in sorted(progress.steps.items()):
        facts: dict[str, object] = {"phase": phase, "index": index}
        if (phase, index) in progress.step_names:
            facts["step"] = progress.step_names[phase, index]
        if (phase, index) in progress.durations:
            facts["seconds"] = progress.durations[phase, index]
        yield kind, facts
    for phase in sorted(progress.ended):
        yield EntryKind.ENDED, {"phase": phase, "is_stopped": phase in progress.stopped}
    for kind in sorted(progress.marks):
        yield kind, {}


def for_journal(event: Event) -> Event:
    """The event as the journal stores it.

    An endpoint may send a long description and unknown members, and change them with every poll.
    So the description is truncated and unknown members are dropped.
    """
    return replace(event, description=truncate(event.description), extra={})


def drop_details(progress: Progress) -> Progress:
    """What is kept of an event that is done: enough to recognise it."""
    event = replace(progress.event, resources=(), description="")
    return replace(progress, event=event, resources=())


def truncate(text: str) -> str:
    return text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")


def event_to_json(event: Event) -> dict[str, object]:
    return {**asdict(event), "not_before": event.not_before and event.not_before.isoformat()}


def parse_event(value: object) -> Event:
    if not isinstance(value, dict):
        raise ValueError(f"event is {value!r:.60}; expected an object")
    try:
        event = Event(
            id=str(value["id"]),
            type=str(value["type"]),
            status=str(value["status"]),
            source=str(value["source"]),
            resources=tuple(str(name) for name in value["resources"]),
            resource_type=str(value["resource_type"]),
            not_before=_timestamp(value["not_before"]),
            duration_seconds=int(value["duration_seconds"]),
            description=str(value["description"]),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"event is not valid: {error!r}") from error
    return for_journal(event)


def _timestamp(text: str | None) -> datetime | None:
    if text is None:
        return None
    timestamp = datetime.fromisoformat(text)
    if timestamp.tzinfo is None:
        raise ValueError(f"not_before is {text!r}; expected a time zone")
    return timestamp


def _resources(facts: Facts, event: Event) -> tuple[str, ...]:
    """A compacted journal stores the original ones beside the event."""
    value = facts.get("resources", event.resources)
    if not isinstance(value, list | tuple):
        raise ValueError(f"resources is {value!r}; expected a list")
    return tuple(str(name) for name in value)


def _text(facts: Facts, name: str) -> str:
    value = facts.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; expected text")
    return value
