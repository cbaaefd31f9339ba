"""What is to be done at which moment of a lab's clock.

Each thing has a task of its own, so none waits for another.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

from forewarn.engine.clock import Clock


class Agenda:
    """Within `async with`, what is put on it is done; at the end, what was not due yet is dropped.

    What breaks ends it all.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Agenda":
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(*raised)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:  # the rest broke because the first did
            raise group.exceptions[0] from group

    def at(self, moment: datetime, action: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do it then. To take it back, cancel the task."""
        task = self._group.create_task(self._wait(moment, action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait(self, moment: datetime, action: Callable[[], Awaitable[None]]) -> None:
        await self.clock.sleep_until(moment)
        await action()
