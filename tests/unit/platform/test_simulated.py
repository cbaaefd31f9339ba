"""The platform that acts on nothing."""

import asyncio

import pytest

from forewarn.core.event import Cause, EventType
from forewarn.core.timing import DURATION
from forewarn.errors import ImpactFailed
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.simulated import SimulatedPlatform, choose_host
from tests.builders import NOON, SECOND, guid, vm


def order(type_: EventType, cause: Cause = Cause.MAINTENANCE) -> ImpactRequest:
    return ImpactRequest(guid(1), "web", vm("web-0"), type_, cause, tries=1)


def carried_out(what: ImpactRequest, *failing: str) -> ImpactResult:
    async def main() -> ImpactResult:
        clock = VirtualClock(NOON)
        platform = SimulatedPlatform(
            clock, durations=DURATION, hosts=lambda: ["host-a", "host-b"], failing=set(failing)
        )
        task = asyncio.create_task(platform.run_impact(what))
        await asyncio.sleep(0)
        await clock.advance(DURATION[what.type] - SECOND)
        assert not task.done()
        await clock.advance(SECOND)
        return await task

    return asyncio.run(main())


@pytest.mark.parametrize("type_", list(EventType))
def test_each_type_takes_its_duration(type_: EventType) -> None:
    carried_out(order(type_))


def test_redeploy_failed_host_and_live_migration_move_the_vm() -> None:
    assert carried_out(order(EventType.REDEPLOY)) == ImpactResult(host="host-b")
    assert carried_out(order(EventType.REBOOT, Cause.FAILED)) == ImpactResult(host="host-b")
    assert carried_out(order(EventType.FREEZE, Cause.LIVE_MIGRATION)).host == "host-b"
    assert carried_out(order(EventType.FREEZE)) == ImpactResult()
    assert carried_out(order(EventType.REBOOT)) == ImpactResult()


def test_it_fails_for_configured_vms() -> None:
    with pytest.raises(ImpactFailed, match="web-0"):
        carried_out(order(EventType.FREEZE), "web-0")


def test_hosts_are_chosen_round_robin() -> None:
    assert choose_host("b", ["a", "b", "c"], {}) == "c"
    assert choose_host("c", ["a", "b", "c"], {}) == "a"
    assert choose_host("a", ["a"], {}) == ""


def test_avoided_hosts_are_chosen_last() -> None:
    """Best is one that no campaign has on its list, then one that still waits, and worst one that
    is under way.
    """
    hosts = ["a", "b", "c", "d"]

    assert choose_host("a", hosts, {"a": 2, "b": 2, "c": 1}) == "d"
    assert choose_host("a", hosts, {"a": 2, "b": 2, "c": 1, "d": 2}) == "c"
    assert choose_host("d", hosts, {"a": 1, "b": 1, "c": 1}) == "a"
