"""Keeps the leases of this process, for stores that other processes use too."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from forewarn.errors import Conflict, Unavailable
from forewarn.log import log
from forewarn.store.base import HELD_SHARE, Lease, Write

RENEWAL_SHARE = 1 / 3
"""The share of its ttl after which a lease is renewed."""
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.1, 1.0
LOG_EVERY_SECONDS = 30.0


class LeaseKeeper(ABC):
    """A store whose leases are renewed every third of their ttl, by a task of its own.

    A renewal that failed is tried again until the lease is lost.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._leases: set[Lease] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._log_after = -math.inf

    @abstractmethod
    async def commit(self, writes: Sequence[Write]) -> int: ...

    @abstractmethod
    async def _renew(self, leases: Sequence[Lease], now: float) -> Collection[Lease]:
        """Renew what is still held, and return it."""

    def _keep(
        self, name: str, revision: int, ttl_seconds: float, *, since: float, id_: int = 0
    ) -> Lease:
        """The lease that was acquired, by a request that began at this monotonic time."""
        lease = Lease(name, revision, ttl_seconds, self._monotonic, self._release, id_)
        lease.renew(since)
        self._leases.add(lease)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_forever())
        return lease

    async def renew_leases(self) -> None:
        """Renew the leases of this process, and end those that are lost."""
        now = self._monotonic()
        leases = [lease for lease in self._leases if lease.is_held()]
        with suppress(Unavailable):  # the next renewal may succeed, until the lease is lost
            renewed = await self._renew(leases, now)
            for lease in leases:
                if lease not in renewed:
                    lease.end()
                elif lease.is_held():  # else its holder has begun to stop
                    lease.renew(now)
        self._leases = {lease for lease in self._leases if lease.is_held()}

    async def _renew_forever(self) -> None:
        while True:  # ends when cancelled
            held = (lease for lease in self._leases if lease.is_held())
            await asyncio.sleep(min(map(_pause_seconds, held), default=RETRY_SECONDS_MAX))
            try:
                await self.renew_leases()
            except Exception:  # else every lease from now on would be lost, silently
                if self._monotonic() >= self._log_after:  # it may last
                    self._log_after = self._monotonic() + LOG_EVERY_SECONDS
                    log.exception("bug while renewing leases")

    async def _release(self, lease: Lease) -> None:
        self._leases.discard(lease)
        with suppress(Conflict):  # another holder has it already
            await self.commit([Write(lease.key, None, lease.revision)])

    async def _release_all(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        releases = (lease.release() for lease in list(self._leases))
        await asyncio.gather(*releases, return_exceptions=True)  # else they end by time


def _pause_seconds(lease: Lease) -> float:
    """Until the lease is renewed. If that is overdue, it has failed, or was slow."""
    left = lease.seconds_left()
    due_in = left - lease.ttl_seconds * (HELD_SHARE - RENEWAL_SHARE)
    if due_in > 0:
        return due_in
    return max(RETRY_SECONDS_MIN, min(left / 2, RETRY_SECONDS_MAX))
