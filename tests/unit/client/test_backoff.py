"""When a watch asks again. Time and chance are told."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forewarn.client import Clock, ConnectionFailed, RetryableError, Watcher
from forewarn.client.backoff import RETRY_AFTER_SECONDS_MAX, Pace, pause_seconds
from forewarn.client.protocol import KNOWN_SECONDS_MAX, Dialogue
from tests.unit.client.build import page, reboot

LOST = ConnectionFailed("lost")


class Time:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.clock = Clock(
            lambda: datetime.fromtimestamp(self.seconds, UTC), lambda: self.seconds, lambda: 0.0
        )


def pacing(time: Time) -> Pace:
    return Pace(
        Dialogue("http://host", api_version="x", instance_version="x"), Watcher(), time.clock, 30
    )


def busy(retry_after_seconds: float | None) -> RetryableError:
    return RetryableError("busy", status=429, retry_after_seconds=retry_after_seconds)


def test_problems_in_a_row_are_answered_with_longer_and_longer_pauses_up_to_ten_seconds() -> None:
    """Ten, because a spot VM has thirty from its notice to its end."""
    assert [pause_seconds(failures, LOST, 0.0) for failures in (1, 2, 3, 4, 5, 6, 10_000)] == [
        1,
        2,
        4,
        8,
        10,
        10,
        10,
    ]


def test_chance_makes_a_pause_longer_by_up_to_a_half_and_never_shorter() -> None:
    """A thousand guests must not come back in one moment, and none sooner than after a second."""
    assert pause_seconds(1, LOST, 0.5) == 1.25
    assert pause_seconds(9, LOST, 0.999) == pytest.approx(15, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "pause"), [(None, 1), (0.0, 1), (0.5, 1), (7.0, 7), (60.0, 10), (86_400.0, 10)]
)
def test_what_the_endpoint_asks_for_is_kept_up_to_ten_seconds(
    asked: float | None, pause: float
) -> None:
    """Whoever asks for more would leave the guest blind for longer than a Preempt lasts."""
    assert pause_seconds(1, busy(asked), 0.0) == pause


def test_docs_name_the_longest_retry_after_that_is_honoured() -> None:
    """An operator who sends Retry-After must know what a guest makes of it."""
    page_text = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
    documented = re.findall(r"`Retry-After` \(at most (\d+) seconds", page_text)

    assert [float(seconds) for seconds in documented] == [RETRY_AFTER_SECONDS_MAX]


def test_a_question_is_asked_a_second_after_the_last_one_began() -> None:
    """Not after it was answered: an answer of 0.3 seconds leaves 0.7 to rest."""
    time = Time()
    pace = pacing(time)
    pace.question()
    time.seconds += 0.25
    pace.answered(page(1))

    assert pace.rest_seconds() == 0.75


def test_after_an_answer_that_was_held_the_next_question_follows_at_once() -> None:
    time = Time()
    pace = pacing(time)
    pace.question()
    time.seconds += 12
    pace.answered(page(1))

    assert pace.rest_seconds() == 0


def test_after_a_problem_the_pause_counts_from_the_problem() -> None:
    """A time-out of ten seconds is no reason to ask again at once."""
    time = Time()
    pace = pacing(time)
    pace.question()
    time.seconds += 10
    pace.failed(LOST)

    assert pace.rest_seconds() == 1


def test_an_answer_ends_the_row_of_problems() -> None:
    time = Time()
    pace = pacing(time)
    for _ in range(4):
        pace.question()
        pace.failed(LOST)
    pace.question()
    pace.answered(page(1))
    pace.failed(LOST)

    assert pace.rest_seconds() == 1


def asks(pace: Pace) -> str:
    """What it asks: for the document, whether it has changed, or when it changes."""
    request = pace.question().request
    return (
        ("when" if b"Prefer: wait=30" in request else "whether")
        if b"If-None-Match" in request
        else "what"
    )


def test_the_first_question_of_a_watch_is_what_there_is() -> None:
    """Not whether it has changed since somebody else asked: the watch has seen nothing yet."""
    assert asks(pacing(Time())) == "what"


def test_while_documents_contradict_each_other_nothing_is_waited_for() -> None:
    """The next look must come in a second, not in thirty."""
    pace = pacing(Time())
    pace.answered(page(6, reboot()))
    assert asks(pace) == "when"
    pace.answered(page(5))
    assert asks(pace) == "whether"
    pace.answered(page(6, reboot()))
    assert asks(pace) == "when"


def test_after_a_problem_nothing_is_conditional() -> None:
    """A server that was started anew may have come to the number that we know, with other events."""
    pace = pacing(Time())
    pace.answered(page(6))
    pace.failed(LOST)

    assert asks(pace) == "what"


def test_once_a_minute_the_whole_document_is_asked_for() -> None:
    """For the same reason, where the server was started anew and we did not notice.

    Unchanged answers do not put it off.
    """
    time, known = Time(), page(6)
    pace = pacing(time)
    pace.answered(known)
    time.seconds += KNOWN_SECONDS_MAX - 1
    pace.answered(known)
    assert asks(pace) == "when"
    time.seconds += 1
    assert asks(pace) == "what"
    pace.answered(page(6))
    assert asks(pace) == "when"
