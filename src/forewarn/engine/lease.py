"""Work that needs a lease: that of one server, or that which only one server may do at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from forewarn.errors import Unavailable
from forewarn.store.base import Lease, Store

TTL_SECONDS = 10.0
RETRY_SECONDS = 2.0

Sleep = Callable[[float], Awaitable[None]]


async def run_under_lease(
    store: Store,
    name: str,
    work: Callable[[Lease], Awaitable[None]],
    *,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Run `work(lease)` whenever this process holds the lease, until cancelled.

    States:  WAITING -> HOLDING -> WAITING. The work is cancelled when the lease is lost. What it
    raises or returns ends everything.
    """
    while True:  # ends when cancelled
        if await work_until_lost(store, name, work, sleep=sleep):
            return


async def work_until_lost(
    store: Store,
    name: str,
    work: Callable[[Lease], Awaitable[None]],
    *,
    sleep: Sleep = asyncio.sleep,
) -> bool:
    """Wait for the lease and run `work(lease)` until the lease is lost.

    True if the work returned before. The lease is released after the work has ended.
    """
    lease = await _acquire(store, name, sleep)
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


async def _acquire(store: Store, name: str, sleep: Sleep) -> Lease:
    while True:  # ends when the lease is free and the store answers
        with suppress(Unavailable):
            lease = await store.lease(name, TTL_SECONDS)
            if lease is not None:
                return lease
        await sleep(RETRY_SECONDS)
