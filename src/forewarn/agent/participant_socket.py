"""A Unix socket on which local programs take part: they register, are told, and answer. `forewarn
agent status` asks here too.

Lines of JSON, both ways; docs/agent.md has the whole protocol. One thread serves everybody and
never waits for anybody: a program that does not read, says nonsense or goes away harms only itself,
and who goes away is no longer waited for.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forewarn.agent.participants import Gathering, told
from forewarn.agent.step import Phase
from forewarn.client import Event
from forewarn.errors import Error, Invalid, Unavailable

log = logging.getLogger("forewarn.agent")

PROGRAMS_MAX = 64
CONNECTIONS_MAX = PROGRAMS_MAX + 8
"""So many more that `status` is answered when all places of programs are taken."""
LINE_BYTES_MAX = 4096
QUEUE_BYTES_MAX = 256 * 1024
SILENT_SECONDS_MAX = 10.0
"""Who has connected and does not say what for, is sent away."""
LOOK_SECONDS = 1.0
REST_SECONDS = 0.1
MODE = 0o660

Status = Callable[[], Mapping[str, object]]


@dataclass(slots=True, eq=False)
class Caller:
    """One connection.

    `name` is "" until it has registered. What it is sent is queued under the turn, from any thread.
    """

    connection: socket.socket
    since: float
    name: str = ""
    received: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    is_leaving: bool = False


class Applications:
    """The socket and who is on it. `begin` and `all_ready` may be called from any thread, between
    `open` and `close`.

    `resumed` are the keys of events that an earlier life was preparing for.
    """

    def __init__(
        self,
        path: Path,
        status: Status,
        *,
        resumed: Iterable[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._status = status
        self._monotonic = monotonic
        self._turn = threading.Lock()
        self._resumed = frozenset(resumed)
        self._callers: set[Caller] = set()
        self._is_closed = False

    def open(self) -> None:
        """First.

        Unavailable if another agent has the socket, or it cannot be made; then there is nothing to
        close.
        """
        self._listener = _listen(self._path)
        self._gathering = Gathering(resumed=self._resumed, since=self._monotonic())
        self._inode = self._path.stat().st_ino
        self._bell, self._ear = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(
            target=self._serve, name="forewarn-agent-socket", daemon=True
        )
        for one in (self._listener, self._bell, self._ear):
            one.settimeout(0)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._thread.start()

    def begin(self, event: Event, phase: Phase, deadline: float) -> None:
        """Tell everybody who registered, now or while it lasts."""
        now = self._monotonic()
        with self._turn:
            programs = [caller for caller in self._callers if caller.name]
            self._gathering.begin(event, phase, deadline=deadline, programs=programs, now=now)
            for caller in programs:
                self._send(caller, told(self._gathering.calls[event.key], now))
        self._ring()

    def all_ready(self, event_id: str) -> bool:
        with self._turn:
            return self._gathering.all_ready(event_id, self._monotonic())

    def names(self) -> tuple[str, ...]:
        """Who is registered."""
        with self._turn:
            return tuple(sorted(caller.name for caller in self._callers if caller.name))

    def close(self) -> None:
        """Everybody is sent away, and the file is taken away unless another has put its own there."""
        self._is_closed = True
        self._ring()
        self._thread.join()
        for caller in tuple(self._callers):
            self._dismiss(caller)
        self._selector.close()
        for one in (self._listener, self._bell, self._ear):
            one.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already, or all is over
            self._bell.send(b"!")

    def _serve(self) -> None:
        while not self._is_closed:  # ends when it is closed
            try:
                self._take_turn()
            except Exception:
                log.exception("the socket for applications broke; it goes on")
                time.sleep(LOOK_SECONDS)

    def _take_turn(self) -> None:
        """Who has something to read is not listened to: so nobody can ask faster than it reads."""
        for caller in tuple(self._callers):
            wanted = selectors.EVENT_WRITE if caller.outgoing else selectors.EVENT_READ
            self._selector.modify(caller.connection, wanted, caller)
        has_strangers = any(not caller.name for caller in self._callers)
        for key, _ in self._selector.select(LOOK_SECONDS if has_strangers else None):
            if key.data is not None:
                self._bear(key.data)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._ear.recv(4096)
        before = self._monotonic() - SILENT_SECONDS_MAX
        for caller in tuple(self._callers):
            if (caller.is_leaving and not caller.outgoing) or (
                not caller.name and caller.since < before
            ):
                self._dismiss(caller)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (
            OSError
        ):  # it has gone again, or we may open no more files: then it would call at once again
            time.sleep(REST_SECONDS)
            return
        if len(self._callers) >= CONNECTIONS_MAX:
            connection.close()
            return
        connection.settimeout(0)
        caller = Caller(connection, self._monotonic())
        self._selector.register(connection, selectors.EVENT_READ, caller)
        with self._turn:
            self._callers.add(caller)

    def _dismiss(self, caller: Caller) -> None:
        with self._turn:
            self._callers.discard(caller)
            self._gathering.leave(caller)
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller.name:
            log.info("an application has gone", extra={"facts": {"application": caller.name}})

    def _bear(self, caller: Caller) -> None:
        """What breaks with one caller costs only that one its place."""
        try:
            self._attend(caller)
        except Exception:
            log.exception(
                "an application could not be answered",
                extra={"facts": {"application": caller.name}},
            )
            self._dismiss(caller)

    def _attend(self, caller: Caller) -> None:
        try:
            if caller.outgoing:
                with self._turn:
                    del caller.outgoing[: caller.connection.send(caller.outgoing)]
                return
            part = caller.connection.recv(LINE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._dismiss(caller)
            return
        caller.received += part
        *lines, rest = caller.received.split(b"\n")
        caller.received = rest
        for line in lines:
            if line.strip():
                self._hear(caller, bytes(line))
        if len(rest) > LINE_BYTES_MAX:
            self._tell(
                caller,
                {"problem": f"the line is too long; expected at most {LINE_BYTES_MAX} bytes"},
            )
            caller.is_leaving = True

    def _hear(self, caller: Caller, line: bytes) -> None:
        try:
            said = _read(line)
            if "status" in said:
                self._tell(caller, {"status": self._status()})
            elif "register" in said:
                self._register(caller, _name(said["register"]))
            else:
                with self._turn:
                    answer = self._gathering.answer(caller, said, self._monotonic())
                self._tell(caller, answer)
        except Error as problem:
            self._tell(caller, {"problem": problem.message})

    def _register(self, caller: Caller, name: str) -> None:
        with self._turn:
            if not caller.name and sum(bool(other.name) for other in self._callers) >= PROGRAMS_MAX:
                raise Unavailable(
                    f"{PROGRAMS_MAX} programs have registered; that is all there is place for"
                )
            is_new, caller.name = not caller.name, name
            self._send(caller, {"registered": name})
            now = self._monotonic()
            for call in self._gathering.join(caller, now) if is_new else ():
                self._send(caller, told(call, now))
        if is_new:
            log.info("an application has registered", extra={"facts": {"application": name}})

    def _tell(self, caller: Caller, said: Mapping[str, object]) -> None:
        with self._turn:
            self._send(caller, said)

    def _send(self, caller: Caller, said: Mapping[str, object]) -> None:
        """Queue a line. Who has let too much pile up loses it all, and its place."""
        caller.outgoing += json.dumps(said, default=str).encode() + b"\n"
        if len(caller.outgoing) > QUEUE_BYTES_MAX:
            caller.outgoing.clear()
            caller.is_leaving = True


def ask_status(path: Path, *, timeout_seconds: float = 5.0) -> dict[str, object]:
    """What the agent at this socket says of itself. Unavailable if none answers."""
    _need_unix(path)
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(timeout_seconds)
            asking.connect(str(path))
            asking.sendall(b'{"status": true}\n')
            with asking.makefile("rb") as answers:
                said = json.loads(answers.readline(QUEUE_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"no agent answers at {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    status = said.get("status") if isinstance(said, dict) else None
    if not isinstance(status, dict):
        raise Unavailable(f"{path} is no agent's socket: it answered {said!r:.100}")
    return status


def _read(line: bytes) -> dict[str, object]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise Invalid(f"the line is {line[:60]!r}; expected an object in JSON")
    return said


def _name(said: object) -> str:
    if not isinstance(said, str) or not said.isprintable() or not 0 < len(said) <= 100:
        raise Invalid(
            f"register is {said!r:.60}; expected the program's name, 1 to 100 printable characters"
        )
    return said


def _listen(path: Path) -> socket.socket:
    """A socket made beside its place and moved there when nobody but its group can call: what is
    stale is replaced at once.
    """
    _need_unix(path)
    _refuse_if_taken(path)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        listener.bind(str(new))
        new.chmod(MODE)
        listener.listen(2 * CONNECTIONS_MAX)
        new.replace(path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise Unavailable(f"the socket {path} cannot be made: {error.strerror or error}") from error
    return listener


def _refuse_if_taken(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Invalid(
                f"socket is {path}, where something else is; expected the path of a socket, or of nothing yet"
            )
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(1.0)
            asking.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        raise Unavailable(f"the socket {path} cannot be used: {error.strerror or error}") from error
    raise Unavailable(f"the socket {path} cannot be had: another agent answers there")


def _need_unix(path: Path, platform: str = sys.platform) -> None:
    if platform == "win32" or not hasattr(socket, "AF_UNIX"):
        raise Invalid(
            f"socket is {path}; Windows has no such sockets for Python: leave it out there"
        )
