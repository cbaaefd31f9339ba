"""The contract of `forewarn/store/base.py` on each store: history."""

from forewarn.store.base import POSITION_MAX, Record, Store, Write
from tests.conformance.stores import on_every_store


async def write_history(store: Store, count: int) -> list[int]:
    """Commit this many history values, with other commits in between; their positions."""
    positions = []
    for number in range(count):
        positions.append(await store.commit([], entries=b"%d" % number))
        await store.commit([Write(f"other/{number}", b"", 0)])
    return positions


@on_every_store
async def test_a_history_value_has_the_revision_of_its_commit(store: Store) -> None:
    """Positions need no counter of their own, so commits to different records do not conflict."""
    first = await store.commit([Write("a", b"1", 0)], entries=b"one")
    await store.commit([Write("b", b"1", 0)])
    second = await store.commit([], entries=b"")

    values = await store.history()

    assert [(value.position, value.value) for value in values] == [(first, b"one"), (second, b"")]


@on_every_store
async def test_history_is_read_in_pages_from_any_position(store: Store) -> None:
    """A reader keeps its position and nothing else."""
    positions = await write_history(store, 7)

    pages, after = [], 0
    while page := await store.history(after, limit=3):
        pages.append([value.position for value in page])
        after = page[-1].position

    assert pages == [positions[:3], positions[3:6], positions[6:]]
    assert [value.position for value in await store.history(positions[4] - 1)] == positions[4:]
    assert [value.position for value in await store.history(positions[4] + 1)] == positions[5:]
    assert await store.history(limit=0) == ()


@on_every_store
async def test_latest_reads_backwards_in_pages(store: Store) -> None:
    """People read the newest entries first."""
    positions = await write_history(store, 7)

    pages, before = [], positions[-1] + 1
    while page := await store.latest(before, limit=3):
        pages.append([value.position for value in page])
        before = page[-1].position

    newest_first = positions[::-1]
    assert pages == [newest_first[:3], newest_first[3:6], newest_first[6:]]
    assert [value.position for value in await store.latest(positions[2] + 1, 1)] == [positions[2]]
    assert [value.position for value in await store.latest(limit=2)] == newest_first[:2]
    assert await store.latest(limit=0) == await store.latest(positions[0]) == ()


@on_every_store
async def test_the_newest_commits_can_be_told_from_the_others(store: Store) -> None:
    """The history of at least so many commits is kept, whatever else etcd is used for."""
    for number in range(9):
        await store.commit([Write(f"k{number}", b"", 0)], entries=b"%d" % number)

    for commits in (1, 4, 9):
        first = await store.first_of_newest(commits)
        kept = [value for value in await store.history() if value.position >= first]
        assert len(kept) >= commits
    assert (await store.history())[-1].position >= await store.first_of_newest(1)
    assert (await store.history())[0].position > await store.first_of_newest(1000)


@on_every_store
async def test_trim_deletes_the_oldest_values_up_to_a_limit(store: Store) -> None:
    """Small batches let other writers in between. Records are not affected."""
    positions = await write_history(store, 7)
    revision = await store.commit([Write("a", b"1", 0)])

    assert await store.trim(positions[4], limit=3) == 3
    assert await store.trim(positions[4], limit=3) == 1
    assert await store.trim(positions[4]) == 0

    assert [value.position for value in await store.history()] == positions[4:]
    assert [value.position for value in await store.latest(positions[6])] == [
        positions[5],
        positions[4],
    ]
    assert await store.get("a") == Record("a", b"1", revision)


@on_every_store
async def test_trim_keeps_the_newest_value(store: Store) -> None:
    """A follower that has seen it can still tell that it missed nothing."""
    assert await store.trim(POSITION_MAX) == 0
    positions = await write_history(store, 3)

    assert await store.trim(POSITION_MAX) == 2
    assert await store.trim(POSITION_MAX) == 0
    assert [value.position for value in await store.history()] == positions[2:]
