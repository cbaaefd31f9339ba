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
from forewarn.store.base import Record, Write
from forewarn.store.etcd import EtcdStore
from forewarn.store.etcd_layout import FOREIGN_LOGGED_MAX, transaction
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
        batches = store.watch(revision)
        await prefix.put(b"record/\xff\xfe", b"x")
        for _ in range(3):
            assert (await store.load()).records == (Record("scope/web/", b"1", revision),)
        later = await store.commit([Write("scope/web/", b"2", revision)])
        shown = list[Record]()
        while not shown:  # the foreign key may be in a batch of its own
            shown += (await anext(batches)).records
        await batches.aclose()

        assert shown == [Record("scope/web/", b"2", later)]
        [line] = own_lines(caplog)
        assert "did not write" in line.message
        assert r"\xff\xfe" in str(facts_of(line)["key"])

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


@pytest.mark.parametrize("name", ["9999999999", "5xyz", "00000000025"])
def test_segment_that_none_can_follow_is_not_ready_with_the_reason(name: str) -> None:
    """Nothing can be committed: a load balancer should know, and an operator what to delete."""

    async def test(prefix: Prefix) -> None:
        service = build_service(prefix.store, RealClock(), Timing(), lambda: "ID")
        engine = service.engine
        await engine.load()
        following = asyncio.create_task(engine.follow())
        client = make_client(make_app(service))
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        await prefix.put(f"segment/{name}")
        while (await client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.05)
        message = (await client.get("/readyz")).json()["message"]
        assert f"segment/{name}" in message
        assert "delete it" in message
        with pytest.raises(StoreUnusable, match="delete it"):
            await prefix.store.commit([Write("scope/web/", b"1", 0)])

        await prefix.delete(f"segment/{name}")
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        following.cancel()
        await prefix.store.commit([Write("scope/web/", b"1", 0)])

    with_prefix(test)
