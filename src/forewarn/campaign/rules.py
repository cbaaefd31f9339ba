"""The state machine of a campaign: `decide_campaign(campaign, command, context, now)`. Pure.

States of a campaign:

    RUNNING <--pause, failure / resume--> PAUSED        no host in progress or waiting
       |                                    |        RUNNING -------------------------> DONE
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

One server decides at a time, under a lease, and the commit compares all running campaigns. The
actions that follow are derived from the campaign itself and may be repeated, so a server that dies
between the commit and the action loses nothing and does nothing twice.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from forewarn.campaign.budget import NO_RESIDENTS, Blocker, BudgetLedger, ScopeSummary
from forewarn.campaign.forecast import window_size
from forewarn.campaign.model import (
    SKIPPED_HOSTS_MAX,
    Action,
    AnnounceHost,
    Campaign,
    CampaignCommand,
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
from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import EndReason, Status
from forewarn.errors import CampaignOver


class FleetView(Protocol):
    """The fleet as the rules see it."""

    @property
    def revision(self) -> int: ...

    def scope(self, name: str) -> ScopeSummary | None: ...

    def scopes_on(self, host: str) -> Sequence[ScopeSummary] | None:
        """The scopes with VMs on a host; None if there is no such host."""


class CampaignContext(NamedTuple):
    """What a decision depends on besides the campaign.

    `hosts` are the campaign's hosts in order, None while they are not known. `others` are the
    hosts that other campaigns have in progress. Events of others count if they come within
    `horizon`. `health_limit` is how long the server's health command may take; None: it has none.
    """

    fleet: FleetView
    hosts: Sequence[str] | None
    others: Sequence[HostRun] = ()
    horizon: timedelta = timedelta(0)
    health_limit: timedelta | None = None


class Decision(NamedTuple):
    campaign: Campaign
    changes: tuple[Change, ...]
    actions: tuple[Action, ...]


def decide_campaign(
    campaign: Campaign, command: CampaignCommand, context: CampaignContext, now: datetime
) -> Decision:
    """Apply a command. What is already true changes nothing; CampaignOver if it is too late.

    An operator's command changes only the state, so that the history attributes the rest to the
    campaign; the next Reconcile does it.
    """
    draft = CampaignDraft(campaign, context, now)
    RULES[type(command)](draft, command)
    if not isinstance(command, OperatorCommand) and not draft.campaign.is_over:
        advance(draft)
    actions = derive_actions(draft.campaign, context.fleet)
    return Decision(draft.campaign, tuple(draft.changes), actions)


def derive_actions(campaign: Campaign, fleet: FleetView) -> tuple[Action, ...]:
    actions: list[Action] = []
    for run in campaign.in_progress:
        if run.phase is HostPhase.ORDERED:
            actions.append(AnnounceHost(run.host, operation_id_of(campaign, run.host)))
        elif run.phase is HostPhase.CHECKING:
            actions.append(CheckHealth(run.host))
        elif campaign.state is CampaignState.CANCELED:
            actions += [
                CancelEvent(ref.scope, ref.event_id)
                for ref in run.events
                if is_scheduled(fleet, ref)
            ]
    return tuple(actions)


class CampaignDraft:
    """The campaign as it will be, and the changes so far."""

    def __init__(self, campaign: Campaign, context: CampaignContext, now: datetime) -> None:
        self.campaign = campaign
        self.context = context
        self.now = now
        self.changes: list[Change] = []

    def record(self, text: str, host: str = "") -> None:
        detail = f"{self.campaign.id} {text}"
        self.changes.append(Change(what=ChangeKind.CAMPAIGN, detail=detail, host=host))

    def put(self, **fields: Any) -> None:
        self.campaign = replace(self.campaign, **fields)

    def find_run(self, host: str, phase: HostPhase) -> HostRun | None:
        runs = (run for run in self.campaign.in_progress if (run.host, run.phase) == (host, phase))
        return next(runs, None)

    def put_run(self, changed: HostRun) -> None:
        runs = self.campaign.in_progress
        self.put(in_progress=tuple(changed if run.host == changed.host else run for run in runs))

    def remove_run(self, host: str) -> None:
        self.put(in_progress=tuple(run for run in self.campaign.in_progress if run.host != host))

    def finish(self, run: HostRun) -> None:
        self.remove_run(run.host)
        spent = self.campaign.spent + (self.now - run.taken_at)
        self.put(done=self.campaign.done + 1, spent=spent)
        self.record(f"host {run.host} done", run.host)

    def skip(self, host: str, why: str) -> None:
        self._add_skipped(SkippedHost(host, why, is_failed=False))
        self.put(skipped=self.campaign.skipped + 1)

    def fail(self, host: str, why: str, *, pauses: bool) -> None:
        self._add_skipped(SkippedHost(host, why, is_failed=True))
        self.put(failed=self.campaign.failed + 1)
        if pauses and self.campaign.state is CampaignState.RUNNING:
            self.set_state(CampaignState.PAUSED, f"{host}: {why}", paused_by_failure=True)
            self.record(f"paused: {host}: {why}", host)

    def _add_skipped(self, skipped: SkippedHost) -> None:
        self.remove_run(skipped.host)
        self.put(skipped_hosts=(*self.campaign.skipped_hosts, skipped)[-SKIPPED_HOSTS_MAX:])
        what = "failed" if skipped.is_failed else "skipped"
        self.record(f"host {skipped.host} {what}: {skipped.why}", skipped.host)

    def set_state(
        self, state: CampaignState, pause_reason: str = "", *, paused_by_failure: bool = False
    ) -> None:
        self.put(state=state, pause_reason=pause_reason, paused_by_failure=paused_by_failure)


STATE_AFTER = {
    OperatorCommand.PAUSE: CampaignState.PAUSED,
    OperatorCommand.RESUME: CampaignState.RUNNING,
    OperatorCommand.CANCEL: CampaignState.CANCELED,
}


# --- a rule for each command


def operate(draft: CampaignDraft, command: OperatorCommand) -> None:
    state = STATE_AFTER[command]
    campaign = draft.campaign
    if campaign.state is state:
        return
    if campaign.state in (CampaignState.CANCELED, CampaignState.DONE):
        raise CampaignOver(
            f"campaign {campaign.id} is {campaign.state}; expected one that is running or paused",
            campaign=campaign.id,
            state=campaign.state,
        )
    paused = state is CampaignState.PAUSED
    draft.set_state(state, "paused by an operator" if paused else "")
    draft.record(command.value)


def announced(draft: CampaignDraft, command: HostAnnounced) -> None:
    run = draft.find_run(command.host, HostPhase.ORDERED)
    if run is not None:
        phase = HostPhase.ANNOUNCED
        draft.put_run(replace(run, phase=phase, events=command.events, problem=command.problem))


def health_checked(draft: CampaignDraft, command: HealthChecked) -> None:
    run = draft.find_run(command.host, HostPhase.CHECKING)
    if run is not None and command.problem:
        draft.fail(run.host, f"health check failed: {command.problem}", pauses=True)
    elif run is not None:
        draft.finish(run)


RULES: dict[type[CampaignCommand], Callable[[CampaignDraft, Any], None]] = {
    Reconcile: lambda draft, command: None,  # `advance` does the work
    OperatorCommand: operate,
    HostAnnounced: announced,
    HealthChecked: health_checked,
}


# --- what follows by itself


def advance(draft: CampaignDraft) -> None:
    """Finish the hosts whose events are over, start others, and end after the last one."""
    fleet = draft.context.fleet
    for run in draft.campaign.in_progress:
        if run.phase is HostPhase.ANNOUNCED and not any(is_live(fleet, ref) for ref in run.events):
            end_host(draft, run)
        elif run.phase is HostPhase.CHECKING and draft.context.health_limit is None:
            draft.finish(run)  # the health command was removed from the configuration
    campaign = draft.campaign
    if campaign.state is CampaignState.RUNNING:
        start_hosts(draft)
    if not draft.campaign.in_progress and (
        campaign.state is CampaignState.CANCELED or not draft.campaign.waiting
    ):
        end_campaign(draft)


def end_host(draft: CampaignDraft, run: HostRun) -> None:
    """All events of the host are over: it failed, is skipped, must be checked, or is done."""
    ended = [
        (how_ended(draft.context.fleet, ref), f"event {ref.event_id} of {ref.scope}")
        for ref in run.events
    ]
    failed = [event for how, event in ended if how is EndReason.FAILED]
    canceled = [event for how, event in ended if how is EndReason.CANCELED]
    limit = draft.context.health_limit
    if failed:
        pauses = draft.campaign.spec.pause_on_failure
        draft.fail(run.host, f"{failed[0]} failed", pauses=pauses)
    elif run.problem or canceled:
        draft.skip(run.host, run.problem or f"{canceled[0]} was canceled")
    elif limit is not None and draft.campaign.state is not CampaignState.CANCELED:
        until = draft.now + limit
        draft.put_run(replace(run, phase=HostPhase.CHECKING, checked_until=until))
    else:
        draft.finish(run)


def start_hosts(draft: CampaignDraft) -> None:
    """Start as many of the next hosts as the budgets allow. The others keep their order."""
    campaign, context = draft.campaign, draft.context
    free = campaign.spec.max_hosts - len(campaign.in_progress)
    if free <= 0:
        return
    candidates, cursor = next_hosts(campaign, context.hosts)
    ledger = reserved(draft)
    left: list[str] = []
    too_large: list[Blocker] = []
    for position, host in enumerate(candidates):
        if not free:
            left += candidates[position:]
            break
        scopes = context.fleet.scopes_on(host)
        if scopes is None:
            draft.skip(host, "the host no longer exists")
        elif (blocker := ledger.find_blocker(host, scopes)) is not None:
            left.append(host)
            too_large += [blocker] if blocker.is_permanent else []
        else:
            ledger.reserve_host(host, scopes)
            draft.put(in_progress=(*draft.campaign.in_progress, HostRun(host, draft.now)))
            draft.record(f"host {host} started", host)
            free -= 1
    only_large = not draft.campaign.in_progress and len(left) == len(too_large)
    is_last = only_large and cursor == campaign.total
    # Half of the window is for hosts that fit, so that large ones do not block those behind them.
    for blocker in too_large[0 if is_last else window_size(campaign.spec.max_hosts) // 2 :]:
        left.remove(blocker.host)
        draft.skip(blocker.host, str(blocker))
    if len(left) < len(candidates):
        draft.put(window=tuple(left), cursor=cursor)


def next_hosts(campaign: Campaign, hosts: Sequence[str] | None) -> tuple[list[str], int]:
    """The waiting hosts that a step considers, and the cursor behind them."""
    room = window_size(campaign.spec.max_hosts) - len(campaign.window)
    new = () if hosts is None else hosts[campaign.cursor : campaign.cursor + room]
    return [*campaign.window, *new], campaign.cursor + len(new)


def find_next_blocker(
    campaign: Campaign, context: CampaignContext, now: datetime
) -> Blocker | None:
    """Why the first waiting host cannot start, for people to read."""
    candidates, _ = next_hosts(campaign, context.hosts)
    is_full = len(campaign.in_progress) >= campaign.spec.max_hosts
    if not candidates or is_full or campaign.state is not CampaignState.RUNNING:
        return None
    scopes = context.fleet.scopes_on(candidates[0])
    ledger = reserved(CampaignDraft(campaign, context, now))
    return None if scopes is None else ledger.find_blocker(candidates[0], scopes)


def reserved(draft: CampaignDraft) -> BudgetLedger:
    """What the hosts in progress need, of this campaign and of others.

    A host whose events are not known needs all its VMs.
    """
    fleet = draft.context.fleet
    horizon = draft.now + draft.context.horizon
    ledger = BudgetLedger(draft.campaign.spec.max_unavailable, horizon)
    for run in (*draft.campaign.in_progress, *draft.context.others):
        if run.phase is not HostPhase.ANNOUNCED:
            ledger.reserve_host(run.host, fleet.scopes_on(run.host) or ())
            continue
        for ref in run.events:
            scope = fleet.scope(ref.scope)
            event = None if scope is None else scope.events.get(ref.event_id)
            if event is not None:
                ledger.reserve(ref.scope, {event.update_domain: event.resources})
            elif scope is not None and scope.revision < ref.revision:  # not known here yet
                ledger.reserve(ref.scope, scope.residents.get(run.host, NO_RESIDENTS))
    return ledger


def end_campaign(draft: CampaignDraft) -> None:
    campaign = draft.campaign
    if campaign.state is CampaignState.CANCELED:
        draft.put(skipped=campaign.skipped + campaign.waiting)
    else:
        draft.set_state(CampaignState.DONE)
    draft.put(cursor=campaign.total, window=(), ended_at=draft.now)
    end = draft.campaign
    draft.record(f"ended: {end.done} hosts done, {end.skipped} skipped, {end.failed} failed")


# --- the state of an event


def is_scheduled(fleet: FleetView, ref: EventRef) -> bool:
    scope = fleet.scope(ref.scope)
    event = None if scope is None else scope.events.get(ref.event_id)
    return event is not None and event.status is Status.SCHEDULED


def is_live(fleet: FleetView, ref: EventRef) -> bool:
    """Whether an event is not over, or may not be because this replica does not know it yet."""
    scope = fleet.scope(ref.scope)
    if scope is None:
        return fleet.revision < ref.revision
    is_unknown = ref.event_id not in scope.ended and scope.revision < ref.revision
    return ref.event_id in scope.events or is_unknown


def how_ended(fleet: FleetView, ref: EventRef) -> EndReason:
    """How an event ended. Without its scope it counts as canceled, if forgotten as completed."""
    scope = fleet.scope(ref.scope)
    if scope is None:
        return EndReason.CANCELED
    return scope.ended.get(ref.event_id, EndReason.COMPLETED)
