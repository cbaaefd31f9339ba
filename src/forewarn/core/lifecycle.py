"""Progress: what is said of an event that exists, how its impacts are carried out, and that
somebody polls.
"""

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.change import ChangeKind
from forewarn.core.draft import Draft
from forewarn.core.event import (
    Cause,
    EndReason,
    Event,
    EventType,
    Impact,
    ImpactState,
    Status,
)
from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.errors import (
    EventEnded,
    Forbidden,
    UnknownEvent,
    WrongStatus,
)

TRIES_MAX = 20
"""How many claims of an impact may lapse before it is given up.

Failed tries have a limit of their own: the retry window.
"""

RETRY_DOUBLINGS_MAX = 16
"""More would overflow a timedelta long after `retry_max` has cut the pause."""


def approve(draft: Draft, command: ask.Approve) -> None:
    if command.vm and draft.scope.vm(command.vm) is None:
        raise Forbidden(
            f"{command.vm} is not in {draft.scope.name}", vm=command.vm, scope=draft.scope.name
        )
    known = draft.known_ids()
    for event_id in command.event_ids:
        if event_id not in known:
            raise UnknownEvent(
                f"there is no event {event_id} for {draft.scope.name}; nothing was approved",
                event=event_id,
            )
    named = set(command.event_ids)
    scheduled = [
        event
        for event in draft.scope.events
        if event.id in named and event.status is Status.SCHEDULED
    ]
    approve_by(draft, scheduled, command.vm or "operator", vm=command.vm, is_enough=not command.vm)


def approve_by(
    draft: Draft, events: Sequence[Event], by: str, *, vm: str = "", is_enough: bool = True
) -> None:
    """Record an approval.

    `vm` goes into the history: `by` alone does not say whether `operator` is a VM of that name.
    """
    approved = []
    for event in events:
        if by in event.approvals and (event.is_approved or not is_enough):
            continue
        approvals = event.approvals if by in event.approvals else (*event.approvals, by)
        approved.append(
            replace(event, approvals=approvals, is_approved=event.is_approved or is_enough)
        )
        draft.tell(ChangeKind.APPROVED, event_id=event.id, vm=vm, detail=by)
    draft.put_events(approved)


def cancel(draft: Draft, command: ask.Cancel) -> None:
    event = live_event(draft.scope, command.event_id, EndReason.CANCELED)
    if event is None:
        return
    if event.status is Status.STARTED:
        raise WrongStatus(
            f"{event.id} is Started; only a Scheduled event can be canceled", event=event.id
        )
    draft.end(event.id, EndReason.CANCELED)


def complete(draft: Draft, command: ask.Complete) -> None:
    event = live_event(draft.scope, command.event_id, EndReason.COMPLETED)
    if event is None:
        return
    if event.status is Status.SCHEDULED:
        raise WrongStatus(
            f"{event.id} is Scheduled; only a Started event can be completed", event=event.id
        )
    for impact in draft.scope.impacts:
        if impact.event_id == event.id and not impact.is_over:
            draft.finish(impact)


def next_in_line(line: Sequence[Impact]) -> Sequence[Impact]:
    """Of one VM's open impacts those that may be claimed once they are due, in order: a VM has one
    impact at a time.

    A claimed impact keeps the VM, also when its claim has lapsed: it is taken over first. So does
    one that waits for its retry, because nobody knows in what state it left the VM. Only what makes
    such a retry pointless passes it.
    """
    for impact in line:
        if impact.state is ImpactState.CLAIMED:
            return (impact,)
    return (line[0], *(impact for impact in line[1:] if is_final(impact)))


def is_final(impact: Impact) -> bool:
    """Whether the VM is gone, or starts afresh elsewhere, so that what was to be done to it before
    does not matter.
    """
    return impact.cause is Cause.FAILED or impact.type in (EventType.PREEMPT, EventType.TERMINATE)


def due_in_line(line: Sequence[Impact], now: datetime) -> Impact | None:
    """The impact of a VM that any worker may claim now."""
    return next((impact for impact in next_in_line(line) if impact.due_at <= now), None)


def claim(draft: Draft, command: ask.Claim) -> None:
    impact = draft.impact(command.event_id, command.vm)
    if impact is None or impact.is_over:
        return
    line = [other for other in draft.impacts_of(impact.vm) if not other.is_over]
    until = draft.now + draft.timing.claim
    if command.tries:
        if (impact.claimed_by, impact.tries) == (command.worker, command.tries):
            draft.put_impact(replace(impact, due_at=until))
    elif due_in_line(line, draft.now) is not impact:
        return
    elif impact.tries - impact.failures >= TRIES_MAX:
        draft.fail(
            impact, f"given up: claimed {impact.tries - impact.failures} times and never finished"
        )
    else:
        taken = replace(
            impact,
            state=ImpactState.CLAIMED,
            claimed_by=command.worker,
            tries=impact.tries + 1,
            due_at=until,
        )
        draft.put_impact(taken)
        draft.tell(
            ChangeKind.CLAIMED, event_id=impact.event_id, vm=impact.vm, detail=command.worker
        )


def lapse(draft: Draft, command: ask.Lapse) -> None:
    """The impact keeps its try and its worker, who may renew the claim if it is alive after all."""
    impact = impact_of(draft.scope, command.event_id, command.vm)
    if impact is not None and not impact.is_over and impact.due_at == command.due_at > draft.now:
        draft.put_impact(replace(impact, due_at=draft.now))


def finish(draft: Draft, command: ask.Finish) -> None:
    """Only the try that holds the claim counts: a worker that lost it tells us nothing."""
    impact = draft.impact(command.event_id, command.vm)
    if impact is None or impact.state is not ImpactState.CLAIMED:
        return
    if (impact.claimed_by, impact.tries) != (command.worker, command.tries):
        return
    if not command.problem:
        draft.finish(impact, command.host, command.detail)
        return
    failed = replace(
        impact, failures=impact.failures + 1, first_failed_at=impact.first_failed_at or draft.now
    )
    told = "\n".join(filter(None, (command.problem, command.detail)))
    draft.tell(ChangeKind.IMPACT_FAILED, event_id=impact.event_id, vm=impact.vm, detail=told)
    later = retry_at(failed, draft.now, draft.timing)
    if later is None:
        draft.fail(failed, command.problem)
        return
    draft.put_impact(
        replace(
            failed, state=ImpactState.WAITING, claimed_by="", due_at=later, detail=command.problem
        )
    )


def retry_at(impact: Impact, now: datetime, timing: Timing) -> datetime | None:
    """When a failed impact is tried again, the last time at the end of its retry window;

    None if that is over.
    """
    window_end = (impact.first_failed_at or now) + timing.retry_window
    if now >= window_end:
        return None
    doublings = min(impact.failures - 1, RETRY_DOUBLINGS_MAX)
    return min(now + min(timing.retry * (1 << doublings), timing.retry_max), window_end)


def seen(draft: Draft, command: ask.Seen) -> None:
    last = draft.scope.seen_at
    if last is not None and draft.now < last + draft.timing.seen_interval:
        return
    if not is_enabled(draft.scope, draft.now, draft.timing):
        draft.tell(ChangeKind.ENABLED)
    draft.scope = replace(draft.scope, seen_at=draft.now)


def is_enabled(scope: Scope, now: datetime, timing: Timing) -> bool:
    """Whether somebody polls.

    Polls are recorded once an interval only, so the lapse is counted generously.
    """
    return scope.seen_at is not None and now < scope.seen_at + timing.lapse + timing.seen_interval


def live_event(scope: Scope, event_id: str, wanted: EndReason) -> Event | None:
    """The event; None if it has ended already in the way that is wanted."""
    event = scope.event(event_id)
    if event is not None:
        return event
    for ended in scope.ended:
        if ended.id == event_id and ended.how is wanted:
            return None
        if ended.id == event_id:
            raise EventEnded(
                f"{event_id} is over: {ended.how} at {ended.at.isoformat()}",
                event=event_id,
                how=ended.how,
            )
    raise UnknownEvent(
        f"there is no event {event_id} in {scope.name}", event=event_id, scope=scope.name
    )


def impact_of(scope: Scope, event_id: str, vm: str) -> Impact | None:
    for impact in scope.impacts:
        if impact.vm == vm and impact.event_id == event_id:
            return impact
    return None
