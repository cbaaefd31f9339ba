"""A program that is told of changes: a real HTTP server on a free port, which can be good, bad,
hanging or gone.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext
from typing import Any


class WebhookReceiver:
    """Keeps what it was told, in order.

    `status` is what it answers; while `is_hanging` it does not answer at all.
    """

    def __init__(self, tls: SSLContext | None = None) -> None:
        self.events: list[Any] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.status = 204
        self.is_hanging = False
        self.is_over = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if owner.is_hanging:
                    owner.is_over.wait(60)
                    self.close_connection = True
                    return
                owner.requests.append(
                    ({name.lower(): value for name, value in self.headers.items()}, body)
                )
                if owner.status < 300:
                    owner.events.append(json.loads(body))
                self.send_response(owner.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self.server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = (
            f"{scheme}://localhost:{self.server.server_address[1]}/hook?key=hidden-in-the-query"
        )
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self.thread.start()

    def __enter__(self) -> "WebhookReceiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()

    def numbers(self) -> list[int]:
        return [event["data"]["number"] for event in self.events]

    def wait_for(self, count: int, seconds_max: float = 60.0) -> None:
        end = time.monotonic() + seconds_max
        while len(self.events) < count:
            assert time.monotonic() < end, f"told of {self.numbers()}, not of {count}"
            time.sleep(0.02)
