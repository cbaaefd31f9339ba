"""One server's work: start due events and run impacts."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from itertools import count

from forewarn.core.command import Finish, Release, Tick
from forewarn.core.event import Impact
from forewarn.core.fleet import Scope, Vm
from forewarn.core.lifecycle import WAIT_MAX
from forewarn.core.machine import due_impacts, next_deadline, next_impact_at, start_times
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.clock_skew import COMPARE_EVERY, ClockSkew
from forewarn.engine.engine import Engine
from forewarn.engine.impact_job import RETRY, RETRY_MAX, ImpactJob
from forewarn.engine.index import SortedKeys
from forewarn.engine.isolation import isolated
from forewarn.engine.lease import LEASE_NAME, ClaimReleaser, work_until_lost
from forewarn.engine.readability import Readability
from forewarn.engine.replica import POLLS_PASS_EVERY, SCOPE_KEY
from forewarn.engine.transaction import LeaseLost
from forewarn.errors import Error
from forewarn.log import log
from forewarn.platform.base import STOP_SECONDS_MAX, ImpactResult, Platform, SlowToStop
from forewarn.store.base import Lease

SCOPES_AT_ONCE_MAX = 32


@dataclass(eq=False)
class Worker:
    """Works while it holds the lease of its server. `worker` must be new at every start.

    `_queue` has the scopes with impacts to carry out, `_jobs` those that it carries out, by scope,
    and `_running` the VMs whose impact is being claimed or runs: a VM has one impact at a time on
    its platform, too. Claims and results are committed only under the lease, and no platform call
    starts without it. A claim is good while the lease of its worker exists; no renewal is written
    for it. After a lost lease the worker continues under another name, so that its old claims are
    not mistaken for good ones.

    `handles` says whether the platform can carry out an impact on a VM now. The others are left to
    other servers, or wait until `look_at` is called. `stop_seconds` says how long the platform may
    act on a VM after it was stopped; unless given, the platform itself does. `host_of` says which
    host's daemon carries out an impact; empty: none. Without `readability`, such as under a clock
    that is moved by hand, all time is notice.
    """

    engine: Engine
    platform: Platform
    _: KW_ONLY
    worker: str
    impacts_max: int = 256
    impact_limit: timedelta
    stop_seconds_max: float = STOP_SECONDS_MAX
    handles: Callable[[Vm, Impact], bool] = lambda vm, impact: True
    compare_clocks_every: timedelta = COMPARE_EVERY
    stop_seconds: Callable[[Vm], float] | None = None
    host_of: Callable[[Vm, Impact], str] = lambda vm, impact: ""
    readability: Readability | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        self._name = self.worker
        self.lease: Lease | None = None
        self._wake_at: dict[str, datetime] = {}
        self._alarms: SortedKeys[tuple[datetime, str]] = SortedKeys(
            lambda: ((time, name) for name, time in self._wake_at.items())
        )
        self._changed = asyncio.Event()
        self._queue: dict[str, None] = {}
        self._running: set[tuple[str, str]] = set()
        self._jobs: dict[str, dict[ImpactJob, asyncio.Task[None]]] = {}
        self._calls: set[asyncio.Future[ImpactResult]] = set()
        self._releaser = ClaimReleaser(engine)
        self._clock_skew = ClockSkew(
            engine, self._on_clock_compared, every=self.compare_clocks_every
        )
        engine.board.subscribe(self._look_at)
        for published in engine.board.scopes.values():
            self._look_at(published)

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

    def _on_clock_compared(self) -> None:
        self._changed.set()
        if self.readability is not None:
            self.readability.on_clock_compared()

    async def _look_at_all(self) -> None:
        """Set the alarm of every scope again: what was dropped is due."""
        scopes = self.engine.board.scopes
        for number, name in enumerate(list(scopes), start=1):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
            if name in scopes:
                self._look_at(scopes[name])

    async def _work(self, lease: Lease) -> None:
        """Work under a lease until cancelled. Other servers take over what is dropped then.

        The platform has a few seconds to leave its VMs in a good state.
        """
        self.lease = self.engine.server_lease = lease
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._clock_skew.run(self._name, lease))
                if self.readability is not None:
                    is_right = self._clock_skew.is_right
                    group.create_task(self.readability.run(self._name, is_right))
                    group.create_task(self._watch_gaps(self.readability))
                group.create_task(self._watch_deadlines())
                group.create_task(self._releaser.run(self._name))
        finally:
            self.lease = None
            scopes = list(self._jobs)
            tasks = [task for jobs in self._jobs.values() for task in jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._jobs.clear()
            self._running.clear()
            if self._calls:
                await asyncio.wait(self._calls, timeout=self.stop_seconds_max)
            if not self._calls and lease.is_held():  # else the others wait until calls have ended
                await self._releaser.release_own(scopes, self._name, lease)

    def look_at(self, vms: Iterable[str]) -> None:
        """The platform may handle the impacts of these VMs now, or no longer."""
        board = self.engine.board
        for published in {board.vms[vm] for vm in vms if vm in board.vms}:
            self._look_at(published)

    def _look_at(self, published: PublishedScope) -> None:
        name = published.scope.name
        with isolated(
            self.engine.throttled_log, "bug while looking at a scope", scope=name
        ) as look:
            self._on_scope_changed(published)
        if look.has_failed:
            self._set_alarm(name, self.engine.decision_time() + RETRY_MAX)

    def _is_handled(self, scope: Scope) -> Callable[[Impact], bool]:
        vms = {vm.name: vm for vm in scope.vms} if scope.impacts else {}
        return lambda impact: impact.vm not in vms or self.handles(vms[impact.vm], impact)

    def _on_scope_changed(self, published: PublishedScope) -> None:
        scope = published.scope
        self._set_alarm(scope.name, self._next_time(scope))
        for job in self._jobs.get(scope.name, ()):
            job.check()

    def _set_alarm(self, name: str, wake_at: datetime | None) -> None:
        """Look at this scope at this time, and not before; None: not at all."""
        before = self._wake_at.pop(name, None)
        if before is not None:
            self._alarms.remove((before, name))
        if wake_at is None:
            return
        assert wake_at.tzinfo is not None, "it could not be compared with the other alarms"
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

    async def _watch_gaps(self, readability: Readability) -> None:
        """Look at all scopes with events when a gap was found: guests see its effect early."""
        while True:  # ends when cancelled
            await readability.gap_found.wait()
            readability.gap_found.clear()
            for number, published in enumerate(set(self.engine.board.events.values()), start=1):
                if number % POLLS_PASS_EVERY == 0:
                    await asyncio.sleep(0)
                self._look_at(published)

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
        with isolated(
            self.engine.throttled_log, "bug while processing a scope", scope=name
        ) as work:
            try:
                await self._tick(name, published, now)
                if self._find_due(name):
                    self._queue[name] = None
                if name not in self._wake_at:  # what is due is running or queued; look again later
                    wake_at = self._next_time(published.scope)
                    if wake_at is not None:
                        self._set_alarm(name, max(wake_at, self.engine.decision_time() + RETRY))
            except Error as error:
                self.engine.throttled_log.warn("tick failed", scope=name, problem=error.message)
                self._set_alarm(name, now + RETRY)
        if work.has_failed:
            self._set_alarm(name, now + RETRY_MAX)

    async def _tick(self, name: str, published: PublishedScope, now: datetime) -> None:
        """Store with the events of a scope when they could not be read, then start what is due."""
        deadline, tick = next_deadline(published.scope), Tick()
        is_due = deadline is not None and deadline <= now
        if self.readability is not None:
            due = [time for time in start_times(published.scope) if time <= now]
            if due:
                await self.readability.confirm(max(due))
            scope = published.scope
            tick = Tick(self.readability.shown_at, self.readability.find_known(scope))
            unread = self.readability.find_unread(scope)
            if unread is not None:
                await self.engine.submit(name, unread, by="clock")
        if is_due:
            await self.engine.submit(name, tick, by="clock")

    def _next_time(self, scope: Scope) -> datetime | None:
        """When the scope needs this worker: to tick, or to carry an impact out."""
        if not scope.events and not scope.impacts:  # most scopes, most of the time
            return None
        now, impact_at = self.engine.decision_time(), next_impact_at(scope, self._is_handled(scope))
        if impact_at is not None and impact_at > now + WAIT_MAX:
            impact_at = now  # it is due: see `lifecycle.is_misdated`
        unread_at = self.readability.unread_at(scope) if self.readability is not None else None
        times: Iterable[datetime | None] = (next_deadline(scope), impact_at, unread_at)
        return min((time for time in times if time is not None), default=None)

    def _find_due(self, name: str) -> list[Impact]:
        """The due impacts of a scope that this worker can carry out and does not yet."""
        published = self._find(name)
        if published is None:
            return []
        is_handled = self._is_handled(published.scope)
        due = due_impacts(published.scope, self.engine.decision_time())
        return [each for each in due if (name, each.vm) not in self._running and is_handled(each)]

    def _dispatch(self) -> None:
        """Start as many due impacts as may run at the same time; the others stay queued."""
        while self._queue and len(self._running) < self.impacts_max and self.lease is not None:
            name = next(iter(self._queue))
            is_full = False
            text = "bug while looking for due impacts"
            with isolated(self.engine.throttled_log, text, scope=name):
                is_full = not self._start_due(name, self.lease)
            if not is_full:
                del self._queue[name]

    def _start_due(self, name: str, lease: Lease) -> bool:
        """Start the due impacts of a scope. False if more of them are due than may run."""
        for impact in self._find_due(name):
            if len(self._running) >= self.impacts_max:
                return False
            with isolated(
                self.engine.throttled_log, "bug while starting an impact", scope=name, vm=impact.vm
            ) as begin:
                self._start(name, impact, lease)
            if begin.has_failed:
                self._set_alarm(name, self.engine.decision_time() + RETRY_MAX)
        return True

    def _start(self, scope: str, impact: Impact, lease: Lease) -> None:
        vm = self.engine.board.scopes[scope].scope.vm(impact.vm)
        job = ImpactJob(
            self.engine,
            self.platform,
            scope,
            impact,
            worker=self._name,
            lease=lease,
            limit=self.impact_limit,
            calls=self._calls,
            stop_seconds=self._find_stop_seconds(vm),
            host=self.host_of(vm, impact) if vm is not None else "",
        )
        self._running.add((scope, impact.vm))
        self._jobs.setdefault(scope, {})[job] = asyncio.create_task(self._carry_out(job))

    def _find_stop_seconds(self, vm: Vm | None) -> float:
        if self.stop_seconds is None:
            return self.platform.stop_seconds if isinstance(self.platform, SlowToStop) else 0.0
        return self.stop_seconds(vm) if vm is not None else 0.0

    async def _carry_out(self, job: ImpactJob) -> None:
        """A bug with this one impact must not stop the others, nor leave the impact claimed."""
        log, facts = self.engine.throttled_log, {"scope": job.scope, "vm": job.impact.vm}
        result: Finish | Release | None = None
        try:
            # LeaseLost: the server that takes over records the result
            text = "bug while running an impact"
            with isolated(log, text, **facts) as run, suppress(LeaseLost):
                result = await self._run_job(job)
            if result is not None:
                await self._record(job, result)
            elif run.has_failed:
                with isolated(log, "bug while releasing an impact", **facts):
                    await job.release()
        finally:
            jobs = self._jobs[job.scope]
            del jobs[job]
            if not jobs:
                del self._jobs[job.scope]

    async def _run_job(self, job: ImpactJob) -> Finish | Release | None:
        """Claim the impact and run it."""
        try:
            return await job.run()
        finally:  # the result makes the VM's next impact due, so the VM is free before it
            self._running.discard((job.scope, job.impact.vm))
            if self._queue:
                self._changed.set()

    async def _record(self, job: ImpactJob, result: Finish | Release) -> None:
        """Record the result, also after a bug: without it the impact would run again. Then wait
        until the VM is back.
        """
        clock, log = self.engine.clock, self.engine.throttled_log
        facts, pause = {"scope": job.scope, "vm": job.impact.vm}, RETRY
        text = "bug while recording the result of an impact"
        while True:  # ends when it is recorded or not needed, or when cancelled
            with isolated(log, text, **facts) as recording, suppress(LeaseLost):
                await job.finish(result)
            if not recording.has_failed:
                break
            await clock.sleep_until(clock.now() + pause)
            pause = min(2 * pause, RETRY_MAX)
        with isolated(log, "bug while waiting for a VM", **facts), suppress(LeaseLost):
            await job.wait_until_back()
