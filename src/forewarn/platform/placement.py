"""Chooses the hosts that a VM may move to. Pure: makes no calls."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A host that a VM could move to.

    A host that does not answer is not a candidate, and neither is the one that the VM is on.
    """

    host: str
    free_bytes: int
    """Its memory without that of its running VMs, and of VMs that are on their way to it."""
    avoid: int = 0
    """How bad a target it is, such as one that a campaign is going to restart."""
    scope_vms: int = 0
    """VMs of the moving VM's scope that are there, or on their way."""


def rank_targets(candidates: Iterable[Candidate], need_bytes: int) -> list[str]:
    """Return the hosts with room for the VM, the best first.

    Least to avoid, then the fewest VMs of its scope, then the most free memory, then by name.
    """
    fitting = [candidate for candidate in candidates if candidate.free_bytes >= need_bytes]
    fitting.sort(key=lambda each: (each.avoid, each.scope_vms, -each.free_bytes, each.host))
    return [candidate.host for candidate in fitting]
