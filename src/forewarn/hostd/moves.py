"""The VMs that are moving to another host now. The worker moves them, and the relay asks."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Moves:
    """By the id of the VM, in lower case. A VM may have several moves: one is being cancelled."""

    def __init__(self) -> None:
        self._moving: list[str] = []
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def is_moving(self, vm: str) -> bool:
        return vm in self._moving

    @contextmanager
    def moving(self, vm: str) -> Iterator[None]:
        """The VM moves within this."""
        self._moving.append(vm)
        for begun in self._waiting.get(vm, ()):
            begun.set()
        try:
            yield
        finally:
            self._moving.remove(vm)

    async def wait_for(self, vm: str) -> None:
        """Wait until a move of this VM begins, if none has begun already."""
        begun = asyncio.Event()
        waiting = self._waiting.setdefault(vm, set())
        waiting.add(begun)
        try:
            if not self.is_moving(vm):
                await begun.wait()
        finally:
            waiting.discard(begun)
            if not waiting:
                self._waiting.pop(vm, None)
