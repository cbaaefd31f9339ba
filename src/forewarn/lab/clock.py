"""A clock that is moved by hand, for the lab and for tests, and actions at times of a clock."""

import asyncio
import heapq
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from datetime import datetime, timedelta
from typing import Any

from forewarn.engine.clock import Clock

TURNS_PER_STEP = 50


class VirtualClock:
    """Paused until `advance`, `jump` or `run` moves it. Sleepers wake in order."""

    jump_seconds = 0.0
    STRIDE_SECONDS = 0.02
    """How often a running clock moves."""

    def __init__(self, now: datetime) -> None:
        self.is_running = False
        self._now = now
        self._count = 0
        self._advancing = asyncio.Lock()
        self._sleepers: list[tuple[datetime, int, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        return self._now

    async def sleep_until(self, time: datetime) -> None:
        if time <= self._now:
            return
        waker = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (time, self._count, waker))
        await waker

    async def advance(
        self, duration: timedelta, may_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Let time pass sleeper by sleeper: what wakes at one time is done before the next.

        It ends early, before it wakes a sleeper, if `may_stop` returns true.
        """
        async with self._advancing:  # two concurrent calls add up
            await _let_others_run()  # until everything is asleep
            end = self._now + duration
            while self._sleepers and self._sleepers[0][0] <= end:  # ends: each turn removes one
                if may_stop():
                    return
                time, _, waker = heapq.heappop(self._sleepers)
                if waker.done():
                    continue
                self._now = max(self._now, time)
                waker.set_result(None)
                await _let_others_run()
            self._now = end
            await _let_others_run()

    async def jump(self, time: datetime) -> None:
        """Set a later time in one step, as after a suspend: all that was due by then is due now."""
        async with self._advancing:
            assert time >= self._now
            self._now = time
        await self.advance(timedelta(0))

    async def run(self) -> None:
        """Follow real time while `is_running`, until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:  # ends when cancelled
            await asyncio.sleep(self.STRIDE_SECONDS)
            before, passed = loop.time(), loop.time() - before
            if self.is_running:
                await self.advance(timedelta(seconds=passed))


class Scheduler(asyncio.TaskGroup):
    """Runs actions at times of a clock, each in its own task, inside `async with`.

    At the end, the rest is cancelled. An action that raises ends everything.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._started: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *raised: Any) -> None:
        await self.cancel()
        try:
            await super().__aexit__(*raised)
        except BaseExceptionGroup as group:  # the first error caused the others
            raise group.exceptions[0] from group

    async def cancel(self) -> None:
        for task in self._started:
            task.cancel()
        await asyncio.gather(*self._started, return_exceptions=True)

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self.create_task(work)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    def run_at(self, time: datetime, action: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        """Plan an action. To cancel it, cancel the task."""

        async def wait() -> None:
            await self._clock.sleep_until(time)
            await action()

        return self.start(wait())


@types.coroutine
def _let_others_run() -> Generator[None, None, None]:
    """Some turns of the event loop. A bare yield is cheaper than `asyncio.sleep(0)`."""
    for _ in range(TURNS_PER_STEP):
        yield
