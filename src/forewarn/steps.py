"""Long work in steps, so that the event loop gets turns in between.

The work is a generator. It yields how much it has done since it yielded last, about one for each
VM, and returns its result.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[int, None, T]

WORK_PER_TURN_MAX = 20
"""About a millisecond for the VMs of a report; polls are answered after that."""


class WorkCounter:
    """Lets others run during long work, each time that so much of it is done."""

    def __init__(self, work_max: int) -> None:
        self._work_max = work_max
        self._done = 0

    async def pass_after(self, work: int) -> None:
        """So much was done now."""
        self._done += work
        if self._done >= self._work_max:
            self._done = 0
            await asyncio.sleep(0)


async def in_turns(steps: Steps[T]) -> T:
    """Do all of the work, and let others run after each part of it."""
    turns = WorkCounter(WORK_PER_TURN_MAX)
    while True:  # ends with the work
        try:
            work = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await turns.pass_after(work)


def at_once(steps: Steps[T]) -> T:
    """Do all of the work without a pause."""
    while True:  # ends with the work
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
