"""One POST to somebody else's server, within limits: of time as a whole, of the answer's size. No redirects, no proxies.

The connection is kept for the next POST where the other side keeps it. TLS is verified against the system's authorities, or
those that SSL_CERT_FILE names.
"""

import asyncio
import ssl
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from httptools import HttpParserError, HttpResponseParser

from forewarn.errors import Unavailable

ANSWER_BYTES_MAX = 64 * 1024
READ_BYTES = 16 * 1024


class Postbox:
    """Where one receiver is. `name` is what may be shown of it: the path may hold a secret."""

    def __init__(self, url: str, *, seconds_max: float) -> None:
        self.url = urlsplit(url)
        self.name = name_of(self.url)
        self._seconds_max = seconds_max
        self._tls = ssl.create_default_context() if self.url.scheme == "https" else None
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._is_whole = False

    async def post(self, body: bytes, headers: Mapping[str, str]) -> int:
        """The status that was answered. Unavailable if there was no answer, or none in time: it may have arrived all the same."""
        request, self._is_whole = self._request(body, headers), False
        try:
            async with asyncio.timeout(self._seconds_max):
                if self._open is not None:  # kept from the last time; it may have been closed meanwhile
                    try:
                        return await self._exchange(*self._open, request)
                    except (OSError, EOFError):
                        self.close()
                host, port = self.url.hostname, self.url.port or (443 if self._tls else 80)
                self._open = await asyncio.open_connection(host, port, ssl=self._tls, limit=READ_BYTES)
                return await self._exchange(*self._open, request)
        except TimeoutError as error:
            raise Unavailable(f"no answer within {self._seconds_max:g} s", receiver=self.name) from error
        except (OSError, EOFError, HttpParserError) as error:
            why = getattr(error, "verify_message", "") or getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(f"no answer: {why}", receiver=self.name) from error
        finally:
            if self._open is not None and not self._is_whole:
                self.close()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].transport.abort()
            self._open = None

    def _request(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        target = (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")
        lines = [f"POST {target} HTTP/1.1", f"host: {self.url.netloc}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
        writer.write(request)
        await writer.drain()
        answer = _Answer()
        size = 0
        while not answer.is_complete:  # ends with the answer, at its largest size, or when the time is up
            piece = await reader.read(READ_BYTES)
            size += len(piece)
            if not piece or size > ANSWER_BYTES_MAX:
                if answer.status:
                    return answer.status  # what matters is there; the rest is not waited for
                raise EOFError("the connection ended before the answer did")
            answer.feed(piece)
        self._is_whole = answer.is_kept
        return answer.status


class _Answer:
    """An answer while it arrives. Of its body nothing is kept."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = self.is_kept = False
        self._parser = HttpResponseParser(self)

    def feed(self, piece: bytes) -> None:
        self._parser.feed_data(piece)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # what is only on the way is no answer

    def on_message_complete(self) -> None:
        if self.status:
            self.is_complete, self.is_kept = True, self._parser.should_keep_alive()


def name_of(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc}"
