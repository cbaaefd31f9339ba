"""Chooses the hosts that a VM may move to. Pure: makes no calls."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from forewarn.errors import ImpactFailed


class Move(NamedTuple):
    """A VM that is to move, or is on its way to `host`."""

    vm: str
    scope: str
    need_bytes: int
    host: str = ""


def rank_targets(
    move: Move,
    free: Mapping[str, int],
    *,
    hosts: int,
    moves: Iterable[Move] = (),
    moves_max: int = 2,
    avoid: Mapping[str, int],
    scope_hosts: Iterable[str] = (),
) -> list[str]:
    """Return the hosts with room for the VM, the best first. ImpactFailed if none has room.

    Least to avoid, then the fewest VMs of its scope, then those that fewer than `moves_max` VMs are
    on their way to, then the most free memory, then by name.

    `free` is the memory of the other hosts that answer, of `hosts` in all, without that of their
    running VMs; `moves` are the VMs that are on their way; `avoid` says which hosts are bad
    targets, and how bad; `scope_hosts` are the hosts of the scope's VMs.
    """
    left, scope_vms, coming = Counter(free), Counter(scope_hosts), Counter[str]()
    for other in moves:
        left[other.host] -= other.need_bytes
        scope_vms[other.host] += other.scope == move.scope
        coming[other.host] += 1
    fitting = [host for host in free if left[host] >= move.need_bytes]
    if hosts and not fitting:
        raise ImpactFailed(
            f"{len(free)} of {hosts} other hosts answer, and none has {move.need_bytes >> 20} MiB"
            f" of free memory for {move.vm}",
            vm=move.vm,
        )

    def rank(host: str) -> tuple[int, int, bool, int, str]:
        is_busy = coming[host] >= moves_max
        return avoid.get(host, 0), scope_vms[host], is_busy, -left[host], host

    return sorted(fitting, key=rank)
