"""Carries out the impacts that a server hands out, and keeps their results until it has them.

It makes no calls to servers: `control.py` passes on what they ask for and what came of it.
"""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from forewarn.core.fleet import Vm
from forewarn.errors import ImpactFailed
from forewarn.log import log
from forewarn.platform.base import SHORTAGES, BackWatcher, ImpactRequest, Platform

SHORTAGE_SECONDS = 5.0
BACK_SECONDS_MAX = 3600.0
"""The server has a limit of its own, and stops waiting earlier."""
STOP_SECONDS_MAX = 7.0
"""Longer than the grace period of a command."""
PROBLEM_LENGTH_MAX, DETAIL_LENGTH_MAX = 500, 2048


class ImpactKey(msgspec.Struct, frozen=True):
    event_id: str
    vm: str


class RunningImpact(ImpactKey, frozen=True):
    tries: int


class Result(RunningImpact, frozen=True):
    """How an impact ended. `problem` is empty if it succeeded."""

    problem: str = ""
    detail: str = ""
    host: str = ""
    is_back: bool = True


class ServerVm(Vm, frozen=True, forbid_unknown_fields=False):
    """A VM as a server describes it. A newer server may know more of it."""


@dataclass(frozen=True, slots=True)
class WantedImpact(ImpactRequest):
    """An impact as a server hands it out."""

    vm: ServerVm


class Work(msgspec.Struct, frozen=True):
    """What a server wants to be done, and what no longer."""

    impacts: tuple[WantedImpact, ...] = ()
    cancel: tuple[ImpactKey, ...] = ()


@dataclass(eq=False)
class Call:
    """One impact.

    States:  RUNNING -> FINISHED -> (accepted)            `result` is set when it has finished
                |          +-> WATCHING -> FINISHED -> (accepted, or not wanted any more)
                |          |   the VM restarted; the second result is that it is back
                +----------+-> ENDING -> (dropped)        the server no longer wants it

    All but WATCHING and ENDING calls are reported as running, so they are not handed out again.
    """

    request: ImpactRequest
    tries: int
    task: asyncio.Task[None] | None = None
    result: Result | None = None
    is_sent: bool = False
    is_watching: bool = False
    is_ending: bool = False

    @property
    def is_reported(self) -> bool:
        return not (self.is_ending or self.is_watching)


class Worker:
    """Runs at most `impacts_max` platform calls; other impacts wait until one of them ends.

    `has_results` is set while there may be results to send.
    """

    def __init__(
        self, platform: Platform, impacts_max: int, shortage_seconds: float = SHORTAGE_SECONDS
    ) -> None:
        self._platform = platform
        self._shortage_seconds = shortage_seconds
        self._slots = asyncio.Semaphore(impacts_max)
        self._calls: dict[ImpactKey, Call] = {}
        self.has_results = asyncio.Event()

    def running(self) -> list[RunningImpact]:
        return [
            RunningImpact(key.event_id, key.vm, call.tries)
            for key, call in self._calls.items()
            if call.is_reported
        ]

    def apply(self, work: Work) -> None:
        """Start what is new, attach to what is running, cancel what is no longer wanted."""
        for key in work.cancel:
            call = self._calls.get(key)
            if call is not None and call.is_reported:
                log.info("impact cancelled by the server", vm=key.vm, event=key.event_id)
                self._end(key, call)
        for impact in work.impacts:
            self._start(impact)

    def results(self) -> Iterator[Result]:
        """The results that this server was not sent yet."""
        self.has_results.clear()
        for call in [*self._calls.values()]:
            if call.result is not None and not call.is_sent and not call.is_ending:
                call.is_sent = True
                yield replace(call.result, tries=call.tries)

    def on_answer(self, result: Result, *, is_accepted: bool) -> None:
        """A result that was not accepted is kept until the impact is handed out with other `tries`,
        or cancelled.
        """
        key = ImpactKey(result.event_id, result.vm)
        call = self._calls.get(key)
        if call is None or call.result is None or call.tries != result.tries:
            return
        if is_accepted and not result.is_back and isinstance(self._platform, BackWatcher):
            call.result, call.is_sent, call.is_watching = None, False, True
            if result.host:
                vm = replace(call.request.vm, host=result.host)
                call.request = dataclasses.replace(call.request, vm=vm)
            call.task = asyncio.create_task(self._watch(key, call, self._platform))
        elif is_accepted or call.is_watching:
            self._drop(key, call)

    def send_again(self) -> None:
        """Send all results again: to another server, or to one that may have lost them."""
        for call in self._calls.values():
            call.is_sent = False
        self.has_results.set()

    async def stop(self) -> None:
        """Cancel all calls. The platform has a few seconds to leave its VMs in a good state."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS_MAX)

    def _start(self, request: ImpactRequest) -> None:
        key = ImpactKey(request.event_id, request.vm.name)
        old = self._calls.get(key)
        if old is not None and old.is_reported:
            old.tries, old.is_sent = request.tries, False
            self.has_results.set()
            return
        for other_key, other in [*self._calls.items()]:
            if other_key.vm == key.vm and other.is_watching:  # it is acted on again
                self._end(other_key, other)
        calls = (other for each, other in self._calls.items() if each.vm == key.vm)
        before = [other.task for other in calls if other.task is not None]
        call = self._calls[key] = Call(request, request.tries)
        call.task = asyncio.create_task(self._carry_out(key, call, before))

    def _end(self, key: ImpactKey, call: Call) -> None:
        call.is_ending = True
        if call.task is None or not call.task.cancel():
            self._drop(key, call)

    def _drop(self, key: ImpactKey, call: Call) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]

    async def _carry_out(
        self, key: ImpactKey, call: Call, before: Sequence[asyncio.Task[None]]
    ) -> None:
        """Run the impact, after all earlier calls for the VM have ended: one may be cancelled."""
        try:
            if before:
                await asyncio.wait(before)
            async with self._slots:
                log.info("impact started", vm=key.vm, type=call.request.type, event=key.event_id)
                result = call.result = await self._run(call.request)
        finally:
            if call.is_ending:
                self._drop(key, call)
        log.info("impact ended", vm=key.vm, event=key.event_id, problem=result.problem or "none")
        self.has_results.set()

    async def _run(self, request: ImpactRequest) -> Result:
        result = Result(request.event_id, request.vm.name, request.tries)
        while True:  # ends when the call could be started
            try:
                done = await self._platform.run_impact(request)
                detail = done.detail[:DETAIL_LENGTH_MAX]
                return replace(result, host=done.host, detail=detail, is_back=done.is_back)
            except Exception as error:  # whatever a platform raises is a failed attempt
                if not isinstance(error, OSError) or error.errno not in SHORTAGES:
                    return _describe_failure(result, error)
                log.warning("platform call not started", vm=result.vm, problem=error.strerror)
            await asyncio.sleep(self._shortage_seconds)

    async def _watch(self, key: ImpactKey, call: Call, watcher: BackWatcher) -> None:
        """Wait until the VM is back, for the second result."""
        try:
            async with asyncio.timeout(BACK_SECONDS_MAX):
                await watcher.wait_until_back(call.request)
            call.result = Result(key.event_id, key.vm, call.tries)
            self.has_results.set()
        except Exception as error:  # the server still notices when the VM polls
            log.warning("cannot see whether a VM is back", vm=key.vm, problem=str(error))
        finally:
            if call.is_ending or call.result is None:
                self._drop(key, call)


def _describe_failure(result: Result, error: Exception) -> Result:
    output = str(error.facts.get("output", "")) if isinstance(error, ImpactFailed) else ""
    problem = (str(error) or type(error).__name__)[:PROBLEM_LENGTH_MAX]
    return replace(result, problem=problem, detail=output[:DETAIL_LENGTH_MAX])
