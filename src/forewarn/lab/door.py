"""A listener of its own for one VM. It can be shut and opened again on the same port: then a connection is really refused."""

import asyncio
from collections.abc import Callable

from forewarn.config import Address
from forewarn.web.listener import Listener


class Door:
    """`make` gives a listener for an address; the first one chooses the port."""

    def __init__(self, make: Callable[[Address], Listener]) -> None:
        self.address = Address("127.0.0.1", 0)
        self._make = make
        self._listener: Listener | None = None
        self._moving = asyncio.Lock()

    async def open(self) -> None:
        async with self._moving:
            if self._listener is None:
                listener = self._make(self.address)
                await listener.start()
                self._listener, self.address = listener, listener.address

    async def shut(self) -> None:
        async with self._moving:
            if self._listener is not None:
                listener, self._listener = self._listener, None
                await listener.stop()
