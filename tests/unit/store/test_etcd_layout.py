"""Which keys of etcd are segments of the history."""

import pytest
from aetcd import rpc

from forewarn.errors import StoreUnusable
from forewarn.store.etcd_layout import SEGMENTS_SKIPPED_MAX, Layout


def chain(*names: str, present: int = 1) -> list[int]:
    """The segments among keys with these names, which were created in this order."""
    keys = [
        rpc.KeyValue(key=f"p/segment/{name}".encode(), create_revision=revision)
        for revision, name in enumerate(names, start=1)
    ]
    return list(Layout("p").chain(sorted(keys, key=lambda each: each.key), present))


def test_segments_that_follow_each_other_are_a_chain() -> None:
    assert chain("0000000001", "0000000002", "0000000003") == [1, 2, 3]
    assert chain("0000000300", "0000000301") == [300, 301]  # those before were trimmed


def test_deleted_segments_do_not_make_the_next_one_foreign() -> None:
    """It has real history: nobody should be told to delete it."""
    last = 1 + SEGMENTS_SKIPPED_MAX
    assert chain("0000000001", f"{last:010}") == [1, last]


@pytest.mark.parametrize("name", ["0000000012", "0000500000", "9999999998", "9999999999"])
def test_segment_far_ahead_of_the_one_created_before_it_is_refused(name: str) -> None:
    with pytest.raises(StoreUnusable, match=f"segment/{name}.*delete it"):
        chain("0000000001", name)


@pytest.mark.parametrize("name", ["0000000000", "0000000001", "0000000299", "00000003005"])
def test_key_before_the_segments_is_ignored(name: str) -> None:
    """Its number is lower, but it was created later: the others were not far ahead of it."""
    assert chain("0000000300", name, "0000000301") == [300, 301]


def test_key_at_the_segment_that_has_not_begun_is_ignored() -> None:
    """Commits compare that there is no later one."""
    assert chain("0000000001", "00000000015", present=2) == [1]
    assert chain("0000000001", "00000000025", present=2) == [1]
    with pytest.raises(StoreUnusable):
        chain("0000000001", "00000000025", present=1)
