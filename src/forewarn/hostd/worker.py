"""Carries out the impacts that a server hands out, and keeps their results until it has them.

It makes no calls to servers: `control.py` passes on what they ask for and what came of it.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from forewarn.errors import ImpactFailed
from forewarn.log import log
from forewarn.platform.base import SHORTAGES, BackWatcher, ImpactRequest, Platform
from forewarn.platform.remote import ImpactKey, RemoteResult, RunningImpact, Work

SHORTAGE_SECONDS = 5.0
BACK_SECONDS_MAX = 3600.0
"""The server has a limit of its own, and stops waiting earlier."""
STOP_SECONDS_MAX = 7.0
"""Longer than the grace period of a command."""
PROBLEM_LENGTH_MAX, DETAIL_LENGTH_MAX = 500, 2048
DETAILS_LENGTH_MAX = 128 * DETAIL_LENGTH_MAX
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
    result: RemoteResult | None = None


class ImpactRunner:
    """Runs at most `impacts_max` platform calls, and one at a time for each VM; others wait.

    `on_change` is called when there is a result.
    """

    def __init__(
        self, platform: Platform, impacts_max: int, shortage_seconds: float = SHORTAGE_SECONDS
    ) -> None:
        self._platform = platform
        self._shortage_seconds = shortage_seconds
        self._slots = asyncio.Semaphore(impacts_max)
        self._impacts: dict[ImpactKey, StartedImpact] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}  # with their VM; also cancelled ones
        self.on_change: Callable[[], None] = lambda: None

    def running(self) -> list[RunningImpact]:
        """What was started, and the results that are not recorded yet."""
        length_max = DETAILS_LENGTH_MAX // max(128, len(self._impacts))
        return [
            RunningImpact(
                *key,
                each.tries,
                each.result and replace(each.result, detail=each.result.detail[:length_max]),
            )
            for key, each in self._impacts.items()
        ]

    def apply(self, work: Work) -> None:
        """Drop what is recorded or no longer wanted, and start what is new."""
        for each in work.cancel:
            self._cancel(each.key)
        for request in work.impacts:
            self._start(request)

    def cancel_all(self) -> None:
        for key in [*self._impacts]:
            self._cancel(key)

    async def stop(self) -> None:
        """Cancel all calls. The platform has a few seconds to leave its VMs in a good state."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS_MAX)

    def _cancel(self, key: ImpactKey) -> None:
        impact = self._impacts.pop(key, None)
        if impact is not None:
            impact.task.cancel()
            if impact.result is None:
                log.info("impact cancelled", vm=key[1], event=key[0])

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
        before = [task for task, name in self._tasks.items() if name == vm]
        task = asyncio.create_task(self._carry_out(key, before))
        self._impacts[key] = StartedImpact(request, request.tries, task)
        self._tasks[task] = vm
        task.add_done_callback(self._tasks.pop)

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

    async def _run(self, request: ImpactRequest) -> RemoteResult:
        while True:  # ends when the call could be started
            try:
                done = await self._platform.run_impact(request)
                detail = done.detail[:DETAIL_LENGTH_MAX]
                return RemoteResult("", detail, done.host, done.is_back)
            except Exception as error:  # whatever a platform raises is a failed attempt
                if not isinstance(error, OSError) or error.errno not in SHORTAGES:
                    return _describe_failure(error)
                vm, problem = request.vm.name, error.strerror
                log.warning("platform call not started", vm=vm, problem=problem)
            await asyncio.sleep(self._shortage_seconds)

    async def _watch(
        self, impact: StartedImpact, result: RemoteResult, platform: BackWatcher
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


def _describe_failure(error: Exception) -> RemoteResult:
    output = str(error.facts.get("output", "")) if isinstance(error, ImpactFailed) else ""
    problem = (str(error) or type(error).__name__)[:PROBLEM_LENGTH_MAX]
    return RemoteResult(problem, output[:DETAIL_LENGTH_MAX])
