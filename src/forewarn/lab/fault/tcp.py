"""Connections that a request can break, for faults below HTTP.

No poll takes the fast path here: every request reaches the fault filter.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Protocol

from forewarn.web.http.message import Header
from forewarn.web.metadata.fast_path import MetadataConnection, ParsedPoll, Polls

EXTENSION = "forewarn.connection"
FLUSH_TRIES_MAX = 100
FLUSH_SECONDS = 0.01
_NO_LINGER = struct.pack("ii", 1, 0)


class ConnectionDropped(Exception):
    """There is no connection to break: the client runs in this process."""


class BreakableConnection(Protocol):
    """A connection whose response will not be completed."""

    async def reset(self) -> None:
        """End it by a TCP reset."""

    async def close(self) -> None:
        """End it as if the response were complete."""


def get_connection(scope: MutableMapping[str, Any]) -> BreakableConnection:
    """Return the connection of a request. Raises ConnectionDropped if it has none."""
    connection: BreakableConnection | None = (scope.get("extensions") or {}).get(EXTENSION)
    if connection is None:
        raise ConnectionDropped
    return connection


class FilteredPolls(Polls):
    """The connection policy behind the filter: no poll is answered by the fast path."""

    def connector(self, **options: Any) -> Callable[[], asyncio.Protocol]:
        return partial(FilteredConnection, self, **options)

    def parse(self, url: bytes, headers: list[Header], *, is_last: bool) -> ParsedPoll | None:
        return None


class FilteredConnection(MetadataConnection):
    """A connection that passes itself to its requests, so that they can break it."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    async def reset(self) -> None:
        # A reset discards what is still in our buffer. What the kernel has is sent: on loopback
        # it is delivered at once.
        for _ in range(FLUSH_TRIES_MAX):
            if self.transport.is_closing() or not self.transport.get_write_buffer_size():
                break
            await asyncio.sleep(FLUSH_SECONDS)
        self._abandon_request()
        if not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
            )
        self.transport.abort()

    async def close(self) -> None:
        self._abandon_request()
        self.transport.close()

    def _abandon_request(self) -> None:
        """Make the server accept that this request ends without a response."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
