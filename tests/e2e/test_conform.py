"""`forewarn conform` as people run it: against our own service, the demo, and wrong endpoints."""

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.conformance.checks import CHECKS
from tests.conformance.wrong_responses import WRONG
from tests.conformance.wrong_server import Clock, faulty_server
from tests.e2e import cli_service
from tests.e2e.cli_service import forewarn
from tests.e2e.service import Service, running

REAL = Clock(time.monotonic, time.sleep)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service"), "--identify", "address") as started:
        yield started


def conform(url: str, *arguments: str, only: str = "") -> "subprocess.CompletedProcess[str]":
    """With `only`, the checks of these names."""
    names = [argument for name in only.split() for argument in ("--only", name)]
    return forewarn("conform", url, *arguments, *names)


def test_demo_passes_every_check(tmp_path: Path) -> None:
    """At its rate notices are seconds, and the policy of this scope needs all VMs to approve."""
    names = ("--as", "FrontEnd_IN_0", "--as", "BackEnd_IN_0", "--as", "workers_0")
    file = tmp_path / "conform.xml"
    with cli_service.running(tmp_path, "demo") as demo:
        control = ("--control", demo.control, "--approve")
        done = conform(demo.metadata, *names, *control, "--json", "--junit", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    bad = [(each["name"], each["detail"]) for each in results["checks"] if each["detail"]]
    (suite,) = xml.fromstring(file.read_bytes()).findall("testsuite")  # noqa: S314

    assert bad == []
    assert (results["passed"], results["failed"], results["not_run"]) == (len(CHECKS), 0, 0)
    assert (suite.get("tests"), suite.get("failures")) == (str(len(CHECKS)), "0")
    assert [case.get("name") for case in suite.findall("testcase")] == list(CHECKS)


def test_plain_run_only_reads_and_reports_what_was_not_run(service: Service) -> None:
    with faulty_server(service.metadata, WRONG["etag-is-sent"], REAL) as server:
        done = conform(server.url, only="etag-is-sent approval-is-200 events-may-overlap")
        requests = server.requests

    assert done.returncode == 1
    assert "  failed   must   etag-is-sent" in done.stdout
    assert "lifecycle: not run: needs `--control`, to create an event" in done.stdout
    assert "1 not run: needs `--approve`, to send a POST" in done.stdout
    assert {request.method for request in requests} == {"GET"}


def test_exit_code_is_1_if_a_must_fails(service: Service) -> None:
    with faulty_server(service.metadata, WRONG["document-is-compact"], REAL) as server:
        done = conform(server.url, only="document-is-compact etag-is-sent")
    topic, first, *_, last = done.stdout.splitlines()

    assert (done.returncode, topic) == (1, "document: 1 of 2 passed")
    assert first.startswith("  failed   must   document-is-compact: ")
    assert "expected JSON without white space between its parts; got status 200" in first
    assert last == "2 checks: 1 passed, 1 failed (1 must, 0 should), 0 not run"


def test_exit_code_is_0_if_a_should_fails_unless_strict(service: Service) -> None:
    with faulty_server(service.metadata, WRONG["path-in-any-case"], REAL) as server:
        done = conform(server.url, only="path-in-any-case")
        strict = conform(server.url, "--strict", only="path-in-any-case")
    summary = "1 checks: 0 passed, 1 failed (0 must, 1 should), 0 not run"

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, summary)
    assert strict.returncode == 1


def test_unreachable_endpoint_or_control_api_is_an_error(service: Service) -> None:
    closed = "http://127.0.0.1:1"
    for arguments in ((closed,), (service.metadata, "--control", closed)):
        done = conform(*arguments)
        assert (done.returncode, done.stdout) == (4, "")
        assert done.stderr.startswith("forewarn: no ")


def test_run_that_could_not_check_much_does_not_start(service: Service) -> None:
    """One line with what to do, instead of a hundred checks that fail or are not run."""
    for control in ((), ("--control", service.control)):
        done = conform(service.metadata, "--as", "web-0", "--as", "nope", *control)
        assert (done.returncode, done.stdout) == (2, "")
        assert "nope" in done.stderr
    event_id = service.ask("POST", "/vms/web-0/restart")[1]["event"]["id"]
    done = conform(service.metadata, "--as", "web-0", "--control", service.control)
    reading = conform(service.metadata, "--as", "web-0", "--json", only="event-id-is-a-guid")
    service.ask("POST", f"/events/{event_id}/cancel")

    assert (done.returncode, done.stdout) == (2, "")
    assert f"web-0 already has an event ({event_id})" in done.stderr
    assert json.loads(reading.stdout)["passed"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs the URL of an endpoint"),
        (("ftp://h",), "ftp://h"),
        (("http://h", "--only", "nothing"), "--only: no check is named 'nothing'"),
        (("http://h", "--only", "etag-*", "--only", "x*"), "--only: no check is named 'x*'"),
        (("http://h", "--control", "x"), "x"),
        (("--list", "--failures"), "--list runs no check; leave out --failures"),
        (("--list", "--as", "web-0"), "--list runs no check; leave out --as"),
        (("http://h", "--junit", "/nowhere/x"), "--junit: cannot write /nowhere/x: No such file"),
        (("http://h", "--what"), "--what"),
    ],
)
def test_invalid_command_line_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    """Before the run: none of these endpoints exists."""
    done = forewarn("conform", *arguments)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def test_pattern_selects_checks_and_failures_hide_the_rest(service: Service) -> None:
    with faulty_server(service.metadata, WRONG["etag-is-sent"], REAL) as server:
        done = conform(server.url, "--failures", only="etag-is-* document-is-compact")
    topic, *failures, summary = done.stdout.splitlines()

    assert topic == "document: 1 of 4 passed"
    assert [line.split()[2].rstrip(":") for line in failures] == [
        "etag-is-sent",
        "etag-is-quoted",
        "etag-is-the-incarnation",
    ]
    assert summary == "4 checks: 1 passed, 3 failed (1 must, 2 should), 0 not run"


def test_checks_are_listed_without_an_endpoint() -> None:
    done = forewarn("conform", "--list", "--json")

    assert [each["check"] for each in json.loads(done.stdout)["checks"]] == list(CHECKS)
    assert "etag-is-the-incarnation" in forewarn("conform", "--list", "--only", "etag-*").stdout
    assert {each["basis"] for each in json.loads(done.stdout)["checks"]} == {
        "protocol",
        "http",
        "convention",
    }


def test_checks_need_only_the_standard_library() -> None:
    """`pip install forewarn` is enough, and our server does not define what is correct."""
    script = "import sys, forewarn.conformance.report; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    packages = {name.split(".")[1] for name in loaded if name.startswith("forewarn.")}

    assert "forewarn.conformance.checks.approval" in loaded
    assert packages == {"errors", "junit", "client", "conformance"}
    assert loaded.isdisjoint({"msgspec", "litestar", "uvicorn", "yaml", "rich", "typer"})
