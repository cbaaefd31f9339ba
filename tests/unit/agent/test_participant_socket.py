"""The socket for local programs, over real Unix sockets.

The clock is set by the test; tests wait only for lines.
"""

import json
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forewarn.agent.participant_socket import (
    CONNECTIONS_MAX,
    LINE_BYTES_MAX,
    ParticipantSocket,
    request_status,
)
from forewarn.agent.participants import PROGRAMS_MAX, Participants
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event
from forewarn.errors import Invalid, Unavailable

REBOOT = Event("E1", "Reboot", "Scheduled", resources=("web-0",))


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Program:
    """A local program on the socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")

    def send(self, line: bytes) -> None:
        self._socket.sendall(line)

    def send_json(self, **message: object) -> None:
        self.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, object] | None:
        """The next line, or None when the connection is closed."""
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        response: dict[str, object] | None = json.loads(line) if line else None
        return response

    def ask(self, **message: object) -> dict[str, object] | None:
        self.send_json(**message)
        return self.receive()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def path() -> Iterator[Path]:
    """Short: the name of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "socket")


@contextmanager
def serving(
    path: Path,
    time: Time,
    get_status: Callable[[], dict[str, object]] = lambda: {"name": "web-0"},
    *,
    resumed: tuple[str, ...] = (),
    kind: type[ParticipantSocket] = ParticipantSocket,
) -> Iterator[Participants]:
    programs = Participants(resumed=resumed, monotonic=time)
    opened = kind(path, programs, get_status)
    try:
        yield programs
    finally:
        opened.close()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def programs(path: Path, time: Time) -> Iterator[Participants]:
    with serving(path, time) as opened:
        yield opened


def settle(path: Path) -> None:
    """When a later caller was answered twice, what came before it has been seen to."""
    request_status(path)
    request_status(path)


def test_program_is_notified_and_awaited_until_ready(path: Path, programs: Participants) -> None:
    with Program(path) as program:
        assert program.ask(register="db") == {"registered": "db"}
        programs.begin(REBOOT, WorkflowPhase.PREPARE, 1810.0)
        notice = program.receive()

        assert notice == {
            "event": {
                "id": "E1",
                "type": "Reboot",
                "status": "Scheduled",
                "source": "",
                "resources": ["web-0"],
                "not_before": None,
                "duration_seconds": -1,
                "description": "",
            },
            "phase": "prepare",
            "seconds_left": 810.0,
        }
        assert not programs.all_ready("E1")
        assert program.ask(ready="E1") == {"ready": "E1"}
        assert programs.all_ready("E1")


def test_program_can_extend_its_time(path: Path, time: Time, programs: Participants) -> None:
    with Program(path) as program:
        program.ask(register="db")
        programs.begin(REBOOT, WorkflowPhase.PREPARE, 1810.0)
        program.receive()

        assert program.ask(more="E1", seconds=60) == {"more": "E1", "seconds": 60.0}
        time.now += 59
        assert not programs.all_ready("E1")
        time.now += 1
        assert programs.all_ready("E1")


def test_disconnected_program_is_not_awaited(path: Path, programs: Participants) -> None:
    """A crashed program must not cost the VM its notice."""
    with Program(path) as program:
        program.ask(register="db")
        programs.begin(REBOOT, WorkflowPhase.PREPARE, 1810.0)
        assert not programs.all_ready("E1")
    settle(path)

    assert programs.all_ready("E1")
    assert programs.names() == ()


def test_late_program_is_notified(path: Path, programs: Participants) -> None:
    programs.begin(REBOOT, WorkflowPhase.PREPARE, 1810.0)
    with Program(path) as program:
        program.ask(register="db")
        notice = program.receive()

        assert notice is not None
        assert notice["phase"] == "prepare"
        assert not programs.all_ready("E1")


def test_registering_twice_changes_nothing(path: Path, programs: Participants) -> None:
    """And it is not notified twice."""
    programs.begin(REBOOT, WorkflowPhase.PREPARE, 1810.0)
    with Program(path) as program:
        program.ask(register="db")
        program.receive()

        assert program.ask(register="db") == {"registered": "db"}
        assert program.ask(ready="E1") == {"ready": "E1"}
        assert programs.names() == ("db",)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"hello\n", "expected a JSON object"),
        (b"[1]\n", "expected a JSON object"),
        (b"[" * 4000 + b"\n", "expected a JSON object"),
        (b"\xff\xfe\n", "expected a JSON object"),
        (b'{"register": ""}\n', "expected the program's name"),
        (b'{"register": 7}\n', "expected the program's name"),
        (b'{"register": "a\\nb"}\n', "expected the program's name"),
        (b"{}\n", "expected register, ready, more or status"),
    ],
)
def test_invalid_line_gets_an_error_and_the_connection_stays(
    path: Path, programs: Participants, line: bytes, problem: str
) -> None:
    with Program(path) as program:
        program.send(line)
        response = program.receive()

        assert response is not None
        assert problem in str(response["problem"])
        assert program.ask(register="db") == {"registered": "db"}


def test_line_without_an_end_is_rejected(path: Path, programs: Participants) -> None:
    """A program cannot fill the agent's memory."""
    with Program(path) as program:
        program.send(b"x" * (LINE_BYTES_MAX + 1))

        assert program.receive() == {
            "problem": f"the line is too long; expected at most {LINE_BYTES_MAX} bytes"
        }
        assert program.receive() is None


def test_line_may_come_in_parts(path: Path, programs: Participants) -> None:
    with Program(path) as program:
        program.send(b'{"regis')
        settle(path)
        program.send(b'ter": "db"}\n\n')

        assert program.receive() == {"registered": "db"}


def test_program_that_does_not_read_is_disconnected(path: Path, programs: Participants) -> None:
    """Neither the agent nor the other programs notice."""
    with Program(path) as silent, Program(path) as other:
        silent.ask(register="silent")
        other.ask(register="other")
        event = Event("E1", "Reboot", "Scheduled", description="x" * 100_000)
        for _ in range(300):  # lines of 4 KiB: the system takes some, and 256 KiB wait
            programs.begin(event, WorkflowPhase.PREPARE, 1810.0)
            notice = other.receive()
            assert notice is not None
            assert notice["phase"] == "prepare"
        settle(path)

        assert programs.names() == ("other",)
        other.ask(ready="E1")
        assert programs.all_ready("E1")


def test_65th_program_is_rejected_and_status_still_works(
    path: Path, programs: Participants
) -> None:
    connections = [Program(path) for _ in range(PROGRAMS_MAX + 1)]
    try:
        answers = [program.ask(register=f"p{number}") for number, program in enumerate(connections)]

        assert answers[-2] == {"registered": "p63"}
        assert answers[-1] == {"problem": "64 programs have registered, which is the limit"}
        assert request_status(path) == {"name": "web-0"}
    finally:
        for program in connections:
            program.close()


def test_connections_over_the_limit_are_closed(path: Path, programs: Participants) -> None:
    connections = [Program(path) for _ in range(CONNECTIONS_MAX)]
    try:
        for program in connections[:PROGRAMS_MAX]:
            program.ask(register="p")
        with Program(path) as late:
            assert late.receive() is None
        assert connections[0].ask(register="p") == {"registered": "p"}
    finally:
        for program in connections:
            program.close()


class Impatient(ParticipantSocket):
    register_seconds_max = 0.2


def test_connection_that_does_not_register_is_closed(path: Path, time: Time) -> None:
    with (
        serving(path, time, kind=Impatient),
        Program(path) as silent,
        Program(path) as registered,
    ):
        registered.ask(register="db")
        assert silent.receive() is None
        assert registered.ask(register="db") == {"registered": "db"}


def test_status_is_returned(path: Path, programs: Participants) -> None:
    assert request_status(path) == {"name": "web-0"}


@pytest.mark.parametrize("size", [600_000, 8_000_000])
def test_large_status_is_returned_in_full(path: Path, time: Time, size: int) -> None:
    """A document of 606 KB, which the client accepts, once made `agent status` fail."""
    large: dict[str, object] = {"workflows": ["x" * 1000] * (size // 1000)}
    with serving(path, time, lambda: large):
        assert request_status(path) == large


def test_status_for_a_client_that_does_not_read_is_dropped(path: Path, time: Time) -> None:
    """Its thread must not stay forever."""

    has_ended = threading.Event()

    class Hurried(ParticipantSocket):
        register_seconds_max = 0.2

        def shutdown_request(self, request: object) -> None:
            super().shutdown_request(request)
            has_ended.set()

    with serving(path, time, lambda: {"x": "x" * 8_000_000}, kind=Hurried), Program(path) as idle:
        idle.send_json(status=True)

        assert has_ended.wait(20)


def test_incomplete_status_is_reported(path: Path) -> None:
    def respond(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b'{"status"')

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=respond, args=(listening,))
        thread.start()
        with pytest.raises(Unavailable, match=r"did not respond in full: .* after 9 bytes"):
            request_status(path)
        thread.join()


def test_status_without_an_agent_is_an_error(path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no agent responds at .*: No such file or directory"):
        request_status(path)


def test_only_owner_and_group_may_connect(path: Path, programs: Participants) -> None:
    """A program that sends `ready` can let the machine go down."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_second_agent_is_rejected(path: Path, programs: Participants) -> None:
    with pytest.raises(Unavailable, match="another agent responds there"):
        ParticipantSocket(path, Participants(), dict)

    assert request_status(path) == {"name": "web-0"}


def test_stale_socket_is_replaced(path: Path, time: Time) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(path, time):
        assert request_status(path) == {"name": "web-0"}

    assert not path.exists()


def test_closing_agent_leaves_the_socket_of_the_next_one(path: Path, time: Time) -> None:
    """The next agent starts as soon as the old one no longer listens."""
    with ExitStack() as stack:

        class Closing(ParticipantSocket):
            def stop(self) -> None:
                super().stop()
                stack.enter_context(serving(path, time))

        Closing(path, Participants(), dict).close()

        assert request_status(path) == {"name": "web-0"}


def test_regular_file_is_never_replaced(path: Path) -> None:
    """A typo must not destroy a file."""
    path.write_text("precious")
    with pytest.raises(Invalid, match="another kind of file"):
        ParticipantSocket(path, Participants(), dict)

    assert path.read_text() == "precious"


def test_path_that_is_too_long_is_rejected(path: Path) -> None:
    with pytest.raises(Unavailable, match="too long"):
        ParticipantSocket(path.with_name("x" * 200), Participants(), dict)


def test_long_description_is_cut_in_a_notification(path: Path, programs: Participants) -> None:
    """The program was once disconnected instead, and the event approved without it."""
    with Program(path) as program:
        program.ask(register="db")
        programs.begin(replace(REBOOT, description="x" * 300_000), WorkflowPhase.PREPARE, 1810.0)
        notice = program.receive()

        assert notice is not None
        assert notice["phase"] == "prepare"
        assert not programs.all_ready("E1")


def test_bug_on_one_connection_ends_only_that_one(path: Path, time: Time) -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("bug")

    with (
        serving(path, time, broken) as programs,
        Program(path) as good,
        Program(path) as bad,
    ):
        assert good.ask(register="db") == {"registered": "db"}
        assert bad.ask(status=True) is None
        assert good.ask(register="db") == {"registered": "db"}
        assert programs.names() == ("db",)


def test_after_a_restart_an_event_waits_for_programs(path: Path, time: Time) -> None:
    """The program had asked for more time when the agent was killed."""
    with serving(path, time, resumed=("E1",)) as programs:
        programs.begin(REBOOT, WorkflowPhase.PREPARE, 1810.0)
        assert not programs.all_ready("E1")
        time.now += 30
        assert programs.all_ready("E1")
