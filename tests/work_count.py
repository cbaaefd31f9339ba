"""How much work something is, counted and not timed: the Python code that runs, comparisons and
hashes of names included.
"""

import asyncio
import sys
from collections.abc import Awaitable
from types import FrameType
from typing import Any


class Name(str):
    """A name that is compared and hashed in Python, so that a sort or a set made in C shows in the
    count too.
    """

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


async def work_of(doing: Awaitable[Any]) -> int:
    """How many lines of Python are run until it is done."""
    return sum(await work_of_turns(doing))


async def work_of_turns(doing: Awaitable[Any]) -> list[int]:
    """How many lines of Python are run each time before other tasks get their turn."""
    count, turns = 0, list[int]()

    async def take_turns() -> None:
        nonlocal count
        while True:  # ends when canceled
            turns.append(count)
            count = 0
            await asyncio.sleep(0)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    others = asyncio.create_task(take_turns())
    sys.settrace(trace)
    try:
        await doing
    finally:
        sys.settrace(before)
        others.cancel()
    return [*turns, count]
