"""The state machine of a campaign: each rule changes a `CampaignDraft`. Pure.

States of a campaign:

    RUNNING <--pause, failure / resume--> PAUSED
       |                                    |
       +-- no host in progress or waiting --+--> DONE
       |                                    |
       +-------------- cancel --------------+--> CANCELED (over when no host is in progress)

States of a host:

              budgets allow it          its events exist             they ended
    waiting -------------------> ORDERED ----------> ANNOUNCED ---------------> (CHECKING) ---> done
       | host gone, or finally       | refused           | canceled: skipped          | unhealthy
       | too large                   v                   | failed: failed             v
       +----> skipped             skipped                v                         failed

A host may start while fewer than `max_hosts` are in progress and, for every scope on it, at most
one update domain and at most the budget's number of VMs are down or announced by any campaign. A
Scheduled event counts like a Started one: the state machine of a scope holds other update domains
back, but it does not count VMs. A host that has become too large for a budget, for example by VMs
that moved there, waits until all others are done, because someone may move VMs away.

Only `reconcile` starts hosts. One server reconciles at a time, under a lease, one campaign after
the other; so no two decisions use the same part of a budget. What has to be done for a host in
progress follows from its phase and may be repeated, so a server that dies in between loses nothing
and does nothing twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from msgspec.structs import replace

from forewarn.campaign.budget import Blocker, BudgetLedger, ScopeSummary
from forewarn.campaign.forecast import window_size
from forewarn.campaign.model import (
    DONE_HOSTS_MAX,
    SKIPPED_HOSTS_MAX,
    Campaign,
    CampaignState,
    DoneHost,
    EventRef,
    HostPhase,
    HostRun,
    SkippedHost,
)
from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import EndReason, Event
from forewarn.core.fleet import Scope
from forewarn.errors import CampaignOver


class FleetView(Protocol):
    """The fleet as the rules see it."""

    def scope(self, name: str) -> Scope | None: ...

    def scopes_on(self, host: str) -> Sequence[ScopeSummary] | None:
        """The scopes with VMs on a host; None if there is no such host."""


@dataclass
class CampaignDraft:
    """The campaign as it will be, the changes so far, and what a decision depends on.

    `hosts` are the campaign's hosts in order, empty while they are not known. `others` are the
    hosts that other campaigns have in progress. Events of others count if they come within
    `horizon`.
    """

    campaign: Campaign
    now: datetime
    fleet: FleetView
    hosts: Sequence[str] = ()
    others: Sequence[HostRun] = ()
    horizon: timedelta = timedelta(0)
    changes: list[Change] = field(default_factory=list)

    def record(self, text: str, host: str = "") -> None:
        detail = f"{self.campaign.id} {text}"
        self.changes.append(Change(what=ChangeKind.CAMPAIGN, detail=detail, host=host))

    def put(self, **fields: Any) -> None:
        self.campaign = replace(self.campaign, **fields)

    def put_run(self, changed: HostRun) -> None:
        runs = self.campaign.in_progress
        self.put(in_progress=tuple(changed if run.host == changed.host else run for run in runs))

    def remove_run(self, host: str) -> None:
        self.put(in_progress=tuple(run for run in self.campaign.in_progress if run.host != host))

    def finish(self, run: HostRun) -> None:
        self.remove_run(run.host)
        campaign, last = self.campaign, DoneHost(run.host, self.now)
        done_hosts = (*campaign.done_hosts, last)[-DONE_HOSTS_MAX:]
        self.put(done=campaign.done + 1, done_hosts=done_hosts)
        if run.events:  # one without VMs takes no time, and the others will
            spent = campaign.spent + (self.now - run.taken_at)
            self.put(timed=campaign.timed_hosts + 1, spent=spent)
        self.record(f"host {run.host} done", run.host)

    def skip(self, host: str, why: str) -> None:
        self._add_skipped(SkippedHost(host, why, is_failed=False))
        self.put(skipped=self.campaign.skipped + 1)

    def fail(self, host: str, why: str, *, pauses: bool) -> None:
        self._add_skipped(SkippedHost(host, why, is_failed=True))
        self.put(failed=self.campaign.failed + 1)
        if pauses and self.campaign.state is CampaignState.RUNNING:
            reason = f"{host}: {why}"
            self.put(state=CampaignState.PAUSED, pause_reason=reason, paused_by_failure=True)
            self.record(f"paused: {reason}", host)

    def _add_skipped(self, skipped: SkippedHost) -> None:
        self.remove_run(skipped.host)
        self.put(skipped_hosts=(*self.campaign.skipped_hosts, skipped)[-SKIPPED_HOSTS_MAX:])
        what = "failed" if skipped.is_failed else "skipped"
        self.record(f"host {skipped.host} {what}: {skipped.why}", skipped.host)


Rule = Callable[[CampaignDraft], None]


# --- what an operator or the worker reports


def set_state(draft: CampaignDraft, state: CampaignState) -> None:
    """Pause, resume or cancel. CampaignOver if it is too late.

    It changes only the state, so that the history attributes the rest to the campaign.
    """
    campaign = draft.campaign
    if campaign.state is state:
        return
    if campaign.state in (CampaignState.CANCELED, CampaignState.DONE):
        raise CampaignOver(
            f"campaign {campaign.id} is {campaign.state}; expected one that is running or paused",
            campaign=campaign.id,
            state=campaign.state,
        )
    reason = "paused by an operator" if state is CampaignState.PAUSED else ""
    draft.put(state=state, pause_reason=reason, paused_by_failure=False)
    draft.record("resumed" if state is CampaignState.RUNNING else state)


def set_announced(
    draft: CampaignDraft, run: HostRun, events: tuple[EventRef, ...] = (), problem: str = ""
) -> None:
    """The events of an ORDERED host exist. `problem`: what could not be announced."""
    if run in draft.campaign.in_progress:  # else another server was faster
        draft.put_run(replace(run, phase=HostPhase.ANNOUNCED, events=events, problem=problem))


def set_checked(draft: CampaignDraft, run: HostRun, problem: str = "") -> None:
    """The health command of a CHECKING host ended. `problem` is empty if the host is healthy."""
    if run not in draft.campaign.in_progress:
        return
    if problem:
        draft.fail(run.host, f"health check failed: {problem}", pauses=True)
    else:
        draft.finish(run)


# --- what follows by itself


def reconcile(draft: CampaignDraft, health_limit: timedelta | None = None) -> None:
    """Finish the hosts whose events are over, start others, and end after the last one.

    `health_limit` is how long the server's health command may take; None: it has none.
    """
    if draft.campaign.is_over:
        return
    for run in draft.campaign.in_progress:
        if run.phase is HostPhase.ANNOUNCED:
            if not any(find_event(draft.fleet, ref) for ref in run.events):
                end_host(draft, run, health_limit)
        elif run.phase is HostPhase.CHECKING and health_limit is None:
            draft.finish(run)  # the health command was removed from the configuration
    start_hosts(draft)
    campaign = draft.campaign
    if not campaign.in_progress and (
        campaign.state is CampaignState.CANCELED or not campaign.waiting
    ):
        end_campaign(draft)


def end_host(draft: CampaignDraft, run: HostRun, health_limit: timedelta | None) -> None:
    """All events of the host are over: it failed, is skipped, must be checked, or is done."""
    ended = [(how_ended(draft.fleet.scope(ref.scope), ref.event_id), ref) for ref in run.events]
    failed = [event for how, event in ended if how is EndReason.FAILED]
    canceled = [event for how, event in ended if how is EndReason.CANCELED]
    if failed:
        pauses = draft.campaign.spec.pause_on_failure
        draft.fail(run.host, f"{failed[0]} failed", pauses=pauses)
    elif run.problem or canceled:
        draft.skip(run.host, run.problem or f"{canceled[0]} was canceled")
    elif health_limit is not None and draft.campaign.state is not CampaignState.CANCELED:
        until = draft.now + health_limit
        draft.put_run(replace(run, phase=HostPhase.CHECKING, checked_until=until))
    else:
        draft.finish(run)


def start_hosts(draft: CampaignDraft) -> None:
    """Start as many of the next hosts as the budgets allow. The others keep their order."""
    candidates = next_hosts(draft)
    if not candidates:
        return
    spec = draft.campaign.spec
    ledger = reserved(draft)
    left: list[str] = []
    too_large: list[Blocker] = []
    for host in candidates:
        if len(draft.campaign.in_progress) == spec.max_hosts:
            left.append(host)
            continue
        scopes = draft.fleet.scopes_on(host)
        if scopes is None:
            draft.skip(host, "the host no longer exists")
        elif (blocker := ledger.find_blocker(host, scopes)) is not None:
            left.append(host)
            too_large += [blocker] if blocker.is_permanent else []
        else:
            ledger.reserve_host(host, scopes)
            draft.put(in_progress=(*draft.campaign.in_progress, HostRun(host, draft.now)))
            draft.record(f"host {host} started", host)
    cursor = draft.campaign.cursor + len(candidates) - len(draft.campaign.window)
    only_large = not draft.campaign.in_progress and len(left) == len(too_large)
    is_last = only_large and cursor == draft.campaign.total
    # Half of the window is for hosts that fit, so that large ones do not block those behind them.
    for blocker in too_large[0 if is_last else window_size(spec.max_hosts) // 2 :]:
        left.remove(blocker.host)
        draft.skip(blocker.host, str(blocker))
    if len(left) < len(candidates):
        draft.put(window=tuple(left), cursor=cursor)


def next_hosts(draft: CampaignDraft) -> list[str]:
    """The waiting hosts that a step considers; empty if no host may start."""
    campaign, max_hosts = draft.campaign, draft.campaign.spec.max_hosts
    is_full = len(campaign.in_progress) >= max_hosts
    if is_full or campaign.state is not CampaignState.RUNNING:
        return []
    room = window_size(max_hosts) - len(campaign.window)
    new = draft.hosts[campaign.cursor : campaign.cursor + room]
    return [*campaign.window, *new]


def find_next_blocker(draft: CampaignDraft) -> Blocker | None:
    """Why the first waiting host cannot start, for people to read."""
    candidates = next_hosts(draft)
    if not candidates:
        return None
    scopes = draft.fleet.scopes_on(candidates[0]) or ()
    return reserved(draft).find_blocker(candidates[0], scopes)


def reserved(draft: CampaignDraft) -> BudgetLedger:
    """What the hosts in progress need, of this campaign and of others.

    A host whose events are not known needs all its VMs.
    """
    ledger = BudgetLedger(draft.campaign.spec.max_unavailable, draft.now + draft.horizon)
    for run in (*draft.campaign.in_progress, *draft.others):
        if run.phase is not HostPhase.ANNOUNCED:
            ledger.reserve_host(run.host, draft.fleet.scopes_on(run.host) or ())
            continue
        for ref in run.events:
            event = find_event(draft.fleet, ref)
            if event is not None:
                ledger.reserve(ref.scope, {event.update_domain: event.resources})
    return ledger


def end_campaign(draft: CampaignDraft) -> None:
    campaign = draft.campaign
    if campaign.state is CampaignState.CANCELED:
        draft.put(skipped=campaign.skipped + campaign.waiting)
    else:
        draft.put(state=CampaignState.DONE, pause_reason="", paused_by_failure=False)
    draft.put(cursor=campaign.total, window=(), ended_at=draft.now)
    end = draft.campaign
    draft.record(f"ended: {end.done} done, {end.skipped} skipped, {end.failed} failed")


# --- the state of an event


def find_event(fleet: FleetView, ref: EventRef) -> Event | None:
    """The event, None if it is over."""
    scope = fleet.scope(ref.scope)
    return None if scope is None else scope.event(ref.event_id)


def how_ended(scope: Scope | None, event_id: str) -> EndReason:
    """How an event ended. Without its scope it counts as canceled, if forgotten as completed."""
    if scope is None:
        return EndReason.CANCELED
    reasons = (ended.how for ended in scope.ended if ended.id == event_id)
    return next(reasons, EndReason.COMPLETED)
