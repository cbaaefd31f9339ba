"""Calls that may hang."""

import asyncio
import subprocess
import sys
import threading

import pytest

from forewarn.platform.threads import CallThreads, Change, run_to_completion


def test_call_returns_or_raises_what_the_work_does() -> None:
    async def main() -> None:
        threads = CallThreads()
        assert await threads.call("a", lambda: 6 * 7, 30) == 42
        with pytest.raises(ZeroDivisionError):
            await threads.call("a", lambda: 1 // 0, 30)

    asyncio.run(main())


WITHOUT_THREADS = """
import asyncio, os, resource
from forewarn.platform.threads import CallThreads

async def main():
    threads = CallThreads(threads_max=1)
    for _ in range(2):
        try:
            await threads.call("a", int, 30)
        except OSError as error:
            print(error.strerror)

with asyncio.Runner() as runner:
    runner.get_loop()
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if not os.geteuid():
        os.setuid(65533)  # the limit is not for root
    runner.run(main())
"""


def test_system_without_threads_is_an_os_error() -> None:
    """The loops of a daemon go on after one. Any other error would end it."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, check=True
    )

    assert done.stdout == "the system has no threads left\n" * 2


def test_hanging_calls_are_bounded_and_free_their_slot() -> None:
    async def main() -> None:
        threads, go, entered = CallThreads(threads_max=2), threading.Event(), []

        def hang() -> None:
            entered.append(1)
            go.wait()

        for _ in range(3):
            with pytest.raises(TimeoutError):
                await threads.call("a", hang, 0.05)
        assert len(entered) == 2
        assert await threads.call("b", lambda: "another key", 30) == "another key"
        go.set()
        assert await threads.call("a", lambda: "free again", 30) == "free again"

    asyncio.run(main())


def test_change_is_listed_until_its_thread_has_ended() -> None:
    """Its caller may have given up, and it may still act."""

    async def main() -> None:
        threads, go = CallThreads(threads_max=1), threading.Event()
        with pytest.raises(TimeoutError):
            await threads.call("a", go.wait, 0.05, change=Change("web-0", "host-a"))
        with pytest.raises(TimeoutError):
            await threads.call("a", int, 0.05, change=Change("no thread", "host-a"))
        await threads.call("b", int, 30, change=Change("db-0", "host-b"))
        assert threads.list_unended() == [Change("web-0", "host-a")]
        go.set()
        await threads.call("a", int, 30)
        assert threads.list_unended() == []

    asyncio.run(main())


def test_call_that_ends_after_the_loop_closed_is_ignored() -> None:
    go, ended = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        ended.set()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await CallThreads().call("a", work, 0.01)

    asyncio.run(main())
    go.set()
    assert ended.wait(30)


def test_background_call_is_completed_before_exit() -> None:
    made = threading.Event()

    run_to_completion(made.set)

    assert made.wait(30)
