"""The end of the history, for all followers."""

import asyncio

import pytest

from forewarn.engine.entry import first_number, last_number
from forewarn.errors import Unavailable
from forewarn.history.feed import BATCH, HistoryFeed
from forewarn.store.base import HistoryValue
from forewarn.store.memory import MemoryStore


class CountingStore(MemoryStore):
    reads = 0

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[HistoryValue, ...]:
        self.reads += 1
        return await super().history(after, limit)


async def add(store: MemoryStore, count: int) -> None:
    """History with holes: every other commit has no entries."""
    for _ in range(count):
        await store.commit([], entries=b"[]")
        await store.commit([])


async def read_all(feed: HistoryFeed, number: int) -> list[int]:
    positions: list[int] = []
    while values := await feed.after(number):
        assert len(values) <= BATCH
        positions += [value.position for value in values]
        number = last_number(positions[-1])
    return positions


def test_a_follower_gets_every_value_once_from_any_number() -> None:
    """Wherever it starts, and whatever others have read before."""

    async def run() -> None:
        store = MemoryStore()
        feed = HistoryFeed(store)
        assert (await feed.last(), await feed.after(0)) == (0, ())
        for count in (1, BATCH, 3 * BATCH):
            await add(store, count)
            positions = [value.position for value in await store.history(limit=10_000)]
            last = positions[-1]
            for start in (0, 1, last - 2 * BATCH - 1, last - 2 * BATCH, last - 1, last, last + 7):
                expected = [position for position in positions if position > start]
                assert await read_all(feed, last_number(start)) == expected

    asyncio.run(run())


def test_a_number_within_a_commit_returns_the_rest_of_that_commit() -> None:
    """A client may have lost its connection between two entries of one commit."""

    async def run() -> None:
        store = MemoryStore()
        await add(store, 3)
        feed = HistoryFeed(store)
        for _ in range(2):
            values = await feed.after(first_number(3))
            assert [value.position for value in values] == [3, 5]

    asyncio.run(run())


def test_many_followers_read_the_store_once() -> None:
    """A hundred consoles must not cost a hundred reads for each change."""

    async def run() -> None:
        store = CountingStore()
        await add(store, 5)
        feed = HistoryFeed(store)
        number = await feed.last()
        await read_all(feed, number)
        await add(store, 3)
        store.reads = 0

        results = await asyncio.gather(*(feed.after(number) for _ in range(100)))
        assert [[value.position for value in values] for values in results] == [[11, 13, 15]] * 100
        assert store.reads == 1

    asyncio.run(run())


def test_a_new_follower_at_the_end_gets_the_next_change() -> None:
    """What was read last may be thousands of commits old if nobody followed for a while."""

    async def run() -> None:
        store = MemoryStore()
        feed = HistoryFeed(store)
        await add(store, 1)
        await read_all(feed, 0)
        await add(store, 3 * BATCH)
        last = await feed.last()
        assert await feed.after(last) == ()
        await add(store, 1)

        assert len(await feed.after(last)) == 1

    asyncio.run(run())


def test_a_follower_can_ask_whether_it_missed_entries() -> None:
    """Positions have holes anyway, so only the oldest one that is left can tell."""

    async def run() -> None:
        store = MemoryStore()
        feed = HistoryFeed(store)
        await add(store, 10)
        await store.trim(9)

        values = await feed.after(last_number(5))
        assert await feed.gap_after(last_number(5), values) == first_number(9)
        assert await feed.gap_after(last_number(8), values) == 0  # it has everything before 9
        assert await feed.gap_after(0, values) == 0  # it wants what there is

        await store.trim(13)
        values = await feed.after(last_number(10))
        assert await feed.gap_after(last_number(10), values) == first_number(13)

    asyncio.run(run())


def test_an_event_taken_before_reading_misses_no_change() -> None:
    async def run() -> None:
        feed = HistoryFeed(MemoryStore())
        changed = feed.changed
        feed.notify()

        assert changed.is_set()
        assert not feed.changed.is_set()

    asyncio.run(run())


def test_the_number_of_followers_is_limited() -> None:
    feed = HistoryFeed(MemoryStore())
    with feed.following("ann"), feed.following("bob"):
        feed.check_room(3, "ann", 2)
        with pytest.raises(Unavailable, match="2 streams are open; at most 2"):
            feed.check_room(2, "ann", 2)
        with pytest.raises(Unavailable, match="already has 1 open streams; the limit is 1"):
            feed.check_room(3, "ann", 1)
    assert not feed.followers
