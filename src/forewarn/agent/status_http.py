"""An optional local HTTP port, read only: /healthz, /readyz, /drainz and /metrics.

Imported only when `listen` is set: http.server costs memory that most agents do not need to spend.
"""

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from forewarn.agent.limited_server import LimitedServer, time_limit
from forewarn.agent.status import AgentStatus, to_prometheus
from forewarn.errors import Unavailable

REQUEST_SECONDS_MAX = 5.0
TEXT, METRICS = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"

GetStatus = Callable[[], AgentStatus]


class StatusPort(LimitedServer):
    """Listens from the start. `address` has the actual port if 0 was configured.

    Not http.server.HTTPServer, which looks up the host's name when it binds. Raises Unavailable if
    the address cannot be used.
    """

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, listen: str, get_status: GetStatus) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.get_status = get_status
        try:
            super().__init__((host, int(port)), _Handler)
        except OSError as error:
            reason = error.strerror or error
            raise Unavailable(f"cannot listen on {listen}: {reason}") from error
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"
        self.start("forewarn-agent-port")


class _Handler(BaseHTTPRequestHandler):
    server: StatusPort
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        """`BaseHTTPRequestHandler.timeout` would limit each read, not the whole request."""
        with time_limit(self.connection, REQUEST_SECONDS_MAX):
            super().handle()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._respond(200, "alive\n")
            return
        status = self.server.get_status()
        match path:
            case "/readyz":
                self._respond(503 if status.unready else 200, f"{status.unready or 'ready'}\n")
            case "/drainz":
                doing = "drained" if status.is_drained else "in service"
                self._respond(503 if status.is_drained else 200, f"{doing}\n")
            case "/metrics":
                self._respond(200, to_prometheus(status), METRICS)
            case _:
                self._respond(404, "expected /healthz, /readyz, /drainz or /metrics\n")

    do_HEAD = do_GET

    def _respond(self, status: int, text: str, content_type: str = TEXT) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "forewarn-agent"

    def log_message(self, format: str, *args: object) -> None:
        """One log line per change, never per request."""
