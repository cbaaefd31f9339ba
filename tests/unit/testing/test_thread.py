"""The lab's thread: every call has a time limit."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from forewarn.errors import Unavailable
from forewarn.lab.service import Setup
from forewarn.testing.thread import THREAD_NAME, LabThread


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


def test_lab_that_is_not_ready_in_time_is_stopped() -> None:
    """Otherwise its thread and its sockets would stay until the end of the test run."""
    has_failed = threading.Event()

    class SlowSeed(int):
        def __format__(self, form: str) -> str:  # the lab formats its seed while it opens
            has_failed.wait(10)
            return "0"

    thread = LabThread(Setup(seed=SlowSeed()), 0)
    with pytest.raises(Unavailable, match="the lab was not ready within 0 s"):
        thread.start()
    has_failed.set()

    threads = [each for each in threading.enumerate() if each.name == THREAD_NAME]
    for each in threads:
        each.join(10)
    assert not any(each.is_alive() for each in threads)


def test_stop_is_idempotent(thread: LabThread) -> None:
    thread.stop()
    thread.stop()


async def _turn() -> None:
    await asyncio.sleep(0)
