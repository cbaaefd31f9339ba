"""The clock of the only server was ahead, such as a hardware clock in local time, and is corrected
with a restart: what it wrote about hosts blocks nothing until that time.
"""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from forewarn.engine.host_times import without_future
from forewarn.engine.machine_binding import MERGE_AFTER
from forewarn.engine.managed_hosts import HostedVm, ManagedHost
from forewarn.lab.clock import VirtualClock
from tests.unit.engine.hostd_world import (
    GIB,
    NOON,
    SECOND,
    Daemon,
    Server,
    World,
    reported,
    run,
)

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
EARLY = NOON - HOUR
"""The right time. The clock of the first servers is an hour ahead."""


async def correct_clock(world: World, *daemons: Daemon) -> Server:
    """The only server from now on, whose clock is right."""
    for server in world.servers:
        await world.expire(server)
    world.clock = VirtualClock(EARLY)
    server = Server(world.store, world.clock, "server-3", is_confirming=True)
    world.servers = [server]
    await server.start()
    await world.settle()
    for daemon in daemons:
        daemon.server = server
    return server


# --- what was blocked


def test_impact_is_handed_out_after_a_clock_was_ahead() -> None:
    """A report that was taken before its host was last away would not count."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await correct_clock(world, daemon)
        await daemon.report(reported("web-0"))
        await world.pass_time(SECOND, daemon)
        await daemon.report(reported("web-0"))
        await world.restart("web-0")
        assert len((await daemon.work())["impacts"]) == 1

    run(test)


def test_new_vm_is_merged_after_a_clock_was_ahead() -> None:
    """Its daemon had just replaced one in contact, so that its reports did not count yet."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        new = Daemon(world, "host-a", "s2")
        await new.work()
        server = await correct_clock(world, new)
        await world.pass_time(MERGE_AFTER, new)
        await new.report(reported("web-0"), reported("new-0"))
        assert server.vm("new-0").host == "host-a"

    run(test)


def test_cloned_machine_is_served_again_after_a_clock_was_ahead() -> None:
    """The other one stays away."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = Daemon(world, "host-a", "s2")
        for number in range(1, 4):
            await second.send(number=number)
            await first.send(number=number)
        await world.settle()
        server = await correct_clock(world, first)
        assert (await first.send(number=5)).status_code == 409
        await world.clock.advance(16 * SECOND)
        await first.work(number=6)
        await world.settle()
        assert not server.is_unreachable("host-a")

    run(test)


def test_duplicate_is_found_after_a_clock_was_ahead() -> None:
    """It was suspected before."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", reported("web-0"))
        second = await world.daemon("host-b", reported("web-0"))
        await first.report(reported("web-0"))
        server = await correct_clock(world, first, second)
        for _ in range(3):
            await world.pass_time(6 * SECOND, first, second)
            await first.report(reported("web-0"))
            await second.report(reported("web-0"))
        assert server.hosts.duplicates.count() == 1

    run(test)


@pytest.mark.parametrize("is_confirming", [False, True], ids=["idle", "with-another-event"])
def test_event_of_a_host_that_stays_away_waits_for_it_after_a_clock_was_ahead(
    *, is_confirming: bool
) -> None:
    """Its guests cannot read the event, however late its last request seems to have been, or the
    last confirmation of its server.
    """

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        other = await world.daemon("host-b", reported("web-1"))
        await world.poll("web-0", "web-1")
        await world.settle()
        if is_confirming:
            assert await world.servers[0].operations.restart("web-1", by="ann")
        await world.pass_time(3 * SECOND, daemon, other)
        server = await correct_clock(world)
        assert await server.operations.restart("web-0", by="ann")
        await world.pass_time(20 * MINUTE)
        (event,) = server.scope("web-0").events
        assert event.status == "Scheduled"
        assert event.unreadable_since is not None
        daemon.server = server
        await daemon.report(reported("web-0"))
        (event,) = server.scope("web-0").events
        assert event.not_before - EARLY >= 35 * MINUTE

    run(test, is_confirming=True)


def test_vm_is_not_started_while_a_host_is_away_whose_last_report_is_of_an_unknown_time() -> None:
    """It may have been started there since."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b")
        server = await correct_clock(world, daemon)
        await daemon.report(reported("web-0"))
        await world.pass_time(SECOND, daemon)
        await daemon.report(reported("web-0", power="stopped"))
        assert server.hosts.managed.not_answering(server.vm("web-0")) == "host-b"

    run(test)


# --- what is corrected


RECORD = ManagedHost("host-a", "s1", "server-1", NOON, vms={"id": HostedVm(GIB, is_running=True)})


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, since=NOON + 5 * SECOND, rivals={"s1": NOON + 5 * SECOND}),
        replace(RECORD, merge_at=NOON + MERGE_AFTER + 5 * SECOND),
        replace(RECORD, unreported_since=NOON, reported_at=NOON, away_since=NOON),
    ],
)
def test_record_of_a_clock_that_is_right_stays_as_it_is(record: ManagedHost) -> None:
    """Clocks that differ by a few seconds are right; each write is work for all servers."""
    assert without_future(record, NOON) is record


def test_times_that_are_ahead_are_now() -> None:
    ahead, merge_at = NOON + HOUR, NOON + HOUR + MERGE_AFTER
    vm = HostedVm(GIB, is_running=False, running_at=ahead, double_since=ahead)
    record = ManagedHost(
        *("host-a", "s1", "server-1", ahead),
        vms={"id": vm},
        rivals={"s1": ahead, "s2": NOON - SECOND},
        merge_at=merge_at,
        away_since=ahead,
        unconfirmed_since=ahead,
        unreported_since=ahead,
        reported_at=ahead,
    )
    assert without_future(record, NOON) == ManagedHost(
        *("host-a", "s1", "server-1", NOON),
        vms={"id": vm._replace(running_at=NOON, double_since=NOON)},
        rivals={"s1": NOON, "s2": NOON - SECOND},
        merge_at=NOON + MERGE_AFTER,
        away_since=NOON,
        unconfirmed_since=NOON,
        unreported_since=NOON,
        reported_at=datetime(1970, 1, 1, tzinfo=UTC),
    )


def test_time_of_a_vm_alone_is_corrected() -> None:
    vm = HostedVm(GIB, is_running=True, double_since=NOON + 6 * SECOND)
    record = without_future(replace(RECORD, vms={"id": vm}), NOON)
    assert record == replace(RECORD, vms={"id": vm._replace(double_since=NOON)})


def test_server_whose_clock_is_off_corrects_nothing() -> None:
    """It may be behind: then the times of the others are right."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        before = world.servers[0].hosts.managed.find("host-a")
        for server in world.servers:
            await world.expire(server)
        late = Server(world.store, VirtualClock(EARLY), "server-3")
        late.engine.clock_skew_seconds = -HOUR.total_seconds()
        await late.start()
        await world.settle()
        assert late.hosts.managed.find("host-a") == before
        await late.stop()

    run(test)
