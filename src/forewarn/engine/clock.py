"""The clock of the service. Nothing else in the service reads the time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeVar

from forewarn.log import log
from forewarn.platform.base import Sleeper
from forewarn.store.base import steady_seconds

T = TypeVar("T")


class Clock(Sleeper, Protocol):
    """`jump_seconds` is how far the machine's clock is from this one, 0 while they agree."""

    jump_seconds: float


class RealClock:
    """The machine's wall clock, as long as a monotonic clock confirms it.

    The service runs on the monotonic clock plus an offset. Each reading compares:

        wall clock within JUMP_SECONDS_MAX of our time: the offset follows it (NTP)
        wall clock further off: it jumped; the offset stays, and the log and a metric report it

    So setting the clock starts no event early and trims no history, and time never goes back. If
    the new time is right, a restart accepts it; if the wall clock comes back, it is followed again.
    """

    NAP_SECONDS_MAX = 60.0
    JUMP_SECONDS_MAX = 5.0
    JUMP_LOGGED_EVERY_SECONDS = 600.0

    def __init__(
        self, *, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady_seconds
    ) -> None:
        self._wall, self._steady = wall, steady
        self._offset = wall() - steady()
        self._latest = 0.0
        self._logged_at: float | None = None
        self.jump_seconds = 0.0

    def now(self) -> datetime:
        steady = self._steady()
        offset = self._wall() - steady
        jump = offset - self._offset
        if abs(jump) <= self.JUMP_SECONDS_MAX:
            self._offset = offset
            self._agree()
        else:
            self._disagree(jump, steady)
        self._latest = max(self._latest, steady + self._offset)
        return datetime.fromtimestamp(self._latest, UTC)

    def _agree(self) -> None:
        if self.jump_seconds:
            log.warning("system clock is back in step")
        self.jump_seconds, self._logged_at = 0.0, None

    def _disagree(self, jump: float, steady: float) -> None:
        self.jump_seconds = jump
        if self._logged_at is None or steady >= self._logged_at + self.JUMP_LOGGED_EVERY_SECONDS:
            self._logged_at = steady
            log.error(
                "system clock jumped; the jump is ignored",
                seconds=round(jump, 3),
                remedy="correct the system clock, or restart Forewarn to accept the new time",
            )

    async def sleep_until(self, time: datetime) -> None:
        """Sleeps at most a minute at a time, so that a clock that is set meanwhile is noticed."""
        while (left := (time - self.now()).total_seconds()) > 0:  # ends when the time is reached
            await asyncio.sleep(min(left, self.NAP_SECONDS_MAX))


async def within(clock: Clock, limit: timedelta, work: Awaitable[T]) -> T:
    """The result of the work; TimeoutError after the limit by this clock, and it is cancelled."""
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep_until(clock.now() + limit))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"not done within {limit}")
    finally:
        alarm.cancel()
        if task.cancel():  # it may ignore that, so its late result is not awaited but consumed
            task.add_done_callback(lambda late: late.cancelled() or late.exception())


async def wait_for(clock: Clock, event: asyncio.Event, until: datetime | None) -> None:
    """Return when the event is set or the time is reached."""
    times = [] if until is None else [clock.sleep_until(until)]
    await wait_for_first(event.wait(), *times)


async def wait_for_first(*works: Awaitable[object], timeout: float | None = None) -> None:
    """Wait until one of them is done or the time is up, and cancel the rest."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
