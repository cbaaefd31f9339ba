"""The Unix socket on which local programs register, are notified, and answer. `forewarn agent
status` uses it too. docs/agent.md describes the protocol: lines of JSON in both directions.

Each connection has a thread, which only reads. Writes never block: what does not fit into the
kernel's buffer ends the connection. So a program that does not read, sends garbage or disconnects
affects only its own connection, and the agent no longer waits for it.
"""

import contextlib
import json
import os
import select
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from forewarn.agent.fact_log import log
from forewarn.agent.limited_server import LimitedThreadingMixIn
from forewarn.agent.participants import Participants
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event
from forewarn.errors import Error, Invalid, Unavailable

PROGRAMS_MAX = 64
CONNECTIONS_MAX = PROGRAMS_MAX + 8
"""So that `status` works when all programs are connected."""
LINE_BYTES_MAX = 4096
UNREAD_BYTES_MAX = 512 * 1024
"""The kernel's buffer for what a program has not read. A line has at most about 200 KiB."""
REGISTER_SECONDS_MAX = 10.0
CHECK_SECONDS = 1.0
MODE = 0o660

GetStatus = Callable[[], Mapping[str, object]]


class ParticipantSocket:
    """The socket and its programs. `begin`, `all_ready` and `names` may be called from any thread
    between `open` and `close`.

    `resumed` are the keys of events that an earlier process was preparing for.
    """

    def __init__(
        self,
        path: Path,
        get_status: GetStatus,
        *,
        resumed: Iterable[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.monotonic = monotonic
        self.get_status = get_status
        self._path = path
        self._resumed = frozenset(resumed)
        self._lock = threading.Lock()
        self._programs: dict[ProgramConnection, str] = {}
        self._connections: set[ProgramConnection] = set()

    def open(self) -> None:
        """Raises Unavailable if another agent has the socket, or it cannot be created."""
        self._server = _Server(self, self._path)
        self._participants = Participants(resumed=self._resumed, since=self.monotonic())
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="forewarn-agent-socket", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Remove the socket file, unless another process has replaced it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            connection.hang_up()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._server.inode:
                self._path.unlink()

    def begin(self, event: Event, phase: WorkflowPhase, deadline: float) -> None:
        """Notify all programs that are registered, and those that register before it is over."""
        now = self.monotonic()
        with self._lock:
            notice = self._participants.begin(
                event, phase, deadline=deadline, programs=self._programs, now=now
            )
            for program in self._programs:
                program.send(notice.to_json(now))

    def all_ready(self, event_id: str) -> bool:
        with self._lock:
            return self._participants.all_ready(event_id, self.monotonic())

    def names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._programs.values()))

    def connected(self, connection: "ProgramConnection") -> None:
        with self._lock:
            self._connections.add(connection)

    def disconnected(self, connection: "ProgramConnection") -> None:
        with self._lock:
            self._connections.discard(connection)
            self._participants.leave(connection)
            name = self._programs.pop(connection, None)
        if name is not None:
            log.info("a program disconnected", application=name)

    def is_registered(self, connection: "ProgramConnection") -> bool:
        return connection in self._programs

    def respond(self, connection: "ProgramConnection", line: bytes) -> None:
        """Handle one line. Sends under the lock, so responses and notices keep their order."""
        try:
            request = _parse(line)
            if "status" in request:
                status = self.get_status()
                with self._lock:
                    connection.send({"status": status})
            elif "register" in request:
                self._register(connection, _parse_name(request["register"]))
            else:
                with self._lock:
                    now = self.monotonic()
                    connection.send(self._participants.answer(connection, request, now))
        except Error as error:
            self.reject(connection, error.message)

    def reject(self, connection: "ProgramConnection", message: str) -> None:
        with self._lock:
            connection.send({"problem": message})

    def _register(self, connection: "ProgramConnection", name: str) -> None:
        with self._lock:
            is_new = connection not in self._programs
            if is_new and len(self._programs) >= PROGRAMS_MAX:
                raise Unavailable(f"{PROGRAMS_MAX} programs have registered, which is the limit")
            self._programs[connection] = name
            connection.send({"registered": name})
            now = self.monotonic()
            for notice in self._participants.join(connection, now) if is_new else ():
                connection.send(notice.to_json(now))
        if is_new:
            log.info("a program registered", application=name)


class ProgramConnection(socketserver.BaseRequestHandler):
    """States:  CONNECTED -> REGISTERED -> CLOSED

    CONNECTED ends after REGISTER_SECONDS_MAX. Any state ends with a line that is too long, a
    response that does not fit into the buffer, or the program's end.
    """

    server: "_Server"
    request: socket.socket

    def setup(self) -> None:
        self._owner = self.server.owner
        self._since = self._owner.monotonic()
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES_MAX)
        self._owner.connected(self)

    def handle(self) -> None:
        buffer = b""
        while chunk := self._receive():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if line.strip():
                    self._owner.respond(self, line)
            if len(buffer) > LINE_BYTES_MAX:
                limit = f"expected at most {LINE_BYTES_MAX} bytes"
                self._owner.reject(self, f"the line is too long; {limit}")
                return

    def finish(self) -> None:
        self._owner.disconnected(self)

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

    def _receive(self) -> bytes:
        """The next bytes, or b"" when the connection is over."""
        readable = select.poll()
        readable.register(self.request, select.POLLIN)
        try:
            while self._owner.is_registered(self) or self._may_register():
                if readable.poll(CHECK_SECONDS * 1000):
                    return self.request.recv(LINE_BYTES_MAX)
        except OSError:
            pass
        return b""

    def _may_register(self) -> bool:
        return self._owner.monotonic() - self._since <= REGISTER_SECONDS_MAX


class _Server(LimitedThreadingMixIn, socketserver.UnixStreamServer):
    connections_max = CONNECTIONS_MAX
    request_queue_size = 2 * CONNECTIONS_MAX

    def __init__(self, owner: ParticipantSocket, path: Path) -> None:
        """The socket is created beside its path and moved there, which replaces a stale one."""
        _check_free(path)
        self.owner = owner
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            super().__init__(str(new), ProgramConnection)
            new.replace(path)
            self.inode = path.stat().st_ino
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            reason = error.strerror or error
            raise Unavailable(f"cannot create the socket {path}: {reason}") from error

    def server_bind(self) -> None:
        """Set the mode before the socket listens, so that no other user can ever connect."""
        super().server_bind()
        os.chmod(str(self.server_address), MODE)


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


def _parse_name(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= 100:
        expected = "the program's name, 1 to 100 printable characters"
        raise Invalid(f"register is {value!r:.60}; expected {expected}")
    return value


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
