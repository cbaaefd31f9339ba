"""Blocking calls that may hang, each in a daemon thread, so none keeps the process alive."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

LAST_CALL_SECONDS = 10.0
"""How long the process waits at exit for a call that must not be interrupted."""


class CallThreads:
    """Runs at most `threads_max` calls per key at a time, abandoned ones included.

    A key whose calls hang does not affect the others.
    """

    def __init__(self, threads_max: int = 4) -> None:
        self._threads_max = threads_max
        self._slots: dict[str, asyncio.Semaphore] = {}

    async def call(
        self,
        key: str,
        work: Callable[[], T],
        seconds_max: float,
        *,
        undo: Callable[[], object] | None = None,
    ) -> T:
        """Return what `work` returns. TimeoutError covers the wait for a free thread too.

        If `work` ends after the caller gave up, `undo` reverts it in the same thread, because
        only that thread knows when.
        """
        slots = self._slots.setdefault(key, asyncio.Semaphore(self._threads_max))
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        is_abandoned, is_over = threading.Event(), threading.Event()

        def finish(settle: Callable[[], None]) -> None:
            slots.release()
            if not done.done():  # else the caller is gone
                settle()

        def run() -> None:
            try:
                result = work()
                settle = lambda: done.set_result(result)  # noqa: E731
            except BaseException as error:  # raised again in the caller
                raised = error
                settle = lambda: done.set_exception(raised)  # noqa: E731
            if undo is not None and is_abandoned.is_set():
                with suppress(Exception):  # there is no caller left to raise it in
                    undo()
            is_over.set()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, settle)

        async with asyncio.timeout(seconds_max):
            await slots.acquire()
            try:
                threading.Thread(target=run, daemon=True, name=f"call-{key}").start()
            except RuntimeError:  # the system has no threads left
                slots.release()
                raise
            try:
                return await done
            finally:
                # If the work is done by now, the caller can undo it itself.
                is_abandoned.set()
                if undo is not None and not is_over.is_set():
                    run_to_completion(lambda: is_over.wait(LAST_CALL_SECONDS), LAST_CALL_SECONDS)


def run_to_completion(work: Callable[[], object], seconds_max: float) -> None:
    """Run `work` in the background; the process waits for it at exit, up to the limit."""

    def run() -> None:
        with suppress(Exception):  # there is no caller to raise it in
            work()

    def wait() -> None:
        worker = threading.Thread(target=run, daemon=True, name="last-call")
        worker.start()
        worker.join(seconds_max)

    threading.Thread(target=wait, daemon=False, name="last-call-wait").start()
