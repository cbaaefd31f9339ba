"""One suite for every endpoint: ours passes it, and each check detects the fault made for it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.cli.api import ControlClient
from forewarn.cli.options import ClientConfig
from forewarn.conformance.calls import parse_endpoint
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.raw_http import SessionClock
from forewarn.conformance.run import Result, Verdict, run
from forewarn.conformance.session import Session
from tests.conformance.wrong_responses import WRONG
from tests.conformance.wrong_server import Clock, Fault, Request, faulty_server
from tests.e2e.service import Service, running

NAMES = ("web-0", "web-1", "db")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with running(folder, "--identify", "address") as started:
        yield started


def run_checks(
    service: Service, fault: Fault, *names: str, is_reading: bool = False
) -> tuple[list[Result], list[Request]]:
    """The named checks, or all, through a server with a fault; and the requests it got."""
    clock = Clock(time.monotonic, time.sleep)
    with faulty_server(service.metadata, fault, clock) as server:
        session = Session(
            endpoint=parse_endpoint(server.url),
            names=() if is_reading else NAMES,
            control_api=None
            if is_reading
            else ControlClient(ClientConfig(control_url=(service.control,))),
            may_approve=not is_reading,
            clock=SessionClock(clock.now, clock.sleep),
        )
        checks = [CHECKS[name] for name in names or CHECKS]
        return list(run(session, checks)), server.requests


def test_every_check_has_a_fault() -> None:
    """A check that was never seen to fail may be one that cannot."""
    assert sorted(WRONG) == sorted(CHECKS)


def test_proxy_without_a_fault_passes_every_check(service: Service) -> None:
    """So each failure below is caused by its fault."""
    results, _ = run_checks(service, Fault())
    bad = [(each.check.name, each.detail) for each in results if each.verdict != Verdict.PASSED]

    assert bad == []
    assert len(results) == len(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_check_detects_its_fault(name: str, service: Service) -> None:
    (result,), _ = run_checks(service, WRONG[name], name)

    assert result.verdict is Verdict.FAILED, result.detail
    assert result.detail.startswith("expected ")
    assert "; got " in result.detail


def test_without_permission_nothing_is_sent_that_could_approve(service: Service) -> None:
    """On a real VM the first run must change nothing. One check per kind of request suffices."""
    reading = [name for name, check in CHECKS.items() if check.topic in ("request", "approval")]
    results, requests = run_checks(service, Fault(), *reading, is_reading=True)
    reasons = [each.detail for each in results if each.verdict is Verdict.NOT_RUN]

    assert {each.verdict for each in results} == {Verdict.PASSED, Verdict.NOT_RUN}
    assert set(reasons) == {"needs `--approve`, to send a POST"}
    assert {request.method for request in requests} == {"GET", "HEAD", "PUT", "DELETE"}
    assert not any(request.body for request in requests)


def test_created_events_are_removed(service: Service) -> None:
    """Also by checks that fail half-way."""
    run_checks(
        service,
        WRONG["events-may-overlap"],
        "events-may-overlap",
        "approval-of-several-is-accepted",
        "event-ended-is-gone",
    )

    assert service.ask("GET", "/events")[1]["events"] == []
    assert {vm["power"] for vm in service.ask("GET", "/vms")[1]["vms"]} == {"running"}


def test_rate_limited_endpoint_is_given_time(tmp_path: Path) -> None:
    """The real one allows five requests a second. Two are fewer than any machine sends."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    with running(tmp_path, "--requests-per-second", "2", "--store", "memory") as limited:
        session = Session(
            endpoint=parse_endpoint(limited.metadata),
            names=("web-0",),
            control_api=None,
            may_approve=False,
            clock=SessionClock(time.monotonic, sleep),
        )
        checks = [check for name, check in CHECKS.items() if name.startswith("version-is-served")]
        results = list(run(session, checks))

    assert [each.detail for each in results if each.verdict is Verdict.FAILED] == []
    assert pauses
