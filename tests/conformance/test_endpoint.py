"""One suite for every endpoint: ours passes it, and each of its checks finds the fault it is made
for.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.cli.api import Client
from forewarn.cli.options import ClientConfig
from forewarn.conformance import checks as topic
from forewarn.conformance.check import CHECKS
from forewarn.conformance.raw_http import Endpoint, Time
from forewarn.conformance.run import Result, Verdict, run
from forewarn.conformance.session import Stage
from tests.conformance.wrong_answers import WRONG
from tests.conformance.wrong_server import Clock, Fault, Request, wrong
from tests.e2e.service import Service, running

NAMES = ("web-0", "web-1", "db")
assert topic.TOPICS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(
        tmp_path_factory.mktemp("service"), "--identify", "address", "--store", "memory"
    ) as made:
        yield made


def results_of(
    service: Service, fault: Fault, *names: str, is_reading: bool = False
) -> tuple[list[Result], list[Request]]:
    """The named checks, or all, by way of a server with a fault; and what it was asked."""
    clock = Clock(time.monotonic, time.sleep)
    with wrong(service.metadata, fault, clock) as server:
        stage = Stage(
            Endpoint.parse(server.url),
            names=() if is_reading else NAMES,
            control=None if is_reading else Client(ClientConfig(control_url=service.control)),
            may_approve=not is_reading,
            time=Time(clock.now, clock.sleep),
        )
        checks = [CHECKS[name] for name in names or CHECKS]
        return list(run(stage, checks)), server.asked


def test_every_check_has_a_wrong_answer() -> None:
    """A check that nobody has seen fail may be one that cannot."""
    assert sorted(WRONG) == sorted(CHECKS)


def test_a_server_in_front_of_ours_that_does_nothing_wrong_passes_every_check(
    service: Service,
) -> None:
    """So whatever a check finds below is the fault's doing."""
    found, _ = results_of(service, Fault())

    assert [
        (one.check.name, one.detail) for one in found if one.verdict is not Verdict.PASSED
    ] == []
    assert len(found) == len(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_wrong_server_is_found_out(name: str, service: Service) -> None:
    found, _ = results_of(service, WRONG[name], name)

    assert [(one.check.name, one.verdict) for one in found] == [(name, Verdict.FAILED)], found[
        0
    ].detail
    assert found[0].detail.startswith("expected ")
    assert "; got " in found[0].detail


def test_without_leave_nothing_is_sent_that_could_approve(service: Service) -> None:
    """On a real VM the first run must be one that changes nothing."""
    found, asked = results_of(service, Fault(), is_reading=True)

    assert {one.verdict for one in found} == {Verdict.PASSED, Verdict.NOT_RUN}
    assert all(
        one.detail.startswith("not run, because ")
        for one in found
        if one.verdict is Verdict.NOT_RUN
    )
    assert {one.method for one in asked} == {"GET", "HEAD", "PUT", "DELETE"}
    assert not any(one.body for one in asked)


def test_whatever_was_made_is_taken_back(service: Service) -> None:
    """Also by checks that fail half-way."""
    results_of(
        service,
        WRONG["events-overlap"],
        "events-overlap",
        "approval-of-several-is-taken",
        "event-that-is-over-is-gone",
    )

    assert service.ask("GET", "/events")[1]["events"] == []
    assert {vm["power"] for vm in service.ask("GET", "/vms")[1]["vms"]} == {"running"}


def test_an_endpoint_that_is_asked_too_often_is_given_time(tmp_path: Path) -> None:
    """The real one takes five requests a second; with fifty the test is quicker."""
    with running(tmp_path, "--requests-per-second", "50", "--store", "memory") as slow:
        stage = Stage(
            Endpoint.parse(slow.metadata),
            names=("web-0",),
            control=None,
            may_approve=False,
            time=Time(time.monotonic, time.sleep),
        )
        found = list(run(stage, CHECKS.values()))

        assert [
            (one.check.name, one.detail) for one in found if one.verdict is Verdict.FAILED
        ] == []
