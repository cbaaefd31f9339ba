"""The client for asyncio programs: the same names, the same pure parts, on streams.

`client.py` says what they promise.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from forewarn.client.backoff import WAIT_SECONDS, Clock, Pace
from forewarn.client.errors import ConnectionFailed, EndpointError
from forewarn.client.http1 import READ_BYTES, Answer, Endpoint, HungUp, Reader
from forewarn.client.models import Document
from forewarn.client.protocol import (
    API_VERSION,
    DEFAULT_ENDPOINT,
    INSTANCE_VERSION,
    TIMEOUT_SECONDS,
    Dialogue,
    Known,
    Question,
    name_of,
)
from forewarn.client.watcher import Change, Watcher

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AsyncClient:
    """Reads, waits and approves, in one event loop.

    Tasks may share it: a call made while another is under way uses a connection of its own. A call
    or a watch that is cancelled leaves nothing behind.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        api_version: str = API_VERSION,
        instance_version: str = INSTANCE_VERSION,
        timeout_seconds: float = TIMEOUT_SECONDS,
        clock: Clock = Clock(),
    ) -> None:
        self._dialogue = Dialogue(
            endpoint, api_version=api_version, instance_version=instance_version
        )
        self._known = Known(clock.monotonic)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._closed = threading.Event()
        self._connection = AsyncConnection(self._dialogue.endpoint, self._closed)
        self._others: set[AsyncConnection] = set()
        self._name = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every question that is under way, and every watch, if need be after the pause that
        it is in.
        """
        self._closed.set()
        for connection in (self._connection, *self._others):
            await connection.close()

    async def document(self) -> Document:
        return self._known.keep(await self._ask(self._dialogue.document()))

    async def wait(self, timeout_seconds: float, *, since: Document | None = None) -> Document:
        return self._known.keep(
            await self._ask(self._dialogue.wait(timeout_seconds, since or self._known.document))
        )

    async def approve(self, *event_ids: str, timeout_seconds: float | None = None) -> None:
        await self._ask(self._dialogue.approval(event_ids), timeout_seconds)

    async def instance(self) -> dict[str, Any]:
        return await self._ask(self._dialogue.instance())

    async def name(self) -> str:
        self._name = self._name or name_of(await self.instance())
        return self._name

    async def watch(
        self,
        *,
        stop: asyncio.Event | None = None,
        changes_max: int | None = None,
        on_problem: Callable[[EndpointError], object] = lambda problem: None,
        wait_seconds: float = WAIT_SECONDS,
        watcher: Watcher | None = None,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> AsyncIterator[Change]:
        """What changes, each once, for ever: until `stop` is set, the client is closed, or
        `changes_max` have been told.
        """
        stop = stop or asyncio.Event()
        pace = Pace(
            self._dialogue,
            watcher or Watcher(approved=self._dialogue.approved),
            self._clock,
            wait_seconds,
        )
        told = 0
        while not (stop.is_set() or self._closed.is_set()):
            try:
                changes = pace.answered(await self._ask(pace.question()))
            except EndpointError as problem:
                if self._closed.is_set():
                    return
                changes = []
                pace.failed(problem)
                on_problem(problem)
            for change in changes:
                yield change
                told += 1
                if told == changes_max:
                    return
            rest = pace.rest_seconds()
            await (sleep(rest) if sleep else _rest(stop, rest))

    async def _ask(self, question: Question[T], timeout_seconds: float | None = None) -> T:
        seconds = (
            self._timeout_seconds if timeout_seconds is None else timeout_seconds
        ) + question.wait_seconds
        try:
            if question.is_repeatable and not self._connection.is_busy:
                return question.read(await self._connection.ask(question.request, seconds))
            alone = AsyncConnection(self._dialogue.endpoint, self._closed)
            self._others.add(alone)
            try:
                return question.read(await alone.ask(question.request, seconds))
            finally:
                self._others.discard(alone)
                await alone.close()
        except EndpointError:
            self._known.forget()
            raise


async def _rest(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


class AsyncConnection:
    """A connection that is opened when it is needed and kept while it is of use, until `closed` is
    set.
    """

    def __init__(self, endpoint: Endpoint, closed: threading.Event) -> None:
        self.is_busy = False
        self._endpoint = endpoint
        self._closed = closed
        self._streams: Streams | None = None
        self._opening: asyncio.Task[Streams] | None = None

    async def ask(self, request: bytes, timeout_seconds: float) -> Answer:
        self.is_busy = True
        try:
            async with asyncio.timeout(timeout_seconds):
                if self._streams is not None:
                    with suppress(HungUp):
                        return await self._exchange(request)
                return await self._exchange(request)
        except TimeoutError as error:
            raise ConnectionFailed(f"{self._endpoint} did not answer in time") from error
        finally:
            self.is_busy = False

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with suppress(OSError):
                await streams[1].wait_closed()

    async def _exchange(self, request: bytes) -> Answer:
        reader = Reader()
        answer = None
        try:
            stream, writer = await self._open()
            writer.write(request)
            while answer is None:  # ends with the answer, the connection or the time
                answer = reader.feed(await stream.read(READ_BYTES))
            return answer
        except TimeoutError:
            raise
        except OSError as error:
            kind = ConnectionFailed if reader.has_begun or self._streams is None else HungUp
            raise kind(f"no answer from {self._endpoint}: {error.strerror or error}") from error
        finally:
            if answer is None or answer.is_last:
                self._abort()

    async def _open(self) -> Streams:
        if self._streams is None and not self._closed.is_set():
            self._streams = await self._connect()
        if self._streams is None or self._closed.is_set():
            raise ConnectionFailed("this client is closed")
        return self._streams

    async def _connect(self) -> Streams | None:
        """None if `close` ended it.

        It is a task of its own, so that `close` can end it without cancelling who asked.
        """
        asking = asyncio.current_task()
        assert asking is not None, "called from a coroutine"
        cancels = asking.cancelling()
        opening = self._opening = asyncio.create_task(
            asyncio.open_connection(self._endpoint.host, self._endpoint.port)
        )
        try:
            return await opening
        except asyncio.CancelledError:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result()[
                    1
                ].transport.abort()  # it was made in the moment in which we were cancelled
            if asking.cancelling() > cancels or not self._closed.is_set():
                raise
            return None
        finally:
            self._opening = None

    def _abort(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()
