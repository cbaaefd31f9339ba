"""Servers and a host daemon under seeds: what is recorded was done, once at a time, and ends."""

from collections import Counter

import pytest

from forewarn.hostd.worker import ImpactRunner
from forewarn.platform.base import ImpactRequest
from tests.rules import Broken
from tests.sim.hostd_world import HostdWorld

SEEDS = 20
SEEDS_TO_FIND_A_FAULT = 40


@pytest.mark.parametrize("seed", range(SEEDS))
def test_results_are_those_of_the_daemon_for_every_seed(seed: int) -> None:
    """Whatever is lost or restarted: no two calls for a VM at a time, no result counts for another
    try, nothing is recorded as done that did not run, and everything ends.
    """
    history = HostdWorld(seed).run()

    kinds = Counter(str(entry.what) for entry in history)
    assert kinds["impacted"] > 3


def test_seed_gives_the_same_history_again() -> None:
    assert HostdWorld(3).run() == HostdWorld(3).run()


def test_simulation_reaches_every_kind_of_result() -> None:
    """A simulation in which nothing happens proves nothing."""
    kinds: Counter[str] = Counter()
    details: Counter[str] = Counter()
    for seed in range(5):
        for entry in HostdWorld(seed).run():
            kinds[entry.what] += 1
            details[entry.detail] += 1

    assert min(kinds[kind] for kind in ("impacted", "impact-failed", "restarted")) > 3
    assert details["guest agent answers"] > 3
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


@pytest.mark.parametrize("planted", [AttachesToFailures, DoesNotWait])
def test_simulation_finds_a_planted_fault(planted: type[ImpactRunner]) -> None:
    def is_found(seed: int) -> bool:
        try:
            HostdWorld(seed, planted).run()
        except Broken:
            return True
        return False

    assert any(is_found(seed) for seed in range(SEEDS_TO_FIND_A_FAULT))
