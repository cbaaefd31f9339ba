"""What the control API returns: scopes, VMs, hosts and events, built from the board."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from forewarn import __version__
from forewarn.core.event import Cause, Event, EventType, ImpactState, NoEvent, Source, Status
from forewarn.core.fleet import Approval, AutoApprove, Power, Scope, ScopeKind
from forewarn.core.lifecycle import is_enabled
from forewarn.engine.board import Board, event_key
from forewarn.engine.engine import Engine
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.engine.operations import Difference, ScopedEvent
from forewarn.fleetfile.parser import format_budget
from forewarn.web.control.dependencies import PageRequest
from forewarn.web.control.pagination import Key, Paged, build_page, name_key

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
    """The impact of a Started event on one VM."""

    vm: str
    state: ImpactState
    tries: int
    failures: int
    detail: str


class EventView(msgspec.Struct, frozen=True):
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


class PolicyView(msgspec.Struct, frozen=True):
    """A scope's policy. `terminate_notice_seconds` is null where deletion is not announced."""

    approval: Approval
    auto_approve: tuple[AutoApprove, ...]
    terminate_notice_seconds: float | None
    couple_terminates: bool
    user_operations_max: int
    max_unavailable: int | str | None


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
    """A VM, the ids of the events that name it, and its last poll."""

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


class DaemonView(msgspec.Struct, frozen=True):
    """The daemon of a managed host, and since when it is connected or not."""

    is_connected: bool
    since: datetime


class HostView(msgspec.Struct, frozen=True):
    """A host, its VMs, and the ids of the events that name any of them."""

    name: str
    vms: tuple[str, ...]
    scopes: tuple[str, ...]
    events: tuple[str, ...]
    state: Literal["connected", "unreachable", "unmanaged"]
    daemon: DaemonView | None


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


class HostEvents(msgspec.Struct, frozen=True):
    """One event for each scope and update domain on the host."""

    events: list[EventView]


class DifferenceView(Difference, frozen=True):
    """What applying a fleet changed, or with `dry_run` would change: names of scopes and VMs, and
    of those that stay the fields that change, at most 1,000 scopes and VMs.
    """

    dry_run: bool


def event_view(scope: Scope, event: Event) -> EventView:
    impacts = tuple(
        view(ImpactView, impact) for impact in scope.impacts if impact.event_id == event.id
    )
    return view(EventView, event, scope=scope.name, impacts=impacts)


def event_result(placed: ScopedEvent | NoEvent) -> EventResult:
    if isinstance(placed, NoEvent):
        return EventResult(None, placed)
    return EventResult(event_view(*placed))


def host_events(placed: Iterable[ScopedEvent]) -> HostEvents:
    return HostEvents([event_view(*one) for one in placed])


async def event_list(
    board: Board, request: PageRequest, ids: Sequence[str] | None = None
) -> EventList:
    """The live events with these ids, or all, oldest first."""
    keys: Sequence[Key] = board.event_keys
    if ids is not None:
        found = (board.find_event(event_id.upper()) for event_id in set(ids))
        keys = sorted(event_key(event) for _, event in filter(None, found))

    def build(keys: Sequence[Key]) -> Iterator[EventView]:
        for _, event_id in keys:
            placed = board.find_event(event_id)
            if placed is not None:
                yield event_view(placed[0].scope, placed[1])

    return await build_page(EventList, keys, lambda key: key, build, request)


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


Names = Sequence[str] | None


def _select(names: Names, known: Container[str], everything: Sequence[str]) -> Sequence[str]:
    """The known ones of these names in their order, or everything."""
    return everything if names is None else sorted({name for name in names if name in known})


async def scope_list(engine: Engine, request: PageRequest, names: Names = None) -> ScopeList:
    scopes = engine.board.scopes
    items = _select(names, scopes, engine.board.scope_names)

    def build(names: Sequence[str]) -> Iterator[ScopeView]:
        return (scope_view(engine, scopes[name].scope) for name in names if name in scopes)

    return await build_page(ScopeList, items, name_key, build, request)


async def vm_list(engine: Engine, request: PageRequest, names: Names = None) -> VmList:
    items = _select(names, engine.board.vms, engine.board.vm_names)
    return await build_page(VmList, items, name_key, partial(vm_views, engine), request)


def vm_views(engine: Engine, names: Sequence[str]) -> Iterator[VmView]:
    """Reads each scope once, not once for each of its VMs."""
    board, wanted = engine.board, set(names)
    views: dict[str, VmView] = {}
    for published in {board.vms[name] for name in names if name in board.vms}:
        scope = published.scope
        seen = engine.last_polls.times(scope)
        events: dict[str, list[str]] = defaultdict(list)
        for event in scope.events:
            for name in event.resources:
                events[name].append(event.id)
        for vm in scope.vms:
            if vm.name in wanted:
                views[vm.name] = view(
                    VmView,
                    vm,
                    scope=scope.name,
                    events=tuple(events.get(vm.name, ())),
                    seen_at=datetime.fromtimestamp(seen[vm.name], UTC) if vm.name in seen else None,
                )
    return (views[name] for name in names if name in views)


def host_view(board: Board, managed: ManagedHosts, name: str) -> HostView:
    scopes = [published.scope for published in board.scopes_on(name)]
    vms, record = board.hosts[name], managed.find(name)
    is_connected = not managed.is_unreachable(name)
    managed_state: Any = "connected" if is_connected else "unreachable"
    return HostView(
        name=name,
        state=managed_state if record else "unmanaged",
        daemon=DaemonView(is_connected, record.since) if record else None,
        vms=tuple(sorted(vms)),
        scopes=tuple(scope.name for scope in scopes),
        events=tuple(
            event.id
            for scope in scopes
            for event in scope.events
            if not vms.isdisjoint(event.resources)
        ),
    )


async def host_list(
    board: Board, managed: ManagedHosts, request: PageRequest, names: Names = None
) -> HostList:
    def build(names: Sequence[str]) -> Iterator[HostView]:
        return (host_view(board, managed, name) for name in names if name in board.hosts)

    items = _select(names, board.hosts, board.known_hosts)
    return await build_page(HostList, items, name_key, build, request)
