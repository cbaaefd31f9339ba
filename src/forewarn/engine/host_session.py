"""A connected host daemon, as its server sees it."""

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

from forewarn.engine.managed_hosts import ManagedHost
from forewarn.errors import HostUnreachable, Refused
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.remote import ImpactKey, WorkRequest


@dataclass(eq=False)
class HandedOut:
    """An impact that a daemon has to carry out."""

    request: ImpactRequest
    result: asyncio.Future[ImpactResult]


@dataclass(eq=False)
class DaemonSession:
    """A connected daemon. At `silent_at` it counts as silent, unless it sends something.

    `server` is the name of this server in the record of the host: it has another one after a lost
    lease. Its last report that counts was taken at `reported_at`.
    """

    latest: WorkRequest
    silent_at: datetime
    server: str = ""
    reported_at: datetime | None = None
    calls: dict[ImpactKey, HandedOut] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, problem: HostUnreachable) -> None:
        """Release its impacts, and respond to its request."""
        for call in self.calls.values():
            if not call.result.done():
                call.result.set_exception(problem)
        self.changed.set()


def refuse_late(
    host: str,
    request: WorkRequest,
    latest: WorkRequest | ManagedHost | None,
    *,
    is_elsewhere: bool = False,
) -> None:
    """Refuse a request that a later one of the same daemon has overtaken: that says what is true.

    The daemon does not wait for it any more. It may have sent the later one to another server; if
    that is alive (`is_elsewhere`), a copy of the request that it got does not count either.
    """
    is_same = latest is not None and latest.session == request.session
    if latest and is_same and 0 < request.number < latest.number + is_elsewhere:
        raise Refused(f"a later request of the daemon of {host} has arrived", host=host)


def unreachable(host: str, problem: str = "") -> HostUnreachable:
    reason = problem or "its daemon does not answer"
    return HostUnreachable(f"{host} is unreachable: {reason}", host=host)
