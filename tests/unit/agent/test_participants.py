"""Whom the agent waits for. Time is told, so nothing here waits."""

import json

import pytest

from forewarn.agent.participant_socket import UNREAD_BYTES_MAX
from forewarn.agent.participants import EXTENSIONS_MAX, NOTICES_MAX, Notice, Participants
from forewarn.agent.steps.base import Phase
from forewarn.client import Event
from forewarn.errors import Invalid, NotFound, Refused

REBOOT = Event("e1", "Reboot", "Scheduled", resources=("web-0",))


def called(*programs: str, deadline: float = 900, phase: Phase = Phase.PREPARE) -> Participants:
    participants = Participants()
    participants.begin(REBOOT, phase, deadline=deadline, programs=programs, now=0)
    return participants


def test_an_event_waits_until_the_last_program_is_ready() -> None:
    """One that is still writing must not lose what it writes."""
    participants = called("db", "cache")
    participants.answer("db", {"ready": "E1"}, 1)

    assert not participants.all_ready("E1", 1)
    assert participants.answer("cache", {"ready": "e1"}, 2) == {"ready": "e1"}
    assert participants.all_ready("e1", 2)


def test_a_program_that_does_not_answer_is_waited_for_30_seconds_and_no_longer() -> None:
    """Silence must not cost the VM all of its notice."""
    participants = called("db")

    assert not participants.all_ready("e1", 29.9)
    assert participants.all_ready("e1", 30)


def test_nobody_is_waited_for_past_the_deadline() -> None:
    """What is after it is kept for the approval."""
    participants = called("db", deadline=20)

    assert participants.answer("db", {"more": "e1", "seconds": 60}, 5) == {
        "more": "e1",
        "seconds": 15,
    }
    assert not participants.all_ready("e1", 19.9)
    assert participants.all_ready("e1", 20)


def test_a_program_gets_the_time_that_it_asks_for() -> None:
    participants = called("db")
    participants.answer("db", {"more": "e1", "seconds": 100}, 10)

    assert not participants.all_ready("e1", 109)
    assert participants.all_ready("e1", 110)


def test_one_answer_gives_at_most_five_minutes() -> None:
    participants = called("db", deadline=9000)

    assert participants.answer("db", {"more": "e1", "seconds": 8000}, 0) == {
        "more": "e1",
        "seconds": 300,
    }


def test_asking_for_less_takes_nothing_away() -> None:
    """`more` can only be more."""
    participants = called("db")

    assert participants.answer("db", {"more": "e1", "seconds": 1}, 0) == {
        "more": "e1",
        "seconds": 30,
    }


def test_a_program_that_asks_for_ever_is_refused_at_last() -> None:
    """Otherwise one that never gets ready would decide for all."""
    participants = called("db", deadline=9000)
    for _ in range(EXTENSIONS_MAX):
        participants.answer("db", {"more": "e1", "seconds": 40}, 0)

    with pytest.raises(Refused, match="this is extension 11"):
        participants.answer("db", {"more": "e1", "seconds": 40}, 0)
    assert participants.all_ready("e1", 40)


def test_who_is_too_late_to_ask_gets_nothing() -> None:
    """The event may have been approved by then."""
    participants = called("db")

    with pytest.raises(Refused, match="time to answer for e1 is up"):
        participants.answer("db", {"more": "e1", "seconds": 40}, 30)


@pytest.mark.parametrize("seconds", [0, -1, "60", None, True, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: object) -> None:
    with pytest.raises(Invalid, match="expected a number above 0"):
        called("db").answer("db", {"more": "e1", "seconds": seconds}, 0)


def test_who_is_not_waited_for_cannot_hold_anything_up() -> None:
    """A connection that has not registered, or has said ready, has no say."""
    participants = called("db")
    participants.answer("db", {"ready": "e1"}, 0)

    for stranger in ("db", "nobody"):
        with pytest.raises(Refused, match="the agent does not wait for this program"):
            participants.answer(stranger, {"more": "e1", "seconds": 40}, 0)


def test_a_program_that_has_gone_is_not_waited_for() -> None:
    participants = called("db")
    participants.leave("db")

    assert participants.all_ready("e1", 0)


def test_a_program_that_comes_late_is_told_and_waited_for() -> None:
    """After a crash of its own it still has something to save."""
    participants = called()

    assert [call.event for call in participants.join("db", 100)] == [REBOOT]
    assert not participants.all_ready("e1", 129)
    assert participants.all_ready("e1", 130)


@pytest.mark.parametrize("phase", [Phase.START, Phase.RECOVER])
def test_only_prepare_waits_for_answers(phase: Phase) -> None:
    """What has begun is not held up by anybody."""
    assert called("db", phase=phase).all_ready("e1", 0)


def test_an_event_that_is_recovered_from_is_not_told_to_who_comes_later() -> None:
    assert list(called(phase=Phase.RECOVER).join("db", 0)) == []


def test_an_event_that_nobody_was_told_of_is_not_found() -> None:
    """And waits for nobody."""
    participants = called("db")

    with pytest.raises(NotFound, match="unknown event 'e2'"):
        participants.answer("db", {"ready": "e2"}, 0)
    with pytest.raises(NotFound, match="unknown event 7"):
        participants.answer("db", {"ready": 7}, 0)
    assert participants.all_ready("e2", 0)


def test_an_answer_in_no_known_word_is_refused() -> None:
    with pytest.raises(
        Invalid, match="the line has hello; expected register, ready, more or status"
    ):
        called("db").answer("db", {"hello": 1}, 0)


def test_calls_have_a_limit() -> None:
    """Events that never end must not fill the memory."""
    participants = Participants()
    for number in range(NOTICES_MAX + 5):
        event = Event(f"e{number}", "Reboot", "Scheduled")
        participants.begin(event, Phase.PREPARE, deadline=900, programs=(), now=0)

    assert len(participants.notices) == NOTICES_MAX


def test_a_number_beyond_all_bounds_is_five_minutes_too() -> None:
    """Python's whole numbers have no end, and its others do."""
    assert called("db").answer("db", {"more": "e1", "seconds": 10**400}, 0) == {
        "more": "e1",
        "seconds": 300,
    }


def test_an_event_that_is_resumed_waits_for_programs_to_come_back() -> None:
    """The agent's restart cut their connections: that nobody is there does not say that nobody
    needs time.
    """
    participants = Participants(resumed={REBOOT.key}, since=100)
    participants.begin(REBOOT, Phase.PREPARE, deadline=900, programs=(), now=101)

    assert not participants.all_ready("e1", 129.9)
    assert participants.all_ready("e1", 130)


def test_a_program_that_came_back_is_waited_for_as_any_other() -> None:
    participants = Participants(resumed={REBOOT.key}, since=100)
    participants.begin(REBOOT, Phase.PREPARE, deadline=900, programs=(), now=101)
    list(participants.join("db", 110))
    participants.answer("db", {"more": "e1", "seconds": 60}, 110)

    assert not participants.all_ready("e1", 169)
    assert participants.all_ready("e1", 170)


def test_an_event_that_is_resumed_does_not_wait_past_its_deadline() -> None:
    participants = Participants(resumed={REBOOT.key}, since=100)
    participants.begin(REBOOT, Phase.PREPARE, deadline=105, programs=(), now=101)

    assert participants.all_ready("e1", 105)


def test_an_event_that_is_new_waits_for_nobody_who_may_come() -> None:
    participants = Participants(resumed={"E2"}, since=100)
    participants.begin(REBOOT, Phase.PREPARE, deadline=900, programs=(), now=101)

    assert participants.all_ready("e1", 101)


def test_long_texts_are_cut_so_that_everybody_can_be_told() -> None:
    """Who is sent more than fits loses its place, and is not even told why."""
    long = "\x01" * 300_000
    event = Event(
        long,
        long,
        long,
        long,
        resources=(long, *(f"web-{number}" for number in range(100_000))),
        description=long,
    )
    line = json.dumps(Notice(event, Phase.PREPARE, 900).to_json(0), default=str)

    assert len(line) < UNREAD_BYTES_MAX


def test_text_that_is_not_long_is_told_as_it_is() -> None:
    event = Event("e1", "Reboot", "Scheduled", resources=("web-0", "web-1"), description="ä" * 2048)
    said = Notice(event, Phase.PREPARE, 900).to_json(0)["event"]

    assert isinstance(said, dict)
    assert said["description"] == event.description
    assert said["resources"] == ["web-0", "web-1"]
