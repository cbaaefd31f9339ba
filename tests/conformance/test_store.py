"""The contract of `forewarn/store/base.py`, sentence by sentence, on each store: records."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from forewarn.errors import Compacted, Conflict, Invalid, StoreLost
from forewarn.store.base import (
    CHANGES_MAX,
    COMMIT_BYTES_MAX,
    VALUE_BYTES_MAX,
    WRITES_MAX,
    Record,
    RevisionCheck,
    Snapshot,
    Store,
    Write,
)
from tests.conformance.stores import compact, on_every_store


async def values(store: Store, prefix: str = "") -> dict[str, bytes | None]:
    return {record.key: record.value for record in (await store.load(prefix)).records}


async def history(store: Store) -> list[bytes]:
    return [value.value for value in await store.history()]


async def watch_until(watch: AsyncIterator[Snapshot], revision: int) -> list[Record]:
    """The records of a watch up to a revision that must come."""
    records: list[Record] = []
    async for batch in watch:
        records.extend(batch.records)
        if batch.revision >= revision:
            break
    return records


@on_every_store
async def test_a_new_store_is_empty(store: Store) -> None:
    """A server's first start is a load like any other."""
    assert (await store.load()).records == ()
    assert await store.history() == ()


@on_every_store
async def test_no_record_has_an_empty_key(store: Store) -> None:
    """`get("")` is how a server reads the revision of the store, to catch up with the others."""
    with pytest.raises(Invalid, match="commit names an empty key"):
        await store.commit([Write("", b"x", 0)])
    with pytest.raises(Invalid, match="commit names an empty key"):
        await store.commit([], [RevisionCheck("", 0)])
    revision = await store.commit([Write("scope/web", b"one", 0)])
    assert await store.get("") == Record("", None, revision)


@on_every_store
async def test_load_returns_committed_records_with_their_revision(store: Store) -> None:
    """The engine writes against the revision it read here."""
    revision = await store.commit([Write("scope/web", b"one", 0), Write("scope/db", b"", 0)])

    assert revision > 0
    loaded = await store.load()
    assert loaded.revision == revision
    assert set(loaded.records) == {
        Record("scope/web", b"one", revision),
        Record("scope/db", b"", revision),
    }


@on_every_store
async def test_each_commit_takes_a_greater_revision(
    store: Store,
) -> None:
    """If revisions fell or were shared, a stale writer could win."""
    first = await store.commit([Write("a", b"1", 0)])
    second = await store.commit([Write("b", b"1", 0)])
    noted = await store.commit([], entries=b"only history")
    third = await store.commit([Write("b", b"2", second)])

    assert first < second < noted < third
    assert (await store.load("a")).records == (Record("a", b"1", first),)
    assert (await store.load("b")).records == (Record("b", b"2", third),)


@on_every_store
async def test_load_returns_exactly_the_keys_with_the_prefix(store: Store) -> None:
    """Neighbouring keys, SQL wildcards and wide characters must not match."""
    inside = {"scope/", "scope/%", "scope/_", "scope/a*", "scope/é", "scope/\U0010ffff\U0010ffff"}
    outside = {"scope", "scope.", "scope0", "Scope/a", "campaign/scope/", "scopé/"}
    await store.commit([Write(key, b"x", 0) for key in sorted(inside | outside)])

    assert set(await values(store, "scope/")) == inside
    assert set(await values(store, "scope/%")) == {"scope/%"}
    assert set(await values(store)) == inside | outside


@on_every_store
async def test_load_without_a_match_has_the_revision_of_the_store(
    store: Store,
) -> None:
    """A watch that starts here must not return the past again."""
    revision = await store.commit([Write("a", b"1", 0)])

    assert await store.load("nothing") == Snapshot(revision, ())


@on_every_store
async def test_writing_at_revision_0_requires_that_the_record_is_absent(store: Store) -> None:
    """If two servers create the same scope, the second one must notice."""
    await store.commit([Write("a", b"mine", 0)])

    with pytest.raises(Conflict):
        await store.commit([Write("a", b"yours", 0)])
    assert await values(store) == {"a": b"mine"}


@on_every_store
async def test_a_write_at_another_revision_is_a_conflict(store: Store) -> None:
    """Too old is a lost race; too new would be a bug, and must not succeed either."""
    await store.commit([Write("other", b"x", 0)])
    revision = await store.commit([Write("a", b"1", 0)])

    for wrong in (0, revision - 1, revision + 1):
        with pytest.raises(Conflict):
            await store.commit([Write("a", b"2", wrong)])
        with pytest.raises(Conflict):
            await store.commit([Write("a", None, wrong)])
    with pytest.raises(Conflict):
        await store.commit([Write("absent", b"2", revision)])
    assert await values(store) == {"a": b"1", "other": b"x"}


@on_every_store
async def test_a_conflict_writes_neither_records_nor_history(
    store: Store,
) -> None:
    """A change of two scopes happens as a whole, and the history has only what happened."""
    revision = await store.commit([Write("a", b"1", 0), Write("b", b"1", 0)], entries=b"created")

    with pytest.raises(Conflict):
        await store.commit(
            [Write("a", b"2", revision), Write("new", b"2", 0), Write("b", b"2", 0)],
            entries=b"never",
        )
    assert await store.load() == Snapshot(
        revision, (Record("a", b"1", revision), Record("b", b"1", revision))
    )
    assert await history(store) == [b"created"]


@on_every_store
async def test_a_deleted_record_can_be_created_again(store: Store) -> None:
    """A scope may return to the fleet, but not by a write at its old revision."""
    made = await store.commit([Write("a", b"1", 0)])
    gone = await store.commit([Write("a", None, made)])
    assert await store.load() == Snapshot(gone, ())
    for stale in (made, gone):
        with pytest.raises(Conflict):
            await store.commit([Write("a", b"stale", stale)])

    again = await store.commit([Write("a", b"2", 0)])

    assert again > gone > made
    assert (await store.load()).records == (Record("a", b"2", again),)


@on_every_store
async def test_deleting_an_absent_record_changes_nothing(store: Store) -> None:
    """It is already true, so it is neither an error nor a change that a watch sees."""
    await store.commit([Write("absent", None, 0)])
    revision = await store.commit([Write("a", b"1", 0)])

    assert await values(store) == {"a": b"1"}
    assert [record.key for record in await watch_until(store.watch(0), revision)] == ["a"]


@on_every_store
async def test_one_of_many_concurrent_commits_to_a_record_wins(store: Store) -> None:
    """This lets any number of servers run without a leader."""

    async def attempt(name: bytes) -> bytes | None:
        with suppress(Conflict):
            await store.commit([Write("a", name, 0)], entries=name)
            return name
        return None

    outcomes = await asyncio.gather(*(attempt(b"writer %d" % number) for number in range(20)))

    winners = [name for name in outcomes if name is not None]
    assert len(winners) == 1
    assert await values(store) == {"a": winners[0]}
    assert await history(store) == winners


@on_every_store
async def test_a_closed_store_raises_store_lost(store: Store) -> None:
    """A request during shutdown must be retried elsewhere. Closing twice is harmless."""
    await store.close()
    await store.close()

    with pytest.raises(StoreLost):
        await store.load()
    with pytest.raises(StoreLost):
        await store.commit([Write("a", b"1", 0)])
    for read in (store.history, store.latest):
        with pytest.raises(StoreLost):
            await read()
    with pytest.raises(StoreLost):
        await store.get("a")
    with pytest.raises(StoreLost):
        await store.trim(1)
    with pytest.raises(StoreLost):
        await store.lease("a", 10)


@on_every_store
async def test_commits_in_progress_at_close_finish_or_are_lost(store: Store) -> None:
    """A commit never hangs, and its caller gets a result that it can handle."""
    commits = [
        asyncio.ensure_future(store.commit([Write(f"k{number}", b"x", 0)])) for number in range(10)
    ]
    await asyncio.sleep(0)
    await store.close()

    for outcome in await asyncio.gather(*commits, return_exceptions=True):
        assert isinstance(outcome, int | StoreLost)


@on_every_store
async def test_a_watch_returns_only_changes_after_its_revision(
    store: Store,
) -> None:
    """A server loads, then watches from there; nothing may be missed or repeated."""
    old = await store.commit([Write("old", b"1", 0), Write("doomed", b"1", 0)])
    await store.commit([Write("z", b"1", 0)])
    last = await store.commit([Write("b", b"1", 0), Write("doomed", None, old)])

    records = await watch_until(store.watch(old), last)

    assert [(record.key, record.value) for record in records if record.revision < last] == [
        ("z", b"1")
    ]
    assert {(record.key, record.value) for record in records if record.revision == last} == {
        ("b", b"1"),
        ("doomed", None),
    }
    assert records[0].key == "z"


@on_every_store
async def test_a_watch_from_0_returns_what_a_load_returns(store: Store) -> None:
    """Several changes of a record may be reported once, with the last value."""
    revision = 0
    for number in range(10):
        revision = await store.commit([Write("a", b"%d" % number, revision)])
    made = await store.commit([Write("b", b"1", 0)])
    await store.commit([Write("b", None, made)])
    last = await store.commit([Write("b", b"again", 0)])

    seen = {record.key: record for record in await watch_until(store.watch(0), last)}

    assert set(seen.values()) == set((await store.load()).records)


@on_every_store
async def test_a_watch_returns_each_further_change_as_it_happens(store: Store) -> None:
    """A long poll must be answered when the document changes."""
    watch = store.watch(0)
    for number in range(3):
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        revision = await store.commit([Write(f"k{number}", b"x", 0)])

        assert await waiting == Snapshot(revision, (Record(f"k{number}", b"x", revision),))


@on_every_store
async def test_batches_are_never_empty_and_their_revisions_grow(
    store: Store,
) -> None:
    """Followers apply batches blindly: an older one would bring an old document back."""

    async def write() -> int:
        revision = 0
        for number in range(100):
            await store.commit([], entries=b"history alone changes no record")
            revision = await store.commit(
                [Write("a", b"%d" % number, revision), Write(f"k{number}", b"x", 0)]
            )
        return revision

    async def follow() -> list[Snapshot]:
        batches: list[Snapshot] = []
        async for batch in store.watch(0):
            batches.append(batch)
            if Record("k99", b"x", batch.revision) in batch.records:
                break
        return batches

    last, *followers = await asyncio.gather(write(), follow(), follow(), follow())

    for batches in followers:
        assert isinstance(batches, list)
        assert all(batch.records for batch in batches)
        revisions = [record.revision for batch in batches for record in batch.records]
        assert revisions == sorted(revisions)
        assert [batch.revision for batch in batches] == sorted(
            {batch.revision for batch in batches}
        )
        assert {record.key: record for batch in batches for record in batch.records}.keys() == {
            "a"
        } | {f"k{n}" for n in range(100)}
        assert batches[-1].revision == last


@on_every_store
async def test_a_cancelled_watch_does_not_affect_others(store: Store) -> None:
    """A server may cancel and restart its watch while others continue."""
    left = asyncio.ensure_future(anext(store.watch(0)))
    stays = asyncio.ensure_future(anext(store.watch(0)))
    await asyncio.sleep(0)
    left.cancel()
    revision = await store.commit([Write("a", b"1", 0)])

    assert (await stays).revision == revision
    assert left.cancelled()


@on_every_store
async def test_close_ends_all_watches(store: Store) -> None:
    """A server that stops must not wait for its own watch."""
    revision = await store.commit([Write("a", b"1", 0)])
    behind, idle = store.watch(0), store.watch(revision)
    assert (await anext(behind)).revision == revision
    waiting = [asyncio.ensure_future(anext(watch, None)) for watch in (behind, idle)]
    await asyncio.sleep(0)
    await store.close()

    assert await asyncio.gather(*waiting) == [None, None]


@on_every_store
async def test_get_returns_one_record(store: Store) -> None:
    """It must not match keys that only start with the same text."""
    revision = await store.commit([Write("a", b"1", 0), Write("ab", b"2", 0)])
    later = await store.commit([Write("c", b"3", 0)])

    assert await store.get("a") == Record("a", b"1", revision)
    assert later > revision


@on_every_store
async def test_get_of_an_absent_record_has_the_current_revision(store: Store) -> None:
    """The reader learns as of when it is absent, whether it ever existed or not."""
    created = await store.commit([Write("gone", b"1", 0)])
    await store.commit([Write("gone", None, created)])
    revision = await store.commit([Write("b", b"1", 0)])

    for key in ("gone", "never"):
        assert await store.get(key) == Record(key, None, revision)


@on_every_store
async def test_a_check_compares_without_writing(store: Store) -> None:
    """A decision that depends on a record must fail if that record has changed."""
    first = await store.commit([Write("a", b"1", 0)])
    checks = [RevisionCheck("a", first), RevisionCheck("absent", 0)]

    second = await store.commit([Write("b", b"1", 0)], checks)

    assert (await store.get("a")).revision == first
    for wrong in (
        RevisionCheck("a", 0),
        RevisionCheck("a", second),
        RevisionCheck("absent", first),
    ):
        with pytest.raises(Conflict):
            await store.commit([Write("b", b"2", second)], [wrong], b"never")
    assert (await store.get("b")).value == b"1"
    assert await history(store) == []


def writes(count: int, size: int = 1) -> list[Write]:
    return [Write(f"k{number}", b"x" * size, 0) for number in range(count)]


def checks(count: int) -> list[RevisionCheck]:
    return [RevisionCheck(f"c{number}", 0) for number in range(count)]


@on_every_store
async def test_a_commit_at_every_limit_is_accepted(store: Store) -> None:
    """A caller that fits one store fits all of them."""
    await store.commit(writes(WRITES_MAX))
    await store.commit([Write("one", b"x", 0)], checks(WRITES_MAX - 1))
    rest = COMMIT_BYTES_MAX - VALUE_BYTES_MAX
    await store.commit([Write("large", b"x" * VALUE_BYTES_MAX, 0)], (), b"x" * rest)
    await store.commit([Write("small", b"x" * rest, 0)], (), b"x" * VALUE_BYTES_MAX)

    assert len((await store.load()).records) == WRITES_MAX + 3


@on_every_store
async def test_a_commit_above_a_limit_is_rejected(store: Store) -> None:
    """Nothing may be written: no store would know which part."""
    new = await store.load()
    large = VALUE_BYTES_MAX + 1
    for commit, message in (
        ((writes(WRITES_MAX + 1),), "121 writes and checks; at most 120"),
        ((writes(1), checks(WRITES_MAX)), "121 writes and checks; at most 120"),
        (([], checks(WRITES_MAX + 1)), "121 writes and checks; at most 120"),
        ((writes(1, large),), f"'k0' has {large} bytes; at most {VALUE_BYTES_MAX}"),
        ((writes(1), (), b"x" * large), f"history entries has {large} bytes"),
        (
            (writes(2, COMMIT_BYTES_MAX // 2), (), b"x"),
            f"{COMMIT_BYTES_MAX + 1} bytes; at most {COMMIT_BYTES_MAX}",
        ),
        ((writes(2) + writes(1),), "'k0' twice"),
        ((writes(1), [RevisionCheck("k0", 0)]), "'k0' twice"),
        (([], [RevisionCheck("a", 0), RevisionCheck("a", 1)]), "'a' twice"),
    ):
        with pytest.raises(Invalid, match=message):
            await store.commit(*commit)

    assert await store.load() == new
    assert await history(store) == []


async def create(store: Store, count: int) -> int:
    """Create `k0`, `k1` … in several commits; the last revision."""
    for first in range(0, count, WRITES_MAX):
        keys = range(first, min(first + WRITES_MAX, count))
        revision = await store.commit([Write(f"k{number}", b"1", 0) for number in keys])
    return revision


async def delete_all(store: Store) -> int:
    records = (await store.load("k")).records
    for first in range(0, len(records), WRITES_MAX):
        old = records[first : first + WRITES_MAX]
        revision = await store.commit([Write(record.key, None, record.revision) for record in old])
    return revision


@on_every_store
async def test_a_watch_sees_deletions_up_to_the_limit(store: Store) -> None:
    """A server that was away for a while must notice what was removed."""
    created = await create(store, CHANGES_MAX)
    last = await delete_all(store)

    deleted = await watch_until(store.watch(created), last)
    assert {record.value for record in deleted} == {None}
    assert len(deleted) == CHANGES_MAX


@on_every_store
async def test_a_watch_that_would_miss_a_deletion_is_compacted(store: Store) -> None:
    """A server that was away for too long must load again instead of showing deleted scopes."""
    await store.commit([Write("stays", b"1", 0)])
    created = await create(store, CHANGES_MAX + 1)
    first = await store.commit([Write("k0", None, (await store.get("k0")).revision)])
    last = await delete_all(store)

    await compact(store, first)
    with pytest.raises(Compacted, match=f"after {created} would miss some"):
        await anext(store.watch(created))
    assert (await anext(store.watch(first))).revision == last
    assert await values(store) == {"stays": b"1"}
    await store.commit([Write("k0", b"2", 0)])
