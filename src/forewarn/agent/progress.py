"""How far the workflow of one event has come: a pure fold of the journal's entries, and the fewest
entries that fold to the same.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event

TEXT_BYTES_MAX = 4096
EVENT_TEXTS = ("id", "type", "status", "source", "resource_type", "description")

Facts = Mapping[str, Any]
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


class StepRecord(NamedTuple):
    """The last entry of a step, its description, and how long it took if it was done.

    The fingerprint is compared with the step's: the configuration may change before the next start.
    """

    kind: EntryKind
    name: str = ""
    seconds: float | None = None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known about one event.

    A phase in `stopped` was ended by a failed step. `resources` are those first seen: an event
    loses names over time, and recover is for all of them.
    """

    event: Event
    rule: str
    begun: frozenset[WorkflowPhase] = frozenset()
    ended: frozenset[WorkflowPhase] = frozenset()
    stopped: frozenset[WorkflowPhase] = frozenset()
    steps: Mapping[StepKey, StepRecord] = field(default_factory=dict)
    marks: frozenset[EntryKind] = frozenset()
    resources: tuple[str, ...] = ()

    def is_step_over(self, phase: WorkflowPhase, index: int, fingerprint: str) -> bool:
        """A step that began and has no end recorded is in doubt, and runs again."""
        step = self.steps.get((phase, index))
        if step is None or step.kind is EntryKind.STEP_BEGUN:
            return False
        return step.fingerprint == fingerprint

    def has_step_failed(self, phase: WorkflowPhase, index: int) -> bool:
        step = self.steps.get((phase, index))
        return step is not None and step.kind in (EntryKind.STEP_FAILED, EntryKind.STEP_CUT)

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

    Raises ValueError, LookupError, TypeError or OverflowError for an entry that is not valid.
    """
    if kind is EntryKind.SEEN:
        event = parse_event(facts["event"])
        if progress is not None:
            return replace(progress, event=event)
        # The journal stores the original resources in addition to those of the event.
        resources = tuple(map(str, facts.get("resources", event.resources)))
        return Progress(event, str(facts["rule"]), resources=resources)
    if progress is None:
        raise ValueError(f"{kind} for an event that was never seen")
    if kind in MARKS:
        return replace(progress, marks=progress.marks | {kind})
    phase = WorkflowPhase(facts["phase"])
    if kind is EntryKind.BEGUN:
        return replace(progress, begun=progress.begun | {phase})
    if kind is EntryKind.ENDED:
        stopped = progress.stopped | ({phase} if facts.get("is_stopped") is True else set())
        return replace(progress, ended=progress.ended | {phase}, stopped=stopped)
    index, name, seconds = facts["index"], facts.get("step", ""), facts.get("seconds")
    if not isinstance(index, int) or not (seconds is None or math.isfinite(seconds)):
        raise ValueError(f"step {index!r} took {seconds!r} seconds; expected finite numbers")
    step = StepRecord(kind, str(name), seconds, str(facts.get("fingerprint", "")))
    return replace(progress, steps={**progress.steps, (phase, index): step})


def entries(progress: Progress) -> Iterator[tuple[EntryKind, Facts]]:
    """The fewest entries that fold to this."""
    seen = {"event": event_to_json(progress.event), "rule": progress.rule}
    yield EntryKind.SEEN, {**seen, "resources": progress.resources}
    for phase in sorted(progress.begun):
        yield EntryKind.BEGUN, {"phase": phase}
    for (phase, index), step in sorted(progress.steps.items()):
        name, seconds, fingerprint = step.name, step.seconds, step.fingerprint
        facts = {"step": name, "seconds": seconds, "fingerprint": fingerprint}
        yield step.kind, {"phase": phase, "index": index, **facts}
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


def parse_event(value: Any) -> Event:
    """The opposite of `event_to_json`, for an event as the journal stores it."""
    not_before = value["not_before"]
    if not_before is not None:
        not_before = datetime.fromisoformat(not_before)
        if not_before.tzinfo is None:
            raise ValueError(f"not_before is {not_before}; expected a time zone")
    texts: dict[str, Any] = {name: str(value[name]) for name in EVENT_TEXTS}
    event = Event(
        **texts,
        resources=tuple(map(str, value["resources"])),
        not_before=not_before,
        duration_seconds=int(value["duration_seconds"]),
    )
    return for_journal(event)
