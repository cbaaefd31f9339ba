"""Campaigns under random stories, with the real state machine of scopes.

Budgets hold, paused campaigns start nothing, actions may be repeated, and every campaign ends.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forewarn.campaign.budget import ScopeSummary
from forewarn.campaign.forecast import forecast
from forewarn.campaign.model import (
    Campaign,
    CampaignSpec,
    CampaignState,
    EventRef,
    HostPhase,
    HostRun,
    operation_id_of,
)
from forewarn.campaign.rules import (
    CampaignDraft,
    reconcile,
    set_announced,
    set_checked,
    set_state,
)
from forewarn.core.command import Approve, Cancel, Claim, Command, Finish, Maintain, Tick
from forewarn.core.event import Event, EventType, Status
from forewarn.core.fleet import Approval, Budget, Policy, Power, Scope, ScopeKind, Vm
from forewarn.core.machine import decide, due_impacts
from forewarn.core.scheduling import event_id_of
from forewarn.core.timing import Timing
from forewarn.errors import Error
from tests.builders import NOON

TIMING = Timing.at_rate(60)
STEPS_MAX = 600
HOSTS = tuple(f"h{number}" for number in range(6))
BUDGETS = (None, Budget(1), Budget(2), Budget(40, is_percent=True))


class Choices(NamedTuple):
    """The choices of one story. When they are used up, everything goes well."""

    numbers: Iterator[int]

    def pick(self, of: int) -> int:
        return next(self.numbers, 0) % of


def fleet_of(pick: Callable[[int], int]) -> dict[str, Scope]:
    """A few scopes with VMs on random hosts, in up to three update domains."""
    scopes = {}
    for name in ("web", "db", "queue")[: 1 + pick(3)]:
        vms = tuple(
            Vm(name=f"{name}-{number}", update_domain=pick(3), host=HOSTS[pick(6)])
            for number in range(1 + pick(7))
        )
        approval = (Approval.ANY, Approval.ALL)[pick(2)]
        policy = Policy(approval=approval, max_unavailable=BUDGETS[pick(4)])
        scopes[name] = Scope(
            name=name, kind=ScopeKind.SCALE_SET, policy=policy, vms=vms, seen_at=NOON
        )
    return scopes


class World:
    """Scopes, a clock and campaigns. Actions are sometimes carried out twice, sometimes late."""

    def __init__(self, scopes: dict[str, Scope], choices: Choices) -> None:
        self.scopes = scopes
        self.choices = choices
        self.now = NOON
        self.campaigns: dict[str, Campaign] = {}
        self.hosts: dict[str, tuple[str, ...]] = {}
        self.health_limit: timedelta | None = None

    # --- the fleet as the rules see it

    def scope(self, name: str) -> Scope | None:
        return self.scopes.get(name)

    def scopes_on(self, host: str) -> list[ScopeSummary]:
        names = sorted(n for n, s in self.scopes.items() if any(vm.host == host for vm in s.vms))
        return [ScopeSummary(self.scopes[name]) for name in names]

    def draft(self, campaign: Campaign) -> CampaignDraft:
        others = (other for other in self.campaigns.values() if other.id != campaign.id)
        runs = [run for other in others for run in other.in_progress]
        hosts, horizon = self.hosts[campaign.id], timedelta(minutes=1)
        return CampaignDraft(campaign, self.now, self, hosts, runs, horizon)

    # --- what happens

    def start(self, campaign_id: str, spec: CampaignSpec) -> None:
        planned = forecast(
            {host: self.scopes_on(host) for host in HOSTS},
            max_hosts=spec.max_hosts,
            budget=spec.max_unavailable,
            horizon=self.now,
        )
        check_plan(self, planned.waves, spec)
        total, waves = len(planned.hosts), len(planned.waves)
        self.hosts[campaign_id] = planned.hosts
        self.campaigns[campaign_id] = Campaign(
            id=campaign_id, spec=spec, started_at=NOON, total=total, waves=waves
        )

    def apply(self, campaign_id: str, rule: Callable[[CampaignDraft], None]) -> Campaign:
        before = self.campaigns[campaign_id]
        draft, again = self.draft(before), self.draft(before)
        rule(draft)
        rule(again)
        assert again == draft, "same input, same output"
        known = {run.host for run in before.in_progress}
        is_starting = any(run.host not in known for run in draft.campaign.in_progress)
        is_running = before.state is CampaignState.RUNNING
        assert is_running or not is_starting, "a paused or canceled campaign starts no hosts"
        self.campaigns[campaign_id] = draft.campaign
        return draft.campaign

    def submit(self, scope: str, command: Command) -> None:
        try:
            self.scopes[scope] = decide(self.scopes[scope], command, self.now, TIMING).scope
        except Error:
            return

    def reconcile(self) -> None:
        rule = partial(reconcile, health_limit=self.health_limit)
        for campaign_id in self.campaigns:
            for run in self.apply(campaign_id, rule).in_progress:
                if self.choices.pick(5) != 1:  # otherwise the server died before it
                    self.carry_out(campaign_id, run)
                if self.choices.pick(5) == 1:  # it died after it, before it could record it
                    self.carry_out(campaign_id, run, is_recorded=False)
            self.check_budgets()

    def carry_out(self, campaign_id: str, run: HostRun, *, is_recorded: bool = True) -> None:
        """What a host in progress needs, as the worker does it."""
        campaign = self.campaigns[campaign_id]
        if run.phase is HostPhase.ORDERED:
            operation_id = operation_id_of(campaign, run.host)
            refs: list[EventRef] = []
            for scope in [summary.scope.name for summary in self.scopes_on(run.host)]:
                type_ = campaign.spec.type
                self.submit(scope, Maintain(host=run.host, operation_id=operation_id, type=type_))
                ids = self.created(scope, operation_id)
                refs += [EventRef(scope, event_id) for event_id in ids]
            if is_recorded:
                self.apply(campaign_id, partial(set_announced, run=run, events=tuple(refs)))
        elif run.phase is HostPhase.CHECKING and is_recorded:
            problem = "broken" if self.choices.pick(8) == 1 else ""
            self.apply(campaign_id, partial(set_checked, run=run, problem=problem))
        elif campaign.state is CampaignState.CANCELED:
            for ref in run.events:
                self.submit(ref.scope, Cancel(event_id=ref.event_id))

    def created(self, scope: str, operation_id: str) -> list[str]:
        after = self.scopes[scope]
        known = {event.id for event in after.events} | {ended.id for ended in after.ended}
        ids = (event_id_of(operation_id, scope, domain) for domain in range(3))
        return [event_id for event_id in ids if event_id in known]

    def pass_time(self) -> None:
        self.now += timedelta(seconds=(5, 1, 20)[self.choices.pick(3)])
        for name in self.scopes:
            self.submit(name, Tick())
            for impact in due_impacts(self.scopes[name], self.now)[: 1 + self.choices.pick(3)]:
                self.submit(name, Claim(event_id=impact.event_id, vm=impact.vm, worker="w"))
                finish = Finish(
                    event_id=impact.event_id,
                    vm=impact.vm,
                    worker="w",
                    tries=impact.tries + 1,
                    problem="broken" if self.choices.pick(12) == 1 else "",
                )
                self.submit(name, finish)
            self.check_budgets()

    def disturb(self) -> None:
        """A guest approves, someone cancels an event, an operator changes the campaigns."""
        name = sorted(self.scopes)[self.choices.pick(len(self.scopes))]
        for event in self.scopes[name].events[:1]:
            if self.choices.pick(3) == 1:
                self.submit(name, Approve(event_ids=(event.id,)))
            if self.choices.pick(12) == 1:
                self.submit(name, Cancel(event_id=event.id))
        states = (CampaignState.PAUSED, CampaignState.RUNNING, CampaignState.CANCELED)
        choice = self.choices.pick(10)
        for campaign_id, campaign in self.campaigns.items():
            is_open = campaign.state in (CampaignState.RUNNING, CampaignState.PAUSED)
            if is_open and 1 <= choice <= len(states):
                self.apply(campaign_id, partial(set_state, state=states[choice - 1]))

    # --- what must hold

    def check_budgets(self) -> None:
        """What campaigns announced in a scope is one update domain or one host, within budget."""
        for scope in self.scopes.values():
            run_in_world = {event.id: event for event in scope.events}
            ours = {
                ref.event_id: (campaign, run.host)
                for campaign in self.campaigns.values()
                for run in campaign.in_progress
                for ref in run.events
                if ref.event_id in run_in_world
            }
            if not ours:
                continue
            started = [event for event in run_in_world.values() if event.status is Status.STARTED]
            assert len({event.update_domain for event in started}) <= 1
            domains = {run_in_world[event_id].update_domain for event_id in ours}
            hosts = {host for _, host in ours.values()}
            assert len(domains) == 1 or len(hosts) == 1, "two hosts of two domains at once"
            for domain in domains:
                events = {id_: e for id_, e in run_in_world.items() if e.update_domain == domain}
                check_budget(scope, events, scope.policy.max_unavailable)
                for campaign, _ in ours.values():
                    own = {
                        event_id: event
                        for event_id, event in events.items()
                        if event_id in ours and ours[event_id][0] is campaign
                    }
                    check_budget(scope, own, campaign.spec.max_unavailable)


def check_budget(scope: Scope, events: dict[str, Event], budget: Budget | None) -> None:
    down = {vm for event in events.values() for vm in event.resources}
    assert budget is None or len(down) <= budget.of(len(scope.vms)), (scope.name, down, budget)


def check_plan(world: World, waves: tuple[tuple[str, ...], ...], spec: CampaignSpec) -> None:
    for wave in waves:
        assert 1 <= len(wave) <= spec.max_hosts
        for scope in world.scopes.values():
            vms = [vm for vm in scope.vms if vm.host in wave]
            domains = [vm.update_domain for vm in vms]
            assert len({vm.host for vm in vms}) <= 1 or len(set(domains)) <= 1
            most = max(map(domains.count, domains), default=0)
            for budget in (spec.max_unavailable, scope.policy.max_unavailable):
                assert budget is None or most <= budget.of(len(scope.vms))


@settings(max_examples=300, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 40), max_size=60),
    main=st.lists(st.integers(0, 59), max_size=200),
    specs=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(BUDGETS), st.booleans()),
        min_size=1,
        max_size=2,
    ),
    health_until=st.integers(0, STEPS_MAX),
)
def test_budgets_hold_and_every_host_ends_whatever_happens(
    numbers: list[int],
    main: list[int],
    specs: list[tuple[int, Budget | None, bool]],
    health_until: int,
) -> None:
    """Impacts fail, events are canceled, servers die, two campaigns share a scope.

    The health command is removed from the configuration at step `health_until`.
    """
    world = World(fleet_of(Choices(iter(numbers)).pick), Choices(iter(main)))
    for number, (max_hosts, budget, pauses) in enumerate(specs, start=1):
        spec = CampaignSpec(
            type=EventType.REBOOT,
            patterns=("*",),
            max_hosts=max_hosts,
            max_unavailable=budget,
            pause_on_failure=pauses,
        )
        world.start(f"c{number}", spec)
    for step in range(STEPS_MAX):
        world.health_limit = timedelta(minutes=1) if step < health_until else None
        world.reconcile()
        if all(campaign.is_over for campaign in world.campaigns.values()):
            break
        world.disturb()
        world.pass_time()
        if step > 60:  # the story is over: an operator resumes everything
            for campaign_id, campaign in world.campaigns.items():
                if campaign.state is CampaignState.PAUSED:
                    world.apply(campaign_id, partial(set_state, state=CampaignState.RUNNING))
    for campaign in world.campaigns.values():
        assert campaign.is_over
        assert campaign.done + campaign.skipped + campaign.failed == campaign.total


@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.integers(0, 40), max_size=60), down=st.integers(0, 20))
def test_vm_that_is_already_down_counts(numbers: list[int], down: int) -> None:
    """A host that would take down one VM too many waits, and is not forgotten."""
    scopes = fleet_of(Choices(iter(numbers)).pick)
    name = sorted(scopes)[0]
    vms = tuple(
        replace(vm, power=Power.STOPPED if number == down % 7 else vm.power)
        for number, vm in enumerate(scopes[name].vms)
    )
    scopes[name] = replace(scopes[name], vms=vms, policy=Policy(max_unavailable=Budget(1)))
    world = World(scopes, Choices(iter(())))
    world.start("c1", CampaignSpec(type=EventType.REBOOT, patterns=("*",), max_hosts=6))
    for _ in range(60):
        world.reconcile()
        scope = world.scopes[name]
        stopped = {vm.name for vm in scope.vms if vm.power is Power.STOPPED}
        events = (event for event in scope.events if event.status is Status.STARTED)
        started = {vm for event in events for vm in event.resources}
        assert len(stopped | started) <= 1 or not started
        world.pass_time()
