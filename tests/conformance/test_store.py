"""One suite for every store: each sentence of the contract in `forewarn/store/base.py`, tried on
each store in `stores.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from forewarn.errors import Conflict, Invalid, StoreLost
from forewarn.store.base import WRITES_MAX, Record, Snapshot, Store, Write
from tests.conformance.stores import on_every_store


async def values(store: Store, prefix: str = "") -> dict[str, bytes | None]:
    return {record.key: record.value for record in (await store.load(prefix)).records}


async def bodies(store: Store, after: int = 0) -> list[bytes]:
    return [note.body for note in await store.history(after)]


async def told_until(watching: AsyncIterator[Snapshot], revision: int) -> list[Record]:
    """What a watch tells, up to a revision that must come."""
    told: list[Record] = []
    async for batch in watching:
        told.extend(batch.records)
        if batch.revision >= revision:
            break
    return told


@on_every_store
async def test_a_new_store_is_empty(store: Store) -> None:
    """A server's first start is a load like any other."""
    assert (await store.load()).records == ()
    assert await store.history() == ()


@on_every_store
async def test_what_is_committed_is_loaded_with_the_revision_of_its_commit(store: Store) -> None:
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
async def test_each_commit_takes_a_greater_revision_and_leaves_others_records_at_theirs(
    store: Store,
) -> None:
    """If revisions fell or were shared, a stale writer could win."""
    first = await store.commit([Write("a", b"1", 0)])
    second = await store.commit([Write("b", b"1", 0)])
    noted = await store.commit([], [b"only a note"])
    third = await store.commit([Write("b", b"2", second)])

    assert first < second < noted < third
    assert (await store.load("a")).records == (Record("a", b"1", first),)
    assert (await store.load("b")).records == (Record("b", b"2", third),)


@on_every_store
async def test_load_gives_the_keys_that_start_with_the_prefix_and_no_others(store: Store) -> None:
    """Neighbours in the order of keys, wildcards of query languages and characters of every width
    must not leak in.
    """
    inside = {"scope/", "scope/%", "scope/_", "scope/a*", "scope/é", "scope/\U0010ffff\U0010ffff"}
    outside = {"scope", "scope.", "scope0", "Scope/a", "campaign/scope/", "scopé/"}
    await store.commit([Write(key, b"x", 0) for key in sorted(inside | outside)])

    assert set(await values(store, "scope/")) == inside
    assert set(await values(store, "scope/%")) == {"scope/%"}
    assert set(await values(store)) == inside | outside


@on_every_store
async def test_the_snapshots_revision_is_the_stores_even_if_nothing_has_the_prefix(
    store: Store,
) -> None:
    """A watch that starts here must not be told the past again."""
    revision = await store.commit([Write("a", b"1", 0)])

    assert await store.load("nothing") == Snapshot(revision, ())


@on_every_store
async def test_revision_0_says_that_there_is_no_such_record(store: Store) -> None:
    """Two servers that both create a scope: the second learns that it is not the first."""
    await store.commit([Write("a", b"mine", 0)])

    with pytest.raises(Conflict):
        await store.commit([Write("a", b"yours", 0)])
    assert await values(store) == {"a": b"mine"}


@on_every_store
async def test_a_write_on_any_revision_but_the_records_own_is_a_conflict(store: Store) -> None:
    """One too old is the lost race; one too new would be a bug somewhere, and must not pass either."""
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
async def test_one_conflict_among_several_writes_writes_nothing_and_notes_nothing(
    store: Store,
) -> None:
    """A change over two scopes is there as a whole, or not at all; the history tells only what
    became true.
    """
    revision = await store.commit([Write("a", b"1", 0), Write("b", b"1", 0)], [b"made"])

    with pytest.raises(Conflict):
        await store.commit(
            [Write("a", b"2", revision), Write("new", b"2", 0), Write("b", b"2", 0)], [b"never"]
        )
    assert await store.load() == Snapshot(
        revision, (Record("a", b"1", revision), Record("b", b"1", revision))
    )
    assert await bodies(store) == [b"made"]


@on_every_store
async def test_a_deleted_record_is_gone_and_may_be_made_again(store: Store) -> None:
    """A scope that left the fleet may come back; who still holds its old revision may not write it."""
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
async def test_deleting_what_is_not_there_changes_nothing(store: Store) -> None:
    """Already true means no change, not a problem; and nobody who watches hears of it."""
    await store.commit([Write("absent", None, 0)])
    revision = await store.commit([Write("a", b"1", 0)])

    assert await values(store) == {"a": b"1"}
    assert [record.key for record in await told_until(store.watch(0), revision)] == ["a"]


@on_every_store
async def test_a_commit_takes_as_many_writes_as_allowed_and_not_one_more(store: Store) -> None:
    """A caller that fits one store fits all of them."""
    with pytest.raises(Invalid, match=r"101 writes; at most 100"):
        await store.commit(
            [Write(f"k{number}", b"x", 0) for number in range(WRITES_MAX + 1)], [b"never"]
        )
    assert await values(store) == {}
    assert await bodies(store) == []

    await store.commit([Write(f"k{number}", b"x", 0) for number in range(WRITES_MAX)])
    assert len(await values(store)) == WRITES_MAX


@on_every_store
async def test_a_commit_that_writes_one_key_twice_is_refused(store: Store) -> None:
    """Both stand on one revision, so only one of them could be true."""
    with pytest.raises(Invalid, match="'a' twice"):
        await store.commit([Write("a", b"1", 0), Write("b", b"1", 0), Write("a", b"2", 0)])
    assert await values(store) == {}


@on_every_store
async def test_of_many_commits_at_once_to_one_record_exactly_one_wins(store: Store) -> None:
    """This is what lets any number of servers run with no leader."""

    async def attempt(name: bytes) -> bytes | None:
        with suppress(Conflict):
            await store.commit([Write("a", name, 0)], [name])
            return name
        return None

    outcomes = await asyncio.gather(*(attempt(b"writer %d" % number) for number in range(20)))

    winners = [name for name in outcomes if name is not None]
    assert len(winners) == 1
    assert await values(store) == {"a": winners[0]}
    assert await bodies(store) == winners


@on_every_store
async def test_a_closed_store_answers_that_it_is_lost(store: Store) -> None:
    """A request that comes while the server stops is told to try again elsewhere.

    Closing twice is closing once.
    """
    await store.close()
    await store.close()

    with pytest.raises(StoreLost):
        await store.load()
    with pytest.raises(StoreLost):
        await store.commit([Write("a", b"1", 0)])
    for asked in (store.history, store.latest):
        with pytest.raises(StoreLost):
            await asked()
    for let_go in (store.trim, store.forget):
        with pytest.raises(StoreLost):
            await let_go(1)


@on_every_store
async def test_what_is_under_way_when_the_store_is_closed_is_finished_or_lost(store: Store) -> None:
    """A commit never hangs, and never ends as something its caller does not know."""
    commits = [
        asyncio.ensure_future(store.commit([Write(f"k{number}", b"x", 0)])) for number in range(10)
    ]
    await asyncio.sleep(0)
    await store.close()

    for outcome in await asyncio.gather(*commits, return_exceptions=True):
        assert isinstance(outcome, int | StoreLost)


@on_every_store
async def test_a_watch_tells_what_changed_after_its_revision_and_nothing_older(
    store: Store,
) -> None:
    """A server loads, then watches from there: between the two nothing is missed and nothing is
    told twice.
    """
    old = await store.commit([Write("old", b"1", 0), Write("doomed", b"1", 0)])
    await store.commit([Write("z", b"1", 0)])
    last = await store.commit([Write("b", b"1", 0), Write("doomed", None, old)])

    told = await told_until(store.watch(old), last)

    assert [(record.key, record.value) for record in told if record.revision < last] == [
        ("z", b"1")
    ]
    assert {(record.key, record.value) for record in told if record.revision == last} == {
        ("b", b"1"),
        ("doomed", None),
    }
    assert told[0].key == "z"


@on_every_store
async def test_a_watch_from_0_ends_up_knowing_what_a_load_knows(store: Store) -> None:
    """A record may be told once for many changes, but as it is last."""
    revision = 0
    for number in range(10):
        revision = await store.commit([Write("a", b"%d" % number, revision)])
    made = await store.commit([Write("b", b"1", 0)])
    await store.commit([Write("b", None, made)])
    last = await store.commit([Write("b", b"again", 0)])

    told = {record.key: record for record in await told_until(store.watch(0), last)}

    assert set(told.values()) == set((await store.load()).records)


@on_every_store
async def test_a_watch_tells_each_further_change_as_it_happens(store: Store) -> None:
    """A guest that waits for its document is answered when it changes, not at the next poll of
    anything.
    """
    watching = store.watch(0)
    for number in range(3):
        waiting = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0)
        revision = await store.commit([Write(f"k{number}", b"x", 0)])

        assert await waiting == Snapshot(revision, (Record(f"k{number}", b"x", revision),))


@on_every_store
async def test_a_commit_of_several_writes_is_told_in_one_batch(store: Store) -> None:
    """Whoever goes on after a batch's revision must have seen all of that revision."""
    watching = store.watch(0)
    waiting = asyncio.ensure_future(anext(watching))
    await asyncio.sleep(0)
    await store.commit([Write(f"k{number}", b"x", 0) for number in range(WRITES_MAX)])

    assert len((await waiting).records) == WRITES_MAX


@on_every_store
async def test_under_a_stream_of_commits_batches_are_never_empty_and_never_fall(
    store: Store,
) -> None:
    """Followers apply batches blindly: a fall would bring an old document back to life."""

    async def write() -> int:
        revision = 0
        for number in range(100):
            await store.commit([], [b"a note alone changes no record"])
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
async def test_a_watch_that_is_left_disturbs_no_other(store: Store) -> None:
    """A server's loop may be cancelled and started again while others go on."""
    left = asyncio.ensure_future(anext(store.watch(0)))
    stays = asyncio.ensure_future(anext(store.watch(0)))
    await asyncio.sleep(0)
    left.cancel()
    revision = await store.commit([Write("a", b"1", 0)])

    assert (await stays).revision == revision
    assert left.cancelled()


@on_every_store
async def test_closing_the_store_ends_its_watches(store: Store) -> None:
    """A server that stops must not wait for ever on its own follower."""
    revision = await store.commit([Write("a", b"1", 0)])
    behind, idle = store.watch(0), store.watch(revision)
    assert (await anext(behind)).revision == revision
    waiting = [asyncio.ensure_future(anext(watching, None)) for watching in (behind, idle)]
    await asyncio.sleep(0)
    await store.close()

    assert await asyncio.gather(*waiting) == [None, None]
