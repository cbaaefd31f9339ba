"""What a step is: one thing done for one event in one phase, within a time.

The kinds of steps are in `steps/`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from forewarn.client import Event
from forewarn.errors import Error


class Phase(StrEnum):
    """When a step is run: the event is Scheduled, it is Started, it is over."""

    PREPARE = "prepare"
    START = "start"
    RECOVER = "recover"


class StepFailed(Error):
    """The step did not do what it is for."""

    code = "step_failed"


class StepTimedOut(StepFailed):
    """The step was ended at its limit."""

    code = "step_timed_out"


@dataclass(frozen=True, slots=True)
class Occasion:
    """What a step is run for, and how long it may take. `name` is our own VM; `stop` is set when
    the agent must end.

    `deadline` is a moment of the monotonic clock `now`. A step that waits, waits in small parts and
    looks at both.
    """

    event: Event
    phase: Phase
    name: str
    deadline: float
    stop: threading.Event = field(default_factory=threading.Event)
    now: Callable[[], float] = time.monotonic

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - self.now())


class Step(Protocol):
    """One kind of step, made from its part of the settings. It returns when it is done, or raises
    StepFailed.

    `describe` says in a few words what it would do, for the log, the status and a dry run.
    """

    def describe(self) -> str: ...

    def run(self, occasion: Occasion) -> None: ...
