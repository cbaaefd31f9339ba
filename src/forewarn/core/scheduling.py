"""Operations on a VM or on a host: each creates events with the right notice, or is refused."""

import uuid
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from forewarn.core import command as commands
from forewarn.core.change import ChangeKind
from forewarn.core.draft import Draft
from forewarn.core.event import (
    DESCRIPTION,
    DURATION_SECONDS,
    MAINTENANCE_CAUSES,
    USER_CAUSES,
    Cause,
    Event,
    EventType,
    ImpactState,
    NoEvent,
    NoEventCode,
    Source,
    Status,
)
from forewarn.core.fleet import AutoApprove, Power, Scope, Vm
from forewarn.core.lifecycle import find_event, is_enabled
from forewarn.core.timing import round_up_to_second
from forewarn.duration import format_duration
from forewarn.errors import (
    AlreadyPending,
    Invalid,
    NoticeTooShort,
    Refused,
    TooManyOperations,
    UnknownVm,
    VmDown,
)

NOT_BEFORE_MAX = timedelta(days=366)
DESCRIPTION_LENGTH_MAX = 500
DURATION_SECONDS_MAX = 86_400

MAINTENANCE_TYPES = (EventType.FREEZE, EventType.REBOOT, EventType.REDEPLOY)

USER_OPERATIONS: dict[type[commands.UserOperation], tuple[EventType, Cause]] = {
    commands.Restart: (EventType.REBOOT, Cause.RESTART),
    commands.Redeploy: (EventType.REDEPLOY, Cause.REDEPLOY),
    commands.Delete: (EventType.TERMINATE, Cause.DELETION),
}
AUTO_APPROVED = {
    EventType.REBOOT: AutoApprove.USER_RESTART,
    EventType.REDEPLOY: AutoApprove.USER_REDEPLOY,
}


# --- operations on one VM


def operate(draft: Draft, command: commands.UserOperation) -> None:
    """Restart, redeploy or delete a VM.

    It runs now, without an event, if no VM polls, the VM is not running, or no notice is
    configured.
    """
    if command.event_id in draft.known_ids():
        return
    type_, cause = USER_OPERATIONS[type(command)]
    policy, notice = draft.scope.policy, draft.timing.notice.get(type_)
    if type_ is EventType.TERMINATE:
        notice = policy.terminate_notice
        notice = None if notice is None else notice / draft.timing.rate
    vm = find_vm(draft, command.vm)
    refuse_second(draft, vm.name, type_, Source.USER)
    if command.not_before is None:
        draft.no_event = why_no_event(draft, vm, notice, command.silent_since)
    if draft.no_event is not None:
        draft.start_silently(command.event_id, vm.name, type_, cause)
        return
    refuse_too_many(draft)
    notice, requested = notice or timedelta(0), command.not_before
    event = announce(draft, command.event_id, type_, cause, [vm], notice, requested)
    if AUTO_APPROVED.get(type_) in policy.auto_approve and not event.is_timed:
        draft.approve([event], "policy")


def why_no_event(
    draft: Draft, vm: Vm, notice: timedelta | None, silent_since: datetime | None = None
) -> NoEvent | None:
    """Why an operation on this VM runs at once; None if it is announced.

    A VM that polled until its host was away will poll again when the host is back.
    """
    scope = draft.scope.name
    if vm.power.is_off:
        return NoEvent(NoEventCode.VM_DOWN, f"{vm.name} is {vm.power}")
    if not is_enabled(draft.scope, min(draft.now, silent_since or draft.now), draft.timing):
        limit = format_duration(draft.timing.enabled_for)
        return NoEvent(NoEventCode.NOT_POLLED, f"no VM of {scope} has polled in the last {limit}")
    if notice is None:
        return NoEvent(NoEventCode.NO_NOTICE, f"the policy of {scope} has no terminate_notice")
    return None


def evict(draft: Draft, command: commands.Evict) -> None:
    if command.event_id in draft.known_ids():
        return
    vm, type_ = find_vm(draft, command.vm), EventType.PREEMPT
    if vm.power is Power.DEALLOCATED:
        raise VmDown(f"{vm.name} is deallocated already; there is nothing to evict", vm=vm.name)
    refuse_second(draft, vm.name, type_, Source.PLATFORM)
    notice, requested = draft.timing.notice[type_], command.not_before
    announce(draft, command.event_id, type_, Cause.EVICTION, [vm], notice, requested)


def find_vm(draft: Draft, name: str) -> Vm:
    scope = draft.scope.name
    if name not in draft.vms:
        raise UnknownVm(f"there is no VM {name!r} in {scope}", vm=name, scope=scope)
    return draft.vms[name]


def refuse_second(draft: Draft, vm: str, type_: EventType, source: Source) -> None:
    """A VM has at most one pending operation of a kind; the error names it."""
    pending = [
        event.id
        for event in draft.events.values()
        if (event.type, event.source) == (type_, source) and vm in event.resources
    ]
    if source is Source.USER:
        silent = (i for i in draft.impacts_of(vm) if i.event_id not in draft.events)
        pending += [impact.event_id for impact in silent if impact.type is type_]
    if pending:
        raise already_pending(vm, type_, pending[0])


def already_pending(vm: str, type_: EventType, event_id: str) -> AlreadyPending:
    return AlreadyPending(f"{vm} has a {type_} pending already: {event_id}", vm=vm, event=event_id)


def refuse_too_many(draft: Draft) -> None:
    name, limit = draft.scope.name, draft.scope.policy.user_operations_max
    pending = sum(
        event.source is Source.USER and event.status is Status.SCHEDULED
        for event in draft.events.values()
    )
    if pending >= limit:
        raise TooManyOperations(
            f"{pending} user operations are scheduled in {name}; the maximum is {limit}",
            scope=name,
            pending=pending,
            user_operations_max=limit,
        )


# --- operations on a host


def maintain(draft: Draft, command: commands.Maintain) -> None:
    type_, text, seconds = command.type, command.description, command.duration_seconds
    if type_ not in MAINTENANCE_TYPES:
        raise Invalid(f"type is one of {', '.join(MAINTENANCE_TYPES)}, not {type_}", type=type_)
    if command.cause not in MAINTENANCE_CAUSES:
        raise Invalid(f"cause is one of {', '.join(MAINTENANCE_CAUSES)}, not {command.cause}")
    if seconds is not None and not -1 <= seconds <= DURATION_SECONDS_MAX:
        raise Invalid(
            f"duration_seconds is -1 (unknown) to {DURATION_SECONDS_MAX}, not {seconds}",
            duration_seconds=seconds,
        )
    if text is not None and len(text) > DESCRIPTION_LENGTH_MAX:
        raise Invalid(
            f"a description has at most {DESCRIPTION_LENGTH_MAX} characters, not {len(text)}"
        )
    if text is not None and not text.isprintable():
        raise Invalid(
            "a description is one line of printable text; it has control characters",
            description=text,
        )
    for event_id, vms in new_events(draft, command, type_, command.cause):
        announce(
            draft,
            event_id,
            type_,
            command.cause,
            vms,
            draft.timing.notice[type_],
            command.not_before,
            host=command.host,
            description=text,
            duration_seconds=seconds,
        )


def degrade(draft: Draft, command: commands.Degrade) -> None:
    type_, cause, notice = EventType.REDEPLOY, Cause.DEGRADED, draft.timing.degraded_notice
    for event_id, vms in new_events(draft, command, type_, cause):
        requested, host = command.not_before, command.host
        announce(draft, event_id, type_, cause, vms, notice, requested, host=host)


def fail(draft: Draft, command: commands.Fail) -> None:
    """Supersedes events that were announced while the hardware was only degraded."""
    type_, host = draft.scope.policy.failed_hardware, command.host
    for event_id, vms in new_events(draft, command, type_, Cause.FAILED):
        for vm in vms:
            supersede_degraded(draft, vm.name, host)
        event = announce(draft, event_id, type_, Cause.FAILED, vms, timedelta(0), host=host)
        draft.start(event, f"{host} has failed")


def supersede_degraded(draft: Draft, vm: str, host: str) -> None:
    """Remove the VM from the events of a degraded host, unless its redeploy is running."""

    def applies(event: Event) -> bool:
        if event.cause is not Cause.DEGRADED or event.host != host:
            return False
        impact = draft.impacts.get((event.id, vm))
        return impact is None or impact.state is ImpactState.WAITING

    draft.release_vm(vm, f"{host} has failed", applies)


def new_events(
    draft: Draft, command: commands.HostOperation, type_: EventType, cause: Cause
) -> list[tuple[str, list[Vm]]]:
    """The ids and VMs of the events to create, one for each update domain on the host.

    VMs with such an event are left out, so an operation that was half done can be repeated. If
    none is left, it is refused. A host fails only once, as whatever type its events are.
    """
    known = draft.known_ids()
    residents: dict[int, list[Vm]] = {}
    for vm in draft.vms.values():
        if vm.host == command.host and vm.power is not Power.DEALLOCATED:
            residents.setdefault(vm.update_domain, []).append(vm)
    pending = {
        name: event.id
        for event in reversed(draft.events.values())
        if event.cause is cause and (event.type is type_ or cause is Cause.FAILED)
        for name in event.resources
    }
    events, refused, is_known = [], list[Vm](), False
    for domain, vms in sorted(residents.items()):
        event_id = event_id_of(command.operation_id, draft.scope.name, domain)
        free = [vm for vm in vms if vm.name not in pending]
        if event_id in known:
            is_known = True
        elif free:
            events.append((event_id, free))
        else:
            refused += vms
    if refused and not events and not is_known:
        first = refused[0].name
        raise already_pending(first, type_, pending[first])
    return events


def event_id_of(operation_id: str, scope: str, update_domain: int) -> str:
    """A host operation creates several events; repeated, it creates the same ones."""
    return str(uuid.uuid5(uuid.UUID(operation_id), f"{scope}/{update_domain}")).upper()


def event_ids_of(operation_id: str, scope: Scope) -> list[str]:
    """The events that a host operation may have created in a scope."""
    domains = sorted({vm.update_domain for vm in scope.vms})
    return [event_id_of(operation_id, scope.name, domain) for domain in domains]


# --- new events and their NotBefore


def announce(
    draft: Draft,
    event_id: str,
    type_: EventType,
    cause: Cause,
    vms: list[Vm],
    notice: timedelta,
    requested: datetime | None = None,
    *,
    host: str = "",
    description: str | None = None,
    duration_seconds: int | None = None,
) -> Event:
    why = f"this {type_} needs a notice of {format_duration(notice)}"
    event = Event(
        id=event_id,
        type=type_,
        status=Status.SCHEDULED,
        source=Source.USER if cause in USER_CAUSES else Source.PLATFORM,
        cause=cause,
        resources=tuple(vm.name for vm in vms),
        update_domain=vms[0].update_domain,
        not_before=not_before_of(draft, requested, notice, why),
        duration_seconds=DURATION_SECONDS[type_] if duration_seconds is None else duration_seconds,
        description=DESCRIPTION[cause] if description is None else description,
        created_at=draft.now,
        host=host,
        is_timed=requested is not None,
        notice=notice,
    )
    draft.put_event(event)
    detail = f"{event.type} of {', '.join(event.resources)}"
    draft.record(ChangeKind.SCHEDULED, event, detail=detail)
    return event


def extend(draft: Draft, command: commands.Extend) -> None:
    """More notice, never less. A deletion cannot be postponed (protocol 6.4)."""
    event = find_event(draft, command.event_id, Status.SCHEDULED, "extended")
    if event.type is EventType.TERMINATE:
        raise Refused(f"{event.id} is a Terminate; a deletion cannot be postponed", event=event.id)
    notice = max(event.not_before - draft.now, timedelta(0))
    why = f"this {event.type} can only be postponed"
    not_before = not_before_of(draft, command.not_before, notice, why)
    if not_before != event.not_before:
        event = replace(event, not_before=not_before, is_timed=True, has_had_notice=False)
        draft.put_event(event)
        detail = f"to {not_before:%Y-%m-%dT%H:%M:%SZ}"
        draft.record(ChangeKind.EXTENDED, event, detail=detail)


def not_before_of(
    draft: Draft, requested: datetime | None, notice: timedelta, why: str
) -> datetime:
    """The requested time, or the earliest that the notice allows, rounded up to a second.

    `why` is the reason for the notice, for a message.
    """
    earliest = draft.now + notice
    if requested is None:
        return round_up_to_second(earliest)
    if requested.tzinfo is None:
        text = requested.isoformat()
        raise Invalid(f"not_before needs a time zone, as in {text}Z; got {text}")
    too_late = Invalid(
        f"not_before is at most {NOT_BEFORE_MAX.days} days ahead; got {requested.isoformat()}",
        not_before=requested,
    )
    try:
        requested = round_up_to_second(requested.astimezone(UTC))
    except OverflowError:  # at either end of the calendar
        raise too_late from None
    if requested < earliest:
        raise NoticeTooShort(
            f"not_before is {requested:%Y-%m-%dT%H:%M:%SZ}; {why},"
            f" so {round_up_to_second(earliest):%Y-%m-%dT%H:%M:%SZ} at the earliest",
            not_before=requested,
            notice_min_seconds=notice.total_seconds(),
        )
    if requested > draft.now + NOT_BEFORE_MAX:
        raise too_late
    return requested
