"""Campaigns with a store, a clock and workers: progress, crashes, several servers, limits."""

import asyncio
import errno
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from forewarn.campaign.model import (
    CAMPAIGN,
    CAMPAIGN_HOSTS,
    HOSTS_MAX,
    Campaign,
    CampaignSpec,
    CampaignState,
    HostPhase,
    HostPriority,
    HostRun,
    operation_id_of,
)
from forewarn.campaign.rules import reconcile
from forewarn.campaign.service import (
    ENDED_MAX,
    HOSTS_KEY,
    LIVE_MAX,
    Campaigns,
    campaign_key,
)
from forewarn.campaign.worker import CampaignWorker
from forewarn.core.command import Approve, Cancel, Maintain
from forewarn.core.event import EventType
from forewarn.core.fleet import Budget, Policy, Scope, ScopeKind
from forewarn.core.timing import DURATION, Timing
from forewarn.engine.engine import Engine
from forewarn.engine.entry import decode_all
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import (
    CampaignOver,
    ImpactFailed,
    Invalid,
    OverBudget,
    StoreLost,
    TooManyCampaigns,
    UnknownCampaign,
)
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult, Platform
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.store.base import Record, RevisionCheck, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, guid, vm
from tests.unit.engine.buggy_engine import BuggyEngine

HOSTS = ("h1", "h2", "h3", "h4")
HOST_TIME = timedelta(minutes=26)
"""A reboot's notice, its usual duration, and a little."""
DONE, PAUSED, CANCELED = CampaignState.DONE, CampaignState.PAUSED, CampaignState.CANCELED
RUNNING = CampaignState.RUNNING


def fleet(hosts: Sequence[str] = HOSTS, *, spare: Sequence[str] = ()) -> Fleet:
    """`web` has a VM on each host, one of which may be down, and `db` has one on the first."""
    vms = tuple(vm(f"web-{host}", host=host) for host in hosts)
    policy = Policy(max_unavailable=Budget(1))
    web = Scope(name="web", kind=ScopeKind.AVAILABILITY_SET, policy=policy, vms=vms)
    db = Scope(name="db", kind=ScopeKind.VM, vms=(vm("db", host="h1"),))
    return Fleet(scopes=(web, db), hosts=tuple(spare))


def spec(*patterns: str, **more: object) -> CampaignSpec:
    plain = CampaignSpec(type=EventType.REBOOT, patterns=patterns or ("h*",), max_hosts=4)
    return replace(plain, **more)


class Server(NamedTuple):
    engine: Engine
    campaigns: Campaigns
    operations: Operations

    async def start(self, spec: CampaignSpec, by: str = "ann") -> Campaign:
        return await self.campaigns.start(spec, by, self.operations.new_id())

    def find(self, campaign: Campaign) -> Campaign:
        return self.campaigns.find(campaign.id)

    def counts(self, campaign: Campaign) -> tuple[CampaignState, int, int, int]:
        found = self.find(campaign)
        return found.state, found.done, found.skipped, found.failed

    def announced(self) -> list[str]:
        """The VMs that have an event."""
        scopes = [published.scope for published in self.engine.board.scopes.values()]
        return sorted(vm for scope in scopes for event in scope.events for vm in event.resources)


class World:
    """A store, a clock, and any number of servers."""

    def __init__(self, *failing: str, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = VirtualClock(NOON)
        self.failing = failing
        self.make_engine: type[Engine] = Engine
        self.make_campaigns: type[Campaigns] = Campaigns
        self.count = 0

    def make_id(self) -> str:
        self.count += 1
        return guid(self.count)

    async def idle(self, wanted: Fleet | None = None) -> Server:
        """A server whose workers do not run."""
        engine = self.make_engine(self.store, self.clock, Timing())
        server = Server(engine, self.make_campaigns(engine), Operations(engine, self.make_id))
        await engine.load()
        if wanted is not None:
            await server.operations.apply(wanted, by="test")
        return server

    @asynccontextmanager
    async def server(
        self, wanted: Fleet | None = None, health: Platform | None = None
    ) -> AsyncIterator[Server]:
        """A server that works until the block ends."""
        server = await self.idle(wanted)
        platform = SimulatedPlatform(
            self.clock,
            durations=DURATION,
            hosts=lambda: server.engine.board.hosts,
            avoid=server.campaigns.host_priorities,
            failing=set(self.failing),
        )
        impacts = Worker(
            server.engine, platform, worker=self.make_id(), impact_limit=timedelta(hours=1)
        )
        campaigns = CampaignWorker(server.engine, server.campaigns, health, MINUTE)
        tasks = [asyncio.create_task(impacts.run()), asyncio.create_task(campaigns.run())]
        try:
            yield server
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def history(self, what: str) -> list[str]:
        values = await self.store.history()
        entries = [entry for value in values for entry in decode_all(value)]
        return [f"{entry.by}: {entry.detail}" for entry in entries if entry.what == what]


def run_in_world(
    main: Callable[[World], Awaitable[None]], *failing: str, store: MemoryStore | None = None
) -> None:
    async def run() -> None:
        await main(World(*failing, store=store))

    asyncio.run(run())


# --- progress


def test_hosts_run_one_after_the_other_until_all_are_done() -> None:
    """The budget is one VM: the next host is announced, with its notice, when the last is over."""

    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            campaign = await server.start(spec(name="kernel"))
            seen = []
            for _ in HOSTS:
                await world.clock.advance(MINUTE)
                seen.append(server.announced())
                await world.clock.advance(HOST_TIME - MINUTE)
            assert server.counts(campaign) == (DONE, 4, 0, 0)

        assert seen == [["db", "web-h1"], ["web-h2"], ["web-h3"], ["web-h4"]]
        assert (await world.history("campaign"))[:3] == [
            "ann: c1 started: Reboot of 4 hosts",
            "campaign kernel: c1 host h1 started",
            "campaign kernel: c1 host h1 done",
        ]
        authors = {line.partition(":")[0] for line in await world.history("scheduled")}
        assert authors == {"campaign kernel"}

    run_in_world(main)


def test_early_approvals_make_it_faster() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            campaign = await server.start(spec())
            for _ in range(50):  # four times ten minutes and some, not four times 25
                await world.clock.advance(MINUTE)
                for name, published in list(server.engine.board.scopes.items()):
                    for event in published.scope.events:
                        await server.engine.submit(name, Approve(event_ids=(event.id,)), by="vm")

            assert server.counts(campaign) == (DONE, 4, 0, 0)

    run_in_world(main)


def test_two_campaigns_share_the_budget_of_a_scope() -> None:
    """The one that waits continues as soon as the other has finished a host."""

    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            first = await server.start(spec("h1", "h2"))
            second = await server.start(spec("h3", "h4"))
            for _ in range(5 * 26):
                await world.clock.advance(MINUTE)
                assert len([name for name in server.announced() if name != "db"]) <= 1

            assert server.counts(first) == server.counts(second) == (DONE, 2, 0, 0)

    run_in_world(main)


def test_failed_impact_pauses_the_campaign_until_it_is_resumed() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            campaign = await server.start(spec())
            await world.clock.advance(4 * HOST_TIME)
            assert server.counts(campaign) == (PAUSED, 1, 0, 1)
            assert server.find(campaign).paused_by_failure

            await server.campaigns.set_state(campaign.id, RUNNING, by="ann")
            await world.clock.advance(4 * HOST_TIME)
            assert server.counts(campaign) == (DONE, 3, 0, 1)

    run_in_world(main, "web-h2")


def test_paused_campaign_finishes_announced_hosts_and_starts_none() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            campaign = await server.start(spec())
            await world.clock.advance(MINUTE)
            await server.campaigns.set_state(campaign.id, PAUSED, by="ann")
            await world.clock.advance(4 * HOST_TIME)

            assert server.counts(campaign) == (PAUSED, 1, 0, 0)
            assert server.announced() == []

    run_in_world(main)


def test_canceled_campaign_cancels_scheduled_events_only() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            campaign = await server.start(spec())
            await world.clock.advance(MINUTE)
            event = server.engine.board.scopes["db"].scope.events[0]
            await server.engine.submit("db", Approve(event_ids=(event.id,)), by="vm")
            await server.campaigns.set_state(campaign.id, CANCELED, by="ann")
            await world.clock.advance(MINUTE)
            assert (server.announced(), server.find(campaign).is_over) == (["db"], False)
            await world.clock.advance(HOST_TIME)

            assert server.counts(campaign) == (CANCELED, 0, 4, 0)
            assert server.campaigns.live() == []
            with pytest.raises(CampaignOver):
                await server.campaigns.set_state(campaign.id, PAUSED, by="ann")

    run_in_world(main)


def test_host_with_a_canceled_or_a_foreign_event_is_skipped() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            await server.operations.maintain(
                "h2", type=EventType.REBOOT, by="bob", not_before=NOON + 24 * HOST_TIME
            )
            campaign = await server.start(spec("h1", "h2"))
            await world.clock.advance(MINUTE)
            events = server.engine.board.scopes["web"].scope.events
            (event_id,) = [event.id for event in events if event.host == "h1"]
            await server.engine.submit("web", Cancel(event_id=event_id), by="bob")
            await world.clock.advance(HOST_TIME)

            assert server.counts(campaign) == (DONE, 0, 2, 0)
            skipped = sorted(server.find(campaign).skipped_hosts, key=lambda host: host.host)
            assert [(host.host, host.why.partition(":")[0]) for host in skipped] == [
                ("h1", f"event {event_id} of web was canceled"),
                ("h2", "web-h2 has a Reboot pending already"),
            ]

    run_in_world(main)


def test_host_that_left_the_fleet_is_skipped() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            campaign = await server.start(spec())
            await world.clock.advance(MINUTE)
            await server.operations.apply(fleet(("h1", "h2", "h4")), by="test")
            await world.clock.advance(4 * HOST_TIME)

            assert server.counts(campaign) == (DONE, 3, 1, 0)
            skipped = [(host.host, host.why) for host in server.find(campaign).skipped_hosts]
            assert skipped == [("h3", "the host no longer exists")]

    run_in_world(main)


def test_vms_move_to_hosts_that_no_campaign_needs() -> None:
    """Otherwise a campaign of Redeploys would fill the very hosts that it has to empty next."""

    async def main(world: World) -> None:
        async with world.server(fleet(spare=["spare"])) as server:
            campaign = await server.start(spec(type=EventType.REDEPLOY))
            await world.clock.advance(HOST_TIME)
            board = server.engine.board
            hosts = [board.find_vm(name)[1].host for name in ("db", "web-h1")]
            await world.clock.advance(5 * HOST_TIME)

            assert hosts == ["spare", "spare"]
            assert server.counts(campaign) == (DONE, 4, 0, 0)

    run_in_world(main)


@pytest.mark.parametrize(("is_moved_on", "done", "skipped"), [(False, 3, 1), (True, 4, 0)])
def test_host_that_the_campaign_filled_waits_for_the_others(
    is_moved_on: bool, done: int, skipped: int
) -> None:
    """All hosts are in the campaign, so the VMs of the first go to one that waits.

    It can still run if someone moves a VM away meanwhile.
    """

    async def main(world: World) -> None:
        async with world.server(fleet(spare=HOSTS)) as server:
            campaign = await server.start(spec(type=EventType.REDEPLOY))
            await world.clock.advance(HOST_TIME)
            assert server.engine.board.find_vm("web-h1")[1].host == "h2"
            if is_moved_on:
                await server.operations.redeploy("web-h1", by="ann")
            await world.clock.advance(5 * HOST_TIME)

            assert server.counts(campaign) == (DONE, done, skipped, 0)

    run_in_world(main)


def test_host_priorities_are_those_of_live_campaigns() -> None:
    async def main(world: World) -> None:
        server = await world.idle(fleet())
        campaign = await server.start(spec("h1", "h2", "h3"))
        campaigns = server.campaigns
        seen = [campaigns.host_priorities()]
        await server.campaigns.apply(campaign.id, reconcile)
        seen.append(campaigns.host_priorities())
        await server.campaigns.set_state(campaign.id, CANCELED, by="ann")
        seen.append(campaigns.host_priorities())

        waiting, in_progress = HostPriority.WAITING, HostPriority.IN_PROGRESS
        assert seen == [
            {"h1": waiting, "h2": waiting, "h3": waiting},
            {"h1": in_progress, "h2": waiting, "h3": waiting},
            {"h1": in_progress},
        ]

    run_in_world(main)


def test_scope_is_summarized_once_per_revision() -> None:
    """A large scope takes a while, and every request of a campaign needs its scopes."""

    async def main(world: World) -> None:
        server = await world.idle(fleet())
        view = server.campaigns.fleet
        before = view.scopes_on("h2")
        assert view.scopes_on("h3") == before

        await server.operations.restart("web-h1", by="ann")
        assert view.scopes_on("h3") != before

    run_in_world(main)


# --- crashes and several servers


def test_new_server_continues_where_the_last_one_stopped() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as server:
            campaign = await server.start(spec())
            await world.clock.advance(HOST_TIME + MINUTE)
        async with world.server() as server:
            await world.clock.advance(3 * HOST_TIME)

            assert server.counts(campaign) == (DONE, 4, 0, 0)
        assert len(await world.history("scheduled")) == 5, "one event for each VM"

    run_in_world(main)


def test_crash_between_the_commit_and_the_announcement_loses_nothing() -> None:
    async def main(world: World) -> None:
        crashed = await world.idle(fleet())
        campaign = await crashed.start(spec())
        await crashed.campaigns.apply(campaign.id, reconcile)
        assert crashed.find(campaign).in_progress[0].phase is HostPhase.ORDERED
        assert crashed.announced() == []

        async with world.server() as server:
            await world.clock.advance(MINUTE)
            assert server.announced() == ["db", "web-h1"]
            await world.clock.advance(4 * HOST_TIME)
            assert server.counts(campaign) == (DONE, 4, 0, 0)

    run_in_world(main)


def test_canceled_campaign_learns_its_events_before_canceling_them() -> None:
    """The host may have been announced before a crash; announcing again returns the events."""

    async def main(world: World) -> None:
        crashed = await world.idle(fleet())
        campaign = await crashed.start(spec("h2"))
        campaign = await crashed.campaigns.apply(campaign.id, reconcile)
        operation_id = operation_id_of(campaign, "h2")
        command = Maintain(host="h2", operation_id=operation_id, type=EventType.REBOOT)
        await crashed.engine.submit("web", command, by="campaign c1")
        await crashed.campaigns.set_state(campaign.id, CANCELED, by="ann")

        async with world.server() as server:
            await world.clock.advance(MINUTE)
            assert server.announced() == []
            assert server.counts(campaign) == (CANCELED, 0, 1, 0)
        assert len(await world.history("scheduled")) == 1

    run_in_world(main)


def test_two_servers_do_everything_once_and_within_budget() -> None:
    async def main(world: World) -> None:
        async with world.server(fleet()) as one, world.server() as other:
            campaign = await one.start(spec("h2", "h3"))
            for _ in range(2 * 26):
                await world.clock.advance(MINUTE)
                assert len(one.announced()) <= 1

            assert one.counts(campaign) == other.counts(campaign) == (DONE, 2, 0, 0)
        assert len(await world.history("scheduled")) == 2

    run_in_world(main)


def test_another_server_takes_over_when_the_first_one_stops() -> None:
    async def main(world: World) -> None:
        async with AsyncExitStack() as first:
            server = await first.enter_async_context(world.server(fleet()))
            campaign = await server.start(spec("h2", "h3"))
            await world.clock.advance(MINUTE)
            async with world.server() as second:
                await world.clock.advance(MINUTE)
                await first.aclose()
                await world.clock.advance(2 * HOST_TIME)

                assert second.counts(campaign) == (DONE, 2, 0, 0)
        assert len(await world.history("scheduled")) == 2

    run_in_world(main)


class Slow(MemoryStore):
    """Does not answer the next `failures` reads."""

    failures = 0

    async def get(self, key: str) -> Record:
        if self.failures:
            self.failures -= 1
            raise StoreLost("no answer")
        return await super().get(key)


def test_stale_server_catches_up_before_it_advances_a_campaign() -> None:
    """It has not seen yet that another campaign used the budget. It waits for the store if needed.

    Otherwise it would start h2 while h3 is in progress.
    """
    store = Slow()

    async def main(world: World) -> None:
        one = await world.idle(fleet())
        await one.start(spec("h2"))
        await one.start(spec("h3"))
        stale = await world.idle()
        await one.campaigns.apply("c2", reconcile)
        store.failures = 2
        task = asyncio.create_task(CampaignWorker(stale.engine, stale.campaigns).run())
        await world.clock.advance(MINUTE)
        task.cancel()

        assert stale.announced() == ["web-h3"]

    run_in_world(main, store=store)


def test_server_whose_clock_is_off_leaves_campaigns_to_another() -> None:
    """It cannot announce events, so a campaign would wait until somebody sets its clock."""

    async def main(world: World) -> None:
        off = await world.idle(fleet())
        campaign = await off.start(spec())
        task = asyncio.create_task(CampaignWorker(off.engine, off.campaigns).run())
        await world.clock.advance(MINUTE)
        assert off.announced() == ["db", "web-h1"]
        off.engine.clock_skew_seconds = 30.0
        async with world.server() as right:
            await world.clock.advance(2 * HOST_TIME)
            assert right.find(campaign).done == 2
        task.cancel()

    run_in_world(main)


def test_server_without_the_lease_cannot_advance_a_campaign() -> None:
    """A server that hangs and wakes up must not decide on what it knew before."""

    async def main(world: World) -> None:
        server = await world.idle(fleet())
        campaign = await server.start(spec())
        lease = await world.store.lease("campaigns", 10)
        assert lease is not None
        await world.store.expire("campaigns")

        with pytest.raises(Exception, match="lease"):
            await server.campaigns.apply(campaign.id, reconcile, lease=lease)
        assert (await world.idle()).find(campaign) == campaign

    run_in_world(main)


def test_another_server_knows_a_campaign_as_soon_as_it_is_used() -> None:
    async def main(world: World) -> None:
        other = await world.idle(fleet())
        server = await world.idle()
        campaign = await server.start(spec())
        paused = await other.campaigns.set_state(campaign.id.upper(), PAUSED, by="bob")
        resumed = await server.campaigns.set_state(campaign.id, RUNNING, by="ann")

        assert (paused.state, resumed.state) == (PAUSED, CampaignState.RUNNING)

    run_in_world(main)


class Forgetful(MemoryStore):
    """Loses one response after the commit."""

    is_losing = False

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        revision = await super().commit(writes, checks, entries)
        if self.is_losing:
            self.is_losing = False
            raise StoreLost("the response was lost")
        return revision


def test_start_with_a_lost_response_makes_one_campaign() -> None:
    store = Forgetful()

    async def main(world: World) -> None:
        server = await world.idle(fleet())
        store.is_losing = True
        campaign = await server.start(spec())

        assert campaign.id == "c1"
        assert [run_in_world.id for run_in_world in server.campaigns.live()] == ["c1"]

    run_in_world(main, store=store)


def test_repeated_request_starts_one_campaign() -> None:
    async def main(world: World) -> None:
        one, other = await world.idle(fleet()), await world.idle()
        first = await one.campaigns.start(spec(), "ann", "request-1")
        again = await other.campaigns.start(spec(), "ann", "request-1")
        second = await other.campaigns.start(spec(), "ann", "request-2")

        assert (first, second.id) == (again, "c2")

    run_in_world(main)


# --- health checks


class HealthPlatform:
    """A health command that records its requests, and fails for the given hosts."""

    def __init__(self, *unhealthy: str) -> None:
        self.hosts: list[str] = []
        self._unhealthy = unhealthy

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        assert request.type is EventType.REBOOT
        self.hosts.append(request.vm.host)
        if request.vm.host in self._unhealthy:
            raise ImpactFailed("is-healthy exited with 1", output="disk is full")
        return ImpactResult()


def test_health_command_runs_after_each_host_and_pauses_if_it_fails() -> None:
    """It comes from the server's configuration, so no request can choose another one."""

    async def main(world: World) -> None:
        health = HealthPlatform("h2")
        async with world.server(fleet(), health) as server:
            campaign = await server.start(spec())
            await world.clock.advance(4 * HOST_TIME)

            assert health.hosts == ["h1", "h2"]
            assert server.counts(campaign) == (PAUSED, 1, 0, 1)
            reason = "h2: health check failed: is-healthy exited with 1 disk is full"
            assert server.find(campaign).pause_reason == reason

    run_in_world(main)


class ShortOfDescriptors(HealthPlatform):
    """A health command that cannot be started the first time."""

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        result = await super().run_impact(request)
        if len(self.hosts) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return result


def test_health_command_that_could_not_be_started_is_retried() -> None:
    """A server without file descriptors says nothing about the health of the host."""

    async def main(world: World) -> None:
        health, errors = ShortOfDescriptors(), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with world.server(fleet(), health) as server:
            campaign = await server.start(spec("h1"))
            await world.clock.advance(2 * HOST_TIME)

            assert server.counts(campaign) == (DONE, 1, 0, 0)
        assert health.hosts == ["h1", "h1"]
        gc.collect()  # reports a task whose exception was never retrieved
        assert errors == []

    run_in_world(main)


class BuggyPlatform(HealthPlatform):
    """A health platform with a bug that shows the first time."""

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        result = await super().run_impact(request)
        if len(self.hosts) == 1:
            raise ZeroDivisionError("a bug")
        return result


def test_bug_in_a_health_check_is_logged_and_the_check_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without the traceback nobody finds out why the campaign does not advance."""

    async def main(world: World) -> None:
        async with world.server(fleet(), BuggyPlatform()) as server:
            campaign = await server.start(spec("h1"))
            await world.clock.advance(2 * HOST_TIME)

            assert server.counts(campaign) == (DONE, 1, 0, 0)

    run_in_world(main)
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert logged.getMessage() == "health check failed"
    assert logged.exc_info is not None
    assert logged.exc_info[0] is ZeroDivisionError


class AlwaysBuggyPlatform(HealthPlatform):
    """A health platform with a bug that shows each time."""

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        await super().run_impact(request)
        raise ZeroDivisionError("a bug")


def test_lasting_bug_in_a_health_check_is_logged_twice_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The check is repeated each 15 seconds."""

    async def main(world: World) -> None:
        health = AlwaysBuggyPlatform()
        async with world.server(fleet(), health) as server:
            await server.start(spec("h1"))
            await world.clock.advance(HOST_TIME)
            health.hosts.clear()
            caplog.clear()
            await world.clock.advance(2 * MINUTE)
            assert len(health.hosts) == 8

    run_in_world(main)
    assert [record.getMessage() for record in caplog.records] == 4 * ["health check failed"]


class BuggyCampaigns(Campaigns):
    """The list of live campaigns has a bug that shows the first time with one."""

    errors = 1

    def live(self) -> list[Campaign]:
        found = super().live()
        if found and self.errors:
            self.errors = 0
            raise KeyError("a bug")
        return found


def test_bug_while_campaigns_are_listed_does_not_end_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(world: World) -> None:
        world.make_campaigns = BuggyCampaigns
        async with world.server(fleet()) as server:
            campaign = await server.start(spec("h1"))
            await world.clock.advance(2 * HOST_TIME)
            assert server.counts(campaign) == (DONE, 1, 0, 0)

    run_in_world(main)
    logged = [record.getMessage() for record in caplog.records if record.exc_info]
    assert logged == ["bug while listing campaigns"]


def test_bug_in_one_campaign_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is reconciled again after some seconds."""

    async def main(world: World) -> None:
        world.make_engine = BuggyEngine
        scopes = tuple(Scope(name=host, vms=(vm(host, host=host),)) for host in ("h1", "h2"))
        async with world.server(Fleet(scopes=scopes, hosts=())) as server:
            assert isinstance(server.engine, BuggyEngine)
            server.engine.bugs = {("h1", Maintain)}
            first = await server.start(spec("h1"))
            other = await server.start(spec("h2"))
            await world.clock.advance(HOST_TIME)
            assert server.counts(other) == (DONE, 1, 0, 0)
            server.engine.bugs.clear()
            await world.clock.advance(HOST_TIME)
            assert server.counts(first) == (DONE, 1, 0, 0)

    run_in_world(main)
    logged = {record.getMessage() for record in caplog.records if record.exc_info}
    assert logged == {"bug while reconciling a campaign"}


def test_interrupted_health_check_is_repeated_by_the_next_server() -> None:
    """Also while another campaign changes every ten seconds."""

    async def main(world: World) -> None:
        crashed = await world.idle(fleet())
        campaign = await crashed.start(spec("h1"))
        run = HostRun("h1", NOON, HostPhase.CHECKING, checked_until=NOON + MINUTE)
        checking = CAMPAIGN.encode(replace(campaign, cursor=1, in_progress=(run,)))
        key = campaign_key(campaign.id)
        revision = (await world.store.get(key)).revision
        await world.store.commit([Write(key, checking, revision)])
        async with world.server(health=HealthPlatform()) as server:
            busy = await server.start(spec("h2"))
            for number in range(3):
                await world.clock.advance(timedelta(seconds=10))
                state = RUNNING if number % 2 else PAUSED
                await server.campaigns.set_state(busy.id, state, by="ann")

            assert server.counts(campaign) == (DONE, 1, 0, 0)

    run_in_world(main)


STORED = (
    '{"format":1,"value":{"id":"c1","spec":{"type":"Reboot","patterns":["h1"],'
    '"health_command":"COMMAND","health_seconds_max":5},"started_at":"2030-01-31T12:00:00Z",'
    '"total":1,"waves":1,"cursor":1,"in_progress":'
    '[{"host":"h1","taken_at":"2030-01-31T12:00:00Z","phase":"checking"}]}}'
)
"""A campaign of version 0.1 that waits for its own health command, after the migration."""


@pytest.mark.parametrize("is_configured", [False, True])
def test_command_in_a_stored_campaign_is_never_run(is_configured: bool, tmp_path: Path) -> None:
    """Version 0.1 stored the command of a request. Only the configured one is run, if any."""
    proof, health = tmp_path / "executed", HealthPlatform()

    async def main(world: World) -> None:
        stored = STORED.replace("COMMAND", f"/usr/bin/touch {proof}").encode()
        await world.idle(fleet())
        await world.store.commit([Write("campaign/c1/", stored, 0)])
        async with world.server(health=health if is_configured else None) as server:
            await world.clock.advance(MINUTE)
            assert server.campaigns.find("c1").state is DONE

    run_in_world(main)
    assert not proof.exists()
    assert health.hosts == ["h1"] * is_configured


# --- errors and limits


def test_host_too_large_for_a_budget_is_refused_at_the_start() -> None:
    async def main(world: World) -> None:
        web = Scope(name="web", kind=ScopeKind.SCALE_SET, vms=(vm("a"), vm("b")))
        server = await world.idle(Fleet(scopes=(web,)))
        message = "host-a alone takes 2 VMs of web down at once; its max_unavailable is 1"
        with pytest.raises(OverBudget, match=message) as refusal:
            await server.start(spec("*", max_unavailable=Budget(1)))

        facts = {"host": "host-a", "scope": "web", "vms": 2, "max_unavailable": 1}
        assert refusal.value.facts == facts
        assert server.campaigns.all() == []

    run_in_world(main)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (spec("x*"), "no host matches x*; expected patterns such as rack7-*"),
        (spec(description="a\nb"), "a description is one line of printable text"),
        (spec(duration_seconds=-2), "duration_seconds is -1"),
    ],
)
def test_invalid_campaign_is_refused_before_anything_is_written(
    wrong: CampaignSpec, message: str
) -> None:
    async def main(world: World) -> None:
        server = await world.idle(fleet())
        with pytest.raises(Invalid) as refusal:
            await server.start(wrong)

        assert message in refusal.value.message
        assert server.campaigns.all() == []

    run_in_world(main)


@pytest.mark.parametrize(
    ("count", "length", "message"),
    [
        (HOSTS_MAX + 1, 6, "5001 hosts match, whose names have 30006 bytes; expected at most 5000"),
        (4000, 128, "4000 hosts match, whose names have 512000 bytes"),
    ],
)
def test_list_of_hosts_must_fit_into_one_record(count: int, length: int, message: str) -> None:
    async def main(world: World) -> None:
        names = (f"h{number:05d}".ljust(length, "x") for number in range(count))
        server = await world.idle(Fleet(hosts=tuple(names)))
        with pytest.raises(Invalid, match=message):
            await server.campaigns.plan(spec())

    run_in_world(main)


def test_unknown_campaign_is_refused() -> None:
    async def main(world: World) -> None:
        with pytest.raises(UnknownCampaign, match="there is no campaign 'c9'"):
            await (await world.idle()).campaigns.set_state("c9", PAUSED, by="ann")

    run_in_world(main)


async def end(server: Server, campaign_id: str) -> None:
    await server.campaigns.set_state(campaign_id, CANCELED, by="ann")
    await server.campaigns.apply(campaign_id, reconcile)


def test_number_of_live_campaigns_is_limited() -> None:
    async def main(world: World) -> None:
        server = await world.idle(fleet())
        for _ in range(LIVE_MAX):
            await server.start(spec("h1"))

        with pytest.raises(TooManyCampaigns, match="100 campaigns are running or paused"):
            await server.start(spec("h1"))
        lease = await world.store.lease("campaigns", 10)
        await server.campaigns.apply("c2", reconcile, lease=lease)
        await end(server, "c1")
        assert (await server.start(spec("h1"))).id == "c101"

    run_in_world(main)


def test_only_the_last_thousand_ended_campaigns_are_kept() -> None:
    async def main(world: World) -> None:
        server = await world.idle(fleet())
        first = await server.start(spec("h1"))
        await end(server, first.id)
        over = server.find(first)
        copies = [replace(over, id=f"c{number}") for number in range(2, ENDED_MAX + 1)]
        for start in range(0, len(copies), 99):
            batch = copies[start : start + 99]
            writes = [Write(campaign_key(one.id), CAMPAIGN.encode(one), 0) for one in batch]
            await world.store.commit(writes)
        await server.engine.load()
        last = await server.start(spec("h1"))
        await end(server, last.id)

        assert last.id == "c1001"
        assert len(server.campaigns.all()) == ENDED_MAX
        assert len((await world.store.load("campaign/")).records) == ENDED_MAX
        with pytest.raises(UnknownCampaign):
            await server.campaigns.set_state("c1", PAUSED, by="ann")

    run_in_world(main)


def test_list_of_hosts_is_a_record_of_its_own_until_the_end() -> None:
    """The record that is written at every step does not contain it."""

    async def main(world: World) -> None:
        names = tuple(f"h{number:05d}" for number in range(1000))
        server = await world.idle(Fleet(hosts=names))
        campaign = await server.start(spec("h0*"))

        stored = await world.store.get(HOSTS_KEY.format(campaign.id))
        assert stored.value == CAMPAIGN_HOSTS.encode(names)
        (record,) = (await world.store.load("campaign/")).records
        assert len(record.value or b"") < 1000
        await end(server, campaign.id)
        assert (await world.store.load("campaign-hosts/")).records == ()
        assert (await world.store.load("campaign-waves/")).records == ()

    run_in_world(main)
