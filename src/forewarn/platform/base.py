"""What carries impacts out: one verb.

A driver is handed an order and either does it or raises; it never writes to the store.
"""

import errno
from dataclasses import dataclass
from typing import Protocol

from forewarn.core.event import UNKNOWN_SECONDS, Cause, EventType
from forewarn.core.fleet import Vm

SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
"""What an OSError says when this machine has no file descriptor, memory or process left to start a
driver with.
"""


@dataclass(frozen=True, slots=True)
class ImpactRequest:
    """Do this to that VM.

    The same order may come again (another `tries`) if nobody knows whether the first was done.
    """

    event_id: str
    scope: str
    vm: Vm
    type: EventType
    cause: Cause
    tries: int
    duration_seconds: int = UNKNOWN_SECONDS
    """As the VM was told."""


@dataclass(frozen=True, slots=True)
class ImpactResult:
    """It is done.

    `host` is where the VM is now; empty if it did not move. `detail` is for the history.
    """

    host: str = ""
    detail: str = ""


class Platform(Protocol):
    """A way to act on VMs. Whatever it raises is a failed try; it may be cancelled when it takes
    too long.

    An OSError of SHORTAGES is no failed try: nothing was done, and the same order comes again a
    little later. An ImpactFailed may hold the fact `output`: what was said on the way, for the
    history.
    """

    async def run_impact(self, order: ImpactRequest) -> ImpactResult: ...
