"""The history: read with filters in bounded work, and kept within its limits."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from forewarn.core.change import Change, ChangeKind
from forewarn.engine.clock import VirtualClock
from forewarn.engine.entry import Note, encode
from forewarn.errors import StoreLost
from forewarn.history.feed import HistoryFeed
from forewarn.history.query import DELETIONS_KEPT, TURN, RetentionWorker, Wanted, read
from forewarn.store.base import Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON

DAY = timedelta(days=1)
UNREADABLE = b'{"what":"teleported"}'


def line(change: Change, *, minutes: int = 0, scope: str = "web") -> bytes:
    return encode(Note(NOON + minutes * MINUTE, "ann", scope, change))


def joined(number: int) -> bytes:
    """The note of a VM that joined so many minutes after noon."""
    return line(Change(what=ChangeKind.JOINED, vm=f"vm-{number}"), minutes=number)


def story(tell: Callable[[MemoryStore], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(tell(MemoryStore()))


async def numbers(store: MemoryStore, wanted: Wanted) -> list[int]:
    return [one.number for one in (await read(store, wanted, limit=100)).entries]


def test_the_newest_comes_first_and_the_cursor_goes_on_where_the_page_ended() -> None:
    """Also when more happens between two pages: what is new is not on the older pages."""

    async def tell(store: MemoryStore) -> None:
        await store.commit([], [joined(number) for number in range(1, 6)])
        first = await read(store, Wanted(), limit=2)
        await store.commit([], [joined(6)])
        second = await read(store, Wanted(), limit=2, before=first.next)
        third = await read(store, Wanted(), limit=2, before=second.next)

        assert [[one.number for one in page.entries] for page in (first, second, third)] == [
            [5, 4],
            [3, 2],
            [1],
        ]
        assert third.next is None

    story(tell)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Wanted(vm="web-0"), [4, 2, 1]),
        (Wanted(vm="web"), []),
        (Wanted(scope="db"), [3]),
        (Wanted(host="host-a"), [4, 1]),
        (Wanted(host="host-c"), [4]),
        (Wanted(event="E1"), [2, 1]),
        (Wanted(what="started"), [2]),
        (Wanted(vm="web-0", what="moved"), [4]),
        (Wanted(since=NOON + 2 * MINUTE), [4, 3]),
        (Wanted(until=NOON + 2 * MINUTE), [2, 1]),
        (Wanted(since=NOON + MINUTE, until=NOON + 3 * MINUTE), [3, 2]),
    ],
)
def test_a_filter_finds_what_concerns_the_thing_and_nothing_else(
    wanted: Wanted, found: list[int]
) -> None:
    """A VM is concerned by the events that name it, a host by what comes to it and what leaves it."""

    async def tell(store: MemoryStore) -> None:
        await store.commit(
            [],
            [
                line(
                    Change(
                        what=ChangeKind.SCHEDULED,
                        event_id="E1",
                        resources=("web-0", "web-1"),
                        host="host-a",
                    )
                ),
                line(
                    Change(
                        what=ChangeKind.STARTED,
                        event_id="E1",
                        resources=("web-0",),
                        detail="host-a",
                    ),
                    minutes=1,
                ),
                line(
                    Change(what=ChangeKind.JOINED, vm="db-0", detail="web-0"), minutes=2, scope="db"
                ),
                line(
                    Change(what=ChangeKind.MOVED, vm="web-0", host="host-c", host_before="host-a"),
                    minutes=3,
                ),
            ],
        )
        assert await numbers(store, wanted) == found

    story(tell)


def test_a_question_that_finds_nothing_stops_after_its_share_and_tells_how_to_go_on() -> None:
    """Nobody can make the server read a million notes by asking for a VM that never was."""

    async def tell(store: MemoryStore) -> None:
        await store.commit([], [joined(0)])
        await store.commit([], [joined(number) for number in range(4999)])
        first = await read(store, Wanted(vm="absent"), limit=1, scan_max=2000)
        assert (first.entries, first.next) == ([], 3001)

        page, pages = first, 1
        while page.next is not None:
            page = await read(store, Wanted(vm="vm-0"), limit=10, before=page.next, scan_max=2000)
            pages += 1
        assert (pages, [one.number for one in page.entries]) == (3, [2, 1])

    story(tell)


def test_what_is_older_than_since_is_not_looked_through() -> None:
    """The last hour costs as much as an hour, however long the history is."""

    class Counted(MemoryStore):
        looks = 0

        async def latest(self, before: int | None = None, limit: int = 1000):  # type: ignore[no-untyped-def]
            self.looks += 1
            return await super().latest(before, limit)

    async def tell() -> None:
        store = Counted()
        await store.commit([], [joined(number) for number in range(10_000)])
        page = await read(store, Wanted(vm="absent", since=NOON + 9_900 * MINUTE), limit=10)

        assert (page.entries, page.next, store.looks) == ([], None, 1)

    asyncio.run(tell())


def test_a_note_that_cannot_be_read_hides_no_other() -> None:
    async def tell(store: MemoryStore) -> None:
        await store.commit([], [joined(1), UNREADABLE, joined(3)])
        assert await numbers(store, Wanted()) == [3, 1]

    story(tell)


def retention(
    store: MemoryStore, clock: VirtualClock, *, days: int = 0, notes_max: int = 0, batch: int = 1000
) -> RetentionWorker:
    return RetentionWorker(
        store, clock, HistoryFeed(store), keep=days * DAY, notes_max=notes_max, batch=batch
    )


async def kept(store: MemoryStore) -> list[int]:
    return [note.number for note in await store.history()]


def test_what_is_older_than_its_days_goes_and_not_a_minute_earlier() -> None:
    async def tell(store: MemoryStore) -> None:
        await store.commit([], [joined(1), UNREADABLE, joined(2), joined(3)])
        clock = VirtualClock(NOON + 90 * DAY - 58 * MINUTE)
        one = retention(store, clock, days=90)
        await clock.advance(60 * MINUTE)

        assert await one.trim() == 1
        assert await kept(store) == [2, 3, 4]
        await clock.advance(timedelta(seconds=1))
        assert await one.trim() == 2
        assert await kept(store) == [4]

    story(tell)


def test_of_too_many_notes_the_oldest_go() -> None:
    async def tell(store: MemoryStore) -> None:
        await store.commit([], [joined(number) for number in range(10)])
        assert await retention(store, VirtualClock(NOON), notes_max=4).trim() == 6
        assert await kept(store) == [7, 8, 9, 10]

    story(tell)


def test_without_limits_everything_is_kept() -> None:
    async def tell(store: MemoryStore) -> None:
        await store.commit([], [joined(number) for number in range(10)])
        assert await retention(store, VirtualClock(NOON + 36_500 * DAY)).trim() == 0

    story(tell)


def test_trimming_goes_in_small_batches_until_it_is_done_and_touches_no_record() -> None:
    """A long history that is given a limit must not hold up those who write, and live events are
    records, not notes.
    """

    async def tell(store: MemoryStore) -> None:
        revision = await store.commit(
            [Write("scope/web/", b"live", 0)], [joined(number) for number in range(100)]
        )
        clock = VirtualClock(NOON)
        one = retention(store, clock, notes_max=5, batch=10)
        work = asyncio.ensure_future(one.run())
        await clock.advance(timedelta(seconds=1))
        assert await kept(store) == list(
            range(61, 101)
        )  # a batch at once and one every fifth of a second
        await clock.advance(timedelta(seconds=2))
        work.cancel()

        assert await kept(store) == [96, 97, 98, 99, 100]
        (live,) = (await store.load("scope/")).records
        assert (live.value, live.revision) == (b"live", revision)

    story(tell)


def test_a_store_that_does_not_answer_is_tried_again() -> None:
    class Lost(MemoryStore):
        is_lost = True

        async def trim(self, before: int, limit: int = 1000) -> int:
            if self.is_lost:
                raise StoreLost("gone")
            return await super().trim(before, limit)

    async def tell() -> None:
        store, clock = Lost(), VirtualClock(NOON)
        await store.commit([], [joined(number) for number in range(10)])
        work = asyncio.ensure_future(retention(store, clock, notes_max=1).run())
        await clock.advance(TURN)
        store.is_lost = False
        await clock.advance(TURN)
        work.cancel()

        assert await kept(store) == [10]

    asyncio.run(tell())


def test_deletions_are_remembered_for_a_day_and_then_forgotten_even_across_restarts() -> None:
    """Another server may have been away; after a day it reads everything again, and a busy fleet
    does not grow for ever.
    """

    async def tell(store: MemoryStore) -> None:
        made = await store.commit([Write("scope/a/", b"1", 0), Write("scope/b/", b"1", 0)])
        gone = await store.commit([Write("scope/a/", None, made)])
        clock = VirtualClock(NOON)
        await retention(store, clock).forget()
        later = await store.commit([Write("scope/b/", None, made)])

        await clock.advance(DELETIONS_KEPT - timedelta(seconds=1))
        assert await retention(store, clock).forget() == 0
        assert await anext(store.watch(made))
        await clock.advance(timedelta(seconds=1))
        await retention(store, clock).forget()
        assert [record.key for record in (await anext(store.watch(gone))).records] == [
            "scope/b/",
            "retention",
        ]
        with pytest.raises(StoreLost):
            await anext(store.watch(made))

        await clock.advance(DELETIONS_KEPT)
        await retention(store, clock).forget()
        with pytest.raises(StoreLost):
            await anext(store.watch(later - 1))

    story(tell)


def test_a_clock_that_was_far_ahead_stops_no_forgetting() -> None:
    async def tell(store: MemoryStore) -> None:
        made = await store.commit([Write("scope/a/", b"1", 0)])
        await store.commit([Write("scope/a/", None, made)])
        await retention(store, VirtualClock(NOON + 1000 * DAY)).forget()
        clock = VirtualClock(NOON)
        await retention(store, clock).forget()
        await clock.advance(DELETIONS_KEPT)
        await retention(store, clock).forget()

        with pytest.raises(StoreLost):
            await anext(store.watch(made))

    story(tell)
