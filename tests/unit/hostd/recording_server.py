"""A server on loopback that records requests, and answers as the test decides."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

Answer = Callable[[bytes], Awaitable[bytes]]
DOCUMENT = b'{"DocumentIncarnation":7,"Events":[]}'


def response(
    status: str = "200 OK", body: bytes = DOCUMENT, *headers: bytes, etag: bytes = b'"7"'
) -> bytes:
    lines = [f"HTTP/1.1 {status}".encode(), b"date: Tue, 17 Nov 2026 06:00:00 GMT", b"server: test"]
    lines += [b"etag: " + etag, *headers]
    if not status.startswith("304"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body if not status.startswith("304") else b""])


class RecordingServer:
    """`requests` has the bytes of each request; an empty answer closes the connection."""

    def __init__(self, *answers: bytes, answer: Answer | None = None) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0
        self._answers = [*answers]
        self._answer = answer
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[Any]] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Like a process that is killed."""
        self._server.close()
        for writer, task in [*self._writers.items()]:
            writer.transport.abort()
            task.cancel()
        while self._writers:
            await asyncio.sleep(0)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._writers[writer] = task
        try:
            while answer := await self._next(reader):
                writer.write(answer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            del self._writers[writer]
            writer.close()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        request = await reader.readuntil(b"\r\n\r\n")
        for line in request.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                request += await reader.readexactly(int(value))
        self.requests.append(request)
        if self._answer is not None:
            return await self._answer(request)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
