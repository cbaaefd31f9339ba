"""Turns of long requests on the event loop, so that the polls of VMs pass between them.

A list, the fleet or a stream is rendered in slices, and takes a turn before each. In one iteration
of the event loop at most one slice is rendered, for all requests of all clients together: however
many there are, a poll waits for one slice, and for what else each request costs.

Slices without a pause would still make the server busy all the time. Then the kernel lets other
processes run in its place, for longer than a slice, and polls wait for that. So each client has an
allowance of time on the event loop, which grows by SHARE up to SECONDS_AT_ONCE. Its turns use it,
and wait while there is none: a usual list takes as long as it takes, and reading without an end
takes up to 1 / SHARE times as long.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from weakref import WeakValueDictionary

SLICE = 20
"""Items that are read, built or encoded in one turn."""
SHARE = 1 / 3
"""Of the event loop's time, for all requests of one client together."""
SECONDS_AT_ONCE = 1.0
PAUSE_SECONDS_MIN = 0.002
"""A shorter pause is not worth a timer: it is added to the next one."""
CLIENTS_MIN = 1_000

Turn = Callable[[], Awaitable[None]]
yield_once: Turn = partial(asyncio.sleep, 0)
"""The turn of a caller that has no others to wait for."""


class Turns:
    """Who is next: clients in turn, each with one of its requests, first come first served."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._next = asyncio.Lock()
        self._clients: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._starting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._whole_at: dict[str, float] = {}
        """When a client that has used some of its allowance has all of it again."""
        self._clients_max = CLIENTS_MIN

    async def take(self, client: str) -> None:
        """Return when the next slice of this client may be rendered.

        What happens until the next iteration of the event loop uses the allowance.
        """
        async with self._clients.setdefault(client, asyncio.Lock()):
            pause = self._whole_at.get(client, 0) - self._monotonic() - SECONDS_AT_ONCE / SHARE
            if pause >= PAUSE_SECONDS_MIN:
                await asyncio.sleep(pause)
            await self._wait()
        asyncio.get_running_loop().call_soon(self._charge, client, self._monotonic())

    @property
    def limited(self) -> Collection[str]:
        """The clients that have used some of their allowance, and a limited number of others."""
        return self._whole_at.keys()

    async def start(self, client: str) -> None:
        """Return when a request of this client may begin. It neither uses nor awaits allowance."""
        async with self._starting.setdefault(client, asyncio.Lock()):
            await self._wait()

    async def _wait(self) -> None:
        async with self._next:
            await asyncio.sleep(0)

    def _charge(self, client: str, began: float) -> None:
        if len(self._whole_at) >= self._clients_max:
            self._whole_at = {name: at for name, at in self._whole_at.items() if at > began}
            self._clients_max = max(CLIENTS_MIN, 2 * len(self._whole_at))
        # A longer time was not the work of a slice: the process was suspended.
        seconds = min(self._monotonic() - began, SECONDS_AT_ONCE)
        whole_at = max(self._whole_at.get(client, began), began)
        self._whole_at[client] = whole_at + seconds / SHARE
