"""Operations: what is done to one VM, and what befalls a host.

Each makes events with the right notice, or is refused.
"""

import uuid
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core import lifecycle as progress
from forewarn.core.change import ChangeKind
from forewarn.core.draft import Draft
from forewarn.core.event import (
    DESCRIPTION,
    DURATION_SECONDS,
    MAINTENANCE_CAUSES,
    Cause,
    Event,
    EventType,
    Impact,
    ImpactState,
    Source,
    Status,
)
from forewarn.core.fleet import AutoApprove, Power, Scope, Vm
from forewarn.core.timing import whole_second_after
from forewarn.errors import (
    AlreadyPending,
    Invalid,
    NoticeTooShort,
    Refused,
    TooManyOperations,
    UnknownEvent,
    UnknownVm,
    VmDown,
    WrongStatus,
)

NOT_BEFORE_MAX = timedelta(days=366)
DESCRIPTION_LENGTH_MAX = 500
DURATION_SECONDS_MAX = 86_400

MAINTENANCE_TYPES = (EventType.FREEZE, EventType.REBOOT, EventType.REDEPLOY)


# --- what is done to one VM


def restart(draft: Draft, command: ask.Restart) -> None:
    operate(draft, command, EventType.REBOOT, Cause.RESTART, draft.timing.notice[EventType.REBOOT])


def redeploy(draft: Draft, command: ask.Redeploy) -> None:
    operate(
        draft, command, EventType.REDEPLOY, Cause.REDEPLOY, draft.timing.notice[EventType.REDEPLOY]
    )


def delete(draft: Draft, command: ask.Delete) -> None:
    notice = draft.scope.policy.terminate_notice
    operate(
        draft,
        command,
        EventType.TERMINATE,
        Cause.DELETION,
        None if notice is None else notice / draft.timing.rate,
    )


def operate(
    draft: Draft, command: ask.Operation, type_: EventType, cause: Cause, notice: timedelta | None
) -> None:
    """A user's operation: an event, or at once and silently where nobody listens, nobody runs, or
    no notice is wanted.
    """
    if draft.knows(command.event_id):
        return
    scope = draft.scope
    vm = member(scope, command.vm)
    refuse_second(scope, vm.name, type_, Source.USER)
    needs_no_telling = (
        notice is None
        or vm.power is not Power.RUNNING
        or not progress.is_enabled(scope, draft.now, draft.timing)
    )
    if needs_no_telling and command.not_before is None:
        draft.add_impacts(
            Impact(event_id=command.event_id, vm=vm.name, type=type_, cause=cause, due_at=draft.now)
        )
        draft.tell(ChangeKind.ORDERED, event_id=command.event_id, vm=vm.name, detail=str(type_))
        return
    pending = sum(
        event.source is Source.USER and event.status is Status.SCHEDULED for event in scope.events
    )
    if pending >= scope.policy.user_operations_max:
        raise TooManyOperations(
            f"{pending} operations of users are scheduled in {scope.name}; at most {scope.policy.user_operations_max} may be",
            scope=scope.name,
            pending=pending,
            user_operations_max=scope.policy.user_operations_max,
        )
    not_before = not_before_of(draft, command.not_before, notice or timedelta(0), type_)
    event = announce(
        draft,
        command.event_id,
        type_,
        cause,
        [vm],
        not_before,
        is_timed=command.not_before is not None,
    )
    if AUTO_APPROVED.get(type_) in scope.policy.auto_approve and not event.is_timed:
        progress.approve_by(draft, [event], "policy")


AUTO_APPROVED = {
    EventType.REBOOT: AutoApprove.USER_RESTART,
    EventType.REDEPLOY: AutoApprove.USER_REDEPLOY,
}


def evict(draft: Draft, command: ask.Evict) -> None:
    if draft.knows(command.event_id):
        return
    vm = member(draft.scope, command.vm)
    if vm.power is Power.DEALLOCATED:
        raise VmDown(f"{vm.name} is deallocated already; there is nothing to evict", vm=vm.name)
    refuse_second(draft.scope, vm.name, EventType.PREEMPT, Source.PLATFORM)
    notice = draft.timing.notice[EventType.PREEMPT]
    not_before = not_before_of(draft, command.not_before, notice, EventType.PREEMPT)
    is_timed = command.not_before is not None
    announce(
        draft,
        command.event_id,
        EventType.PREEMPT,
        Cause.EVICTION,
        [vm],
        not_before,
        is_timed=is_timed,
    )


# --- what befalls a host


def maintain(draft: Draft, command: ask.Maintain) -> None:
    if command.type not in MAINTENANCE_TYPES:
        raise Invalid(
            f"maintenance is one of {', '.join(MAINTENANCE_TYPES)}, not {command.type}",
            type=command.type,
        )
    if command.cause not in MAINTENANCE_CAUSES:
        raise Invalid(
            f"the cause of maintenance is one of {', '.join(MAINTENANCE_CAUSES)}, not {command.cause}"
        )
    seconds = (
        DURATION_SECONDS[command.type]
        if command.duration_seconds is None
        else command.duration_seconds
    )
    if not -1 <= seconds <= DURATION_SECONDS_MAX:
        raise Invalid(
            f"duration_seconds is -1 (unknown) to {DURATION_SECONDS_MAX}, not {seconds}",
            duration_seconds=seconds,
        )
    if len(command.description or "") > DESCRIPTION_LENGTH_MAX:
        raise Invalid(
            f"a description has at most {DESCRIPTION_LENGTH_MAX} characters, not {len(command.description or '')}"
        )
    if not (command.description or "").isprintable():
        raise Invalid(
            "a description is one line of printable text; it has control characters",
            description=command.description,
        )
    not_before = not_before_of(
        draft, command.not_before, draft.timing.notice[command.type], command.type
    )
    for event_id, vms in by_domain(draft, command, command.type, command.cause):
        is_timed = command.not_before is not None
        event = announce(
            draft,
            event_id,
            command.type,
            command.cause,
            vms,
            not_before,
            host=command.host,
            is_timed=is_timed,
        )
        text = DESCRIPTION[command.cause] if command.description is None else command.description
        draft.put_event(replace(event, description=text, duration_seconds=seconds))


def degrade(draft: Draft, command: ask.Degrade) -> None:
    not_before = not_before_of(
        draft, command.not_before, draft.timing.degraded_notice, EventType.REDEPLOY
    )
    for event_id, vms in by_domain(draft, command, EventType.REDEPLOY, Cause.DEGRADED):
        is_timed = command.not_before is not None
        announce(
            draft,
            event_id,
            EventType.REDEPLOY,
            Cause.DEGRADED,
            vms,
            not_before,
            host=command.host,
            is_timed=is_timed,
        )


def fail(draft: Draft, command: ask.Fail) -> None:
    """What was announced because the hardware would fail is superseded: it has failed."""
    for event_id, vms in by_domain(draft, command, EventType.REBOOT, Cause.FAILED):
        for vm in vms:
            supersede_degraded(draft, vm.name, command.host)
        event = announce(
            draft, event_id, EventType.REBOOT, Cause.FAILED, vms, draft.now, host=command.host
        )
        draft.start(event, f"{command.host} has failed")


def supersede_degraded(draft: Draft, vm: str, host: str) -> None:
    """Take the VM out of what was announced for a degraded host, unless its redeploy runs right
    now: that ends as it ends.
    """

    def applies(event: Event) -> bool:
        if event.cause is not Cause.DEGRADED or event.host != host:
            return False
        impact = None if event.status is Status.SCHEDULED else draft.impact(event.id, vm)
        return impact is None or impact.state is ImpactState.WAITING

    draft.excuse(vm, f"{host} has failed", applies)


def extend(draft: Draft, command: ask.Extend) -> None:
    """More notice, never less.

    A deletion is not put off: its owner was promised that it would not be (protocol 6.4).
    """
    event = draft.scope.event(command.event_id)
    if event is None:
        raise UnknownEvent(
            f"there is no event {command.event_id} in {draft.scope.name}", event=command.event_id
        )
    if event.status is not Status.SCHEDULED:
        raise WrongStatus(
            f"{event.id} is {event.status}; only a Scheduled event can be extended", event=event.id
        )
    if event.type is EventType.TERMINATE:
        raise Refused(
            f"{event.id} is a Terminate; expected an event of another type: a deletion is not put off",
            event=event.id,
        )
    notice_now = max(event.not_before - draft.now, timedelta(0))
    not_before = not_before_of(draft, command.not_before, notice_now, event.type)
    if not_before != event.not_before:
        draft.put_event(replace(event, not_before=not_before, is_timed=True))
        draft.tell(
            ChangeKind.EXTENDED, event_id=event.id, detail=f"to {not_before:%Y-%m-%dT%H:%M:%SZ}"
        )


def by_domain(
    draft: Draft, command: ask.HostOperation, type_: EventType, cause: Cause
) -> list[tuple[str, list[Vm]]]:
    """The scope's VMs on the host that have not been told of this yet, an id and a list for each
    update domain.

    Who has been told is passed over, so that what was done half can be asked again; if nobody is
    left, it is refused.
    """
    scope, known = draft.scope, draft.known_ids()
    residents: dict[int, list[Vm]] = {}
    for vm in scope.vms:
        if vm.host == command.host and vm.power is not Power.DEALLOCATED:
            residents.setdefault(vm.update_domain, []).append(vm)
    ids = {
        domain: event_id_of(command.operation_id, scope.name, domain)
        for domain in sorted(residents)
    }
    new = [domain for domain, event_id in ids.items() if event_id not in known]
    same = [
        event
        for event in scope.events
        if (event.type, event.source, event.cause) == (type_, Source.PLATFORM, cause)
    ]
    pending = {name: event.id for event in reversed(same) for name in event.resources}
    untold = [
        (ids[domain], [vm for vm in residents[domain] if vm.name not in pending]) for domain in new
    ]
    events = [(event_id, vms) for event_id, vms in untold if vms]
    if new and len(new) == len(ids) and not events:
        first = residents[new[0]][0].name
        raise already_pending(first, type_, pending[first])
    return events


def event_id_of(operation_id: str, scope: str, update_domain: int) -> str:
    """One operation on a host makes several events; asked again, it makes the same ones."""
    return str(uuid.uuid5(uuid.UUID(operation_id), f"{scope}/{update_domain}")).upper()


# --- what the rules above are made of


def announce(
    draft: Draft,
    event_id: str,
    type_: EventType,
    cause: Cause,
    vms: list[Vm],
    not_before: datetime,
    *,
    host: str = "",
    is_timed: bool = False,
) -> Event:
    """A new Scheduled event, with what its type and cause say by themselves."""
    event = Event(
        id=event_id,
        type=type_,
        status=Status.SCHEDULED,
        source=Source.USER if cause in USER_CAUSES else Source.PLATFORM,
        cause=cause,
        resources=tuple(vm.name for vm in vms),
        update_domain=vms[0].update_domain,
        not_before=not_before,
        duration_seconds=DURATION_SECONDS[type_],
        description=DESCRIPTION[cause],
        created_at=draft.now,
        host=host,
        is_timed=is_timed,
    )
    draft.schedule(event)
    return event


USER_CAUSES = (Cause.RESTART, Cause.REDEPLOY, Cause.DELETION)


def not_before_of(
    draft: Draft, asked: datetime | None, notice: timedelta, type_: EventType
) -> datetime:
    """The earliest start: as asked, or as soon as the notice allows, on a whole second and never
    early.
    """
    if asked is None:
        return whole_second_after(draft.now + notice)
    if asked.tzinfo is None:
        raise Invalid(
            f"not_before needs a time zone, as in {asked.isoformat()}Z; got {asked.isoformat()}"
        )
    try:
        asked = asked.astimezone(UTC)
    except OverflowError as error:  # at either end of the calendar
        raise Invalid(
            f"not_before is at most {NOT_BEFORE_MAX.days} days ahead; got {asked.isoformat()}"
        ) from error
    if asked < draft.now + notice:
        raise NoticeTooShort(
            f"not_before is {asked:%Y-%m-%dT%H:%M:%SZ}; this {type_} needs a notice of {notice},"
            f" so {whole_second_after(draft.now + notice):%Y-%m-%dT%H:%M:%SZ} at the earliest",
            not_before=asked,
            notice_min_seconds=notice.total_seconds(),
        )
    if asked > draft.now + NOT_BEFORE_MAX:
        raise Invalid(
            f"not_before is at most {NOT_BEFORE_MAX.days} days ahead; got {asked.isoformat()}",
            not_before=asked,
        )
    return whole_second_after(asked)


def member(scope: Scope, name: str) -> Vm:
    vm = scope.vm(name)
    if vm is None:
        raise UnknownVm(f"there is no VM {name!r} in {scope.name}", vm=name, scope=scope.name)
    return vm


def refuse_second(scope: Scope, vm: str, type_: EventType, source: Source) -> None:
    """The same thing twice to one VM is refused, with the id of the first."""
    events = (
        event.id
        for event in scope.events
        if (event.type, event.source) == (type_, source) and vm in event.resources
    )
    silent = (
        impact.event_id
        for impact in scope.impacts
        if (impact.vm, impact.type) == (vm, type_)
        and source is Source.USER
        and scope.event(impact.event_id) is None
    )
    for pending in (*events, *silent):
        raise already_pending(vm, type_, pending)


def already_pending(vm: str, type_: EventType, event_id: str) -> AlreadyPending:
    return AlreadyPending(f"{vm} has a {type_} pending already: {event_id}", vm=vm, event=event_id)
