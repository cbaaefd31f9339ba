"""Waiting within a step's time: in small parts, until done, out of time, or the agent must end."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from forewarn.agent.step import Occasion, StepFailed, StepTimedOut

LOOK_SECONDS = 0.1
T = TypeVar("T")


def until(
    occasion: Occasion,
    is_done: Callable[[], bool],
    *,
    waiting_for: Callable[[], str],
    every: float = LOOK_SECONDS,
) -> None:
    """Look now and then. At the limit, `waiting_for` says in words what did not come."""
    while not is_done():  # ends at the limit: `pause` raises there
        pause(occasion, every, waiting_for())


def pause(occasion: Occasion, seconds: float, waiting_for: str) -> None:
    """Raises at the limit, so that no further try is begun there whose failure would hide the
    reason of the last.
    """
    if occasion.stop.wait(min(seconds, occasion.seconds_left)):
        raise StepFailed(f"the agent has to end: {waiting_for}")
    if occasion.seconds_left <= 0:
        raise StepTimedOut(f"time is up: {waiting_for}")


def together(failures: Sequence[StepFailed]) -> StepFailed:
    """Several failures told as one, each only once. It is one of time only if all of them are."""
    kind = (
        StepTimedOut
        if all(isinstance(failure, StepTimedOut) for failure in failures)
        else StepFailed
    )
    return kind("; ".join(dict.fromkeys(failure.message for failure in failures)))


def within(occasion: Occasion, seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns. It is given up when its time is over: looking up a name or an answer
    that drips in knows no limit.

    Then it raises TimeoutError, as for any connection that is silent.
    """
    results: list[T] = []
    problems: list[Exception] = []
    is_over = threading.Event()

    def attempt() -> None:
        try:
            results.append(work())
        except Exception as problem:
            problems.append(problem)
        finally:
            is_over.set()

    end = occasion.now() + min(seconds, occasion.seconds_left)
    threading.Thread(target=attempt, name="forewarn-step-call", daemon=True).start()
    while not is_over.wait(LOOK_SECONDS / 2):  # ends with the work, or with the first of its limits
        if occasion.stop.is_set():
            raise StepFailed("the agent has to end: no answer has come yet")
        if occasion.now() >= end:
            raise TimeoutError(f"no answer within {seconds:.3g} seconds")
    if problems:
        raise problems[0]
    return results[0]
