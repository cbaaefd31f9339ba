"""The client for asyncio programs: the methods of `client.Client`, on asyncio streams.

`client.py` documents what the methods promise. This is not a thread around `Client`: every long
poll would occupy a thread, and a cancelled call would leave one behind until it notices.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar

from forewarn.client.backoff import PERIOD_SECONDS, WAIT_SECONDS, ClientClock, PollSchedule
from forewarn.client.client import CLOSED
from forewarn.client.errors import ConnectionFailed, EndpointError
from forewarn.client.http1 import READ_BYTES, ConnectionClosed, Endpoint, Reader, Response
from forewarn.client.models import Document
from forewarn.client.protocol import (
    API_VERSION,
    DEFAULT_ENDPOINT,
    INSTANCE_VERSION,
    TIMEOUT_SECONDS,
    Api,
    ApiRequest,
    ConditionalCache,
    vm_name,
)
from forewarn.client.watcher import Change, Watcher

T = TypeVar("T")


class AsyncClient:
    """Reads, waits and approves, in one event loop.

    Tasks may share it: a call made during another one uses its own connection. A cancelled call
    or watch leaves nothing behind.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        api_version: str = API_VERSION,
        instance_version: str = INSTANCE_VERSION,
        timeout_seconds: float = TIMEOUT_SECONDS,
        clock: ClientClock = ClientClock(),  # noqa: B008 - a frozen value
    ) -> None:
        self._api = Api(endpoint, api_version=api_version, instance_version=instance_version)
        self._cache = ConditionalCache(clock.monotonic)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._is_closed = False
        self._connection = AsyncConnection(self._api.endpoint)
        self._calls: set[asyncio.Task[Any]] = set()
        self._name = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call in progress, and every watch, at the latest after its current pause."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._connection.close()

    async def document(self) -> Document:
        return self._cache.put(await self._send(self._api.document()))

    async def wait(self, timeout_seconds: float, *, since: Document | None = None) -> Document:
        return self._cache.put(
            await self._send(self._api.wait(timeout_seconds, since or self._cache.document))
        )

    async def approve(self, *event_ids: str, timeout_seconds: float | None = None) -> None:
        await self._send(self._api.approval(event_ids), timeout_seconds)

    async def instance(self) -> dict[str, Any]:
        return await self._send(self._api.instance())

    async def name(self) -> str:
        self._name = self._name or vm_name(await self.instance())
        return self._name

    async def watch(
        self,
        *,
        stop: asyncio.Event | None = None,
        changes_max: int | None = None,
        on_error: Callable[[EndpointError], object] = lambda error: None,
        wait_seconds: float = WAIT_SECONDS,
        watcher: Watcher | None = None,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> AsyncIterator[Change]:
        watcher = watcher or Watcher(approved=self._api.approved)
        count = 0
        results = self.documents(
            stop=stop,
            wait_seconds=wait_seconds,
            may_wait=lambda: not watcher.is_in_doubt,
            sleep=sleep,
        )
        async with aclosing(results):
            async for result in results:
                if isinstance(result, EndpointError):
                    on_error(result)
                    continue
                for change in watcher.update(result, self._clock.now()):
                    yield change
                    count += 1
                    if count == changes_max:
                        return

    async def documents(
        self,
        *,
        stop: asyncio.Event | None = None,
        wait_seconds: float = WAIT_SECONDS,
        period_seconds: float = PERIOD_SECONDS,
        may_wait: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> AsyncGenerator[Document | EndpointError, None]:
        stop = stop or asyncio.Event()
        schedule = PollSchedule(
            self._api,
            self._clock,
            wait_seconds=wait_seconds,
            period_seconds=period_seconds,
            may_wait=may_wait,
        )
        while not (stop.is_set() or self._is_closed):
            try:
                document = await self._send(schedule.request())
            except EndpointError as error:
                if self._is_closed:
                    return
                schedule.failed(error)
                yield error
            else:
                schedule.succeeded(document)
                yield document
            rest = schedule.rest_seconds()
            await (sleep(rest) if sleep else _wait(stop, rest))

    async def _send(self, request: ApiRequest[T], timeout_seconds: float | None = None) -> T:
        if self._is_closed:
            raise ConnectionFailed(CLOSED)
        # A task of its own, so that `close` can end it without cancelling the caller. If the
        # caller is cancelled, `gather` cancels the task and waits until it has ended.
        call = asyncio.create_task(self._exchange(request, timeout_seconds))
        self._calls.add(call)
        try:
            (result,) = await asyncio.gather(call, return_exceptions=True)
        finally:
            self._calls.discard(call)
        if isinstance(result, asyncio.CancelledError):
            raise ConnectionFailed(CLOSED)
        if isinstance(result, BaseException):
            raise result
        return result

    async def _exchange(self, request: ApiRequest[T], timeout_seconds: float | None) -> T:
        if timeout_seconds is None:
            timeout_seconds = self._timeout_seconds
        timeout_seconds += request.wait_seconds
        try:
            if request.is_repeatable and not self._connection.is_busy:
                return request.read(await self._connection.send(request.data, timeout_seconds))
            connection = AsyncConnection(self._api.endpoint)
            try:
                return request.read(await connection.send(request.data, timeout_seconds))
            finally:
                connection.close()
        except EndpointError:
            self._cache.clear()
            raise


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


class AsyncConnection:
    """A keep-alive connection. States as in `client.Connection`; cancelling `send` closes it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.is_busy = False
        self._endpoint = endpoint
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, data: bytes, timeout_seconds: float) -> Response:
        self.is_busy = True
        try:
            async with asyncio.timeout(timeout_seconds):
                if self._streams is not None:
                    with suppress(ConnectionClosed):
                        return await self._exchange(data)
                return await self._exchange(data)
        except TimeoutError as error:
            raise ConnectionFailed(f"{self._endpoint} did not respond in time") from error
        finally:
            self.is_busy = False

    def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()

    async def _exchange(self, data: bytes) -> Response:
        reader = Reader()
        response = None
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(
                    self._endpoint.host, self._endpoint.port
                )
            stream, writer = self._streams
            writer.write(data)
            while response is None:
                response = reader.feed(await stream.read(READ_BYTES))
            return response
        except TimeoutError:
            raise
        except OSError as error:
            was_open = self._streams is not None and not reader.has_begun
            kind = ConnectionClosed if was_open else ConnectionFailed
            message = f"no response from {self._endpoint}: {error.strerror or error}"
            raise kind(message) from error
        finally:
            if response is None or response.is_last:
                self.close()
