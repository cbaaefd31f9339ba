"""When a client polls again, and what it requests. The clock and random numbers are arguments."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forewarn.client import ClientClock, ConnectionFailed, RetryableError
from forewarn.client.backoff import RETRY_AFTER_SECONDS_MAX, PollSchedule, pause_seconds
from forewarn.client.protocol import CACHE_SECONDS_MAX, Api
from tests.unit.client.build import page, reboot

LOST = ConnectionFailed("lost")


class Poller:
    """A schedule with a clock that moves when a test sets it."""

    def __init__(self, period_seconds: float = 1) -> None:
        self.seconds = 1000.0
        self.may_wait = True
        clock = ClientClock(
            lambda: datetime.fromtimestamp(self.seconds, UTC), lambda: self.seconds, lambda: 0.0
        )
        self.schedule = PollSchedule(
            Api("http://host", api_version="x", instance_version="x"),
            clock,
            wait_seconds=30,
            period_seconds=period_seconds,
            may_wait=lambda: self.may_wait,
        )

    def request(self) -> str:
        """The kind of the next request."""
        data = self.schedule.request().data
        if b"If-None-Match" not in data:
            return "unconditional"
        return "long poll" if b"Prefer: wait=30" in data else "conditional"


def busy(retry_after_seconds: float | None) -> RetryableError:
    return RetryableError("busy", status=429, retry_after_seconds=retry_after_seconds)


def test_pause_doubles_with_each_failure_up_to_ten_seconds() -> None:
    """Ten, because a spot VM has thirty from its notice to its end."""
    pauses = [pause_seconds(failures, LOST, 0.0) for failures in (1, 2, 3, 4, 5, 6, 10_000)]

    assert pauses == [1, 2, 4, 8, 10, 10, 10]


def test_jitter_adds_up_to_half_a_pause_and_never_shortens_it() -> None:
    """A thousand guests must not come back at the same time, and none within a second."""
    assert pause_seconds(1, LOST, 0.5) == 1.25
    assert pause_seconds(9, LOST, 0.999) == pytest.approx(15, rel=0.01)


@pytest.mark.parametrize(
    ("retry_after", "pause"), [(None, 1), (0.0, 1), (0.5, 1), (7.0, 7), (60.0, 10), (86_400.0, 10)]
)
def test_retry_after_is_honoured_up_to_ten_seconds(retry_after: float | None, pause: float) -> None:
    """More would leave the guest blind for longer than a Preempt lasts."""
    assert pause_seconds(1, busy(retry_after), 0.0) == pause


def test_docs_name_the_longest_retry_after_that_is_honoured() -> None:
    """An operator who sends Retry-After must know what a guest makes of it."""
    text = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
    documented = re.findall(r"`Retry-After` \(at most (\d+) seconds", text)

    assert [float(seconds) for seconds in documented] == [RETRY_AFTER_SECONDS_MAX]


def test_next_poll_is_a_second_after_the_last_one_began() -> None:
    """Not after its response: one that took 0.25 seconds leaves 0.75 to rest."""
    poller = Poller()
    poller.request()
    poller.seconds += 0.25
    poller.schedule.succeeded(page(1))

    assert poller.schedule.rest_seconds() == 0.75


def test_endpoint_that_does_not_wait_is_polled_every_period() -> None:
    poller = Poller(period_seconds=5)
    poller.request()
    poller.seconds += 0.25
    poller.schedule.succeeded(page(1))

    assert poller.schedule.rest_seconds() == 4.75


def test_next_poll_follows_a_held_response_immediately() -> None:
    """The period is for endpoints that do not wait."""
    poller = Poller(period_seconds=60)
    poller.request()
    poller.seconds += 12
    poller.schedule.succeeded(page(1))

    assert poller.schedule.rest_seconds() == 0


@pytest.mark.parametrize(("period", "pause"), [(1, 1), (5, 5)])
def test_pause_after_an_error_counts_from_the_error(period: float, pause: float) -> None:
    """A timeout of ten seconds is no reason to retry immediately."""
    poller = Poller(period)
    poller.request()
    poller.seconds += 10
    poller.schedule.failed(LOST)

    assert poller.schedule.rest_seconds() == pause


def test_success_resets_the_back_off() -> None:
    poller = Poller()
    for _ in range(4):
        poller.request()
        poller.schedule.failed(LOST)
    poller.request()
    poller.schedule.succeeded(page(1))
    poller.schedule.failed(LOST)

    assert poller.schedule.rest_seconds() == 1


def test_first_poll_is_unconditional() -> None:
    """This schedule has seen nothing yet, whatever other callers have read."""
    assert Poller().request() == "unconditional"


def test_nothing_waits_while_waiting_is_not_allowed() -> None:
    """A watcher in doubt needs the next document in a second, not in thirty."""
    poller = Poller()
    poller.schedule.succeeded(page(6, reboot()))
    assert poller.request() == "long poll"
    poller.may_wait = False
    assert poller.request() == "conditional"


def test_poll_after_an_error_is_unconditional() -> None:
    """A restarted server may have reached the incarnation we know, with other events."""
    poller = Poller()
    poller.schedule.succeeded(page(6))
    poller.schedule.failed(LOST)

    assert poller.request() == "unconditional"


def test_one_poll_a_minute_is_unconditional() -> None:
    """For the same reason, where the restart went unnoticed. A 304 does not postpone it."""
    poller, known = Poller(), page(6)
    poller.schedule.succeeded(known)
    poller.seconds += CACHE_SECONDS_MAX - 1
    poller.schedule.succeeded(known)
    assert poller.request() == "long poll"
    poller.seconds += 1
    assert poller.request() == "unconditional"
    poller.schedule.succeeded(page(6))
    assert poller.request() == "long poll"
