"""What differs between the versions of uvicorn, and whether the installed one can be used.

Its protocol class is not a public interface. So each listener tries a connection without a socket
before it accepts real ones: half a request must arrive in the attributes that we read, and a
connection that has let its transport go must not close it.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forewarn.errors import Unavailable
from forewarn.web.http.message import CLOSE, Header

HALF_REQUEST = b"GET /probe HTTP/1.1\r\nHost: a\r\nB: "
LOOPBACK = ("127.0.0.1", 0)


class UvicornProtocol(HttpToolsProtocol):
    """uvicorn's protocol with one behaviour in all versions.

    Before 0.53 it kept the connection after `Connection: Close, TE`, and announced only some of
    the times that it closes one. It looks for the header in the request.
    """

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.parser.should_keep_alive():
            self._close_after_response()

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None and not self.cycle.response_complete:
            self._close_after_response()

    def _close_after_response(self) -> None:
        self.cycle.keep_alive = False
        headers = cast("list[Header]", self.cycle.scope["headers"])
        if CLOSE not in headers:
            headers.append(CLOSE)


class ProbeTransport(asyncio.Transport):
    """A transport to nowhere."""

    is_closed = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


def probe(make: Callable[[], HttpToolsProtocol]) -> bool:
    """Try a connection: whether it can be replaced by another, as the fast path does.

    Raises Unavailable if this uvicorn cannot be used at all.
    """
    transport = ProbeTransport({"peername": LOOPBACK, "sockname": LOOPBACK})
    try:
        connection = make()
        connection.connection_made(transport)
        connection.data_received(HALF_REQUEST)
        is_free = connection.cycle is None and not connection.flow.write_paused
        read = connection.url, connection.headers, is_free
        connection.connection_lost(ConnectionError())
        is_left = connection not in connection.server_state.connections
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        raise _unsupported(f"{type(error).__name__}: {error}") from error
    if read != (b"/probe", [(b"host", b"a")], True) or not is_left:
        raise _unsupported("its connections work differently")
    return not transport.is_closed


def _unsupported(reason: str) -> Unavailable:
    return Unavailable(f"uvicorn {uvicorn.__version__} is not supported ({reason})")
