"""Servers, host daemons and VMs under seeds: what is promised holds whatever fails meanwhile."""

import asyncio
import functools
from collections import Counter
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
from tests.sim.hypervisors import HOSTS, Hypervisors, Marker, OnlyTheLock, StartedByHand

SEEDS = 8
SEEDS_TO_FIND_A_FAULT = 40
ENDED_EARLY_MAX = 3
"""So few of the seeds below may end early, because only a lock could have prevented what they find:
the others still test something.
"""
ONCE_BROKEN = (77, 122, 161, 202, 242, 245, 254, 256, 269, 347, 355, 528, 573)
"""They broke a rule once: a second daemon of a host, or a VM that another host may have run.

tests/unit/engine: test_host_sessions.py, test_daemon_of_another_machine_is_refused_while_the_first_
is_connected; test_duplicates.py, test_vm_is_not_started_while_a_host_that_may_run_it_is_away.
"""
ONCE_BROKEN_UNREPORTED = (6660025, 6660132, 8123025)
"""These broke one while a host was connected and its report did not count yet, or was old.

test_unreported_hosts.py, test_restarted_daemon_gets_no_impact_before_its_report_counts.
"""
ONCE_BROKEN_OLD_LIST = (
    *(20149, 20182, 20429, 20580, 20777, 21422, 21880),
    *(49112, 51147, 90225, 770027),
)
"""These, and all below, broke one with the lock: an old list of VMs, a move that was taken for
done, or that was recovered on its target.

test_host_removal.py, test_list_of_vms_from_before_a_host_is_back_does_not_count; test_inventory.py,
test_move_is_not_taken_for_done_because_the_server_of_its_daemon_is_lost.
"""
ONCE_BROKEN_EVICTED = (100260, 300035, 300952, 400273)
"""A VM that was evicted was started for an event that had stopped it before.

test_remote_hosts.py,
test_vm_that_was_evicted_is_not_started_for_an_event_that_had_stopped_it_before.
"""
ONCE_BROKEN_CLONE = (19, 61040, 70018, 71002, 81658, 90805, 91366, 111331)
"""A clone that changed its server; a suspended VM that the next event moved.

test_unreported_hosts.py, test_report_of_a_clone_does_not_count_sooner_at_another_server;
tests/unit/platform/libvirt/test_libvirt_recover.py,
test_vm_that_another_event_left_suspended_is_resumed_before_the_next_one_acts.
"""
ONCE_BROKEN_BY_HAND = (900062,)
"""A VM was started elsewhere by hand while its host was away, and the other host was lost then.

test_unreported_hosts.py, test_vm_of_a_host_that_was_away_may_have_been_started_elsewhere.
"""
ONCE_BROKEN_LEFT_RUNNING = (900223, 900444)
"""A clone was the first to connect after its host was forgotten and left running.

test_host_removal.py, test_clone_of_a_host_that_was_left_running_does_not_say_what_runs_there.
"""
ONCE_BROKEN_NO_TARGET = (400534,)
"""A move failed at a server because no target was connected, and its daemon had done it before.

test_remote_hosts.py,
test_move_that_was_done_before_its_server_was_lost_counts_while_no_target_is_connected.
"""
FAMILIES = {
    "host": (ONCE_BROKEN, False),
    "unreported": (ONCE_BROKEN_UNREPORTED, False),
    "old list": (ONCE_BROKEN_OLD_LIST, True),
    "evicted": (ONCE_BROKEN_EVICTED, True),
    "clone": (ONCE_BROKEN_CLONE, True),
    "by hand": (ONCE_BROKEN_BY_HAND, True),
    "left running": (ONCE_BROKEN_LEFT_RUNNING, True),
    "no target": (ONCE_BROKEN_NO_TARGET, True),
}
"""With whether their disks have a lock. The seeds follow other paths after each change of the
simulation, so the unit tests named above hold what once happened.
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


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_that_broke_a_rule_once_break_none_now(family: str) -> None:
    """Without the lock, a VM runs twice only if nobody but the lock could prevent it."""
    seeds, has_lock = FAMILIES[family]
    ended_early = list[int]()
    for seed in seeds:
        try:
            assert HostdWorld(seed, has_lock=has_lock).run()
        except OnlyTheLock:
            assert not has_lock
            ended_early.append(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert len(ended_early) <= ENDED_EARLY_MAX, ended_early


def test_lock_of_a_disk_refuses_the_second_start() -> None:
    """Libvirt's lock manager does that, whoever starts the VM; without it, the VM runs twice.

    It must not hide a start that a daemon could have known to be the second one.
    """

    async def start_twice(vms: Hypervisors, is_by_hand: bool) -> None:
        for host in HOSTS:
            vms.define(host, "web-0", Marker())
        start = vms.start_by_hand if is_by_hand else vms.start
        start("host-a", "web-0")
        vms.start("host-b", "web-0")

    with pytest.raises(ImpactFailed, match="the disk of web-0 is locked by"):
        asyncio.run(start_twice(Hypervisors(Random(1), has_lock=True), is_by_hand=True))
    with pytest.raises(StartedByHand, match="a VM runs on one host"):
        asyncio.run(start_twice(Hypervisors(Random(1)), is_by_hand=True))
    for has_lock in (True, False):
        with pytest.raises(Broken, match="a VM runs on one host"):
            asyncio.run(start_twice(Hypervisors(Random(1), has_lock=has_lock), is_by_hand=False))


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
    assert sum("unreachable: no contact since" in entry.detail for entry in entries) > 3


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


@pytest.mark.parametrize(
    ("planted", "has_lock"), [*((each, False) for each in PLANTED), (DoesNotAskOtherHosts, True)]
)
def test_simulation_finds_a_planted_fault(planted: type[ImpactRunner], *, has_lock: bool) -> None:
    """The lock of a disk does not hide a daemon that starts a VM twice."""

    def is_found(seed: int) -> bool:
        try:
            HostdWorld(seed, planted, has_lock=has_lock).run()
        except OnlyTheLock:
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
