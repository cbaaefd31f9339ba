"""The state machine: `decide(scope, command, now, timing) -> Outcome`. Pure, and the only place
where the rules stand.

An event's life:

                       approved as the policy asks, or NotBefore has come,
                       and no other update domain is under impact          every impact is over
    (asked) ──> Scheduled ─────────────────────────────────────────> Started ──────────> gone
                    │ canceled, or nobody left in Resources              ^
                    └──────────> gone                        failed hardware: at once

An impact's life, one per VM of a Started event, or of an operation that nobody needs to be told of:

    waiting ──claimed by a worker──> claimed ──done──> done            a claim that is not renewed
    lapses and
       ^                                │ failed                       another worker may take it
       over
       └──────── tried again later ─────┴──too long───> failed

A VM has one impact at a time, in the order in which they were started; the next one waits until the
one before is over (`progress.next_in_line`).

Every command is the same three steps: apply its own rule, then `settle` (start all that may start
now), then count the incarnation up if what a VM can see has changed. So after any command nothing
is left that is due and may start, and the same incarnation always means the same document. A
command that is already true changes nothing and is no problem.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core import lifecycle as progress
from forewarn.core import membership
from forewarn.core import scheduling as operation
from forewarn.core.change import Change
from forewarn.core.concern import with_concerns
from forewarn.core.draft import Draft, Places
from forewarn.core.event import Event, EventType, Impact, Source, Status
from forewarn.core.fleet import Approval, AutoApprove, Power, Scope, ScopeKind
from forewarn.core.timing import Timing

RULES: dict[type[ask.Command], Callable[[Draft, Any], None]] = {
    ask.Restart: operation.restart,
    ask.Redeploy: operation.redeploy,
    ask.Delete: operation.delete,
    ask.Evict: operation.evict,
    ask.Maintain: operation.maintain,
    ask.Degrade: operation.degrade,
    ask.Fail: operation.fail,
    ask.Approve: progress.approve,
    ask.Cancel: progress.cancel,
    ask.Extend: operation.extend,
    ask.Complete: progress.complete,
    ask.Claim: progress.claim,
    ask.Lapse: progress.lapse,
    ask.Finish: progress.finish,
    ask.Seen: progress.seen,
    ask.Tick: lambda draft, command: None,  # settling is all there is to do
    ask.SetMembers: membership.enrol,
    ask.Retire: membership.retire,
}


class Outcome(msgspec.Struct, frozen=True):
    """The scope as it is now, and what became true. `is_gone`: there is no such scope any more."""

    scope: Scope
    changes: tuple[Change, ...]
    is_gone: bool = False


class Group:
    """What commands share that are committed together.

    `shown` is the scope before the first of them, which is what guests see until the commit: the
    incarnation counts what changes for them, not the steps in between.
    """

    def __init__(self, shown: Scope) -> None:
        self.shown = shown
        self.places = Places()


def decide(
    scope: Scope, command: ask.Command, now: datetime, timing: Timing, group: Group | None = None
) -> Outcome:
    """What the command makes of the scope.

    Raises a Problem if the rules say no; then nothing has changed.
    """
    group = group or Group(scope)
    draft = Draft(scope, now, timing, group.places)
    RULES[type(command)](draft, command)
    settle(draft)
    if draft.scope.kind is ScopeKind.VM and scope.vms and not draft.scope.vms:
        draft.is_gone = True  # a standalone VM is its scope
    if draft.scope.events is not scope.events:
        has_changed = visible(draft.scope) != visible(group.shown)
        draft.scope = replace(draft.scope, incarnation=group.shown.incarnation + has_changed)
    changes = with_concerns(draft.changes, scope, draft.scope, group.places)
    return Outcome(scope=draft.scope, changes=changes, is_gone=draft.is_gone)


def visible(scope: Scope) -> tuple[object, ...]:
    """All that any api-version's page is made of.

    Approvals, claims and members are not part of it.
    """
    return tuple(
        (
            event.id,
            event.status,
            event.type,
            event.resources,
            event.not_before if event.status is Status.SCHEDULED else None,
            event.description,
            event.source,
            event.duration_seconds,
        )
        for event in scope.events
    )


def next_deadline(scope: Scope) -> datetime | None:
    """When to tick: the nearest NotBefore of what is not held; the turn of the rest comes with the
    end of what holds it.
    """
    waiting = [event for event in scope.events if event.status is Status.SCHEDULED]
    return min((event.not_before for event in not_held(scope, waiting)), default=None)


def next_impact_at(scope: Scope) -> datetime | None:
    """When the next impact can be claimed: because it waits, or because its claim lapses."""
    lines = open_lines(scope)
    return min(
        (impact.due_at for line in lines for impact in progress.next_in_line(line)), default=None
    )


def due_impacts(scope: Scope, now: datetime) -> tuple[Impact, ...]:
    """The impacts that any worker may claim now, at most one for each VM."""
    due = (progress.due_in_line(line, now) for line in open_lines(scope))
    return tuple(impact for impact in due if impact is not None)


def open_lines(scope: Scope) -> Iterable[list[Impact]]:
    """What is still to be done, VM by VM, in the order in which it was started."""
    lines: dict[str, list[Impact]] = {}
    for impact in scope.impacts:
        if not impact.is_over:
            lines.setdefault(impact.vm, []).append(impact)
    return lines.values()


def settle(draft: Draft) -> None:
    """Note what is approved by now, and start all that may start, in a fixed order."""
    draft.put_events([replace(event, is_approved=True) for event in newly_agreed(draft.scope)])
    for event in not_held(draft.scope, ready_events(draft.scope, draft.now)):
        draft.start(event, why_ready(event, draft.now))


def not_held(scope: Scope, events: list[Event]) -> list[Event]:
    """Those that can start together, in the order of their NotBefore.

    A platform event is held while another update domain of its scope is under impact; and behind
    one that is held, so that a domain that is always busy does not keep the others waiting for
    ever. A user's operation is never held.
    """
    if not events:
        return []
    under_impact = domains_under_impact(scope)
    free, is_held = [], False
    for event in sorted(events, key=lambda event: (event.not_before, event.id)):
        if event.source is Source.PLATFORM:
            is_held = is_held or bool(under_impact - {event.update_domain})
            if is_held:
                continue
        free.append(event)
        under_impact.add(event.update_domain)
    return free


def ready_events(scope: Scope, now: datetime) -> list[Event]:
    """Those whose VMs have had their notice or waived it, or are all down and cannot be asked."""
    scheduled = [event for event in scope.events if event.status is Status.SCHEDULED]
    if not scheduled:
        return []
    is_down = nobody_runs(scope)
    must_wait = not is_down and are_deletions_held(scope, scheduled, now)
    return [
        event
        for event in scheduled
        if event.not_before <= now
        or (
            (event.is_approved or (is_down and not event.is_timed))
            and not (must_wait and event.type is EventType.TERMINATE)
        )
    ]


def why_ready(event: Event, now: datetime) -> str:
    if event.not_before <= now:
        return "NotBefore has come"
    return (
        f"approved by {', '.join(event.approvals)}"
        if event.is_approved
        else "all instances are down"
    )


def newly_agreed(scope: Scope) -> list[Event]:
    """The events whose approvals are by now those that the policy asks.

    Once they were, they are: no word is taken back.
    """
    asked = [
        event
        for event in scope.events
        if event.status is Status.SCHEDULED and event.approvals and not event.is_approved
    ]
    if not asked:
        return []
    running = {vm.name for vm in scope.vms if vm.power is Power.RUNNING}
    return [event for event in asked if is_agreed(scope.policy.approval, running, event)]


def is_agreed(approval: Approval, running: set[str], event: Event) -> bool:
    votes = len(running.intersection(event.approvals))
    match approval:
        case Approval.ANY:
            return bool(event.approvals)
        case Approval.QUORUM:
            return votes * 2 > len(running)
        case Approval.ALL:
            return votes == len(running) > 0


def nobody_runs(scope: Scope) -> bool:
    """Whether all instances are down and the policy lets events pass then.

    It holds only as long as it is so.
    """
    if AutoApprove.ALL_INSTANCES_DOWN not in scope.policy.auto_approve:
        return False
    return all(vm.power is not Power.RUNNING for vm in scope.vms)


def domains_under_impact(scope: Scope) -> set[int]:
    """The update domains with a Started event, or with a silent operation under way."""
    started = {
        event.id: event.update_domain for event in scope.events if event.status is Status.STARTED
    }
    silent = {impact.vm for impact in scope.impacts if impact.event_id not in started}
    if not silent:
        return set(started.values())
    return set(started.values()) | {vm.update_domain for vm in scope.vms if vm.name in silent}


def are_deletions_held(scope: Scope, scheduled: list[Event], now: datetime) -> bool:
    """Whether approved deletions wait for the scope's other ones: all of them are approved or due,
    or none goes.
    """
    if not scope.policy.couple_terminates:
        return False
    deletions = (event for event in scheduled if event.type is EventType.TERMINATE)
    return any(not event.is_approved and event.not_before > now for event in deletions)
