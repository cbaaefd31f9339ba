"""A threading socket server with a limit on its connections, for the participants' socket and the
status port.
"""

import socket
import socketserver
import threading

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
        self._slots = threading.BoundedSemaphore(self.connections_max)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self.server_close()

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
        return self._slots.acquire(blocking=False)

    def process_request(self, request: object, client_address: object) -> None:
        try:
            super().process_request(request, client_address)  # type: ignore[arg-type]
        except BaseException:  # no thread could be started, so none will release the slot
            self._slots.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that fails costs only that connection."""
        log.exception("unexpected error on a connection")
