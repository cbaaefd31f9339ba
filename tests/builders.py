"""Builders for tests: VMs, scopes, and commands with short ids. Time is an argument."""

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from forewarn.core.command import Approve, Claim, Command, Finish, Maintain, Restart
from forewarn.core.event import EventType
from forewarn.core.fleet import Policy, Scope, ScopeKind, Vm
from forewarn.core.machine import Outcome, decide
from forewarn.core.timing import Timing

NOON = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
STANDARD = Timing()

OPERATION = "00000000-0000-4000-8000-00000000000A"


def guid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012X}"


def vm(name: str, *, domain: int = 0, host: str = "host-a", **more: object) -> Vm:
    return replace(Vm(name=name, update_domain=domain, host=host), **more)


def scope_of(
    *vms: Vm,
    is_enabled: bool = True,
    kind: ScopeKind = ScopeKind.AVAILABILITY_SET,
    **policy: object,
) -> Scope:
    """An enabled scope, by default with `web-0` in domain 0 and `web-1` in domain 1."""
    members = vms or (vm("web-0"), vm("web-1", domain=1, host="host-b"))
    return Scope(
        name="web",
        kind=kind,
        policy=replace(Policy(), **policy),
        vms=members,
        seen_at=NOON - MINUTE if is_enabled else None,
    )


def run(scope: Scope, *commands: Command, at: datetime = NOON, timing: Timing = STANDARD) -> Scope:
    """The scope after these commands, all at one time."""
    for command in commands:
        scope = decide(scope, command, at, timing).scope
    return scope


def outcome_of(scope: Scope, command: Command, at: datetime = NOON) -> Outcome:
    return decide(scope, command, at, STANDARD)


def restart(vm: str = "web-0", number: int = 1, not_before: datetime | None = None) -> Restart:
    return Restart(vm=vm, event_id=guid(number), not_before=not_before)


def approve(vm: str, *numbers: int) -> Approve:
    return Approve(event_ids=tuple(guid(number) for number in numbers or (1,)), vm=vm)


def maintain(host: str = "host-a", type_: EventType = EventType.FREEZE, **more: object) -> Maintain:
    return replace(Maintain(host=host, operation_id=OPERATION, type=type_), **more)


def claim(number: int = 1, vm: str = "web-0", worker: str = "w1") -> Claim:
    return Claim(event_id=guid(number), vm=vm, worker=worker)


def finish(
    number: int = 1, vm: str = "web-0", worker: str = "w1", tries: int = 1, **more: object
) -> Finish:
    return replace(Finish(event_id=guid(number), vm=vm, worker=worker, tries=tries), **more)


def run_impact(scope: Scope, at: datetime = NOON, host: str = "") -> Scope:
    """Claim and finish every impact."""
    for impact in scope.impacts:
        scope = run(
            scope,
            Claim(event_id=impact.event_id, vm=impact.vm, worker="w1"),
            Finish(
                event_id=impact.event_id,
                vm=impact.vm,
                worker="w1",
                tries=impact.tries + 1,
                host=host,
            ),
            at=at,
        )
    return scope


def statuses(scope: Scope) -> list[str]:
    return [f"{event.type} {event.status} {','.join(event.resources)}" for event in scope.events]
