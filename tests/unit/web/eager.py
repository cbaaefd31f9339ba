"""An event loop in which waiting takes no time, so that a test can say how long something waits."""

import asyncio
import selectors


class EagerSelector(selectors.DefaultSelector):
    """Never blocks: where it would, `waited_seconds` grows instead.

    So a wait is measured without waiting.
    """

    waited_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.waited_seconds += timeout
        return ready


class EagerLoop(asyncio.SelectorEventLoop):
    """`time()` is what was waited so far.

    For what happens inside one process: other processes have no time to act.
    """

    def __init__(self) -> None:
        self.selector = EagerSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.waited_seconds
