"""The lists of the control API: which items are wanted, in which order, and a page of them."""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from forewarn.core.fleet import Scope, Vm
from forewarn.engine.board import Board, event_key
from forewarn.engine.engine import Engine
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.engine.problems import Problems
from forewarn.web.control.dependencies import PageRequest
from forewarn.web.control.pagination import Key, build_page, name_key
from forewarn.web.control.views import (
    EventList,
    EventView,
    HostList,
    HostView,
    ScopeList,
    ScopeView,
    VmList,
    VmView,
    event_view,
    host_view,
    scope_view,
    view,
)


class Filter(msgspec.Struct, frozen=True):
    """Which items of a list are wanted: with these names or ids, on this host, in this scope."""

    names: Sequence[str] | None = None
    host: str | None = None
    scope: str | None = None

    def vms(self, board: Board) -> set[str] | None:
        """The VMs on the host and in the scope; None if there is no such limit.

        UnknownHost or UnknownScope if there is none.
        """
        limits = list[set[str]]()
        if self.host is not None:
            board.scopes_on(self.host)
            limits.append(set(board.hosts[self.host]))
        if self.scope is not None:
            limits.append({vm.name for vm in board.find_scope(self.scope).scope.vms})
        return set.intersection(*limits) if limits else None


ALL = Filter()


async def event_list(
    board: Board, problems: Problems, request: PageRequest, wanted: Filter = ALL
) -> EventList:
    """The wanted live events, oldest first."""
    keys: Sequence[Key] = board.event_keys
    vms = wanted.vms(board)
    if wanted.names is not None:
        found = (board.find_event(event_id.upper()) for event_id in set(wanted.names))
        keys = sorted(event_key(event) for _, event in filter(None, found))
    if vms is not None:
        scopes = {board.vms[vm].scope.name: board.vms[vm].scope for vm in vms}
        concerned = {
            event_key(event)
            for scope in scopes.values()
            for event in scope.events
            if not vms.isdisjoint(event.resources)
        }
        keys = sorted(concerned.intersection(keys) if wanted.names is not None else concerned)

    def build(keys: Sequence[Key]) -> Iterator[EventView]:
        for _, event_id in keys:
            placed = board.find_event(event_id)
            if placed is not None:
                yield event_view(problems, placed[0].scope, placed[1])

    def count_vms(key: Key) -> int:
        placed = board.find_event(key[1])
        return len(placed[1].resources) if placed is not None else 0

    return await build_page(EventList, keys, lambda key: key, build, request, count_vms)


Names = Sequence[str] | None


def _select(names: Names, known: Container[str], everything: Sequence[str]) -> Sequence[str]:
    """The known ones of these names in their order, or everything."""
    return everything if names is None else sorted({name for name in names if name in known})


async def scope_list(engine: Engine, request: PageRequest, names: Names = None) -> ScopeList:
    scopes = engine.board.scopes
    items = _select(names, scopes, engine.board.scope_names)

    def build(names: Sequence[str]) -> Iterator[ScopeView]:
        return (scope_view(engine, scopes[name].scope) for name in names if name in scopes)

    def count_vms(name: str) -> int:
        return len(scopes[name].scope.vms) if name in scopes else 0

    return await build_page(ScopeList, items, name_key, build, request, count_vms)


async def vm_list(
    engine: Engine, problems: Problems, request: PageRequest, wanted: Filter = ALL
) -> VmList:
    board, vms = engine.board, wanted.vms(engine.board)
    if vms is None:
        items = _select(wanted.names, board.vms, board.vm_names)
    else:
        items = sorted(vms if wanted.names is None else vms.intersection(wanted.names))
    views = VmViews(engine, problems)
    return await build_page(VmList, items, name_key, views.build, request)


class _ScopeRead(NamedTuple):
    """What the views of a scope's VMs need of it, by the name of the VM."""

    scope: Scope
    vms: dict[str, Vm]
    events: dict[str, list[str]]
    seen: dict[str, int]


class VmViews:
    """Builds the views of VMs. Reads each scope once, not once for each of its VMs."""

    def __init__(self, engine: Engine, problems: Problems) -> None:
        self._engine = engine
        self._problems = problems
        self._reads: dict[str, _ScopeRead] = {}

    def build(self, names: Sequence[str]) -> Iterator[VmView]:
        """The views of these VMs; those that have left the fleet are left out."""
        for name in names:
            published = self._engine.board.vms.get(name)
            if published is not None:
                yield self._view(self._read(published.scope), name)

    def _read(self, scope: Scope) -> _ScopeRead:
        read = self._reads.get(scope.name)
        if read is not None and read.scope is scope:
            return read
        events: dict[str, list[str]] = defaultdict(list)
        for event in scope.events:
            for name in event.resources:
                events[name].append(event.id)
        vms = {vm.name: vm for vm in scope.vms}
        read = _ScopeRead(scope, vms, events, self._engine.last_polls.times(scope))
        self._reads[scope.name] = read
        return read

    def _view(self, read: _ScopeRead, name: str) -> VmView:
        vm = read.vms[name]
        return view(
            VmView,
            vm,
            scope=read.scope.name,
            events=tuple(read.events.get(name, ())),
            seen_at=datetime.fromtimestamp(read.seen[name], UTC) if name in read.seen else None,
            problems=tuple(self._problems.of_vm(read.scope, vm)),
        )


async def host_list(
    board: Board,
    managed: ManagedHosts,
    problems: Problems,
    request: PageRequest,
    names: Names = None,
) -> HostList:
    def build(names: Sequence[str]) -> Iterator[HostView]:
        return (host_view(board, managed, problems, name) for name in names if name in board.hosts)

    items = _select(names, board.hosts, board.known_hosts)
    return await build_page(
        HostList, items, name_key, build, request, lambda name: len(board.hosts.get(name, ()))
    )
