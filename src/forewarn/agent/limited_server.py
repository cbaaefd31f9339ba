"""A threading socket server with a limit on its connections, for the participants' socket and the
status port.
"""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from forewarn.log import log


class LimitedServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One thread per connection. Connections over the limit are closed immediately.

    `start` and `stop` replace `serve_forever` and `shutdown`, which wake up every half second.
    """

    daemon_threads = True
    block_on_close = False
    connections_max = 16
    accept_retry_seconds = 0.1

    def start(self, name: str) -> None:
        self._stopped = threading.Event()
        self._open: set[Any] = set()  # only the thread that accepts adds to it
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self.server_close()
        for connection in tuple(self._open):
            hang_up(connection)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            # Without a free file descriptor, the connection stays in the queue and the next attempt
            # fails at once. The caller ignores the error.
            self._stopped.wait(self.accept_retry_seconds)
            raise

    def verify_request(self, request: object, client_address: object) -> bool:
        if len(self._open) >= self.connections_max:
            return False
        self._open.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        """The end of every connection, even of one for which no thread could be started."""
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that fails costs only that connection."""
        log.exception("unexpected error on a connection")


def hang_up(connection: socket.socket) -> None:
    """From any thread: the reading thread sees the end of the connection."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def time_limit(connection: socket.socket, seconds: float) -> Iterator[threading.Timer]:
    """Hang up if it takes longer, unless the timer is cancelled. The other side may be gone."""
    timer = threading.Timer(seconds, hang_up, (connection,))
    timer.daemon = True
    timer.start()
    try:
        with suppress(OSError):
            yield timer
    finally:
        timer.cancel()
