"""A store copied into another one: everything arrives, and nothing is delivered twice or lost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forewarn.engine.entry import ENTRIES_MAX, first_number, last_number
from forewarn.errors import Invalid, Refused, StoreLost, StoreUnusable
from forewarn.history.transfer import COPY_KEY, check_complete, copy_store, move_number
from forewarn.history.webhooks import CURSOR, IDENTITY_KEY, Cursor
from forewarn.store.base import (
    COMMIT_BYTES_MAX,
    VALUE_BYTES_MAX,
    WRITES_MAX,
    HistoryValue,
    Record,
    RevisionCheck,
    Store,
    Write,
)
from forewarn.store.memory import MemoryStore
from tests.conformance.stores import STORES, Open, kill_holder, memory

WEBHOOK = "webhook/abc/"


async def fill(store: Store) -> None:
    """Some records, of which one has gone, and a history without its beginning."""
    await store.commit([Write("scope/web/", b"1", 0)], entries=b'[{"by":"a"}]')
    revision = await store.commit([Write("scope/gone/", b"1", 0)], entries=b'[{"by":"b"}]')
    await store.commit([Write("token/ann/", b"2", 0), Write("fleet", b"3", 0)])
    await store.commit([Write("scope/gone/", None, revision)], entries=b'[{"by":"c"}]')
    await store.commit([], entries=b'[{"by":"a"}]')
    await store.trim(revision, 10)


async def contents(store: Store) -> tuple[dict[str, bytes | None], list[bytes]]:
    records = {record.key: record.value for record in (await store.load()).records}
    return records, [value.value for value in await store.history()]


class Fragile(MemoryStore):
    """Loses the connection at one commit, which happens or not."""

    def __init__(self, *, lost_at: int, happens: bool) -> None:
        super().__init__()
        self.commits = count(1)
        self.lost_at, self.happens = lost_at, happens

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        is_lost = next(self.commits) == self.lost_at
        if not is_lost or self.happens:
            revision = await super().commit(writes, checks, entries)
        if is_lost:
            raise StoreLost("lost")
        return revision


def run(main: Callable[[MemoryStore, MemoryStore], Awaitable[None]]) -> None:
    async def start() -> None:
        await main(MemoryStore(), MemoryStore())

    asyncio.run(start())


@pytest.mark.parametrize("open_source", STORES, ids=lambda store: store.__name__)
@pytest.mark.parametrize("open_target", STORES, ids=lambda store: store.__name__)
def test_copy_has_the_records_and_the_history_of_any_store(
    open_source: Open, open_target: Open
) -> None:
    async def main() -> None:
        async with open_source() as source, open_target() as target:
            await fill(source)
            done: list[tuple[int, int]] = []
            in_source, in_target = await copy_store(
                source, target, report=lambda *progress: done.append(progress)
            )
            last = (await source.latest(limit=1))[0].position
            assert (len(done), done[-1]) == (len(await source.history()), (last, last))
            assert in_source == in_target
            assert in_source.startswith("3 records, 3 history values, sha256 ")
            records, history = await contents(target)
            assert records.pop("lease/copy")
            assert records == {"scope/web/": b"1", "token/ann/": b"2", "fleet": b"3"}
            assert history == [b'[{"by":"b"}]', b'[{"by":"c"}]', b'[{"by":"a"}]']
            await check_complete(target)

    asyncio.run(main())


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("lost_at", range(2, 9))
def test_interrupted_copy_is_refused_and_continued(lost_at: int, happens: bool) -> None:
    """Half a fleet must not be served. The lost commit may have happened."""

    async def main() -> None:
        source, target = MemoryStore(), Fragile(lost_at=lost_at, happens=happens)
        await fill(source)
        with pytest.raises(StoreLost):
            await copy_store(source, target)
        is_complete = lost_at == 8 and happens
        is_empty = lost_at == 2 and not happens
        if not is_complete and not is_empty:
            with pytest.raises(StoreUnusable, match=r"incomplete copy.*`forewarn store copy`"):
                await check_complete(target)
            other = MemoryStore()
            with pytest.raises(StoreUnusable, match="incomplete copy"):
                await copy_store_again(target, other)
        if not is_complete:
            in_source, in_target = await copy_store_again(source, target)
            assert in_source == in_target
        await check_complete(target)
        await target.expire(COPY_KEY)
        assert (await contents(target))[1] == (await contents(source))[1]
        assert (await contents(target))[0] == {
            "scope/web/": b"1",
            "token/ann/": b"2",
            "fleet": b"3",
        }

    asyncio.run(main())


async def copy_store_again(source: MemoryStore, target: MemoryStore) -> tuple[str, str]:
    """As another process does, after the first one has ended."""
    for store in (source, target):
        if (await store.get("lease/copy")).value:
            await store.expire(COPY_KEY)
    return await copy_store(source, target)


def test_source_that_was_served_after_an_interrupted_copy_is_copied_as_it_is() -> None:
    async def main() -> None:
        source, target = MemoryStore(), Fragile(lost_at=8, happens=False)
        await fill(source)
        with pytest.raises(StoreLost):
            await copy_store(source, target)
        revision = (await source.get("scope/web/")).revision
        await source.commit([Write("scope/web/", b"new", revision)], entries=b'[{"by":"d"}]')
        in_source, in_target = await copy_store_again(source, target)
        assert in_source == in_target
        assert (await target.get("scope/web/")).value == b"new"

    asyncio.run(main())


def test_interrupted_copy_is_not_mixed_with_another_history() -> None:
    async def main() -> None:
        source, other = MemoryStore(), MemoryStore()
        target = Fragile(lost_at=8, happens=False)
        await fill(source)
        await other.commit([Write("scope/web/", b"1", 0)], entries=b'[{"by":"x"}]')
        with pytest.raises(StoreLost):
            await copy_store(source, target)
        with pytest.raises(Refused, match="a copy of another history; delete it"):
            await copy_store_again(other, target)

    asyncio.run(main())


def test_record_that_was_deleted_since_the_interruption_is_not_copied() -> None:
    async def main() -> None:
        source, target = MemoryStore(), Fragile(lost_at=8, happens=False)
        await fill(source)
        with pytest.raises(StoreLost):
            await copy_store(source, target)
        revision = (await source.get("token/ann/")).revision
        await source.commit([Write("token/ann/", None, revision)])
        in_source, in_target = await copy_store_again(source, target)
        assert in_source == in_target
        assert (await target.get("token/ann/")).value is None

    asyncio.run(main())


class Forgetful(MemoryStore):
    """Stores one history value wrong."""

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        return await super().commit(writes, checks, entries and entries.replace(b"c", b"C"))


def test_copy_that_differs_stays_incomplete() -> None:
    async def main() -> None:
        source, target = MemoryStore(), Forgetful()
        await fill(source)
        in_source, in_target = await copy_store(source, target)
        assert in_source != in_target
        with pytest.raises(StoreUnusable):
            await check_complete(target)

    asyncio.run(main())


@pytest.mark.parametrize("open_source", STORES, ids=lambda store: store.__name__)
def test_store_of_a_running_server_is_not_copied(open_source: Open) -> None:
    """What it commits during the copy would be lost. A server that was killed is not running."""

    async def main() -> None:
        async with open_source() as source, memory() as target:
            await fill(source)
            lease = await source.lease("server/server-1", 10)
            assert lease is not None
            with pytest.raises(Refused, match=r"in use \(servers: 1\); stop.*10 seconds"):
                await copy_store(source, target)
            assert (await target.get(COPY_KEY)).value is None
            for name in ("lease/copy", "lease/server/server-1"):
                assert (await source.get(name)).value is not None
            await kill_holder(source, lease)

    asyncio.run(main())


@pytest.mark.parametrize("open_source", STORES, ids=lambda store: store.__name__)
def test_store_of_a_killed_server_is_copied_without_its_lease(open_source: Open) -> None:
    async def main() -> None:
        async with open_source() as source, memory() as target:
            await fill(source)
            lease = await source.lease("server/server-1", 10)
            assert lease is not None
            await kill_holder(source, lease)
            in_source, in_target = await copy_store(source, target)
            assert in_source == in_target
            assert (await target.load("lease/server")).records == ()

    asyncio.run(main())


class Watched(MemoryStore):
    """A server starts on it as soon as its history is read."""

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[HistoryValue, ...]:
        if not (await self.load("lease/server")).records:
            await self.lease("server/server-1", 10)
        return await super().history(after, limit)


def test_server_that_starts_during_the_copy_ends_it() -> None:
    async def main() -> None:
        source, target = Watched(), MemoryStore()
        await source.commit([Write("scope/web/", b"1", 0)], entries=b"[]")
        with pytest.raises(Refused, match="in use"):
            await copy_store(source, target)
        with pytest.raises(StoreUnusable):
            await check_complete(target)

    asyncio.run(main())


def test_only_one_process_copies_a_store() -> None:
    async def main(source: MemoryStore, target: MemoryStore) -> None:
        await fill(source)
        await target.lease(COPY_KEY, 10)
        with pytest.raises(Refused, match="another process is copying"):
            await copy_store(source, target)
        await target.expire(COPY_KEY)
        with pytest.raises(Refused, match="another process is copying"):
            await copy_store(source, target)

    run(main)


@pytest.mark.parametrize("entries", [None, b'[{"by":"a"}]'])
def test_target_with_anything_in_it_is_refused(entries: bytes | None) -> None:
    async def main(source: MemoryStore, target: MemoryStore) -> None:
        await fill(source)
        await target.commit([Write("token/bob/", b"1", 0)] if entries is None else [], (), entries)
        before = await contents(target)
        with pytest.raises(Refused, match="expected an empty store"):
            await copy_store(source, target)
        await target.expire(COPY_KEY)
        assert await contents(target) == before

    run(main)


def test_empty_source_is_refused() -> None:
    """A typing error in a prefix must not look like a copy."""

    async def main(source: MemoryStore, target: MemoryStore) -> None:
        with pytest.raises(Refused, match="the source is empty"):
            await copy_store(source, target)
        assert (await target.get(COPY_KEY)).value is None

    run(main)


def test_records_are_committed_within_the_limits() -> None:
    async def main(source: MemoryStore, target: MemoryStore) -> None:
        large = b"x" * VALUE_BYTES_MAX
        for number in range(5):
            await source.commit([Write(f"scope/large-{number}/", large, 0)])
        for number in range(250):
            await source.commit([Write(f"scope/small-{number}/", b"x", 0)])
        in_source, in_target = await copy_store(source, target)
        assert in_source == in_target
        assert VALUE_BYTES_MAX <= COMMIT_BYTES_MAX < 5 * VALUE_BYTES_MAX

    run(main)


def test_record_that_is_too_large_is_named() -> None:
    """A store of version 0.2 may have one."""

    async def main(source: MemoryStore, target: MemoryStore) -> None:
        await source.commit([Write("fleet", b"1", 0)])
        source._records["scope/web/"] = Record("scope/web/", b"x" * (VALUE_BYTES_MAX + 1), 1)
        with pytest.raises(Invalid, match="value of 'scope/web/' has 1048577 bytes; at most"):
            await copy_store(source, target)

    run(main)


def test_oldest_records_stay_the_oldest() -> None:
    """Stored responses beyond the limit are deleted by age."""

    async def main(source: MemoryStore, target: MemoryStore) -> None:
        for number in range(199, -1, -1):
            await source.commit([Write(f"answer/{number:03}/", b"x", 0)])
        await copy_store(source, target)
        records = (await target.load("answer/")).records
        old = sorted(records, key=lambda record: record.revision)[:WRITES_MAX]
        oldest = range(200 - WRITES_MAX, 200)  # one commit
        assert {record.key for record in old} == {f"answer/{number:03}/" for number in oldest}

    run(main)


def test_webhook_continues_after_the_last_delivered_entry() -> None:
    """Its messages get ids of a new store: a number may stand for another entry there."""

    async def main(source: MemoryStore, target: MemoryStore) -> None:
        for _ in range(10):
            await source.commit([Write(f"scope/{_}/", b"1", 0)])  # the source is far ahead
        second = 0
        for name in (b"a", b"b", b"c"):
            second = await source.commit([], entries=b'[{"by":"%b"}]' % name)
        cursor = Cursor(last_number(second - 1), failures=3)
        await source.commit(
            [Write(WEBHOOK, CURSOR.encode(cursor), 0), Write(IDENTITY_KEY, b"id", 0)]
        )
        in_source, in_target = await copy_store(source, target)
        assert in_source == in_target
        copied = CURSOR.decode((await target.get(WEBHOOK)).value or b"")
        _, _, third = await target.history()
        assert copied == Cursor(last_number(third.position - 1), failures=3)
        assert (await target.get(IDENTITY_KEY)).value is None

    run(main)


def test_webhook_of_a_newer_version_is_refused_before_anything_is_written() -> None:
    async def main(source: MemoryStore, target: MemoryStore) -> None:
        await source.commit([Write(WEBHOOK, b'{"format":2,"value":{}}', 0)])
        with pytest.raises(StoreUnusable, match="webhook record has format 2"):
            await copy_store(source, target)
        assert (await target.get(COPY_KEY)).value is None

    run(main)


positions = st.lists(st.integers(1, 60), unique=True, min_size=1, max_size=12).map(sorted)


@given(positions, positions, st.integers(0, 60), st.integers(0, ENTRIES_MAX - 1))
def test_moved_number_has_the_same_entries_after_it(
    old: list[int], new: list[int], position: int, index: int
) -> None:
    """Each entry is delivered if and only if it would have been delivered from the source."""
    moves = list(zip(old, new, strict=False))
    old, new = [move[0] for move in moves], [move[1] for move in moves]
    # a number names an entry of a value, or one that was trimmed
    number = first_number(position) + index if position in old or position < old[0] else 0
    moved = move_number(number, moves)
    each = (0, 1, index, index + 1, ENTRIES_MAX - 1)
    in_source = [first_number(place) + entry > number for place in old for entry in each]
    in_target = [first_number(place) + entry > moved for place in new for entry in each]
    assert in_source == in_target
    assert (moved == 0) == (number == 0)


@pytest.mark.parametrize(
    ("number", "moved"),
    [(last_number(4), last_number(6)), (last_number(3), last_number(5)), (1, first_number(2) + 1)],
)
def test_gap_before_the_oldest_entry_stays_a_gap(number: int, moved: int) -> None:
    """The webhook reports that it lost entries, as it would have done before the copy."""
    assert move_number(number, [(5, 7), (6, 8)]) == moved


def test_gap_of_a_source_that_is_far_ahead_stays_a_gap() -> None:
    assert move_number(last_number(3), [(500, 2)]) == 1
