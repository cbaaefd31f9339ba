"""Work under a lease: the work of one server, or work that only one server may do at a time.

A server that has lost its lease has lost its claims: other servers release them and take over.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from forewarn.core.command import Release
from forewarn.core.fleet import Scope
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import Engine
from forewarn.engine.isolation import isolated
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.errors import Error, Unavailable
from forewarn.store.base import HELD_SHARE, LEASE_KEY, Lease

TTL_SECONDS = 10.0
ACQUIRE_RETRY = timedelta(seconds=2)
LEASE_NAME = "server/{}"
RELEASE_RETRY = timedelta(seconds=1)
RELEASE_OWN_SECONDS_MAX = 2.0
LATE_SECONDS = 1.0
"""How late a server may notice that it has lost its lease, if its event loop is busy."""

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
        text = "bug while releasing a lease"  # it ends by time
        with isolated(engine.throttled_log, text, lease=name), suppress(Unavailable):
            await lease.release()


async def _acquire(engine: Engine, name: str) -> Lease:
    while True:  # ends when the lease is free and the store answers
        text = "bug while acquiring a lease"
        with isolated(engine.throttled_log, text, lease=name), suppress(Unavailable):
            lease = await engine.store.lease(name, TTL_SECONDS)
            if lease is not None:
                return lease
        await engine.clock.sleep_until(engine.clock.now() + ACQUIRE_RETRY)


def takeover_delay(stop_seconds: float) -> timedelta:
    """How long after the end of a server's lease another try may begin of an impact that it held.

    A server without its lease begins to stop when two thirds of the ttl have passed, by its own
    clock, and the lease ends after the full ttl. So this is how long its platform may take to stop,
    less the third in between: none of two tries acts while the other does. A server that is paused
    until then ends nothing itself, but the watchdog of its commands does.
    """
    head_start_seconds = TTL_SECONDS * (1 - HELD_SHARE) - LATE_SECONDS
    assert head_start_seconds > 0, "a server must notice the loss before its lease ends"
    return timedelta(seconds=max(stop_seconds - head_start_seconds, 0.0))


class ClaimReleaser:
    """Every server runs one. Releasing again changes nothing.

    It looks at all scopes at the start, when a lease is lost, and when a claim appears whose server
    has no lease. `_gone_since` is when this server has found that a holder of claims has no lease
    in the store. The name of a worker is never used again, so a lease that is gone stays gone; and
    every server measures the delay of a takeover itself, since clocks differ.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gone_since: dict[str, datetime] = {}
        self._changed = asyncio.Event()
        engine.on_change("lease", lambda before, after: self._changed.set())
        engine.board.subscribe(self._on_scope_changed)

    def _on_scope_changed(self, published: PublishedScope) -> None:
        if self._lost_holders(published.scope):
            self._changed.set()

    def _lost_holders(self, scope: Scope) -> set[str]:
        impacts = (*scope.impacts, *scope.dropped)
        holders = {impact.claimed_by for impact in impacts if impact.is_held}
        return {holder for holder in holders if not self._has_lease(holder)}

    def _has_lease(self, holder: str) -> bool:
        return self._engine.records.get(lease_key(holder)).value is not None

    async def run(self, worker: str) -> None:
        """Release claims in the name of a worker that holds its lease, until cancelled."""
        while True:  # ends when cancelled
            self._changed.clear()
            retry_at: datetime | None = None
            lost = set[str]()
            for number, published in enumerate(list(self._engine.board.scopes.values()), start=1):
                if number % POLLS_PASS_EVERY == 0:
                    await asyncio.sleep(0)
                with isolated(
                    self._engine.throttled_log,
                    "bug while releasing claims",
                    scope=published.scope.name,
                ):
                    try:
                        lost |= self._lost_holders(published.scope)
                        release_at = await self._release(published.scope, worker)
                        retry_at = min(filter(None, (retry_at, release_at)), default=None)
                    except Error as error:  # the other scopes come first
                        retry_at = self._engine.clock.now() + RELEASE_RETRY
                        warn = self._engine.throttled_log.warn
                        warn("claims not released", problem=error.message)
            self._gone_since = {each: at for each, at in self._gone_since.items() if each in lost}
            await wait_for(self._engine.clock, self._changed, retry_at)

    async def _release(self, scope: Scope, worker: str) -> datetime | None:
        """Release the claims of every holder that has no lease in the store either.

        Returns when to look again, because the platform of a holder may still act.
        """
        look_at: datetime | None = None
        for holder in sorted(self._lost_holders(scope) - {worker}):
            if holder not in self._gone_since:
                await self._engine.refresh(lease_key(holder))
                if self._has_lease(holder):
                    continue
                self._gone_since[holder] = self._engine.clock.now()
            impacts = (*scope.impacts, *scope.dropped)
            held = (impact for impact in impacts if impact.claimed_by == holder)
            delay = takeover_delay(max(impact.stop_seconds for impact in held))
            release_at = self._gone_since[holder] + delay
            if self._engine.clock.now() < release_at:
                look_at = min(filter(None, (look_at, release_at)))
            else:
                await self._engine.submit(scope.name, Release(worker=holder), by=worker)
        return look_at

    async def release_own(self, scopes: Sequence[str], worker: str, lease: Lease) -> None:
        """Release the claims of this worker, whose calls have all ended, before its lease.

        So the next server need not wait. If the store does not answer, it waits.
        """
        with suppress(Error, TimeoutError):
            async with asyncio.timeout(RELEASE_OWN_SECONDS_MAX):
                for scope in scopes:
                    command = Release(worker=worker)
                    await self._engine.submit(scope, command, by=worker, lease=lease)


def lease_key(worker: str) -> str:
    return LEASE_KEY.format(LEASE_NAME.format(worker))
