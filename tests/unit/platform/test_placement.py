"""Which hosts a VM may move to, and in which order."""

from forewarn.platform.placement import Candidate, rank_targets

GIB = 1 << 30


def test_most_free_memory_comes_first() -> None:
    candidates = [Candidate("a", 4 * GIB), Candidate("b", 16 * GIB), Candidate("c", 8 * GIB)]

    assert rank_targets(candidates, GIB) == ["b", "c", "a"]


def test_host_without_room_for_the_vm_is_left_out() -> None:
    """A VM that just fits does fit; one byte more does not."""
    candidates = [Candidate("a", 4 * GIB), Candidate("b", 4 * GIB - 1), Candidate("c", -GIB)]

    assert rank_targets(candidates, 4 * GIB) == ["a"]
    assert rank_targets(candidates, 4 * GIB + 1) == []


def test_scope_spreads_over_hosts_before_memory_counts() -> None:
    """One host that fails should take down as few VMs of a scope as possible."""
    candidates = [
        Candidate("a", 64 * GIB, scope_vms=2),
        Candidate("b", 32 * GIB, scope_vms=1),
        Candidate("c", 2 * GIB),
    ]

    assert rank_targets(candidates, GIB) == ["c", "b", "a"]


def test_host_to_avoid_comes_after_all_others() -> None:
    """It is going to restart soon: the VM would be interrupted twice."""
    candidates = [
        Candidate("a", 64 * GIB, avoid=1),
        Candidate("b", 2 * GIB, scope_vms=5),
        Candidate("c", 64 * GIB, avoid=2),
    ]

    assert rank_targets(candidates, GIB) == ["b", "a", "c"]


def test_equal_hosts_are_ordered_by_name() -> None:
    assert rank_targets([Candidate("b", GIB), Candidate("a", GIB)], GIB) == ["a", "b"]
