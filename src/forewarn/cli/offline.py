"""Work on a store itself, without a service. The server's parts are imported when needed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from forewarn.cli.exit_codes import needs_server_parts

if TYPE_CHECKING:
    from forewarn.engine.engine import Engine

T = TypeVar("T")


def on_store(command: str, url: str, work: "Callable[[Engine], Awaitable[T]]") -> T:
    """What the work returns, given an engine that shows all that the store holds.

    Other servers may be using it meanwhile.
    """
    with needs_server_parts(command):
        from forewarn.core.timing import Timing
        from forewarn.engine.clock import RealClock
        from forewarn.engine.engine import Engine
        from forewarn.engine.migration import UPGRADE
        from forewarn.store.open import open_store

    async def run() -> T:
        engine = Engine(await open_store(url, UPGRADE), RealClock(), Timing())
        try:
            await engine.load()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())
