"""Blocking calls that may hang, each in a daemon thread, so none keeps the process alive.

The threads of `asyncio.to_thread` would: the interpreter waits for them at exit.
"""

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

LAST_CALL_SECONDS = 10.0
"""How long the process waits at exit for a call that must not be interrupted."""


class Change(NamedTuple):
    """What a call may change: a VM, and the host on which it does."""

    vm: str
    host: str


class CallThreads:
    """Runs at most `threads_max` calls per key at a time, abandoned ones included.

    A key whose calls hang does not affect the others. A call that changes something says what, and
    `list_unended` has that until its thread has ended, however long the caller has waited.
    """

    def __init__(self, threads_max: int = 4) -> None:
        self._threads_max = threads_max
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._changes: dict[Future[Any], Change] = {}

    def list_unended(self) -> list[Change]:
        """What threads may still change: their callers may have given up."""
        return [change for call, change in self._changes.items() if not call.done()]

    async def call(
        self,
        key: str,
        work: Callable[[], T],
        seconds_max: float,
        on_cancel: Callable[[], object] | None = None,
        change: Change | None = None,
    ) -> T:
        """Return what `work` returns. TimeoutError covers the wait for a free thread too.

        OSError if the system has no threads left. A thread cannot be canceled: with `on_cancel`, a
        call that is canceled calls it and ends when its thread has ended, so that nothing changes
        after it. It ends at once if it is canceled again, and without `on_cancel`.
        """
        slots = self._slots.setdefault(key, asyncio.Semaphore(self._threads_max))
        loop = asyncio.get_running_loop()
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # a caller that gives up does not cancel the work

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # raised again in the caller
                done.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(forget)

        def forget() -> None:
            self._changes.pop(done, None)
            slots.release()

        async with asyncio.timeout(seconds_max) as limit:
            await slots.acquire()
            if change is not None:
                self._changes[done] = change
            try:
                threading.Thread(target=run, daemon=True, name=f"call-{key}").start()
            except RuntimeError as error:
                forget()
                raise OSError(errno.EAGAIN, "the system has no threads left") from error
            ended = asyncio.wrap_future(done)
            try:
                return await asyncio.shield(ended)
            except asyncio.CancelledError:
                if on_cancel is not None and not limit.expired():
                    on_cancel()
                    await asyncio.wait((ended,))
                raise
            finally:
                ended.cancel()  # else a thread that outlives the loop logs an error


def run_to_completion(work: Callable[[], object]) -> Future[None]:
    """Run `work` in the background; the process waits for it at exit, up to LAST_CALL_SECONDS.

    The future is done when `work` has ended, or when that time is up.
    """
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # a caller that gives up does not cancel the work

    def run() -> None:
        with suppress(Exception):  # there is no caller to raise it in
            work()

    def wait() -> None:
        worker = threading.Thread(target=run, daemon=True, name="last-call")
        worker.start()
        worker.join(LAST_CALL_SECONDS)
        done.set_result(None)

    threading.Thread(target=wait, daemon=False, name="last-call-wait").start()
    return done
