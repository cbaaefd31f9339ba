"""Runs actions at times of the lab's clock, each in its own task."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

from forewarn.engine.clock import Clock


class Scheduler:
    """Runs what is planned inside `async with`. At the end, the rest is cancelled.

    An action that raises ends everything.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Scheduler":
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(*raised)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:  # the first error caused the others
            raise group.exceptions[0] from group

    def run_at(self, time: datetime, action: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Plan an action. To cancel it, cancel the task."""
        task = self._group.create_task(self._wait(time, action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait(self, time: datetime, action: Callable[[], Awaitable[None]]) -> None:
        await self._clock.sleep_until(time)
        await action()
