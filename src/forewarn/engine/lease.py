"""Work under a lease: the work of one server, or work that only one server may do at a time.

A server that has lost its lease has lost its claims: other servers release them and take over.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta

from forewarn.core.command import Release
from forewarn.core.fleet import Scope
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import Engine
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.errors import Error, Unavailable
from forewarn.store.base import LEASE_KEY, Lease

TTL_SECONDS = 10.0
ACQUIRE_RETRY = timedelta(seconds=2)
LEASE_NAME = "server/{}"
RELEASE_RETRY = timedelta(seconds=1)

Work = Callable[[Lease], Awaitable[None]]


async def run_under_lease(engine: Engine, name: str, work: Work) -> None:
    """Run `work(lease)` whenever this process holds the lease, until cancelled.

    States:  WAITING -> HOLDING -> WAITING. The work is cancelled when the lease is lost. When the
    work returns or raises, so does this.
    """
    while True:  # ends when cancelled
        if await work_until_lost(engine, name, work):
            return


async def work_until_lost(engine: Engine, name: str, work: Work) -> bool:
    """Wait for the lease and run `work(lease)` until the lease is lost.

    True if the work returned before. The lease is released after the work has ended.
    """
    lease = await _acquire(engine, name)
    working = asyncio.ensure_future(work(lease))
    losing = asyncio.ensure_future(lease.lost())
    try:
        await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        working.cancel()
        losing.cancel()
        await asyncio.gather(working, losing, return_exceptions=True)
        with suppress(Unavailable):
            await lease.release()


async def _acquire(engine: Engine, name: str) -> Lease:
    while True:  # ends when the lease is free and the store answers
        with suppress(Unavailable):
            lease = await engine.store.lease(name, TTL_SECONDS)
            if lease is not None:
                return lease
        await engine.clock.sleep_until(engine.clock.now() + ACQUIRE_RETRY)


class ClaimReleaser:
    """Every server runs one. Releasing again changes nothing.

    It looks at all scopes at the start, when a lease is lost, and when a claim appears whose server
    has no lease.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = asyncio.Event()
        engine.on_change("lease", lambda before, after: self._changed.set())
        engine.board.subscribe(self._on_scope_changed)

    def _on_scope_changed(self, published: PublishedScope) -> None:
        if self._lost_holders(published.scope):
            self._changed.set()

    def _lost_holders(self, scope: Scope) -> set[str]:
        holders = {impact.claimed_by for impact in scope.impacts if impact.is_held}
        return {holder for holder in holders if not self._has_lease(holder)}

    def _has_lease(self, holder: str) -> bool:
        return self._engine.records.get(lease_key(holder)).value is not None

    async def run(self, worker: str) -> None:
        """Release claims in the name of a worker that holds its lease, until cancelled."""
        while True:  # ends when cancelled
            self._changed.clear()
            retry_at = None
            for number, published in enumerate(list(self._engine.board.scopes.values()), start=1):
                if number % POLLS_PASS_EVERY == 0:
                    await asyncio.sleep(0)
                try:
                    await self._release(published.scope, worker)
                except Error as error:  # the other scopes come first
                    retry_at = self._engine.clock.now() + RELEASE_RETRY
                    self._engine.throttled_log.warn("claims not released", problem=error.message)
            await wait_for(self._engine.clock, self._changed, retry_at)

    async def _release(self, scope: Scope, worker: str) -> None:
        """Release the claims of every holder that has no lease in the store either.

        The name of a worker is never used again, so a lease that is gone stays gone.
        """
        for holder in sorted(self._lost_holders(scope) - {worker}):
            await self._engine.refresh(lease_key(holder))
            if not self._has_lease(holder):
                await self._engine.submit(scope.name, Release(worker=holder), by=worker)


def lease_key(worker: str) -> str:
    return LEASE_KEY.format(LEASE_NAME.format(worker))
