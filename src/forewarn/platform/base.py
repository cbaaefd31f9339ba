"""The platform interface: what carries impacts out. A platform never writes to the store."""

import errno
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from forewarn.core.event import UNKNOWN_SECONDS, Cause, EventType
from forewarn.core.fleet import Vm

SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
"""OSErrors that mean this machine lacks file descriptors, memory or processes for now."""


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
    """As the document announced it."""
    targets: tuple[str, ...] = ()
    """Hosts for a move, the best first. Empty: the platform chooses."""

    @property
    def moves(self) -> bool:
        """Whether the VM should be on another host afterwards."""
        return self.type is EventType.REDEPLOY or self.cause is Cause.FAILED


@dataclass(frozen=True, slots=True)
class ImpactResult:
    """The impact succeeded.

    `host` is where the VM runs now, empty if it did not move. `detail` is for the history.
    """

    host: str = ""
    detail: str = ""


class Sleeper(Protocol):
    """The current time, and waiting for a later one."""

    def now(self) -> datetime: ...

    async def sleep_until(self, time: datetime) -> None: ...


class Platform(Protocol):
    """Acts on VMs. Any exception is a failed try; the call is cancelled when it takes too long.

    An OSError of SHORTAGES does not count as a try: nothing was done, and the request is repeated
    shortly after. An ImpactFailed may carry `output` for the history.
    """

    async def run_impact(self, request: ImpactRequest) -> ImpactResult: ...
