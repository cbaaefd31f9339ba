"""The daemons that are connected to this server: their sessions, their work, and its results.

A daemon says what it has and asks for work: a long poll, and its sign of life.

    UNKNOWN -> CONNECTED         its first request; the record of the host names this server
    CONNECTED -> SILENT          no request for SILENT; the record names no server, and the host is
                                 unreachable
    CONNECTED -> (taken over)    its record names another server or session
    CONNECTED -> (ended)         it leaves

In the last three, its impacts are released: they wait for the daemon and fail nothing.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Back
from forewarn.core.event import Impact, ImpactState, is_move
from forewarn.core.fleet import DEFAULT_INSTANCE, Vm
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import Engine
from forewarn.engine.host_session import DaemonSession, HandedOut, refuse_late, unreachable
from forewarn.engine.inventory import PROBLEMS_MAX, HostInventory
from forewarn.engine.managed_hosts import HOST_KEY, ManagedHost, ManagedHosts, unless_forgotten
from forewarn.engine.operations import Operations
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error, HostTaken, ImpactFailed, Unavailable
from forewarn.platform.base import BackWatcher, ImpactRequest, ImpactResult, Platform
from forewarn.platform.placement import Move, rank_targets
from forewarn.platform.remote import ImpactKey, RunningImpact, Work, WorkRequest
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.store.base import Lease

WAIT = timedelta(seconds=5)
"""How long a request for work is held."""
SILENT = timedelta(seconds=15)
"""After its last request a daemon counts as lost. It repeats requests after WAIT at the latest."""
TICK = timedelta(seconds=1)
BOOTING = ImpactState.BOOTING


class RemoteHosts:
    """The platform of managed hosts; `local` is that of all others.

    `get_lease` returns the lease under which this server works, `avoid` the hosts that are bad
    targets of a move. `on_change` is called with VMs whose impacts this server may run now.
    """

    def __init__(self, engine: Engine, operations: Operations) -> None:
        self.managed = ManagedHosts(engine)
        self.local: Platform | None = None
        self.get_lease: Callable[[], Lease | None] = lambda: None
        self.avoid: Callable[[], Mapping[str, int]] = dict
        self.on_change: Callable[[Iterable[str]], None] = lambda vms: None
        self._engine = engine
        self._operations = operations
        self._sessions: dict[str, DaemonSession] = {}
        self._waiting: defaultdict[str, set[DaemonSession]] = defaultdict(set)  # by scope
        self._connected = asyncio.Event()
        self._is_stopping = False
        engine.on_change("hostd", self._on_record)
        engine.board.subscribe(self._on_scope)

    # --- the platform

    def handles(self, vm: Vm, impact: Impact) -> bool:
        """Whether this server can carry out an impact now."""
        moves = is_move(impact.type, impact.cause)
        return self._serves(self.managed.acting_host(vm, moves=moves))

    def _serves(self, host: str) -> bool:
        """Whether this server acts on the VMs of a host."""
        record, session = self.managed.find(host), self._sessions.get(host)
        if record is None:
            return True
        served = session and (session.latest.session, self._server())
        return served == (record.session, record.server)

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        """Let the daemon of the VM's host carry it out; HostUnreachable if it is lost meanwhile."""
        host = self.managed.acting_host(request.vm, moves=request.moves)
        if self.managed.find(host) is None:
            assert self.local is not None
            if self.managed.is_forgotten(host) and isinstance(self.local, SimulatedPlatform):
                raise ImpactFailed(
                    f"{host} had a daemon, and a simulation would do nothing to its VMs;"
                    f" expected a daemon, or another `platform` of the server"
                )
            return await self.local.run_impact(request)
        if not self._serves(host):
            raise unreachable(host)
        handed_out = dataclasses.replace(
            request,
            vm=replace(request.vm, host=host, instance=DEFAULT_INSTANCE),  # that may be large
            targets=self._rank_targets(request) if request.moves else (),
            may_run_on=self.managed.may_run_on(request.vm.name, but=host),
        )
        session, key = self._sessions[host], (request.event_id, request.vm.name)
        call = HandedOut(handed_out, asyncio.get_running_loop().create_future())
        session.calls[key] = call
        session.changed.set()
        try:
            result = await call.result
            moved_to = host if host != request.vm.host else ""
            return replace(result, host=result.host or moved_to)
        finally:
            if session.calls.get(key) is call:
                del session.calls[key]
            session.changed.set()

    async def wait_until_back(self, request: ImpactRequest) -> None:
        """A daemon sends a second result for that; else a poll or the limit ends the wait."""
        is_managed = self.managed.find(request.vm.host) is not None
        if is_managed or not isinstance(self.local, BackWatcher):
            await asyncio.Event().wait()  # until it is cancelled
        else:
            await self.local.wait_until_back(request)

    def _rank_targets(self, request: ImpactRequest) -> tuple[str, ...]:
        """The hosts that the VM may move to. One that runs it already has room for it."""
        vm, scope = request.vm, self._engine.board.scopes[request.scope].scope
        others = [each for each in self.managed.connected() if each.host != vm.host]
        ranked = rank_targets(
            Move(vm.name, scope.name, self.managed.memory_of(vm)),
            {each.host: each.free_bytes(but=vm.id) for each in others},
            hosts=len(others),
            moves=[move for move in self._list_moves(others) if move.vm != vm.name],
            avoid=self.avoid(),
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
                    moves[name] = Move(name, scope.name, self.managed.memory_of(vm), each.host)
        for session in self._sessions.values():
            for request in (call.request for call in session.calls.values()):
                if request.targets:
                    vm, need_bytes = request.vm, self.managed.memory_of(request.vm)
                    moves[vm.name] = Move(vm.name, request.scope, need_bytes, request.targets[0])
        return moves.values()

    # --- what a daemon asks for

    async def work(
        self, host: str, request: WorkRequest, *, by: str, scopes: Collection[str] = ()
    ) -> Work:
        """Take what the daemon has, with VMs in these scopes, and return what is new for it.

        With `wait` as soon as there is something, or nothing after a few seconds. A later request
        of the daemon ends that: each of them says everything.
        """
        session = await self._connect(host, request)
        refuse_late(host, request, session.latest)
        session.latest = request
        session.changed.set()
        problems, is_merged = await self._merge(host, request, by, scopes)
        for each in request.running:
            await self._take_result(host, session, each)
        if request.is_leaving:
            await self._end(host, request)
        work = await self._wait_for_work(host, session, request)
        return replace(work, problems=problems, is_merged=is_merged)

    async def _wait_for_work(self, host: str, session: DaemonSession, request: WorkRequest) -> Work:
        clock, vms = self._engine.clock, self._engine.board.vms
        until = clock.now() + WAIT
        scopes = {vms[each.vm].scope.name for each in request.running if each.vm in vms}
        for scope in scopes:
            self._waiting[scope].add(session)
        try:
            while True:  # ends after WAIT, or before
                session.changed.clear()
                work = self._find_work(host, session, request.running)
                is_latest = self._sessions.get(host) is session and session.latest is request
                is_held = request.wait and is_latest and not self._is_stopping
                if work.impacts or work.cancel or not is_held or clock.now() >= until:
                    return work
                await wait_for(clock, session.changed, until)
        finally:
            for scope in scopes:
                self._waiting[scope].discard(session)
                if not self._waiting[scope]:
                    del self._waiting[scope]

    def _find_work(
        self, host: str, session: DaemonSession, running: Sequence[RunningImpact]
    ) -> Work:
        """What the daemon does not run yet, and what it runs that is recorded or not wanted.

        An impact that another server had handed out is still wanted: this one will claim it.
        """
        known = {each.key: each.tries for each in running}
        impacts = tuple(
            call.request
            for key, call in session.calls.items()
            if known.get(key) != call.request.tries and not call.result.done()
        )
        cancel = tuple(
            replace(each, result=None, may_run_on=self.managed.may_run_on(each.vm, but=host))
            for each in running
            if each.key not in session.calls and not self._is_wanted(host, each)
        )
        return Work(impacts, cancel)

    def _is_wanted(self, host: str, each: RunningImpact) -> bool:
        """Whether some server had an impact carried out on this host, and has no result yet.

        What an earlier run of the daemon began (`tries` is 0) is wanted until it is tried again.
        """
        impact = self._find_impact(host, each.key)
        if impact is None or each.tries == 0:
            return impact is not None and not impact.is_over
        return impact.state in (ImpactState.CLAIMED, BOOTING)

    def _find_impact(self, host: str, key: ImpactKey) -> Impact | None:
        """An impact that the daemon of this host carries out."""
        published = self._engine.board.vms.get(key[1])
        vm = published.scope.vm(key[1]) if published else None
        if published is None or vm is None:
            return None
        impact = published.scope.impact(*key)
        moves = impact is not None and is_move(impact.type, impact.cause)
        return impact if self.managed.acting_host(vm, moves=moves) == host else None

    async def _merge(
        self, host: str, request: WorkRequest, by: str, scopes: Collection[str]
    ) -> tuple[tuple[str, ...], bool]:
        """Merge the VMs of a host into the fleet.

        Returns what does not fit, and whether the rest was merged: not if another server changes
        the fleet at the same time. Then the daemon sends it again.
        """
        report = request.inventory
        if report is None:
            return (), True
        inventory = HostInventory(self._engine, self.managed, host, report.vms, scopes)

        def describe(record: ManagedHost) -> ManagedHost:
            return replace(record, memory_bytes=report.memory_bytes, vms=inventory.vms)

        await self._update(host, request, describe)
        try:
            await self._operations.merge(inventory.plan, by=by)
        except Unavailable as error:
            self._engine.throttled_log.warn("VMs not merged", host=host, problem=error.message)
            return (), False
        for problem in inventory.problems:
            self._engine.throttled_log.warn("VM not accepted", host=host, problem=problem)
        return tuple(inventory.problems[:PROBLEMS_MAX]), True

    async def _take_result(self, host: str, session: DaemonSession, each: RunningImpact) -> None:
        """Use the result of an impact, if it has one and this server wants it.

        One that is not may belong to an impact that this server is about to claim.
        """
        call, result = session.calls.get(each.key), each.result
        if result is None:
            return
        if call is None:
            await self._end_boot(host, each, result)
        elif call.request.tries != each.tries or call.result.done():
            return
        elif result.problem:
            call.result.set_exception(ImpactFailed(result.problem, output=result.detail))
        else:
            known = (host, *call.request.targets, *call.request.may_run_on)
            place = result.host if result.host in known else ""  # never one that it only claims
            call.result.set_result(replace(result, host=place))

    async def _end_boot(self, host: str, each: RunningImpact, result: ImpactResult) -> None:
        """The VM that an impact has restarted may be back."""
        impact, is_back = self._find_impact(host, each.key), result.is_back and not result.problem
        if impact and (impact.state, impact.tries, is_back) == (BOOTING, each.tries, True):
            back = Back(event_id=each.event_id, vm=each.vm, detail="guest agent answers")
            scope = self._engine.board.vms[each.vm].scope.name
            await self._engine.submit(scope, back, by=f"hostd {host}")

    async def _end(self, host: str, request: WorkRequest) -> None:
        """The daemon stops, or is silent since this request."""
        record = self.managed.find(host)
        if record is not None and record.session == request.session:
            await self._update(host, request, lambda record: replace(record, server=""))

    # --- sessions

    def stop(self) -> None:
        """Answer all requests for work now."""
        self._is_stopping = True
        for session in self._sessions.values():
            session.changed.set()

    async def run(self) -> None:
        """Notice silent daemons, until cancelled."""
        clock = self._engine.clock
        while True:  # ends when cancelled
            await self._connected.wait()
            await clock.sleep_until(clock.now() + TICK)
            now = clock.now()
            for host, session in list(self._sessions.items()):
                try:
                    if session.silent_at <= now:
                        await self._end(host, session.latest)
                        self._drop(host)
                except Error as error:  # the other hosts come first
                    problem = error.message
                    self._engine.throttled_log.warn("host not updated", host=host, problem=problem)

    async def _connect(self, host: str, request: WorkRequest) -> DaemonSession:
        """The session of a daemon that has sent something; HostTaken if another is connected."""
        session, session_id, now = self._sessions.get(host), request.session, self._engine.clock.now
        if session is None or session.latest.session != session_id or not self._serves(host):
            await self._update(host, request, lambda record: record)
            await self._engine.require_caught_up()  # another server may have handed out impacts
            session = self._sessions.get(host)
            if session is None or session.latest.session != session_id:
                self._drop(host)
                session = self._sessions[host] = DaemonSession(request, now())
                self._connected.set()
            self.on_change(self.managed.vms_of(self.managed.find(host)))
        session.silent_at = now() + SILENT
        return session

    async def _update(
        self, host: str, request: WorkRequest, change: Callable[[ManagedHost], ManagedHost]
    ) -> None:
        """Change the record of a host whose daemon this request connects to this server."""
        lease, key, session_id = self.get_lease(), HOST_KEY.format(host), request.session
        if lease is None:
            raise Unavailable("this server has no lease at present; try another server")

        def decide(transaction: Transaction) -> None:
            known = unless_forgotten(transaction.get(key))
            if known and known.session != session_id and not self.managed.is_unreachable(host):
                raise HostTaken(
                    f"another daemon is connected for {host} since {known.since.isoformat()};"
                    " expected one daemon for each host; one that ended without notice is replaced"
                    f" {SILENT.total_seconds():g} seconds after its last request",
                    since=known.since,
                )
            is_elsewhere = (
                known is not None
                and known.server not in ("", self._server())
                and not self.managed.is_unreachable(host)
            )
            refuse_late(host, request, known, is_elsewhere=is_elsewhere)
            old = known or ManagedHost(host, session_id, "", transaction.now)
            new = change(replace(old, session=session_id, server=self._server()))
            if (old.server, old.session) != (new.server, new.session):
                new = replace(new, since=transaction.now)
                word = "connected" if new.server else "unreachable"
                detail = f"daemon of {host} {word}"
                transaction.record(Change(ChangeKind.UPDATED, host=host, detail=detail))
            if new != known:
                transaction.put(key, replace(new, number=request.number))

        await self._engine.update([key], decide, by=f"hostd {host}", lease=lease)

    def _server(self) -> str:
        lease = self.get_lease()
        return lease.name.partition("/")[2] if lease is not None else ""

    def _drop(self, host: str) -> None:
        """The daemon is lost, or served by another server: its impacts are released."""
        session = self._sessions.pop(host, None)
        if session:
            session.end(unreachable(host))
        if not self._sessions:
            self._connected.clear()

    def _on_record(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        record = after or before
        assert record is not None
        session = self._sessions.get(record.host)
        if session is not None and not self._serves(record.host):
            self._drop(record.host)
        self.on_change(self.managed.vms_of(before, after))

    def _on_scope(self, published: PublishedScope) -> None:
        for session in self._waiting.get(published.scope.name, ()):
            session.changed.set()
