"""A lab in a thread with its own event loop, and calls into it from other threads."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from operator import methodcaller
from typing import ParamSpec, TypeVar

from forewarn.errors import Error, Refused, Unavailable
from forewarn.lab.service import LabService, Setup, open_lab
from forewarn.option_kind import Address
from forewarn.testing.ledger import EventLedger

__tracebackhide__ = methodcaller("errisinstance", Error)  # as in `objects.py`
T = TypeVar("T")
P = ParamSpec("P")

THREAD_NAME = "forewarn-lab"
LOOPBACK = Address("127.0.0.1", 0)


class LabThread:
    """Runs a lab from `start` to `stop`. Calls run one at a time, each within a timeout.

    States:  NEW -> STARTING -> RUNNING -> STOPPED. `service` and `ledger` stay readable.
    """

    service: LabService
    ledger: EventLedger
    url: str

    def __init__(self, setup: Setup, timeout_seconds: float) -> None:
        self._setup = setup
        self.timeout_seconds = timeout_seconds
        self._loop = asyncio.new_event_loop()
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stopping = asyncio.Event()
        self._calling = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Return when the metadata listener is open. Raises what made the start fail."""
        self._thread.start()
        try:
            self._ready.result(self.timeout_seconds)
        except TimeoutError:
            self._request_stop()
            raise Unavailable(f"the lab was not ready within {self.timeout_seconds:g} s") from None

    def call(self, work: Callable[P, Awaitable[T]], *arguments: P.args, **options: P.kwargs) -> T:
        """Run work in the lab's thread and return its result."""
        name = work.__name__.strip("_")
        if self._loop.is_closed():
            raise Refused(
                f"{name}: this lab is closed; expected a call inside `with Lab() as lab:`"
            )

        async def run() -> T:
            async with self._calling:
                return await work(*arguments, **options)

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(self.timeout_seconds)
        except Error as error:
            raise error.with_traceback(None) from None  # of the lab's thread
        except TimeoutError:
            if not future.cancel():
                raise  # the work itself timed out
            raise Unavailable(
                f"{name}: not done within {self.timeout_seconds:g} s of real time"
            ) from None

    def stop(self) -> None:
        """Answer requests in progress, close every socket and end the thread."""
        self._request_stop()
        self._thread.join(self.timeout_seconds)
        if self._thread.is_alive():
            raise Unavailable(f"the lab's thread did not end within {self.timeout_seconds:g} s")

    def _request_stop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            async with open_lab(self._setup) as service:
                self.service, self.ledger = service, EventLedger(service.engine.board)
                service.engine.subscribe_entries(self.ledger.add_change)
                self.url = await service.listen_metadata(LOOPBACK)
                self._ready.set_result(None)
                await self._stopping.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
