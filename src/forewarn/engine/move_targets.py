"""Which hosts with daemons a VM may move to. The order is decided in `platform/placement.py`."""

from collections.abc import Iterable, Mapping

from forewarn.core.event import is_move
from forewarn.engine.engine import Engine
from forewarn.engine.host_sessions import HostSessions
from forewarn.engine.managed_hosts import ManagedHost, ManagedHosts
from forewarn.platform.base import ImpactRequest
from forewarn.platform.placement import Move, rank_targets


class MoveTargets:
    """What the hosts report, and what this server has handed out."""

    def __init__(self, engine: Engine, managed: ManagedHosts, sessions: HostSessions) -> None:
        self._engine = engine
        self._managed = managed
        self._sessions = sessions

    def rank(self, request: ImpactRequest, avoid: Mapping[str, int]) -> tuple[str, ...]:
        """The hosts that a VM may move to, the best first; `avoid` names bad ones, and how bad.

        One that runs it already has room for it.
        """
        vm, scope = request.vm, self._engine.board.scopes[request.scope].scope
        others = [each for each in self._managed.connected() if each.host != vm.host]
        ranked = rank_targets(
            Move(vm.name, scope.name, self._managed.memory_of(vm)),
            {each.host: each.free_bytes(but=vm.id) for each in others},
            hosts=len(others),
            moves=[move for move in self._list_moves(others) if move.vm != vm.name],
            avoid=avoid,
            scope_hosts=[each.host for each in scope.vms],
        )
        return tuple(ranked)

    def _list_moves(self, hosts: Iterable[ManagedHost]) -> Iterable[Move]:
        """The VMs that are on their way to a host, as far as this server knows.

        It knows the first target of those that it has handed out. Of those of other servers it
        knows what the target reports: a VM that it does not run yet.
        """
        moves, board = dict[str, Move](), self._engine.board
        for each in hosts:
            coming = (vm_id for vm_id, vm in each.vms.items() if not vm.is_running)
            for name in filter(None, map(board.ids.get, coming)):
                scope = board.vms[name].scope
                vm = scope.vm(name)
                moving = (i.vm for i in scope.impacts if i.is_held and is_move(i.type, i.cause))
                if vm is not None and vm.host != each.host and name in moving:
                    moves[name] = Move(name, scope.name, self._managed.memory_of(vm), each.host)
        for session in self._sessions.all():
            for request in (call.request for call in session.calls.values()):
                if request.targets:
                    vm, need_bytes = request.vm, self._managed.memory_of(request.vm)
                    moves[vm.name] = Move(vm.name, request.scope, need_bytes, request.targets[0])
        return moves.values()
