"""Progress: what is said of an event that exists, how its impacts are carried out, and that somebody polls."""

from datetime import datetime

from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.change import What
from forewarn.core.draft import Draft
from forewarn.core.event import (
    Event,
    How,
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

FAILURES_MAX = 3
"""How often an impact may fail before it is given up."""
TRIES_MAX = 20
"""How often an impact may be claimed in all, lapsed claims included."""


def approve(draft: Draft, command: ask.Approve) -> None:
    if command.vm and draft.scope.vm(command.vm) is None:
        raise Forbidden(f"{command.vm} is not in {draft.scope.name}", vm=command.vm, scope=draft.scope.name)
    unknown = [event_id for event_id in command.event_ids if not draft.knows(event_id)]
    if unknown:
        raise UnknownEvent(f"there is no event {unknown[0]} for {draft.scope.name}; nothing was approved", event=unknown[0])
    for event_id in command.event_ids:
        event = draft.scope.event(event_id)
        if event is not None and event.status is Status.SCHEDULED:
            approve_by(draft, event, command.vm or "operator", vm=command.vm, is_enough=not command.vm)


def approve_by(draft: Draft, event: Event, by: str, *, vm: str = "", is_enough: bool = True) -> None:
    """Record an approval. `vm` goes into the history: `by` alone does not say whether `operator` is a VM of that name."""
    if by in event.approvals and (event.is_approved or not is_enough):
        return
    approvals = event.approvals if by in event.approvals else (*event.approvals, by)
    draft.put_event(replace(event, approvals=approvals, is_approved=event.is_approved or is_enough))
    draft.tell(What.APPROVED, event_id=event.id, vm=vm, detail=by)


def cancel(draft: Draft, command: ask.Cancel) -> None:
    event = live_event(draft.scope, command.event_id, How.CANCELED)
    if event is None:
        return
    if event.status is Status.STARTED:
        raise WrongStatus(f"{event.id} is Started; only a Scheduled event can be canceled", event=event.id)
    draft.end(event.id, How.CANCELED)


def complete(draft: Draft, command: ask.Complete) -> None:
    event = live_event(draft.scope, command.event_id, How.COMPLETED)
    if event is None:
        return
    if event.status is Status.SCHEDULED:
        raise WrongStatus(f"{event.id} is Scheduled; only a Started event can be completed", event=event.id)
    for impact in draft.scope.impacts:
        if impact.event_id == event.id and not impact.is_over:
            draft.finish(impact)


def claim(draft: Draft, command: ask.Claim) -> None:
    impact = impact_of(draft.scope, command.event_id, command.vm)
    if impact is None or impact.is_over:
        return
    until = draft.now + draft.timing.claim
    if command.tries:
        if (impact.claimed_by, impact.tries) == (command.worker, command.tries):
            draft.put_impact(replace(impact, due_at=until))
    elif impact.due_at > draft.now:
        return
    elif impact.tries >= TRIES_MAX:
        draft.fail(impact, f"given up: claimed {impact.tries} times and never finished")
    else:
        taken = replace(impact, state=ImpactState.CLAIMED, claimed_by=command.worker, tries=impact.tries + 1, due_at=until)
        draft.put_impact(taken)
        draft.tell(What.CLAIMED, event_id=impact.event_id, vm=impact.vm, detail=command.worker)


def finish(draft: Draft, command: ask.Finish) -> None:
    """Only the try that holds the claim counts: a worker that lost it tells us nothing."""
    impact = impact_of(draft.scope, command.event_id, command.vm)
    if impact is None or impact.state is not ImpactState.CLAIMED:
        return
    if (impact.claimed_by, impact.tries) != (command.worker, command.tries):
        return
    if not command.problem:
        draft.finish(impact, command.host, command.detail)
        return
    failed = replace(impact, failures=impact.failures + 1)
    told = "\n".join(filter(None, (command.problem, command.detail)))
    draft.tell(What.IMPACT_FAILED, event_id=impact.event_id, vm=impact.vm, detail=told)
    if failed.failures >= FAILURES_MAX:
        draft.fail(failed, command.problem)
        return
    later = draft.now + draft.timing.retry * 2 ** (failed.failures - 1)
    draft.put_impact(replace(failed, state=ImpactState.WAITING, claimed_by="", due_at=later, detail=command.problem))


def seen(draft: Draft, command: ask.Seen) -> None:
    last = draft.scope.seen_at
    if last is not None and draft.now < last + draft.timing.seen_interval:
        return
    if not is_enabled(draft.scope, draft.now, draft.timing):
        draft.tell(What.ENABLED)
    draft.scope = replace(draft.scope, seen_at=draft.now)


def is_enabled(scope: Scope, now: datetime, timing: Timing) -> bool:
    """Whether somebody polls. Polls are recorded once an interval only, so the lapse is counted generously."""
    return scope.seen_at is not None and now < scope.seen_at + timing.lapse + timing.seen_interval


def live_event(scope: Scope, event_id: str, wanted: How) -> Event | None:
    """The event; None if it has ended already in the way that is wanted."""
    event = scope.event(event_id)
    if event is not None:
        return event
    for ended in scope.ended:
        if ended.id == event_id and ended.how is wanted:
            return None
        if ended.id == event_id:
            raise EventEnded(f"{event_id} is over: {ended.how} at {ended.at.isoformat()}", event=event_id, how=ended.how)
    raise UnknownEvent(f"there is no event {event_id} in {scope.name}", event=event_id, scope=scope.name)


def impact_of(scope: Scope, event_id: str, vm: str) -> Impact | None:
    return next((impact for impact in scope.impacts if (impact.event_id, impact.vm) == (event_id, vm)), None)
