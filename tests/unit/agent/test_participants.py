"""Which programs the agent waits for. Time is an argument, so no test waits."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from forewarn.agent.participant_socket import UNREAD_BYTES_MAX
from forewarn.agent.participants import EXTENSIONS_MAX, NOTICES_MAX, Participants, PhaseNotice
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event
from forewarn.errors import Invalid, NotFound, Refused

REBOOT = Event("e1", "Reboot", "Scheduled", resources=("web-0",))


class RecordingProgram:
    """Keeps what it was sent."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, object]] = []

    def send(self, message: Mapping[str, object]) -> None:
        self.messages.append(message)


class TimedParticipants:
    """Participants whose programs have names, and whose time is an argument of each call."""

    def __init__(self, *, resumed: Iterable[str] = (), since: float = 0) -> None:
        self.now = since
        self.programs: defaultdict[str, RecordingProgram] = defaultdict(RecordingProgram)
        self.real = Participants(resumed=resumed, monotonic=lambda: self.now)

    def begin(self, event: Event, phase: WorkflowPhase, *, deadline: float, now: float) -> None:
        self.now = now
        self.real.begin(event, phase, deadline)

    def all_ready(self, event_id: str, now: float) -> bool:
        self.now = now
        return self.real.all_ready(event_id)

    def handle(
        self, program: str, request: dict[str, object], now: float
    ) -> list[Mapping[str, object]]:
        self.now = now
        self.programs[program].messages.clear()
        self.real.handle(self.programs[program], request)
        return self.programs[program].messages

    def leave(self, program: str) -> None:
        self.real.leave(self.programs[program])


def participants_of(
    *programs: str, deadline: float = 900, phase: WorkflowPhase = WorkflowPhase.PREPARE
) -> TimedParticipants:
    participants = TimedParticipants()
    for program in programs:
        participants.handle(program, {"register": program}, 0)
    participants.begin(REBOOT, phase, deadline=deadline, now=0)
    return participants


def response(
    participants: TimedParticipants, program: str, request: dict[str, object], now: float
) -> Mapping[str, object]:
    """The only response."""
    (message,) = participants.handle(program, request, now)
    return message


def test_event_waits_until_the_last_program_is_ready() -> None:
    """A program that is still writing must not lose data."""
    participants = participants_of("db", "cache")
    response(participants, "db", {"ready": "E1"}, 1)

    assert not participants.all_ready("E1", 1)
    assert response(participants, "cache", {"ready": "e1"}, 2) == {"ready": "e1"}
    assert participants.all_ready("e1", 2)


def test_silent_program_is_awaited_for_30_seconds() -> None:
    """It must not cost the VM all of its notice."""
    participants = participants_of("db")

    assert not participants.all_ready("e1", 29.9)
    assert participants.all_ready("e1", 30)


def test_no_program_is_awaited_beyond_the_deadline() -> None:
    """The time after it is for the approval."""
    participants = participants_of("db", deadline=20)

    assert response(participants, "db", {"more": "e1", "seconds": 60}, 5) == {
        "more": "e1",
        "seconds": 15,
    }
    assert not participants.all_ready("e1", 19.9)
    assert participants.all_ready("e1", 20)


def test_program_gets_the_extension_it_asks_for() -> None:
    participants = participants_of("db")
    response(participants, "db", {"more": "e1", "seconds": 100}, 10)

    assert not participants.all_ready("e1", 109)
    assert participants.all_ready("e1", 110)


def test_one_extension_is_at_most_five_minutes() -> None:
    participants = participants_of("db", deadline=9000)

    assert response(participants, "db", {"more": "e1", "seconds": 8000}, 0) == {
        "more": "e1",
        "seconds": 300,
    }


def test_short_extension_takes_nothing_away() -> None:
    """`more` can only extend."""
    participants = participants_of("db")

    assert response(participants, "db", {"more": "e1", "seconds": 1}, 0) == {
        "more": "e1",
        "seconds": 30,
    }


def test_extensions_are_limited() -> None:
    """Otherwise one program that never gets ready would decide for all."""
    participants = participants_of("db", deadline=9000)
    for _ in range(EXTENSIONS_MAX):
        response(participants, "db", {"more": "e1", "seconds": 40}, 0)

    with pytest.raises(Refused, match="this is extension 11"):
        response(participants, "db", {"more": "e1", "seconds": 40}, 0)
    assert participants.all_ready("e1", 40)


def test_late_extension_is_refused() -> None:
    """The event may have been approved by then."""
    participants = participants_of("db")

    with pytest.raises(Refused, match="time to answer for e1 is up"):
        response(participants, "db", {"more": "e1", "seconds": 40}, 30)


@pytest.mark.parametrize("seconds", [0, -1, "60", None, True, float("nan"), float("inf")])
def test_invalid_seconds_are_rejected(seconds: object) -> None:
    with pytest.raises(Invalid, match="expected a number above 0"):
        response(participants_of("db"), "db", {"more": "e1", "seconds": seconds}, 0)


def test_program_that_is_not_awaited_cannot_extend() -> None:
    """It has not registered, or is ready."""
    participants = participants_of("db")
    response(participants, "db", {"ready": "e1"}, 0)

    for stranger in ("db", "unknown"):
        with pytest.raises(Refused, match="the agent does not wait for this program"):
            response(participants, stranger, {"more": "e1", "seconds": 40}, 0)


def test_disconnected_program_is_not_awaited() -> None:
    participants = participants_of("db")
    participants.leave("db")

    assert participants.all_ready("e1", 0)


def test_late_program_is_notified_and_awaited() -> None:
    """After its own crash it still has something to save."""
    participants = participants_of()

    _, notice = participants.handle("db", {"register": "db"}, 100)
    assert (notice["phase"], notice["seconds_left"]) == ("prepare", 800)
    assert not participants.all_ready("e1", 129)
    assert participants.all_ready("e1", 130)


@pytest.mark.parametrize("phase", [WorkflowPhase.START, WorkflowPhase.RECOVER])
def test_only_prepare_waits_for_answers(phase: WorkflowPhase) -> None:
    """An event that has started cannot be delayed."""
    assert participants_of("db", phase=phase).all_ready("e1", 0)


def test_late_program_is_not_notified_of_recover() -> None:
    participants = participants_of(phase=WorkflowPhase.RECOVER)

    assert response(participants, "db", {"register": "db"}, 0) == {"registered": "db"}


def test_unknown_event_is_not_found() -> None:
    participants = participants_of("db")

    with pytest.raises(NotFound, match="unknown event 'e2'"):
        response(participants, "db", {"ready": "e2"}, 0)
    with pytest.raises(NotFound, match="unknown event 7"):
        response(participants, "db", {"ready": 7}, 0)
    assert participants.all_ready("e2", 0)


def test_unknown_request_is_rejected() -> None:
    with pytest.raises(
        Invalid, match="the line has hello; expected register, ready, more or status"
    ):
        response(participants_of("db"), "db", {"hello": 1}, 0)


def test_notices_have_a_limit() -> None:
    """Events that never end must not fill the memory."""
    participants = TimedParticipants()
    for number in range(NOTICES_MAX + 5):
        event = Event(f"e{number}", "Reboot", "Scheduled")
        participants.begin(event, WorkflowPhase.PREPARE, deadline=900, now=0)

    assert len(participants.real.notices) == NOTICES_MAX


def test_huge_number_of_seconds_is_five_minutes_too() -> None:
    """Python's integers are unbounded, its floats are not."""
    assert response(participants_of("db"), "db", {"more": "e1", "seconds": 10**400}, 0) == {
        "more": "e1",
        "seconds": 300,
    }


def test_resumed_event_waits_for_programs_to_reconnect() -> None:
    """The agent's restart ended their connections."""
    participants = TimedParticipants(resumed={REBOOT.key}, since=100)
    participants.begin(REBOOT, WorkflowPhase.PREPARE, deadline=900, now=101)

    assert not participants.all_ready("e1", 129.9)
    assert participants.all_ready("e1", 130)


def test_reconnected_program_is_awaited() -> None:
    participants = TimedParticipants(resumed={REBOOT.key}, since=100)
    participants.begin(REBOOT, WorkflowPhase.PREPARE, deadline=900, now=101)
    participants.handle("db", {"register": "db"}, 110)
    response(participants, "db", {"more": "e1", "seconds": 60}, 110)

    assert not participants.all_ready("e1", 169)
    assert participants.all_ready("e1", 170)


def test_resumed_event_does_not_wait_beyond_its_deadline() -> None:
    participants = TimedParticipants(resumed={REBOOT.key}, since=100)
    participants.begin(REBOOT, WorkflowPhase.PREPARE, deadline=105, now=101)

    assert participants.all_ready("e1", 105)


def test_new_event_does_not_wait_for_unknown_programs() -> None:
    participants = TimedParticipants(resumed={"E2"}, since=100)
    participants.begin(REBOOT, WorkflowPhase.PREPARE, deadline=900, now=101)

    assert participants.all_ready("e1", 101)


def test_notice_always_fits_into_the_socket_buffer() -> None:
    """A line that does not fit would disconnect the program."""
    long = "\x01" * 300_000
    event = Event(
        long,
        long,
        long,
        long,
        resources=(long, *(f"web-{number}" for number in range(100_000))),
        description=long,
    )
    line = json.dumps(PhaseNotice(event, WorkflowPhase.PREPARE, 900).to_json(0), default=str)

    assert len(line) < UNREAD_BYTES_MAX


def test_short_texts_are_not_cut() -> None:
    event = Event("e1", "Reboot", "Scheduled", resources=("web-0", "web-1"), description="ä" * 2048)
    shown = PhaseNotice(event, WorkflowPhase.PREPARE, 900).to_json(0)["event"]

    assert isinstance(shown, dict)
    assert shown["description"] == event.description
    assert shown["resources"] == ("web-0", "web-1")
