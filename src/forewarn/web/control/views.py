"""What the control API shows: scopes, VMs, hosts and events as an operator reads them.

Values only, made from the board.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from forewarn import __version__
from forewarn.core.event import Cause, Event, EventType, Impact, ImpactState, Source, Status
from forewarn.core.fleet import Approval, AutoApprove, Policy, Power, Scope, ScopeKind, Vm
from forewarn.core.lifecycle import is_enabled
from forewarn.engine.board import Board, PublishedScope
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Difference, Told
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.fleetfile.parser import format_budget
from forewarn.web.control.pagination import Key, page

K = TypeVar("K")
V = TypeVar("V")


class ErrorAnswer(msgspec.Struct, frozen=True):
    """What went wrong: a code for machines that never changes, a message for a person, and facts."""

    error: str
    message: str
    facts: dict[str, Any]


class Health(msgspec.Struct, frozen=True):
    status: str


class Landing(msgspec.Struct, frozen=True):
    """What is here."""

    service: str = "forewarn"
    version: str = __version__
    api: str = "/api/v1"
    openapi: str = "/api/openapi.json"
    docs: str = "/api/docs"
    health: str = "/healthz"
    ready: str = "/readyz"


class ImpactView(msgspec.Struct, frozen=True):
    """What is being done to one VM of a Started event."""

    vm: str
    state: ImpactState
    tries: int
    failures: int
    detail: str


class EventView(msgspec.Struct, frozen=True):
    """An event. Its members are promised by the design and stay as they are."""

    id: str
    type: EventType
    status: Status
    source: Source
    scope: str
    resources: tuple[str, ...]
    not_before: datetime
    duration_seconds: int
    description: str
    created_at: datetime
    started_at: datetime | None
    approvals: tuple[str, ...]
    impacts: tuple[ImpactView, ...]
    cause: Cause


class PolicyView(msgspec.Struct, frozen=True):
    """What the scope's owner chose.

    `terminate_notice_seconds` is null where deletion is not announced.
    """

    approval: Approval
    auto_approve: tuple[AutoApprove, ...]
    terminate_notice_seconds: float | None
    couple_terminates: bool
    user_operations_max: int
    max_unavailable: int | str | None


class ScopeView(msgspec.Struct, frozen=True):
    """A scope.

    `is_enabled` says whether anybody polls: if not, users' operations run at once and make no
    event.
    """

    name: str
    kind: ScopeKind
    policy: PolicyView
    vms: tuple[str, ...]
    events: tuple[str, ...]
    incarnation: int
    seen_at: datetime | None
    is_enabled: bool


class VmView(msgspec.Struct, frozen=True):
    """A VM, and the ids of the events that name it."""

    name: str
    scope: str
    address: str
    id: str
    host: str
    update_domain: int
    fault_domain: int
    power: Power
    events: tuple[str, ...]


class HostView(msgspec.Struct, frozen=True):
    """A host, the VMs on it, and the ids of the events that name any of them."""

    name: str
    vms: tuple[str, ...]
    scopes: tuple[str, ...]
    events: tuple[str, ...]


class Scopes(msgspec.Struct, frozen=True):
    scopes: list[ScopeView]
    total: int
    next: str | None


class Vms(msgspec.Struct, frozen=True):
    vms: list[VmView]
    total: int
    next: str | None


class Hosts(msgspec.Struct, frozen=True):
    hosts: list[HostView]
    total: int
    next: str | None


class Events(msgspec.Struct, frozen=True):
    events: list[EventView]
    total: int
    next: str | None


class EventAnswer(msgspec.Struct, frozen=True):
    """The event, or null for an operation that nobody needed to be told of."""

    event: EventView | None


class EventsAnswer(msgspec.Struct, frozen=True):
    """One event for each scope and update domain on the host."""

    events: list[EventView]


class DifferenceView(msgspec.Struct, frozen=True):
    """What applying a fleet changed, or with `dry_run` would change: names of scopes and of VMs."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    vms_joined: tuple[str, ...]
    vms_left: tuple[str, ...]
    hosts_added: tuple[str, ...]
    hosts_removed: tuple[str, ...]
    dry_run: bool


def event(told: Told) -> EventView:
    return _event(told.scope, told.event)


def event_answer(told: Told | None) -> EventAnswer:
    return EventAnswer(None if told is None else event(told))


def events_answer(told: Iterable[Told]) -> EventsAnswer:
    return EventsAnswer([event(one) for one in told])


async def events(board: Board, limit: int, cursor: str | None) -> Events:
    """All live events, the oldest first."""
    keys, after = page(board.event_keys, _itself, limit, cursor)

    def made(part: Sequence[tuple[str, str]]) -> Iterator[EventView]:
        found = (board.find_event(event_id) for _, event_id in part)
        return (_event(one[0].scope, one[1]) for one in found if one is not None)

    return Events(await _in_slices(keys, made), len(board.event_keys), after)


def scope(engine: Engine, place: PublishedScope) -> ScopeView:
    shown = place.scope
    return ScopeView(
        name=shown.name,
        kind=shown.kind,
        policy=_policy(shown.policy),
        vms=tuple(vm.name for vm in shown.vms),
        events=tuple(one.id for one in shown.events),
        incarnation=shown.incarnation,
        seen_at=shown.seen_at,
        is_enabled=is_enabled(shown, engine.clock.now(), engine.timing),
    )


async def scopes(engine: Engine, limit: int, cursor: str | None) -> Scopes:
    board = engine.board
    names, after = page(board.scope_names, _name, limit, cursor)

    def made(part: Sequence[str]) -> Iterator[ScopeView]:
        return (scope(engine, board.scopes[name]) for name in part if name in board.scopes)

    return Scopes(await _in_slices(names, made), len(board.scopes), after)


def vm(place: PublishedScope, shown: Vm) -> VmView:
    return _vm(
        place.scope, shown, (one.id for one in place.scope.events if shown.name in one.resources)
    )


async def vms(board: Board, limit: int, cursor: str | None) -> Vms:
    names, after = page(board.vm_names, _name, limit, cursor)
    return Vms(await _in_slices(names, lambda part: _vms(board, part)), len(board.vms), after)


def _vms(board: Board, names: Sequence[str]) -> Iterator[VmView]:
    """Each scope is gone through once, not once for each of its VMs."""
    wanted = set(names)
    found: dict[str, VmView] = {}
    for place in {board.vms[name] for name in names if name in board.vms}:
        events: dict[str, list[str]] = defaultdict(list)
        for one in place.scope.events:
            for name in one.resources:
                events[name].append(one.id)
        found |= {
            one.name: _vm(place.scope, one, events.get(one.name, ()))
            for one in place.scope.vms
            if one.name in wanted
        }
    return (found[name] for name in names if name in found)


def _vm(in_scope: Scope, shown: Vm, event_ids: Iterable[str]) -> VmView:
    return VmView(
        name=shown.name,
        scope=in_scope.name,
        address=shown.address,
        id=shown.id,
        host=shown.host,
        update_domain=shown.update_domain,
        fault_domain=shown.fault_domain,
        power=shown.power,
        events=tuple(event_ids),
    )


def host(board: Board, name: str) -> HostView:
    places = board.scopes_on(name)
    names = board.hosts.get(name, set())
    found = [
        one for place in places for one in place.scope.events if not names.isdisjoint(one.resources)
    ]
    return HostView(
        name=name,
        vms=tuple(sorted(names)),
        scopes=tuple(place.scope.name for place in places),
        events=tuple(one.id for one in found),
    )


async def hosts(board: Board, limit: int, cursor: str | None) -> Hosts:
    names, after = page(board.known_hosts, _name, limit, cursor)

    def made(part: Sequence[str]) -> Iterator[HostView]:
        return (host(board, name) for name in part if board.is_host(name))

    return Hosts(await _in_slices(names, made), len(board.known_hosts), after)


def difference(found: Difference, *, dry_run: bool) -> DifferenceView:
    return DifferenceView(*found, dry_run=dry_run)


async def _in_slices(keys: Sequence[K], made: Callable[[Sequence[K]], Iterable[V]]) -> list[V]:
    """A large page, made without keeping polls waiting. What is deleted meanwhile is left out."""
    shown: list[V] = []
    for first in range(0, len(keys), POLLS_PASS_EVERY):
        shown += made(keys[first : first + POLLS_PASS_EVERY])
        await asyncio.sleep(0)
    return shown


def _name(name: str) -> Key:
    return (name,)


def _itself(key: Key) -> Key:
    return key


def _event(in_scope: Scope, shown: Event) -> EventView:
    return EventView(
        id=shown.id,
        type=shown.type,
        status=shown.status,
        source=shown.source,
        scope=in_scope.name,
        resources=shown.resources,
        not_before=shown.not_before,
        duration_seconds=shown.duration_seconds,
        description=shown.description,
        created_at=shown.created_at,
        started_at=shown.started_at,
        approvals=shown.approvals,
        impacts=tuple(
            _impact(impact) for impact in in_scope.impacts if impact.event_id == shown.id
        ),
        cause=shown.cause,
    )


def _impact(impact: Impact) -> ImpactView:
    return ImpactView(impact.vm, impact.state, impact.tries, impact.failures, impact.detail)


def _policy(policy: Policy) -> PolicyView:
    notice = policy.terminate_notice
    return PolicyView(
        policy.approval,
        policy.auto_approve,
        None if notice is None else notice.total_seconds(),
        policy.couple_terminates,
        policy.user_operations_max,
        format_budget(policy.max_unavailable),
    )
