"""The few loops: wake at deadlines, carry impacts out, follow the store.

Each turn's trouble is logged and tried again.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from forewarn.core.command import Claim, Finish, Tick
from forewarn.core.event import UNKNOWN_SECONDS, Impact
from forewarn.core.fleet import Scope
from forewarn.core.lifecycle import impact_of
from forewarn.core.machine import due_impacts, next_deadline, next_impact_at
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import within
from forewarn.engine.engine import Engine
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.stale_claims import StaleClaims
from forewarn.errors import Error, ImpactFailed, NotFound, Unavailable
from forewarn.platform.base import SHORTAGES, ImpactRequest, ImpactResult, Platform

log = logging.getLogger("forewarn")

AT_ONCE_MAX = 32
AGAIN = timedelta(seconds=1)
AGAIN_MAX = timedelta(seconds=30)
PROBLEM_LENGTH_MAX = 500
DETAIL_LENGTH_MAX = 4000
ALARMS_SPARE = 64
ENDS_ALONE_MAX = 64
ENDS_TOGETHER = timedelta(seconds=0.1)
"""In a scope with more impacts than this, those that end within so short a time are recorded
together: the record is large.
"""
CHECKS_MAX = 3
"""How often a claim is renewed before its impact begins, where each renewal takes too long to be
sure of it.
"""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ENDING_SECONDS_MAX = 7.0
"""How long drivers may take to end what they have in hand when the service stops: more than the
grace of a command.
"""


class Hold(NamedTuple):
    """What a claim of ours orders, and when the claim was asked for: by the wall clock, and by a
    clock that is never set.
    """

    order: ImpactRequest
    asked_at: datetime
    asked_monotonic: float


class ClaimLost(Exception):
    """Another worker has the impact now, or nobody can tell."""


class Worker:
    """One server's part in the work. `worker` names it in claims and must be new at every start."""

    def __init__(
        self,
        engine: Engine,
        platform: Platform,
        *,
        worker: str,
        impacts_max: int = 256,
        impact_limit: timedelta,
        ending_seconds_max: float = ENDING_SECONDS_MAX,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._platform = platform
        self._worker = worker
        self._impacts_max = impacts_max
        self._impact_limit = impact_limit
        self._ending_seconds_max = ending_seconds_max
        self._monotonic = monotonic
        self._alarms: list[tuple[datetime, str]] = []
        self._wake_at: dict[str, datetime] = {}
        self._changed = asyncio.Event()
        # What we carry out, by scope and VM: also on its platform a VM has one impact at a time.
        # `_behind` are those of them that another impact of the same VM waits for here.
        self._in_hand: dict[tuple[str, str], tuple[str, asyncio.Task[None]]] = {}
        self._behind: set[tuple[str, str]] = set()
        self._driving: set[asyncio.Future[ImpactResult]] = set()
        self._queue: dict[str, None] = {}
        self._is_dispatching = False
        self._is_ending = False
        engine.board.subscribe(self.notice)
        for place in engine.board.scopes.values():
            self.notice(place)

    async def run(self) -> None:
        """Work until cancelled. What is in hand is then dropped: claims lapse by themselves, and
        whoever comes next goes on.

        Drivers are told, and have a few seconds to leave their VMs in a good state.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_deadlines())
                group.create_task(self._engine.follow())
                group.create_task(StaleClaims(self._engine).run())
        finally:
            self._is_ending = True
            tasks = [task for _, task in self._in_hand.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._driving:
                await asyncio.wait(self._driving, timeout=self._ending_seconds_max)

    def notice(self, place: PublishedScope) -> None:
        """A scope has changed: know anew when it needs us."""
        scope = place.scope
        wake = next_moment(scope)
        if wake is None:
            self._wake_at.pop(scope.name, None)
        elif self._wake_at.get(scope.name) != wake:
            self._set_alarm(scope.name, wake)

    def _set_alarm(self, name: str, wake: datetime) -> None:
        self._wake_at[name] = wake
        if (
            len(self._alarms) > 2 * len(self._wake_at) + ALARMS_SPARE
        ):  # most were set anew since, some for a day far off
            self._alarms = [(moment, other) for other, moment in self._wake_at.items()]
            heapq.heapify(self._alarms)
        else:
            heapq.heappush(self._alarms, (wake, name))
        if self._alarms[0] == (wake, name):
            self._changed.set()

    async def _keep_deadlines(self) -> None:
        clock = self._engine.clock
        while True:  # ends when cancelled
            names = self._due_names()
            while names:
                batch, names = names[:AT_ONCE_MAX], names[AT_ONCE_MAX:]
                await asyncio.gather(*(self._attend(name) for name in batch))
            self._changed.clear()
            if self._alarms and self._alarms[0][0] <= clock.now():
                continue
            await self._sleep_until(self._alarms[0][0] if self._alarms else None)

    async def _sleep_until(self, moment: datetime | None) -> None:
        """Until the moment comes or something changes."""
        waits: list[asyncio.Task[object]] = [asyncio.ensure_future(self._changed.wait())]
        if moment is not None:
            waits.append(asyncio.ensure_future(self._engine.clock.sleep_until(moment)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    def _due_names(self) -> list[str]:
        now, names = self._engine.clock.now(), []
        while self._alarms and self._alarms[0][0] <= now:
            moment, name = heapq.heappop(self._alarms)
            if self._wake_at.get(name) == moment:  # else the alarm was set anew since
                del self._wake_at[name]
                names.append(name)
        return names

    async def _attend(self, name: str) -> None:
        place = self._engine.board.scopes.get(name)
        if (
            place is None or SCOPE_KEY.format(name) in self._engine.unreadable
        ):  # a newer server's: it attends to it
            return
        now = self._engine.clock.now()
        deadline = next_deadline(place.scope)
        try:
            if deadline is not None and deadline <= now:
                await self._engine.submit(name, Tick(), by="clock")
            if due_impacts(place.scope, now):
                self._queue[name] = None
                self._dispatch()
        except Error as problem:
            self._engine.throttled_log.warn("tick failed", scope=name, problem=problem.message)
            self._set_alarm(name, now + AGAIN)
            return
        except Exception:  # a bug that this one scope meets must not stop the others
            log.exception("tick broken", extra={"facts": {"scope": name}})
            self._set_alarm(name, now + AGAIN_MAX)
            return
        if name not in self._wake_at:
            self._watch_later(place)

    def _watch_later(self, place: PublishedScope) -> None:
        """Set the next alarm for what is not due yet; what is due is in hand or in the queue, and
        looked at again in a while.
        """
        moment = next_moment(place.scope)
        if moment is not None:
            self._set_alarm(place.scope.name, max(moment, self._engine.clock.now() + AGAIN))

    def _dispatch(self) -> None:
        """Hand out due impacts, as many as may be carried out at once; the rest keeps its place in
        the queue.
        """
        self._is_dispatching = False
        while self._queue and len(self._in_hand) < self._impacts_max and not self._is_ending:
            name = next(iter(self._queue))
            place = self._engine.board.scopes.get(name)
            due = due_impacts(place.scope, self._engine.clock.now()) if place else ()
            fresh = [impact for impact in due if not self._is_in_hand(name, impact)]
            room = self._impacts_max - len(self._in_hand)
            for impact in fresh[:room]:
                self._take(name, impact)
            if len(fresh) <= room:
                del self._queue[name]

    def _is_in_hand(self, scope: str, impact: Impact) -> bool:
        """Whether we work on the VM already.

        If it is on another impact, this one has its turn when that is let go.
        """
        key = (scope, impact.vm)
        if key not in self._in_hand:
            return False
        if self._in_hand[key][0] != impact.event_id:
            self._behind.add(key)
        return True

    def _take(self, scope: str, impact: Impact) -> None:
        key = (scope, impact.vm)
        task = asyncio.create_task(self._carry_out(scope, impact))
        self._in_hand[key] = (impact.event_id, task)

        def let_go(done: asyncio.Task[None]) -> None:
            del self._in_hand[key]
            if not done.cancelled() and (bug := done.exception()):
                log.error(
                    "impact broken",
                    exc_info=bug,
                    extra={"facts": {"scope": scope, "vm": impact.vm}},
                )
            if key in self._behind:
                self._behind.remove(key)
                self._queue[scope] = None
            self._dispatch_soon()

        task.add_done_callback(let_go)

    def _dispatch_soon(self) -> None:
        """Many impacts may end at once; looking for what is due takes as long as the scope is
        large, so do it once for all.
        """
        if self._queue and not self._is_dispatching:
            self._is_dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    async def _carry_out(self, scope: str, impact: Impact) -> None:
        """Claim it, do it while renewing the claim, tell how it ended."""
        claim = Claim(event_id=impact.event_id, vm=impact.vm, worker=self._worker)
        hold = await self._claim(scope, claim)
        if hold is None:
            return
        claim = replace(claim, tries=hold.order.tries)
        work = asyncio.ensure_future(self._try(claim, hold))
        renewal = asyncio.ensure_future(self._renew(scope, claim, work))
        try:
            finish = await work
        except ClaimLost:
            return
        except asyncio.CancelledError:
            if renewal.done():  # the claim was lost: whoever took it over tells how it ends
                return
            raise
        finally:
            work.cancel()
            renewal.cancel()
        await self._tell(scope, finish)

    async def _claim(self, scope: str, claim: Claim) -> Hold | None:
        """Make or renew the claim; None if it is not ours, or nobody can tell."""
        asked_at, asked_monotonic = self._engine.clock.now(), self._monotonic()
        try:
            outcome = await self._engine.submit(scope, claim, by=self._worker)
        except Error as problem:
            self._engine.throttled_log.warn(
                "claim failed", scope=scope, vm=claim.vm, problem=problem.message
            )
            return None
        mine, vm = self._claimed(outcome.scope, claim), outcome.scope.vm(claim.vm)
        if mine is None or vm is None:
            return None
        event = outcome.scope.event(mine.event_id)
        duration = UNKNOWN_SECONDS if event is None else event.duration_seconds
        order = ImpactRequest(mine.event_id, scope, vm, mine.type, mine.cause, mine.tries, duration)
        return Hold(order, asked_at, asked_monotonic)

    def _is_sure(self, hold: Hold) -> bool:
        """Whether the claim certainly holds: less than half of its time has passed, by either
        clock, since it was asked for.
        """
        half = self._engine.timing.claim / 2
        passed = self._engine.clock.now() - hold.asked_at
        return (
            timedelta(0) <= passed < half
            and self._monotonic() - hold.asked_monotonic < half.total_seconds()
        )

    async def _call_platform(self, claim: Claim, hold: Hold) -> ImpactResult:
        """Call the platform, unless the claim may be over: this process may have been stopped
        since, and another one done it.

        Nothing is awaited between the last look at the clocks and the call.
        """
        for _ in range(CHECKS_MAX):
            if self._is_sure(hold):
                return await self._platform.run_impact(hold.order)
            renewed = await self._claim(hold.order.scope, claim)
            if renewed is None:
                break
            hold = renewed
        raise ClaimLost

    async def _try(self, claim: Claim, hold: Hold) -> Finish:
        finish = Finish(
            event_id=claim.event_id, vm=claim.vm, worker=self._worker, tries=claim.tries
        )
        try:
            done = await self._drive(claim, hold)
            return replace(finish, host=done.host, detail=done.detail[:DETAIL_LENGTH_MAX])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return replace(finish, problem="the driver gave up by itself")
        except ClaimLost:
            raise
        except Exception as raised:  # whatever a driver raises is a failed try, never a broken loop
            output = str(raised.facts.get("output", "")) if isinstance(raised, ImpactFailed) else ""
            problem = (str(raised) or type(raised).__name__)[:PROBLEM_LENGTH_MAX]
            return replace(finish, problem=problem, detail=output[:DETAIL_LENGTH_MAX])

    async def _drive(self, claim: Claim, hold: Hold) -> ImpactResult:
        """Call the driver.

        While this machine lacks what it takes to start it, that is no failed try: it is called
        again.
        """
        clock, pause = self._engine.clock, AGAIN
        give_up_at = clock.now() + self._impact_limit
        while True:  # ends when the driver was started, when its time is up, or when cancelled
            driving = asyncio.ensure_future(self._call_platform(claim, hold))
            self._driving.add(
                driving
            )  # and there it stays until it has ended, whoever waits for it
            driving.add_done_callback(self._driving.discard)
            try:
                return await within(clock, self._impact_limit, driving)
            except OSError as error:
                if error.errno not in SHORTAGES or clock.now() + pause >= give_up_at:
                    raise
                self._engine.throttled_log.warn(
                    "driver not started", vm=claim.vm, problem=error.strerror
                )
            await clock.sleep_until(clock.now() + pause)
            pause = min(2 * pause, AGAIN_MAX)

    async def _renew(self, scope: str, claim: Claim, work: asyncio.Future[Finish]) -> None:
        """Keep the claim while the work goes on; give the work up when the claim is known to be
        lost.

        All claims of a scope are renewed at the same times, whenever they were made, and so in the
        same commit; those of other scopes at other times, so that the store is not busy with all of
        them at once.

        While the store does not answer, the work goes on: nobody who shares that store can take it
        over, and a VM is better served by an impact that ends than by one that is broken off. Who
        is cut off alone finds out when it is back.
        """
        clock, step = self._engine.clock, self._engine.timing.claim / 3
        while not work.done():
            await clock.sleep_until(
                next_on_grid(clock.now(), step, step * (crc32(scope.encode()) % 1000) / 1000)
            )
            try:
                outcome = await self._engine.submit(scope, claim, by=self._worker)
            except NotFound:
                is_lost = True
            except Error:
                is_lost = False
            else:
                is_lost = self._claimed(outcome.scope, claim) is None
            if is_lost:
                work.cancel()
                return

    def _claimed(self, scope: Scope, claim: Claim) -> Impact | None:
        impact = impact_of(scope, claim.event_id, claim.vm)
        is_mine = (
            impact is not None
            and impact.claimed_by == claim.worker
            and claim.tries in (0, impact.tries)
        )
        return impact if is_mine else None

    async def _tell(self, scope: str, finish: Finish) -> None:
        """What was done must not be forgotten, or it would be done again: a store that is lost is
        tried until it is back.
        """
        clock, pause = self._engine.clock, AGAIN
        place = self._engine.board.scopes.get(scope)
        if place is not None and len(place.scope.impacts) > ENDS_ALONE_MAX:
            await clock.sleep_until(next_on_grid(clock.now() - timedelta.resolution, ENDS_TOGETHER))
        while True:  # ends when it is told, when nobody waits for it, or when cancelled
            try:
                await self._engine.submit(scope, finish, by=self._worker)
                return
            except Unavailable as problem:
                self._engine.throttled_log.warn(
                    "finish failed", scope=scope, vm=finish.vm, problem=problem.message
                )
            except NotFound:
                return  # the scope is no more, and nobody waits for this
            await clock.sleep_until(clock.now() + pause)
            pause = min(2 * pause, AGAIN_MAX)


def next_moment(scope: Scope) -> datetime | None:
    """When the scope needs somebody: to tick, or to carry an impact out."""
    if not scope.events and not scope.impacts:  # most scopes, most of the time
        return None
    return min(
        (moment for moment in (next_deadline(scope), next_impact_at(scope)) if moment is not None),
        default=None,
    )


def next_on_grid(moment: datetime, step: timedelta, offset: timedelta = timedelta(0)) -> datetime:
    """The next of the times, a step apart, at which what can wait is committed together."""
    start = EPOCH + offset
    return start + ((moment - start) // step + 1) * step
