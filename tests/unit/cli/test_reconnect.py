"""A long command outlives a restart of the service, and ends at last."""

import pytest

from forewarn.cli.reconnect import ATTEMPTS_MAX, PAUSE_SECONDS_MAX, keep_trying, report_retry
from forewarn.errors import Invalid, Unavailable


class Service:
    """Away for some calls."""

    def __init__(self, away: int) -> None:
        self.away, self.pauses = away, list[float]()

    def call(self) -> str:
        if len(self.pauses) < self.away:
            raise Unavailable(f"connection {len(self.pauses)} refused")
        return "here"


def test_service_that_comes_back_is_reported_away_once(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service(away=3)

    assert keep_trying(service.call, sleep=service.pauses.append) == "here"
    assert capsys.readouterr().err == "forewarn: connection 0 refused; retrying\n"


def test_retry_is_reported_without_advice_to_start_a_service(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There was one: an operator who starts another with `forewarn demo` has two."""
    error = Unavailable("nothing at h: refused; start one with `forewarn demo`", brief="refused")
    report_retry(error)

    assert capsys.readouterr().err == "forewarn: refused; retrying\n"


def test_pauses_grow_up_to_a_limit() -> None:
    """A service that is down for an hour must not be called by every watcher each second."""
    service = Service(away=20)
    keep_trying(service.call, sleep=service.pauses.append)

    assert 0.5 <= service.pauses[0] <= 1
    assert PAUSE_SECONDS_MAX / 2 <= service.pauses[-1] <= PAUSE_SECONDS_MAX


def test_service_that_stays_away_is_an_error_at_last() -> None:
    service = Service(away=ATTEMPTS_MAX + 1)
    with pytest.raises(Unavailable, match=f"connection {ATTEMPTS_MAX} refused"):
        keep_trying(service.call, sleep=service.pauses.append)


def test_refusal_is_not_tried_again() -> None:
    def call() -> None:
        raise Invalid("no")

    with pytest.raises(Invalid):
        keep_trying(call, sleep=lambda seconds: pytest.fail("no pause expected"))
