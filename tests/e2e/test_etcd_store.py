"""The etcd store beyond the contract: pages, segments, fail-over, compaction."""

import asyncio
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from forewarn.errors import StoreLost
from forewarn.store import etcd
from forewarn.store.base import POSITION_MAX, VALUE_BYTES_MAX, HistoryValue, Record, Store, Write
from forewarn.store.etcd_options import EtcdOptions
from forewarn.store.open import open_store
from tests.conformance.stores import compact
from tests.etcd_cluster import EtcdCluster, Member, shared_etcd

pytestmark = pytest.mark.system
LIMIT_SECONDS = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    three = EtcdCluster(tmp_path, size=3)
    try:
        three.start()
        yield three
    finally:
        three.stop()


def with_single(folder: Path, test: Callable[[EtcdCluster], Coroutine[Any, Any, None]]) -> None:
    """Run the test on one member of its own."""
    single = EtcdCluster(folder)
    try:
        single.start()
        asyncio.run(test(single))
    finally:
        single.stop()


async def write_all(store: Store, name: str, count: int) -> None:
    for number in range(count):
        await store.commit(
            [Write(f"{name}/{number}", b"x", 0)], entries=f"{name} {number}".encode()
        )


def test_history_of_several_servers_is_in_order_over_many_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Positions grow for every reader, whichever server wrote and whenever segments began."""
    monkeypatch.setattr(etcd, "SEGMENT_VALUES", 7)

    async def main() -> None:
        url = shared_etcd().url(uuid4().hex)
        stores = [await open_store(url) for _ in range(3)]
        await asyncio.gather(*(write_all(one, f"s{n}", 40) for n, one in enumerate(stores)))

        pages, after = list[HistoryValue](), 0
        while page := await stores[0].history(after, limit=25):
            pages += page
            after = page[-1].position
        assert [value.position for value in pages] == sorted({value.position for value in pages})
        for name in ("s0", "s1", "s2"):
            own = [value.value.decode() for value in pages if value.value.startswith(name.encode())]
            assert own == [f"{name} {number}" for number in range(40)]
        assert list(await stores[1].latest(limit=200)) == pages[::-1]

        assert await stores[2].trim(pages[100].position, limit=1000) == 100
        assert list(await stores[0].history()) == pages[100:]
        assert await stores[1].trim(POSITION_MAX) == 19
        await write_all(stores[0], "more", 20)
        assert [value.value for value in await stores[2].history()] == [
            pages[-1].value,
            *(f"more {number}".encode() for number in range(20)),
        ]
        found = await stores[1].load()
        assert len(found.records) == 140
        for one in stores:
            await one.close()

    asyncio.run(main())


def test_a_full_segment_does_not_make_the_store_look_newer_than_its_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle service would wait for a change that never comes."""
    monkeypatch.setattr(etcd, "SEGMENT_VALUES", 3)

    async def main() -> None:
        store = await open_store(shared_etcd().url(uuid4().hex))
        for number in range(10):
            revision = await store.commit([Write(f"k{number}", b"", 0)], entries=b"x")
            assert (await store.get("absent")).revision == revision
        assert len(await store.history()) == 10
        await store.close()

    asyncio.run(main())


def test_commits_without_history_begin_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers without events write their clocks all day, and each segment costs a reader a call."""
    monkeypatch.setattr(etcd, "SEGMENT_VALUES", 3)

    async def main() -> None:
        url = shared_etcd().url(uuid4().hex)
        stores = [await open_store(url) for _ in range(2)]
        for number in range(20):
            await stores[number % 2].commit([Write(f"k{number}", b"", 0)])
        await stores[0].commit([Write("event", b"", 0)], entries=b"x")
        assert await segments_of(stores[0]) == 1
        for number in range(12):  # another server, or one that started just now, counts on
            await stores[1].close()
            stores[1] = await open_store(url)
            await stores[number % 2].commit([Write(f"more{number}", b"", 0)], entries=b"x")
        assert 2 <= await segments_of(stores[0]) <= 5
        assert len(await stores[0].history()) == 13
        for one in stores:
            await one.close()

    asyncio.run(main())


async def segments_of(store: Store) -> int:
    assert isinstance(store, etcd.EtcdStore)
    return len(await store._segments_between(0, POSITION_MAX))


def test_history_is_kept_by_commits_whatever_else_etcd_is_used_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A neighbour's writes are revisions too, but not history."""
    monkeypatch.setattr(etcd, "SEGMENT_VALUES", 3)

    async def main() -> None:
        url, neighbour = shared_etcd().url(uuid4().hex), shared_etcd().url(uuid4().hex)
        store, other = await open_store(url), await open_store(neighbour)
        await write_all(store, "a", 20)
        await write_all(other, "b", 50)
        kept = [each.position for each in await store.history()]
        first = await store.first_of_newest(8)
        assert 8 <= sum(position >= first for position in kept) <= 15
        await store.close()
        await other.close()

    asyncio.run(main())


def test_a_store_that_is_quiet_in_a_busy_etcd_is_followed_after_a_compaction(
    tmp_path: Path,
) -> None:
    """What was loaded is newer than what was compacted, though its last commit is not."""

    async def main(single: EtcdCluster) -> None:
        store, other = await open_store(single.url()), await open_store(single.url("other"))
        await store.commit([Write("a", b"1", 0)])
        await write_all(other, "b", 20)
        await compact(store, (await other.load()).revision)
        watch = store.watch((await store.load()).revision)
        following = asyncio.ensure_future(anext(watch))
        revision = await store.commit([Write("b", b"1", 0)])
        async with asyncio.timeout(LIMIT_SECONDS):
            assert (await following).revision == revision
        await store.close()
        await other.close()

    with_single(tmp_path, main)


def test_a_load_of_many_pages_is_as_of_one_revision() -> None:
    """A fleet that changes while it is loaded must not be seen half old, half new."""

    async def main() -> None:
        store = await open_store(shared_etcd().url(uuid4().hex))
        keys = [f"k{number:03}" for number in range(300)]
        for start in range(0, 300, 100):
            await store.commit([Write(key, b"0", 0) for key in keys[start : start + 100]])

        async def change_all() -> None:
            revisions = {record.key: record.revision for record in (await store.load()).records}
            for number in range(1, 40):
                pair = (keys[0], keys[-1])
                writes = [Write(key, b"%d" % number, revisions[key]) for key in pair]
                revisions |= dict.fromkeys(pair, await store.commit(writes))

        changing = asyncio.ensure_future(change_all())
        while not changing.done():
            records = (await store.load()).records
            assert [record.key for record in records] == keys
            assert records[0].value == records[-1].value
        await changing
        await store.close()

    asyncio.run(main())


def test_a_watch_delivers_changes_larger_than_a_message() -> None:
    """etcd divides them into fragments; a commit is still reported as a whole."""

    async def main() -> None:
        store = await open_store(shared_etcd().url(uuid4().hex))
        first = (await store.load()).revision
        value = b"x" * (VALUE_BYTES_MAX // 2)
        for number in range(12):
            last = await store.commit(
                [Write(f"a{number}", value, 0), Write(f"b{number}", value, 0)]
            )
        seen: list[Record] = []
        async for batch in store.watch(first):
            assert len(batch.records) % 2 == 0
            seen += batch.records
            if batch.revision == last:
                break
        assert len(seen) == 24
        await store.close()

    asyncio.run(main())


def members_by_use(cluster: EtcdCluster, store: Store) -> list[Member]:
    """The members in the order in which the store would use them."""
    assert isinstance(store, etcd.EtcdStore)
    addresses = [endpoint.address for endpoint in store._client._endpoints]
    return sorted(cluster.members, key=lambda member: addresses.index(member.client))


async def commit_soon(store: Store, key: str) -> int:
    """Commit as the engine does: a lost reply is resolved by reading."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with suppress(StoreLost):
                record = await store.get(key)
                return record.revision if record.value else await store.commit([Write(key, b"", 0)])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_reads_commits_and_watches_continue_without_the_member_in_use(
    cluster: EtcdCluster, number: signal.Signals
) -> None:
    """A majority is sufficient, whichever member fails and however."""

    async def main() -> None:
        store, other = await open_store(cluster.url()), await open_store(cluster.url())
        watch = store.watch((await store.load()).revision)
        first = await commit_soon(store, "a")
        assert (await anext(watch)).revision == first
        lease = await other.lease("l", 10)
        assert lease is not None
        assert (await anext(watch)).revision == lease.revision

        members_by_use(cluster, store)[0].signal(number)

        revision = await commit_soon(other, "b")
        async with asyncio.timeout(LIMIT_SECONDS):
            assert (await anext(watch)).revision == revision
        revision = await commit_soon(store, "c")
        async with asyncio.timeout(LIMIT_SECONDS):
            assert (await anext(watch)).revision == revision
        await other.renew_leases()  # type: ignore[attr-defined]
        assert lease.is_held()
        await store.close()
        await other.close()

    asyncio.run(main())


def test_without_a_majority_every_call_is_lost_and_later_works_again(cluster: EtcdCluster) -> None:
    """Nothing hangs, and the store recovers by itself."""

    async def main() -> None:
        store = await open_store(cluster.url())
        await commit_soon(store, "a")
        watching = asyncio.ensure_future(anext(store.watch((await store.load()).revision)))
        for member in cluster.members[:2]:
            member.kill()

        async with asyncio.timeout(LIMIT_SECONDS):
            with pytest.raises(StoreLost):
                await store.commit([Write("b", b"", 0)])
            with pytest.raises(StoreLost):
                await store.get("a")
            with pytest.raises(StoreLost):
                await watching
        for member in cluster.members[:2]:
            cluster.launch(member)
        await commit_soon(store, "c")
        assert (await store.get("a")).value == b""
        await store.close()

    asyncio.run(main())


def test_a_watch_that_is_cut_leaves_nothing_behind(tmp_path: Path) -> None:
    """A request that gRPC still waits for would be collected later, with an error in the log."""
    one = EtcdCluster(tmp_path)

    async def main() -> list[str]:
        problems: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context["message"]))
        store = await open_store(one.url())
        watch = store.watch((await store.load()).revision)
        waiting = asyncio.ensure_future(anext(watch))
        last = await store.commit([Write("a", b"", 0)])
        assert (await waiting).revision == last
        one.stop()
        with pytest.raises(StoreLost):
            await anext(watch)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        problems += [repr(task) for task in tasks if "_consume_request_iterator" in repr(task)]
        await store.close()
        return problems

    try:
        one.start()
        assert asyncio.run(main()) == []
    finally:
        one.stop()


async def follow(store: Store, after: int) -> int:
    """The last revision that a watch has seen when the store is closed."""
    async for batch in store.watch(after):
        after = batch.revision
    return after


def test_the_service_compacts_revisions_older_than_its_retention(tmp_path: Path) -> None:
    """Otherwise etcd would keep every version of every record for ever."""

    async def main(single: EtcdCluster) -> None:
        store = await open_store(single.url(), etcd=EtcdOptions(retention_minutes=0.001))
        first = await store.commit([Write("a", b"1", 0)])
        following = asyncio.ensure_future(follow(store, first))
        revision = first
        command = ["etcdctl", f"--endpoints={single.members[0].client}", "get", "x"]
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                revision = await store.commit([Write("a", b"2", revision)])
                read = await asyncio.to_thread(
                    subprocess.run,
                    [*command, f"--rev={first}"],
                    check=False,
                    capture_output=True,
                    text=True,
                )
                if "has been compacted" in read.stderr:
                    break
        await store.close()
        assert await following == revision

    with_single(tmp_path, main)
