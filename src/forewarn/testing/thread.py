"""A laboratory in a thread with an event loop of its own, and the way for other threads to ask
something of it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forewarn.config import Address
from forewarn.errors import Refused, Unavailable
from forewarn.lab.service import LabService, Setup, laboratory
from forewarn.testing.ledger import Ledger

T = TypeVar("T")

THREAD_NAME = "forewarn-lab"
LOOPBACK = Address("127.0.0.1", 0)


class LabThread:
    """Runs from `start` to `stop`. Calls are done one after the other, each within
    `timeout_seconds` of real time.

    What `laboratory` and `ledger` hold stays readable after the end.
    """

    laboratory: LabService
    ledger: Ledger
    url: str

    def __init__(self, setup: Setup, timeout_seconds: float) -> None:
        self._setup = setup
        self.timeout_seconds = timeout_seconds
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._calling = asyncio.Lock()

    def start(self) -> None:
        """Returns when the metadata listener answers; raises what it could not start for."""
        self._thread.start()
        try:
            self._ready.result(self.timeout_seconds)
        except TimeoutError:
            self._end()
            raise Unavailable(f"the lab was not ready within {self.timeout_seconds:g} s") from None

    def call(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """What the work gives, done in the lab's own thread.

        `what` is the work's name in a refusal.
        """
        if self._loop is None or self._loop.is_closed():
            raise Refused(
                f"{what}: this lab is closed; expected a call inside `with Lab() as lab:`"
            )

        async def work() -> T:
            async with self._calling:
                return await ask()

        asked = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return asked.result(self.timeout_seconds)
        except TimeoutError:
            if not asked.cancel():
                raise  # the work's own
            raise Unavailable(
                f"{what}: not done within {self.timeout_seconds:g} s of real time"
            ) from None

    def stop(self) -> None:
        """Answer what is in flight, close every socket, end the thread."""
        self._end()
        self._thread.join(self.timeout_seconds)
        if self._thread.is_alive():
            raise Unavailable(f"the lab's thread did not end within {self.timeout_seconds:g} s")

    def _end(self) -> None:
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as broken:
            if self._ready.done():
                raise
            self._ready.set_exception(broken)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with laboratory(self._setup) as opened:
            self.laboratory, self.ledger = opened, Ledger(opened.engine.board)
            opened.engine.subscribe_entries(self.ledger.hear)
            addresses = await opened.listen(LOOPBACK, None)
            self.url = f"http://{addresses.metadata}"
            self._ready.set_result(None)
            await self._stopping.wait()
