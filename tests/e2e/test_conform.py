"""`forewarn conform` as people run it: against our own service, the demo, and endpoints that are
wrong.
"""

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from forewarn.conformance import checks as topic
from forewarn.conformance.check import CHECKS
from tests.conformance.wrong_answers import WRONG
from tests.conformance.wrong_server import Clock, wrong
from tests.e2e import cli_service, service
from tests.e2e.cli_service import forewarn

SECONDS_MAX = 30
REAL = Clock(time.monotonic, time.sleep)
assert topic.TOPICS


def conform(url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return forewarn("conform", url, *arguments)


def all_green(found: "subprocess.CompletedProcess[str]") -> None:
    """All checks, every one of them run."""
    assert found.returncode == 0, found.stdout + found.stderr
    told = json.loads(found.stdout)
    assert [
        (one["name"], one["detail"]) for one in told["checks"] if one["verdict"] != "passed"
    ] == []
    assert (told["passed"], told["failed"], told["not_run"]) == (len(CHECKS), 0, 0)


def test_our_service_passes_every_check(tmp_path: Path) -> None:
    """With the real store, known by path and by address; and quickly, for people run it in CI."""
    with service.running(tmp_path, "--identify", "address") as ours:
        began = time.monotonic()
        names = ("--as", "web-0", "--as", "web-1", "--as", "db")
        all_green(conform(ours.metadata, *names, "--control", ours.control, "--approve", "--json"))
        assert time.monotonic() - began < SECONDS_MAX
        assert ours.ask("GET", "/events")[1]["events"] == []


@pytest.mark.parametrize(
    "names", [("web-0", "web-1", "database"), ("FrontEnd_IN_0", "BackEnd_IN_0", "workers_0")]
)
def test_the_demo_passes_every_check(names: tuple[str, ...], tmp_path: Path) -> None:
    """At its pace notices are seconds.

    The second time by a cloud service whose policy asks for the word of all.
    """
    with cli_service.running(tmp_path, "demo") as demo:
        given = [part for name in names for part in ("--as", name)]
        all_green(conform(demo.metadata, *given, "--control", demo.control, "--approve", "--json"))


def test_a_plain_run_only_reads_and_says_what_it_could_not_look_at(tmp_path: Path) -> None:
    with (
        service.running(tmp_path, "--identify", "address") as ours,
        wrong(ours.metadata, WRONG["etag-is-sent"], REAL) as server,
    ):
        found = conform(ours.metadata)
        assert found.returncode == 0
        assert "not run  must    events-overlap" in found.stdout
        assert "not run, because it needs `--control`, to make an event" in found.stdout
        conform(server.url)
        assert "POST" not in {request.method for request in server.asked}


def test_the_exit_code_tells_whether_what_must_be_is(tmp_path: Path) -> None:
    with service.running(tmp_path, "--identify", "address") as ours:
        with wrong(ours.metadata, WRONG["document-is-compact"], REAL) as server:
            found = conform(server.url)
            assert found.returncode == 1
            line = next(line for line in found.stdout.splitlines() if "document-is-compact" in line)
            assert line.startswith("failed   must    document-is-compact ")
            assert "expected JSON without white space between its parts; got status 200" in line
            assert " failed (1 must, " in found.stdout.splitlines()[-1]
        with wrong(ours.metadata, WRONG["path-in-any-case"], REAL) as server:
            found = conform(server.url, "--only", "path-in-any-case")
            assert (found.returncode, found.stdout.splitlines()[-1]) == (
                0,
                "1 checks: 0 passed, 1 failed (0 must, 1 should), 0 not run",
            )
            assert conform(server.url, "--only", "path-in-any-case", "--strict").returncode == 1


def test_without_an_endpoint_there_is_nothing_to_say(tmp_path: Path) -> None:
    with service.running(tmp_path, "--identify", "address") as ours:
        gone = "http://127.0.0.1:1"
        for arguments in ((gone,), (ours.metadata, "--control", gone)):
            found = conform(*arguments)
            assert (found.returncode, found.stdout) == (4, "")
            assert found.stderr.startswith("forewarn: no ")


def test_a_run_that_could_say_nothing_does_not_begin(tmp_path: Path) -> None:
    """One line with what to do, in the place of a hundred checks that fail or are not run."""
    with service.running(tmp_path, "--identify", "address") as ours:
        for more in ((), ("--control", ours.control)):
            found = conform(ours.metadata, "--as", "web-0", "--as", "nope", *more)
            assert (found.returncode, found.stdout) == (2, "")
            assert "nope" in found.stderr
        _, made = ours.ask("POST", "/vms/web-0/restart")
        found = conform(ours.metadata, "--as", "web-0", "--control", ours.control)
        assert (found.returncode, found.stdout) == (2, "")
        assert f"web-0 has an event already ({made['event']['id']})" in found.stderr
        without = conform(ours.metadata, "--as", "web-0", "--json", "--only", "event-id-is-a-guid")
        assert json.loads(without.stdout)["passed"] == 1


@pytest.mark.parametrize(
    "arguments",
    [(), ("ftp://h",), ("http://h", "--only", "nothing"), ("http://h", "--control", "x")],
)
def test_a_command_line_that_makes_no_sense_is_refused(arguments: tuple[str, ...]) -> None:
    found = forewarn("conform", *arguments)

    assert (found.returncode, found.stdout) == (2, "")


def test_the_results_can_be_written_for_a_ci_server(tmp_path: Path) -> None:
    with service.running(tmp_path, "--identify", "address") as ours:
        file = tmp_path / "conform.xml"
        assert conform(ours.metadata, "--junit", str(file)).returncode == 0
        suite = xml.fromstring(file.read_bytes())
        assert (suite.get("tests"), suite.get("failures")) == (str(len(CHECKS)), "0")
        assert [one.get("name") for one in suite.findall("testcase")] == list(CHECKS)
        refused = conform(
            ours.metadata, "--only", "etag-is-sent", "--junit", str(tmp_path / "no" / "where")
        )
        assert (refused.returncode, "cannot be written" in refused.stderr) == (1, True)


def test_the_checks_can_be_listed_without_an_endpoint() -> None:
    found = forewarn("conform", "--list", "--json")

    assert [one["check"] for one in json.loads(found.stdout)["checks"]] == list(CHECKS)
    assert "etag-is-sent" in forewarn("conform", "--list").stdout


def test_the_checks_need_nothing_of_the_server() -> None:
    """`pip install forewarn` is enough, and what is right is not decided by what we serve."""
    script = "import sys, forewarn.conformance.report; print(*sys.modules)"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
    )

    assert "forewarn.conformance.checks.approval" in loaded
    rooms = {
        name.partition("forewarn.")[2].partition(".")[0]
        for name in loaded
        if name.startswith("forewarn.")
    }
    assert rooms == {"errors", "lab"}
    assert loaded.isdisjoint(
        {"msgspec", "litestar", "uvicorn", "yaml", "httptools", "rich", "typer"}
    )
