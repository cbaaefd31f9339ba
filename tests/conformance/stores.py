"""Every store, each with a way to open a new one. To test another store, add one line."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from aetcd import rpc

from forewarn.store.base import Lease, Store
from forewarn.store.etcd import EtcdStore
from forewarn.store.memory import MemoryStore
from forewarn.store.open import open_store
from forewarn.store.sqlite import SqliteStore
from tests.etcd_cluster import shared_etcd

Open = Callable[[], AbstractAsyncContextManager[Store]]
TEST_SECONDS_MAX = 20


class FakeTime:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


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
        store = await SqliteStore.open(f"{folder}/store.db", monotonic=FakeTime())
        try:
            yield store
        finally:
            await store.close()


@asynccontextmanager
async def etcd() -> AsyncIterator[Store]:
    """A prefix of its own in an etcd that all tests of this process share."""
    store = await open_store(shared_etcd().url(f"test-{uuid4().hex}"))
    try:
        yield store
    finally:
        await store.close()


STORES = (memory, sqlite, pytest.param(etcd, marks=pytest.mark.system))


async def kill_holder(store: Store, lease: Lease) -> None:
    """Let the lease expire, as if the process of its holder had died."""
    if isinstance(store, MemoryStore):
        await store.expire(lease.name)
    elif isinstance(store, EtcdStore):
        endpoint = store._client._endpoints[0]
        await rpc.LeaseStub(endpoint.channel).LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease.id))
        await store.renew_leases()
    else:
        assert isinstance(store, SqliteStore)
        clock = store._monotonic
        assert isinstance(clock, FakeTime)
        clock.seconds += lease.ttl_seconds + 1
        await store.renew_leases()


async def compact(store: Store, revision: int) -> None:
    """Let the store forget old changes, where it does not do so by their number."""
    if isinstance(store, EtcdStore):
        await store._client.write(rpc.CompactionRequest(revision=revision))
        shared_etcd.cache_clear()  # the next test has an etcd that remembers everything


def on_every_store(test: Callable[[Store], Awaitable[None]]) -> Callable[[Open], None]:
    """Run an async test on each store."""

    async def run(open_store: Open) -> None:
        async with asyncio.timeout(TEST_SECONDS_MAX), open_store() as store:
            await test(store)

    def run_test(open_store: Open) -> None:
        asyncio.run(run(open_store))

    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    return pytest.mark.parametrize("open_store", STORES, ids=lambda store: store.__name__)(run_test)
