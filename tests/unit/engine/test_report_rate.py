"""Merging reports takes CPU time that polls need, so each host has an allowance."""

import asyncio

from forewarn.engine.report_rate import ReportRate
from forewarn.lab.clock import VirtualClock
from tests.unit.engine.hostd_world import NOON, SECOND, World, reported, run


def test_host_that_reports_too_much_is_not_merged_and_others_are() -> None:
    """Two reports with 2,000 VMs each are merged at once; the next one ten seconds later."""

    async def test(world: World) -> None:
        thief, neighbour = await world.daemon("host-a"), await world.daemon("host-b")
        named = [{"name": f"not valid {number}"} for number in range(1974)]
        for name in ("first", "second"):
            work = await thief.work(inventory={"vms": [*named, reported(name)]})
            assert work["is_merged"]
        work = await thief.work(inventory={"vms": [*named, reported("third")]})
        assert (work["is_merged"], work["problems"]) == (False, [])
        await world.settle()
        assert "third" not in world.servers[1].board.vms
        assert await neighbour.report(reported("other")) == []
        assert "other" in world.servers[1].board.vms

        await world.pass_time(11 * SECOND, thief, neighbour)
        work = await thief.work(inventory={"vms": [*named, reported("third")]})
        await world.settle()
        assert (work["is_merged"], "third" in world.servers[1].board.vms) == (True, True)

    run(test)


def test_host_of_common_size_may_report_every_second() -> None:
    async def test() -> None:
        clock = VirtualClock(NOON)
        rate = ReportRate(clock)
        for _ in range(600):
            assert rate.admits("host-a", 150)
            await clock.advance(SECOND)

    asyncio.run(test())


def test_allowance_is_used_up_and_comes_back() -> None:
    async def test() -> None:
        clock = VirtualClock(NOON)
        rate = ReportRate(clock)
        assert [rate.admits("host-a", 2000) for _ in range(3)] == [True, True, False]
        await clock.advance(10 * SECOND)
        assert not rate.admits("host-a", 2000)
        await clock.advance(SECOND / 4)
        assert rate.admits("host-a", 2000)
        assert not rate.admits("host-a", 2000)

    asyncio.run(test())
