"""A clock on which sleeping takes no time."""

import asyncio
from datetime import datetime, timedelta

from tests.builders import NOON


class InstantClock:
    """A sleeper wakes immediately, and the time is then the time it slept until."""

    jump_seconds = 0.0

    def __init__(self) -> None:
        self.time = NOON
        self.slept: list[timedelta] = []

    def now(self) -> datetime:
        return self.time

    async def sleep_until(self, time: datetime) -> None:
        self.slept.append(time - self.time)
        self.time = max(self.time, time)
        await asyncio.sleep(0)
