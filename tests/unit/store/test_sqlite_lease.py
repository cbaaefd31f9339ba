"""Leases of several processes on one file, with a clock that the tests move."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from forewarn.store.base import Lease
from forewarn.store.sqlite import SqliteStore
from tests.conformance.stores import FakeTime

TTL = 600.0
Test = Callable[[SqliteStore, SqliteStore, FakeTime], Awaitable[None]]


def with_two_stores(path: Path, test: Test) -> None:
    """Two stores on one file, as two processes of a machine would have them."""

    @asynccontextmanager
    async def opened(time: FakeTime) -> AsyncIterator[SqliteStore]:
        store = await SqliteStore.open(str(path), monotonic=time)
        try:
            yield store
        finally:
            await store.close()

    async def run() -> None:
        time = FakeTime()
        async with asyncio.timeout(20), opened(time) as one, opened(time) as other:
            await test(one, other, time)

    asyncio.run(run())


async def acquire(store: SqliteStore, name: str = "a") -> Lease:
    lease = await store.lease(name, TTL)
    assert lease is not None
    return lease


def test_renewing_a_lease_takes_no_revision(tmp_path: Path) -> None:
    """An idle server must not wake every other server every few seconds."""

    async def test(one: SqliteStore, other: SqliteStore, time: FakeTime) -> None:
        lease = await acquire(one)
        for _ in range(10):
            time.seconds += TTL / 3
            await one.renew_leases()
            assert lease.is_held()
            assert await other.lease("a", TTL) is None
        assert (await other.load()).revision == lease.revision

    with_two_stores(tmp_path / "store.db", test)


def test_a_lease_that_is_not_renewed_is_taken_over(tmp_path: Path) -> None:
    """The process may be dead; its work must go on."""

    async def test(one: SqliteStore, other: SqliteStore, time: FakeTime) -> None:
        lease = await acquire(one)
        time.seconds += TTL - 1
        assert await other.lease("a", TTL) is None
        time.seconds += 2
        assert await other.lease("a", TTL) is not None
        await one.renew_leases()
        assert not lease.is_held()

    with_two_stores(tmp_path / "store.db", test)


def test_the_holder_stops_before_another_can_start(tmp_path: Path) -> None:
    """A process that was paused must not work in parallel with its successor."""

    async def test(one: SqliteStore, other: SqliteStore, time: FakeTime) -> None:
        lease = await acquire(one)
        time.seconds += TTL * 2 / 3 - 1
        assert lease.is_held()
        time.seconds += 1
        assert not lease.is_held()
        await asyncio.wait_for(lease.lost(), 1)
        assert await other.lease("a", TTL) is None
        await one.renew_leases()
        assert not lease.is_held()

    with_two_stores(tmp_path / "store.db", test)


def test_a_renewal_deletes_expired_leases_of_others(tmp_path: Path) -> None:
    """Every living server notices a dead one, without trying to acquire its lease."""

    async def test(one: SqliteStore, other: SqliteStore, time: FakeTime) -> None:
        await acquire(one, "server/one")
        time.seconds += TTL / 2
        mine = await acquire(other, "server/other")
        time.seconds += TTL / 2 + 1
        await other.renew_leases()
        batch = await anext(other.watch(mine.revision))
        assert [(record.key, record.value) for record in batch.records] == [
            ("lease/server/one", None)
        ]

    with_two_stores(tmp_path / "store.db", test)


def test_a_lease_from_before_a_reboot_is_expired(tmp_path: Path) -> None:
    """The monotonic clock starts again with the machine."""

    async def test(one: SqliteStore, other: SqliteStore, time: FakeTime) -> None:
        time.seconds = 1_000_000
        await acquire(one)
        time.seconds = 5
        assert await other.lease("a", TTL) is not None

    with_two_stores(tmp_path / "store.db", test)


def test_close_hands_the_leases_over(tmp_path: Path) -> None:
    """A restart must not wait for the ttl."""

    async def test(one: SqliteStore, other: SqliteStore, time: FakeTime) -> None:
        await acquire(one)
        await one.close()
        assert await other.lease("a", TTL) is not None

    with_two_stores(tmp_path / "store.db", test)


def test_a_lease_is_renewed_in_the_background(tmp_path: Path) -> None:
    """Holding a lease needs no help of its holder."""

    async def run() -> None:
        time = FakeTime()
        store = await SqliteStore.open(str(tmp_path / "store.db"), monotonic=time)
        lease = await store.lease("a", 0.03)
        assert lease is not None
        async with asyncio.timeout(60):
            for _ in range(5):
                before = lease._held_until
                time.seconds += 0.01
                while lease._held_until == before:
                    await asyncio.sleep(0.001)
        assert lease.is_held()
        await store.close()

    asyncio.run(run())
