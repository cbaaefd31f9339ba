"""Verdicts, and what every monitor has. A monitor watches over one expectation, entry by entry.
Pure.

A monitor fails as soon as it can know, and passes at the end only. An expectation about events that
never came has not held: who wrote it wanted to see something.
"""

from abc import ABC, abstractmethod
from datetime import datetime
from typing import Any

import msgspec

from forewarn.lab.scenario.timeline import Happening, Story


class Verdict(msgspec.Struct, frozen=True):
    """What was expected, whether it held, and what happened."""

    expected: str
    reason: str
    is_passed: bool


class Monitor(ABC):
    """Begins undecided. `failure` says why it failed; the first reason stays."""

    def __init__(self, expected: Any, story: Story) -> None:
        self.expected = expected
        self.story = story
        self.failure = ""

    def close(self, now: datetime) -> Verdict:
        """The scenario is over."""
        reason = self.failure or self.conclude(now)
        return Verdict(self.expected.words(), self.failure or reason, is_passed=not self.failure)

    @abstractmethod
    def watch(self, happening: Happening) -> None:
        """Look at the next entry; who has failed need not."""

    @abstractmethod
    def conclude(self, now: datetime) -> str:
        """What is to be said of a success; or `fail`."""

    def fail(self, reason: str) -> str:
        self.failure = self.failure or reason
        return reason

    def clock(self, moment: datetime) -> str:
        return self.story.clock(moment)
