"""The platform of hosts with daemons: the work of those that are connected here, and its results.

A daemon says what it has and asks for work, in one long poll. An impact of a host that is
unreachable waits for its daemon, and fails nothing.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta

from msgspec.structs import replace

from forewarn.core.command import Back
from forewarn.core.event import EventType, Impact, ImpactState, Status
from forewarn.core.fleet import DEFAULT_INSTANCE, Power, Vm
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.duplicates import DuplicateVms
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.host_removal import HostRemoval
from forewarn.engine.host_session import DaemonSession, HandedOut, refuse_late, unreachable
from forewarn.engine.host_sessions import HostSessions
from forewarn.engine.host_times import HostTimes
from forewarn.engine.inventory import PROBLEMS_MAX, HostInventory
from forewarn.engine.managed_hosts import ManagedHost, ManagedHosts
from forewarn.engine.move_targets import MoveTargets
from forewarn.engine.operations import Operations
from forewarn.engine.problems import Problems
from forewarn.engine.report_rate import ReportRate
from forewarn.engine.transaction import Transaction
from forewarn.engine.unserved import UnservedVms
from forewarn.errors import ImpactFailed, Refused, Unavailable
from forewarn.platform.base import BackWatcher, ImpactRequest, ImpactResult, Platform
from forewarn.platform.remote import ImpactKey, RunningImpact, Work, WorkRequest
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.steps import Steps, in_turns
from forewarn.store.base import Lease

WAIT = timedelta(seconds=5)
"""How long a request for work is held."""
WAIT_PREEMPT = timedelta(seconds=1.5)
"""While a VM of the host has a Scheduled Preempt: less than a gap that counts for it."""
BOOTING = ImpactState.BOOTING


class RemoteHosts:
    """The platform of managed hosts; `local` is that of all others.

    `get_lease` returns the lease under which this server works, `avoid` the hosts that are bad
    targets of a move. `on_change` is called with VMs whose impacts this server may run now.
    """

    def __init__(
        self,
        engine: Engine,
        operations: Operations,
        managed: ManagedHosts,
        contacts: HostContacts,
    ) -> None:
        self.managed = managed
        self.contacts = contacts
        self.duplicates = DuplicateVms(engine, self.managed)
        self.removal = HostRemoval(engine, self.managed, self.contacts, self.duplicates)
        self.unserved = UnservedVms(engine)
        self._times = HostTimes(engine)
        self._report_rate = ReportRate(engine.clock)
        self._sessions = HostSessions(
            engine,
            self.managed,
            self.contacts,
            self._find_lease,
            self._on_connect,
            self.unserved.forget,
            self._report_rate,
        )
        self._targets = MoveTargets(engine, self.managed, self._sessions)
        self.problems = Problems(engine, self.managed, self.unserved, self.duplicates)
        self.local: Platform | None = None
        self.get_lease: Callable[[], Lease | None] = lambda: None
        self.avoid: Callable[[], Mapping[str, int]] = dict
        self.on_change: Callable[[Iterable[str]], None] = lambda vms: None
        self._engine = engine
        self._operations = operations
        self._waiting: defaultdict[str, set[DaemonSession]] = defaultdict(set)  # by scope
        self._held: defaultdict[str, set[str]] = defaultdict(set)  # VMs, by the host they wait for
        self._is_stopping = False
        engine.on_change("hostd", self._on_record)
        engine.board.subscribe(self._on_scope)

    def _find_lease(self) -> Lease | None:
        return self.get_lease()

    def _on_connect(self, vms: Iterable[str]) -> None:
        self.on_change(vms)

    # --- the platform

    def handles(self, vm: Vm, impact: Impact) -> bool:
        """Whether this server can carry out an impact now."""
        host = self.managed.host_of(vm, impact)
        if not self._can_act(host):
            self._held[host].add(vm.name)
            return False
        if self.duplicates.reason_to_wait(vm, impact.cause, impact.tries):
            host = self.managed.not_answering(vm)
            if host:  # else it runs twice: the records of both hosts have it
                self._held[host].add(vm.name)
            return False
        return True

    def _can_act(self, host: str) -> bool:
        """Whether this server can act on the VMs of a host, and knows which it has.

        What an earlier run of its daemon has reported, or a daemon before it was away, may have
        changed since.
        """
        record = self.managed.find(host)
        if record is None:
            return True
        is_current = not record.problem and not self.managed.is_unreported(host)
        return is_current and self._sessions.serves(host)

    def away_reason(self, host: str) -> str:
        """Why nothing can be done to the VMs of a host that may run, at present; empty if something
        can. Where a daemon was forgotten, the platform of this server acts.
        """
        is_left = self.managed.is_left_running(host) and self._only_simulates(host)
        left = "its daemon was forgotten; what may run there is left running"
        return left if is_left else self.managed.reason(host)

    async def away_reasons(self, hosts: Collection[str]) -> dict[str, str]:
        """Those of these hosts on which nothing can be done at present, and why."""
        return await in_turns(_find_reasons(self.away_reason, hosts))

    async def refuse_moves(self, hosts: Collection[str]) -> None:
        """Refuse to move VMs of hosts that were left running, also by what other servers know."""
        find_reason = self.managed.why_not_moved
        reasons = await in_turns(_find_reasons(find_reason, hosts))
        if reasons:
            await self._engine.catch_up()
            reasons = await in_turns(_find_reasons(find_reason, hosts))
        if reasons:
            host, reason = next(iter(reasons.items()))
            raise Refused(reason, host=host)

    def _only_simulates(self, host: str) -> bool:
        """Whether a host had a daemon, and this server would only simulate impacts there."""
        return self.managed.is_forgotten(host) and isinstance(self.local, SimulatedPlatform)

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        """Let the daemon of the VM's host carry it out; HostUnreachable if it is lost meanwhile."""
        host = self._host_of(request)
        if self.managed.find(host) is None:  # nothing is awaited: the lease was checked just now
            assert self.local is not None
            if self._only_simulates(host):
                raise ImpactFailed(
                    f"{host} had a daemon, and a simulation would do nothing to its VMs;"
                    f" expected a daemon, or another `platform` of the server"
                )
            reason = self.managed.why_not_moved(host) if request.moves else ""
            if reason:
                raise ImpactFailed(reason, host=host)
            return await self.local.run_impact(request)
        if request.moves:
            await self._targets.take_turn()
            host = self._host_of(request)
            if self.managed.find(host) is None:
                raise unreachable(host, "its daemon was forgotten")
        reason = self._reason_to_wait(host, request)
        if reason:
            raise unreachable(host, reason)
        handed_out = dataclasses.replace(
            request,
            vm=replace(request.vm, host=host, instance=DEFAULT_INSTANCE),  # that may be large
        )
        if request.moves:
            try:
                targets = self._targets.rank(request, self.avoid())
                handed_out = dataclasses.replace(handed_out, targets=targets)
            except ImpactFailed as error:  # the daemon may have carried it out in an earlier try
                handed_out = dataclasses.replace(handed_out, no_target=error.message)
        session, key = self._sessions.of(host), (request.event_id, request.vm.name)
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

    def _reason_to_wait(self, host: str, request: ImpactRequest) -> str:
        """Why the daemon of a host must not carry out an impact now, although it was claimed."""
        if not self._can_act(host):
            return self.managed.reason(host) or "a report of its VMs is awaited"
        published = self._engine.board.vms.get(request.vm.name)
        vm = published.scope.vm(request.vm.name) if published else None
        if vm is None:
            return ""
        return self.duplicates.reason_to_wait(vm, request.cause, request.tries - 1)

    def _host_of(self, request: ImpactRequest) -> str:
        """As the claim says. One that was not committed here says nothing."""
        published = self._engine.board.vms.get(request.vm.name)
        key = request.event_id, request.vm.name
        impact = published.scope.impact(*key) if published else None
        if impact is None:
            return self.managed.acting_host(request.vm, moves=request.moves)
        return self.managed.host_of(request.vm, impact)

    async def wait_until_back(self, request: ImpactRequest) -> None:
        """A daemon sends a second result for that; else a poll or the limit ends the wait."""
        is_managed = self.managed.find(request.vm.host) is not None
        if is_managed or not isinstance(self.local, BackWatcher):
            await asyncio.Event().wait()  # until it is cancelled
        else:
            await self.local.wait_until_back(request)

    # --- what a daemon asks for

    async def work(
        self, host: str, request: WorkRequest, *, by: str, scopes: Collection[str] = ()
    ) -> Work:
        """Take what the daemon has, with VMs in these scopes, and return what is new for it.

        With `wait` as soon as there is something, or nothing after a few seconds. A later request
        of the daemon ends that: each of them says everything.
        """
        async with self._sessions.contact(host, request) as session:
            is_first = session.latest is request
            refuse_late(host, request, session.latest)
            session.latest = request
            session.changed.set()
            self.unserved.report(host, request)
            problems, is_merged = await self._merge(host, session, request, by, scopes)
            for each in request.running:
                await self._take_result(host, session, each)
            if request.is_leaving:
                await self._sessions.end(host, request)
        is_wanted = self.duplicates.has_suspects(host) or self.managed.is_unreported(host)
        is_merged = is_merged and (request.is_leaving or not is_wanted)
        if is_first:  # so that its daemon knows how long it had no server
            work = self._find_work(host, session, request.running)
        else:
            work = await self._wait_for_work(host, session, request)
        return replace(work, problems=problems, is_merged=is_merged)

    async def _wait_for_work(self, host: str, session: DaemonSession, request: WorkRequest) -> Work:
        clock, vms = self._engine.clock, self._engine.board.vms
        until = clock.now() + (WAIT_PREEMPT if self._has_preempt(host) else WAIT)
        scopes = {vms[each.vm].scope.name for each in request.running if each.vm in vms}
        for scope in scopes:
            self._waiting[scope].add(session)
        try:
            while True:  # ends after WAIT, or before
                session.changed.clear()
                work = self._find_work(host, session, request.running)
                is_latest = self._sessions.find(host) is session and session.latest is request
                is_held = request.wait and is_latest and not self._is_stopping
                if work.impacts or work.cancel or not is_held or clock.now() >= until:
                    return work
                await wait_for(clock, session.changed, until)
        finally:
            for scope in scopes:
                self._waiting[scope].discard(session)
                if not self._waiting[scope]:
                    del self._waiting[scope]

    def _has_preempt(self, host: str) -> bool:
        board = self._engine.board
        if not board.event_counts[EventType.PREEMPT, Status.SCHEDULED]:
            return False
        placed = board.hosts.get(host, set())
        return any(
            event.type is EventType.PREEMPT and not placed.isdisjoint(event.resources)
            for published in {board.vms[name] for name in placed}
            for event in published.scope.events
        )

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
            if known.get(key) != call.request.tries and self._update(host, call)
        )
        cancel = tuple(
            replace(
                each,
                result=None,
                may_run_on=self.managed.may_run_on(each.vm, but=host),
                may_start=self._may_start(host, each.vm),
            )
            for each in running
            if each.key not in session.calls and self._is_ended(host, each)
        )
        return Work(impacts, cancel)

    def _update(self, host: str, call: HandedOut) -> bool:
        """Let the request say what is known now; whether it may be carried out.

        It may have been claimed long before its daemon asks for work. If it has to wait after all,
        it is released: the daemon does not have it.
        """
        if call.result.done():
            return False
        request, reason = call.request, self._reason_to_wait(host, call.request)
        if reason:
            call.result.set_exception(unreachable(host, reason))
            return False
        may_run_on = self.managed.may_run_on(request.vm.name, but=host)
        call.request = dataclasses.replace(request, may_run_on=may_run_on)
        return True

    def _is_ended(self, host: str, each: RunningImpact) -> bool:
        """Whether an impact is recorded or no longer wanted, and its VM can be recovered.

        What was only begun can wait until the daemon of another host has done with the VM.
        """
        may_wait = each.tries == 0 and self._acts_elsewhere(host, each.vm)
        return not may_wait and not self._is_wanted(host, each)

    def _may_start(self, host: str, name: str) -> bool:
        """Whether a host may start a VM again that an impact has stopped there, and that is off.

        Not if it was evicted since, on this host or another one.
        """
        published = self._engine.board.vms.get(name)
        vm = published.scope.vm(name) if published else None
        if vm is None:
            return True
        return vm.power is not Power.DEALLOCATED and not self._acts_elsewhere(host, name)

    def _acts_elsewhere(self, host: str, name: str) -> bool:
        """Whether the daemon of another host acts on a VM now.

        It may have stopped the VM for a moment, to start it again.
        """
        published = self._engine.board.vms.get(name)
        vm = published.scope.vm(name) if published else None
        if published is None or vm is None:
            return False
        claimed = (
            impact
            for impact in published.scope.impacts
            if impact.vm == name and impact.state is ImpactState.CLAIMED
        )
        return any(self.managed.host_of(vm, impact) != host for impact in claimed)

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
        is_here = impact is not None and self.managed.host_of(vm, impact) == host
        return impact if is_here else None

    async def _merge(
        self,
        host: str,
        session: DaemonSession,
        request: WorkRequest,
        by: str,
        scopes: Collection[str],
    ) -> tuple[tuple[str, ...], bool]:
        """Merge the VMs of a host into the fleet.

        Returns what does not fit, and whether the rest was merged: not if the fleet is changed at
        the same time, if the session is too new, or if the host reports too often. Then the daemon
        sends it again.
        """
        report = request.inventory
        if report is None:
            return (), True
        record, now = self.managed.find(host), self._engine.decision_time()
        if record is not None and record.merge_at is not None and now < record.merge_at:
            return (), False
        if not self._report_rate.admits(host, len(report.vms)):
            self._engine.throttled_log.warn("too many reports of a host", host=host)
            return (), False
        taken_at = now - timedelta(seconds=report.age_seconds)
        inventory = HostInventory(self._engine, self.managed, host, report.vms, scopes)
        await inventory.read()

        def describe(record: ManagedHost, transaction: Transaction) -> ManagedHost:
            vms = self.duplicates.compare(record, inventory.vms, taken_at, transaction)
            since = record.unreported_since
            is_current = since is None or (taken_at >= since and not request.problem)
            return replace(
                record,
                memory_bytes=report.memory_bytes,
                vms=vms,
                refused=tuple(sorted(inventory.refused)),
                unreported_since=None if is_current else since,
                reported_at=None if is_current else record.reported_at,
            )

        await self._sessions.update(host, request, describe)
        session.reported_at = taken_at
        try:
            await self._operations.merge(inventory.plan, by=by)
        except Unavailable as error:
            self._engine.throttled_log.warn("VMs not merged", host=host, problem=error.message)
            return (), False
        record, lines = self.managed.find(host), (inventory.not_accepted, inventory.taken_addresses)
        if record is not None and (record.not_accepted, record.taken_addresses) != lines:
            await self._sessions.update(
                host,
                request,
                lambda record, _: replace(record, not_accepted=lines[0], taken_addresses=lines[1]),
            )
        warn = self._engine.throttled_log.warn
        for problem in inventory.problems:
            warn("VM not accepted", host=host, problem=problem)
        for problem in inventory.address_problems:
            warn("address of a VM not accepted", host=host, problem=problem)
        return (*inventory.problems, *inventory.address_problems)[:PROBLEMS_MAX], True

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
        elif result.problem and session.latest.problem:  # it cannot act: that is not a failed try
            call.result.set_exception(unreachable(host, session.latest.problem))
        elif result.problem:
            call.result.set_exception(result.as_error())
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

    def stop(self) -> None:
        """Answer all requests for work now."""
        self._is_stopping = True
        self._sessions.wake_all()

    async def run(self) -> None:
        """Notice silent daemons, lost servers, copies of VMs and wrong times, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sessions.run())
            group.create_task(self.duplicates.run())
            group.create_task(self.contacts.run())
            group.create_task(self._times.run())

    def _on_record(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        host = (after or before).host  # type: ignore[union-attr]
        held = self._held.pop(host, set()) & self._engine.board.vms.keys()
        self.on_change(self.managed.vms_of(before, after) | held)

    def _on_scope(self, published: PublishedScope) -> None:
        for session in self._waiting.get(published.scope.name, ()):
            session.changed.set()


def _find_reasons(find: Callable[[str], str], hosts: Iterable[str]) -> Steps[dict[str, str]]:
    """The hosts that have a reason. A campaign has thousands of hosts, so polls pass meanwhile."""
    reasons = dict[str, str]()
    for host in hosts:
        yield 1
        reason = find(host)
        if reason:
            reasons[host] = reason
    return reasons
