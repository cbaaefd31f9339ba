"""Which hosts with daemons a VM may move to. The order is decided in `platform/placement.py`."""

import asyncio
from collections.abc import Collection, Iterable, Mapping

from forewarn.core.event import Impact, is_move
from forewarn.core.fleet import Vm
from forewarn.engine.board import PublishedScope
from forewarn.engine.engine import Engine
from forewarn.engine.host_sessions import HostSessions
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.platform.base import ImpactRequest
from forewarn.platform.placement import Move, rank_targets


class MoveTargets:
    """What the hosts report, and what this server has handed out.

    Many moves may begin together, so the work for one grows with the hosts and with the VMs that
    are on their way, and not with the other VMs. Create it before the engine loads.
    """

    def __init__(self, engine: Engine, managed: ManagedHosts, sessions: HostSessions) -> None:
        self._engine = engine
        self._managed = managed
        self._sessions = sessions
        self._turn = asyncio.Lock()
        self._moving: set[str] = set()  # scopes
        engine.board.subscribe(self._on_scope)

    async def take_turn(self) -> None:
        """Return when `rank` may be called: once in each iteration of the event loop, so that polls
        pass between moves that begin together.
        """
        async with self._turn:
            await asyncio.sleep(0)

    def rank(self, request: ImpactRequest, avoid: Mapping[str, int]) -> tuple[str, ...]:
        """The hosts that a VM may move to, the best first; `avoid` names bad ones, and how bad.

        One that runs it already has room for it. Empty if no other host is managed: then its daemon
        may restart it in place. ImpactFailed if the others are not connected, or have no room.
        """
        vm, scope = request.vm, self._engine.board.scopes[request.scope].scope
        connected = (each.host for each in self._managed.connected())
        free = {
            each: self._managed.free_bytes(each, vm.id) for each in connected if each != vm.host
        }
        ranked = rank_targets(
            Move(vm.name, scope.name, self._managed.memory_of(vm)),
            free,
            hosts=self._managed.count_others(vm.host),
            moves=[move for move in self._list_moves(free) if move.vm != vm.name],
            avoid=avoid,
            scope_hosts=[each.host for each in scope.vms],
        )
        return tuple(ranked)

    def _on_scope(self, published: PublishedScope) -> None:
        scope = published.scope
        is_moving = any(map(is_held_move, scope.impacts))
        (self._moving.add if is_moving else self._moving.discard)(scope.name)

    def _list_moves(self, hosts: Collection[str]) -> Iterable[Move]:
        """The VMs that are on their way to a host, as far as this server knows.

        It knows the first target of those that it has handed out. Of those of other servers it
        knows what the target reports: a VM that it does not run yet.
        """
        moves = dict[str, Move]()
        for name in self._moving:
            scope = self._engine.board.scopes[name].scope
            moving = {impact.vm for impact in scope.impacts if is_held_move(impact)}
            for vm in (each for each in scope.vms if each.name in moving):
                for host in self._find_targets(vm, hosts):
                    moves[vm.name] = Move(vm.name, name, self._managed.memory_of(vm), host)
        for session in self._sessions.all():
            for request in (call.request for call in session.calls.values()):
                if request.targets:
                    vm, need_bytes = request.vm, self._managed.memory_of(request.vm)
                    moves[vm.name] = Move(vm.name, request.scope, need_bytes, request.targets[0])
        return moves.values()

    def _find_targets(self, vm: Vm, hosts: Collection[str]) -> Iterable[str]:
        """The hosts among these that have the VM, do not run it, and are not its own.

        None if its id is not unique: it may be another VM.
        """
        if self._engine.board.ids.get(vm.id) != vm.name:
            return
        running = self._managed.running_on(vm.id)
        for host in self._managed.reporting(vm.id):
            if host in hosts and host != vm.host and host not in running:
                yield host


def is_held_move(impact: Impact) -> bool:
    """Whether a server moves a VM at present."""
    return impact.is_held and is_move(impact.type, impact.cause)
