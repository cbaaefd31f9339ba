"""The simulated platform: impacts take time, change only the recorded host, and fail where
configured.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from forewarn.core.event import EventType
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, ImpactResult, Sleeper


@dataclass
class SimulatedPlatform:
    """Takes a duration per type.

    `hosts` are the possible targets of a move; `avoid` says which are bad ones, and how bad.
    Impacts of the `failing` VMs fail.
    """

    clock: Sleeper
    durations: Mapping[EventType, timedelta]
    hosts: Callable[[], Iterable[str]]
    avoid: Callable[[], Mapping[str, int]] = dict
    failing: set[str] = field(default_factory=set)

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        await self.clock.sleep_until(self.clock.now() + self.durations[request.type])
        if request.vm.name in self.failing:
            raise ImpactFailed(f"simulated failure for {request.vm.name}", vm=request.vm.name)
        if not request.moves:
            return ImpactResult()
        hosts = request.targets[:1] or self.hosts()
        return ImpactResult(host=choose_host(request.vm.host, hosts, self.avoid()))


def choose_host(host: str, hosts: Iterable[str], avoid: Mapping[str, int]) -> str:
    """Return the next other host by name, round robin, of those to avoid least. Empty: none."""
    others = [name for name in hosts if name != host]
    least = min((avoid.get(name, 0) for name in others), default=0)
    best = [name for name in others if avoid.get(name, 0) == least]
    return min((name for name in best if name > host), default=min(best, default=""))
