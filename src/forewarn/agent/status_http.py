"""An optional local HTTP port, only to look at: /healthz, /readyz, /drainz and /metrics.

Not built on http.server, which brings TLS and e-mail along: a third of the memory that the agent
may use. A request is one head and an answer, then the connection ends. Who is slow is cut off; who
comes when too many are there is sent away.
"""

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from forewarn.agent.status import View, metrics
from forewarn.errors import Unavailable

log = logging.getLogger("forewarn.agent")

HEAD_BYTES_MAX = 8192
SECONDS_MAX = 5.0
CALLERS_MAX = 16
TEXT, METRICS = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}

Look = Callable[[], View]


class Answer(NamedTuple):
    status: int
    body: str
    content_type: str = TEXT


def answer(path: str, look: Look) -> Answer:
    if path == "/healthz":
        return Answer(200, "alive\n")
    if path == "/readyz":
        unready = look().unready
        return Answer(503, f"{unready}\n") if unready else Answer(200, "ready\n")
    if path == "/drainz":
        return Answer(503, "drained\n") if look().is_drained else Answer(200, "in service\n")
    if path == "/metrics":
        return Answer(200, metrics(look()), METRICS)
    return Answer(404, "expected /healthz, /readyz, /drainz or /metrics\n")


class Port:
    """Listens from the start.

    `address` is where, which tells the port for one that asked for 0. Unavailable if it cannot.
    """

    def __init__(self, listen: str, look: Look) -> None:
        host, _, number = listen.rpartition(":")
        host = host.strip("[]")
        try:
            self._server = Server((host, int(number)), look)
        except OSError as error:
            raise Unavailable(
                f"listen is {listen}, which cannot be had: {error.strerror or error}"
            ) from error
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="forewarn-agent-port", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], look: Look) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.look = look
        self._places = threading.BoundedSemaphore(CALLERS_MAX)
        super().__init__(address, Caller)

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be had, so none gives the place back
            self._places.release()
            raise

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        log.exception("the port could not answer")


class Caller(socketserver.BaseRequestHandler):
    server: Server
    request: socket.socket

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # it has gone, or is too slow
            line = self._read_line()
            method, _, rest = line.partition(" ")
            path = rest.partition(" ")[0].partition("?")[0]
            if method not in ("GET", "HEAD"):
                said = (
                    Answer(405, "expected GET\n")
                    if method.isalpha() and rest
                    else Answer(400, "expected HTTP\n")
                )
            else:
                said = answer(path, self.server.look)
            self._write(said, has_body=method != "HEAD")

    def _read_line(self) -> str:
        """The first line of a head that came whole, else nothing."""
        deadline = time.monotonic() + SECONDS_MAX
        head = b""
        while (
            b"\r\n\r\n" not in head and b"\n\n" not in head
        ):  # ends with the head, its limit or the time
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError
            self.request.settimeout(rest)
            part = self.request.recv(HEAD_BYTES_MAX)
            head += part
            if not part or len(head) > HEAD_BYTES_MAX:
                return ""
        return head.partition(b"\n")[0].decode("latin-1").strip()

    def _write(self, said: Answer, *, has_body: bool) -> None:
        body = said.body.encode(errors="replace")
        head = f"HTTP/1.1 {said.status} {REASONS[said.status]}\r\nContent-Type: {said.content_type}\r\n"
        head += f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n"
        allow = "Allow: GET, HEAD\r\n" if said.status == 405 else ""
        self.request.settimeout(SECONDS_MAX)
        self.request.sendall(f"{head}{allow}\r\n".encode() + (body if has_body else b""))
