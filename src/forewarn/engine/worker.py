"""One server's work: start due events and run impacts."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from itertools import count

from msgspec.structs import replace

from forewarn.core.command import Claim, Finish, Release, Tick
from forewarn.core.draft import DETAIL_LENGTH_MAX
from forewarn.core.event import Impact
from forewarn.core.fleet import Scope
from forewarn.core.lifecycle import WAIT_MAX
from forewarn.core.machine import Outcome, due_impacts, next_deadline, next_impact_at
from forewarn.engine.board import PublishedScope, SortedKeys
from forewarn.engine.boot_watch import BootWatch
from forewarn.engine.clock import wait_for, within
from forewarn.engine.clock_skew import COMPARE_EVERY, ClockSkew
from forewarn.engine.engine import Engine
from forewarn.engine.lease import LEASE_NAME, ClaimReleaser, work_until_lost
from forewarn.engine.replica import POLLS_PASS_EVERY, SCOPE_KEY
from forewarn.engine.transaction import LeaseLost
from forewarn.errors import (
    Error,
    HostUnreachable,
    ImpactFailed,
    NotFound,
    RecordUnreadable,
    Unavailable,
)
from forewarn.log import log
from forewarn.platform.base import (
    SHORTAGES,
    ImpactRequest,
    ImpactResult,
    Platform,
    make_request,
)
from forewarn.store.base import Lease

SCOPES_AT_ONCE_MAX = 32
RETRY = timedelta(seconds=1)
RETRY_MAX = timedelta(seconds=30)
PROBLEM_LENGTH_MAX = 500
IMPACTS_FINISHED_ALONE_MAX = 64
FINISH_TOGETHER = timedelta(seconds=0.1)
"""In a scope with more impacts than this, those that end within so short a time are recorded
together: the record is large.
"""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
STOP_SECONDS_MAX = 7.0
"""How long platform calls may take to end when they are cancelled: longer than the grace period of
a command.
"""


@dataclass(slots=True)
class Job:
    """An impact that is CLAIMING or RUNNING; see below."""

    event_id: str
    call: asyncio.Future[Finish | Release] | None = None


@dataclass(eq=False)
class Worker:
    """Works while it holds the lease of its server. `worker` must be new at every start.

    Each impact that this server carries out is in one of these states:

        QUEUED --> CLAIMING --> RUNNING --> FINISHING --> (recorded)
                      |            |            |
                      | not ours   | lease lost, or the claim is no longer ours (an operator
                      |            | completed the event): the platform call is cancelled
                      +------------+------------+-------> (dropped)

    `_queue` has the scopes with QUEUED impacts; `_running` has a job for each VM whose impact is
    CLAIMING or RUNNING: a VM has one impact at a time on its platform, too. If the VM boots after
    that, `_boot_watch` notices when it is back. Claims and results are committed only under the
    lease, and no platform call starts without it. A claim is good while the lease of its worker
    exists; no renewal is written for it. After a lost lease the worker continues under another
    name, so that its old claims are not mistaken for good ones.

    `handles` says whether the platform can act on the VMs of a host now. Impacts of other hosts
    are left to other servers, or wait until `look_at_host` is called.
    """

    engine: Engine
    platform: Platform
    _: KW_ONLY
    worker: str
    impacts_max: int = 256
    impact_limit: timedelta
    stop_seconds_max: float = STOP_SECONDS_MAX
    handles: Callable[[str], bool] = lambda host: True
    compare_clocks_every: timedelta = COMPARE_EVERY

    def __post_init__(self) -> None:
        engine = self.engine
        self._name = self.worker
        self._lease: Lease | None = None
        self._wake_at: dict[str, datetime] = {}
        self._alarms: SortedKeys[tuple[datetime, str]] = SortedKeys(
            lambda: ((time, name) for name, time in self._wake_at.items())
        )
        self._changed = asyncio.Event()
        self._queue: dict[str, None] = {}
        self._running: dict[tuple[str, str], Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Future[ImpactResult]] = set()
        self._boot_watch = BootWatch(engine, self.platform)
        self._releaser = ClaimReleaser(engine)
        self._clock_skew = ClockSkew(engine, self._changed.set, every=self.compare_clocks_every)
        engine.board.subscribe(self._on_scope_changed)
        for published in engine.board.scopes.values():
            self._on_scope_changed(published)

    async def run(self) -> None:
        """Work until cancelled, and follow the store."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.engine.follow())
            group.create_task(self._run_under_lease())

    async def _run_under_lease(self) -> None:
        for number in count(1):  # ends when cancelled
            self._name = self.worker if number == 1 else f"{self.worker}-{number}"
            name = LEASE_NAME.format(self._name)
            await work_until_lost(self.engine, name, self._work)
            log.warning("server lease lost", worker=self._name)
            await self._look_at_all()

    async def _look_at_all(self) -> None:
        """Set the alarm of every scope again: what was dropped is due."""
        scopes = self.engine.board.scopes
        for number, name in enumerate(list(scopes), start=1):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
            if name in scopes:
                self._on_scope_changed(scopes[name])

    async def _work(self, lease: Lease) -> None:
        """Work under a lease until cancelled. Other servers take over what is dropped then.

        The platform has a few seconds to leave its VMs in a good state.
        """
        self._lease = self.engine.server_lease = lease
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._clock_skew.run(self._name, lease))
                group.create_task(self._watch_deadlines())
                group.create_task(self._releaser.run(self._name))
        finally:
            self._lease = None
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._running.clear()
            await self._boot_watch.stop()
            if self._calls:
                await asyncio.wait(self._calls, timeout=self.stop_seconds_max)

    @property
    def lease(self) -> Lease | None:
        """The lease under which this server works; None while it has none."""
        return self._lease

    def look_at_host(self, host: str) -> None:
        """The platform may handle this host now, or no longer."""
        for published in {
            self.engine.board.vms[vm] for vm in self.engine.board.hosts.get(host, ())
        }:
            self._on_scope_changed(published)

    def _is_handled(self, scope: Scope) -> Callable[[Impact], bool]:
        hosts = {vm.name: vm.host for vm in scope.vms} if scope.impacts else {}
        return lambda impact: self.handles(hosts.get(impact.vm, ""))

    def _on_scope_changed(self, published: PublishedScope) -> None:
        scope = published.scope
        self._set_alarm(scope.name, self._next_time(scope))
        for (name, vm), job in self._running.items():
            if name == scope.name and job.call is not None and not self._is_ours(scope, job, vm):
                job.call.cancel()

    def _is_ours(self, scope: Scope, job: Job, vm: str) -> bool:
        impact = scope.impact(job.event_id, vm)
        return impact is not None and impact.is_held and impact.claimed_by == self._name

    def _set_alarm(self, name: str, wake_at: datetime | None) -> None:
        """Look at this scope at this time, and not before; None: not at all."""
        before = self._wake_at.pop(name, None)
        if before is not None:
            self._alarms.remove((before, name))
        if wake_at is None:
            return
        self._wake_at[name] = wake_at
        self._alarms.add((wake_at, name))
        if self._alarms[0] == (wake_at, name):
            self._changed.set()

    async def _watch_deadlines(self) -> None:
        """Start what is due, while this server's clock is right."""
        while True:  # ends when cancelled
            self._changed.clear()
            if not self._clock_skew.is_right():
                await self._changed.wait()
                continue
            names = self._take_due()
            for first in range(0, len(names), SCOPES_AT_ONCE_MAX):
                batch = names[first : first + SCOPES_AT_ONCE_MAX]
                await asyncio.gather(*(self._process(name) for name in batch))
                self._dispatch()
            self._dispatch()
            next_at = self._alarms[0][0] + self.engine.clock_lead if self._alarms else None
            await wait_for(self.engine.clock, self._changed, next_at)

    def _take_due(self) -> list[str]:
        now, names = self.engine.decision_time(), list[str]()
        while self._alarms and self._alarms[0][0] <= now:
            names.append(self._alarms[0][1])
            self._set_alarm(names[-1], None)
        return names

    def _find(self, name: str) -> PublishedScope | None:
        """The scope, if this server may work on it: a newer one does what only it can read."""
        is_unreadable = SCOPE_KEY.format(name) in self.engine.unreadable
        return None if is_unreadable else self.engine.board.scopes.get(name)

    async def _process(self, name: str) -> None:
        """Start the events of a scope that are due, and queue its impacts."""
        published = self._find(name)
        if published is None:
            return
        now = self.engine.decision_time()
        deadline = next_deadline(published.scope)
        try:
            if deadline is not None and deadline <= now:
                await self.engine.submit(name, Tick(), by="clock")
            if any(map(self._is_handled(published.scope), due_impacts(published.scope, now))):
                self._queue[name] = None
        except Error as error:
            self.engine.throttled_log.warn("tick failed", scope=name, problem=error.message)
            self._set_alarm(name, now + RETRY)
            return
        except Exception:  # a bug with this one scope must not stop the others
            log.exception("bug while processing a scope", scope=name)
            self._set_alarm(name, now + RETRY_MAX)
            return
        if name not in self._wake_at:  # what is due is running or queued; look again later
            wake_at = self._next_time(published.scope)
            if wake_at is not None:
                self._set_alarm(name, max(wake_at, self.engine.decision_time() + RETRY))

    def _next_time(self, scope: Scope) -> datetime | None:
        """When the scope needs this worker: to tick, or to carry an impact out."""
        if not scope.events and not scope.impacts:  # most scopes, most of the time
            return None
        now, impact_at = self.engine.decision_time(), next_impact_at(scope, self._is_handled(scope))
        if impact_at is not None and impact_at > now + WAIT_MAX:
            impact_at = now  # it is due: see `lifecycle.is_misdated`
        times: Iterable[datetime | None] = (next_deadline(scope), impact_at)
        return min((time for time in times if time is not None), default=None)

    def _dispatch(self) -> None:
        """Start as many due impacts as may run at the same time; the others stay queued."""
        while self._queue and len(self._running) < self.impacts_max and self._lease is not None:
            name = next(iter(self._queue))
            published = self._find(name)
            due = due_impacts(published.scope, self.engine.decision_time()) if published else ()
            is_handled = self._is_handled(published.scope) if published else bool
            new = [
                impact
                for impact in due
                if (name, impact.vm) not in self._running and is_handled(impact)
            ]
            free = self.impacts_max - len(self._running)
            for impact in new[:free]:
                self._start(name, impact, self._lease)
            if len(new) <= free:
                del self._queue[name]

    def _start(self, scope: str, impact: Impact, lease: Lease) -> None:
        job = self._running[scope, impact.vm] = Job(impact.event_id)
        task = asyncio.create_task(self._carry_out(job, scope, impact, lease))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, job: Job, scope: str, impact: Impact, lease: Lease) -> None:
        """Claim the impact, run it, record the result."""
        try:
            finish = await self._claim_and_run(job, scope, impact, lease)
            if finish is not None:
                await self._finish(scope, finish, lease)
                self._boot_watch.start(scope, finish.event_id, finish.vm, self._name)
        except LeaseLost:
            return  # the server that takes over records the result
        except Exception:  # a bug with this one impact must not stop the others
            log.exception("bug while running an impact", scope=scope, vm=impact.vm)

    async def _claim_and_run(
        self, job: Job, scope: str, impact: Impact, lease: Lease
    ) -> Finish | Release | None:
        """The result. Its commit makes the VM's next impact due, so the VM is free before it."""
        try:
            request = await self._claim(scope, impact, lease)
            if request is None:
                return None
            job.call = asyncio.ensure_future(self._run_impact(request, lease))
            return await job.call
        finally:
            if job.call is not None:
                job.call.cancel()
            del self._running[scope, impact.vm]
            if self._queue:
                self._changed.set()

    async def _claim(self, scope: str, impact: Impact, lease: Lease) -> ImpactRequest | None:
        """The request for the platform; None if the claim is not ours.

        The same commit may have ended the event after the claim, so only what is published counts.
        """
        name = self._name
        claim = Claim(event_id=impact.event_id, vm=impact.vm, worker=name)
        outcome = await self._submit(scope, claim, lease)
        published = self.engine.board.scopes.get(scope)
        if outcome is None or published is None:
            return None
        claimed = published.scope.impact(impact.event_id, impact.vm)
        if claimed is None or claimed.claimed_by != name:
            return None
        return make_request(published.scope, claimed)

    async def _run_impact(self, request: ImpactRequest, lease: Lease) -> Finish | Release:
        """Run the impact and describe its result. It is released if its host was lost."""
        finish = Finish(
            event_id=request.event_id, vm=request.vm.name, worker=self._name, tries=request.tries
        )
        try:
            result = await self._call_until_started(request, lease)
            detail = result.detail[:DETAIL_LENGTH_MAX]
            return replace(finish, host=result.host, detail=detail, is_back=result.is_back)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return replace(finish, problem="the platform cancelled the call")
        except LeaseLost:
            raise
        except HostUnreachable:
            return Release(worker=self._name, event_id=finish.event_id, vm=finish.vm)
        except Exception as error:  # whatever a platform raises is a failed attempt
            output = str(error.facts.get("output", "")) if isinstance(error, ImpactFailed) else ""
            problem = (str(error) or type(error).__name__)[:PROBLEM_LENGTH_MAX]
            return replace(finish, problem=problem, detail=output[:DETAIL_LENGTH_MAX])

    async def _call_until_started(self, request: ImpactRequest, lease: Lease) -> ImpactResult:
        """Call the platform; again while this machine lacks the resources to start the call.

        A lack of resources is not a failed attempt.
        """
        clock, pause = self.engine.clock, RETRY
        give_up_at = clock.now() + self.impact_limit
        while True:  # ends when the call started, when its time is up, or when cancelled
            call = asyncio.ensure_future(self._call(request, lease))
            self._calls.add(call)  # until it has ended, even if it is no longer awaited
            call.add_done_callback(self._calls.discard)
            try:
                return await within(clock, self.impact_limit, call)
            except OSError as error:
                if error.errno not in SHORTAGES or clock.now() + pause >= give_up_at:
                    raise
                self.engine.throttled_log.warn(
                    "platform call not started", vm=request.vm.name, problem=error.strerror
                )
            await clock.sleep_until(clock.now() + pause)
            pause = min(2 * pause, RETRY_MAX)

    async def _call(self, request: ImpactRequest, lease: Lease) -> ImpactResult:
        """Call the platform if the lease is held.

        This process may have been stopped since the claim, so another one may have carried out the
        impact. Nothing is awaited between the check and the call.
        """
        if not lease.is_held():
            raise LeaseLost(f"this server has lost the lease {lease.name}")
        return await self.platform.run_impact(request)

    async def _finish(self, scope: str, finish: Finish | Release, lease: Lease) -> None:
        """Record the result; without it the impact would run again."""
        clock = self.engine.clock
        published = self.engine.board.scopes.get(scope)
        if published is not None and len(published.scope.impacts) > IMPACTS_FINISHED_ALONE_MAX:
            await clock.sleep_until(next_on_grid(clock.now(), FINISH_TOGETHER))
        await self._submit(scope, finish, lease)

    async def _submit(
        self, scope: str, command: Claim | Finish | Release, lease: Lease
    ) -> Outcome | None:
        """Commit a claim or a result, and retry for as long as the store does not answer.

        A commit whose reply was lost may have happened, and a claim that its worker does not know
        would never end. None if the scope was deleted, or another server takes over. A claim also
        ends if the scope has become unreadable, because it occupies one of `impacts_max`; a result
        waits, because the scope may become readable again.
        """
        clock, pause = self.engine.clock, RETRY
        while True:  # ends when it is committed or not needed, or when cancelled
            try:
                return await self.engine.submit(scope, command, by=command.worker, lease=lease)
            except (NotFound, LeaseLost):
                return None
            except Unavailable as error:
                if isinstance(error, RecordUnreadable) and isinstance(command, Claim):
                    return None
                self.engine.throttled_log.warn(
                    "claim or result not recorded",
                    scope=scope,
                    vm=command.vm,
                    problem=error.message,
                )
            await clock.sleep_until(clock.now() + pause)
            pause = min(2 * pause, RETRY_MAX)


def next_on_grid(now: datetime, step: timedelta) -> datetime:
    """The next of the times, a step apart, at which results are recorded together."""
    return EPOCH + -(-(now - EPOCH) // step) * step
