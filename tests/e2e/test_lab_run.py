"""`forewarn lab run`: its files, exit codes and output, and the command that plays a VM."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from forewarn.cli.main import run as forewarn
from tests.e2e.cli_service import FOREWARN, ROOT, environment

RUN = (FOREWARN, "lab", "run")
LIMIT_SECONDS = 120

SCENARIO = """\
name: small
fleet: {scopes: [{name: app, vms: [{name: app-0, host: host-a}]}]}
guests: [{approve: 5s}]
steps:
  - {at: 30s, do: restart, vm: app-0, as: restart}
expectations:
  - {expect: approval, of: restart, by: app-0, within: 4m}
  - {expect: event, of: restart, becomes: started, within: 4m}
until: 5m
"""
APP = """\
import os, sys, time
from forewarn.client import Client, discover

print("endpoint", os.environ["FOREWARN_ENDPOINT"], "of", os.environ["FOREWARN_VM"], *sys.argv[1:])
sys.stdout.flush()
with Client(discover(os.environ)) as client:
    while True:
        for event in client.document().events:
            if event.is_scheduled and "shy" not in sys.argv:
                client.approve(event.id)
                print("approved", event.type, flush=True)
        time.sleep(0.1)
"""


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process."""

    def run(*arguments: object) -> Done:
        code = forewarn(["lab", "run", *map(str, arguments)])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def app(tmp_path: Path) -> tuple[str, str]:
    """A program that approves every event, unless it gets the argument `shy`."""
    path = tmp_path / "app.py"
    path.write_text(APP)
    return sys.executable, str(path)


def is_over(pid: str) -> bool:
    """Return whether a process has ended. A zombie counts."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # ends with the process, or with the time
        try:
            state = Path("/proc", pid, "stat").read_text().rpartition(") ")[2][:1]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_library_scenario_runs_and_writes_its_files(run: Run, tmp_path: Path) -> None:
    done = run(
        "host-reboot",
        *("--junit", tmp_path / "junit.xml", "--transcript", tmp_path / "all.jsonl"),
        *("--html", tmp_path / "report.html"),
    )

    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.endswith("host-reboot passed (5 expectations)\n")
    assert "web-0" in (tmp_path / "report.html").read_text()
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"  # noqa: S314 - our own
    entries = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert {"request", "change", "step", "verdict"} <= {entry["kind"] for entry in entries}


@pytest.mark.parametrize("option", ["--transcript", "--junit", "--html"])
def test_unwritable_output_file_fails_before_the_run(run: Run, option: str, scenario: Path) -> None:
    """Not after an hour."""
    done = run(scenario, option, scenario.parent / "nowhere" / "file")

    assert (done.code, done.stdout) == (2, "")
    path = scenario.parent / "nowhere" / "file"
    assert done.stderr == f"forewarn: {option}: cannot write {path}: No such file or directory\n"


def test_output_files_are_not_touched_before_the_end(
    run: Run,
    scenario: Path,
) -> None:
    old, new = scenario.parent / "old.jsonl", scenario.parent / "new.xml"
    old.write_text("yesterday's")
    done = run(scenario, "--as", "app-9", "--transcript", old, "--junit", new)

    assert done.code == 2
    assert (old.read_text(), new.exists()) == ("yesterday's", False)


def test_verdict_is_printed_even_if_its_file_cannot_be_written(run: Run, scenario: Path) -> None:
    done = run(scenario, "--transcript", "/dev/full")

    assert (done.code, done.stdout.endswith("small passed (2 expectations)\n")) == (1, True)
    assert done.stderr == "forewarn: cannot write /dev/full: No space left on device\n"


def test_failed_scenario_has_exit_code_and_reason(run: Run, scenario: Path) -> None:
    scenario.write_text(SCENARIO.replace("approve: 5s", "approve: never"))
    done = run(scenario, "--quiet")

    assert done.code == 1
    assert "FAILED  app-0 approves restart within 4m: Reboot of app-0 (" in done.stdout
    assert done.stdout.endswith("small FAILED (2 of 2 expectations)\n")


def test_invalid_file_is_a_usage_error(run: Run, scenario: Path) -> None:
    scenario.write_text(SCENARIO.replace("do: restart", "do: restarrt"))
    done = run(scenario)

    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"forewarn: {scenario}:5: steps[0].do: expected one of restart, redeploy,"
    )
    assert run("no-such-scenario").code == 2
    assert run(scenario.parent / "nowhere.yaml").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quiet", "--verbose"], "--quiet and --verbose contradict each other"),
        (["--rate", "0"], "Invalid value for '--rate'"),
        (["--rate", "nan"], "Invalid value for '--rate'"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--html", "{folder}"], "--html: cannot write {folder}: Is a directory"),
        (["--html", "{folder}/small.yaml"], "{folder}/small.yaml is also the scenario"),
        (["--html", "{folder}/x", "--junit", "{folder}/x"], "{folder}/x is also --junit"),
        (["--html"], "Option '--html' requires an argument"),
        (["--", "no-such-program"], "there is no program 'no-such-program'"),
        (["--as", "app-9"], "there is no VM 'app-9' in small; expected one of app-0"),
    ],
)
def test_wrong_command_line_is_one_line_before_the_run(
    run: Run, scenario: Path, arguments: list[str], message: str
) -> None:
    folder = str(scenario.parent)
    done = run(scenario, *(each.replace("{folder}", folder) for each in arguments))

    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message.replace("{folder}", folder) in done.stderr


def test_json_is_the_only_thing_on_stdout(run: Run, scenario: Path) -> None:
    done = run(scenario, "--json")
    result = json.loads(done.stdout)

    assert (done.code, result["scenario"], result["is_passed"]) == (0, "small", True)
    assert [each["outcome"] for each in result["expectations"]] == ["passed", "passed"]
    assert "Scheduled: Reboot of app-0" in done.stderr
    assert run(scenario, "--json", "--quiet").stderr == ""


def test_run_ends_when_everything_is_decided(
    run: Run, scenario: Path, app: tuple[str, str]
) -> None:
    """A handler that is right need not wait for the rest of the hour."""
    scenario.write_text(SCENARIO.replace("until: 5m", "until: 10h"))
    began = time.monotonic()
    done = run(scenario, "--rate", 300, "--", *app)

    assert done.code == 0
    assert re.search(
        r"^10h at rate 300: at most 2m, ends about \d\d:\d\d$", done.stdout, re.MULTILINE
    )
    assert "waiting for the first poll of app-0, at most 60 s\n" in done.stdout
    assert "of 10h, when everything was decided; --to-the-end runs the rest\n" in done.stdout
    assert time.monotonic() - began < 60


def test_crash_of_the_command_leaves_the_rest_not_reached(run: Run, scenario: Path) -> None:
    script = (
        "import os; from forewarn.client import *; Client(discover(os.environ)).document(); 1/0"
    )
    done = run(scenario, "--rate", "1", "-q", "--", sys.executable, "-c", script)

    assert done.code == 1
    assert "not reached  app-0 approves restart within 4m: " in done.stdout
    assert "FAILED  the command does not fail: it ended with 1" in done.stdout


@pytest.mark.parametrize(
    ("variables", "is_coloured"), [({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False)]
)
def test_terminal_has_colours_and_progress(
    scenario: Path, variables: dict[str, str], is_coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    clean = {"NO_COLOR": "", "TERM": "xterm", **variables}
    with subprocess.Popen(
        [*RUN, str(scenario)], stdout=theirs, stderr=theirs, env=environment(**clean)
    ):
        os.close(theirs)
        output = b"".join(iter(lambda: read_terminal(ours), b"")).decode()
    os.close(ours)

    assert ("\033[32msmall passed (2 expectations)\033[0m" in output) is is_coloured
    assert "small passed (2 expectations)" in output
    assert "\r\033[K+0s of 5m, 5m left for 1 of 2: app-0 approves restart" in output


def read_terminal(terminal: int) -> bytes:
    """Return what was written to it; empty when all writers are gone."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_seed_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    """Whatever Python's hash seed is."""
    runs = [
        subprocess.Popen(
            [*RUN, "bad-day", "--quiet", "--seed=5", f"--transcript={tmp_path / salt}"],
            stdout=subprocess.PIPE,
            env=environment(PYTHONHASHSEED=salt),
        )
        for salt in ("1", "2")
    ]
    for each in runs:
        each.communicate(timeout=LIMIT_SECONDS)

    assert [each.returncode for each in runs] == [0, 0]
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_command_gets_its_endpoint_and_passes(
    run: Run, scenario: Path, app: tuple[str, str]
) -> None:
    done = run(scenario, "--rate", 300, "--", *app, "at", "{endpoint}")

    assert (done.code, done.stderr) == (0, "")
    endpoint = re.search(
        r"app-0 \| endpoint (http://127\.0\.0\.1:\d+) of app-0 at \1\n", done.stdout
    )
    assert endpoint
    assert "app-0 | approved Reboot" in done.stdout
    assert "small passed (2 expectations)" in done.stdout


@pytest.mark.system
def test_shell_example_passes_the_scenario_of_the_page(run: Run, tmp_path: Path) -> None:
    """At a higher rate than on the page, so without its drain of five seconds."""
    page = (ROOT / "docs" / "scenarios.md").read_text()
    line = re.search(r"^forewarn lab run (\S+) --rate \d+ -- \./my-app", page, re.MULTILINE)
    assert line
    handler = ROOT / "examples" / "shell" / "handler.sh"
    assert "FOREWARN_ENDPOINT" in handler.read_text()  # or it would poll the real endpoint
    settings = (f"HEALTHY={tmp_path / 'healthy'}", "DRAIN_SECONDS=0", "PERIOD_SECONDS=0.1")
    done = run(line[1], "--rate", 300, "--", "env", *settings, "sh", handler)

    assert (done.code, done.stderr) == (0, "")
    assert "one second of real time is 300 s of the scenario" in done.stdout
    assert "web-0 | approved" in done.stdout


def test_command_that_does_not_approve_fails(
    run: Run, scenario: Path, app: tuple[str, str]
) -> None:
    done = run(scenario, "--rate", 300, "--quiet", "--", *app, "shy")

    assert done.code == 1
    assert "FAILED  app-0 approves restart within 4m: Reboot of app-0" in done.stdout


def test_failing_command_ends_the_run(run: Run, scenario: Path) -> None:
    """There is nothing left to test."""
    polls_once = (
        "import os; from forewarn.client import *;"
        "Client(discover(os.environ)).document(); raise SystemExit(3)"
    )
    done = run(scenario, "--rate", "1", "--", sys.executable, "-c", polls_once)

    assert done.code == 1
    assert "FAILED  the command does not fail: it ended with 3" in done.stdout


def test_command_that_never_polls_fails(run: Run, scenario: Path) -> None:
    done = run(scenario, "--rate", 300, "--", "false")

    assert done.code == 1
    assert (
        "FAILED  app-0 polls its endpoint: the command ended with 1 before its first poll;"
        " does it call 169.254.169.254? add --at-azure-address\n" in done.stdout
    )
    assert "not reached  app-0 approves restart within 4m: the step did not run\n" in done.stdout
    assert done.stdout.endswith("small FAILED (1 of 3 expectations, 2 not reached)\n")
    assert run(scenario, "--", "no-such-command-at-all").code == 2


def test_processes_of_the_command_end_with_it(
    run: Run, scenario: Path, app: tuple[str, str]
) -> None:
    script = 'sleep 1000 & echo "child $!"; exec "$@"'
    done = run(scenario, "--rate", 300, "--", "sh", "-c", script, "sh", *app)
    child = re.search(r"child (\d+)", done.stdout)

    assert done.code == 0
    assert child
    assert is_over(child[1])


def test_external_software_is_waited_for(scenario: Path) -> None:
    """The scenario begins when it first polls, and goes by the real clock."""
    running = subprocess.Popen(
        [*RUN, str(scenario), "--as", "app-0", "--rate", "300"], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    where = re.search(r"app-0 is external; its endpoint is (http://\S+)", running.stdout.readline())
    assert where
    url = f"{where[1]}/metadata/scheduledevents?api-version=2020-07-01"
    approve_all(url)
    output, _ = running.communicate(timeout=LIMIT_SECONDS)

    assert (running.returncode, "small passed (2 expectations)" in output) == (0, True)


def approve_all(url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # ends with the first event, or with the time
        headers = {"Metadata": "true"}
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=10
        ) as response:
            events = json.load(response)["Events"]
        if events:
            body = json.dumps({"StartRequests": [{"EventId": events[0]["EventId"]}]}).encode()
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10).close()
            return
        time.sleep(0.1)
    raise AssertionError("no event came")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_run_ends_the_command_and_reports_so_far(
    scenario: Path, app: tuple[str, str], number: int
) -> None:
    html, junit = scenario.parent / "report.html", scenario.parent / "junit.xml"
    files = ("--html", str(html), "--junit", str(junit))
    command = ("sh", "-c", 'echo "child $$"; exec "$@"', "sh", *app)
    running = subprocess.Popen(
        [*RUN, str(scenario), "--rate", "1", *files, "--", *command],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    lines = iter(running.stdout.readline, "")
    child = next(match for line in lines if (match := re.search(r"child (\d+)", line)))
    running.send_signal(number)
    output, _ = running.communicate(timeout=LIMIT_SECONDS)

    assert running.returncode == 130
    assert is_over(child[1])
    assert re.search(r"^interrupted at \+\S+ of 5m$", output, re.MULTILINE)
    assert "not reached  app-0 approves restart within 4m: the step did not run\n" in output
    assert "interrupted at" in html.read_text()
    assert "not reached" in junit.read_text()


def test_run_that_is_interrupted_before_the_first_poll_reports_too(scenario: Path) -> None:
    running = subprocess.Popen(
        [*RUN, str(scenario), "--as", "app-0"], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    lines = iter(running.stdout.readline, "")
    assert any(line.startswith("waiting for the first poll") for line in lines)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=LIMIT_SECONDS)

    assert running.returncode == 130
    assert "not reached  app-0 polls its endpoint: interrupted\n" in output
    assert output.endswith("small FAILED (0 of 3 expectations, 3 not reached)\n")
