"""The daemons that are connected to this server: their sessions, their work, and its results.

A daemon asks for work (a long poll, and its sign of life), reports its VMs, and sends results.

    UNKNOWN -> CONNECTED         its first request; the record of the host names this server
    CONNECTED -> SILENT          no request for SILENT, or BROKEN after its connection broke; the
                                 record names no server, and the host is unreachable
    CONNECTED -> (taken over)    its record names another server or session
    CONNECTED -> (ended)         it has ended its session

In the last three, its impacts are released: they wait for the daemon and fail nothing.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Back
from forewarn.core.event import Impact, ImpactState, is_move
from forewarn.core.fleet import DEFAULT_INSTANCE
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import Engine
from forewarn.engine.host_session import (
    Call,
    ImpactKey,
    RemoteResult,
    RunningImpact,
    Session,
    Work,
)
from forewarn.engine.inventory import Inventory
from forewarn.engine.managed_hosts import HOST_KEY, ManagedHost, ManagedHosts
from forewarn.engine.operations import Operations
from forewarn.engine.transaction import Transaction
from forewarn.errors import (
    Error,
    HostTaken,
    HostUnreachable,
    ImpactFailed,
    Refused,
    Unavailable,
    UnknownHost,
)
from forewarn.platform.base import BackWatcher, ImpactRequest, ImpactResult, Platform
from forewarn.platform.placement import Move, rank_targets
from forewarn.store.base import Lease

SILENT = timedelta(seconds=10)
BROKEN = timedelta(seconds=5)
WAIT_MAX = timedelta(seconds=5)
"""A daemon that was killed is noticed after this and SILENT: the end of its connection looks like
that of a client that only sends no more.
"""
MERGE_EVERY = timedelta(seconds=60)
"""The last report is merged again, because the fleet may have been changed otherwise."""
MERGE_TRIES_MAX = 5
TICK = timedelta(seconds=1)
RECORDED_SECONDS_MAX = 8.0


class RemoteHosts:
    """The platform of managed hosts; `local` is that of all others.

    `get_lease` returns the lease under which this server works, `avoid` the hosts that are bad
    targets of a move. `on_change` is called with a host whose impacts this server may run now.
    """

    def __init__(self, engine: Engine, operations: Operations) -> None:
        self.managed = ManagedHosts(engine)
        self.local: Platform | None = None
        self.get_lease: Callable[[], Lease | None] = lambda: None
        self.avoid: Callable[[], Mapping[str, int]] = dict
        self.on_change: Callable[[str], None] = lambda host: None
        self._engine = engine
        self._operations = operations
        self._sessions: dict[str, Session] = {}
        self._connected = asyncio.Event()
        self._is_stopping = False
        self._published: asyncio.Event | None = None
        engine.on_change("hostd", self._on_record)
        engine.board.subscribe(self._on_scope)

    # --- the platform

    def handles(self, host: str) -> bool:
        """Whether this server can act on the VMs of a host now."""
        record, session = self.managed.find(host), self._sessions.get(host)
        if record is None:
            return True
        return session is not None and (record.session, record.server) == (
            session.id,
            self._server(),
        )

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        """Let the daemon of the VM's host carry it out; HostUnreachable if it is lost meanwhile."""
        host = request.vm.host
        if self.managed.find(host) is None:
            assert self.local is not None
            return await self.local.run_impact(request)
        if not self.handles(host):
            raise _unreachable(host)
        running_on = self.managed.running_on(request.vm.id)
        if not request.moves and host not in running_on:  # it was moved by someone else
            host = next(filter(self.handles, running_on), host)
        handed_out = dataclasses.replace(
            request,
            vm=replace(request.vm, host=host, instance=DEFAULT_INSTANCE),  # that may be large
            targets=self._rank_targets(request) if request.moves else (),
            may_run_on=tuple(sorted({*running_on, request.vm.host} - {host})),
        )
        session, key = self._sessions[host], (request.event_id, request.vm.name)
        call = session.calls[key] = Call(handed_out, asyncio.get_running_loop().create_future())
        session.changed.set()
        try:
            result = await call.result
            moved_to = host if host != request.vm.host else ""
            return dataclasses.replace(result, host=result.host or moved_to)
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
        self,
        host: str,
        session_id: str,
        running: Sequence[RunningImpact],
        wait: timedelta,
        wait_for_disconnect: Callable[[], Awaitable[object]],
    ) -> Work:
        """What is new for the daemon, as soon as there is something, or nothing after `wait`."""
        session = await self._connect(host, session_id)
        clock = self._engine.clock
        until = clock.now() + min(wait, WAIT_MAX)
        session.silent_at = until + SILENT
        gone = asyncio.ensure_future(wait_for_disconnect())
        gone.add_done_callback(lambda _: session.changed.set())
        try:
            while True:  # ends at `until`, or before
                session.changed.clear()
                work = self._find_work(host, session, running)
                is_over = clock.now() >= until or self._sessions.get(host) is not session
                has_news = work.impacts or work.cancel
                if has_news or is_over or gone.done() or self._is_stopping:
                    return work
                await wait_for(clock, session.changed, until)
        finally:
            session.silent_at = clock.now() + (BROKEN if gone.done() else SILENT)
            gone.cancel()

    def _find_work(self, host: str, session: Session, running: Sequence[RunningImpact]) -> Work:
        """What the daemon does not run yet, and what it runs that is no longer wanted.

        An impact that another server had handed out is still wanted: this one will claim it.
        """
        known = {each.key: each.tries for each in running}
        impacts = [
            call.request
            for key, call in session.calls.items()
            if known.get(key) != call.request.tries and not call.result.done()
        ]
        cancel = [
            each
            for each in running
            if each.key not in session.calls and not self._is_wanted(host, each.key)
        ]
        return Work(impacts, cancel)

    def _is_wanted(self, host: str, key: ImpactKey) -> bool:
        """Whether some server had an impact carried out on this host, and has no result yet."""
        impact = self._find_impact(host, key)
        return impact is not None and impact.state in (ImpactState.CLAIMED, ImpactState.BOOTING)

    def _find_impact(self, host: str, key: ImpactKey) -> Impact | None:
        """An impact of a VM on this host."""
        board, vm = self._engine.board, key[1]
        return board.vms[vm].scope.impact(*key) if vm in board.hosts.get(host, ()) else None

    async def report(
        self, host: str, session_id: str, memory_bytes: int, vms: Sequence[dict[str, Any]], by: str
    ) -> Inventory:
        """Merge the VMs of a host into the fleet. The result names those that do not fit."""
        session = await self._connect(host, session_id)
        inventory = Inventory(self._engine, self.managed, host, vms)

        def describe(record: ManagedHost) -> ManagedHost:
            return replace(record, memory_bytes=memory_bytes, vms=inventory.vms)

        await self._update(host, session_id, describe)
        session.inventory = inventory
        await self._merge(host, session, by)
        for problem in inventory.problems:
            self._engine.throttled_log.warn("VM not accepted", host=host, problem=problem)
        return inventory

    async def _merge(self, host: str, session: Session, by: str) -> None:
        """Again, if another server has changed the fleet meanwhile."""
        assert session.inventory is not None
        session.merge_at = self._engine.clock.now() + MERGE_EVERY
        for attempt in range(MERGE_TRIES_MAX):
            try:
                return await self._operations.merge(session.inventory.plan, by=by)
            except Unavailable:
                if attempt == MERGE_TRIES_MAX - 1 or not self._engine.can_serve:
                    raise
        return None

    async def finish(self, host: str, session_id: str, results: Sequence[RemoteResult]) -> int:
        """How many of the results were wanted. They are recorded when this returns.

        One that was not may belong to an impact that this server is about to claim, so a daemon
        keeps it until the impact is handed out or cancelled.
        """
        session, accepted = await self._connect(host, session_id), 0
        for result in results:
            call = session.calls.get(result.key)
            if call is None or call.request.tries != result.tries or call.result.done():
                accepted += await self._end_boot(host, result)
                continue
            if result.problem:
                call.result.set_exception(ImpactFailed(result.problem, output=result.detail))
            else:
                call.result.set_result(ImpactResult(result.host, result.detail, result.is_back))
            await self._wait_until_recorded(host, result)
            accepted += 1
        return accepted

    async def _end_boot(self, host: str, result: RemoteResult) -> bool:
        """The second result of an impact that has restarted a VM of this host: it is back."""
        impact = self._find_impact(host, result.key)
        if impact is None or impact.state is not ImpactState.BOOTING:
            return False
        if result.is_back and not result.problem:
            back = Back(event_id=result.event_id, vm=result.vm, detail="guest agent answers")
            scope = self._engine.board.vms[result.vm].scope.name
            await self._engine.submit(scope, back, by=f"hostd {host}")
        return True

    async def _wait_until_recorded(self, host: str, result: RemoteResult) -> None:
        """Until then a daemon must keep its result: this server may be lost."""
        try:
            async with asyncio.timeout(RECORDED_SECONDS_MAX):
                while self._is_claimed(host, result):  # ends with the commit, or the timeout
                    self._published = self._published or asyncio.Event()
                    await self._published.wait()
        except TimeoutError:
            raise Unavailable("the result was not recorded yet; send it again") from None

    def _is_claimed(self, host: str, result: RemoteResult) -> bool:
        impact = self._find_impact(host, result.key)
        return impact is not None and impact.is_held and impact.tries == result.tries

    async def end(self, host: str, session_id: str) -> None:
        """The daemon stops, or is silent."""
        record = self.managed.find(host)
        if record is not None and record.session == session_id:
            await self._update(host, session_id, lambda record: replace(record, server=""))

    async def forget(self, host: str, *, by: str) -> None:
        """Remove the record of a host whose daemon is gone for good."""

        def decide(transaction: Transaction) -> None:
            if transaction.get(HOST_KEY.format(host)) is None:
                raise UnknownHost(f"there is no host {host!r} with a daemon", host=host)
            if not self.managed.is_unreachable(host):
                raise Refused(f"the daemon of {host} is connected; stop it first", host=host)
            transaction.put(HOST_KEY.format(host), None)
            detail = f"host {host} is no longer managed by a daemon"
            transaction.record(Change(ChangeKind.UPDATED, host=host, detail=detail))

        await self._engine.update([HOST_KEY.format(host)], decide, by=by)

    # --- sessions

    def stop(self) -> None:
        """Answer all requests for work now."""
        self._is_stopping = True
        for session in self._sessions.values():
            session.changed.set()

    async def run(self) -> None:
        """Notice silent daemons, and keep the fleet true, until cancelled."""
        clock = self._engine.clock
        while True:  # ends when cancelled
            await self._connected.wait()
            await clock.sleep_until(clock.now() + TICK)
            now = clock.now()
            for host, session in list(self._sessions.items()):
                try:
                    if session.silent_at <= now:
                        await self.end(host, session.id)
                        self._drop(host)
                    elif session.merge_at is not None and session.merge_at <= now:
                        await self._merge(host, session, by=f"hostd {host}")
                except Error as error:  # the other hosts come first
                    problem = error.message
                    self._engine.throttled_log.warn("host not updated", host=host, problem=problem)

    async def _connect(self, host: str, session_id: str) -> Session:
        """The session of a daemon that has sent something; HostTaken if another is connected."""
        session = self._sessions.get(host)
        if session is None or session.id != session_id or not self.handles(host):
            await self._update(host, session_id, lambda record: record)
            session = self._sessions.get(host)
            if session is None or session.id != session_id:
                self._drop(host)
                session = self._sessions[host] = Session(session_id, self._engine.clock.now())
                self._connected.set()
            self.on_change(host)
        session.silent_at = max(session.silent_at, self._engine.clock.now() + SILENT)
        return session

    async def _update(
        self, host: str, session_id: str, change: Callable[[ManagedHost], ManagedHost]
    ) -> None:
        """Change the record of a host that this session of its daemon connects to this server."""
        lease, key = self.get_lease(), HOST_KEY.format(host)
        if lease is None:
            raise Unavailable("this server has no lease at present; try another server")

        def decide(transaction: Transaction) -> None:
            known: ManagedHost | None = transaction.get(key)
            if known and known.session != session_id and not self.managed.is_unreachable(host):
                raise HostTaken(
                    f"another daemon is connected for {host} since {known.since.isoformat()};"
                    " expected one daemon for each host",
                    since=known.since,
                )
            old = known or ManagedHost(host, session_id, "", transaction.now)
            new = change(replace(old, session=session_id, server=self._server()))
            if (old.server, old.session) != (new.server, new.session):
                new = replace(new, since=transaction.now)
                word = "connected" if new.server else "unreachable"
                detail = f"daemon of {host} {word}"
                transaction.record(Change(ChangeKind.UPDATED, host=host, detail=detail))
            if new != known:
                transaction.put(key, new)

        await self._engine.update([key], decide, by=f"hostd {host}", lease=lease)

    def _server(self) -> str:
        lease = self.get_lease()
        return lease.name.partition("/")[2] if lease is not None else ""

    def _drop(self, host: str) -> None:
        """The daemon is lost, or served by another server: its impacts are released."""
        session = self._sessions.pop(host, None)
        for call in session.calls.values() if session else ():
            if not call.result.done():
                call.result.set_exception(_unreachable(host))
        if session:
            session.changed.set()
        if not self._sessions:
            self._connected.clear()

    def _on_record(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        record = after or before
        assert record is not None
        session = self._sessions.get(record.host)
        if session is not None and not self.handles(record.host):
            self._drop(record.host)
        self.on_change(record.host)

    def _on_scope(self, published: PublishedScope) -> None:
        if self._published is not None:
            self._published.set()
            self._published = None


def _unreachable(host: str) -> HostUnreachable:
    return HostUnreachable(f"the daemon of {host} is unreachable", host=host)
