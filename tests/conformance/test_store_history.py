"""One suite for every store, the part about the history and about letting go of what is old."""

import asyncio

import pytest

from forewarn.errors import StoreLost
from forewarn.store.base import Record, Store, Write
from tests.conformance.stores import on_every_store
from tests.conformance.test_store import told_until, values


@on_every_store
async def test_notes_keep_the_order_in_which_they_were_given(store: Store) -> None:
    """Scheduled, Approved, Started: out of order the story of an event is a lie."""
    await store.commit([Write("a", b"1", 0)], [b"3", b"1"])
    await store.commit([], [b"2", b"", b"1"])

    notes = await store.history()
    assert [note.body for note in notes] == [b"3", b"1", b"2", b"", b"1"]
    numbers = [note.number for note in notes]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > 0


@on_every_store
async def test_history_goes_on_after_a_number_and_stops_at_the_limit(store: Store) -> None:
    """A reader pages through by the number of the last note it has, and misses none."""
    await store.commit([], [b"%d" % number for number in range(7)])
    read: list[bytes] = []
    after = 0
    while page := await store.history(after, limit=3):  # ends with the history
        assert len(page) <= 3
        read.extend(note.body for note in page)
        after = page[-1].number

    assert read == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    assert await store.history(limit=0) == ()


@on_every_store
async def test_the_latest_notes_come_newest_first_and_go_on_before_a_number(store: Store) -> None:
    """A person asks what happened last, and then what was before that."""
    await store.commit([], [b"%d" % number for number in range(1, 8)])
    read: list[bytes] = []
    before: int | None = None
    while page := await store.latest(before, limit=3):  # ends with the history
        read.extend(note.body for note in page)
        before = page[-1].number

    assert read == [b"7", b"6", b"5", b"4", b"3", b"2", b"1"]
    assert await store.latest(limit=0) == await store.latest(1) == ()
    assert [note.number for note in await store.latest(100, limit=1)] == [7]


@on_every_store
async def test_trimming_takes_the_oldest_notes_and_the_numbers_go_on(store: Store) -> None:
    """Whoever reads from an old number sees by the hole that some are gone, and how many."""
    revision = await store.commit([Write("a", b"1", 0)], [b"%d" % number for number in range(1, 8)])

    assert await store.trim(5, limit=3) == 3
    assert await store.trim(5, limit=3) == 1
    assert await store.trim(5) == 0
    assert [(note.number, note.body) for note in await store.history()] == [
        (5, b"5"),
        (6, b"6"),
        (7, b"7"),
    ]
    assert [note.number for note in await store.history(5)] == [6, 7]
    assert [note.number for note in await store.latest(7)] == [6, 5]
    assert (await store.load()).records == (Record("a", b"1", revision),)


@on_every_store
async def test_trimming_never_takes_the_newest_note(store: Store) -> None:
    """If all were gone the next number would be 1 again, and every reader would pass over what it
    has not seen.
    """
    assert await store.trim(1000) == 0
    await store.commit([], [b"1", b"2", b"3"])

    assert await store.trim(1000) == 2
    await store.commit([], [b"4"])
    assert [(note.number, note.body) for note in await store.history()] == [(3, b"3"), (4, b"4")]


@on_every_store
async def test_forgetting_lets_go_of_old_deletions_and_of_nothing_else(store: Store) -> None:
    """A fleet whose scopes come and go must not grow for ever."""
    made = await store.commit([Write(key, b"1", 0) for key in ("a", "b", "c", "stays")])
    first = await store.commit([Write("a", None, made)])
    second = await store.commit([Write("b", None, made)])
    third = await store.commit([Write("c", None, made)])

    assert await store.forget(second, limit=1) == 1
    assert await store.forget(second, limit=10) == 1
    assert await store.forget(second) == 0
    assert await values(store) == {"stays": b"1"}
    assert [
        (record.key, record.value) for record in await told_until(store.watch(second), third)
    ] == [("c", None)]
    again = await store.commit([Write("a", b"2", 0)])
    assert again > third > first


@on_every_store
async def test_a_watch_that_would_miss_a_deletion_says_so(store: Store) -> None:
    """A server that slept for days loads everything again, and does not go on showing a scope that
    is gone.
    """
    made = await store.commit([Write("a", b"1", 0), Write("b", b"1", 0)])
    behind, idle = store.watch(0), store.watch(0)
    await anext(behind)
    await anext(idle)
    gone = await store.commit([Write("a", None, made)])
    assert (await anext(idle)).revision == gone
    await store.forget(gone)

    with pytest.raises(StoreLost, match=f"after {made} would miss some"):
        await anext(behind)
    with pytest.raises(StoreLost):
        await anext(store.watch(made))
    waiting = asyncio.ensure_future(anext(idle))
    await asyncio.sleep(0)
    last = await store.commit([Write("b", b"2", made)])
    assert (await waiting).revision == last
