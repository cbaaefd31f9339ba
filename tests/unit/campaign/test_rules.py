"""The rules of campaigns: which hosts start, what pauses, what repeats, what a step costs."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn.campaign import rules
from forewarn.campaign.budget import ScopeSummary
from forewarn.campaign.model import (
    DONE_HOSTS_MAX,
    SKIPPED_HOSTS_MAX,
    Campaign,
    CampaignSpec,
    CampaignState,
    DoneHost,
    EventRef,
    HostPhase,
    HostRun,
    SkippedHost,
    operation_id_of,
)
from forewarn.campaign.rules import (
    CampaignDraft,
    Rule,
    find_next_blocker,
    set_announced,
    set_checked,
)
from forewarn.core.command import Approve, Cancel, Command, Maintain
from forewarn.core.event import Ended, EndReason, Event, EventType
from forewarn.core.fleet import Budget, Power, Scope
from forewarn.core.machine import decide
from forewarn.core.scheduling import event_id_of
from forewarn.errors import CampaignOver
from tests.builders import MINUTE, NOON, STANDARD, restart, run_impact, scope_of, vm


def announced(host: str, *events: EventRef, problem: str = "") -> Rule:
    return lambda draft: set_announced(draft, find_run(draft.campaign, host), events, problem)


def checked(host: str, problem: str = "") -> Rule:
    return lambda draft: set_checked(draft, find_run(draft.campaign, host), problem)


def find_run(campaign: Campaign, host: str) -> HostRun:
    return next(run for run in campaign.in_progress if run.host == host)


class Fleet:
    """Scopes and hosts. Counts how many scopes are read."""

    def __init__(self, *scopes: Scope, hosts: tuple[str, ...] = ("h1", "h2", "h3")) -> None:
        self.scopes = {scope.name: scope for scope in scopes}
        self.hosts = hosts
        self.reads = 0

    def scope(self, name: str) -> Scope | None:
        self.reads += 1
        return self.scopes.get(name)

    def scopes_on(self, host: str) -> list[ScopeSummary] | None:
        found = [s for s in self.scopes.values() if any(vm.host == host for vm in s.vms)]
        self.reads += len(found) or 1
        return [ScopeSummary(scope) for scope in found] if host in self.hosts else None

    def submit(self, command: Command, scope: str = "web", minutes: int = 0) -> None:
        now = NOON + minutes * MINUTE
        self.scopes[scope] = decide(self.scopes[scope], command, now, STANDARD).scope

    def announce(self, host: str, campaign: Campaign, scope: str = "web") -> Rule:
        """Announce the maintenance of a host, as the worker does."""
        operation_id = operation_id_of(campaign, host)
        type_ = campaign.spec.type
        self.submit(Maintain(host=host, operation_id=operation_id, type=type_), scope)
        after = self.scopes[scope]
        known = {event.id for event in after.events} | {ended.id for ended in after.ended}
        ids = [event_id_of(operation_id, scope, domain) for domain in range(3)]
        return announced(host, *(EventRef(scope, id_) for id_ in ids if id_ in known))

    def run_impacts(self, minutes: int = 0) -> None:
        self.scopes["web"] = run_impact(self.scopes["web"], NOON + minutes * MINUTE)

    def event(self) -> Event:
        return self.scopes["web"].events[0]


def web(*domains: int, max_unavailable: Budget | None = None) -> Scope:
    """One VM on each of h1, h2, …, in these update domains."""
    vms = (vm(f"web-{n}", host=f"h{n + 1}", domain=domain) for n, domain in enumerate(domains))
    return scope_of(*vms, max_unavailable=max_unavailable)


def one_at_a_time() -> Fleet:
    """Three hosts of one update domain; one VM may be down."""
    return Fleet(web(0, 0, 0, max_unavailable=Budget(1)))


def campaign_of(hosts: int = 3, **spec: object) -> Campaign:
    wanted = replace(CampaignSpec(type=EventType.REBOOT, patterns=("h*",), max_hosts=3), **spec)
    return Campaign(id="c1", spec=wanted, started_at=NOON, total=hosts, waves=hosts)


def draft_of(
    campaign: Campaign, fleet: Fleet, *, others: Sequence[HostRun] = (), minutes: int = 0
) -> CampaignDraft:
    hosts = [f"h{number}" for number in range(1, campaign.total + 1)]
    return CampaignDraft(campaign, NOON + minutes * MINUTE, fleet, hosts, others)


def apply(
    campaign: Campaign, rule: Rule, fleet: Fleet, *, health_limit: timedelta | None = None
) -> Campaign:
    """Apply a rule, and what follows from it."""
    draft = draft_of(campaign, fleet)
    rule(draft)
    rules.reconcile(draft, health_limit)
    return draft.campaign


def operate(campaign: Campaign, state: CampaignState) -> CampaignDraft:
    """What an operator does. It changes nothing but the state."""
    draft = draft_of(campaign, Fleet())
    rules.set_state(draft, state)
    return draft


def reconcile(
    campaign: Campaign,
    fleet: Fleet,
    *,
    others: Sequence[HostRun] = (),
    minutes: int = 0,
    health_limit: timedelta | None = None,
) -> Campaign:
    draft = draft_of(campaign, fleet, others=others, minutes=minutes)
    rules.reconcile(draft, health_limit)
    return draft.campaign


def begin(fleet: Fleet, **spec: object) -> Campaign:
    """A campaign whose first hosts are announced."""
    campaign = reconcile(campaign_of(len(fleet.hosts), **spec), fleet)
    for run in campaign.in_progress:
        if run.phase is HostPhase.ORDERED:
            campaign = apply(campaign, fleet.announce(run.host, campaign), fleet)
    return campaign


def running(campaign: Campaign) -> list[str]:
    return [run.host for run in campaign.in_progress]


# --- which hosts start


def test_hosts_of_one_update_domain_start_together() -> None:
    assert running(reconcile(campaign_of(), Fleet(web(0, 0, 0)))) == ["h1", "h2", "h3"]


def test_at_most_max_hosts_start() -> None:
    assert running(reconcile(campaign_of(max_hosts=2), Fleet(web(0, 0, 0)))) == ["h1", "h2"]


def test_host_of_another_domain_is_overtaken_by_one_that_fits() -> None:
    """It keeps its place: it is the first candidate of the next step."""
    after = reconcile(campaign_of(), Fleet(web(0, 1, 0)))

    assert running(after) == ["h1", "h3"]
    assert (after.window, after.cursor, after.waiting) == (("h2",), 3, 1)


def test_host_with_two_update_domains_runs_alone() -> None:
    """The scope holds one domain until the other is over, so one host may have both."""
    both = scope_of(
        vm("a", host="h1"),
        vm("b", host="h1", domain=1),
        vm("c", host="h2"),
        max_unavailable=Budget(1),
    )

    assert running(reconcile(campaign_of(2), Fleet(both))) == ["h1"]


@pytest.mark.parametrize(
    ("policy", "campaign", "expected"),
    [
        (None, Budget(1), 1),
        (Budget(1), None, 1),
        (Budget(2), Budget(1), 1),
        (Budget(2), Budget(3), 2),
        (None, Budget(70, True), 2),
    ],
)
def test_smaller_budget_of_scope_and_campaign_counts(
    policy: Budget | None, campaign: Budget | None, expected: int
) -> None:
    """A percentage is rounded down: 70 % of three VMs are two."""
    fleet = Fleet(web(0, 0, 0, max_unavailable=policy))

    assert len(reconcile(campaign_of(max_unavailable=campaign), fleet).in_progress) == expected


def test_small_percentage_is_at_least_one_vm() -> None:
    """Otherwise a small scope could never be maintained."""
    budgets = (Budget(1, is_percent=True).of(3), Budget(25, is_percent=True).of(8), Budget(5).of(3))

    assert budgets == (1, 2, 5)


def test_vm_that_does_not_run_counts() -> None:
    fleet = one_at_a_time()
    web_0, web_1, web_2 = fleet.scopes["web"].vms
    vms = (web_0, web_1, replace(web_2, power=Power.STOPPED))
    fleet.scopes["web"] = replace(fleet.scopes["web"], vms=vms)

    assert running(reconcile(campaign_of(), fleet)) == ["h3"], "its own host takes nothing down"


def test_vm_under_a_users_restart_counts() -> None:
    fleet = one_at_a_time()
    fleet.submit(restart("web-1"))
    fleet.submit(Approve(event_ids=(fleet.event().id,)))

    assert running(reconcile(campaign_of(), fleet)) == ["h2"]


def test_events_of_others_count_if_they_come_within_the_horizon() -> None:
    """A restart in a quarter of an hour would overlap with ours, one in two hours would not."""
    fleet = one_at_a_time()
    fleet.submit(restart("web-1", not_before=NOON + 120 * MINUTE))
    drafts = [draft_of(campaign_of(1), fleet, minutes=minutes) for minutes in (0, 100)]
    for draft in drafts:
        draft.horizon = timedelta(minutes=25)
        rules.reconcile(draft)

    assert [running(draft.campaign) for draft in drafts] == [["h1"], []]


def test_hosts_of_other_campaigns_count() -> None:
    """Whether their events are known yet or not."""
    fleet = one_at_a_time()
    other = replace(campaign_of(1), id="c2", in_progress=(HostRun("h2", NOON),))
    known = apply(other, fleet.announce("h2", other), fleet)

    for others in (other.in_progress, known.in_progress):
        assert running(reconcile(campaign_of(), fleet, others=others)) == ["h2"]


def test_scheduled_event_counts_like_a_started_one() -> None:
    """A scope does not count VMs, so a host is announced only if its impact fits the budget."""
    fleet = one_at_a_time()

    assert running(reconcile(begin(fleet), fleet)) == ["h1"]


def test_next_host_starts_as_soon_as_the_last_event_is_over() -> None:
    """An early approval makes the campaign faster; nothing waits for the rest of a wave."""
    fleet = one_at_a_time()
    campaign = begin(fleet)
    fleet.submit(Approve(event_ids=(fleet.event().id,)), minutes=1)
    fleet.run_impacts(minutes=2)
    after = reconcile(campaign, fleet, minutes=2)

    assert (running(after), after.done, after.spent) == (["h2"], 1, timedelta(minutes=2))
    assert (after.timed, after.done_hosts) == (1, (DoneHost("h1", NOON + 2 * MINUTE),))


def test_host_without_vms_is_done_and_its_time_does_not_count() -> None:
    """Else the campaign would be expected to end now."""
    run = HostRun("h1", NOON, HostPhase.ANNOUNCED)
    after = reconcile(replace(campaign_of(1), cursor=1, in_progress=(run,)), Fleet(), minutes=1)

    assert (after.done, after.timed, after.spent) == (1, 0, timedelta(0))


def test_only_the_last_done_hosts_are_named() -> None:
    """The record is written at every step, so it must not grow with the campaign."""
    earlier = tuple(DoneHost(f"old-{number}", NOON) for number in range(DONE_HOSTS_MAX))
    run = HostRun("h1", NOON, HostPhase.ANNOUNCED)
    campaign = replace(campaign_of(1), cursor=1, in_progress=(run,), done_hosts=earlier)
    after = reconcile(campaign, Fleet())

    named = [done.host for done in after.done_hosts]
    assert (len(named), named[0], named[-1]) == (DONE_HOSTS_MAX, "old-1", "h1")


def test_event_whose_scope_is_gone_counts_as_canceled() -> None:
    run = HostRun("h1", NOON, HostPhase.ANNOUNCED, (EventRef("web", "E"),))
    campaign = replace(campaign_of(1), cursor=1, in_progress=(run,))

    assert reconcile(campaign, Fleet()).skipped_hosts[0].why == "event E of web was canceled"


def test_event_that_is_no_longer_remembered_counts_as_completed() -> None:
    """A scope remembers its last hundred events."""
    run = HostRun("h1", NOON, HostPhase.ANNOUNCED, (EventRef("web", "E"),))
    campaign = replace(campaign_of(1), cursor=1, in_progress=(run,))

    assert reconcile(campaign, one_at_a_time()).done == 1


def test_no_host_starts_while_the_list_of_hosts_is_unknown() -> None:
    draft = CampaignDraft(campaign_of(), NOON, Fleet(web(0, 0, 0)))
    rules.reconcile(draft)

    assert draft.campaign == campaign_of()


def test_reason_why_the_next_host_waits_is_known() -> None:
    fleet = Fleet(web(0, 1, 0))
    fleet.submit(restart("web-1"))
    fleet.submit(Approve(event_ids=(fleet.event().id,)))
    paused = replace(campaign_of(), state=CampaignState.PAUSED)
    blocker = find_next_blocker(draft_of(campaign_of(), fleet))

    assert str(blocker) == "another update domain of web is in progress"
    assert find_next_blocker(draft_of(paused, fleet)) is None


# --- hosts that fail, or are skipped


def fail_first_event(campaign: Campaign, fleet: Fleet) -> Campaign:
    scope, event = fleet.scopes["web"], fleet.event()
    ended = (*scope.ended, Ended(event.id, EndReason.FAILED, NOON))
    fleet.scopes["web"] = replace(scope, events=scope.events[1:], ended=ended)
    return reconcile(campaign, fleet, minutes=20)


def test_failed_impact_pauses_and_announced_hosts_continue() -> None:
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(2)))
    campaign = begin(fleet)
    why = f"event {fleet.event().id} of web failed"
    after = fail_first_event(campaign, fleet)

    assert (after.state, after.paused_by_failure, after.failed) == (CampaignState.PAUSED, True, 1)
    assert after.pause_reason == f"h1: {why}"
    assert running(after) == ["h2"], "no new host, and the other one continues"
    assert after.skipped_hosts == (SkippedHost("h1", why, is_failed=True),)


def test_failure_is_only_counted_without_pause_on_failure() -> None:
    fleet = one_at_a_time()
    after = fail_first_event(begin(fleet, pause_on_failure=False), fleet)

    assert (after.state, after.failed, running(after)) == (CampaignState.RUNNING, 1, ["h2"])


def test_resumed_campaign_continues_with_the_next_host() -> None:
    """Resuming starts no host itself, so the history attributes that to the campaign."""
    fleet = one_at_a_time()
    resumed = operate(fail_first_event(begin(fleet), fleet), CampaignState.RUNNING).campaign

    assert (resumed.state, resumed.pause_reason) == (CampaignState.RUNNING, "")
    assert running(resumed) == []
    assert running(reconcile(resumed, fleet)) == ["h2"]


def test_host_is_skipped_if_its_event_is_canceled() -> None:
    fleet = one_at_a_time()
    campaign = begin(fleet)
    event = fleet.event()
    fleet.submit(Cancel(event_id=event.id))
    after = reconcile(campaign, fleet)
    why = f"event {event.id} of web was canceled"

    assert (after.state, after.skipped, running(after)) == (CampaignState.RUNNING, 1, ["h2"])
    assert after.skipped_hosts == (SkippedHost("h1", why, is_failed=False),)


def test_host_that_is_gone_is_skipped() -> None:
    after = reconcile(campaign_of(), Fleet(web(0, 0, 0), hosts=("h1", "h3")))
    skipped = SkippedHost("h2", "the host no longer exists", is_failed=False)

    assert (running(after), after.skipped) == (["h1", "h3"], 1)
    assert after.skipped_hosts == (skipped,)


def test_host_is_skipped_if_it_could_not_be_announced() -> None:
    fleet = Fleet(web(0))
    why = "web-0 has a Reboot pending already"
    after = apply(reconcile(campaign_of(1), fleet), announced("h1", problem=why), fleet)

    assert after.state is CampaignState.DONE
    assert after.skipped_hosts == (SkippedHost("h1", why, is_failed=False),)


def test_host_without_vms_is_done_at_once() -> None:
    fleet = Fleet(web(0), hosts=("h1", "h2"))
    campaign = reconcile(campaign_of(2), fleet)

    assert running(campaign) == ["h1", "h2"]
    assert apply(campaign, announced("h2"), fleet).done == 1


def test_host_that_became_too_large_waits_for_the_others() -> None:
    """The campaign itself may have moved VMs there; meanwhile they can be moved away."""
    a, b, c = vm("a", host="h1"), vm("b", host="h1"), vm("c", host="h2")
    fleet = Fleet(scope_of(a, b, c, max_unavailable=Budget(1)))
    campaign = reconcile(campaign_of(2), fleet)
    assert (running(campaign), campaign.window, campaign.skipped) == (["h2"], ("h1",), 0)

    fleet.scopes["web"] = scope_of(a, replace(b, host="h3"), c, max_unavailable=Budget(1))
    after = apply(campaign, announced("h2"), fleet)
    assert (running(after), after.done, after.skipped) == (["h1"], 1, 0)


def test_large_hosts_do_not_block_those_behind_them() -> None:
    """Half of the window is for hosts that fit; the large hosts beyond the other half go."""
    vms = [vm(f"{letter}{n}", host=f"h{n}") for n in range(1, 101) for letter in "ab"]
    hosts = tuple(f"h{number}" for number in range(1, 102))
    fleet = Fleet(scope_of(*vms, max_unavailable=Budget(1)), hosts=hosts)
    campaign = campaign_of(101)
    for _ in range(5):
        campaign = reconcile(campaign, fleet)

    assert (running(campaign), len(campaign.window), campaign.skipped) == (["h101"], 32, 68)
    ended = apply(campaign, announced("h101"), fleet)
    assert (ended.state, ended.done, ended.skipped) == (CampaignState.DONE, 1, 100)


def test_host_that_is_still_too_large_in_the_end_is_skipped() -> None:
    fleet = Fleet(scope_of(vm("a", host="h1"), vm("b", host="h1"), max_unavailable=Budget(1)))
    after = reconcile(campaign_of(1), fleet)
    why = "h1 alone takes 2 VMs of web down at once; its max_unavailable is 1"

    assert (after.state, after.skipped) == (CampaignState.DONE, 1)
    assert after.skipped_hosts[0].why == why


def test_only_the_last_skipped_hosts_are_kept_and_all_are_counted() -> None:
    """The record is written at every step, so it must stay small."""
    fleet, campaign = Fleet(hosts=()), campaign_of(500)
    for _ in range(20):
        campaign = reconcile(campaign, fleet)

    assert (campaign.state, campaign.skipped) == (CampaignState.DONE, 500)
    assert len(campaign.skipped_hosts) == SKIPPED_HOSTS_MAX


# --- health checks


def begin_check(fleet: Fleet, **spec: object) -> Campaign:
    campaign = begin(fleet, **spec)
    fleet.submit(Approve(event_ids=(fleet.event().id,)))
    fleet.run_impacts()
    return reconcile(campaign, fleet, health_limit=MINUTE)


def test_host_is_done_when_it_is_healthy_and_counts_until_then() -> None:
    fleet = one_at_a_time()
    campaign = begin_check(fleet)
    run = HostRun("h1", NOON, HostPhase.CHECKING, campaign.in_progress[0].events)
    done = apply(campaign, checked("h1"), fleet, health_limit=MINUTE)

    assert campaign.in_progress == (replace(run, checked_until=NOON + MINUTE),)
    assert reconcile(campaign, fleet, health_limit=MINUTE) == campaign
    assert (done.done, running(done)) == (1, ["h2"])


def test_unhealthy_host_pauses_even_without_pause_on_failure() -> None:
    fleet = one_at_a_time()
    campaign = begin_check(fleet, pause_on_failure=False)
    after = apply(campaign, checked("h1", "exited with 1"), fleet, health_limit=MINUTE)

    assert (after.state, after.paused_by_failure, after.failed) == (CampaignState.PAUSED, True, 1)
    assert after.pause_reason == "h1: health check failed: exited with 1"


def test_host_is_done_if_the_health_command_was_removed() -> None:
    fleet = Fleet(web(0), hosts=("h1",))

    assert reconcile(begin_check(fleet), fleet).state is CampaignState.DONE


def test_canceled_campaign_checks_no_host() -> None:
    """It ends with its events."""
    fleet = Fleet(web(0), hosts=("h1",))
    campaign = begin(fleet)
    fleet.submit(Approve(event_ids=(fleet.event().id,)))
    canceled = operate(campaign, CampaignState.CANCELED).campaign
    fleet.run_impacts()
    after = reconcile(canceled, fleet, health_limit=MINUTE)

    assert (after.is_over, after.done) == (True, 1)


def test_result_of_a_host_that_is_not_checked_changes_nothing() -> None:
    """The check of a server that lost the lease ends late."""
    fleet = one_at_a_time()
    campaign = begin_check(fleet)
    late = find_run(campaign, "h1")
    after = apply(campaign, checked("h1"), fleet, health_limit=MINUTE)

    assert apply(after, lambda draft: set_checked(draft, late, "late"), fleet) == after


# --- commands of operators, and repetition


def test_canceled_campaign_waits_for_its_events() -> None:
    fleet = Fleet(web(0, 0, 0))
    campaign = begin(fleet, max_hosts=2)
    first, second = fleet.scopes["web"].events
    fleet.submit(Approve(event_ids=(first.id,)))
    canceled = operate(campaign, CampaignState.CANCELED).campaign

    fleet.submit(Cancel(event_id=second.id))
    waiting = reconcile(canceled, fleet)
    assert (running(waiting), waiting.is_over) == (["h1"], False)
    fleet.run_impacts()
    end = reconcile(waiting, fleet)
    assert (end.is_over, end.done, end.skipped, end.waiting) == (True, 1, 2, 0)


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (CampaignState.PAUSED, "c1 paused"),
        (CampaignState.RUNNING, "c1 resumed"),
        (CampaignState.CANCELED, "c1 canceled"),
    ],
)
def test_repeated_command_changes_nothing(state: CampaignState, word: str) -> None:
    is_resumed = state is CampaignState.RUNNING
    before = CampaignState.PAUSED if is_resumed else CampaignState.RUNNING
    once = operate(replace(campaign_of(), state=before), state)
    again = operate(once.campaign, state)

    assert [change.detail for change in once.changes] == [word]
    assert (again.campaign, again.changes) == (once.campaign, [])
    assert again.campaign.state is state


@pytest.mark.parametrize(
    "state", [CampaignState.PAUSED, CampaignState.RUNNING, CampaignState.CANCELED]
)
def test_campaign_that_is_done_accepts_no_command(state: CampaignState) -> None:
    over = replace(campaign_of(), state=CampaignState.DONE, ended_at=NOON)

    with pytest.raises(CampaignOver, match="c1 is done; expected one that is running or paused"):
        operate(over, state)


def test_canceled_campaign_may_only_be_canceled_again() -> None:
    over = replace(campaign_of(), state=CampaignState.CANCELED, ended_at=NOON)

    assert operate(over, CampaignState.CANCELED).campaign == over
    with pytest.raises(CampaignOver):
        operate(over, CampaignState.RUNNING)


def test_paused_campaign_starts_no_host() -> None:
    fleet = Fleet(web(0, 0, 0))
    paused = operate(campaign_of(), CampaignState.PAUSED).campaign

    assert reconcile(paused, fleet) == paused


def test_announcing_a_host_again_changes_nothing() -> None:
    """Another server did it meanwhile, so the host is no longer as it was."""
    fleet = one_at_a_time()
    ordered = find_run(reconcile(campaign_of(), fleet), "h1")
    campaign = begin(fleet)

    assert apply(campaign, lambda draft: set_announced(draft, ordered), fleet) == campaign


def test_every_step_is_recorded_in_the_history() -> None:
    fleet = Fleet(web(0))
    first = draft_of(campaign_of(1), fleet)
    rules.reconcile(first)
    done = draft_of(first.campaign, fleet)
    announced("h1")(done)
    rules.reconcile(done)

    assert [(change.detail, change.host) for change in first.changes] == [
        ("c1 host h1 started", "h1")
    ]
    assert [change.detail for change in done.changes] == [
        "c1 host h1 done",
        "c1 ended: 1 done, 0 skipped, 0 failed",
    ]


# --- cost


def most_reads(hosts: int) -> int:
    """How many scopes the most expensive step reads, if each host has a scope of its own."""
    names = tuple(f"h{number}" for number in range(1, hosts + 1))
    scopes = [replace(scope_of(vm(f"v-{host}", host=host)), name=f"s-{host}") for host in names]
    fleet = Fleet(*scopes, hosts=names)
    campaign, most = campaign_of(hosts, max_hosts=2), 0
    for _ in range(20):
        before = fleet.reads
        campaign = reconcile(campaign, fleet)
        for run in campaign.in_progress:
            campaign = apply(campaign, announced(run.host), fleet)
        most = max(most, fleet.reads - before)
    return most


def test_cost_of_a_step_does_not_grow_with_the_fleet() -> None:
    assert most_reads(50) == most_reads(1000) <= 20


def test_record_does_not_grow_with_the_number_of_hosts() -> None:
    fleet = Fleet(hosts=tuple(f"h{number}" for number in range(1, 1001)))
    after = reconcile(campaign_of(1000, max_hosts=2), fleet)

    assert len(after.window) + len(after.in_progress) <= 64
