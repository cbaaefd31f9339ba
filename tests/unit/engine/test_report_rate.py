"""Reports take CPU time that polls need and space in the store, so each host has an allowance."""

import asyncio

from forewarn.engine.report_rate import ReportRate
from forewarn.lab.clock import VirtualClock
from tests.history import entries_of
from tests.unit.engine.hostd_world import NOON, SECOND, Daemon, World, reported, run


def bridges(number: int) -> list[dict[str, object]]:
    return [{"bridge": f"br{number}-{each}", "problem": "no", "vms": 1} for each in range(100)]


def test_host_that_reports_too_much_is_not_merged_and_others_are() -> None:
    """Two reports with 1,950 VMs each are merged at once; the next one ten seconds later."""

    async def test(world: World) -> None:
        thief, neighbour = await world.daemon("host-a"), await world.daemon("host-b")
        named = [{"name": f"not valid {number}"} for number in range(1949)]
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


def test_host_cannot_fill_the_history_with_changes() -> None:
    """5,000 requests in 25 seconds: what its allowance of 6,100 and 200 a second pays for."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        before = len(await entries_of(world.store))
        for number in range(5000):
            daemon.problem = "cannot list VMs" if number % 2 else ""
            assert (await daemon.send()).status_code == 200
            if number % 200 == 199:
                await world.clock.advance(SECOND)
        assert 200 <= len(await entries_of(world.store)) - before <= (6100 + 25 * 200) / 50

    run(test)


def test_new_runs_of_a_daemon_use_the_allowance_too() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        before = len(await entries_of(world.store))
        statuses = list[int]()
        for number in range(300):
            daemon.session = f"s{number}"
            statuses.append((await daemon.send()).status_code)
        assert len(await entries_of(world.store)) - before <= 6100 / 50
        assert (statuses[0], statuses[-1]) == (200, 503)

    run(test)


def test_what_a_host_could_not_change_is_recorded_a_little_later() -> None:
    """Its daemon stays connected, and says the same with each request."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await use_up(world, daemon)
        await daemon.work(problem="cannot list VMs")
        assert not problem_of(world), "it is not written now"
        assert world.servers[0].hosts.managed.has_contact("host-a")

        await world.clock.advance(SECOND)
        await daemon.work(problem="cannot list VMs")
        assert problem_of(world) == "cannot list VMs"

    run(test)


def test_time_in_which_guests_read_nothing_is_never_lost_by_the_allowance() -> None:
    """A daemon says it once, when it is over: so it gets no response that takes it."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await use_up(world, daemon)
        assert (await daemon.send(unconfirmed_seconds=60)).status_code == 503

        await world.clock.advance(SECOND)
        assert (await daemon.send(unconfirmed_seconds=61)).status_code == 200
        record = world.servers[0].hosts.managed.find("host-a")
        assert record is not None
        assert record.unconfirmed_since == NOON - 60 * SECOND

    run(test)


def test_reports_leave_room_for_changes_of_the_daemon() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a")
        named = [{"name": f"not valid {number}"} for number in range(1950)]
        for _ in range(3):
            merged = (await daemon.work(inventory={"vms": named}))["is_merged"]
        assert not merged
        await daemon.work(problem="cannot list VMs")
        assert problem_of(world) == "cannot list VMs"

    run(test)


def test_history_has_one_entry_for_all_bridges_that_change_at_once() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        before = len(await world.history("updated"))
        two = [{"bridge": name, "problem": "it was deleted", "vms": 1} for name in ("br0", "br1")]
        await daemon.work(unserved=two)
        await daemon.work(unserved=bridges(7))
        texts = [entry.detail for entry in (await world.history("updated"))[before:]]
        assert texts == [
            (
                "bridge br0 of host-a is not served: it was deleted;"
                " bridge br1 of host-a is not served: it was deleted"
            ),
            (
                "bridge br0 of host-a is served again; bridge br1 of host-a is served again;"
                " bridge br7-0 of host-a is not served: no;"
                " bridge br7-1 of host-a is not served: no;"
                " bridge br7-10 of host-a is not served: no; and 97 more bridges"
            ),
        ]

    run(test)


async def use_up(world: World, daemon: Daemon) -> None:
    """Change something until nothing more is recorded."""
    for number in range(100):
        await daemon.work(unserved=bridges(number))
    await daemon.work()
    await daemon.work()


def problem_of(world: World) -> str:
    record = world.servers[0].hosts.managed.find("host-a")
    assert record is not None
    return record.problem
