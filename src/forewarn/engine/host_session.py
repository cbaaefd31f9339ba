"""A connected host daemon, as its server sees it."""

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

from forewarn.errors import HostUnreachable
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.remote import ImpactKey, WorkRequest


@dataclass(eq=False)
class HandedOut:
    """An impact that a daemon has to carry out."""

    request: ImpactRequest
    result: asyncio.Future[ImpactResult]


@dataclass(eq=False)
class DaemonSession:
    """A connected daemon. At `silent_at` it counts as silent, unless it sends something."""

    latest: WorkRequest
    silent_at: datetime
    calls: dict[ImpactKey, HandedOut] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, problem: HostUnreachable) -> None:
        """Release its impacts, and respond to its request."""
        for call in self.calls.values():
            if not call.result.done():
                call.result.set_exception(problem)
        self.changed.set()
