"""The state machine: `decide(scope, command, now, timing) -> Outcome`. Pure, and the only place where the rules stand.

An event's life:

                       approved as the policy asks, or NotBefore has come,
                       and no other update domain is under impact          every impact is over
    (asked) ──> Scheduled ─────────────────────────────────────────> Started ──────────> gone
                    │ canceled, or nobody left in Resources              ^
                    └──────────> gone                        failed hardware: at once

An impact's life, one per VM of a Started event, or of an operation that nobody needs to be told of:

    waiting ──claimed by a worker──> claimed ──done──> done            a claim that is not renewed lapses and
       ^                                │ failed                       another worker may take it over
       └──────── tried again later ─────┴──too often──> failed

Every command is the same three steps: apply its own rule, then `settle` (start all that may start now), then count the
incarnation up if what a VM can see has changed. So after any command nothing is left that is due and may start, and the
same incarnation always means the same document. A command that is already true changes nothing and is no problem.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core import membership, operation, progress
from forewarn.core.change import Change
from forewarn.core.concern import with_concerns
from forewarn.core.draft import Draft
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
    ask.Enrol: membership.enrol,
    ask.Retire: membership.retire,
}


class Outcome(msgspec.Struct, frozen=True):
    """The scope as it is now, and what became true. `is_gone`: there is no such scope any more."""

    scope: Scope
    changes: tuple[Change, ...]
    is_gone: bool = False


def decide(scope: Scope, command: ask.Command, now: datetime, timing: Timing) -> Outcome:
    """What the command makes of the scope. Raises a Problem if the rules say no; then nothing has changed."""
    draft = Draft(scope, now, timing)
    RULES[type(command)](draft, command)
    settle(draft)
    if draft.scope.kind is ScopeKind.VM and scope.vms and not draft.scope.vms:
        draft.is_gone = True  # a standalone VM is its scope
    if visible(draft.scope) != visible(scope):
        draft.scope = replace(draft.scope, incarnation=scope.incarnation + 1)
    return Outcome(scope=draft.scope, changes=with_concerns(draft.changes, scope, draft.scope), is_gone=draft.is_gone)


def visible(scope: Scope) -> tuple[object, ...]:
    """All that any api-version's page is made of. Approvals, claims and members are not part of it."""
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
    """When to tick: the nearest NotBefore of what is not held; the turn of the rest comes with the end of what holds it."""
    waiting = [event for event in scope.events if event.status is Status.SCHEDULED]
    return min((event.not_before for event in not_held(scope, waiting)), default=None)


def next_impact_at(scope: Scope) -> datetime | None:
    """When the next impact can be claimed: because it waits, or because its claim lapses."""
    return min((impact.due_at for impact in scope.impacts if not impact.is_over), default=None)


def due_impacts(scope: Scope, now: datetime) -> tuple[Impact, ...]:
    """The impacts that any worker may claim now."""
    return tuple(impact for impact in scope.impacts if not impact.is_over and impact.due_at <= now)


def settle(draft: Draft) -> None:
    """Note what is approved by now, and start all that may start, in a fixed order."""
    for event in draft.scope.events:
        if event.status is Status.SCHEDULED and not event.is_approved and is_agreed(draft.scope, event):
            draft.put_event(replace(event, is_approved=True))
    ready = [event for event in draft.scope.events if is_ready(draft.scope, event, draft.now)]
    for event in not_held(draft.scope, ready):
        draft.start(event, why_ready(event, draft.now))


def not_held(scope: Scope, events: list[Event]) -> list[Event]:
    """Those that can start together, in the order of their NotBefore.

    A platform event is held while another update domain of its scope is under impact; and behind one that is held, so that
    a domain that is always busy does not keep the others waiting for ever. A user's operation is never held.
    """
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


def is_ready(scope: Scope, event: Event, now: datetime) -> bool:
    """Whether its VMs have had their notice or waived it, or are all down and cannot be asked."""
    if event.status is not Status.SCHEDULED:
        return False
    is_waived = event.is_approved or (nobody_runs(scope) and not event.is_timed)
    return event.not_before <= now or (is_waived and not is_coupled(scope, event, now))


def why_ready(event: Event, now: datetime) -> str:
    if event.not_before <= now:
        return "NotBefore has come"
    return f"approved by {', '.join(event.approvals)}" if event.is_approved else "all instances are down"


def is_agreed(scope: Scope, event: Event) -> bool:
    """Whether the approvals so far are those that the scope's policy asks. Once they were, they are: no word is taken back."""
    running = {vm.name for vm in scope.vms if vm.power is Power.RUNNING}
    votes = len(running.intersection(event.approvals))
    match scope.policy.approval:
        case Approval.ANY:
            return bool(event.approvals)
        case Approval.QUORUM:
            return votes * 2 > len(running)
        case Approval.ALL:
            return votes == len(running) > 0


def nobody_runs(scope: Scope) -> bool:
    """Whether all instances are down and the policy lets events pass then. It holds only as long as it is so."""
    if AutoApprove.ALL_INSTANCES_DOWN not in scope.policy.auto_approve:
        return False
    return all(vm.power is not Power.RUNNING for vm in scope.vms)


def domains_under_impact(scope: Scope) -> set[int]:
    """The update domains with a Started event, or with a silent operation under way."""
    started = {event.id: event.update_domain for event in scope.events if event.status is Status.STARTED}
    silent = {impact.vm for impact in scope.impacts if impact.event_id not in started}
    if not silent:
        return set(started.values())
    return set(started.values()) | {vm.update_domain for vm in scope.vms if vm.name in silent}


def is_coupled(scope: Scope, event: Event, now: datetime) -> bool:
    """Whether an approved deletion waits for the scope's other deletions: all of them are approved or due, or none goes."""
    if event.type is not EventType.TERMINATE or not scope.policy.couple_terminates:
        return False
    others = (other for other in scope.events if other.type is EventType.TERMINATE and other.status is Status.SCHEDULED)
    return any(not other.is_approved and other.not_before > now for other in others) and not nobody_runs(scope)
