"""What only the memory store does."""

import asyncio

from forewarn.store.base import Write
from forewarn.store.memory import HISTORY_VALUES_MAX, MemoryStore
from tests.work import work_of


def test_the_history_in_memory_is_limited() -> None:
    """A demo or a lab may run for weeks."""

    async def run() -> None:
        store = MemoryStore()
        for _ in range(2 * HISTORY_VALUES_MAX + 1):
            await store.commit([], entries=b"x")
        newest = 2 * HISTORY_VALUES_MAX + 1

        assert await store.oldest_position() == newest - HISTORY_VALUES_MAX + 1
        assert [value.position for value in await store.history(after=newest - 2)] == [
            newest - 1,
            newest,
        ]

    asyncio.run(run())


def test_reading_one_record_does_not_get_slower_with_the_store() -> None:
    """Every refusal reads its scope again, and a VM can cause refusals at will."""

    async def measure(size: int) -> int:
        store = MemoryStore()
        for number in range(size):
            await store.commit([Write(f"scope/{number:05}/", b"", 0)])
        await store.load("scope/00050/")
        return await work_of(store.load("scope/00050/"))

    small, large = asyncio.run(measure(100)), asyncio.run(measure(2000))
    assert large < 1.5 * small
