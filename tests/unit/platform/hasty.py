"""A clock that makes nobody wait."""

import asyncio
from datetime import datetime, timedelta

from tests.builders import NOON


class Hasty:
    """Whoever sleeps wakes at once, and it is then."""

    def __init__(self) -> None:
        self.moment = NOON
        self.slept: list[timedelta] = []

    def now(self) -> datetime:
        return self.moment

    async def sleep_until(self, moment: datetime) -> None:
        self.slept.append(moment - self.moment)
        self.moment = max(self.moment, moment)
        await asyncio.sleep(0)
