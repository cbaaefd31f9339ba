"""One impact that a server carries out: claim it, run it, record the result, wait for the VM."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from msgspec.structs import asdict, replace

from forewarn.core.command import Back, Claim, Finish, Release
from forewarn.core.event import Impact, ImpactState
from forewarn.core.fleet import Scope
from forewarn.core.machine import Outcome
from forewarn.engine.clock import within
from forewarn.engine.engine import Engine
from forewarn.engine.transaction import LeaseLost
from forewarn.errors import HostUnreachable, NotFound, RecordUnreadable, Unavailable
from forewarn.platform.base import (
    BackWatcher,
    ImpactRequest,
    ImpactResult,
    Platform,
    make_request,
    run_platform_call,
)
from forewarn.store.base import Lease

RETRY = timedelta(seconds=1)
RETRY_MAX = timedelta(seconds=30)
IMPACTS_FINISHED_ALONE_MAX = 64
FINISH_TOGETHER = timedelta(seconds=0.1)
"""In a scope with more impacts than this, those that end within so short a time are recorded
together: the record is large.
"""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class ImpactJob:
    """Works in the name of a worker and under its lease; `limit` is for a platform call.

    CLAIMING --> RUNNING --> FINISHING --> BOOTING --> (over)
        |           |            |            |
        | not ours  | lease lost, or the impact is no longer ours (an operator completed the event)
        |           | or over (the VM polled): the platform call is cancelled
        +-----------+------------+------------+------> (dropped)

    `call` is what the platform does for it while it is RUNNING or BOOTING. `calls` has the calls
    that have not ended, even if no task awaits them any more, and `last_call` the last one of this
    job. `stop_seconds` is how long a call may act after it was canceled, `host` the host whose
    daemon makes it.
    """

    engine: Engine
    platform: Platform
    scope: str
    impact: Impact
    worker: str
    lease: Lease
    limit: timedelta
    calls: set[asyncio.Future[ImpactResult]]
    stop_seconds: float = 0.0
    host: str = ""
    call: asyncio.Future[Finish | Release] | asyncio.Future[None] | None = None
    last_call: asyncio.Future[ImpactResult] | None = None
    is_booting: bool = False

    def check(self) -> None:
        """Cancel the platform call if the impact is no longer ours. Called when it may not be."""
        if self.call is not None and self._find_request() is None:
            self.call.cancel()

    async def run(self) -> Finish | Release | None:
        """Claim and run the impact. None if the claim is not ours, or no longer.

        The same commit may have ended the event after the claim, so only what is published counts.
        Ends when the platform no longer acts on the VM, unless this task is canceled.
        """
        claim = Claim(
            event_id=self.impact.event_id,
            vm=self.impact.vm,
            worker=self.worker,
            stop_seconds=self.stop_seconds,
            host=self.host,
            tries=self.impact.tries,
        )
        outcome, request = await self._submit(claim), self._find_request()
        if outcome is None or request is None:
            return self._release_dropped()
        call = self.call = asyncio.ensure_future(self._run_impact(request))
        try:
            await asyncio.wait((call,))
        finally:
            call.cancel()
        if call.cancelled():  # by `check`
            await self._wait_until_stopped()
            return self._release_dropped()
        return call.result()

    async def finish(self, finish: Finish | Release) -> None:
        """Record the result; without it the impact would run again."""
        clock = self.engine.clock
        published = self.engine.board.scopes.get(self.scope)
        if published is not None and len(published.scope.impacts) > IMPACTS_FINISHED_ALONE_MAX:
            await clock.sleep_until(next_on_grid(clock.now(), FINISH_TOGETHER))
        await self._submit(finish)

    async def release(self) -> None:
        """End the claim of a try that a bug has ended. No other server does, as this one lives."""
        await self._submit(self._release(is_bug=True))

    def _release(self, *, is_bug: bool = False) -> Release:
        """It ends the claim of this try, and of no later one, however often it is submitted."""
        return Release(
            worker=self.worker,
            event_id=self.impact.event_id,
            vm=self.impact.vm,
            tries=self.impact.tries + 1,
            is_bug=is_bug,
        )

    async def wait_until_back(self) -> None:
        """If the VM boots now, let the platform notice when it is back.

        Every server notices polls, and the limit is a deadline of the scope.
        """
        self.is_booting = True
        platform, engine, request = self.platform, self.engine, self._find_request()
        if request is None or not isinstance(platform, BackWatcher):
            return
        vm, limit = request.vm.name, engine.timing.back_limit
        call = self.call = asyncio.ensure_future(platform.wait_until_back(request))
        try:
            await within(engine.clock, limit, call)
        except TimeoutError:
            return
        except Exception as error:  # whatever a platform raises, a poll or the limit ends the wait
            problem = str(error) or type(error).__name__
            engine.throttled_log.warn("guest agent not asked", vm=vm, problem=problem)
            return
        await self._submit(Back(event_id=request.event_id, vm=vm, detail="guest agent answers"))

    def _is_ours(self, impact: Impact) -> bool:
        if self.is_booting:
            return impact.state is ImpactState.BOOTING
        return impact.is_held and impact.claimed_by == self.worker

    def _release_dropped(self) -> Release | None:
        """What ends our claim if the impact was dropped: the VM's next impact waits for that."""
        published = self.engine.board.scopes.get(self.scope)
        ours = self.impact.event_id, self.impact.vm, self.worker
        for each in published.scope.dropped if published else ():
            if (each.event_id, each.vm, each.claimed_by) == ours:
                return self._release()
        return None

    def _find_request(self) -> ImpactRequest | None:
        """The request for the platform, if the impact is ours."""
        published = self.engine.board.scopes.get(self.scope)
        scope = published.scope if published else Scope(name=self.scope)
        impact = scope.impact(self.impact.event_id, self.impact.vm)
        if impact is None or not self._is_ours(impact):
            return None
        return make_request(scope, impact, self.engine.timing.rate)

    async def _run_impact(self, request: ImpactRequest) -> Finish | Release:
        """Run the impact and describe its result. It is released if its host was lost."""
        finish = Finish(
            event_id=request.event_id, vm=request.vm.name, worker=self.worker, tries=request.tries
        )
        log, clock, vm = self.engine.throttled_log, self.engine.clock, request.vm.name

        async def start() -> ImpactResult:
            call = self.last_call = asyncio.ensure_future(self._call(request))
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)
            try:
                return await within(clock, self.limit, call)
            except TimeoutError:
                await self._wait_until_stopped()
                raise

        def warn(problem: str) -> None:
            log.warn("platform call not started", vm=vm, problem=problem)

        try:
            passing = LeaseLost, HostUnreachable
            result = await run_platform_call(start, clock, self.limit, warn, passing)
        except HostUnreachable:
            return self._release()
        return replace(finish, **asdict(result))

    async def _wait_until_stopped(self) -> None:
        """Wait for the last call, which was canceled, for as long as it may act on the VM.

        The impact stays claimed, or in `Scope.dropped`, so nothing else acts on the VM.
        """
        limit = timedelta(seconds=self.stop_seconds)
        if self.last_call is not None:
            with suppress(TimeoutError):
                await within(self.engine.clock, limit, asyncio.wait((self.last_call,)))

    async def _call(self, request: ImpactRequest) -> ImpactResult:
        """Call the platform if the lease is held.

        This process may have been stopped since the claim, so another one may have carried out the
        impact. Nothing is awaited between the check and the call.
        """
        if not self.lease.is_held():
            raise LeaseLost(f"this server has lost the lease {self.lease.name}")
        return await self.platform.run_impact(request)

    async def _submit(self, command: Back | Claim | Finish | Release) -> Outcome | None:
        """Commit a claim or a result, and retry for as long as the store does not answer.

        A commit whose reply was lost may have happened, and a claim that its worker does not know
        would never end. None if the scope was deleted, or another server takes over. A claim also
        ends if the scope has become unreadable, because it occupies one of `impacts_max`; a result
        waits, because the scope may become readable again.
        """
        engine, pause = self.engine, RETRY
        while True:  # ends when it is committed or not needed, or when cancelled
            try:
                return await engine.submit(self.scope, command, by=self.worker, lease=self.lease)
            except (NotFound, LeaseLost):
                return None
            except Unavailable as error:
                if isinstance(error, RecordUnreadable) and isinstance(command, Claim):
                    return None
                engine.throttled_log.warn(
                    "claim or result not recorded",
                    scope=self.scope,
                    vm=self.impact.vm,
                    problem=error.message,
                )
            await engine.clock.sleep_until(engine.clock.now() + pause)
            pause = min(2 * pause, RETRY_MAX)


def next_on_grid(now: datetime, step: timedelta) -> datetime:
    """The next of the times, a step apart, at which results are recorded together."""
    return EPOCH + -(-(now - EPOCH) // step) * step
