"""`forewarn lab serve`: its ready file, its API, and its end by a signal."""

import json
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from forewarn.cli.main import run as forewarn
from tests.e2e.cli_service import ROOT

POLL = "/metadata/scheduledevents?api-version=2020-07-01"
READY_SECONDS_MAX = 120
"""256 listeners take a while on a busy machine. A lab that ends is noticed at once."""


class Lab:
    """A lab's process, by the URLs of its ready file."""

    def __init__(self, process: subprocess.Popen[str], urls: dict[str, Any]) -> None:
        self.process = process
        self.urls = urls

    def control(self, method: str, path: str, values: object = None) -> Any:
        body = None if values is None else json.dumps(values).encode()
        headers = {} if values is None else {"Content-Type": "application/json"}
        with urlopen(
            Request(f"{self.urls['control']}/api/v1{path}", body, headers, method=method),
            timeout=30,
        ) as response:
            return json.load(response)

    def refused(self, method: str, path: str, values: object = None) -> tuple[int, str]:
        with pytest.raises(HTTPError) as refusal:
            self.control(method, path, values)
        with refusal.value as response:
            return response.code, json.load(response)["message"]

    def poll(self, vm: str) -> Any:
        with urlopen(
            Request(self.urls["vms"][vm] + POLL, headers={"Metadata": "true"}), timeout=30
        ) as response:
            return json.load(response)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Lab]:
    ready = folder / "ready.json"
    command = [
        sys.executable,
        "-m",
        "forewarn",
        "lab",
        "serve",
        "--port=0",
        "--control-port=0",
        f"--ready-file={ready}",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + READY_SECONDS_MAX
        while not ready.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.02)
        yield Lab(process, json.loads(ready.read_text()))
    finally:
        process.kill()
        process.communicate()


def test_lab_serves_moves_its_clock_and_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, "--start", "2030-01-31T12:00:00Z", "--seed", "7") as lab:
        assert lab.urls["pid"] == lab.process.pid
        assert lab.poll("database") == {"DocumentIncarnation": 1, "Events": []}
        event = lab.control("POST", "/vms/database/restart")["event"]
        assert event["not_before"] == "2030-01-31T12:15:00Z"
        later = lab.control("POST", "/clock/advance", {"seconds": 900})
        assert later == {
            "now": "2030-01-31T12:15:00Z",
            "rate": 1.0,
            "is_virtual": True,
            "is_running": False,
        }
        (shown,) = lab.poll("database")["Events"]
        assert (shown["EventId"], shown["EventStatus"]) == (event["id"], "Started")
        assert lab.poll("web-0") == {"DocumentIncarnation": 1, "Events": []}
        entries = lab.control("GET", "/transcript?limit=1000")["entries"]
        assert {entry["vm"] for entry in entries if entry["kind"] == "request"} == {
            "database",
            "web-0",
        }
        lab.process.send_signal(signal.SIGTERM)
        assert lab.process.wait(10) == 0


def test_faults_are_added_removed_and_validated_by_the_api(tmp_path: Path) -> None:
    with serving(tmp_path) as lab:
        added = lab.control("POST", "/faults", {"fault": "status", "code": 503, "vms": ["web-0"]})[
            "fault"
        ]
        with pytest.raises(HTTPError, match="503") as response:
            lab.poll("web-0")
        response.value.close()
        assert lab.poll("web-1")["Events"] == []
        assert [one["id"] for one in lab.control("GET", "/faults")["faults"]] == [added["id"]]
        lab.control("DELETE", f"/faults/{added['id']}")
        assert lab.poll("web-0")["Events"] == []
        assert lab.refused("POST", "/faults", {"fault": "status", "code": 200})[0] == 400
        assert lab.refused("POST", "/faults", {"fault": "stauts"})[0] == 400
        assert lab.refused("POST", "/faults", ["status"]) == (
            400,
            "body: expected a mapping that names the fault",
        )
        assert lab.refused("POST", "/faults", {"fault": "refuse", "vms": ["web-O"]})[0] == 404
        assert lab.refused("DELETE", "/faults/f99") == (404, "there is no fault 'f99'")


def test_refusal_is_over_when_the_clock_has_passed_its_end(tmp_path: Path) -> None:
    with serving(tmp_path) as lab:
        lab.control("POST", "/faults", {"fault": "refuse", "vms": ["web-0"], "for": "1m"})
        with pytest.raises(ConnectionResetError):
            lab.poll("web-0")
        lab.control("POST", "/clock/advance", {"seconds": 60})
        assert lab.poll("web-0")["Events"] == []


def test_large_fleet_gets_256_listeners(tmp_path: Path) -> None:
    many = [{"name": f"s-{number}", "vms": [{"name": f"vm-{number:03}"}]} for number in range(297)]
    (tmp_path / "many.yaml").write_text(json.dumps({"scopes": many}))
    with serving(tmp_path, "--fleet", str(tmp_path / "many.yaml")) as lab:
        page = lab.control("GET", "/listeners")
        assert (len(page["listeners"]), page["total"]) == (256, 297)
        assert page["listeners"] == lab.urls["vms"]


def test_transcript_shows_the_newest_entries_and_counts_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(*flags: str) -> tuple[list[str], str]:
        assert forewarn(["--control-url", lab.urls["control"], "lab", "transcript", *flags]) == 0
        shown = capsys.readouterr()
        return [line.split()[-1] for line in shown.out.splitlines()], shown.err

    with serving(tmp_path) as lab:
        for number in range(1, 6):
            lab.control("POST", "/clock/advance", {"seconds": number})
        assert show("--limit", "2") == (
            ["0:00:04", "0:00:05"],
            "3 more entries; use --limit to see them\n",
        )
        assert show("--limit", "2", "--after", "1") == (
            ["0:00:02", "0:00:03"],
            "2 more entries; use --limit to see them\n",
        )
        assert show()[1] == ""


def test_advance_takes_a_duration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, "--start", "2030-01-31T12:00:00Z") as lab:
        advance = ["--control-url", lab.urls["control"], "lab", "clock", "advance"]
        assert forewarn([*advance, "1h30m"]) == 0
        assert lab.control("GET", "/clock")["now"] == "2030-01-31T13:30:00Z"
        assert forewarn([*advance, "soon"]) == 2
        assert "'soon' is not a duration; expected a duration such as" in capsys.readouterr().err


def test_lab_commands_work_without_msgspec() -> None:
    program = (
        "import sys; sys.modules['msgspec'] = None; from forewarn.cli.lab import _parse_time;"
        "print(_parse_time('2030-01-31T12:00:00Z'))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert ran.stdout == "2030-01-31 12:00:00+00:00\n", ran.stderr


def test_ready_file_exists_only_while_the_lab_is_ready(tmp_path: Path) -> None:
    """A file that a killed lab left would send a suite to a wrong port."""
    ready = tmp_path / "ready.json"
    ready.write_text(
        '{"metadata": "http://127.0.0.1:1", "control": "http://127.0.0.1:1", "vms": {}, "pid": 1}'
    )
    command = [
        sys.executable,
        "-m",
        "forewarn",
        "lab",
        "serve",
        "--port=0",
        "--control-port=0",
        f"--ready-file={ready}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Console: http://127.0.0.1:")
        assert process.stdout.readline().startswith("the lab is ready")
        assert json.loads(ready.read_text())["pid"] == process.pid
        assert stat.S_IMODE(ready.stat().st_mode) == 0o644
        process.terminate()
        assert process.wait(10) == 0
        assert not ready.exists()
    finally:
        process.kill()
        process.communicate()


def test_lab_that_fails_to_start_leaves_no_ready_file(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [f"--port={taken.getsockname()[1]}", "--control-port=0", f"--ready-file={ready}"]
        command = [sys.executable, "-m", "forewarn", "lab", "serve", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode != 0
    assert not ready.exists()


def test_invalid_clock_change_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "--start", "2030-01-31T12:00:00Z") as lab:
        before = lab.control("GET", "/clock")
        assert lab.refused("POST", "/clock/advance", {"seconds": -1})[0] == 400
        assert lab.refused("POST", "/clock/advance", {"seconds": 1e300})[0] == 400
        assert lab.refused("POST", "/clock/advance", {"minutes": 1})[0] == 400
        assert lab.refused("PUT", "/clock", {"now": "2029-01-01T00:00:00Z"})[0] == 400
        assert lab.refused("PUT", "/clock", {"rate": 0})[0] == 400
        assert (
            lab.refused(
                "PUT", "/clock", {"rate": 5, "now": "2029-01-01T00:00:00Z", "is_running": True}
            )[0]
            == 400
        )
        assert lab.refused("PUT", "/clock", {"rate": 5, "now": "9999-12-31T00:00:00Z"})[0] == 400
        assert lab.control("GET", "/clock") == before


def test_real_clock_cannot_be_moved_but_takes_a_rate(tmp_path: Path) -> None:
    with serving(tmp_path, "--clock", "real", "--rate", "60") as lab:
        status, message = lab.refused("POST", "/clock/advance", {"seconds": 1})
        assert (status, message.partition(",")[0]) == (409, "this lab has the real clock")
        assert lab.control("PUT", "/clock", {"rate": 900})["rate"] == 900


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--start", "yesterday"], "'yesterday' is not a time"),
        (["--start", "2030-01-31T12:00:00"], "has no time zone"),
        (
            ["--start", "9999-12-31T12:00:00Z"],
            "the clock cannot start at 9999-12-31T12:00:00+00:00; expected 1970",
        ),
        (["--start", "9999-12-31T23:59:59-14:00"], "is not a time"),
        (["--clock", "real", "--start", "2030-01-31T12:00:00Z"], "the real clock cannot be set"),
        (["--fleet", "nowhere.yaml"], "cannot read the fleet file nowhere.yaml"),
        (["--ready-file", "no/such/folder/f"], "cannot write the ready file"),
    ],
)
def test_invalid_options_are_explained_in_one_line(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    code = forewarn(["lab", "serve", "--port=0", "--control-port=0", *flags])

    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_shipped_scenario_runs_over_the_api(tmp_path: Path) -> None:
    """In a lab of its own: the lab that runs it does not change."""
    with serving(tmp_path) as lab:
        before = lab.control("GET", "/vms")
        listed = lab.control("GET", "/scenarios")
        run = lab.control("POST", "/scenarios/user-restart/run")
        refused = lab.refused("POST", "/scenarios/nothing/run")
        after = lab.control("GET", "/vms")

    assert {"name": "user-restart"}.items() <= listed["scenarios"][-1].items()
    assert refused[0] == 404
    assert run["is_passed"]
    assert run["lines"][-1] == "user-restart passed (4 expectations)"
    assert after == before
