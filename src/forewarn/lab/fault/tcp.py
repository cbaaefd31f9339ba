"""Connections on which a request can be delayed or broken, for faults below HTTP.

No poll takes the fast path here: every request reaches the fault filter.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from forewarn.web.http.message import Header
from forewarn.web.metadata.fast_path import MetadataConnection, ParsedPoll, Polls

EXTENSION = "forewarn.connection"
_NO_LINGER = struct.pack("ii", 1, 0)


class FilteredPolls(Polls):
    """The connection policy behind the filter: no poll is answered by the fast path."""

    def connector(self, **options: Any) -> Callable[[], asyncio.Protocol]:
        return partial(FilteredConnection, self, **options)

    def parse(self, url: bytes, headers: list[Header], *, is_last: bool) -> ParsedPoll | None:
        return None


class FilteredConnection(MetadataConnection):
    """A connection that passes itself to its requests, so that they can break it."""

    def __init__(self, polls: Polls, **arguments: Any) -> None:
        super().__init__(polls, **arguments)
        self._is_lost = asyncio.Event()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_lost.set()

    async def sleep(self, seconds: float) -> bool:
        """Delay the response. Returns whether the client is still connected."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_lost.wait(), seconds)
        return not self._is_lost.is_set()

    async def reset(self) -> None:
        """End it by a TCP reset.

        What the kernel has is still sent: on loopback it is delivered immediately.
        """
        self._abandon_request()
        if not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
            )
        self.transport.abort()

    async def close(self) -> None:
        """End it as if the response were complete."""
        self._abandon_request()
        self.transport.close()

    def _abandon_request(self) -> None:
        """Make the server accept that this request ends without a response."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
