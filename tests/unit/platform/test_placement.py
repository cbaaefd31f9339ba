"""Which hosts a VM may move to, and in which order."""

from typing import Any

import pytest

from forewarn.errors import ImpactFailed
from forewarn.platform.placement import Move, rank_targets

GIB = 1 << 30


def rank(need_bytes: int = GIB, *, avoid: dict[str, int] | None = None, **more: Any) -> list[str]:
    """The targets of `web-0`. Other names than `moves`… are hosts with their free GiB."""
    known = {name: more.pop(name) for name in ("moves", "scope_hosts") if name in more}
    free = {host: int(gib * GIB) for host, gib in more.items()}
    move = Move("web-0", "web", need_bytes)
    return rank_targets(move, free, hosts=len(free), avoid=avoid or {}, **known)


def test_most_free_memory_comes_first() -> None:
    assert rank(a=4, b=16, c=8) == ["b", "c", "a"]


def test_host_without_room_for_the_vm_is_left_out() -> None:
    """A VM that just fits does fit; one byte more does not."""
    assert rank(4 * GIB, a=4, b=3.9, c=-1) == ["a"]
    with pytest.raises(
        ImpactFailed,
        match=r"^3 of 3 other hosts answer, and none has 4096 MiB of free memory for web-0$",
    ):
        rank(4 * GIB + 1, a=4, b=3.9, c=-1)


def test_scope_spreads_over_hosts_before_memory_counts() -> None:
    """One host that fails should take down as few VMs of a scope as possible."""
    assert rank(a=64, b=32, c=2, scope_hosts=["a", "b", "a"]) == ["c", "b", "a"]


def test_host_to_avoid_comes_after_all_others() -> None:
    """It is going to restart soon: the VM would be interrupted twice."""
    assert rank(a=64, b=2, c=64, avoid={"a": 1, "c": 2}, scope_hosts=["b"] * 5) == ["b", "a", "c"]


def test_equal_hosts_are_ordered_by_name() -> None:
    assert rank(b=1, a=1) == ["a", "b"]


def test_vm_on_its_way_counts_as_there() -> None:
    """Its memory, and its scope."""
    on_its_way = [Move("db-0", "db", 2 * GIB, "a")]
    assert rank(a=4, b=3, moves=on_its_way) == ["b", "a"]
    assert rank(3 * GIB, a=4, b=3, moves=on_its_way) == ["b"]
    assert rank(a=64, b=3, moves=[Move("web-1", "web", GIB, "a")]) == ["b", "a"]


def test_host_that_two_vms_are_on_their_way_to_is_no_first_choice() -> None:
    """More at a time take longer, and each one slows down the VMs of that host."""
    on_their_way = [Move(f"db-{number}", "db", GIB, "a") for number in range(2)]
    assert rank(a=64, b=3, moves=on_their_way[:1]) == ["a", "b"]
    assert rank(a=64, b=3, moves=on_their_way) == ["b", "a"]
    assert rank(a=64, b=3, c=9, moves=on_their_way, scope_hosts=["b", "c"]) == ["a", "c", "b"]


def test_no_other_host_is_not_a_failure_but_none_that_answers_is() -> None:
    move = Move("web-0", "web", GIB)
    assert rank_targets(move, {}, hosts=0, avoid={}) == []
    with pytest.raises(ImpactFailed, match=r"^0 of 2 other hosts answer"):
        rank_targets(move, {}, hosts=2, avoid={})
