"""The history is kept within its limits."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.entry import encode_all
from forewarn.errors import StoreLost
from forewarn.history.feed import HistoryFeed
from forewarn.history.retention import INTERVAL, RetentionWorker
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import HistoryValues, Record, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON
from tests.history import write_history
from tests.unit.history.test_query import joined
from tests.work_count import work_of

DAY = timedelta(days=1)


def with_store(test: Callable[[MemoryStore], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test(MemoryStore()))


def retention(
    store: MemoryStore,
    clock: VirtualClock,
    *,
    days: int = 0,
    commits_max: int = 0,
    batch: int = 1000,
) -> RetentionWorker:
    engine = Engine(store, clock, Timing())
    return RetentionWorker(
        engine, HistoryFeed(store), keep=days * DAY, commits_max=commits_max, batch=batch
    )


def test_a_clock_that_is_off_from_the_other_servers_trims_nothing_by_age() -> None:
    """It would delete the history of all servers, for good."""

    async def test(store: MemoryStore) -> None:
        await write_history(store, joined(1), joined(2))
        clock = VirtualClock(NOON + 100 * DAY)
        worker = retention(store, clock, days=90)
        await clock.advance(61 * MINUTE)
        worker.engine.clock_skew_seconds = 100 * DAY.total_seconds()
        assert await worker.trim() == 0
        worker.engine.clock_skew_seconds = 0.0
        assert await worker.trim() == 1

    with_store(test)


async def positions(store: MemoryStore) -> list[int]:
    return [value.position for value in await store.history()]


def test_entries_are_trimmed_at_their_age_and_not_earlier() -> None:
    """Unreadable ones go together with their neighbours."""

    async def test(store: MemoryStore) -> None:
        await write_history(store, joined(1))
        await store.commit([], entries=b"unreadable")
        await write_history(store, joined(2), joined(3))
        clock = VirtualClock(NOON + 90 * DAY - 58 * MINUTE)
        worker = retention(store, clock, days=90)
        await clock.advance(60 * MINUTE)

        assert await worker.trim() == 1
        assert await positions(store) == [2, 3, 4]
        await clock.advance(timedelta(seconds=1))
        assert await worker.trim() == 2
        assert await positions(store) == [4]

    with_store(test)


def test_the_oldest_commits_above_the_limit_are_trimmed() -> None:
    async def test(store: MemoryStore) -> None:
        await write_history(store, *(joined(number) for number in range(10)))
        assert await retention(store, VirtualClock(NOON), commits_max=4).trim() == 6
        assert await positions(store) == [7, 8, 9, 10]

    with_store(test)


def test_without_limits_everything_is_kept() -> None:
    async def test(store: MemoryStore) -> None:
        await write_history(store, *(joined(number) for number in range(10)))
        assert await retention(store, VirtualClock(NOON + 36_500 * DAY)).trim() == 0

    with_store(test)


def test_trimming_goes_in_small_batches_and_touches_no_record() -> None:
    """A long history that gets a limit must not block those who write."""

    async def test(store: MemoryStore) -> None:
        revision = await store.commit([Write("scope/web/", b"live", 0)])
        await write_history(store, *(joined(number) for number in range(100)))
        clock = VirtualClock(NOON)
        work = asyncio.ensure_future(retention(store, clock, commits_max=5, batch=10).run())
        await clock.advance(timedelta(seconds=1))
        # a batch at once, then one every fifth of a second
        assert await positions(store) == list(range(62, 102))
        await clock.advance(timedelta(seconds=2))
        work.cancel()

        assert await positions(store) == [97, 98, 99, 100, 101]
        assert await store.get("scope/web/") == Record("scope/web/", b"live", revision)

    with_store(test)


def test_trimming_continues_after_the_store_was_lost() -> None:
    class LostStore(MemoryStore):
        is_lost = True

        async def trim(self, before: int, limit: int = 1000) -> int:
            if self.is_lost:
                raise StoreLost("gone")
            return await super().trim(before, limit)

    async def run() -> None:
        store, clock = LostStore(), VirtualClock(NOON)
        await write_history(store, *(joined(number) for number in range(10)))
        work = asyncio.ensure_future(retention(store, clock, commits_max=1).run())
        await clock.advance(INTERVAL)
        store.is_lost = False
        await clock.advance(INTERVAL)
        work.cancel()

        assert await positions(store) == [10]

    asyncio.run(run())


class BuggyStore(MemoryStore):
    """Its first trim has a bug."""

    trims = 0

    async def trim(self, before: int, limit: int = 1000) -> int:
        self.trims += 1
        if self.trims == 1:
            raise KeyError("a bug")
        return await super().trim(before, limit)


def test_a_bug_in_one_trim_does_not_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Retention is one of the works that end the server when they end."""

    async def run() -> None:
        store, clock = BuggyStore(), VirtualClock(NOON)
        await write_history(store, *(joined(number) for number in range(10)))
        work = asyncio.ensure_future(retention(store, clock, commits_max=1).run())
        await clock.advance(INTERVAL)
        await clock.advance(INTERVAL)
        work.cancel()

        assert await positions(store) == [10]
        assert [line.message for line in caplog.records] == ["bug while trimming the history"]

    asyncio.run(run())


def test_entry_whose_time_has_no_zone_ends_no_server() -> None:
    """It is unreadable, and trimmed with the entries around it."""

    async def test(store: MemoryStore) -> None:
        await store.commit([], entries=b'[{"at":"2020-01-01T00:00:00","by":"x","what":"joined"}]')
        await write_history(store, joined(1), joined(2))
        clock = VirtualClock(NOON)
        worker = retention(store, clock, days=90)
        await clock.advance(61 * MINUTE)
        assert await worker.trim() == 0
        await clock.advance(100 * DAY)
        await worker.trim()
        assert await positions(store) == [3]  # the store keeps the last one

    with_store(test)


class CountingStore(MemoryStore):
    """Counts the history values that are fetched."""

    fetched = 0

    async def history(self, after: int = 0, limit: int = 1000) -> HistoryValues:
        values = await super().history(after, limit)
        self.fetched += len(values)
        return values


def test_looking_for_old_entries_fetches_one_while_there_are_none() -> None:
    """It is done each minute, and a value may have 256 KiB."""

    async def run() -> None:
        store, clock = CountingStore(), VirtualClock(NOON)
        for number in range(300):
            await store.commit([], entries=encode_all([joined(number)] * 20))
        worker = retention(store, clock, days=90)
        await clock.advance(61 * MINUTE)

        assert await work_of(worker.trim()) < 500
        assert store.fetched == 1

    asyncio.run(run())


@pytest.mark.parametrize("old", [1, 30, 300])
def test_few_values_are_fetched_after_the_last_that_is_too_old(old: int) -> None:
    """A busy service has a few such values in each minute."""

    async def run() -> None:
        store, clock = CountingStore(), VirtualClock(NOON + 100 * DAY)
        entries = [joined(0)] * old + [joined(100 * 24 * 60)] * 1000
        await write_history(store, *entries)
        worker = retention(store, clock, days=90)
        await clock.advance(61 * MINUTE)

        assert await worker.trim() == old
        assert store.fetched <= 2 * old + 1

    asyncio.run(run())


def test_no_more_values_are_fetched_than_one_batch_trims() -> None:
    async def run() -> None:
        store, clock = CountingStore(), VirtualClock(NOON + 100 * DAY)
        await write_history(store, *[joined(0)] * 500)
        worker = retention(store, clock, days=90, batch=300)
        await clock.advance(61 * MINUTE)

        assert await worker.trim() == 300
        assert store.fetched == 300

    asyncio.run(run())


def test_polls_pass_between_large_commits_that_are_too_old() -> None:
    async def test(store: MemoryStore) -> None:
        for number in range(20):
            await store.commit([], entries=encode_all([joined(number)] * 20))
        clock = VirtualClock(NOON + 100 * DAY)
        worker = retention(store, clock, days=90)
        await clock.advance(61 * MINUTE)
        trimming, turns = asyncio.ensure_future(worker.trim()), 0
        while not trimming.done():
            await asyncio.sleep(0)
            turns += 1

        assert trimming.result() == 19  # the newest is always kept
        assert turns >= 20

    with_store(test)


def test_an_entry_dated_in_the_future_does_not_stop_trimming() -> None:
    """A server whose clock was ahead wrote it."""

    async def test(store: MemoryStore) -> None:
        await write_history(store, joined(1_000_000), joined(2), joined(3))
        clock = VirtualClock(NOON + 100 * DAY)
        worker = retention(store, clock, days=90)
        await clock.advance(61 * MINUTE)

        assert await worker.trim() == 2  # the newest is always kept

    with_store(test)
