"""The connection under the filter: it can be broken on purpose, and no poll takes the quick way
past the filter.
"""

import asyncio
import socket
import struct
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from forewarn.web.http.message import Header
from forewarn.web.metadata.fast_path import MetadataConnection, ParsedPoll, Polls

EXTENSION = "forewarn.connection"
FLUSH_TRIES_MAX = 100
FLUSH_SECONDS = 0.01
_NO_LINGER = struct.pack("ii", 1, 0)


class Dropped(Exception):
    """The answer is not given, or not whole, and there is no connection to break: the caller is in
    this process.
    """


class Line(Protocol):
    """A connection whose answer is not to be completed.

    What was sent of it before is on its way.
    """

    async def reset(self) -> None:
        """End it by a TCP reset."""

    async def close(self) -> None:
        """End it as if all had been said."""


def find_line(scope: MutableMapping[str, Any]) -> Line:
    """The connection that a request came on; Dropped if it came on none."""
    line: Line | None = (scope.get("extensions") or {}).get(EXTENSION)
    if line is None:
        raise Dropped
    return line


class FilteredPolls(Polls):
    """What all connections under the filter share: no poll is answered before the application has
    seen it.
    """

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(FilteredConnection, self, **arguments)

    def parse(self, url: bytes, headers: list[Header], *, is_last: bool) -> ParsedPoll | None:
        return None


class FilteredConnection(MetadataConnection):
    """A connection that its requests can break: each carries it in its extensions."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    async def reset(self) -> None:
        for _ in range(FLUSH_TRIES_MAX):
            if not self._unsent_bytes():
                break
            await asyncio.sleep(FLUSH_SECONDS)
        self._forsake()
        if not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
            )
        self.transport.abort()

    async def close(self) -> None:
        self._forsake()
        self.transport.close()

    def _unsent_bytes(self) -> int:
        """What the client's machine has not confirmed yet: a reset would take it back.

        Without the POSIX modules (Windows) only our own buffer is known, so a reset may take back
        what the kernel still holds.
        """
        if self.transport.is_closing():
            return 0
        queued = bytes(4)
        with suppress(ModuleNotFoundError):
            import fcntl
            import termios

            queued = fcntl.ioctl(
                self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued
            )
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _forsake(self) -> None:
        """The running request ends without an answer, and that is no bug."""
        if self.running is not None:
            self.running.disconnected = True
            self.running.message_event.set()
