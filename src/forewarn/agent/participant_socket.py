"""The Unix socket on which local programs register, are notified, and answer. `forewarn agent
status` uses it too. docs/agent.md describes the protocol: lines of JSON in both directions.

Each connection has a thread, which only reads. Writes never block: what does not fit into the
kernel's buffer ends the connection. So a program that does not read, sends garbage or disconnects
affects only its own connection, and the agent no longer waits for it.
"""

import contextlib
import json
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from forewarn.agent.limited_server import LimitedServer
from forewarn.agent.participants import PROGRAMS_MAX, LocalPrograms, Participants
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event
from forewarn.errors import Error, Invalid, Unavailable
from forewarn.log import log

CONNECTIONS_MAX = PROGRAMS_MAX + 8
"""So that `status` works when all programs are connected."""
LINE_BYTES_MAX = 4096
UNREAD_BYTES_MAX = 512 * 1024
"""The kernel's buffer for what a program has not read. A line has at most about 200 KiB."""
REGISTER_SECONDS_MAX = 10.0
MODE = 0o660

GetStatus = Callable[[], Mapping[str, object]]


class ParticipantSocket(LimitedServer, LocalPrograms):
    """The socket and its programs. `begin`, `all_ready` and `names` may be called from any thread
    between `open` and `close`.

    `resumed` are the keys of events that an earlier process was preparing for.
    """

    address_family = socket.AF_UNIX
    connections_max = CONNECTIONS_MAX
    request_queue_size = 2 * CONNECTIONS_MAX

    def __init__(
        self,
        path: Path,
        get_status: GetStatus,
        *,
        resumed: Iterable[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
        register_seconds_max: float = REGISTER_SECONDS_MAX,
    ) -> None:
        self.register_seconds_max = register_seconds_max
        self._monotonic = monotonic
        self._get_status = get_status
        self._path = path
        self._participants = Participants(resumed=resumed, since=monotonic())
        self._lock = threading.Lock()
        self._connections: set[ProgramConnection] = set()
        address: Any = str(path)  # of a Unix socket; the base class is typed for TCP
        super().__init__(address, ProgramConnection, bind_and_activate=False)

    def open(self) -> None:
        """Raises Unavailable if another agent has the socket, or it cannot be created."""
        try:
            _check_free(self._path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)  # left by a process that was killed
            self.server_bind()
            self._path.chmod(MODE)  # before it listens, so that no other user can ever connect
            self.server_activate()
        except OSError as error:
            self.server_close()
            reason = error.strerror or error
            raise Unavailable(f"cannot create the socket {self._path}: {reason}") from error
        except Error:
            self.server_close()
            raise
        self.start("forewarn-agent-socket")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)  # first: after `stop`, it may be the next agent's
        self.stop()
        with self._lock:
            for connection in self._connections:
                connection.hang_up()

    def begin(self, event: Event, phase: WorkflowPhase, deadline: float) -> None:
        """Notify all programs that are registered, and those that register before it is over."""
        now = self._monotonic()
        with self._lock:
            notice = self._participants.begin(event, phase, deadline=deadline, now=now)
            for connection in self._connections.intersection(self._participants.programs):
                connection.send(notice)

    def all_ready(self, event_id: str) -> bool:
        with self._lock:
            return self._participants.all_ready(event_id, self._monotonic())

    def names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._participants.programs.values()))

    def connected(self, connection: "ProgramConnection") -> None:
        with self._lock:
            self._connections.add(connection)

    def disconnected(self, connection: "ProgramConnection") -> None:
        with self._lock:
            self._connections.discard(connection)
            name = self._participants.leave(connection)
        if name is not None:
            log.info("a program disconnected", application=name)

    def is_registered(self, connection: "ProgramConnection") -> bool:
        return connection in self._participants.programs

    def respond(self, connection: "ProgramConnection", line: bytes) -> None:
        """Handle one line. Sends under the lock, so responses and notices keep their order."""
        try:
            request = _parse(line)
            if "status" in request:
                status = self._get_status()
                with self._lock:
                    connection.send({"status": status})
                return
            is_new = "register" in request and not self.is_registered(connection)
            with self._lock:
                for message in self._participants.handle(connection, request, self._monotonic()):
                    connection.send(message)
            if is_new:
                log.info("a program registered", application=request["register"])
        except Error as error:
            with self._lock:
                connection.send({"problem": error.message})


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
        self.server.connected(self)

    def handle(self) -> None:
        timer = threading.Timer(self.server.register_seconds_max, self._end_unregistered)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(OSError):  # the program has gone
            while line := self.rfile.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX and not line.endswith(b"\n"):
                    limit = f"expected at most {LINE_BYTES_MAX} bytes"
                    self.send({"problem": f"the line is too long; {limit}"})
                    break
                if line.strip():
                    self.server.respond(self, line)
        timer.cancel()

    def finish(self) -> None:
        self.server.disconnected(self)
        super().finish()

    def send(self, message: Mapping[str, object]) -> None:
        line = json.dumps(message, default=str).encode() + b"\n"
        try:
            is_complete = self.request.send(line, socket.MSG_DONTWAIT) == len(line)
        except OSError:
            is_complete = False
        if not is_complete:
            self.hang_up()

    def hang_up(self) -> None:
        """From any thread: the reading thread sees the end of the connection."""
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_RDWR)

    def _end_unregistered(self) -> None:
        if not self.server.is_registered(self):
            self.hang_up()


def request_status(path: Path, *, timeout_seconds: float = 5.0) -> dict[str, object]:
    """The status of the agent at this socket. Raises Unavailable if none responds."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(str(path))
            connection.sendall(b'{"status": true}\n')
            with connection.makefile("rb") as responses:
                response = json.loads(responses.readline(UNREAD_BYTES_MAX))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Unavailable(f"no agent responds at {path}: {reason}") from error
    status = response.get("status") if isinstance(response, dict) else None
    if not isinstance(status, dict):
        raise Unavailable(f"{path} is not an agent's socket: its response is {response!r:.100}")
    return status


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
