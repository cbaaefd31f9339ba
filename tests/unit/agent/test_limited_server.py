"""What the participants' socket and the status port have in common."""

import errno
import socket
import socketserver
import threading

from forewarn.agent.limited_server import LimitedServer


def test_server_without_free_file_descriptors_pauses() -> None:
    """The connection waits in the queue, so each attempt would fail at once and cost a whole core.

    The pause ends when the server stops.
    """
    attempts = threading.Semaphore(0)

    class Exhausted(socketserver.TCPServer):
        def get_request(self) -> tuple[socket.socket, object]:
            attempts.release()
            raise OSError(errno.EMFILE, "Too many open files")

    class Server(LimitedServer, Exhausted):
        accept_retry_seconds = 3600.0

    server = Server(("127.0.0.1", 0), socketserver.BaseRequestHandler)
    server.start("forewarn-test")
    with socket.create_connection(server.socket.getsockname(), timeout=20):
        assert attempts.acquire(timeout=20)
        assert not attempts.acquire(timeout=0.05)
        server.stop()
