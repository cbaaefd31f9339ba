"""Servers, host daemons and VMs under seeds: what is promised holds whatever fails meanwhile."""

import functools
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.engine.entry import Entry
from forewarn.hostd.worker import ImpactRunner
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.remote import RunningImpact
from tests.rules import Broken
from tests.sim.hostd_world import HostdWorld

SEEDS = 8
SEEDS_TO_FIND_A_FAULT = 40


@functools.cache
def history_of(seed: int) -> list[Entry]:
    return HostdWorld(seed).run()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_promises_of_host_daemons_hold_for_every_seed(seed: int) -> None:
    """Whatever is lost, killed or done by hand: no VM runs twice, none is acted on by two daemons,
    none is started that was left off, nothing is recorded as done that is not, and in the end all
    is as the fleet says.
    """
    kinds = Counter(str(entry.what) for entry in history_of(seed))

    assert kinds["impacted"] > 3


def test_seed_gives_the_same_history_again() -> None:
    assert HostdWorld(3).run() == history_of(3)


def test_simulation_reaches_every_kind_of_result() -> None:
    """A simulation in which nothing happens proves nothing."""
    entries = [entry for seed in range(SEEDS) for entry in history_of(seed)]
    kinds = Counter(str(entry.what) for entry in entries)
    details = Counter(entry.detail for entry in entries)

    reached = ("impacted", "impact-failed", "restarted", "moved", "canceled", "executed-silently")
    assert min(kinds[kind] for kind in reached) > 3
    assert details["guest agent answers"] > 3
    assert details["polled again"] > 3
    assert details["daemon of host-a unreachable"] > 3


class AttachesToFailures(ImpactRunner):
    """Uses the failure of one try as the result of the next."""

    def _start(self, request: ImpactRequest) -> None:
        started = self._impacts.get((request.event_id, request.vm.name))
        if started is None:
            super()._start(request)
        else:
            started.tries = request.tries


class DoesNotWait(ImpactRunner):
    """Starts an impact while a cancelled call for the VM still ends."""

    def _start(self, request: ImpactRequest) -> None:
        self._tasks.clear()
        super()._start(request)


class StartsWhatIsOff(ImpactRunner):
    """Starts a VM that an earlier run has stopped, although its event is over."""

    async def find_begun(self) -> None:
        await super().find_begun()
        self._begun = dict.fromkeys(self._begun, True)


class DoneAtTheReset(ImpactRunner):
    """Does not say that a restarted VM has yet to boot."""

    async def _run(self, request: ImpactRequest) -> ImpactResult:
        result = await super()._run(request)
        return ImpactResult(result.host, result.detail, problem=result.problem)


class DoesNotAskOtherHosts(ImpactRunner):
    """Starts the VM of an event that is over although another host runs it."""

    async def _recover(self, each: RunningImpact, *more: Any, may_start: bool) -> None:
        await super()._recover(replace(each, may_run_on=()), *more, may_start=may_start)


PLANTED = {
    AttachesToFailures: 7,
    DoesNotWait: 0,
    StartsWhatIsOff: 2,
    DoneAtTheReset: 0,
    DoesNotAskOtherHosts: 1,
}
"""Each with a seed that finds it, so that this does not take long."""


@pytest.mark.parametrize("planted", PLANTED)
def test_simulation_finds_a_planted_fault(planted: type[ImpactRunner]) -> None:
    def is_found(seed: int) -> bool:
        try:
            HostdWorld(seed, planted).run()
        except Broken:
            return True
        return False

    first = PLANTED[planted]
    assert any(is_found(seed) for seed in range(first, first + SEEDS_TO_FIND_A_FAULT))
