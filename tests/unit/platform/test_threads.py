"""Calls that may hang."""

import asyncio
import threading

import pytest

from forewarn.platform.threads import CallThreads, run_to_completion


def test_call_returns_or_raises_what_the_work_does() -> None:
    async def main() -> None:
        threads = CallThreads()
        assert await threads.call("a", lambda: 6 * 7, 30) == 42
        with pytest.raises(ZeroDivisionError):
            await threads.call("a", lambda: 1 // 0, 30)

    asyncio.run(main())


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
