"""The platform interface: what carries impacts out. A platform never writes to the store."""

import asyncio
import errno
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from forewarn.core.event import UNKNOWN_SECONDS, Cause, EventType, Impact, is_move
from forewarn.core.fleet import Policy, RedeployMethod, Scope, Vm
from forewarn.errors import ImpactFailed
from forewarn.fleetfile.schema import NameOrNothing

SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
"""OSErrors that mean this machine lacks file descriptors, memory or processes for now."""
SHORTAGE_PAUSE, SHORTAGE_PAUSE_MAX = timedelta(seconds=1), timedelta(seconds=30)
STARTS = (Cause.RESTART, Cause.REDEPLOY)
"""Causes that start a VM that is off: its user wants it to run. Maintenance leaves it off."""
PROBLEM_LENGTH_MAX, DETAIL_LENGTH_MAX = 500, 2048
COMMAND_GRACE_SECONDS = 5.0
"""How long a command may take to end after SIGTERM, before SIGKILL."""
STOP_SECONDS_MAX = 7.0
"""How long a server or a daemon that stops waits for the platform calls that it has canceled."""
assert COMMAND_GRACE_SECONDS < STOP_SECONDS_MAX, "a command must end before what has started it"


@dataclass(frozen=True, slots=True)
class ImpactRequest:
    """An impact to carry out on a VM.

    It may come again with a higher `tries` if the outcome of the first try is unknown.
    """

    event_id: str
    scope: str
    vm: Vm
    type: EventType
    cause: Cause
    tries: int
    duration_seconds: int = UNKNOWN_SECONDS
    """As the document announced it, divided by the rate."""
    targets: tuple[str, ...] = ()
    """Hosts for a move, the best first. Empty: the platform chooses."""
    no_target: str = ""
    """Why the server names no host for a move, although there are others: it must not begin now."""
    may_run_on: tuple[str, ...] = ()
    """Other hosts than the VM's own that it may run on: they report it as running."""
    method: RedeployMethod = RedeployMethod.LIVE
    """How it may be moved."""

    @property
    def moves(self) -> bool:
        """Whether the VM should be on another host afterwards."""
        return is_move(self.type, self.cause)


def make_request(scope: Scope, impact: Impact, rate: float) -> ImpactRequest | None:
    """The request for an impact as it is now; None if its VM is gone."""
    vm, event = scope.vm(impact.vm), scope.event(impact.event_id)
    if vm is None:
        return None
    seconds = UNKNOWN_SECONDS if event is None else event.duration_seconds
    return ImpactRequest(
        impact.event_id,
        scope.name,
        vm,
        impact.type,
        impact.cause,
        impact.tries,
        math.ceil(seconds / rate) if seconds > 0 else seconds,
        method=choose_method(scope.policy, impact),
    )


def choose_method(policy: Policy, impact: Impact) -> RedeployMethod:
    """How an impact may move a VM.

    A Freeze never stops it. A host that has failed may stop it at any time, so the policy, which
    is about maintenance, does not apply.
    """
    if impact.type is EventType.FREEZE:
        return RedeployMethod.LIVE_ONLY
    return RedeployMethod.LIVE if impact.cause is Cause.FAILED else policy.redeploy


class ImpactResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an impact ended. A platform raises a problem; `run_platform_call` puts it in here.

    `host` is where the VM runs now, empty if it did not move. `detail` is for the history.
    `is_back` is False if the VM was restarted and may still boot. `is_final`: a retry would end
    with the same problem.
    """

    host: NameOrNothing = ""
    detail: str = ""
    is_back: bool = True
    problem: str = ""
    is_final: bool = False

    def as_error(self) -> ImpactFailed:
        """The problem, as a platform raises it."""
        return ImpactFailed(self.problem, output=self.detail, is_final=self.is_final)


class Sleeper(Protocol):
    """The current time, and waiting for a later one."""

    def now(self) -> datetime: ...

    async def sleep_until(self, time: datetime) -> None: ...


class Platform(Protocol):
    """Acts on VMs. Any exception is a failed try; the call is cancelled when it takes too long.
    It ends when it no longer acts on the VM, also if it was canceled.

    An OSError of SHORTAGES does not count as a try: nothing was done, and the request is repeated
    shortly after. An ImpactFailed may carry `output` for the history, and `is_final` if a retry is
    pointless.
    """

    async def run_impact(self, request: ImpactRequest) -> ImpactResult: ...


@runtime_checkable
class SlowToStop(Protocol):
    """A platform whose calls may still act on a VM, for so long, after they were canceled, or their
    server was stopped (SIGSTOP). Those of the others stop at once. The next try of an impact, on
    any server, begins after that.
    """

    stop_seconds: float


@runtime_checkable
class BackWatcher(Protocol):
    """A platform that can notice when a restarted VM is back. The others leave it to the polls."""

    async def wait_until_back(self, request: ImpactRequest) -> None:
        """Return when the guest is up. Cancelled when the VM has polled, or at the limit.

        `request.vm.host` is where the VM is now.
        """


@runtime_checkable
class Recoverer(Protocol):
    """A platform that can end what an impact began, if its event ended meanwhile."""

    async def list_begun(self, host: str) -> list[tuple[str, str]]:
        """Return the events that have begun to act on VMs of this host, each with its VM."""
        ...

    async def recover(
        self, host: str, event_id: str, vm: str, *, may_start: bool, may_run_on: tuple[str, ...]
    ) -> str:
        """Resume a VM of this host that the event has left suspended; start one that is off.

        Start it only if `may_start`, and if none of the hosts that it may run on does; ImpactFailed
        if one does not answer. Return what came of it, for the log.
        """
        ...


async def run_platform_call(
    call: Callable[[], Awaitable[ImpactResult]],
    clock: Sleeper,
    limit: timedelta,
    on_shortage: Callable[[str], None],
    passing: tuple[type[Exception], ...] = (),
) -> ImpactResult:
    """Call a platform and return its result; whatever it raises is a `problem`, unless `passing`.

    If this machine lacks the resources to start the call, that is not a failed try: it is called
    again, up to `limit`, and `on_shortage` gets what is missing.
    """
    give_up_at, pause = clock.now() + limit, SHORTAGE_PAUSE
    while True:  # ends when the call started, when its time is up, or when cancelled
        try:
            result = await call()
            return replace(result, detail=result.detail[:DETAIL_LENGTH_MAX])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return ImpactResult(problem="the platform cancelled the call")
        except passing:
            raise
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            if number not in SHORTAGES or clock.now() + pause >= give_up_at:
                facts = error.facts if isinstance(error, ImpactFailed) else {}
                return ImpactResult(
                    detail=str(facts.get("output", ""))[:DETAIL_LENGTH_MAX],
                    problem=(str(error) or type(error).__name__)[:PROBLEM_LENGTH_MAX],
                    is_final=bool(facts.get("is_final")),
                )
            on_shortage(os.strerror(number))
        await clock.sleep_until(clock.now() + pause)
        pause = min(2 * pause, SHORTAGE_PAUSE_MAX)
