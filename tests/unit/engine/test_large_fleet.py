"""A large fleet is loaded and applied without keeping anybody waiting. Turns of the event loop are counted, no time is taken."""

import asyncio
from collections.abc import Awaitable

from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.engine.clock import VirtualClock
from forewarn.engine.engine import SCOPE_KEY, Engine
from forewarn.store.base import Write
from forewarn.store.memory import MemoryStore
from forewarn.wire.record import SCOPE
from tests.builders import NOON, vm


async def turns_during(doing: Awaitable[object]) -> int:
    """How many turns everybody else gets until it is done."""
    turns, is_over = 0, False

    async def poll() -> None:
        nonlocal turns
        while not is_over:  # until what is counted is done
            turns += 1
            await asyncio.sleep(0)

    polling = asyncio.create_task(poll())
    await doing
    is_over = True
    await polling
    return turns


def test_polls_pass_while_the_store_is_read() -> None:
    """A store that was lost is read again as a whole when it is back, and until then every VM can be answered."""

    async def read() -> None:
        store = MemoryStore()
        for first in range(0, 2000, 100):
            scopes = [Scope(name=f"s{number}", vms=(vm(f"vm-{number}"),)) for number in range(first, first + 100)]
            await store.commit([Write(SCOPE_KEY.format(scope.name), SCOPE.encode(scope), 0) for scope in scopes])
        engine = Engine(store, VirtualClock(NOON), Timing())
        assert await turns_during(engine.load()) >= 10
        assert len(engine.board.vms) == 2000
        assert await turns_during(engine.load()) >= 10

    asyncio.run(read())
