"""What only the memory store does."""

import asyncio

from forewarn.store.memory import HISTORY_VALUES_MAX, MemoryStore


def test_the_history_in_memory_is_limited() -> None:
    """A demo or a lab may run for weeks."""

    async def run() -> None:
        store = MemoryStore()
        for _ in range(2 * HISTORY_VALUES_MAX + 1):
            await store.commit([], entries=b"x")
        newest = 2 * HISTORY_VALUES_MAX + 1

        (oldest,) = await store.history(limit=1)
        assert oldest.position == newest - HISTORY_VALUES_MAX + 1
        assert [value.position for value in await store.history(after=newest - 2)] == [
            newest - 1,
            newest,
        ]

    asyncio.run(run())
