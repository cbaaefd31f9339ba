"""How far the handling of one event has come: a pure fold of the journal's lines, and the fewest
lines that say the same.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from forewarn.agent.participants import cut
from forewarn.agent.step import Phase
from forewarn.client import Event

Facts = Mapping[str, object]
Place = tuple[Phase, int]
"""A step of a rule: its phase, and which it is there."""


class What(StrEnum):
    """What a line says.

    Written before what it announces is acted on (begun, approving), or as soon as it is known.
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


SHORT = (What.STEP_FAILED, What.STEP_CUT)
MARKS = (What.LATE, What.APPROVING, What.APPROVED, What.FINISHED)


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of one event. `steps` has the last word on each, `took` the seconds of those
    that were done.

    A phase in `stopped` was ended by the failure of a step. `resources` are those of the first
    time: an event loses names on its way, and recover is for all. `names` is what each step was
    called: the file may be another one in the next life.
    """

    event: Event
    rule: str
    begun: frozenset[Phase] = frozenset()
    ended: frozenset[Phase] = frozenset()
    stopped: frozenset[Phase] = frozenset()
    steps: Mapping[Place, What] = field(default_factory=dict)
    took: Mapping[Place, float] = field(default_factory=dict)
    marks: frozenset[What] = frozenset()
    resources: tuple[str, ...] = ()
    names: Mapping[Place, str] = field(default_factory=dict)

    def is_settled(self, phase: Phase, index: int, name: str) -> bool:
        """Whether the step of this name is behind us.

        One that was begun and has no end is in doubt, and is run again.
        """
        if self.names.get((phase, index), name) != name:
            return False
        return self.steps.get((phase, index), What.STEP_BEGUN) is not What.STEP_BEGUN

    def fell_short(self, phase: Phase, index: int) -> bool:
        return self.steps.get((phase, index)) in SHORT

    @property
    def is_prepared(self) -> bool:
        """Whether all is done that an approval waits for."""
        return Phase.PREPARE in self.ended and Phase.PREPARE not in self.stopped

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, ever: it is over, and what was begun here has been
        recovered from.
        """
        return What.FINISHED in self.marks and (not self.begun or Phase.RECOVER in self.ended)


def fold(progress: Progress | None, what: What, facts: Facts) -> Progress:
    """What is known after one more line.

    Said again changes nothing. ValueError for a line that cannot be understood.
    """
    if what is What.SEEN:
        event, rule = event_of(facts.get("event")), _text(facts, "rule")
        if progress is not None:
            return replace(progress, event=event)
        return Progress(event, rule, resources=_resources(facts, event))
    if progress is None:
        raise ValueError(f"{what} about an event that was never seen")
    if what in MARKS:
        return replace(progress, marks=progress.marks | {what})
    phase = Phase(_text(facts, "phase"))
    if what is What.BEGUN:
        return replace(progress, begun=progress.begun | {phase})
    if what is What.ENDED:
        stopped = progress.stopped | ({phase} if facts.get("is_stopped") is True else frozenset())
        return replace(progress, ended=progress.ended | {phase}, stopped=stopped)
    index = facts.get("index")
    if not isinstance(index, int):
        raise ValueError(f"index is {index!r}; expected a whole number")
    seconds = facts.get("seconds")
    took = {(phase, index): _finite(seconds)} if isinstance(seconds, int | float) else {}
    name = facts.get("step")
    return replace(
        progress,
        steps={**progress.steps, (phase, index): what},
        took={**progress.took, **took},
        names={**progress.names, (phase, index): name} if isinstance(name, str) else progress.names,
    )


def lines_of(progress: Progress) -> Iterator[tuple[What, Facts]]:
    """The fewest lines that fold to this."""
    yield (
        What.SEEN,
        {
            "event": plain(progress.event),
            "rule": progress.rule,
            "resources": list(progress.resources),
        },
    )
    for phase in sorted(progress.begun):
        yield What.BEGUN, {"phase": phase}
    for (phase, index), what in sorted(progress.steps.items()):
        seconds = (
            {"seconds": progress.took[phase, index]} if (phase, index) in progress.took else {}
        )
        name = {"step": progress.names[phase, index]} if (phase, index) in progress.names else {}
        yield what, {"phase": phase, "index": index, **name, **seconds}
    for phase in sorted(progress.ended):
        yield What.ENDED, {"phase": phase, "is_stopped": phase in progress.stopped}
    for what in sorted(progress.marks):
        yield what, {}


def journaled(event: Event) -> Event:
    """The event as the journal keeps it.

    An endpoint decides how long a description is and what else it says, and may change it at every
    poll, so we keep only the beginning of the one and leave out the other.
    """
    return replace(event, description=cut(event.description), extra={})


def forget_details(progress: Progress) -> Progress:
    """What is left of an event that is done: enough to recognise it."""
    return replace(
        progress, event=replace(progress.event, resources=(), description=""), resources=()
    )


def plain(event: Event) -> dict[str, object]:
    """An event as `seen` has it, for JSON."""
    return {**asdict(event), "not_before": event.not_before and event.not_before.isoformat()}


def event_of(said: object) -> Event:
    if not isinstance(said, dict):
        raise ValueError("the event is no object")
    try:
        event = Event(
            id=str(said["id"]),
            type=str(said["type"]),
            status=str(said["status"]),
            source=str(said["source"]),
            resources=tuple(str(name) for name in said["resources"]),
            resource_type=str(said["resource_type"]),
            not_before=None if said["not_before"] is None else _aware(said["not_before"]),
            duration_seconds=int(said["duration_seconds"]),
            description=str(said["description"]),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"the event cannot be understood: {error!r}") from error
    return journaled(event)


def _aware(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"not_before is {text!r}; expected a time zone")
    return moment


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"seconds is {seconds!r}; expected a finite number")
    return float(seconds)


def _resources(facts: Facts, event: Event) -> tuple[str, ...]:
    """A journal that was written anew tells them beside the event."""
    said = facts.get("resources", event.resources)
    if not isinstance(said, list | tuple):
        raise ValueError(f"resources is {said!r}; expected a list")
    return tuple(str(name) for name in said)


def _text(facts: Facts, name: str) -> str:
    value = facts.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; expected text")
    return value
