"""The body of a long response: it is built in slices, and sent in chunks.

To join and write megabytes at once would take longer than a slice, and polls would wait for it.
"""

from collections.abc import AsyncIterator
from typing import Any

from litestar import MediaType, Response
from litestar.response import Stream

from forewarn.engine.turns import Turn

CHUNK_BYTES = 64 * 1024


class JsonBody:
    """JSON that grows at its end. `chunks` are all of it, each of about CHUNK_BYTES."""

    def __init__(self) -> None:
        self._full: list[bytes] = []
        self._parts: list[bytes] = []
        self._parts_size = 0

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self._parts_size += len(part)
        if self._parts_size >= CHUNK_BYTES:
            self._full.append(b"".join(self._parts))
            self._parts.clear()
            self._parts_size = 0

    @property
    def chunks(self) -> list[bytes]:
        return [*self._full, b"".join(self._parts)]

    def respond(self, take_turn: Turn, headers: dict[str, str] | None = None) -> Response[Any]:
        """The response with this body, which takes a turn before each chunk.

        Any: Litestar sends bytes as they are, and the type of the route documents their content.
        """
        chunks = self.chunks
        if len(chunks) == 1:
            return Response(chunks[0], media_type=MediaType.JSON, headers=headers)

        async def send() -> AsyncIterator[bytes]:
            for chunk in chunks:
                await take_turn()
                yield chunk

        length = {"Content-Length": str(sum(map(len, chunks)))}
        return Stream(send(), media_type=MediaType.JSON, headers={**(headers or {}), **length})
