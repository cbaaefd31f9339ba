"""Releasing the claims of servers that have lost their lease, so that others take them over."""

import asyncio
from datetime import timedelta

from forewarn.core.command import Release
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import Engine
from forewarn.errors import Error, NotFound
from forewarn.store.base import LEASE_KEY

LEASE_NAME = "server/{}"
RETRY = timedelta(seconds=1)


class ClaimReleaser:
    """Every server runs one. Releasing again changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._claims: dict[str, set[str]] = {}  # scope -> workers that hold claims there
        self._changed = asyncio.Event()
        engine.board.subscribe(self._on_scope_changed)
        engine.on_change("lease", lambda before, after: self._changed.set())
        for published in engine.board.scopes.values():
            self._on_scope_changed(published)

    def _on_scope_changed(self, published: PublishedScope) -> None:
        scope = published.scope
        workers = {impact.claimed_by for impact in scope.impacts if impact.is_held}
        if workers:
            self._claims[scope.name] = workers
            self._changed.set()
        else:
            self._claims.pop(scope.name, None)

    async def run(self, worker: str) -> None:
        """Release claims in the name of a worker that holds its lease, until cancelled."""
        while True:  # ends when cancelled
            self._changed.clear()
            holders = {holder for holders in self._claims.values() for holder in holders}
            lost = [holder for holder in holders - {worker} if not self._has_lease(holder)]
            results = [await self._release(holder, worker) for holder in sorted(lost)]
            retry_at = None if all(results) else self._engine.clock.now() + RETRY
            await wait_for(self._engine.clock, self._changed, retry_at)

    def _has_lease(self, holder: str) -> bool:
        key = LEASE_KEY.format(LEASE_NAME.format(holder))
        return self._engine.records.get(key).value is not None

    async def _release(self, holder: str, worker: str) -> bool:
        """Release its claims if the store has no lease of it either; False: try again.

        The name of a worker is never used again, so a lease that is gone stays gone.
        """
        try:
            await self._engine.refresh(LEASE_KEY.format(LEASE_NAME.format(holder)))
            if not self._has_lease(holder):
                scopes = [scope for scope, holders in self._claims.items() if holder in holders]
                for scope in scopes:
                    await self._engine.submit(scope, Release(worker=holder), by=worker)
        except NotFound:
            return False  # a scope was deleted: look again
        except Error as error:
            self._engine.throttled_log.warn(
                "claims not released", worker=holder, problem=error.message
            )
            return False
        return True
