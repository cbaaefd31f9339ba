"""A platform that acts on nothing: it takes its time, moves VMs on paper, and fails where it is
told to.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Protocol

from forewarn.core.event import Cause, EventType
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, ImpactResult

NOBODY_WANTS: Mapping[str, int] = {}


class Sleeper(Protocol):
    """The part of a clock that is needed here."""

    def now(self) -> datetime: ...

    async def sleep_until(self, moment: datetime) -> None: ...


class SimulatedPlatform:
    """Takes a time per type.

    `hosts` tells which hosts there are to move to, and `wanted` which of them serve badly, and how
    badly; impacts of the `failing` VMs fail.
    """

    def __init__(
        self,
        clock: Sleeper,
        *,
        durations: Mapping[EventType, timedelta],
        hosts: Callable[[], Iterable[str]],
        wanted: Callable[[], Mapping[str, int]] = dict,
        failing: Collection[str] = (),
    ) -> None:
        self._clock = clock
        self.durations = durations
        self._hosts = hosts
        self._wanted = wanted
        self.failing = set(failing)

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        await self._clock.sleep_until(self._clock.now() + self.durations[order.type])
        if order.vm.name in self.failing:
            raise ImpactFailed(
                f"the simulated platform was told to fail for {order.vm.name}", vm=order.vm.name
            )
        moves = order.type is EventType.REDEPLOY or order.cause is Cause.FAILED
        return ImpactResult(
            host=another_host(order.vm.host, self._hosts(), self._wanted()) if moves else ""
        )


def another_host(host: str, hosts: Iterable[str], wanted: Mapping[str, int] = NOBODY_WANTS) -> str:
    """The next host by name, round and round, of those that are wanted least by others; empty if
    there is no other.
    """
    every = [name for name in hosts if name != host]
    least = min((wanted.get(name, 0) for name in every), default=0)
    others = [name for name in every if wanted.get(name, 0) == least]
    return min((name for name in others if name > host), default=min(others, default=""))
