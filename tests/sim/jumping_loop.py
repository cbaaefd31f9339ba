"""An event loop without real time: when all tasks wait, the clock jumps to the next of them."""

import asyncio
import selectors
from collections.abc import Callable


class JumpingSelector(selectors.SelectSelector):
    """Never waits; `on_wait` gets how long it should have waited."""

    def __init__(self, on_wait: Callable[[float], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._on_wait(timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumped_to = 0.0
        super().__init__(JumpingSelector(self._jump))

    def time(self) -> float:
        return self._jumped_to

    def _jump(self, seconds: float) -> None:
        self._jumped_to += seconds
