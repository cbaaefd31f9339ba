"""Work on a store itself, without a service. The server's parts are imported when needed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from forewarn.cli.exit_codes import needs_server_parts

if TYPE_CHECKING:
    from forewarn.web.service import Service

T = TypeVar("T")


def on_store(command: str, url: str, work: "Callable[[Service], Awaitable[T]]") -> T:
    """What the work returns, given a service that shows all that the store holds.

    Other servers may be using it meanwhile.
    """
    with needs_server_parts(command):
        from forewarn.core.timing import Timing
        from forewarn.engine.clock import RealClock
        from forewarn.engine.migration import UPGRADE
        from forewarn.server import make_id, open_service
        from forewarn.store.open import open_store

    async def run() -> T:
        store = await open_store(url, UPGRADE)
        async with open_service(store, RealClock(), Timing(), make_id) as service:
            return await work(service)

    return asyncio.run(run())
