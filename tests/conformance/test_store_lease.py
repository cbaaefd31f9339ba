"""The contract of `forewarn/store/base.py` on each store: leases."""

import asyncio

import pytest

from forewarn.errors import Conflict
from forewarn.store.base import Lease, RevisionCheck, Snapshot, Store, Write
from tests.conformance.stores import kill_holder, on_every_store

TTL = 600.0


async def acquire(store: Store, name: str = "a") -> Lease:
    lease = await store.lease(name, TTL)
    assert lease is not None
    return lease


@on_every_store
async def test_a_lease_is_an_ordinary_record(store: Store) -> None:
    """Every server sees in its watch who is alive."""
    lease = await acquire(store, "server/s1")

    record = await store.get("lease/server/s1")

    assert (lease.name, lease.key, lease.is_held()) == ("server/s1", "lease/server/s1", True)
    assert record.value
    assert record.revision == lease.revision
    assert (await anext(store.watch(0))).records == (record,)


@on_every_store
async def test_a_held_lease_cannot_be_acquired(store: Store) -> None:
    """Two servers must not send the same webhook."""
    lease = await acquire(store)

    assert await store.lease("a", TTL) is None
    assert await store.lease("b", TTL) is not None
    assert lease.is_held()


@on_every_store
async def test_one_of_many_concurrent_attempts_gets_the_lease(store: Store) -> None:
    """All servers try at the same time when one dies."""
    leases = await asyncio.gather(*(store.lease("a", TTL) for _ in range(20)))

    assert sum(lease is not None for lease in leases) == 1


@on_every_store
async def test_release_deletes_the_record(store: Store) -> None:
    """A server that stops hands its work over at once."""
    lease = await acquire(store)
    other = await acquire(store, "b")

    await lease.release()
    await lease.release()

    await lease.lost()
    assert not lease.is_held()
    assert other.is_held()
    deletion = (await anext(store.watch(other.revision))).records
    assert [(record.key, record.value) for record in deletion] == [("lease/a", None)]
    again = await acquire(store)
    assert again.revision > lease.revision
    assert (await store.get("lease/a")).revision == again.revision


@on_every_store
async def test_every_acquisition_has_a_value_of_its_own(store: Store) -> None:
    """The value identifies the holder, also after a release."""
    first = await acquire(store)
    before = await store.get("lease/a")
    await first.release()
    await acquire(store)

    assert (await store.get("lease/a")).value != before.value


@on_every_store
async def test_a_watch_sees_that_a_lease_expired(store: Store) -> None:
    """The other servers take over when a server dies."""
    lease = await acquire(store)
    waiting = asyncio.ensure_future(anext(store.watch(lease.revision)))
    await asyncio.sleep(0)

    await kill_holder(store, lease)

    batch: Snapshot = await waiting
    assert [(record.key, record.value) for record in batch.records] == [("lease/a", None)]
    assert batch.revision > lease.revision
    await lease.lost()
    assert not lease.is_held()
    assert await store.lease("a", TTL) is not None


@on_every_store
async def test_a_check_of_a_lost_lease_is_a_conflict(store: Store) -> None:
    """A server that was paused must not write after another one took over."""
    lease = await acquire(store)
    check = RevisionCheck(lease.key, lease.revision)
    written = await store.commit([Write("a", b"1", 0)], [check])
    await kill_holder(store, lease)

    with pytest.raises(Conflict):
        await store.commit([Write("a", b"2", written)], [check])
    await acquire(store)
    with pytest.raises(Conflict):
        await store.commit([Write("a", b"2", written)], [check])
    assert (await store.get("a")).value == b"1"


@on_every_store
async def test_deleting_the_record_ends_the_lease(store: Store) -> None:
    """The record is what counts, whoever deletes it."""
    lease = await acquire(store)
    await store.commit([Write(lease.key, None, lease.revision)])

    assert await store.lease("a", TTL) is not None


@on_every_store
async def test_close_ends_the_leases(store: Store) -> None:
    """Work under a lease must stop with the store."""
    lease = await acquire(store)
    waiting = asyncio.ensure_future(lease.lost())
    await asyncio.sleep(0)

    await store.close()

    await waiting
    assert not lease.is_held()
