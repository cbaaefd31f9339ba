"""Invariants of a scope. The property tests and the simulation check them after every step."""

from datetime import datetime, timedelta
from itertools import pairwise

from msgspec.structs import replace

from forewarn.core.command import Back, Command, Complete, Finish, Retire, SetMembers, Tick
from forewarn.core.event import Cause, Event, EventType, Impact, ImpactState, Source, Status
from forewarn.core.fleet import Approval, AutoApprove, Power, Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.machine import due_impacts
from forewarn.core.timing import Timing
from forewarn.wire.document import body
from forewarn.wire.versions import VERSIONS


class Broken(AssertionError):
    """An invariant that does not hold."""


def must(holds: object, rule: str, *facts: object) -> None:
    if not holds:
        raise Broken(f"{rule}: {facts}")


def pages(scope: Scope) -> tuple[bytes, ...]:
    return tuple(body(scope, version) for version in VERSIONS)


def without_incarnation(page: bytes) -> bytes:
    return page.split(b",", 1)[1]


def check_step(before: Scope, after: Scope, now: datetime) -> None:
    """Invariants of the step from one committed scope to the next."""
    _check_starts(before, after, now)
    check_claims(before, after, now)
    old = {event.id: event for event in before.events}
    for event in after.events:
        if event.id in old:
            was = old[event.id]
            must(
                not (was.status is Status.STARTED and event.status is Status.SCHEDULED),
                "a Started event is never Scheduled again",
                was,
                event,
            )
            must(was.not_before <= event.not_before, "NotBefore only moves later", was, event)
            is_extendable = was.status is Status.SCHEDULED and (
                event.type is not EventType.TERMINATE or event.gaps != was.gaps
            )
            must(
                was.not_before == event.not_before or is_extendable,
                "a Terminate is postponed only if it could not be read",
                was,
                event,
            )
            _check_correction(was, event)
            must(set(event.resources) <= set(was.resources), "Resources only shrink", was, event)
            must(
                set(was.approvals) <= set(event.approvals), "no approval is taken back", was, event
            )
            must(
                was.is_approved <= event.is_approved, "is_approved is never taken back", was, event
            )
            was_approved = was.is_approved or could_be_approved(before, after, event)
            must(not event.is_approved or was_approved, "is_approved as the policy requires", event)
        else:
            must(
                event.id not in {ended.id for ended in before.ended},
                "an ended event stays ended",
                event,
            )
    has_changed = [without_incarnation(page) for page in pages(before)] != [
        without_incarnation(page) for page in pages(after)
    ]
    must(
        after.incarnation == before.incarnation + has_changed,
        "the incarnation counts visible changes and nothing else",
        before.incarnation,
        after.incarnation,
        has_changed,
    )
    if before.incarnation == after.incarnation:
        must(pages(before) == pages(after), "same incarnation, same bytes")


def _check_correction(was: Event, event: Event) -> None:
    """A gap moves NotBefore by its length, once. An operator may postpone it further."""
    if event.gaps == was.gaps or event.is_timed:
        return
    missed = sum((gap.until - gap.since for gap in event.gaps), event.unread_total)
    latest = max(was.not_before, event.created_at + event.notice + missed)
    must(event.not_before <= latest + timedelta(seconds=1), "each gap is made up once", was, event)


def _check_starts(before: Scope, after: Scope, now: datetime) -> None:
    old = {event.id: event for event in before.events}
    for event in after.events:
        was = old.get(event.id)
        was_due = was is not None and was.has_had_notice
        is_due = event.not_before <= now and event.unreadable_since is None
        must(
            not event.has_had_notice or was_due or is_due,
            "an event is due at NotBefore if it can be read then",
            event,
            now,
        )
        if event.status is not Status.STARTED or (was is not None and was.status is Status.STARTED):
            continue
        was_approved = was is not None and was.is_approved
        may = (
            event.cause is Cause.FAILED
            or was_due  # by the clock of another server
            or is_due
            or was_approved
            or could_be_approved(before, after, event)
        )
        must(may, "nothing starts before NotBefore without approval", event, now)
        is_early = was_approved or could_be_approved(before, after, event)
        must(
            is_early or was_due or readable_seconds(event, now) >= event.notice.total_seconds(),
            "an event starts by time only if it could be read for its minimum notice",
            event,
            now,
        )
        if (
            after.policy.couple_terminates
            and event.type is EventType.TERMINATE
            and event.not_before > now
        ):
            left = [
                other
                for other in after.events
                if other.type is EventType.TERMINATE and other.status is Status.SCHEDULED
            ]
            waits = [  # one that was announced in the same commit may have come afterwards
                other
                for other in left
                if not other.is_approved
                and other.not_before > now
                and not is_all_down(after)
                and (event.started_at is None or other.created_at < event.started_at)
            ]
            must(not waits, "coupled deletions start together", event, waits)


def could_be_approved(before: Scope, after: Scope, event: Event) -> bool:
    """Whether the policy was satisfied at some time within a step.

    A commit may contain several commands, and one of them may have started or stopped a VM after
    the event was approved.
    """
    old = {vm.name: vm for vm in before.vms}
    lowest = tuple(
        was if (was := old.get(vm.name)) is not None and was.power is not Power.RUNNING else vm
        for vm in after.vms
    )
    return any(
        is_approved_by_policy(replace(after, vms=vms), event)
        for vms in (after.vms, before.vms, lowest)
    )


def is_approved_by_policy(scope: Scope, event: Event) -> bool:
    """Deliberately independent of the state machine: the policy, word by word."""
    policy = scope.policy
    if "operator" in event.approvals or "policy" in event.approvals:
        return True
    running = [vm.name for vm in scope.vms if vm.power is Power.RUNNING]
    if not running:
        all_down = AutoApprove.ALL_INSTANCES_DOWN in policy.auto_approve and not event.is_timed
        return all_down or bool(event.approvals)
    agreed = [name for name in running if name in event.approvals]
    return {
        Approval.ANY: bool(event.approvals),
        Approval.QUORUM: len(agreed) > len(running) / 2,
        Approval.ALL: len(agreed) == len(running),
    }[policy.approval]


def check_state(scope: Scope, now: datetime, *, is_ticked: bool) -> None:
    """Invariants of a scope at rest. `is_ticked`: what is due by time has started, too."""
    must(scope.incarnation >= 1, "the incarnation is never 0")
    domains = {vm.name: vm.update_domain for vm in scope.vms}
    for event in scope.events:
        must(event.resources, "an event has resources", event)
        must(set(event.resources) <= domains.keys(), "Resources are members", event, domains)
        must(
            len({domains[name] for name in event.resources}) == 1,
            "one update domain per event",
            event,
            domains,
        )
        must(event.id == event.id.upper(), "ids are upper case", event)
        must(
            event.not_before.microsecond == 0 or event.cause is Cause.FAILED,
            "NotBefore is a whole second",
            event,
        )
        impacts = [impact for impact in scope.impacts if impact.event_id == event.id]
        wanted = set(event.resources) if event.status is Status.STARTED else set()
        must(
            {impact.vm for impact in impacts} == wanted,
            "a Started event has one impact per resource",
            event,
            impacts,
        )
        is_open = any(not impact.is_over for impact in impacts)
        must(
            event.status is Status.SCHEDULED or is_open, "an event ends with its last impact", event
        )
    overdue = overdue_events(scope, now if is_ticked else None)
    must(not overdue, "every event that may start has started", overdue)
    must(len({event.id for event in scope.events}) == len(scope.events), "ids are unique")
    must(len(scope.ended) <= 1000, "ended events are bounded")
    claimed = [impact.vm for impact in scope.impacts if impact.claimed_by]
    must(len(set(claimed)) == len(claimed), "a VM has at most one impact at a time", claimed)
    _check_duplicates(scope)


def _check_duplicates(scope: Scope) -> None:
    """No VM has two events of one kind."""
    events = [
        (name, event.type, event.source, event.cause)
        for event in scope.events
        for name in event.resources
    ]
    must(len(set(events)) == len(events), "a VM has one event of a kind", events)


def overdue_events(scope: Scope, now: datetime | None) -> list[Event]:
    """The events that should have started by now. Deliberately independent of the machine.

    Without `now`, those that an approval or an earlier Tick should have started.
    """
    vms = {vm.name: vm for vm in scope.vms}
    started = [event for event in scope.events if event.status is Status.STARTED]
    silent = [impact.vm for impact in scope.impacts if scope.event(impact.event_id) is None]
    busy = {event.update_domain for event in started} | {vms[name].update_domain for name in silent}
    due = [
        event
        for event in scope.events
        if event.status is Status.SCHEDULED and may_start(scope, event, now)
    ]
    platform = sorted(
        (event for event in due if event.source is Source.PLATFORM),
        key=lambda event: (event.not_before, event.id),
    )
    first = [event for event in platform[:1] if busy <= {event.update_domain}]
    return [event for event in due if event.source is Source.USER] + first


def may_start(scope: Scope, event: Event, now: datetime | None) -> bool:
    if has_had_notice(event, now):
        return True
    all_down = all(vm.power is not Power.RUNNING for vm in scope.vms) and not event.is_timed
    is_waived = event.is_approved or (
        all_down and AutoApprove.ALL_INSTANCES_DOWN in scope.policy.auto_approve
    )
    if not is_waived or not (scope.policy.couple_terminates and event.type is EventType.TERMINATE):
        return is_waived
    others = [
        other
        for other in scope.events
        if other.type is EventType.TERMINATE and other.status is Status.SCHEDULED
    ]
    return all_down or all(other.is_approved or has_had_notice(other, now) for other in others)


def has_had_notice(event: Event, now: datetime | None) -> bool:
    is_due = now is not None and event.unreadable_since is None and event.not_before <= now
    return is_due or event.has_had_notice


def readable_seconds(event: Event, until: datetime) -> float:
    """For how long an event could be read, by the gaps that it has. Deliberately independent of
    the machine: it sweeps over the edges of all gaps. The oldest of many gaps are only a total.
    """
    times = {event.created_at, until, *(time for gap in event.gaps for time in gap)}
    edges = sorted(time for time in times if event.created_at <= time <= until)
    readable = sum(
        (after - before).total_seconds()
        for before, after in pairwise(edges)
        if not any(gap.since <= before < gap.until for gap in event.gaps)
    )
    return readable - event.unread_total.total_seconds()


def is_all_down(scope: Scope) -> bool:
    """All instances are down, and the policy lets events start then."""
    is_allowed = AutoApprove.ALL_INSTANCES_DOWN in scope.policy.auto_approve
    return is_allowed and all(vm.power is not Power.RUNNING for vm in scope.vms)


def check_claims(before: Scope, after: Scope, now: datetime) -> None:
    """A claim belongs to one worker and one attempt until it is released."""
    held = {(impact.event_id, impact.vm): impact for impact in before.impacts if impact.claimed_by}
    for impact in after.impacts:
        was = held.get((impact.event_id, impact.vm))
        if (
            was is not None
            and impact.claimed_by
            and (impact.claimed_by, impact.tries) != (was.claimed_by, was.tries)
        ):
            must(impact.tries > was.tries, "a new worker begins a new attempt", was, impact)


def check_back(
    before: Scope, command: Command, after: Scope, now: datetime, timing: Timing
) -> None:
    """A restart is over when the VM is back or its time is up, and not earlier."""
    for impact in before.impacts:
        is_booting = impact.state is ImpactState.BOOTING
        left = after.impact(impact.event_id, impact.vm)
        if is_booting and left != impact:
            may = ends_boot(impact, command, after, now)
            must(may, "a VM that boots is waited for", impact, command)
        if is_booting and left == impact and isinstance(command, Tick):
            must(now < impact.due_at, "the wait has a limit", impact, now)
        if isinstance(command, Finish) and restarts(before, impact, command, now, timing):
            is_waiting = left is not None and left.state is ImpactState.BOOTING
            must(is_waiting, "a restarted VM is waited for", impact, command)
    old = {(impact.event_id, impact.vm) for impact in before.impacts}
    for impact in after.impacts:
        if impact.state is ImpactState.BOOTING:
            must((impact.event_id, impact.vm) in old, "only what was claimed boots", impact)
            must(not impact.claimed_by, "no worker holds an impact that waits", impact)
            must(impact.due_at <= now + timing.back_limit, "the wait has a limit", impact)
            due = [other for other in due_impacts(after, now) if other.vm == impact.vm]
            is_gone = all(
                other.cause is Cause.FAILED
                or other.type in (EventType.PREEMPT, EventType.TERMINATE)
                for other in due
            )
            must(is_gone, "the next impact waits while the VM boots", impact, due)


def ends_boot(impact: Impact, command: Command, after: Scope, now: datetime) -> bool:
    """Whether the command may end the wait for a VM: it is back, late, or gone."""
    vm = after.vm(impact.vm)
    return (
        (
            isinstance(command, Back)
            and (command.event_id, command.vm) == (impact.event_id, impact.vm)
        )
        or (isinstance(command, Tick) and impact.due_at <= now)
        or (isinstance(command, Complete) and command.event_id == impact.event_id)
        or isinstance(command, Retire)
        or vm is None
        or vm.power is Power.DEALLOCATED
    )


def restarts(before: Scope, impact: Impact, command: Finish, now: datetime, timing: Timing) -> bool:
    """Whether this result of a worker is a restart whose VM will be waited for."""
    vm = before.vm(impact.vm)
    result = (command.event_id, command.vm, command.worker, command.tries)
    return (
        result == (impact.event_id, impact.vm, impact.claimed_by, impact.tries)
        and impact.state is ImpactState.CLAIMED
        and not command.problem
        and not command.is_back
        and impact.type in (EventType.REBOOT, EventType.REDEPLOY)
        and is_enabled(before, now, timing)
        and vm is not None
        and (vm.power is Power.RUNNING or impact.cause in (Cause.RESTART, Cause.REDEPLOY))
    )


def check_domains(before: Scope, after: Scope) -> None:
    """A platform event starts only if no other update domain is under impact.

    Failed hardware is the exception.
    """
    old = {event.id for event in before.events if event.status is Status.STARTED}
    started = [
        event for event in after.events if event.status is Status.STARTED and event.id not in old
    ]
    for event in started:
        if event.source is Source.PLATFORM and event.cause is not Cause.FAILED:
            others = [
                other
                for other in after.events
                if other.status is Status.STARTED
                and other.update_domain != event.update_domain
                # a user's operation or a failure may start after it, in the same step
                and not (
                    other.id not in old
                    and (other.source is Source.USER or other.cause is Cause.FAILED)
                )
            ]
            must(not others, "one update domain under platform impact", event, others)
            silent = [
                impact
                for impact in after.impacts
                if impact in before.impacts
                and after.event(impact.event_id) is None
                and (vm := after.vm(impact.vm)) is not None
                and vm.update_domain != event.update_domain
            ]
            must(
                not silent,
                "a silent operation holds platform events of other domains",
                event,
                silent,
            )


def keeps_members_events(before: Scope, command: Command, after: Scope) -> None:
    """A change of members loses no event of a VM that stays where and as it was."""
    if not isinstance(command, SetMembers):
        return
    check_members(before, after)


def check_members(before: Scope, after: Scope) -> None:
    old = {vm.name: vm.host for vm in before.vms}
    stayed = {vm.name for vm in after.vms if old.get(vm.name) == vm.host}
    left = {event.id for event in after.events}
    is_open = {(impact.event_id, impact.vm) for impact in before.impacts if not impact.is_over}
    for event in before.events:
        waiting = {
            name
            for name in event.resources
            if event.status is Status.SCHEDULED or (event.id, name) in is_open
        }
        must(
            event.id in left or not stayed & waiting,
            "a VM that stays keeps its events",
            event,
            stayed,
        )
