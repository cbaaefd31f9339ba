"""What only the store in memory does."""

import asyncio

from forewarn.store.base import Write
from forewarn.store.memory import NOTES_MAX, MemoryStore
from tests.work import work_of


def test_the_history_in_memory_is_limited_and_its_numbers_go_on() -> None:
    """A demo or a lab may run for weeks."""

    async def story() -> None:
        store, lines = MemoryStore(), [b"note"] * 1000
        for _ in range(2 * NOTES_MAX // len(lines) + 1):
            await store.commit([], lines)
        newest = 2 * NOTES_MAX + len(lines)
        (last,) = await store.history(after=newest - 1)
        first = (await store.history(limit=1))[0]

        assert last.number == newest
        assert first.number == newest - NOTES_MAX + 1
        assert [note.number for note in await store.history(after=newest - 3, limit=2)] == [
            newest - 2,
            newest - 1,
        ]
        assert await store.history(after=newest) == ()

    asyncio.run(story())


def test_reading_one_record_costs_the_same_however_many_there_are() -> None:
    """Every refusal reads its scope again before it is believed, and a VM can make refusals as it
    likes.
    """

    async def measure(size: int) -> int:
        store = MemoryStore()
        for number in range(size):
            await store.commit([Write(f"scope/{number:05}/", b"", 0)])
        await store.load("scope/00050/")
        return await work_of(store.load("scope/00050/"))

    small, large = asyncio.run(measure(100)), asyncio.run(measure(2000))
    assert large < 1.5 * small
