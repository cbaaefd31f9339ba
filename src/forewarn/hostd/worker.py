"""Carries out the impacts that a server hands out, and keeps their results until it has them.

It makes no calls to servers: `control.py` passes on what they ask for and what came of it.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from forewarn.errors import Error
from forewarn.hostd.moves import Moves
from forewarn.log import log
from forewarn.platform.base import (
    DETAIL_LENGTH_MAX,
    PROBLEM_LENGTH_MAX,
    STOP_SECONDS_MAX,
    BackWatcher,
    ImpactRequest,
    ImpactResult,
    Platform,
    Recoverer,
    Sleeper,
    run_platform_call,
)
from forewarn.platform.remote import ImpactKey, RunningImpact, Work

SHORTAGE_MAX = timedelta(days=1)
RECOVER_AGAIN_SECONDS = 60.0
BACK_SECONDS_MAX = 3600.0
"""The server has a limit of its own, and stops waiting earlier."""
DETAILS_LENGTH_MAX = 128 * DETAIL_LENGTH_MAX
PROBLEMS_LENGTH_MAX = 400 * PROBLEM_LENGTH_MAX
"""Of all results together: a request has a limit in bytes."""


@dataclass(eq=False)
class StartedImpact:
    """One impact.

    States:  RUNNING -> ENDED -> (recorded)      `result` is set when it has ended; if the VM boots
                |                                then, the result changes when it is back
                +-------------> (cancelled)      the server no longer wants it

    Only the server decides that one is recorded or cancelled; until then it is reported.
    """

    request: ImpactRequest
    tries: int
    task: asyncio.Task[None]
    result: ImpactResult | None = None


class ImpactRunner:
    """Runs at most `impacts_max` platform calls, and one at a time for each VM; others wait.

    What an earlier run of the daemon, or a failed try, has begun counts as running, too: the server
    hands it out again, or no longer wants it, and then its VM is recovered, before another event
    acts on it. `on_change` is called when there is a result. `moves` has the VMs that it is moving.
    """

    def __init__(
        self,
        platform: Platform,
        impacts_max: int,
        clock: Sleeper,
        host: str = "",
        moves: Moves | None = None,
    ) -> None:
        self._platform = platform
        self._clock = clock
        self._host = host
        self._moves = moves or Moves()
        self._begun: dict[ImpactKey, bool] = {}  # with whether the VM may be started
        self._has_looked = False
        self._slots = asyncio.Semaphore(impacts_max)
        self._impacts: dict[ImpactKey, StartedImpact] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}  # with their VM; also cancelled ones
        self.on_change: Callable[[], None] = lambda: None

    def running(self) -> list[RunningImpact]:
        """What was started, and the results that are not recorded yet."""
        begun = self._begun.keys() - self._impacts.keys()
        return [RunningImpact(*key, tries=0) for key in sorted(begun)] + [
            RunningImpact(*key, each.tries, each.result and self._shorten(each.result))
            for key, each in self._impacts.items()
        ]

    def _shorten(self, result: ImpactResult) -> ImpactResult:
        """A result with its part of what all results together may have."""
        count = len(self._impacts)
        return replace(
            result,
            detail=result.detail[: DETAILS_LENGTH_MAX // max(128, count)],
            problem=result.problem[: PROBLEMS_LENGTH_MAX // max(400, count)],
        )

    async def find_begun(self) -> None:
        """Find what an earlier run has begun. Called before each request, until it succeeds."""
        if not self._has_looked and isinstance(self._platform, Recoverer):
            with suppress(Error):
                begun = await self._platform.list_begun(self._host)
                # This host may have been away, and an operator may have started the VM on another.
                self._begun = dict.fromkeys(begun, False) | self._begun
                self._has_looked = True

    def apply(self, work: Work) -> None:
        """Drop what is recorded or no longer wanted, and start what is new.

        If a failure is recorded that may have left its VM suspended or off, the server has yet to
        say whether it is tried again, or the VM is recovered. Another event acts on it after that:
        its marker would hide what was left. The server hands that event out again.
        """
        known = set(self._begun)
        for each in work.cancel:
            self._cancel(each)
        left = {vm for _, vm in self._begun.keys() - known}
        for request in work.impacts:
            if request.vm.name not in left:
                self._start(request)

    def cancel_all(self) -> None:
        """Another daemon acts for this host: leave the VMs to it.

        If a server serves this one again, such as after a clone was stopped, it says what it has
        left, which is tried again, or recovered. A success stays until the server has recorded it:
        the next try would restart its VM again.
        """
        for key, impact in list(self._impacts.items()):
            if impact.result is not None and not impact.result.problem:
                continue
            del self._impacts[key]
            impact.task.cancel()
            if isinstance(self._platform, Recoverer):
                self._begun[key] = True

    async def stop(self) -> None:
        """Cancel all calls. The platform has a few seconds to leave its VMs in a good state."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS_MAX)

    def _cancel(self, each: RunningImpact) -> None:
        """Drop an impact, and recover its VM if it may be left suspended or off.

        A failure that is recorded may be tried again. Its VM is recovered when that is cancelled.
        """
        key, is_recoverer = each.key, isinstance(self._platform, Recoverer)
        impact = self._impacts.pop(key, None)
        if impact is not None:
            impact.task.cancel()
            if impact.result is not None:
                if impact.result.problem and is_recoverer:
                    self._begun[key] = True
                return
            log.info("impact cancelled", vm=key[1], event=key[0])
            self._begun[key] = True
        may_start = self._begun.pop(key, None)
        if may_start is not None and is_recoverer:
            work = self._recover(each, self._tasks_of(key[1]), may_start=may_start)
            self._add_task(key[1], work)

    def _tasks_of(self, vm: str) -> list[asyncio.Task[None]]:
        return [task for task, name in self._tasks.items() if name == vm]

    def _add_task(self, vm: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = vm
        task.add_done_callback(self._tasks.pop)
        return task

    def _start(self, request: ImpactRequest) -> None:
        """Start an impact, unless it runs or was done for an earlier try, whose server was lost.

        A failure is the result of one try only: the next try runs.
        """
        vm = request.vm.name
        key = request.event_id, vm
        old = self._impacts.get(key)
        if old is not None and not (old.result and old.result.problem):
            old.tries = request.tries
            return
        for other_key, other in self._impacts.items():
            if other_key[1] == vm and other.result is not None:  # it waits until the VM is back
                other.task.cancel()
        self._begun.pop(key, None)
        task = self._add_task(vm, self._carry_out(key, self._tasks_of(vm)))
        self._impacts[key] = StartedImpact(request, request.tries, task)

    async def _carry_out(self, key: ImpactKey, before: Sequence[asyncio.Task[None]]) -> None:
        """Run the impact, after all earlier calls for the VM have ended: one may be cancelled."""
        impact = self._impacts[key]
        if before:
            await asyncio.wait(before)
        async with self._slots:
            log.info("impact started", vm=key[1], type=impact.request.type, event=key[0])
            impact.result = await self._run(impact.request)
        problem = impact.result.problem or "none"
        log.info("impact ended", vm=key[1], event=key[0], problem=problem)
        self.on_change()
        if not impact.result.is_back and isinstance(self._platform, BackWatcher):
            await self._watch(impact, impact.result, self._platform)

    async def _recover(
        self, each: RunningImpact, before: Sequence[asyncio.Task[None]], *, may_start: bool
    ) -> None:
        """`may_start` is what this daemon knows. Its server decides again before each try."""
        event_id, vm = each.key
        if before:
            await asyncio.wait(before)
        try:
            assert isinstance(self._platform, Recoverer)
            result = await self._platform.recover(
                self._host,
                event_id,
                vm,
                may_start=may_start and each.may_start,
                may_run_on=each.may_run_on,
            )
            log.info("VM of an event that is over", vm=vm, event=event_id, result=result)
        except Exception as error:  # its target does not answer, say
            log.warning("VM not recovered; trying again", vm=vm, problem=str(error))
            again = functools.partial(self._begun.setdefault, each.key, may_start)
            asyncio.get_running_loop().call_later(RECOVER_AGAIN_SECONDS, again)

    async def _run(self, request: ImpactRequest) -> ImpactResult:
        def warn(problem: str) -> None:
            log.warning("platform call not started", vm=request.vm.name, problem=problem)

        platform, clock = self._platform, self._clock
        with self._moves.moving(request.vm.id.lower()) if request.moves else nullcontext():
            return await run_platform_call(
                lambda: platform.run_impact(request), clock, SHORTAGE_MAX, warn
            )

    async def _watch(
        self, impact: StartedImpact, result: ImpactResult, platform: BackWatcher
    ) -> None:
        vm = impact.request.vm
        vm = replace(vm, host=result.host or vm.host)
        try:
            async with asyncio.timeout(BACK_SECONDS_MAX):
                await platform.wait_until_back(dataclasses.replace(impact.request, vm=vm))
            impact.result = replace(result, is_back=True)
            self.on_change()
        except Exception as error:  # the server still notices when the VM polls
            log.warning("cannot see whether a VM is back", vm=vm.name, problem=str(error))
