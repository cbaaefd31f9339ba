"""The client for asyncio programs: the methods of `client.Client`, on asyncio streams.

`client.py` documents what the methods promise. This is not a thread around `Client`: every long
poll would occupy a thread, and a cancelled call would leave one behind until it notices.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar

from forewarn.client.backoff import PERIOD_SECONDS, WAIT_SECONDS, PollSchedule
from forewarn.client.client import BaseClient, keep_alive
from forewarn.client.errors import EndpointError
from forewarn.client.http1 import READ_BYTES, ConnectionClosed, Endpoint, Reader, Response
from forewarn.client.models import Document
from forewarn.client.protocol import ApiRequest, vm_name
from forewarn.client.watcher import Change, Watcher

T = TypeVar("T")


class AsyncClient(BaseClient["AsyncConnection"]):
    """Reads, waits and approves, in one event loop.

    Tasks may share it: a call made during another one uses its own connection. A cancelled call
    or watch leaves nothing behind.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call in progress, and every watch, at the latest after its current pause."""
        self._interrupt()

    async def document(self) -> Document:
        return self._cache.put(await self._send(self._api.document()))

    async def wait(self, timeout_seconds: float, *, since: Document | None = None) -> Document:
        request = self._api.wait(timeout_seconds, since or self._cache.document)
        return self._cache.put(await self._send(request))

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
        on_error: Callable[[EndpointError], object] | None = None,
        wait_seconds: float = WAIT_SECONDS,
        watcher: Watcher | None = None,
    ) -> AsyncIterator[Change]:
        known = watcher or Watcher(approved=self._api.approved)
        count = 0
        results = self.documents(
            stop=stop, wait_seconds=wait_seconds, may_wait=lambda: not known.is_in_doubt
        )
        async with aclosing(results):
            async for result in results:
                for change in self._changes(result, known, on_error):
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
    ) -> AsyncGenerator[Document | EndpointError, None]:
        stop = stop or asyncio.Event()
        schedule = PollSchedule(self._api, self._clock, wait_seconds, period_seconds, may_wait)
        while not (stop.is_set() or self._closed.is_set()):
            result: Document | EndpointError
            try:
                result = schedule.succeeded(await self._send(schedule.request()))
            except EndpointError as error:
                result = schedule.failed(error)
            if self._closed.is_set():
                return
            yield result
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), schedule.rest_seconds())

    def _new_connection(self) -> "AsyncConnection":
        return AsyncConnection(self._api.endpoint)

    async def _send(self, request: ApiRequest[T], timeout_seconds: float | None = None) -> T:
        limit = self._limit(request, timeout_seconds)
        with self._connection(request) as connection:
            return request.read(await connection.send(request.data, limit))


class AsyncConnection:
    """A keep-alive connection. States as in `client.EndpointConnection`; cancelling `send` closes
    it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._timeout = asyncio.timeout(None)

    async def send(self, data: bytes, timeout_seconds: float) -> Response:
        async with asyncio.timeout(timeout_seconds) as self._timeout:
            if self._streams is not None:
                with suppress(ConnectionClosed, ConnectionError):
                    return await self._exchange(data)
            return await self._exchange(data)

    def interrupt(self) -> None:
        """Let `send` time out now, which does not cancel the task that called it."""
        if not self._timeout.expired():
            self._timeout.reschedule(0)

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
                keep_alive(self._streams[1].get_extra_info("socket"))
            stream, writer = self._streams
            writer.write(data)
            while response is None:
                response = reader.feed(await stream.read(READ_BYTES))
            return response
        finally:
            if response is None or response.is_last:
                self.close()
