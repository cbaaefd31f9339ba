"""The lab's thread: every call is bounded, and what cannot be is told."""

import asyncio
from collections.abc import Iterator

import pytest

from forewarn.errors import Unavailable
from forewarn.lab.service import Setup
from forewarn.testing.thread import LabThread


@pytest.fixture
def thread() -> Iterator[LabThread]:
    thread = LabThread(Setup(), 10)
    thread.start()
    yield thread
    thread.timeout_seconds = 10
    thread.stop()


def test_a_call_that_takes_too_long_is_given_up_in_words(thread: LabThread) -> None:
    """A test that hangs tells nobody why."""
    thread.timeout_seconds = 0.01
    was_cancelled = False

    async def forever() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    with pytest.raises(Unavailable, match=r"forever: not done within 0.01 s of real time"):
        thread.call(forever)

    thread.timeout_seconds = 10
    thread.call(_turn)
    assert was_cancelled


def test_a_call_that_gives_up_by_itself_is_not_taken_for_ours(thread: LabThread) -> None:
    async def slow() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"):
        thread.call(slow)


def test_stopping_twice_is_stopping_once(thread: LabThread) -> None:
    thread.stop()
    thread.stop()


async def _turn() -> None:
    await asyncio.sleep(0)
