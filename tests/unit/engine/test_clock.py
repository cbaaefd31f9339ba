"""Time that is told."""

import asyncio
from datetime import timedelta

import pytest

from forewarn.engine.clock import RealClock, within
from forewarn.lab.clock import VirtualClock
from tests.builders import MINUTE, NOON, SECOND


def test_sleepers_wake_in_order_each_at_its_time() -> None:
    async def main() -> list[str]:
        clock, result = VirtualClock(NOON), []

        async def sleeper(name: str, span: timedelta) -> None:
            await clock.sleep_until(clock.now() + span)
            result.append(f"{name} {clock.now():%H:%M}")

        tasks = [
            asyncio.create_task(sleeper(name, n * MINUTE))
            for name, n in (("late", 9), ("soon", 1), ("mid", 5))
        ]
        await asyncio.sleep(0)
        await clock.advance(5 * MINUTE)
        assert clock.now() == NOON + 5 * MINUTE
        await clock.advance(5 * MINUTE)
        await asyncio.gather(*tasks)
        return result

    assert asyncio.run(main()) == ["soon 12:01", "mid 12:05", "late 12:09"]


def test_sleeper_that_sleeps_again_wakes_in_the_same_advance() -> None:
    """A day of maintenance in one call: each tick may set the next."""

    async def main() -> int:
        clock, count = VirtualClock(NOON), 0

        async def ticker() -> None:
            nonlocal count
            for _ in range(10):
                await clock.sleep_until(clock.now() + MINUTE)
                count += 1

        task = asyncio.create_task(ticker())
        await asyncio.sleep(0)
        await clock.advance(timedelta(hours=1))
        await task
        return count

    assert asyncio.run(main()) == 10


def test_past_time_needs_no_sleep() -> None:
    asyncio.run(VirtualClock(NOON).sleep_until(NOON))
    asyncio.run(RealClock().sleep_until(NOON))


def test_work_that_takes_too_long_on_this_clock_is_ended() -> None:
    async def main() -> None:
        clock = VirtualClock(NOON)
        task = asyncio.create_task(within(clock, MINUTE, clock.sleep_until(NOON + 2 * MINUTE)))
        await asyncio.sleep(0)
        await clock.advance(MINUTE - SECOND)
        assert not task.done()
        await clock.advance(SECOND)
        with pytest.raises(TimeoutError, match="0:01:00"):
            await task

    asyncio.run(main())


def test_work_that_is_done_in_time_gives_its_result_or_its_error() -> None:
    async def fine() -> str:
        return "fine"

    async def broken() -> str:
        raise ValueError("broken")

    clock = VirtualClock(NOON)
    assert asyncio.run(within(clock, MINUTE, fine())) == "fine"
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(within(clock, MINUTE, broken()))


def test_the_real_clock_is_aware_and_sleeps() -> None:
    clock = RealClock()
    before = clock.now()
    asyncio.run(clock.sleep_until(before + timedelta(milliseconds=5)))

    assert before.utcoffset() == timedelta(0)
    assert clock.now() >= before + timedelta(milliseconds=5)
