"""Campaigns at work: the loop, the walk, restarts, two servers, what is refused, what is kept."""

import asyncio
import errno
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
from msgspec.structs import replace

from forewarn.campaign.cache import CAMPAIGN_KEY, HOSTS_PER_RECORD, CampaignCache
from forewarn.campaign.model import Announced, Campaign, Look, Phase, State, Turn, UnderWay, Wish
from forewarn.campaign.service import ALIVE_MAX, ENDED_MAX, Campaigns
from forewarn.campaign.worker import CampaignWorker, HealthCheck
from forewarn.core.command import Approve, Cancel
from forewarn.core.event import EventType
from forewarn.core.fleet import Budget, Policy, Scope, ScopeKind
from forewarn.core.timing import DURATION, Timing
from forewarn.engine.clock import VirtualClock
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import (
    CampaignOver,
    Error,
    ImpactFailed,
    Invalid,
    OverBudget,
    StoreLost,
    TooManyCampaigns,
    UnknownCampaign,
)
from forewarn.fleetfile.parser import Fleet
from forewarn.platform.base import ImpactRequest, ImpactResult, Platform
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.server import run_together
from forewarn.store.base import Check, Write
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, guid, vm
from tests.history import entries_of

HOSTS = ("h1", "h2", "h3", "h4")
TURN = timedelta(minutes=26)
"""A reboot's notice, its usual duration, and a little."""


def fleet(hosts: Sequence[str] = HOSTS, *, spare: Sequence[str] = ()) -> Fleet:
    """`web` has a VM on each host, all of one update domain and one down at a time, and `db` has
    one on the first.
    """
    vms = tuple(vm(f"web-{host}", host=host) for host in hosts)
    web = Scope(
        name="web",
        kind=ScopeKind.AVAILABILITY_SET,
        policy=Policy(max_unavailable=Budget(1)),
        vms=vms,
    )
    return Fleet(
        scopes=(web, Scope(name="db", kind=ScopeKind.VM, vms=(vm("db", host="h1"),))),
        hosts=tuple(spare),
    )


CACHES: WeakKeyDictionary[Engine, CampaignCache] = WeakKeyDictionary()


def cache_of(engine: Engine) -> CampaignCache:
    return CACHES[engine]


def campaigns_on(engine: Engine) -> Campaigns:
    return Campaigns(engine, cache_of(engine))


async def rewrite(engine: Engine, campaign: Campaign) -> None:
    key = CAMPAIGN_KEY.format(campaign.id)
    await engine.update([key], lambda transaction: transaction.put(key, campaign), by="test")


class World:
    """A store, a clock, and any number of servers."""

    def __init__(self, *failing: str, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = VirtualClock(NOON)
        self.failing = failing
        self.count = 0

    def make_id(self) -> str:
        self.count += 1
        return guid(self.count)

    async def engine(self, wanted: Fleet | None = None) -> Engine:
        """An engine whose loops stand still."""
        engine = Engine(self.store, self.clock, Timing())
        CACHES[engine] = CampaignCache(engine)
        await engine.load()
        if wanted is not None:
            await Operations(engine, self.make_id).apply(wanted, by="test")
        return engine

    @asynccontextmanager
    async def server(
        self, wanted: Fleet | None = None, health: Platform | None = None
    ) -> AsyncIterator[Engine]:
        """A server at work until the block ends: then it is gone, as if killed."""
        engine = await self.engine(wanted)
        platform = SimulatedPlatform(
            self.clock,
            durations=DURATION,
            hosts=engine.board.host_names,
            avoid=cache_of(engine).turns,
            failing=self.failing,
        )
        check = HealthCheck(health, MINUTE) if health else None
        worker = self.make_id()
        impacts = Worker(engine, platform, worker=worker, impact_limit=timedelta(hours=1))
        rounds = CampaignWorker(engine, cache_of(engine), worker, check)
        work = asyncio.create_task(run_together(impacts.run(), rounds.run()))
        try:
            yield engine
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def history(self, what: str) -> list[str]:
        """Who did what."""
        entries = await entries_of(self.store)
        return [f"{entry.by}: {entry.detail}" for entry in entries if entry.what == what]


class HealthPlatform:
    """A health command that remembers what it was asked, and says no of the hosts that are named."""

    def __init__(self, *sick: str) -> None:
        self.orders: list[ImpactRequest] = []
        self._sick = sick

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        self.orders.append(order)
        if order.vm.host in self._sick:
            raise ImpactFailed("is-healthy exited with 1", output="disk is full")
        return ImpactResult()


def wish(*patterns: str, **more: object) -> Wish:
    return replace(Wish(type=EventType.REBOOT, patterns=patterns or ("h*",), max_hosts=4), **more)


def live(
    story: Callable[[World], Awaitable[None]], *failing: str, store: MemoryStore | None = None
) -> None:
    async def run() -> None:
        await story(World(*failing, store=store))

    asyncio.run(run())


def now_of(engine: Engine, campaign: Campaign) -> Campaign:
    return cache_of(engine).find(campaign.id)


def told(engine: Engine) -> list[str]:
    """The VMs that are being told of something."""
    return sorted(
        vm
        for place in engine.board.scopes.values()
        for one in place.scope.events
        for vm in one.resources
    )


def counts(campaign: Campaign) -> tuple[State, int, int, int]:
    return campaign.state, campaign.done, campaign.skipped, campaign.failed


def test_hosts_have_their_turn_one_after_the_other_until_all_are_done() -> None:
    """The budget is one VM, so the next host is announced when the last event is over; the notice
    is kept each time.
    """

    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            campaign = await campaigns_on(engine).start(wish(name="kernel"), by="ann")
            seen = []
            for _ in HOSTS:
                await world.clock.advance(MINUTE)
                seen.append(told(engine))
                await world.clock.advance(TURN - MINUTE)
            end = now_of(engine, campaign)

        assert seen == [["db", "web-h1"], ["web-h2"], ["web-h3"], ["web-h4"]]
        assert counts(end) == (State.DONE, 4, 0, 0)
        assert (await world.history("campaign"))[:3] == [
            "ann: c1 started: Reboot of 4 hosts",
            "campaign kernel: c1 turns to h1",
            "campaign kernel: c1 done with h1",
        ]
        assert {one.partition(":")[0] for one in await world.history("scheduled")} == {
            "campaign kernel"
        }

    live(story)


def test_early_approvals_make_it_faster() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            campaign = await campaigns_on(engine).start(wish(), by="ann")
            for _ in range(50):
                await world.clock.advance(MINUTE)
                for place in engine.board.scopes.values():
                    for event in place.scope.events:
                        await engine.submit(
                            place.scope.name, Approve(event_ids=(event.id,)), by="guest"
                        )

            assert counts(now_of(engine, campaign)) == (State.DONE, 4, 0, 0), (
                "four times ten minutes, not four times 25"
            )

    live(story)


def test_a_server_that_comes_back_goes_on_where_the_last_one_was() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            campaign = await campaigns_on(engine).start(wish(), by="ann")
            await world.clock.advance(TURN + MINUTE)
        async with world.server() as engine:
            await world.clock.advance(3 * TURN)

            assert counts(now_of(engine, campaign)) == (State.DONE, 4, 0, 0)
        assert len(await world.history("scheduled")) == 5, "each VM was told once"

    live(story)


def test_a_server_that_dies_between_the_record_and_the_order_loses_nothing() -> None:
    """It is recorded that the host has its turn, and nobody was told; whoever looks next tells
    them.
    """

    async def story(world: World) -> None:
        engine = await world.engine(fleet())
        campaign = await campaigns_on(engine).start(wish(), by="ann")
        await campaigns_on(engine).tell(campaign.id, Look())
        assert (now_of(engine, campaign).under_way[0].phase, told(engine)) == (Phase.ORDERED, [])

        async with world.server() as other:
            await world.clock.advance(MINUTE)
            assert told(other) == ["db", "web-h1"]
            await world.clock.advance(4 * TURN)
            assert counts(now_of(other, campaign)) == (State.DONE, 4, 0, 0)

    live(story)


def test_two_servers_do_each_thing_once_and_never_more_than_the_budget() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as one, world.server() as other:
            campaign = await campaigns_on(one).start(wish(), by="ann")
            for _ in range(5 * 26):
                await world.clock.advance(MINUTE)
                assert len([name for name in told(one) if name != "db"]) <= 1

            assert (
                counts(now_of(one, campaign))
                == counts(now_of(other, campaign))
                == (State.DONE, 4, 0, 0)
            )
        assert len(await world.history("scheduled")) == 5

    live(story)


def test_two_campaigns_share_the_budget_of_a_scope() -> None:
    """And who waits for the other goes on as soon as the other lets go."""

    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            desk = campaigns_on(engine)
            first, second = (
                await desk.start(wish("h1", "h2"), by="ann"),
                await desk.start(wish("h3", "h4"), by="bob"),
            )
            for _ in range(5 * 26):
                await world.clock.advance(MINUTE)
                assert len([name for name in told(engine) if name != "db"]) <= 1

            assert (
                counts(now_of(engine, first))
                == counts(now_of(engine, second))
                == (State.DONE, 2, 0, 0)
            )

    live(story)


def test_a_failed_impact_pauses_it_until_a_person_resumes_it() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            desk = campaigns_on(engine)
            campaign = await desk.start(wish(), by="ann")
            await world.clock.advance(4 * TURN)
            braked = now_of(engine, campaign)
            await desk.resume(campaign.id, by="ann")
            await world.clock.advance(4 * TURN)

            assert counts(braked) == (State.PAUSED, 1, 0, 1)
            assert braked.is_braked
            assert counts(now_of(engine, campaign)) == (State.DONE, 3, 0, 1)

    live(story, "web-h2")


def test_paused_no_new_host_has_its_turn_and_what_is_announced_goes_on() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            desk = campaigns_on(engine)
            campaign = await desk.start(wish(), by="ann")
            await world.clock.advance(MINUTE)
            await desk.pause(campaign.id, by="ann")
            await world.clock.advance(4 * TURN)

            assert counts(now_of(engine, campaign)) == (State.PAUSED, 1, 0, 0)
            assert told(engine) == []

    live(story)


def test_canceled_it_takes_back_what_is_scheduled_and_lets_end_what_has_started() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            desk = campaigns_on(engine)
            campaign = await desk.start(wish(), by="ann")
            await world.clock.advance(MINUTE)
            event = engine.board.scopes["db"].scope.events[0]
            await engine.submit("db", Approve(event_ids=(event.id,)), by="guest")
            await desk.cancel(campaign.id, by="ann")
            await world.clock.advance(MINUTE)
            assert (told(engine), now_of(engine, campaign).is_over) == (["db"], False)
            await world.clock.advance(TURN)

            assert counts(now_of(engine, campaign)) == (State.CANCELED, 0, 4, 0)
            assert cache_of(engine).roll.alive == ()
            assert cache_of(engine).hosts_of(campaign.id, 0, 10) == []
            with pytest.raises(CampaignOver):
                await desk.pause(campaign.id, by="ann")

    live(story)


def test_an_event_canceled_by_somebody_and_a_host_with_such_an_event_already_are_skipped() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            await Operations(engine, world.make_id).maintain(
                "h2", type=EventType.REBOOT, by="bob", not_before=NOON + 24 * TURN
            )
            campaign = await campaigns_on(engine).start(wish("h1", "h2"), by="ann")
            await world.clock.advance(MINUTE)
            (event,) = [one for one in engine.board.scopes["web"].scope.events if one.host == "h1"]
            await engine.submit("web", Cancel(event_id=event.id), by="bob")
            await world.clock.advance(TURN)

            end = now_of(engine, campaign)
            assert counts(end) == (State.DONE, 0, 2, 0)
            assert [
                (one.host, one.why.partition(":")[0])
                for one in sorted(end.troubles, key=lambda one: one.host)
            ] == [
                ("h1", f"event {event.id} of web was canceled"),
                ("h2", "web-h2 has a Reboot pending already"),
            ]

    live(story)


def test_a_host_that_left_the_fleet_is_skipped() -> None:
    async def story(world: World) -> None:
        async with world.server(fleet()) as engine:
            campaign = await campaigns_on(engine).start(wish(), by="ann")
            await world.clock.advance(MINUTE)
            await Operations(engine, world.make_id).apply(fleet(("h1", "h2", "h4")), by="test")
            await world.clock.advance(4 * TURN)

            end = now_of(engine, campaign)
            assert counts(end) == (State.DONE, 3, 1, 0)
            assert [(one.host, one.why) for one in end.troubles] == [
                ("h3", "there is no such host any more")
            ]

    live(story)


def test_vms_are_moved_to_hosts_that_no_campaign_waits_for() -> None:
    """Else a campaign of Redeploy would fill the very hosts that it has to empty next, until they
    are too large.
    """

    async def story(world: World) -> None:
        async with world.server(fleet(spare=["spare"])) as engine:
            campaign = await campaigns_on(engine).start(wish(type=EventType.REDEPLOY), by="ann")
            await world.clock.advance(TURN)
            first = {name: engine.board.find_vm(name)[1].host for name in ("db", "web-h1")}
            await world.clock.advance(5 * TURN)

            assert first == {"db": "spare", "web-h1": "spare"}
            assert counts(now_of(engine, campaign)) == (State.DONE, 4, 0, 0)

    live(story)


@pytest.mark.parametrize(("is_moved_on", "done", "skipped"), [(False, 3, 1), (True, 4, 0)])
def test_a_host_that_a_campaign_had_to_fill_waits_for_the_others(
    is_moved_on: bool, done: int, skipped: int
) -> None:
    """All hosts are in the campaign, so the first one's VMs go to one that waits.

    Who moves one on meanwhile saves its turn.
    """

    async def story(world: World) -> None:
        async with world.server(fleet(spare=HOSTS)) as engine:
            campaign = await campaigns_on(engine).start(wish(type=EventType.REDEPLOY), by="ann")
            await world.clock.advance(TURN)
            assert engine.board.find_vm("web-h1")[1].host == "h2"
            if is_moved_on:
                await Operations(engine, world.make_id).redeploy("web-h1", by="ann")
            await world.clock.advance(5 * TURN)

            assert counts(now_of(engine, campaign)) == (State.DONE, done, skipped, 0)

    live(story)


def test_a_campaign_of_which_nobody_hears_is_looked_at_however_much_happens_elsewhere() -> None:
    """The server that asked for a host's health is dead; another asks in time, though there is a
    change every 10 s.
    """

    async def story(world: World) -> None:
        engine = await world.engine(fleet())
        campaign = await campaigns_on(engine).start(wish("h1"), by="ann")
        dead = UnderWay("h1", NOON, Phase.CHECKING, checker="dead", checked_until=NOON + MINUTE)
        campaign = cache_of(engine).find(campaign.id)
        await rewrite(engine, replace(campaign, cursor=1, under_way=(dead,)))
        async with world.server(health=HealthPlatform()) as engine:
            desk = campaigns_on(engine)
            busy = await desk.start(wish("h2"), by="ann")
            for number in range(9):
                await world.clock.advance(timedelta(seconds=10))
                await (desk.resume if number % 2 else desk.pause)(busy.id, by="ann")

            (checked,) = now_of(engine, campaign).under_way or (dead,)
            assert now_of(engine, campaign).is_over or checked.checker != "dead"

    live(story)


def test_the_servers_health_command_is_run_after_each_host_and_a_failure_pauses() -> None:
    """It comes from the server's configuration, so every campaign has it and no request can choose
    another.
    """

    async def story(world: World) -> None:
        health = HealthPlatform("h2")
        async with world.server(fleet(), health) as engine:
            campaign = await campaigns_on(engine).start(wish(), by="ann")
            await world.clock.advance(4 * TURN)
            end = now_of(engine, campaign)

        assert [(order.vm.host, order.type) for order in health.orders] == [
            ("h1", "Reboot"),
            ("h2", "Reboot"),
        ]
        assert counts(end) == (State.PAUSED, 1, 0, 1)
        assert end.why == "h2: the health command says no: is-healthy exited with 1 disk is full"

    live(story)


STORED = """{"format":1,"value":{"id":"c1","wish":{"type":"Reboot","patterns":["h1"],"health_command":"COMMAND",\
"health_seconds_max":5},"started_at":"2030-01-31T12:00:00Z","total":1,"waves":1,"cursor":1,\
"under_way":[{"host":"h1","taken_at":"2030-01-31T12:00:00Z","phase":"checking"}]}}"""
"""A campaign as version 0.1 stored it while it waited for its own health command."""


class ShortOfDescriptors(HealthPlatform):
    """A health command that cannot be started the first time."""

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        done = await super().run_impact(order)
        if len(self.orders) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return done


def test_health_command_that_could_not_be_started_is_tried_again() -> None:
    """A shortage of file descriptors on the server says nothing about the host, and must not stop
    the campaign.
    """

    async def story(world: World) -> None:
        health, errors = ShortOfDescriptors(), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with world.server(fleet(), health) as engine:
            campaign = await campaigns_on(engine).start(wish("h1"), by="ann")
            await world.clock.advance(2 * TURN)
            end = now_of(engine, campaign)

        assert counts(end) == (State.DONE, 1, 0, 0)
        assert [order.vm.host for order in health.orders] == ["h1", "h1"]
        gc.collect()  # tells of a task whose error nobody has seen
        assert errors == []

    live(story)


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_command_that_stands_in_a_stored_campaign_is_never_run(
    is_configured: bool, tmp_path: Path
) -> None:
    """Earlier versions stored what a request said; the campaign goes on, with the server's own
    command or with none.
    """
    proof, health = tmp_path / "executed", HealthPlatform()

    async def story(world: World) -> None:
        stored = STORED.replace("COMMAND", f"/usr/bin/touch {proof}").encode()
        roll = b'{"format":1,"value":{"started":1,"alive":["c1"],"ended":[]}}'
        await world.engine(fleet())
        await world.store.commit([Write("campaign/c1/", stored, 0), Write("campaigns", roll, 0)])
        async with world.server(health=health if is_configured else None) as engine:
            await world.clock.advance(MINUTE)
            assert counts(cache_of(engine).find("c1")) == (State.DONE, 1, 0, 0)

    live(story)
    assert not proof.exists()
    assert [order.vm.host for order in health.orders] == ["h1"] * is_configured


def test_hosts_that_wait_or_are_under_way_are_known_of_campaigns_that_go_on() -> None:
    async def story(world: World) -> None:
        engine = await world.engine(fleet())
        desk = campaigns_on(engine)
        campaign = await desk.start(wish("h1", "h2", "h3"), by="ann")
        seen = [cache_of(engine).turns()]
        await desk.tell(campaign.id, Look())
        seen.append(cache_of(engine).turns())
        await desk.cancel(campaign.id, by="ann")
        seen.append(cache_of(engine).turns())

        assert seen == [
            {"h1": Turn.WAITING, "h2": Turn.WAITING, "h3": Turn.WAITING},
            {"h1": Turn.UNDER_WAY, "h2": Turn.WAITING, "h3": Turn.WAITING},
            {"h1": Turn.UNDER_WAY},
        ]

    live(story)


def test_all_who_ask_of_campaigns_share_what_was_seen_of_a_scope() -> None:
    """To go through a large scope takes a while; each server does it once for each change of it,
    and not at each request.
    """

    async def story(world: World) -> None:
        engine = await world.engine(fleet())

        assert campaigns_on(engine).fleet.standing("web") is campaigns_on(engine).fleet.standing(
            "web"
        )

    live(story)


def test_a_host_too_large_for_a_budget_is_refused_at_the_start_and_named() -> None:
    async def story(world: World) -> None:
        engine = await world.engine(
            Fleet(scopes=(Scope(name="web", kind=ScopeKind.SCALE_SET, vms=(vm("a"), vm("b"))),))
        )
        with pytest.raises(
            OverBudget,
            match="host-a alone takes 2 VMs of web down at once; max_unavailable there is 1",
        ) as refusal:
            await campaigns_on(engine).start(wish("*", max_unavailable=Budget(1)), by="ann")

        assert refusal.value.facts == {
            "host": "host-a",
            "scope": "web",
            "vms": 2,
            "max_unavailable": 1,
        }
        assert cache_of(engine).all() == []

    live(story)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (wish("x*"), "no host matches x*; expected patterns such as rack7-*"),
        (wish(description="a\nb"), "a description is one line of printable text"),
        (wish(duration_seconds=-2), "duration_seconds is -1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    wanted: Wish, message: str
) -> None:
    async def story(world: World) -> None:
        engine = await world.engine(fleet())
        with pytest.raises(Error) as refusal:
            await campaigns_on(engine).start(wanted, by="ann")

        assert isinstance(refusal.value, Invalid)
        assert message in refusal.value.message
        assert cache_of(engine).all() == []

    live(story)


def test_a_campaign_that_nobody_knows_is_told_so() -> None:
    async def story(world: World) -> None:
        with pytest.raises(UnknownCampaign, match="there is no campaign 'c9'"):
            await campaigns_on(await world.engine()).pause("c9", by="ann")

    live(story)


def test_another_server_knows_a_campaign_as_soon_as_it_is_asked() -> None:
    async def story(world: World) -> None:
        other = await world.engine(fleet())
        engine = await world.engine()
        campaign = await campaigns_on(engine).start(wish(), by="ann")

        assert (
            await campaigns_on(other).pause(campaign.id.upper(), by="bob")
        ).state is State.PAUSED
        assert (await campaigns_on(engine).resume(campaign.id, by="ann")).state is State.RUNNING, (
            "read again, decided again"
        )

    live(story)


class Forgetful(MemoryStore):
    """Loses one answer, after the deed."""

    is_losing = False

    async def commit(
        self, writes: Sequence[Write], checks: Sequence[Check] = (), entries: bytes | None = None
    ) -> int:
        revision = await super().commit(writes, checks, entries)
        if self.is_losing:
            self.is_losing = False
            raise StoreLost("the answer was lost")
        return revision


def test_a_start_whose_answer_was_lost_is_one_campaign() -> None:
    async def story(world: World) -> None:
        engine = await world.engine(fleet())
        assert isinstance(world.store, Forgetful)
        world.store.is_losing = True
        campaign = await campaigns_on(engine).start(wish(), by="ann")

        assert (campaign.id, cache_of(engine).roll.alive) == ("c1", ("c1",))

    live(story, store=Forgetful())


async def ended(desk: Campaigns) -> str:
    campaign = await desk.start(wish("h1"), by="ann")
    await desk.cancel(campaign.id, by="ann")
    await desk.tell(campaign.id, Look())
    return campaign.id


def test_so_many_campaigns_go_on_at_once_and_no_more() -> None:
    async def story(world: World) -> None:
        desk = campaigns_on(await world.engine(fleet()))
        for _ in range(ALIVE_MAX):
            await desk.start(wish("h1"), by="ann")

        with pytest.raises(TooManyCampaigns, match="100 campaigns are going on; at most 100 may"):
            await desk.start(wish("h1"), by="ann")
        await desk.cancel("c1", by="ann")
        await desk.tell("c1", Look())
        assert (await desk.start(wish("h1"), by="ann")).id == "c101"

    live(story)


def test_the_last_thousand_that_are_over_are_kept_and_the_oldest_leave() -> None:
    async def story(world: World) -> None:
        engine = await world.engine(fleet())
        desk = campaigns_on(engine)
        for _ in range(ENDED_MAX + 1):
            await ended(desk)

        assert (
            len(cache_of(engine).listed())
            == len((await world.store.load("campaign/")).records)
            == ENDED_MAX
        )
        assert cache_of(engine).listed()[0].id == "c1001"
        with pytest.raises(UnknownCampaign):
            await desk.pause("c1", by="ann")

    live(story)


def test_a_long_list_of_hosts_is_stored_in_pieces_and_gone_when_it_is_over() -> None:
    """The record that is written at every step does not hold it."""

    async def story(world: World) -> None:
        names = tuple(f"h{number:05d}" for number in range(HOSTS_PER_RECORD + 2))
        engine = await world.engine(Fleet(hosts=names))
        desk = campaigns_on(engine)
        campaign = await desk.start(wish("h0*"), by="ann")

        assert cache_of(engine).hosts_of(campaign.id, 4998, 5010) == list(names[4998:])
        assert len((await world.store.load("campaign-hosts/")).records) == 2
        assert (
            max(len(one.value or b"") for one in (await world.store.load("campaign/")).records)
            < 1000
        )
        await desk.cancel(campaign.id, by="ann")
        await desk.tell(campaign.id, Look())
        assert (await world.store.load("campaign-hosts/")).records == ()

    live(story)


def test_what_another_server_says_late_changes_nothing() -> None:
    """Two servers announce the same host; the second is told that it is known."""

    async def story(world: World) -> None:
        engine = await world.engine(fleet())
        desk = campaigns_on(engine)
        campaign = await desk.start(wish(), by="ann")
        await desk.tell(campaign.id, Look())
        once = (await desk.tell(campaign.id, Announced("h1"))).campaign
        again = (await desk.tell(campaign.id, Announced("h1"))).campaign

        assert once == again

    live(story)


def test_a_server_that_has_not_heard_of_anothers_turn_yet_does_not_count_on_the_same_room() -> None:
    """Two campaigns on two servers, and a budget of one VM: the roll settles who was first."""

    async def story(world: World) -> None:
        one = await world.engine(fleet())
        await campaigns_on(one).start(wish("h2"), by="ann")
        await campaigns_on(one).start(wish("h3"), by="ann")
        other = await world.engine()
        first = (await campaigns_on(one).tell("c1", Look())).campaign
        second = (await campaigns_on(other).tell("c2", Look())).campaign

        assert ([here.host for here in first.under_way], second.under_way) == (["h2"], ())

    live(story)
