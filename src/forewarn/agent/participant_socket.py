"""The Unix socket on which local programs register, are notified, and answer. `forewarn agent
status` uses it too. docs/agent.md describes the protocol: lines of JSON in both directions.

Each connection has a thread, which only reads. Writes to a registered program never block: what
does not fit into the kernel's buffer ends the connection. So a program that does not read, sends
garbage or disconnects affects only its own connection, and the agent no longer waits for it. The
status, which may have megabytes, is written by the thread of its connection, within the time limit
of a connection without a program.
"""

import json
import socket
import socketserver
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forewarn.agent.limited_server import LimitedServer, hang_up, time_limit
from forewarn.agent.participants import PROGRAMS_MAX, Participants
from forewarn.errors import Error, Invalid, Unavailable

CONNECTIONS_MAX = PROGRAMS_MAX + 8
"""So that `status` works when all programs are connected."""
LINE_BYTES_MAX = 4096
UNREAD_BYTES_MAX = 512 * 1024
"""The kernel's buffer for what a program has not read. A line has at most about 200 KiB."""
STATUS_BYTES_MAX = 64 * 1024 * 1024
"""Documents have at most 1 MiB, and a status has the events of some of them."""
MODE = 0o660

GetStatus = Callable[[], Mapping[str, object]]


class ParticipantSocket(LimitedServer):
    """The socket of these programs. It listens from the start.

    Raises Unavailable if another agent has the socket, or it cannot be created.
    """

    address_family = getattr(socket, "AF_UNIX", socket.AF_UNSPEC)  # Windows has no such socket
    connections_max = CONNECTIONS_MAX
    request_queue_size = 2 * CONNECTIONS_MAX
    register_seconds_max = 10.0

    def __init__(self, path: Path, programs: Participants, get_status: GetStatus) -> None:
        self.programs = programs
        self.get_status = get_status
        self._path = path
        _check_free(path)
        address: Any = str(path)  # of a Unix socket; the base class is typed for TCP
        super().__init__(address, ProgramConnection, bind_and_activate=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # left by a process that was killed
            self.server_bind()
            path.chmod(MODE)  # before it listens, so that no other user can ever connect
            self.server_activate()
        except OSError as error:
            self.server_close()
            reason = error.strerror or error
            raise Unavailable(f"cannot create the socket {path}: {reason}") from error
        self.start("forewarn-agent-socket")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)  # first: after `stop`, it may be the next agent's
        self.stop()


class ProgramConnection(socketserver.StreamRequestHandler):
    """States:  CONNECTED -> REGISTERED -> CLOSED

    CONNECTED ends after `register_seconds_max`. Any state ends with a line that is too long, a
    response that does not fit into the buffer, or the program's end.
    """

    server: ParticipantSocket
    request: socket.socket

    def setup(self) -> None:
        super().setup()
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES_MAX)
        self._lock = threading.Lock()

    def handle(self) -> None:
        with time_limit(self.request, self.server.register_seconds_max) as timer:
            while line := self.rfile.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX and not line.endswith(b"\n"):
                    limit = f"expected at most {LINE_BYTES_MAX} bytes"
                    self.send({"problem": f"the line is too long; {limit}"})
                    break
                if line.strip():
                    self._respond(line)
                if self in self.server.programs.programs:
                    timer.cancel()

    def finish(self) -> None:
        self.server.programs.leave(self)
        super().finish()

    def _respond(self, line: bytes) -> None:
        try:
            request = _parse(line)
            if "status" in request:
                self._send_status()
            else:
                self.server.programs.handle(self, request)
        except Error as error:
            self.send({"problem": error.message})

    def _send_status(self) -> None:
        """A registered program gets notices from other threads, which must not wait for it."""
        status = {"status": self.server.get_status()}
        if self in self.server.programs.programs:
            self.send(status)
        else:
            self.request.sendall(_encode(status))

    def send(self, message: Mapping[str, object]) -> None:
        """From any thread."""
        line = _encode(message)
        with self._lock:
            try:
                is_complete = self.request.send(line, socket.MSG_DONTWAIT) == len(line)
            except OSError:
                is_complete = False
        if not is_complete:
            hang_up(self.request)


def request_status(path: Path, *, timeout_seconds: float = 5.0) -> dict[str, object]:
    """The status of the agent at this socket. Raises Unavailable if none responds."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(str(path))
            connection.sendall(b'{"status": true}\n')
            with connection.makefile("rb") as responses:
                line = responses.readline(STATUS_BYTES_MAX)
    except OSError as error:
        raise Unavailable(f"no agent responds at {path}: {error.strerror or error}") from error
    if not line.endswith(b"\n"):
        problem = f"the status is incomplete after {len(line)} bytes"
        raise Unavailable(f"the agent at {path} did not respond in full: {problem}")
    try:
        response = json.loads(line)
    except (ValueError, RecursionError):
        response = line[:100]
    status = response.get("status") if isinstance(response, dict) else None
    if not isinstance(status, dict):
        raise Unavailable(f"{path} is not an agent's socket: its response is {response!r:.100}")
    return status


def _encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


def _parse(line: bytes) -> dict[str, object]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise Invalid(f"the line is {line[:60]!r}; expected a JSON object")
    return request


def _check_free(path: Path) -> None:
    """Only a socket that no agent serves any more may be replaced."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Invalid(f"socket is {path}, which is another kind of file; expected a free path")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        raise Unavailable(f"cannot use the socket {path}: {error.strerror or error}") from error
    raise Unavailable(f"cannot use the socket {path}: another agent responds there")
