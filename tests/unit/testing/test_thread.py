"""The lab's thread: every call has a time limit."""

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


def test_call_over_its_time_limit_is_cancelled(thread: LabThread) -> None:
    """A test that hangs does not say why."""
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


def test_timeout_of_the_work_itself_is_passed_on(thread: LabThread) -> None:
    async def slow() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"):
        thread.call(slow)


def test_stop_is_idempotent(thread: LabThread) -> None:
    thread.stop()
    thread.stop()


async def _turn() -> None:
    await asyncio.sleep(0)
