"""The end of the history, for all who follow it."""

import asyncio

import pytest

from forewarn.errors import Unavailable
from forewarn.history.feed import BATCH, RECENT_MAX, HistoryFeed
from forewarn.store.base import Note
from forewarn.store.memory import MemoryStore


class Counted(MemoryStore):
    reads = 0

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[Note, ...]:
        self.reads += 1
        return await super().history(after, limit)


async def add(store: MemoryStore, count: int) -> None:
    await store.commit([], [b"note"] * count)


async def all_after(tail: HistoryFeed, number: int) -> list[int]:
    found: list[int] = []
    while notes := await tail.after(found[-1] if found else number):
        assert len(notes) <= BATCH
        found += [note.number for note in notes]
    return found


def test_whoever_follows_gets_every_note_once_from_wherever_it_begins() -> None:
    async def tell() -> None:
        store = MemoryStore()
        tail = HistoryFeed(store)
        assert (await tail.last(), await tail.after(0)) == (0, ())
        for count in (1, BATCH, 3 * RECENT_MAX):
            await add(store, count)
            last = await tail.last()
            for start in (0, 1, last - BATCH - 1, last - BATCH, last - 1, last, last + 7):
                assert await all_after(tail, start) == list(range(max(start, 0) + 1, last + 1))

    asyncio.run(tell())


def test_many_who_follow_read_the_store_once() -> None:
    """A hundred consoles must not cost a hundred looks at the disk for each change."""

    async def tell() -> None:
        store = Counted()
        await add(store, 5)
        tail = HistoryFeed(store)
        await all_after(tail, 5)
        await add(store, 3)
        store.reads = 0

        told = await asyncio.gather(*(tail.after(5) for _ in range(100)))
        assert [[note.number for note in one] for one in told] == [[6, 7, 8]] * 100
        assert store.reads == 1

    asyncio.run(tell())


def test_whoever_begins_at_the_end_is_told_the_next_note_however_long_nobody_followed() -> None:
    """What was kept for the last one who followed may be thousands of notes old."""

    async def tell() -> None:
        store = MemoryStore()
        tail = HistoryFeed(store)
        await add(store, 1)
        await all_after(tail, 0)
        await add(store, 3 * BATCH)
        last = await tail.last()
        assert await tail.after(last) == ()
        await add(store, 1)

        assert [note.number for note in await tail.after(last)] == [last + 1]

    asyncio.run(tell())


def test_a_hole_in_the_history_is_seen_as_a_hole() -> None:
    async def tell() -> None:
        store = MemoryStore()
        tail = HistoryFeed(store)
        await add(store, 10)
        await all_after(tail, 0)
        await add(store, 10)
        await store.trim(16)

        assert await all_after(tail, 10) == [16, 17, 18, 19, 20]
        assert [note.number for note in await tail.after(17)] == [18, 19, 20]

    asyncio.run(tell())


def test_a_bell_that_is_taken_before_the_look_misses_nothing() -> None:
    async def tell() -> None:
        tail = HistoryFeed(MemoryStore())
        bell = tail.bell
        tail.ring()

        assert bell.is_set()
        assert not tail.bell.is_set()

    asyncio.run(tell())


def test_there_is_a_limit_to_how_many_may_follow() -> None:
    tail = HistoryFeed(MemoryStore())
    with tail.following(2), tail.following(2):
        assert tail.followers == 2
        with pytest.raises(Unavailable, match="2 streams are open; at most 2"):
            tail.check_room(2)
    assert tail.followers == 0
