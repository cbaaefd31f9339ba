"""Runs a service in an event loop until it is stopped."""

import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it in a fast event loop until it ends, or until SIGTERM or Ctrl-C cancels it."""
    import asyncio

    import uvloop

    async def run() -> None:
        task = asyncio.ensure_future(work())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    uvloop.run(run())
