"""Campaigns with real processes: command line, a killed service, failures, health commands."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.e2e.cli_service import FOREWARN, environment, forewarn
from tests.e2e.service import Service, running, steady_port
from tests.e2e.waiting import eventually
from tests.unit.cli.test_api import serving

HOSTS = ("rack-1", "rack-2", "rack-3", "rack-4")
FLEET = (
    "scopes:\n  - name: web\n    kind: availability-set\n    policy: {max_unavailable: 1}\n"
    "    vms:\n"
    + "".join(
        f"      - {{name: web-{number}, host: {host}}}\n" for number, host in enumerate(HOSTS)
    )
)
FAST = ("--rate", "900", "--simulate-duration", "Reboot=300ms")
"""A notice of 15 minutes takes a second."""


def start(service: Service, *more: str) -> str:
    """Start a campaign with the command line; returns its id."""
    result = forewarn(
        "campaign",
        "start",
        "--type",
        "Reboot",
        "--hosts",
        "rack-*",
        "--max-hosts",
        "2",
        *more,
        FOREWARN_CONTROL=service.control,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()[1]


def show(service: Service, campaign: str) -> Any:
    status, response = service.ask("GET", f"/campaigns/{campaign}")
    assert status == 200
    return response


def test_campaign_continues_after_the_service_was_killed(tmp_path: Path) -> None:
    """No host is forgotten and none is done twice: every VM has one event in the history."""
    with running(tmp_path, *FAST, fleet=FLEET) as service:
        campaign = start(service, "--name", "kernel")
        eventually(lambda: show(service, campaign)["hosts"]["done"] >= 1)
        service.kill()
        service.start()
        eventually(lambda: bool(show(service, campaign)["ended_at"]))

        end = show(service, campaign)
        assert (end["state"], end["hosts"]["done"]) == ("done", 4)
        entries = service.ask("GET", "/history?limit=1000")[1]["history"]
        scheduled = [entry["resources"] for entry in entries if entry["what"] == "scheduled"]
        assert sorted(scheduled) == [["web-0"], ["web-1"], ["web-2"], ["web-3"]]
        assert {entry["by"] for entry in entries if entry["what"] == "scheduled"} == {
            "campaign kernel"
        }


def test_plan_prints_the_waves_and_starts_nothing(tmp_path: Path) -> None:
    with running(tmp_path, *FAST, fleet=FLEET) as service:
        words = ("--type", "Reboot", "--hosts", "rack-[12]", "--max-hosts", "2", "--plan")
        result = forewarn("campaign", "start", *words, FOREWARN_CONTROL=service.control)
        listed = forewarn("campaign", "list", FOREWARN_CONTROL=service.control)

    assert result.stdout == "wave 1: rack-1\nwave 2: rack-2\n2 hosts in 2 waves; nothing was done\n"
    assert listed.stdout.split() == [
        "ID",
        "NAME",
        "TYPE",
        "STATE",
        "ESTIMATED",
        "END",
        "STARTED",
        "AT",
        "HOSTS",
    ]


def test_watch_shows_progress_and_ends_with_the_campaign(tmp_path: Path) -> None:
    """In a pipe a line for each change; the exit code tells scripts whether all hosts are done."""
    with running(tmp_path, "--simulate-duration", "Reboot=10ms", fleet=FLEET) as service:
        campaign = start(service)
        with subprocess.Popen(
            [FOREWARN, "campaign", "watch", campaign],
            env=environment(FOREWARN_CONTROL=service.control, PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            text=True,
        ) as watching:
            assert watching.stdout
            first = watching.stdout.readline()
            eventually(lambda: bool(approve_all(service, campaign)["ended_at"]))
            rest = watching.stdout.read().splitlines()

    assert "rack-1: 1 event to start (20" in first
    assert "probably ends 20" in first
    assert rest[-1] == f"campaign {campaign} is done; 4 of 4 hosts done"
    assert watching.returncode == 0


def test_watch_continues_after_a_restart_of_the_service(tmp_path: Path) -> None:
    """A campaign takes hours, and the service is upgraded meanwhile."""
    control = f"127.0.0.1:{steady_port()}"
    flags = ("--simulate-duration", "Reboot=10ms", "--control", control)
    with running(tmp_path, *flags, fleet=FLEET) as service:
        campaign = start(service)
        with subprocess.Popen(
            [FOREWARN, "campaign", "watch", campaign],
            env=environment(FOREWARN_CONTROL=service.control, PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as watching:
            assert watching.stdout
            assert watching.stderr
            watching.stdout.readline()
            service.kill()
            reported = watching.stderr.readline()
            service.start()
            eventually(lambda: bool(approve_all(service, campaign)["ended_at"]))
            rest = watching.stdout.read().splitlines()

    assert f"http://{control}" in reported
    assert "demo" not in reported
    assert reported.endswith("; retrying\n")
    assert rest[-1] == f"campaign {campaign} is done; 4 of 4 hosts done"
    assert watching.returncode == 0


def test_commands_use_another_server_while_one_is_away(tmp_path: Path) -> None:
    """Two servers of one store, and one that is down."""
    store = ("--store", f"sqlite:///{tmp_path}/shared.db")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        running(tmp_path / "one", *store, *FAST, fleet=FLEET) as first,
        running(tmp_path / "two", *store, *FAST, fleet=FLEET) as second,
    ):
        urls = f"{first.control},{second.control}"
        before = forewarn("vm", "list", FOREWARN_CONTROL=urls)
        first.kill()
        after = forewarn("vm", "list", FOREWARN_CONTROL=urls)
        restarted = forewarn("vm", "restart", "web-0", FOREWARN_CONTROL=urls)
        second.kill()
        lost = forewarn("vm", "list", FOREWARN_CONTROL=urls)

    assert before.stdout == after.stdout != ""
    assert (restarted.returncode, restarted.stderr) == (0, "")
    assert lost.returncode == 4
    assert f"no service is reachable at {' or '.join(sorted(urls.split(',')))}: " in lost.stderr


def approve_all(service: Service, campaign: str) -> Any:
    """Approve every Scheduled event; returns the campaign."""
    for event in service.ask("GET", "/events")[1]["events"]:
        if event["status"] == "Scheduled":
            assert service.ask("POST", f"/events/{event['id']}/approve")[0] in (200, 202, 409)
    return show(service, campaign)


def watch_on_a_terminal(campaign: str, control: str) -> tuple[int, str]:
    """The exit code, and what the terminal showed."""
    outlet, inlet = pty.openpty()
    with subprocess.Popen(
        [FOREWARN, "campaign", "watch", campaign],
        stdout=inlet,
        stderr=inlet,
        env=environment(FOREWARN_CONTROL=control, TERM="xterm", COLUMNS="80"),
    ) as process:
        os.close(inlet)
        seen = b""
        with suppress(OSError):  # the process has ended
            while part := os.read(outlet, 65_536):
                seen += part
    os.close(outlet)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())


def test_watch_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """Also on one of 80 columns, below the lines that say what it waits for."""
    with running(tmp_path, *FAST, fleet=FLEET) as service:
        code, text = watch_on_a_terminal(start(service), service.control)

    assert code == 0
    assert re.search(r"━{30} +\d+% \d:\d\d:\d\d hosts", text.replace("╸", "━").replace("╺", "━"))
    assert "4 of 4 hosts done" in text


def test_watch_on_a_terminal_survives_a_restart_at_any_request() -> None:
    """There it also reads the time of the service, for times such as `in 5m`."""
    counts = {"total": 1, "done": 0, "in_progress": 1, "waiting": 0, "skipped": 0, "failed": 0}
    campaign = {
        "id": "c1", "name": "c1", "state": "running", "hosts": counts, "in_progress": [],
        "waiting_for": "rack-1", "pause_reason": "", "paused_by_failure": False,
        "estimated_end": "2030-01-31T13:00:00Z", "ended_at": None,
    }  # fmt: skip
    done = {"state": "done", "hosts": counts | {"done": 1, "in_progress": 0}}
    session_requests: list[str] = []

    class Restarting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            response: dict[str, object] = campaign
            if self.path.endswith("/session"):
                session_requests.append(self.path)
                response = {"now": "2030-01-31T12:00:00Z"}
                if len(session_requests) == 1:
                    return  # the connection ends without a response
            elif "?" in self.path:
                response = {"campaigns": [campaign], "total": 1, "next": None}
            elif len(session_requests) > 1:
                response = campaign | done | {"ended_at": "2030-01-31T12:00:00Z"}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(response).encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Restarting) as control:
        code, text = watch_on_a_terminal("c1", control)

    assert "; retrying" in text
    assert "waiting for rack-1; probably ends in 1h" in text
    assert (code, "campaign c1 is done; 1 of 1 hosts done" in text) == (0, True)


def test_failed_impact_pauses_the_campaign_until_a_resume(tmp_path: Path) -> None:
    """A watch ends then with exit code 1; an operator decides what happens next."""
    with running(
        tmp_path,
        *FAST,
        "--simulate-failure",
        "web-1",
        "--impact-retry-seconds-max",
        "0",
        fleet=FLEET,
    ) as service:
        campaign = start(service)
        watched = forewarn("campaign", "watch", campaign, FOREWARN_CONTROL=service.control)
        resumed = forewarn("campaign", "resume", campaign, FOREWARN_CONTROL=service.control)
        eventually(lambda: bool(show(service, campaign)["ended_at"]))
        end = show(service, campaign)

    assert watched.returncode == 1
    assert "is paused: rack-2: event" in watched.stdout.splitlines()[-1]
    assert resumed.stdout.startswith(f"campaign {campaign} is running")
    assert (end["state"], end["hosts"]["done"], end["hosts"]["failed"]) == ("done", 3, 1)
    assert [host["host"] for host in end["skipped_hosts"]] == ["rack-2"]


def test_failing_health_command_pauses_the_campaign(tmp_path: Path) -> None:
    """It runs without a shell and gets the host; its output is the reason of the pause."""
    script = tmp_path / "health"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint('disk of', sys.argv[1])\n"
        "sys.exit(os.environ['FOREWARN_HOST'] == 'rack-2')\n"
    )
    script.chmod(0o755)
    with running(
        tmp_path, *FAST, "--campaign-health-command", f"{script} {{host}}", fleet=FLEET
    ) as service:
        campaign = start(service)
        eventually(lambda: bool(show(service, campaign)["state"] == "paused"))
        paused = show(service, campaign)

    assert (paused["hosts"]["done"], paused["hosts"]["failed"], paused["paused_by_failure"]) == (
        1,
        1,
        True,
    )
    assert paused["pause_reason"].endswith("exited with 1 disk of rack-2")


def test_cancel_cancels_scheduled_events(tmp_path: Path) -> None:
    with running(tmp_path, "--rate", "1", fleet=FLEET) as service:
        campaign = start(service)
        eventually(lambda: len(service.ask("GET", "/events")[1]["events"]) == 1)
        result = forewarn("campaign", "cancel", campaign, FOREWARN_CONTROL=service.control)
        eventually(lambda: bool(show(service, campaign)["ended_at"]))

        assert result.stdout.startswith(f"campaign {campaign} is canceled")
        assert service.ask("GET", "/events")[1]["events"] == []
        assert show(service, campaign)["hosts"]["skipped"] == 4
        refused = forewarn("campaign", "resume", campaign, FOREWARN_CONTROL=service.control)
        assert (refused.returncode, refused.stderr) == (
            1,
            f"forewarn: campaign {campaign} is canceled; expected one that is running or paused\n",
        )


def test_health_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """Its time is limited, and no process of it is left behind."""
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nexec sleep 1000\n")
    script.chmod(0o755)
    check = ("--campaign-health-command", str(script), "--campaign-health-seconds-max", "1")
    with running(tmp_path, *FAST, *check, fleet=FLEET) as service:
        campaign = start(service)
        eventually(lambda: bool(show(service, campaign)["state"] == "paused"))
        paused = show(service, campaign)

    assert "did not finish within 1 seconds and was killed" in paused["pause_reason"]
    eventually(lambda: not Path(f"/proc/{(tmp_path / 'child').read_text().strip()}").exists())
