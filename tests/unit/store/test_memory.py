"""What only the store in memory does."""

import asyncio

from forewarn.store.memory import NOTES_MAX, MemoryStore


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
        assert [note.number for note in await store.history(after=newest - 3, limit=2)] == [newest - 2, newest - 1]
        assert await store.history(after=newest) == ()

    asyncio.run(story())
