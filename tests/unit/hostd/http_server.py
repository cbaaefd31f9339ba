"""A real HTTP server in the test's event loop, which answers as the test says."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


SECONDS_MAX = 30


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), SECONDS_MAX))

    return run


Answer = Callable[[Request], Awaitable[tuple[int, Any]]]


@dataclass
class HttpServer:
    """`answer` returns a status and a body, bytes or what becomes JSON."""

    answer: Answer
    url: str = ""
    connections: int = 0
    requests: list[Request] = field(default_factory=list)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Like a kill: connections break, and no new ones are accepted."""
        if self.server is not None:
            self.server.close()
        for writer in [*self.writers]:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:  # ends with the connection
                request = await read_request(reader)
                self.requests.append(request)
                status, content = await self.answer(request)
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
                writer.write(body)
        self.writers.discard(writer)
        writer.close()


async def read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ")
    return Request(method, path, headers, body)


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[HttpServer]:
    server = HttpServer(answer)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
