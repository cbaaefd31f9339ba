"""What happens to an event after it is created: approve, cancel, complete, and carry out its
impacts.

Also whether a scope is enabled, that is, polled by its VMs. The states are drawn in `machine.py`.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import (
    Abandon,
    Approve,
    Back,
    Cancel,
    Claim,
    Complete,
    Finish,
    Release,
    Seen,
    Tick,
)
from forewarn.core.draft import Draft
from forewarn.core.event import (
    Cause,
    EndReason,
    Event,
    EventType,
    Impact,
    ImpactState,
    Status,
    is_move,
)
from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.errors import EventEnded, Forbidden, UnknownEvent, WrongStatus

TRIES_MAX = 20
"""How many servers may be lost with an impact: it may be the cause. Failures have their own limit,
the retry window, and an impact waits for its host without a limit.
"""

WAIT_MAX = Timing().retry_max + timedelta(seconds=5)
"""No attempt is set further ahead than this, even by a clock that differs by a few seconds."""

RETRY_DOUBLINGS_MAX = 16
"""More would overflow a timedelta long after `retry_max` has capped the delay."""

PROBLEM_BYTES_MAX = 100

RESTARTING = (EventType.REBOOT, EventType.REDEPLOY)
"""The types whose impact may restart a VM. After the others it runs on, or not at all."""


# --- events


def approve(draft: Draft, command: Approve) -> None:
    if command.vm and command.vm not in draft.vms:
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
    ids = set(command.event_ids)
    events = [
        event
        for event in draft.events.values()
        if event.id in ids and event.status is Status.SCHEDULED
    ]
    by = command.vm or "operator"
    draft.approve(events, by, vm=command.vm, is_sufficient=not command.vm)


def cancel(draft: Draft, command: Cancel) -> None:
    if not has_ended(draft, command.event_id, EndReason.CANCELED):
        event = find_event(draft, command.event_id, Status.SCHEDULED, "canceled")
        draft.end(event.id, EndReason.CANCELED)


def complete(draft: Draft, command: Complete) -> None:
    if has_ended(draft, command.event_id, EndReason.COMPLETED):
        return
    event = find_event(draft, command.event_id, Status.STARTED, "completed")
    for impact in list(draft.impacts.values()):
        if impact.event_id == event.id and not impact.is_over:
            draft.finish(impact)


def has_ended(draft: Draft, event_id: str, how: EndReason) -> bool:
    return any(ended.id == event_id and ended.how is how for ended in draft.scope.ended)


def find_event(draft: Draft, event_id: str, status: Status, verb: str) -> Event:
    """The event that is to be canceled, completed or extended; it must have this status."""
    event = draft.events.get(event_id)
    if event is not None and event.status is not status:
        raise WrongStatus(
            f"{event_id} is {event.status}; only a {status} event can be {verb}", event=event_id
        )
    if event is not None:
        return event
    for ended in draft.scope.ended:
        if ended.id == event_id:
            raise EventEnded(
                f"{event_id} is over: {ended.how} at {ended.at.isoformat()}",
                event=event_id,
                how=ended.how,
            )
    name = draft.scope.name
    raise UnknownEvent(f"there is no event {event_id} in {name}", event=event_id, scope=name)


# --- impacts


def claimable(impacts: Sequence[Impact]) -> Sequence[Impact]:
    """Of one VM's open impacts, in order, those that may be claimed once they are due.

    A VM has one impact at a time. A claimed impact blocks the others, even if it was released:
    then it is taken over first. So does an impact that waits for its retry, because it may have
    left the VM in any state, and one whose VM boots. Only an impact that makes the retry or the
    wait pointless may overtake it.
    """
    for impact in impacts:
        if impact.state is ImpactState.CLAIMED:
            return (impact,)
    waiting = [impact for impact in impacts if impact.state is ImpactState.WAITING]
    first = waiting[:1] if len(waiting) == len(impacts) else []
    return [*first, *(impact for impact in waiting[len(first) :] if supersedes(impact))]


def supersedes(impact: Impact) -> bool:
    """Whether the VM is gone or restarts elsewhere, so that earlier impacts no longer matter."""
    return impact.cause is Cause.FAILED or impact.type in (EventType.PREEMPT, EventType.TERMINATE)


def next_due(impacts: Sequence[Impact], now: datetime) -> Impact | None:
    """Of one VM's open impacts the one that any worker may claim now."""
    return next((impact for impact in claimable(impacts) if is_due(impact, now)), None)


def is_due(impact: Impact, now: datetime) -> bool:
    """Whether a worker may claim the impact. A held one is released first."""
    return not impact.is_held and (impact.due_at <= now or is_misdated(impact, now))


def is_misdated(impact: Impact, now: datetime) -> bool:
    """Whether only a server whose clock was wrong can have set the time of the next attempt.

    Waiting for it could take a day.
    """
    return impact.due_at > now + WAIT_MAX


def claim(draft: Draft, command: Claim) -> None:
    impact = draft.impacts.get((command.event_id, command.vm))
    if impact is None or impact.is_over:
        return
    if any(dropped.vm == impact.vm for dropped in draft.scope.dropped):
        return
    others = [other for other in draft.impacts_of(impact.vm) if not other.is_over]
    if next_due(others, draft.now) is not impact or command.tries not in (None, impact.tries):
        return
    if impact.lost >= TRIES_MAX:
        draft.fail(impact, f"abandoned after {impact.lost} claims that never finished")
        return
    if impact.state is ImpactState.CLAIMED:  # it was released: its host was lost, or its server
        draft.note_try(impact)
    draft.put_impact(
        replace(
            impact,
            state=ImpactState.CLAIMED,
            claimed_by=command.worker,
            tries=impact.tries + 1,
            due_at=draft.now,
            stop_seconds=command.stop_seconds,
            host=command.host,
        )
    )
    event = draft.events.get(impact.event_id, impact)
    draft.record(ChangeKind.CLAIMED, event, vm=impact.vm, detail=command.worker)


def release(draft: Draft, command: Release) -> None:
    """The impacts stay claimed, by no worker: they block the VM until they are taken over."""
    draft.forget_dropped(command.worker, command.event_id, command.vm, command.tries)
    one = (command.event_id, command.vm) if command.vm else None
    due_at = draft.now + draft.timing.retry_max if command.is_bug else draft.now
    for key, impact in list(draft.impacts.items()):
        is_meant = one in (None, key) and command.tries in (None, impact.tries)
        if impact.is_held and impact.claimed_by == command.worker and is_meant:
            lost = impact.lost + (one is None or command.is_bug)
            draft.put_impact(replace(impact, claimed_by="", due_at=due_at, lost=lost))


def finish(draft: Draft, command: Finish) -> None:
    """Only the attempt that holds the claim counts; the result of a lost claim is ignored."""
    draft.forget_dropped(command.worker, command.event_id, command.vm, command.tries)
    impact = draft.impacts.get((command.event_id, command.vm))
    if impact is None or impact.state is not ImpactState.CLAIMED:
        return
    if (impact.claimed_by, impact.tries) != (command.worker, command.tries):
        return
    impact = replace(impact, claimed_by="")
    if not command.problem:
        is_over = command.is_back or not must_come_back(draft, impact)
        end = draft.finish if is_over else draft.boot
        end(impact, command.host, command.detail)
        if is_move(impact.type, impact.cause):
            draft.forget_tries(impact.vm)
        return
    draft.note_try(impact)
    impact = replace(
        impact, failures=impact.failures + 1, first_failed_at=impact.first_failed_at or draft.now
    )
    event = draft.events.get(impact.event_id, impact)
    detail = "\n".join(filter(None, (command.problem, command.detail)))
    draft.record(ChangeKind.IMPACT_FAILED, event, vm=impact.vm, detail=detail)
    problem = shorten(command.problem)
    due_at = None if command.is_final else retry_at(impact, draft.now, draft.timing)
    if due_at is None:
        draft.fail(impact, problem)
        return
    waiting = ImpactState.WAITING
    draft.put_impact(replace(impact, state=waiting, claimed_by="", due_at=due_at, detail=problem))


def must_come_back(draft: Draft, impact: Impact) -> bool:
    """Whether the impact lasts until its VM, which was restarted, is back.

    Where no VM polls nobody would notice that it is.
    """
    return (
        impact.type in RESTARTING
        and impact.vm in draft.vms
        and draft.timing.back_limit > timedelta(0)
        and is_enabled(draft.scope, draft.now, draft.timing)
    )


def abandon(draft: Draft, command: Abandon) -> None:
    for impact in list(draft.impacts.values()):
        vm = draft.vms.get(impact.vm)
        if vm is not None and vm.host == command.host and not impact.is_over:
            event = draft.events.get(impact.event_id, impact)
            draft.record(ChangeKind.IMPACT_FAILED, event, vm=vm.name, detail=command.problem)
            draft.fail(impact, shorten(command.problem))


def back(draft: Draft, command: Back) -> None:
    impact = draft.impacts.get((command.event_id, command.vm))
    if impact is not None and impact.state is ImpactState.BOOTING:
        draft.finish(impact, detail=command.detail)


def tick(draft: Draft, command: Tick) -> None:
    """End the wait for VMs that have not come back in time. `settle` starts what is due."""
    draft.due_until = min(draft.now, command.shown_at or draft.now)
    draft.may_be_due = command.covers
    seconds = draft.timing.back_limit.total_seconds()
    for impact in list(draft.impacts.values()):
        if impact.state is ImpactState.BOOTING and impact.due_at <= draft.now:
            draft.finish(impact, detail=f"not back after {seconds:g} seconds")


def shorten(problem: str) -> str:
    """The beginning of a problem, as the impact keeps it; the history has all of it.

    The record of a scope has a limit in bytes, and up to 1,000 impacts. A character that is not
    printable takes six bytes in JSON, a quote two.
    """
    printable = "".join(char if char.isprintable() else " " for char in problem)
    text = printable.encode()[:PROBLEM_BYTES_MAX].decode(errors="ignore")
    while len(msgspec.json.encode(text)) > PROBLEM_BYTES_MAX + 2:  # its quotes
        text = text[:-1]
    return text


def retry_at(impact: Impact, now: datetime, timing: Timing) -> datetime | None:
    """When to retry a failed impact; the last retry is at the end of the window, then None."""
    window_end = (impact.first_failed_at or now) + timing.retry_window
    if now >= window_end:
        return None
    doublings = min(impact.failures - 1, RETRY_DOUBLINGS_MAX)
    return min(now + min(timing.retry * (1 << doublings), timing.retry_max), window_end)


# --- polls


def seen(draft: Draft, command: Seen) -> None:
    last = draft.scope.seen_at
    if last is not None and draft.now < last + draft.timing.seen_interval:
        return
    if not is_enabled(draft.scope, draft.now, draft.timing):
        draft.changes.append(Change(ChangeKind.ENABLED))
    draft.scope = replace(draft.scope, seen_at=draft.now)


def is_enabled(scope: Scope, now: datetime, timing: Timing) -> bool:
    """Whether a VM polls. Polls are recorded once per interval, so one interval is added."""
    if scope.seen_at is None:
        return False
    return now < scope.seen_at + timing.enabled_for + timing.seen_interval
