"""The history is read with filters, in bounded work."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from forewarn.core.change import Change, ChangeKind
from forewarn.engine.entry import Entry, encode_all, make_entry
from forewarn.history.query import EntryFilter, HistoryPage, read
from forewarn.store.base import POSITION_MAX, HistoryValues
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON
from tests.history import write_history


def entry(change: Change, *, minutes: int = 0, scope: str = "web") -> Entry:
    return make_entry(change, at=NOON + minutes * MINUTE, by="ann", scope=scope)


def joined(number: int) -> Entry:
    """A VM joined this many minutes after noon."""
    return entry(Change(what=ChangeKind.JOINED, vm=f"vm-{number}"), minutes=number)


def with_store(test: Callable[[MemoryStore], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test(MemoryStore()))


def vms(page: HistoryPage) -> list[str]:
    return [entry.vm for entry in page.entries]


@pytest.mark.parametrize("in_one_commit", [True, False])
def test_pages_are_newest_first_and_the_cursor_continues(in_one_commit: bool) -> None:
    """What happens between two requests is not on the older pages."""

    async def test(store: MemoryStore) -> None:
        entries = [joined(number) for number in range(1, 6)]
        if in_one_commit:
            await store.commit([], entries=encode_all(entries))
        else:
            await write_history(store, *entries)
        first = await read(store, EntryFilter(), limit=2)
        await write_history(store, joined(6))
        second = await read(store, EntryFilter(), limit=2, before=first.next)
        third = await read(store, EntryFilter(), limit=2, before=second.next)

        assert [vms(page) for page in (first, second, third)] == [
            ["vm-5", "vm-4"],
            ["vm-3", "vm-2"],
            ["vm-1"],
        ]
        assert third.next is None

    with_store(test)


def test_the_last_full_page_has_no_next() -> None:
    async def test(store: MemoryStore) -> None:
        await write_history(store, joined(1), joined(2))
        assert (await read(store, EntryFilter(), limit=2)).next is None

    with_store(test)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (EntryFilter(vm="web-0"), [4, 2, 1]),
        (EntryFilter(vm="web"), []),
        (EntryFilter(scope="db"), [3]),
        (EntryFilter(host="host-a"), [4, 1]),
        (EntryFilter(host="host-c"), [4]),
        (EntryFilter(event="E1"), [2, 1]),
        (EntryFilter(what="started"), [2]),
        (EntryFilter(vm="web-0", what="moved"), [4]),
        (EntryFilter(since=NOON + 2 * MINUTE), [4, 3]),
        (EntryFilter(until=NOON + 2 * MINUTE), [2, 1]),
        (EntryFilter(since=NOON + MINUTE, until=NOON + 3 * MINUTE), [3, 2]),
    ],
)
def test_a_filter_finds_exactly_what_concerns_it(wanted: EntryFilter, found: list[int]) -> None:
    """An event concerns the VMs it names; a move concerns both hosts."""

    async def test(store: MemoryStore) -> None:
        changes = [
            Change(
                what=ChangeKind.SCHEDULED,
                event="E1",
                resources=("web-0", "web-1"),
                host="host-a",
            ),
            Change(what=ChangeKind.STARTED, event="E1", resources=("web-0",), detail="host-a"),
            Change(what=ChangeKind.JOINED, vm="db-0", detail="web-0"),
            Change(what=ChangeKind.MOVED, vm="web-0", host="host-c", host_before="host-a"),
        ]
        numbers = await write_history(
            store,
            *(
                entry(change, minutes=index, scope="db" if change.vm == "db-0" else "web")
                for index, change in enumerate(changes)
            ),
        )
        page = await read(store, wanted, limit=100)
        assert [numbers.index(entry.number) + 1 for entry in page.entries] == found

    with_store(test)


def test_a_request_that_finds_nothing_reads_a_bounded_part() -> None:
    """Nobody can make the server read a million entries by asking for an unknown VM."""

    async def test(store: MemoryStore) -> None:
        numbers = await write_history(store, joined(0), *(joined(n) for n in range(4999)))
        first = await read(store, EntryFilter(vm="absent"), limit=1, scan_max=2000)
        assert (first.entries, first.next) == ([], numbers[3000])

        page, pages = first, 1
        wanted = EntryFilter(vm="vm-0")
        while page.next is not None:
            page = await read(store, wanted, limit=10, before=page.next, scan_max=2000)
            pages += 1
        assert (pages, vms(page)) == (3, ["vm-0", "vm-0"])

    with_store(test)


def test_entries_older_than_since_are_not_read() -> None:
    """The last hour costs the same, however long the history is."""

    class CountingStore(MemoryStore):
        reads = 0

        async def latest(self, before: int = POSITION_MAX, limit: int = 1000) -> HistoryValues:
            self.reads += 1
            return await super().latest(before, limit)

    async def run() -> None:
        store = CountingStore()
        await write_history(store, *(joined(number) for number in range(2000)))
        wanted = EntryFilter(vm="absent", since=NOON + 1900 * MINUTE)
        page = await read(store, wanted, limit=10)

        assert (page.entries, page.next, store.reads) == ([], None, 1)

    asyncio.run(run())


def test_an_unreadable_value_does_not_hide_others() -> None:
    async def test(store: MemoryStore) -> None:
        await write_history(store, joined(1))
        await store.commit([], entries=b"damaged")
        await write_history(store, joined(3))
        assert vms(await read(store, EntryFilter(), limit=10)) == ["vm-3", "vm-1"]

    with_store(test)
