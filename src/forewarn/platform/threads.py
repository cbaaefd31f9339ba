"""Calls that may hang, away from the event loop.

Each has a daemon thread of its own, so none keeps the process from ending.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

LAST_CALL_SECONDS = 10.0
"""How long the process waits, at its end, for a call that must not be broken off."""


class Threads:
    """At most `threads_max` calls at once for a key, those included that hang and were given up:
    who hangs harms only its key.
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
        """What the work gives or raises; TimeoutError if it is not done in time, the wait for a
        free thread included.

        Work that ends when its caller has given up is undone by `undo`, in the same thread: only
        there it is known when.
        """
        slots = self._slots.setdefault(key, asyncio.Semaphore(self._threads_max))
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        is_left, is_over = threading.Event(), threading.Event()

        def finish(settle: Callable[[], None]) -> None:
            slots.release()
            if not done.done():  # else nobody waits any more
                settle()

        def run() -> None:
            try:
                result = work()
                settle = lambda: done.set_result(result)  # noqa: E731
            except BaseException as error:  # whatever it is, it belongs to the caller
                problem = error
                settle = lambda: done.set_exception(problem)  # noqa: E731
            if undo is not None and is_left.is_set():
                with suppress(Exception):  # nobody is left to be told
                    undo()
            is_over.set()
            with suppress(RuntimeError):  # the loop is closed, and nobody is left to be told
                loop.call_soon_threadsafe(finish, settle)

        async with asyncio.timeout(seconds_max):
            await slots.acquire()
            try:
                threading.Thread(target=run, daemon=True, name=f"call-{key}").start()
            except RuntimeError:  # the system has no more threads for us
                slots.release()
                raise
            try:
                return await done
            finally:
                # if the work is done by now, its caller knows that it may undo it itself
                is_left.set()
                if undo is not None and not is_over.is_set():
                    see_through(lambda: is_over.wait(LAST_CALL_SECONDS), LAST_CALL_SECONDS)


def see_through(work: Callable[[], object], seconds_max: float) -> None:
    """Do the work although nobody waits for it.

    The process does not end before it is done, but for the limit at most.
    """

    def run() -> None:
        with suppress(Exception):  # nobody is left to be told
            work()

    def wait() -> None:
        worker = threading.Thread(target=run, daemon=True, name="last-call")
        worker.start()
        worker.join(seconds_max)

    threading.Thread(target=wait, daemon=False, name="last-call-wait").start()
