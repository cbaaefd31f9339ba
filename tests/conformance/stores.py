"""Every store there is, each as a way to open a fresh one, and the way to tell a story on each.

A new store is one more line.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from tempfile import TemporaryDirectory

import pytest

from forewarn.store.base import Store
from forewarn.store.memory import MemoryStore
from forewarn.store.sqlite import SqliteStore

Opening = Callable[[], AbstractAsyncContextManager[Store]]
STORY_SECONDS_MAX = 20


@asynccontextmanager
async def memory() -> AsyncIterator[Store]:
    store = MemoryStore()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def sqlite() -> AsyncIterator[Store]:
    with TemporaryDirectory() as folder:
        store = await SqliteStore.open(f"{folder}/store.db")
        try:
            yield store
        finally:
            await store.close()


STORES: tuple[Opening, ...] = (memory, sqlite)


def on_every_store(story: Callable[[Store], Awaitable[None]]) -> Callable[[Opening], None]:
    """Makes an async story about a store into a test of each one."""

    async def told(opening: Opening) -> None:
        async with asyncio.timeout(STORY_SECONDS_MAX), opening() as store:
            await story(store)

    def test(opening: Opening) -> None:
        asyncio.run(told(opening))

    test.__name__, test.__doc__ = story.__name__, story.__doc__
    return pytest.mark.parametrize("opening", STORES, ids=lambda opening: opening.__name__)(test)
