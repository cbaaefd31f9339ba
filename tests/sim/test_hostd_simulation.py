"""Servers, host daemons and VMs under seeds: what is promised holds whatever fails meanwhile."""

import asyncio
import functools
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.engine.entry import Entry
from forewarn.errors import ImpactFailed
from forewarn.hostd.inventory import Report
from forewarn.hostd.worker import ImpactRunner
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.remote import RunningImpact
from tests.rules import Broken
from tests.sim.hostd_operator import DOUBLE_SECONDS
from tests.sim.hostd_world import HostdWorld, ListingSource
from tests.sim.hypervisors import Hypervisors, Marker, StartedByHand

SEEDS = 8
SEEDS_TO_FIND_A_FAULT = 40
ONCE_BROKEN = (77, 122, 161, 202, 242, 245, 254, 256, 269, 347, 355, 528, 573)
"""They broke a rule once: a second daemon of a host, or a VM that another host may have run."""
ONCE_BROKEN_UNREPORTED = (6660025, 6660132, 8123025)
"""These broke one while a host was connected and its report did not count yet, or was old."""
ONCE_BROKEN_WITH_LOCK = (
    19,
    20149,
    20182,
    20429,
    20580,
    20777,
    21422,
    21880,
    49112,
    51147,
    61040,
    70018,
    71002,
    81658,
    90225,
    90805,
    91366,
    770027,
    100260,
    111331,
    300035,
    300952,
    400273,
)
"""These broke one with the lock: an old list of VMs, a move that was taken for done, or that was
recovered on its target, a clone that changed its server, a suspended VM that the next event moved.
"""


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


@pytest.mark.parametrize("seed", ONCE_BROKEN + ONCE_BROKEN_UNREPORTED)
def test_seed_that_broke_a_rule_once_breaks_none_now(seed: int) -> None:
    """Without the lock, a VM runs twice only if an operator starts it as a daemon does."""
    with suppress(StartedByHand):
        assert history_of(seed)


@pytest.mark.parametrize("seed", ONCE_BROKEN_WITH_LOCK)
def test_seed_that_broke_a_rule_with_the_lock_breaks_none_now(seed: int) -> None:
    assert HostdWorld(seed, has_lock=True).run()


def test_lock_of_a_disk_refuses_the_second_start() -> None:
    """Libvirt's lock manager does that, whoever starts the VM; without it, the VM runs twice."""

    async def start_twice(vms: Hypervisors) -> None:
        vms.add("host-a", "web-0")
        vms.define("host-b", "web-0", Marker())
        vms.start("host-b", "web-0")

    with pytest.raises(ImpactFailed, match="the disk of web-0 is locked by"):
        asyncio.run(start_twice(Hypervisors(Random(1), has_lock=True)))
    with pytest.raises(Broken, match="a VM runs on one host"):
        asyncio.run(start_twice(Hypervisors(Random(1))))


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
    """Starts the VM of an event that is over although another host has it, and may run it."""

    def _cancel(self, each: RunningImpact) -> None:
        super()._cancel(replace(each, may_run_on=(), may_start=True))


PLANTED = {
    AttachesToFailures: 12,
    DoesNotWait: 110,
    StartsWhatIsOff: 140,
    DoneAtTheReset: 0,
    DoesNotAskOtherHosts: 30,
}
"""Each with a seed that finds it, so that this does not take long."""


@pytest.mark.parametrize("planted", PLANTED)
def test_simulation_finds_a_planted_fault(planted: type[ImpactRunner]) -> None:
    def is_found(seed: int) -> bool:
        try:
            HostdWorld(seed, planted).run()
        except StartedByHand:
            return False
        except Broken:
            return True
        return False

    first = PLANTED[planted]
    assert any(is_found(seed) for seed in range(first, first + SEEDS_TO_FIND_A_FAULT))


class HidesCopies(ListingSource):
    """Does not list a VM that another host runs, too."""

    async def list_vms(self) -> Report:
        report = await super().list_vms()
        hidden = {vm for vm in self._vms.doubled if self._vms.places(vm)[:1] != [self._host]}
        kept = tuple(each for each in report.vms if each.name not in hidden)
        return Report(report.memory_bytes, kept)


class ForgetsCopies(ListingSource):
    """Does not list a VM that another host runs, too, for longer than a while."""

    async def list_vms(self) -> Report:
        report, vms = await super().list_vms(), self._vms
        old = {vm for vm, since in vms.doubled.items() if vms.now - since > DOUBLE_SECONDS}
        hidden = {vm for vm in old if vms.places(vm)[:1] != [self._host]}
        kept = tuple(each for each in report.vms if each.name not in hidden)
        return Report(report.memory_bytes, kept)


class HidesStrays(ListingSource):
    """Does not list a VM that has the name of another one."""

    async def list_vms(self) -> Report:
        report, stray = await super().list_vms(), self._strays.get(self._host)
        return Report(report.memory_bytes, tuple(each for each in report.vms if each is not stray))


@pytest.mark.parametrize(
    ("planted", "first", "rule"),
    [
        ({"is_confirming": False}, 11, "an event starts only if its VMs could read it"),
        ({"source": HidesCopies}, 16, "a VM that runs twice is noticed"),
        ({"source": ForgetsCopies}, 16, "nothing acts on a VM that runs twice"),
        ({"source": HidesStrays}, 14, "a VM with the name of another one is a problem"),
    ],
)
def test_simulation_finds_what_servers_do_not_notice(
    planted: dict[str, Any], first: int, rule: str
) -> None:
    """Servers that count all time as notice, and hosts that do not list all their VMs."""

    def run_all() -> None:
        for seed in range(first, first + SEEDS_TO_FIND_A_FAULT):
            HostdWorld(seed, has_lock=True, **planted).run()

    with pytest.raises(Broken, match=rule):
        run_all()
