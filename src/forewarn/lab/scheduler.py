"""Runs actions at times of the lab's clock, each in its own task."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
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
        await self.cancel()
        try:
            await self._group.__aexit__(*raised)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:  # the first error caused the others
            raise group.exceptions[0] from group

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_at(self, time: datetime, action: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        """Plan an action. To cancel it, cancel the task."""

        async def wait() -> None:
            await self._clock.sleep_until(time)
            await action()

        return self.start(wait())
