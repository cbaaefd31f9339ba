"""Calls that may hang."""

import asyncio
import threading

import pytest

from forewarn.platform.threads import Threads, see_through


def test_a_call_gives_what_the_work_gives_and_raises_what_it_raises() -> None:
    async def story() -> None:
        threads = Threads()
        assert await threads.call("a", lambda: 6 * 7, 30) == 42
        with pytest.raises(ZeroDivisionError):
            await threads.call("a", lambda: 1 // 0, 30)

    asyncio.run(story())


def test_calls_that_hang_are_bounded_and_their_places_are_free_again_when_they_end() -> None:
    async def story() -> None:
        threads, go, entered = Threads(threads_max=2), threading.Event(), []

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

    asyncio.run(story())


def test_a_call_that_ends_after_the_loop_is_closed_harms_nobody() -> None:
    go, ended = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        ended.set()

    async def story() -> None:
        with pytest.raises(TimeoutError):
            await Threads().call("a", work, 0.01)

    asyncio.run(story())
    go.set()
    assert ended.wait(30)


def test_a_last_call_is_made_though_nobody_waits() -> None:
    made = threading.Event()

    see_through(made.set, 30)

    assert made.wait(30)
