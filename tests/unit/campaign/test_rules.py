"""The rules of campaigns: which hosts start, what pauses, what repeats, what a step costs."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import pytest
from msgspec.structs import replace

from forewarn.campaign.budget import ScopeSummary, summarize
from forewarn.campaign.model import (
    SKIPPED_HOSTS_MAX,
    AnnounceHost,
    Campaign,
    CampaignCommand,
    CampaignSpec,
    CampaignState,
    CancelEvent,
    CheckHealth,
    EventRef,
    HealthChecked,
    HostAnnounced,
    HostPhase,
    HostRun,
    OperatorCommand,
    Reconcile,
    SkippedHost,
    operation_id_of,
)
from forewarn.campaign.rules import CampaignContext, Decision, decide_campaign, find_next_blocker
from forewarn.core.command import Approve, Cancel, Command, Maintain
from forewarn.core.event import Ended, EndReason, Event, EventType
from forewarn.core.fleet import Budget, Power, Scope
from forewarn.core.machine import decide
from forewarn.core.scheduling import event_id_of
from forewarn.errors import CampaignOver
from tests.builders import MINUTE, NOON, STANDARD, restart, run_impact, scope_of, vm


class Fleet:
    """Scopes and hosts. Counts how many scopes are read."""

    def __init__(self, *scopes: Scope, hosts: tuple[str, ...] = ("h1", "h2", "h3")) -> None:
        self.scopes = {scope.name: scope for scope in scopes}
        self.hosts = hosts
        self.revision = 10
        self.reads = 0

    def scope(self, name: str) -> ScopeSummary | None:
        self.reads += 1
        return summarize(self.scopes[name], self.revision) if name in self.scopes else None

    def scopes_on(self, host: str) -> list[ScopeSummary] | None:
        found = [s for s in self.scopes.values() if any(vm.host == host for vm in s.vms)]
        self.reads += len(found) or 1
        return [summarize(scope, self.revision) for scope in found] if host in self.hosts else None

    def submit(self, command: Command, scope: str = "web", minutes: int = 0) -> None:
        now = NOON + minutes * MINUTE
        self.scopes[scope] = decide(self.scopes[scope], command, now, STANDARD).scope

    def announce(self, host: str, campaign: Campaign, scope: str = "web") -> HostAnnounced:
        """Announce the maintenance of a host, as the worker does."""
        operation_id = operation_id_of(campaign, host)
        type_ = campaign.spec.type
        self.submit(Maintain(host=host, operation_id=operation_id, type=type_), scope)
        after = self.scopes[scope]
        known = {event.id for event in after.events} | {ended.id for ended in after.ended}
        ids = [event_id_of(operation_id, scope, domain) for domain in range(3)]
        refs = (EventRef(scope, id_, self.revision) for id_ in ids if id_ in known)
        return HostAnnounced(host, tuple(refs))

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


def apply(
    campaign: Campaign,
    command: CampaignCommand,
    fleet: Fleet,
    *,
    others: Sequence[HostRun] = (),
    minutes: int = 0,
    health_limit: timedelta | None = None,
) -> Decision:
    hosts = [f"h{number}" for number in range(1, campaign.total + 1)]
    context = CampaignContext(fleet, hosts, others, health_limit=health_limit)
    return decide_campaign(campaign, command, context, NOON + minutes * MINUTE)


def reconcile(
    campaign: Campaign, fleet: Fleet, *, others: Sequence[HostRun] = (), minutes: int = 0
) -> Campaign:
    return apply(campaign, Reconcile(), fleet, others=others, minutes=minutes).campaign


def begin(fleet: Fleet, **spec: object) -> Campaign:
    """A campaign whose first hosts are announced."""
    campaign = reconcile(campaign_of(len(fleet.hosts), **spec), fleet)
    for run in campaign.in_progress:
        if run.phase is HostPhase.ORDERED:
            campaign = apply(campaign, fleet.announce(run.host, campaign), fleet).campaign
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
    context = CampaignContext(fleet, ["h1"], (), timedelta(minutes=25))
    now = decide_campaign(campaign_of(1), Reconcile(), context, NOON)
    later = decide_campaign(campaign_of(1), Reconcile(), context, NOON + 100 * MINUTE)

    assert (running(now.campaign), running(later.campaign)) == (["h1"], [])


def test_hosts_of_other_campaigns_count() -> None:
    """Whether their events are known yet or not."""
    ordered = HostRun("h2", NOON)
    announced = HostRun("h2", NOON, HostPhase.ANNOUNCED, (EventRef("web", "E", 11),))

    for other in (ordered, announced):
        assert running(reconcile(campaign_of(), one_at_a_time(), others=[other])) == ["h2"]


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


def test_event_not_yet_replicated_counts_as_in_progress() -> None:
    """A replica may have read the announcement before the scope; the event is not over then."""
    fleet = one_at_a_time()
    run = HostRun("h1", NOON, HostPhase.ANNOUNCED, (EventRef("web", "E", 11),))
    campaign = replace(campaign_of(), cursor=1, in_progress=(run,))

    assert reconcile(campaign, fleet) == campaign
    fleet.revision = 11
    assert reconcile(campaign, fleet).done == 1, "known and forgotten: it was over long ago"


def test_missing_scope_is_waited_for_until_the_replica_is_recent() -> None:
    fleet = Fleet()
    run = HostRun("h1", NOON, HostPhase.ANNOUNCED, (EventRef("web", "E", 11),))
    campaign = replace(campaign_of(1), cursor=1, in_progress=(run,))

    assert reconcile(campaign, fleet) == campaign
    fleet.revision = 11
    assert reconcile(campaign, fleet).skipped_hosts[0].why == "event E of web was canceled"


def test_no_host_starts_while_the_list_of_hosts_is_unknown() -> None:
    context = CampaignContext(Fleet(web(0, 0, 0)), None)

    assert decide_campaign(campaign_of(), Reconcile(), context, NOON).campaign == campaign_of()


def test_reason_why_the_next_host_waits_is_known() -> None:
    fleet = Fleet(web(0, 1, 0))
    fleet.submit(restart("web-1"))
    fleet.submit(Approve(event_ids=(fleet.event().id,)))
    context = CampaignContext(fleet, ["h1", "h2", "h3"])
    paused = replace(campaign_of(), state=CampaignState.PAUSED)
    blocker = find_next_blocker(campaign_of(), context, NOON)

    assert str(blocker) == "another update domain of web is in progress"
    assert find_next_blocker(paused, context, NOON) is None


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
    resumed = apply(fail_first_event(begin(fleet), fleet), OperatorCommand.RESUME, fleet).campaign

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
    after = apply(reconcile(campaign_of(1), fleet), HostAnnounced("h1", (), why), fleet).campaign

    assert after.state is CampaignState.DONE
    assert after.skipped_hosts == (SkippedHost("h1", why, is_failed=False),)


def test_host_without_vms_is_done_at_once() -> None:
    fleet = Fleet(web(0), hosts=("h1", "h2"))
    campaign = reconcile(campaign_of(2), fleet)

    assert running(campaign) == ["h1", "h2"]
    assert apply(campaign, HostAnnounced("h2"), fleet).campaign.done == 1


def test_host_that_became_too_large_waits_for_the_others() -> None:
    """The campaign itself may have moved VMs there; meanwhile they can be moved away."""
    a, b, c = vm("a", host="h1"), vm("b", host="h1"), vm("c", host="h2")
    fleet = Fleet(scope_of(a, b, c, max_unavailable=Budget(1)))
    campaign = reconcile(campaign_of(2), fleet)
    assert (running(campaign), campaign.window, campaign.skipped) == (["h2"], ("h1",), 0)

    fleet.scopes["web"] = scope_of(a, replace(b, host="h3"), c, max_unavailable=Budget(1))
    after = apply(campaign, HostAnnounced("h2"), fleet).campaign
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
    ended = apply(campaign, HostAnnounced("h101"), fleet).campaign
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


apply_checked = partial(apply, health_limit=MINUTE)
"""On a server with a health command."""


def begin_check(fleet: Fleet, **spec: object) -> Campaign:
    campaign = begin(fleet, **spec)
    fleet.submit(Approve(event_ids=(fleet.event().id,)))
    fleet.run_impacts()
    return apply_checked(campaign, Reconcile(), fleet).campaign


def test_host_is_done_when_it_is_healthy_and_counts_until_then() -> None:
    fleet = one_at_a_time()
    campaign = begin_check(fleet)
    run = HostRun("h1", NOON, HostPhase.CHECKING, campaign.in_progress[0].events)
    done = apply_checked(campaign, HealthChecked("h1"), fleet).campaign

    assert campaign.in_progress == (replace(run, checked_until=NOON + MINUTE),)
    assert apply_checked(campaign, Reconcile(), fleet).actions == (CheckHealth("h1"),)
    assert (done.done, running(done)) == (1, ["h2"])


def test_unhealthy_host_pauses_even_without_pause_on_failure() -> None:
    fleet = one_at_a_time()
    campaign = begin_check(fleet, pause_on_failure=False)
    after = apply_checked(campaign, HealthChecked("h1", "exited with 1"), fleet).campaign

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
    canceled = apply(campaign, OperatorCommand.CANCEL, fleet).campaign
    fleet.run_impacts()
    after = apply_checked(canceled, Reconcile(), fleet).campaign

    assert (after.is_over, after.done) == (True, 1)


def test_result_of_a_host_that_is_not_checked_changes_nothing() -> None:
    fleet = one_at_a_time()
    campaign = begin(fleet)

    assert apply_checked(campaign, HealthChecked("h1", "late"), fleet).campaign == campaign


# --- commands of operators, and repetition


def test_cancel_cancels_scheduled_events_and_waits_for_started_ones() -> None:
    fleet = Fleet(web(0, 0, 0))
    campaign = begin(fleet, max_hosts=2)
    first, second = fleet.scopes["web"].events
    fleet.submit(Approve(event_ids=(first.id,)))
    canceled = apply(campaign, OperatorCommand.CANCEL, fleet)

    assert canceled.campaign.state is CampaignState.CANCELED
    assert canceled.actions == (CancelEvent("web", second.id),)
    fleet.submit(Cancel(event_id=second.id))
    waiting = reconcile(canceled.campaign, fleet)
    assert (running(waiting), waiting.is_over) == (["h1"], False)
    fleet.run_impacts()
    end = reconcile(waiting, fleet)
    assert (end.is_over, end.done, end.skipped, end.waiting) == (True, 1, 2, 0)


def test_canceled_campaign_learns_its_events_before_canceling_them() -> None:
    """The host may have been announced before a crash; announcing again returns the events."""
    fleet = Fleet(web(0))
    campaign = reconcile(campaign_of(1), fleet)
    canceled = apply(campaign, OperatorCommand.CANCEL, fleet)

    assert canceled.actions == (AnnounceHost("h1", operation_id_of(campaign, "h1")),)
    known = apply(canceled.campaign, fleet.announce("h1", campaign), fleet)
    assert known.actions == (CancelEvent("web", fleet.event().id),)


@pytest.mark.parametrize(
    ("command", "state"),
    [
        (OperatorCommand.PAUSE, CampaignState.PAUSED),
        (OperatorCommand.RESUME, CampaignState.RUNNING),
        (OperatorCommand.CANCEL, CampaignState.CANCELED),
    ],
)
def test_repeated_command_changes_nothing(command: CampaignCommand, state: CampaignState) -> None:
    fleet = Fleet(web(0, 0, 0))
    once = apply(campaign_of(), command, fleet).campaign
    again = apply(once, command, fleet)

    assert once.state is state
    assert (again.campaign, again.changes) == (once, ())


@pytest.mark.parametrize("command", OperatorCommand)
def test_campaign_that_is_done_accepts_no_command(command: CampaignCommand) -> None:
    over = replace(campaign_of(), state=CampaignState.DONE, ended_at=NOON)

    with pytest.raises(CampaignOver, match="c1 is done; expected one that is running or paused"):
        apply(over, command, Fleet())


def test_canceled_campaign_may_only_be_canceled_again() -> None:
    over = replace(campaign_of(), state=CampaignState.CANCELED, ended_at=NOON)

    assert apply(over, OperatorCommand.CANCEL, Fleet()).campaign == over
    with pytest.raises(CampaignOver):
        apply(over, OperatorCommand.RESUME, Fleet())


def test_paused_campaign_starts_no_host() -> None:
    fleet = Fleet(web(0, 0, 0))
    paused = apply(campaign_of(), OperatorCommand.PAUSE, fleet).campaign

    assert reconcile(paused, fleet) == paused


def test_actions_are_derived_from_the_campaign() -> None:
    """A server that dies before an action loses nothing: the next one gets the same action."""
    fleet = Fleet(web(0, 0, 0))
    first = apply(campaign_of(max_hosts=1), Reconcile(), fleet)
    again = apply(first.campaign, Reconcile(), fleet)
    action = AnnounceHost("h1", operation_id_of(first.campaign, "h1"))

    assert first.actions == again.actions == (action,)


def test_announcing_a_host_again_changes_nothing() -> None:
    fleet = one_at_a_time()
    campaign = begin(fleet)

    assert apply(campaign, HostAnnounced("h1"), fleet).campaign == campaign


def test_every_step_is_recorded_in_the_history() -> None:
    fleet = Fleet(web(0))
    first = apply(campaign_of(1), Reconcile(), fleet)
    done = apply(first.campaign, HostAnnounced("h1"), fleet)

    assert [(change.detail, change.host) for change in first.changes] == [
        ("c1 host h1 started", "h1")
    ]
    assert [change.detail for change in done.changes] == [
        "c1 host h1 done",
        "c1 ended: 1 hosts done, 0 skipped, 0 failed",
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
            campaign = apply(campaign, HostAnnounced(run.host), fleet).campaign
        most = max(most, fleet.reads - before)
    return most


def test_cost_of_a_step_does_not_grow_with_the_fleet() -> None:
    assert most_reads(50) == most_reads(1000) <= 20


def test_record_does_not_grow_with_the_number_of_hosts() -> None:
    fleet = Fleet(hosts=tuple(f"h{number}" for number in range(1, 1001)))
    after = reconcile(campaign_of(1000, max_hosts=2), fleet)

    assert len(after.window) + len(after.in_progress) <= 64
