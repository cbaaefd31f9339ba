"""One POST to somebody else's server, within limits: of time as a whole, of the answer's size. No
redirects, no proxies.

The connection is kept for the next POST where the other side keeps it. TLS is verified against the
system's authorities, or those that SSL_CERT_FILE names.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from forewarn.errors import Unavailable
from forewarn.platform.threads import CallThreads

ANSWER_BYTES_MAX = 64 * 1024
READ_BYTES = 16 * 1024

Lookup = Callable[..., Sequence[tuple[Any, Any, Any, Any, Any]]]
"""As `socket.getaddrinfo`."""


class Postbox:
    """Where one receiver is. `name` is what may be shown of it: the path may hold a secret."""

    def __init__(
        self, url: str, *, seconds_max: float, lookup: Lookup = socket.getaddrinfo
    ) -> None:
        self.url = urlsplit(url)
        self.name = name_of(self.url)
        self._seconds_max = seconds_max
        self._lookup, self._threads = lookup, CallThreads(1)
        self._tls = ssl.create_default_context() if self.url.scheme == "https" else None
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._answer = _Answer()

    async def post(self, body: bytes, headers: Mapping[str, str]) -> int:
        """The status that was answered.

        Unavailable if there was no answer, or none in time: it may have arrived all the same.
        """
        request, self._answer = self._request(body, headers), _Answer()
        try:
            async with asyncio.timeout(self._seconds_max):
                await self._deliver(request)
        except (OSError, EOFError, HttpParserError) as error:
            if not self._answer.status:  # else what matters is there, whatever became of the rest
                raise Unavailable(self._reason(error), receiver=self.name) from error
        finally:
            if not self._answer.is_kept:
                self.close()
        return self._answer.status

    def close(self) -> None:
        if self._open is not None:
            self._open[1].transport.abort()
            self._open = None

    def _request(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        target = (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")
        lines = [
            f"POST {target} HTTP/1.1",
            f"host: {self.url.netloc}",
            f"content-length: {len(body)}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def _deliver(self, request: bytes) -> None:
        if self._open is not None:  # kept from the last time; it may have been closed meanwhile
            try:
                await self._exchange(*self._open, request)
                return
            except (OSError, EOFError):
                self.close()
                if self._answer.status:
                    return
        self._open = await self._connect()
        await self._exchange(*self._open, request)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first address that takes us.

        A lookup cannot be broken off, and the event loop waits at its end for its own.
        """
        host, port = self.url.hostname or "", self.url.port or (443 if self._tls else 80)
        found = await self._threads.call(
            self.name, lambda: self._lookup(host, port, type=socket.SOCK_STREAM), self._seconds_max
        )
        problem = OSError("the name has no address")
        for address in dict.fromkeys(str(one[4][0]) for one in found):
            try:
                return await asyncio.open_connection(
                    address,
                    port,
                    ssl=self._tls,
                    server_hostname=host if self._tls else None,
                    limit=READ_BYTES,
                )
            except OSError as error:
                problem = error
        raise problem

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> None:
        writer.write(request)
        await writer.drain()
        size = 0
        while (
            not self._answer.is_complete
        ):  # ends with the answer, at its largest size, or when the time is up
            piece = await reader.read(READ_BYTES)
            size += len(piece)
            if not piece or size > ANSWER_BYTES_MAX:
                raise EOFError("the connection ended before the answer did")
            self._answer.feed(piece)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._seconds_max:g} s"
        why = (
            getattr(error, "verify_message", "")
            or getattr(error, "strerror", None)
            or str(error)
            or type(error).__name__
        )
        return f"no answer: {why}"


class _Answer:
    """An answer while it arrives. Of its body nothing is kept."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = self.is_kept = False
        self._parser = HttpResponseParser(self)

    def feed(self, piece: bytes) -> None:
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade as error:  # status 101, which nobody asked for
            raise HttpParserError("the receiver went over to another protocol") from error

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # what is only on the way is no answer

    def on_message_complete(self) -> None:
        if self.status:
            self.is_complete, self.is_kept = True, self._parser.should_keep_alive()


def name_of(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc}"
