"""Work that only one server at a time may do."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from forewarn.errors import Error
from forewarn.store.base import Lease, Store

TTL_SECONDS = 10.0
RETRY_SECONDS = 2.0


async def run_under_lease(
    store: Store, name: str, work: Callable[[Lease], Awaitable[None]]
) -> None:
    """Run `work` while this process holds the lease; acquire it again when it is lost.

    States:  WAITING -> HOLDING -> WAITING, until cancelled. `work` is cancelled when the lease is
    lost, and what it raises ends everything.
    """
    while True:  # ends when cancelled
        lease = None
        with suppress(Error):  # the store is lost: try again
            lease = await store.lease(name, TTL_SECONDS)
        if lease is None:
            await asyncio.sleep(RETRY_SECONDS)
            continue
        working = asyncio.ensure_future(work(lease))
        lost = asyncio.create_task(lease.lost())
        try:
            await asyncio.wait((working, lost), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            for task in (working, lost):
                task.cancel()
            await asyncio.gather(working, lost, return_exceptions=True)
            with suppress(Error):
                await lease.release()
