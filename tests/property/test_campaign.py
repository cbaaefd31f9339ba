"""Campaigns under any story, driven against the real machine: budgets hold, pauses hold, orders may
be repeated, and it ends.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forewarn.campaign import model as said
from forewarn.campaign.budget import Standing, standing
from forewarn.campaign.forecast import forecast
from forewarn.campaign.model import Campaign, State, Told, Wish
from forewarn.campaign.rules import Decision, View, decide
from forewarn.core import command as ask
from forewarn.core.event import Event, EventType, Status
from forewarn.core.fleet import Approval, Budget, Policy, Power, Scope, ScopeKind, Vm
from forewarn.core.machine import decide as decide_scope
from forewarn.core.machine import due_impacts
from forewarn.core.scheduling import event_id_of
from forewarn.core.timing import Timing
from forewarn.errors import Error
from tests.builders import NOON

TIMING = Timing.at_rate(60)
STEPS_MAX = 600
HOSTS = tuple(f"h{number}" for number in range(6))
BUDGETS = (None, Budget(1), Budget(2), Budget(40, is_percent=True))


class Chances(NamedTuple):
    """The choices of one story, used up in turn; when they are used up, everything goes well."""

    numbers: Iterator[int]

    def pick(self, of: int) -> int:
        return next(self.numbers, 0) % of


def fleet_of(choice: Callable[[int], int]) -> dict[str, Scope]:
    """A few scopes whose VMs stand here and there, of up to three update domains."""
    scopes = {}
    for name in ("web", "db", "queue")[: 1 + choice(3)]:
        vms = tuple(
            Vm(name=f"{name}-{number}", update_domain=choice(3), host=HOSTS[choice(6)])
            for number in range(1 + choice(7))
        )
        policy = Policy(
            approval=(Approval.ANY, Approval.ALL)[choice(2)], max_unavailable=BUDGETS[choice(4)]
        )
        scopes[name] = Scope(
            name=name, kind=ScopeKind.SCALE_SET, policy=policy, vms=vms, seen_at=NOON
        )
    return scopes


class World:
    """Scopes, a clock and campaigns; orders are carried out by the real machine, sometimes twice,
    sometimes late.
    """

    def __init__(self, scopes: dict[str, Scope], chances: Chances) -> None:
        self.scopes = scopes
        self.chances = chances
        self.now = NOON
        self.campaigns: dict[str, Campaign] = {}
        self.hosts: dict[str, tuple[str, ...]] = {}
        self.revision = 1
        self.health_limit: timedelta | None = None

    # --- the fleet as a campaign sees it

    def standing(self, scope: str) -> Standing | None:
        return standing(self.scopes[scope], self.revision) if scope in self.scopes else None

    def on_host(self, host: str) -> list[Standing] | None:
        here = [
            name for name, scope in self.scopes.items() if any(vm.host == host for vm in scope.vms)
        ]
        return [standing(self.scopes[name], self.revision) for name in sorted(here)]

    def view(self, campaign: Campaign) -> View:
        others = [
            one
            for other in self.campaigns.values()
            if other.id != campaign.id
            for one in other.under_way
        ]
        return View(
            self,
            lambda start, stop: self.hosts[campaign.id][start:stop],
            others,
            timedelta(minutes=1),
            self.health_limit,
        )

    # --- what happens

    def start(self, number: int, wish: Wish) -> None:
        found = forecast(
            HOSTS,
            lambda host: self.on_host(host) or (),
            max_hosts=wish.max_hosts,
            budget=wish.max_unavailable,
            horizon=self.now,
        )
        check_plan(self, found.waves, wish)
        self.hosts[f"c{number}"] = found.hosts
        self.campaigns[f"c{number}"] = Campaign(
            id=f"c{number}",
            wish=wish,
            started_at=NOON,
            total=len(found.hosts),
            waves=len(found.waves),
        )

    def tell(self, campaign_id: str, word: said.Word) -> Decision:
        before = self.campaigns[campaign_id]
        decision = decide(before, word, self.view(before), self.now)
        assert decide(before, word, self.view(before), self.now) == decision, (
            "the same input, the same output"
        )
        taken = [
            one.host
            for one in decision.campaign.under_way
            if one.host not in {old.host for old in before.under_way}
        ]
        assert not taken or before.state is State.RUNNING, (
            "who is paused or canceled takes no new hosts"
        )
        self.campaigns[campaign_id] = decision.campaign
        return decision

    def submit(self, scope: str, command: ask.Command) -> None:
        try:
            self.scopes[scope] = decide_scope(self.scopes[scope], command, self.now, TIMING).scope
        except Error:
            return

    def round(self) -> None:
        for campaign_id in self.campaigns:
            decision = self.tell(campaign_id, said.Look())
            for order in decision.orders:
                if self.chances.pick(5) != 1:  # else the server died before it
                    self.run_impact(campaign_id, order)
                if self.chances.pick(5) == 1:  # it died after it, or another server did it too
                    self.run_impact(campaign_id, order, is_told=False)
            self.check_budgets()

    def run_impact(self, campaign_id: str, order: said.Order, *, is_told: bool = True) -> None:
        campaign = self.campaigns[campaign_id]
        match order:
            case said.Announce(host=host, operation_id=operation_id):
                events = []
                for scope in [one.name for one in self.on_host(host) or ()]:
                    self.submit(
                        scope,
                        ask.Maintain(host=host, operation_id=operation_id, type=campaign.wish.type),
                    )
                    events += [Told(scope, one) for one in self.made(scope, operation_id)]
                if is_told:
                    self.tell(campaign_id, said.Announced(host, tuple(events)))
            case said.Withdraw(scope=scope, event_id=event_id):
                self.submit(scope, ask.Cancel(event_id=event_id))
            case said.Check(host=host):
                self.tell(campaign_id, said.Claimed(host, "w1"))
                self.tell(
                    campaign_id, said.Checked(host, "w1", "no" if self.chances.pick(8) == 1 else "")
                )

    def made(self, scope: str, operation_id: str) -> list[str]:
        known = {one.id for one in self.scopes[scope].events} | {
            one.id for one in self.scopes[scope].ended
        }
        return [
            one for domain in range(3) if (one := event_id_of(operation_id, scope, domain)) in known
        ]

    def pass_time(self) -> None:
        self.now += timedelta(seconds=(5, 1, 20)[self.chances.pick(3)])
        for name in self.scopes:
            self.submit(name, ask.Tick())
            for impact in due_impacts(self.scopes[name], self.now)[: 1 + self.chances.pick(3)]:
                self.submit(name, ask.Claim(event_id=impact.event_id, vm=impact.vm, worker="w"))
                problem = "broken" if self.chances.pick(12) == 1 else ""
                done = ask.Finish(
                    event_id=impact.event_id,
                    vm=impact.vm,
                    worker="w",
                    tries=impact.tries + 1,
                    problem=problem,
                )
                self.submit(name, done)
            self.check_budgets()

    def disturb(self) -> None:
        """A guest says go ahead, somebody cancels an event, a person pauses, resumes or cancels the
        campaign.
        """
        name = sorted(self.scopes)[self.chances.pick(len(self.scopes))]
        for event in self.scopes[name].events[:1]:
            if self.chances.pick(3) == 1:
                self.submit(name, ask.Approve(event_ids=(event.id,)))
            if self.chances.pick(12) == 1:
                self.submit(name, ask.Cancel(event_id=event.id))
        words: dict[int, said.Word] = {1: said.Pause(), 2: said.Resume(), 3: said.Cancel()}
        word = words.get(self.chances.pick(10))
        for campaign_id, campaign in self.campaigns.items():
            if word is not None and campaign.state in (State.RUNNING, State.PAUSED):
                self.tell(campaign_id, word)

    # --- what must hold

    def check_budgets(self) -> None:
        """Whatever a campaign has announced or started: one update domain of a scope, unless it is
        one host's; and its budget.
        """
        for scope in self.scopes.values():
            live = {event.id: event for event in scope.events}
            mine = {
                told.event_id: (campaign, one.host)
                for campaign in self.campaigns.values()
                for one in campaign.under_way
                for told in one.events
                if told.event_id in live
            }
            if not mine:
                continue
            assert (
                len(
                    {
                        event.update_domain
                        for event in live.values()
                        if event.status is Status.STARTED
                    }
                )
                <= 1
            )
            domains = {live[event_id].update_domain for event_id in mine}
            assert len(domains) == 1 or len({host for _, host in mine.values()}) == 1, (
                "two hosts of two domains at once"
            )
            for domain in domains:
                here = {
                    event_id: event
                    for event_id, event in live.items()
                    if event.update_domain == domain
                }
                check_budget(scope, here, scope.policy.max_unavailable)
                for campaign, _ in mine.values():
                    own = {
                        event_id: here[event_id]
                        for event_id in here
                        if event_id in mine and mine[event_id][0] is campaign
                    }
                    check_budget(scope, own, campaign.wish.max_unavailable)


def check_budget(scope: Scope, events: dict[str, Event], budget: Budget | None) -> None:
    down = {vm for event in events.values() for vm in event.resources}
    assert budget is None or len(down) <= budget.of(len(scope.vms)), (
        f"{down} of {scope.name} at once, at most {budget} may be"
    )


def check_plan(world: World, waves: tuple[tuple[str, ...], ...], wish: Wish) -> None:
    for wave in waves:
        assert 1 <= len(wave) <= wish.max_hosts
        for scope in world.scopes.values():
            concerned = [vm for vm in scope.vms if vm.host in wave]
            hosts, domains = {vm.host for vm in concerned}, {vm.update_domain for vm in concerned}
            assert len(hosts) <= 1 or len(domains) <= 1
            for budget in (wish.max_unavailable, scope.policy.max_unavailable):
                most = max(
                    (sum(vm.update_domain == domain for vm in concerned) for domain in domains),
                    default=0,
                )
                assert budget is None or most <= budget.of(len(scope.vms))


@settings(max_examples=300, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 40), max_size=60),
    story=st.lists(st.integers(0, 59), max_size=200),
    wishes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=2
    ),
    health_until=st.integers(0, STEPS_MAX),
)
def test_whatever_happens_budgets_hold_and_every_host_ends(
    numbers: list[int], story: list[int], wishes: list[tuple[int, int, bool]], health_until: int
) -> None:
    """Impacts fail, events are canceled, servers die between record and order, two campaigns meet
    in one scope.

    The server has a health command until step `health_until`, where it is taken out of its
    configuration.
    """
    world = World(fleet_of(Chances(iter(numbers)).pick), Chances(iter(story)))
    for number, (max_hosts, budget, pause) in enumerate(wishes, start=1):
        wish = Wish(
            type=EventType.REBOOT,
            patterns=("*",),
            max_hosts=max_hosts,
            max_unavailable=BUDGETS[budget],
        )
        world.start(number, replace(wish, pause_on_failure=pause))
    for step in range(STEPS_MAX):
        world.health_limit = timedelta(minutes=1) if step < health_until else None
        world.round()
        if all(campaign.is_over for campaign in world.campaigns.values()):
            break
        world.disturb()
        world.pass_time()
        if step > 60:  # the story is over: a person lets everything go on
            for campaign_id, campaign in world.campaigns.items():
                if campaign.state is State.PAUSED:
                    world.tell(campaign_id, said.Resume())
    for campaign in world.campaigns.values():
        assert campaign.is_over, "it ends"
        assert campaign.done + campaign.skipped + campaign.failed == campaign.total, (
            "every host is done, skipped or failed"
        )


@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.integers(0, 40), max_size=60), down=st.integers(0, 20))
def test_who_is_down_already_takes_room_too(numbers: list[int], down: int) -> None:
    """A VM that does not run counts, whoever stopped it: a host that would make it one too many
    waits, and is not forgotten.
    """
    scopes = fleet_of(Chances(iter(numbers)).pick)
    name = sorted(scopes)[0]
    vms = tuple(
        replace(vm, power=Power.STOPPED if number == down % 7 else vm.power)
        for number, vm in enumerate(scopes[name].vms)
    )
    scopes[name] = replace(scopes[name], vms=vms, policy=Policy(max_unavailable=Budget(1)))
    world = World(scopes, Chances(iter(())))
    world.start(1, Wish(type=EventType.REBOOT, patterns=("*",), max_hosts=6))
    for _ in range(60):
        world.round()
        stopped = {vm.name for vm in world.scopes[name].vms if vm.power is Power.STOPPED}
        started = {
            vm
            for event in world.scopes[name].events
            if event.status is Status.STARTED
            for vm in event.resources
        }
        assert len(stopped | started) <= 1 or not started
        world.pass_time()
