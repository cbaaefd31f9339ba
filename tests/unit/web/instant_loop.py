"""An event loop in which waiting takes no time, and is measured."""

import asyncio
import selectors


class InstantSelector(selectors.DefaultSelector):
    """Never blocks; adds the timeout to `waited_seconds` instead."""

    waited_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.waited_seconds += timeout
        return ready


class EagerLoop(asyncio.SelectorEventLoop):
    """`time()` is the sum of all waits. Only for code that does not wait for other processes."""

    def __init__(self) -> None:
        self.selector = InstantSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.waited_seconds
