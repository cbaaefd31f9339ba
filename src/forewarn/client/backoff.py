"""When to ask again.

Never sooner than a second after the last question; after problems later and later, with some chance
in it, so that a thousand guests of a server that was away do not all come back at once. Time and
chance are told.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from forewarn.client.errors import EndpointError, HttpError
from forewarn.client.models import Document
from forewarn.client.protocol import Dialogue, Known, Question
from forewarn.client.watcher import Change, Watcher

PERIOD_SECONDS = 1.0
PAUSE_SECONDS_MAX = 10.0
"""Short, because a spot VM has only 30 seconds from its notice to its end."""
RETRY_AFTER_SECONDS_MAX = 10.0
"""An endpoint that asks to be left alone longer than this would leave its guest blind, for more
than a Preempt's notice.
"""
WAIT_SECONDS = 30.0


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of day, a time that never jumps, and chance in [0, 1).

    All that a client asks of the world but its endpoint.
    """

    now: Callable[[], datetime] = _now
    monotonic: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random


def pause_seconds(failures: int, problem: EndpointError, chance: float) -> float:
    """How long to leave the endpoint alone after so many problems in a row: 1, 2, 4, 8, 10 seconds,
    and up to half as much again.

    What the endpoint asked for (Retry-After) is kept, up to a limit.
    """
    assert failures >= 1
    pause = min(PERIOD_SECONDS * 2.0 ** min(failures - 1, 10), PAUSE_SECONDS_MAX) * (1 + chance / 2)
    asked = problem.retry_after_seconds if isinstance(problem, HttpError) else None
    return max(pause, min(asked or 0.0, RETRY_AFTER_SECONDS_MAX))


class Pace:
    """One watch: what to ask, what became of it, and how long to rest then."""

    def __init__(
        self, dialogue: Dialogue, watcher: Watcher, clock: Clock, wait_seconds: float
    ) -> None:
        self._dialogue = dialogue
        self._watcher = watcher
        self._clock = clock
        self._wait_seconds = wait_seconds
        self._known = Known(clock.monotonic)
        self._failures = 0
        self._rest_until = 0.0

    def question(self) -> Question[Document]:
        """The answer may be held until something changes, but not while documents contradict each
        other.
        """
        self._rest_until = self._clock.monotonic() + PERIOD_SECONDS
        return self._dialogue.wait(
            0.0 if self._watcher.is_in_doubt else self._wait_seconds, self._known.document
        )

    def answered(self, document: Document) -> list[Change]:
        self._failures = 0
        return self._watcher.update(self._known.keep(document), self._clock.now())

    def failed(self, problem: EndpointError) -> None:
        self._failures += 1
        self._known.forget()
        self._rest_until = self._clock.monotonic() + pause_seconds(
            self._failures, problem, self._clock.chance()
        )

    def rest_seconds(self) -> float:
        return max(0.0, self._rest_until - self._clock.monotonic())
