"""Keys below the prefix of a store that Forewarn did not write: a program with a wrong prefix, an
operator's typing error.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from aetcd import rpc

from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.errors import StoreUnusable
from forewarn.log import facts_of
from forewarn.store.base import Record, Snapshot, Write
from forewarn.store.etcd import SEGMENT_VALUES, EtcdStore
from forewarn.store.etcd_layout import (
    FOREIGN_LOGGED_MAX,
    SEGMENTS_SKIPPED_MAX,
    span,
    transaction,
)
from forewarn.store.open import open_store
from forewarn.web.control.app import make_app
from forewarn.web.service import build_service
from tests.etcd_cluster import shared_etcd
from tests.unit.web.control_world import make_client

pytestmark = pytest.mark.system
LIMIT_SECONDS = 60


class Prefix:
    """A store, and what others do below its prefix."""

    def __init__(self, name: str, store: EtcdStore) -> None:
        self._name = name
        self.store = store

    @property
    def url(self) -> str:
        return shared_etcd().url(self._name)

    async def names(self, folder: str) -> list[str]:
        """The keys that start with this."""
        first, end = span(self._key(folder))
        request = rpc.RangeRequest(key=first, range_end=end, keys_only=True)
        found = (await self.store._client.read(request)).kvs
        return [each.key.decode().removeprefix(f"{self._name}/") for each in found]

    async def put(self, key: str | bytes, value: bytes = b"") -> None:
        request = rpc.PutRequest(key=self._key(key), value=value)
        await self.store._client.write(transaction([request]))

    async def delete(self, key: str | bytes) -> None:
        request = rpc.DeleteRangeRequest(key=self._key(key))
        await self.store._client.write(transaction([request]))

    def _key(self, key: str | bytes) -> bytes:
        return f"{self._name}/".encode() + (key.encode() if isinstance(key, str) else key)


@asynccontextmanager
async def new_prefix() -> AsyncIterator[Prefix]:
    name = uuid4().hex
    store = await open_store(shared_etcd().url(name))
    assert isinstance(store, EtcdStore)
    try:
        yield Prefix(name, store)
    finally:
        await store.close()


def with_prefix(test: Callable[[Prefix], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_SECONDS), new_prefix() as prefix:
            await test(prefix)

    asyncio.run(run())


def own_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Those of the product.

    gRPC has one queue for all event loops of a process. A reply for the closed loop of an earlier
    test fails in a callback of the present one, and asyncio logs that.
    """
    return [record for record in caplog.records if record.name == "forewarn"]


def test_record_whose_name_is_not_text_is_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(prefix: Prefix) -> None:
        store = prefix.store
        revision = await store.commit([Write("scope/web/", b"1", 0)])
        await prefix.put(b"record/\xff\xfe", b"x")
        for _ in range(3):
            assert (await store.load()).records == (Record("scope/web/", b"1", revision),)

        [line] = own_lines(caplog)
        assert "did not write" in line.message
        assert r"\xff\xfe" in str(facts_of(line)["key"])

    with_prefix(test)


def test_watch_leaves_out_a_batch_of_foreign_keys() -> None:
    """A batch is never empty, and etcd shows each transaction in a batch of its own."""

    async def test(prefix: Prefix) -> None:
        store = prefix.store
        revision = await store.commit([Write("scope/web/", b"1", 0)])
        batches = store.watch(0)
        await anext(batches)
        await prefix.put(b"record/\xff\xfe")
        later = await store.commit([Write("scope/web/", b"2", revision)])

        assert await anext(batches) == Snapshot(later, (Record("scope/web/", b"2", later),))
        await batches.aclose()

    with_prefix(test)


@pytest.mark.parametrize("key", ["record/", "record/nothing"])
def test_foreign_key_does_not_keep_a_server_behind_the_others(key: str) -> None:
    """A server that reads the revision of such a key would believe that it knows everything."""

    async def test(prefix: Prefix) -> None:
        await prefix.put(key, b"x")
        service = build_service(prefix.store, RealClock(), Timing(), lambda: "id")
        await service.engine.load()
        revision = await prefix.store.commit([Write("token/new", b"{}", 0)])
        assert (await prefix.store.get("")).revision == revision
        assert all(record.key for record in (await prefix.store.load()).records)

        assert await service.engine.catch_up()
        assert service.engine.board.revision >= revision
        await service.engine.close()

    with_prefix(test)


def test_foreign_keys_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(prefix: Prefix) -> None:
        for number in range(FOREIGN_LOGGED_MAX + 10):
            await prefix.put(b"record/\xff%d" % number)
        await prefix.store.load()

        assert len(own_lines(caplog)) == FOREIGN_LOGGED_MAX

    with_prefix(test)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("segment/abc", b""),
        (b"segment/\xff", b""),
        ("segment/", b""),
        ("segment/00000000015", b""),
        ("segment/0000000001", b"many"),
        ("history/abc", b""),
        ("history/0000000001/a/b", b"x"),
        (b"history/0000000001/\xff", b"x"),
        ("other/x", b""),
    ],
)
def test_other_foreign_keys_change_nothing(key: str | bytes, value: bytes) -> None:
    async def test(prefix: Prefix) -> None:
        store = prefix.store
        first = await store.commit([Write("scope/web/", b"1", 0)], entries=b"[]")
        await prefix.put(key, value)
        second = await store.commit([Write("scope/web/", b"2", first)], entries=b"[1]")
        assert await store.get("scope/web/") == Record("scope/web/", b"2", second)
        assert (await store.load()).revision >= second
        assert (await store.history())[-1].position == second
        await store.trim(second)
        assert [each.position for each in await store.history()] == [second]
        third = await store.commit([Write("scope/web/", b"3", second)], entries=b"[2]")
        assert [each.position for each in await store.history()] == [second, third]

    with_prefix(test)


def test_trimming_leaves_foreign_keys_alone() -> None:
    """Also those between the segments that it deletes."""

    async def test(prefix: Prefix) -> None:
        store, foreign = prefix.store, ("segment/", "segment/00000000015", "segment/abc")
        values = (store.commit([], entries=b"[]") for _ in range(SEGMENT_VALUES))
        last = max(await asyncio.gather(*values))
        for name in foreign:
            await prefix.put(name)
        for _ in range(2):
            last = await store.commit([], entries=b"[]")
        assert await prefix.names("segment/") == [
            "segment/",
            "segment/0000000001",
            "segment/00000000015",
            "segment/0000000002",
            "segment/abc",
        ]
        while await store.trim(last):
            pass
        assert await prefix.names("segment/") == [*foreign[:2], "segment/0000000002", foreign[2]]
        assert [each.position for each in await store.history()] == [last]

    with_prefix(test)


def test_foreign_keys_are_not_commits_that_a_limit_counts() -> None:
    async def test(prefix: Prefix) -> None:
        store = prefix.store
        first = await store.commit([], entries=b"[]")
        await store.commit([], entries=b"[]")
        for _ in range(5):
            await prefix.put("segment/00000000015")
        assert await store.first_of_newest(2) <= first

    with_prefix(test)


AHEAD = ["0000500000", "9999999998", "9999999999", "5xyz", "00000000025"]


@pytest.mark.parametrize("name", AHEAD)
def test_segment_far_ahead_is_not_ready_with_the_reason_until_it_is_deleted(name: str) -> None:
    """Nothing can be committed: a load balancer should know, and an operator what to delete."""

    async def test(prefix: Prefix) -> None:
        store = prefix.store
        service = build_service(store, RealClock(), Timing(), lambda: "ID")
        engine = service.engine
        await engine.load()
        following = asyncio.create_task(engine.follow())
        client = make_client(make_app(service))
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        first = await store.commit([Write("scope/web/", b"1", 0)], entries=b"[]")
        await prefix.put(f"segment/{name}")
        while (await client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.05)
        message = (await client.get("/readyz")).json()["message"]
        assert f"segment/{name}" in message
        assert "delete it" in message
        with pytest.raises(StoreUnusable, match="delete it"):
            await store.commit([Write("scope/web/", b"2", first)], entries=b"[1]")

        await prefix.delete(f"segment/{name}")
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        following.cancel()
        second = await store.commit([Write("scope/web/", b"2", first)], entries=b"[1]")
        history = await store.history()
        assert [(each.position, each.value) for each in history] == [
            (first, b"[]"),
            (second, b"[1]"),
        ]

    with_prefix(test)


@pytest.mark.parametrize("name", AHEAD)
def test_server_that_starts_does_not_use_a_segment_far_ahead(name: str) -> None:
    """Else its history would go there, and be deleted with the key."""

    async def test(prefix: Prefix) -> None:
        await prefix.store.commit([Write("scope/web/", b"1", 0)], entries=b"[]")
        await prefix.put(f"segment/{name}")
        other = await open_store(prefix.url)
        try:
            with pytest.raises(StoreUnusable, match=f"segment/{name}.*delete it"):
                await other.load()
            with pytest.raises(StoreUnusable, match="delete it"):
                await other.commit([], entries=b"[1]")
            await prefix.delete(f"segment/{name}")
            assert len((await other.load()).records) == 1
            await other.commit([], entries=b"[1]")
            assert [each.value for each in await other.history()] == [b"[]", b"[1]"]
        finally:
            await other.close()

    with_prefix(test)


def test_server_follows_segments_that_began_and_were_trimmed_while_it_was_away() -> None:
    async def test(prefix: Prefix) -> None:
        store = prefix.store
        other = await open_store(prefix.url)
        try:
            await other.load()
            for number in range(2, 2 + 3 * SEGMENTS_SKIPPED_MAX):  # as if each were full
                await store.commit([], entries=b"[]")
                store._enter(number)
            last = await store.commit([], entries=b"[1]")
            while await store.trim(last):
                pass
            assert [each.value for each in await other.history()] == [b"[1]"]
            await other.commit([], entries=b"[2]")
            assert [each.value for each in await store.history()] == [b"[1]", b"[2]"]
        finally:
            await other.close()

    with_prefix(test)
