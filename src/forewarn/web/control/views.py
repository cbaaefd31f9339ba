"""What the control API returns: scopes, VMs, hosts and events, built from the board."""

from collections.abc import Iterable
from datetime import datetime
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from forewarn import __version__
from forewarn.core.event import Cause, Event, EventType, ImpactState, NoEvent, Source, Status
from forewarn.core.fleet import Approval, AutoApprove, Power, RedeployMethod, Scope, ScopeKind
from forewarn.core.lifecycle import is_enabled
from forewarn.core.readability import round_up, unread_duration
from forewarn.engine.board import Board
from forewarn.engine.engine import Engine
from forewarn.engine.managed_hosts import ManagedHost, ManagedHosts
from forewarn.engine.operations import Difference, ScopedEvent
from forewarn.engine.problems import Problem, Problems
from forewarn.fleetfile.parser import format_budget
from forewarn.web.control.pagination import Paged

V = TypeVar("V", bound=msgspec.Struct)


def view(cls: type[V], *sources: object, **extra: Any) -> V:
    """A `cls` with the fields in `extra`, and those of the first source that has them."""
    for name, index in _find_sources(cls, tuple(map(type, sources)), frozenset(extra)):
        extra[name] = getattr(sources[index], name)
    return cls(**extra)


@cache
def _find_sources(
    cls: type[msgspec.Struct], types: tuple[type, ...], given: frozenset[str]
) -> list[tuple[str, int]]:
    """Which source has which field: the same for all items of a list."""
    wanted = (name for name in cls.__struct_fields__ if name not in given)
    found = ((name, [hasattr(type_, name) for type_ in types]) for name in wanted)
    return [(name, has.index(True)) for name, has in found if True in has]


class ErrorView(msgspec.Struct, frozen=True):
    """An error: a code for machines that never changes, a message for people, and facts."""

    error: str
    message: str
    facts: dict[str, Any]


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`problem`: what this server cannot do although it responds."""

    status: str
    problem: str = ""


class Landing(msgspec.Struct, frozen=True):
    """The entry points of this service."""

    service: str = "forewarn"
    version: str = __version__
    api: str = "/api/v1"
    openapi: str = "/api/openapi.json"
    docs: str = "/api/docs"
    health: str = "/healthz"
    ready: str = "/readyz"


class ImpactView(msgspec.Struct, frozen=True):
    """The impact of a Started event on one VM. `waits_for` is empty if it runs, or is over."""

    vm: str
    state: ImpactState
    tries: int
    failures: int
    detail: str
    waits_for: str


class EventView(msgspec.Struct, frozen=True):
    """An event. `waits_for` is empty unless it is Scheduled, and not to start by time alone."""

    id: str
    type: EventType
    status: Status
    source: Source
    scope: str
    update_domain: int
    resources: tuple[str, ...]
    not_before: datetime
    duration_seconds: int
    description: str
    created_at: datetime
    started_at: datetime | None
    approvals: tuple[str, ...]
    is_approved: bool
    impacts: tuple[ImpactView, ...]
    cause: Cause
    unreadable_since: datetime | None
    unreadable_seconds: int
    waits_for: str


class PolicyView(msgspec.Struct, frozen=True):
    """A scope's policy. `terminate_notice_seconds` is null where deletion is not announced."""

    approval: Approval
    auto_approve: tuple[AutoApprove, ...]
    terminate_notice_seconds: float | None
    couple_terminates: bool
    user_operations_max: int
    max_unavailable: int | str | None
    redeploy: RedeployMethod


class ScopeView(msgspec.Struct, frozen=True):
    """A scope, its policy, the names of its VMs and the ids of its events."""

    name: str
    kind: ScopeKind
    policy: PolicyView
    vms: tuple[str, ...]
    events: tuple[str, ...]
    incarnation: int
    seen_at: datetime | None
    is_enabled: bool


class VmView(msgspec.Struct, frozen=True):
    """A VM, the ids of the events that name it, its last poll, and what is wrong with it."""

    name: str
    scope: str
    address: str
    id: str
    host: str
    update_domain: int
    fault_domain: int
    power: Power
    events: tuple[str, ...]
    seen_at: datetime | None
    problems: tuple[Problem, ...]


class DaemonView(msgspec.Struct, frozen=True):
    """The daemon of a managed host: since when it is connected, or when its last request was.

    `problem` is why nothing can be done to the VMs of the host at present; empty if something can.
    """

    is_connected: bool
    since: datetime
    problem: str


class UnmovableVm(msgspec.Struct, frozen=True):
    """A VM that cannot run on another host, and why."""

    vm: str
    why: str


class HostView(msgspec.Struct, frozen=True):
    """A host, its VMs, the ids of the events that name any of them, and what is wrong with it.

    `unmovable` are those of its VMs that its daemon knows to be bound to it. `other_vms` run there
    by its last report, and the fleet does not have them there: names, or ids of unknown VMs.
    """

    name: str
    vms: tuple[str, ...]
    scopes: tuple[str, ...]
    events: tuple[str, ...]
    state: Literal["connected", "unreachable", "unmanaged"]
    daemon: DaemonView | None
    problems: tuple[Problem, ...]
    unmovable: tuple[UnmovableVm, ...]
    other_vms: list[str]


class ScopeList(Paged, frozen=True):
    scopes: list[ScopeView]


class VmList(Paged, frozen=True):
    vms: list[VmView]


class HostList(Paged, frozen=True):
    hosts: list[HostView]


class EventList(Paged, frozen=True):
    events: list[EventView]


class EventResult(msgspec.Struct, frozen=True):
    event: Annotated[
        EventView | None,
        msgspec.Meta(description="Null if it runs now, without notice, or is already over."),
    ]
    reason: Annotated[
        NoEvent | None, msgspec.Meta(description="Why there is no event; null if there is one.")
    ] = None


class OperationResult(EventResult, frozen=True):
    """An operation that was accepted, although its impact may have to wait."""

    waits_for: Annotated[
        str,
        msgspec.Meta(
            description="What has to happen before the impact can begin, such as the return of a"
            " host's daemon that is away; empty if nothing has."
        ),
    ] = ""


class HostEvents(msgspec.Struct, frozen=True):
    """One event for each scope and update domain on the host.

    `warnings`: VMs that may run there, and that were not notified.
    """

    events: list[EventView]
    warnings: list[str]


class DifferenceView(Difference, frozen=True):
    """What applying a fleet changed, or with `dry_run` would change: names of scopes and VMs, and
    of those that stay the fields that change, at most 1,000 scopes and VMs.
    """

    dry_run: bool


def event_view(problems: Problems, scope: Scope, event: Event) -> EventView:
    impacts = tuple(
        view(ImpactView, impact, waits_for=waits_for)
        for impact, waits_for in problems.waits(scope, event.id)
    )
    unreadable = {
        "unreadable_since": event.unreadable_since if event.status is Status.SCHEDULED else None,
        "waits_for": problems.waits_to_start(scope, event),
        "unreadable_seconds": int(round_up(unread_duration(event)).total_seconds()),
    }
    return view(EventView, event, scope=scope.name, impacts=impacts, **unreadable)


def event_result(problems: Problems, placed: ScopedEvent | NoEvent) -> EventResult:
    if isinstance(placed, NoEvent):
        return EventResult(None, placed)
    return EventResult(event_view(problems, *placed))


def host_events(problems: Problems, placed: Iterable[ScopedEvent], host: str) -> HostEvents:
    events = [event_view(problems, *one) for one in placed]
    return HostEvents(events, list(problems.warn_of_others(host)))


def scope_view(engine: Engine, scope: Scope) -> ScopeView:
    policy, notice = scope.policy, scope.policy.terminate_notice
    return view(
        ScopeView,
        scope,
        policy=view(
            PolicyView,
            policy,
            terminate_notice_seconds=None if notice is None else notice.total_seconds(),
            max_unavailable=format_budget(policy.max_unavailable),
        ),
        vms=tuple(vm.name for vm in scope.vms),
        events=tuple(event.id for event in scope.events),
        is_enabled=is_enabled(scope, engine.clock.now(), engine.timing),
    )


def host_view(board: Board, managed: ManagedHosts, problems: Problems, name: str) -> HostView:
    scopes = [published.scope for published in board.scopes_on(name)]
    vms, record = board.hosts[name], managed.find(name)
    problem, is_connected = managed.reason(name), managed.has_contact(name)
    managed_state: Any = "unreachable" if problem else "connected"
    return HostView(
        name=name,
        state=managed_state if record else "unmanaged",
        daemon=_daemon_view(record, problem, is_connected=is_connected) if record else None,
        problems=problems.of_host(name),
        unmovable=tuple(UnmovableVm(*each) for each in managed.unmovable_on(name).items()),
        other_vms=managed.others_on(name),
        vms=tuple(sorted(vms)),
        scopes=tuple(scope.name for scope in scopes),
        events=tuple(
            event.id
            for scope in scopes
            for event in scope.events
            if not vms.isdisjoint(event.resources)
        ),
    )


def _daemon_view(record: ManagedHost, problem: str, *, is_connected: bool) -> DaemonView:
    since = record.since if is_connected else record.last_contact_at
    return DaemonView(is_connected, since, problem)
