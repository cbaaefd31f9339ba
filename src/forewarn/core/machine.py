"""The state machine of a scope: `decide(scope, command, now, timing) -> Outcome`. Pure.

States of an event:

                          approved as the policy requires, or NotBefore reached by a
                          Tick, and no other update domain under impact   all impacts over
    (command) --> Scheduled ------------------------------------> Started -----------> gone
                     |                                                ^
                     | canceled, or no VM left in Resources           | failed hardware
                     +------> gone                                 (command)

States of an impact, one for each VM of a Started event or of a silent operation:

              claimed by a worker              finished
    waiting ----------------------> claimed ------------------------------> done
       ^                             | | ^ |                                  ^
       |                             | | | | finished, and the VM boots       | it is back, or its
       |                             | | | +-----------------------> booting -+ time is over
       | failed, to be retried later | | |
       +-----------------------------+ +-+ released: another worker claims it
                                     |
                                     | failed at the end of the retry window, or TRIES_MAX releases
                                     +-------------------------------------> failed

A VM has one impact at a time, in the order of creation (`lifecycle.claimable`). While it boots, it
is still under impact, so the event stays in the document; but no worker holds a claim.

An impact may end while a worker holds it: an operator completes the event, or the VM leaves. Then
the worker cancels its platform call, which may act for a while. Until the worker has released the
claim, or has lost its lease, the impact is in `Scope.dropped`, and no other of its VM is claimed in
this scope.

Every command takes the same three steps: apply its own rule; `settle`, that is, start everything
that may start now; increment the incarnation if the document has changed. So one incarnation always
means one document. Only a Tick makes an event due, because its sender knows whether the VMs could
read the event until then (`readability.py`). Every command starts what is approved or was found due
before. A command that is already true changes nothing and is not an error.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from forewarn.core import command as commands
from forewarn.core import lifecycle, membership, readability, scheduling
from forewarn.core.change import Change
from forewarn.core.draft import Draft
from forewarn.core.event import Event, EventType, Impact, ImpactState, NoEvent, Source, Status
from forewarn.core.fleet import Approval, AutoApprove, Scope, ScopeKind
from forewarn.core.timing import Timing

RULES: dict[type[commands.Command], Callable[[Draft, Any], None]] = {
    commands.Restart: scheduling.operate,
    commands.Redeploy: scheduling.operate,
    commands.Delete: scheduling.operate,
    commands.Evict: scheduling.evict,
    commands.Maintain: scheduling.maintain,
    commands.Degrade: scheduling.degrade,
    commands.Fail: scheduling.fail,
    commands.Extend: scheduling.extend,
    commands.Approve: lifecycle.approve,
    commands.Cancel: lifecycle.cancel,
    commands.Complete: lifecycle.complete,
    commands.Claim: lifecycle.claim,
    commands.Release: lifecycle.release,
    commands.Finish: lifecycle.finish,
    commands.Abandon: lifecycle.abandon,
    commands.Back: lifecycle.back,
    commands.Seen: lifecycle.seen,
    commands.Tick: lifecycle.tick,
    commands.NoteUnread: readability.note_unread,
    commands.SetMembers: membership.set_members,
    commands.UpdateMembers: membership.update_members,
    commands.SetPower: membership.set_power,
    commands.Retire: membership.retire,
}


class Outcome(msgspec.Struct, frozen=True):
    """The new scope and the changes. `is_gone`: the scope no longer exists.

    `no_event`: why an operation on a VM was not announced.
    """

    scope: Scope
    changes: tuple[Change, ...]
    is_gone: bool = False
    no_event: NoEvent | None = None


class Group:
    """What commands share that are committed together.

    `shown` is the scope before the first command. Guests see it until the commit, so the
    incarnation counts the difference from it, not the steps in between.
    """

    def __init__(self, shown: Scope) -> None:
        self.shown = shown
        self._draft: Draft | None = None

    def take_draft(self, scope: Scope) -> Draft:
        """The draft of the command before, unless that one was refused."""
        draft, self._draft = self._draft, None
        return draft if draft is not None and draft.scope is scope else Draft(scope)

    def keep_draft(self, draft: Draft) -> None:
        self._draft = draft


def decide(
    scope: Scope,
    command: commands.Command,
    now: datetime,
    timing: Timing,
    group: Group | None = None,
) -> Outcome:
    """Apply a command. Raises an Error if the rules refuse it; then nothing has changed."""
    group = group or Group(scope)
    draft = group.take_draft(scope)
    draft.begin(now, timing)
    RULES[type(command)](draft, command)
    settle(draft)
    after = draft.build()
    goes_with_last_vm = after.kind is ScopeKind.VM or after.is_reported
    if goes_with_last_vm and scope.vms and not after.vms:
        draft.is_gone = True
    if after.events != scope.events:
        has_changed = visible(after) != visible(group.shown)
        draft.scope = replace(after, incarnation=group.shown.incarnation + has_changed)
    group.keep_draft(draft)
    return Outcome(draft.scope, tuple(draft.changes), draft.is_gone, draft.no_event)


def visible(scope: Scope) -> tuple[object, ...]:
    """Everything that the document of any api-version contains."""
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


# --- which events start


def settle(draft: Draft) -> None:
    """Mark the events that are approved or due by now, and start all that may start, in order."""
    if all(event.status is Status.STARTED for event in draft.events.values()):
        return
    for event in newly_approved(draft.build()):
        draft.put_event(replace(event, is_approved=True))
    for event in newly_due(draft.build(), draft.due_until):
        if draft.may_be_due(event.id):
            draft.put_event(replace(event, has_had_notice=True))
    scope = draft.build()
    for event in select_startable(scope, ready_events(scope)):
        draft.start(event, start_reason(event))


def newly_approved(scope: Scope) -> list[Event]:
    """The events whose approvals now satisfy the policy. An approval is never withdrawn."""
    open_events = [
        event
        for event in scope.events
        if event.status is Status.SCHEDULED and event.approvals and not event.is_approved
    ]
    if not open_events:
        return []
    running = {vm.name for vm in scope.vms if not vm.power.is_off}
    return [event for event in open_events if is_approved(scope.policy.approval, running, event)]


def is_approved(approval: Approval, running: set[str], event: Event) -> bool:
    votes = len(running.intersection(event.approvals))
    match approval:
        case Approval.ANY:
            return bool(event.approvals)
        case Approval.QUORUM:
            return votes * 2 > len(running)
        case Approval.ALL:
            return votes == len(running) > 0


def newly_due(scope: Scope, due_until: datetime | None) -> list[Event]:
    """The events whose NotBefore a Tick finds reached, and whose VMs could read them until then.

    An event that another update domain holds is marked too, so that it starts in the commit that
    ends the other: between two commits, the scope would look as if nothing were under impact.
    """
    if due_until is None:
        return []
    return [event for event in unnoticed_events(scope) if event.not_before <= due_until]


def unnoticed_events(scope: Scope) -> list[Event]:
    """The Scheduled events that a Tick at their NotBefore is to mark."""
    return [
        event
        for event in scope.events
        if event.status is Status.SCHEDULED
        and not event.has_had_notice
        and event.unreadable_since is None
    ]


def ready_events(scope: Scope) -> list[Event]:
    """The events whose VMs have had their notice, have approved, or are all down."""
    scheduled = [event for event in scope.events if event.status is Status.SCHEDULED]
    if not scheduled:
        return []
    is_down = are_all_down(scope)
    must_wait = not is_down and are_deletions_held(scope, scheduled)
    return [
        event
        for event in scheduled
        if event.has_had_notice
        or (
            (event.is_approved or (is_down and not event.is_timed))
            and not (must_wait and event.type is EventType.TERMINATE)
        )
    ]


def are_all_down(scope: Scope) -> bool:
    """Whether all instances are down and the policy lets events start then."""
    if AutoApprove.ALL_INSTANCES_DOWN not in scope.policy.auto_approve:
        return False
    return all(vm.power.is_off for vm in scope.vms)


def are_deletions_held(scope: Scope, scheduled: list[Event]) -> bool:
    """Whether approved deletions wait until all deletions of the scope are approved or due."""
    if not scope.policy.couple_terminates:
        return False
    deletions = (event for event in scheduled if event.type is EventType.TERMINATE)
    return any(not event.is_approved and not event.has_had_notice for event in deletions)


def start_reason(event: Event) -> str:
    if event.has_had_notice:
        return "NotBefore has been reached"
    if event.is_approved:
        return f"approved by {', '.join(event.approvals)}"
    return "all instances are down"


def select_startable(scope: Scope, events: list[Event]) -> list[Event]:
    """Those of the events that can start together, in the order of NotBefore.

    A platform event is held while another update domain of its scope is under impact. It also
    waits for an earlier one that is held, so that a busy domain cannot starve the others. A user's
    operation is never held.
    """
    if not events:
        return []
    under_impact = domains_under_impact(scope)
    startable, is_held = [], False
    for event in sorted(events, key=lambda event: (event.not_before, event.id)):
        if event.source is Source.PLATFORM:
            is_held = is_held or bool(under_impact - {event.update_domain})
            if is_held:
                continue
        startable.append(event)
        under_impact.add(event.update_domain)
    return startable


def domains_under_impact(scope: Scope) -> set[int]:
    """The update domains with a Started event or a silent operation."""
    started = {
        event.id: event.update_domain for event in scope.events if event.status is Status.STARTED
    }
    silent = {impact.vm for impact in scope.impacts if impact.event_id not in started}
    if not silent:
        return set(started.values())
    return set(started.values()) | {vm.update_domain for vm in scope.vms if vm.name in silent}


# --- what a worker has to do, and when


def next_deadline(scope: Scope) -> datetime | None:
    """When to tick: the nearest NotBefore, or the end of the wait for a VM that boots.

    An event that cannot be read waits until it can, and holds no other.
    """
    times = start_times(scope) + [impact.due_at for impact in booting_impacts(scope)]
    return min(times, default=None)


def start_times(scope: Scope) -> list[datetime]:
    """NotBefore of the Scheduled events that no Tick has found due."""
    return [event.not_before for event in unnoticed_events(scope)]


def next_impact_at(
    scope: Scope, is_handled: Callable[[Impact], bool] = lambda impact: True
) -> datetime | None:
    """When the next impact can be claimed, of those that the worker can carry out."""
    claimable = (impact for open_ in open_impacts(scope) for impact in lifecycle.claimable(open_))
    free = (impact for impact in claimable if not impact.is_held and is_handled(impact))
    return min((impact.due_at for impact in free), default=None)


def due_impacts(scope: Scope, now: datetime) -> tuple[Impact, ...]:
    """The impacts that any worker may claim now, at most one for each VM."""
    due = (lifecycle.next_due(open_, now) for open_ in open_impacts(scope))
    return tuple(impact for impact in due if impact is not None)


def booting_impacts(scope: Scope) -> list[Impact]:
    """The impacts that wait until their VM is back."""
    return [impact for impact in scope.impacts if impact.state is ImpactState.BOOTING]


def open_impacts(scope: Scope) -> Iterable[list[Impact]]:
    """The impacts that are not over, by VM, in order of creation.

    Without those of a VM that a platform may act on for an impact that was dropped.
    """
    by_vm: dict[str, list[Impact]] = {}
    acted_on = {impact.vm for impact in scope.dropped}
    for impact in scope.impacts:
        if not impact.is_over and impact.vm not in acted_on:
            by_vm.setdefault(impact.vm, []).append(impact)
    return by_vm.values()
