"""The time: real, or moved by hand.

Everything above the rules asks one of these two, and nothing else reads a clock.
"""

import asyncio
import heapq
import logging
import time
import types
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeVar

log = logging.getLogger("forewarn")

T = TypeVar("T")

TURNS_PER_STEP = 50


class Clock(Protocol):
    """Now, and waiting for later.

    `jump_seconds`: how far the machine's clock is from this one, 0 while they agree.
    """

    jump_seconds: float

    def now(self) -> datetime: ...

    async def sleep_until(self, moment: datetime) -> None: ...


def steady_seconds() -> float:
    """A clock that nobody can set. On Linux it also counts while the machine is suspended."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class RealClock:
    """The machine's wall clock, as long as a steady clock confirms it.

    Once it has started, the service lives by the steady clock plus an offset. Each reading
    compares:

        wall clock within JUMP_SECONDS_MAX of our time    the offset follows it: NTP slews and small
        steps
        wall clock further off, in either direction       it jumped: the offset stays, and the log
        and a metric say so

    So a clock that is set while we run starts no event early and trims no history, and time never
    goes back. If the new time is the right one, a restart accepts it; if the wall clock comes back
    by itself, it is followed again.
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
            log.warning("the machine's clock agrees with Forewarn's again")
        self.jump_seconds, self._logged_at = 0.0, None

    def _disagree(self, jump: float, steady: float) -> None:
        self.jump_seconds = jump
        if self._logged_at is None or steady >= self._logged_at + self.JUMP_LOGGED_EVERY_SECONDS:
            self._logged_at = steady
            facts = {
                "seconds": round(jump, 3),
                "remedy": "set the clock right, or restart Forewarn if the new time is right",
            }
            log.error(
                "the machine's clock jumped: Forewarn keeps its own time", extra={"facts": facts}
            )

    async def sleep_until(self, moment: datetime) -> None:
        """Naps at most a minute at a time, so that a clock that is set while we sleep is noticed."""
        while (left := (moment - self.now()).total_seconds()) > 0:  # ends when the moment has come
            await asyncio.sleep(min(left, self.NAP_SECONDS_MAX))


class VirtualClock:
    """A clock of one's own: it stands still until it is told to advance, to jump, or to run.

    Sleepers wake in their order.
    """

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

    async def sleep_until(self, moment: datetime) -> None:
        if moment <= self._now:
            return
        waker = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (moment, self._count, waker))
        await waker

    async def advance(self, span: timedelta) -> None:
        """Let the time pass, moment by moment, so that what wakes at one moment is done before the
        next one comes.
        """
        async with self._advancing:  # two at once add up
            await _let_others_run()  # who is about to sleep shall be asleep
            end = self._now + span
            while (
                self._sleepers and self._sleepers[0][0] <= end
            ):  # ends: each turn takes a sleeper away, and time only grows
                moment, _, waker = heapq.heappop(self._sleepers)
                if waker.done():
                    continue
                self._now = max(self._now, moment)
                waker.set_result(None)
                await _let_others_run()
            self._now = end
            await _let_others_run()

    async def jump(self, moment: datetime) -> None:
        """Be at a later moment at once, as a machine that was asleep: all that was due meanwhile is
        due now.
        """
        async with self._advancing:
            assert moment >= self._now
            self._now = moment
        await self.advance(timedelta(0))

    async def run(self) -> None:
        """Follow the real time while `is_running`, until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:  # ends when cancelled
            await asyncio.sleep(self.STRIDE_SECONDS)
            before, passed = loop.time(), loop.time() - before
            if self.is_running:
                await self.advance(timedelta(seconds=passed))


@types.coroutine
def _let_others_run() -> Generator[None, None, None]:
    """So many turns of the event loop; a bare yield is a turn, and cheaper than `asyncio.sleep(0)`."""
    for _ in range(TURNS_PER_STEP):
        yield


async def within(clock: Clock, limit: timedelta, work: Awaitable[T]) -> T:
    """The work's result, or TimeoutError when the limit has passed on this clock; the work is then
    cancelled.
    """
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep_until(clock.now() + limit))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"not done within {limit}")
    finally:
        alarm.cancel()
        if (
            task.cancel()
        ):  # it may not heed us, so nobody waits for it here; what it still says is not wanted
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
