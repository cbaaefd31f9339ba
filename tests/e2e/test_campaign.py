"""Campaigns with real processes: by the command line, through a kill of the service, braked by a
failure or a health command.
"""

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.cli_service import FOREWARN, environment, forewarn
from tests.e2e.service import Service, running
from tests.e2e.waiting import eventually

HOSTS = ("rack-1", "rack-2", "rack-3", "rack-4")
FLEET = (
    "scopes:\n  - name: web\n    kind: availability-set\n    policy: {max_unavailable: 1}\n    vms:\n"
    + "".join(
        f"      - {{name: web-{number}, host: {host}}}\n" for number, host in enumerate(HOSTS)
    )
)
FAST = ("--rate", "900", "--simulate-duration", "Reboot=300ms")
"""A notice of 15 minutes takes a second."""


def started(service: Service, *more: str) -> str:
    """Starts a campaign with the command line and gives its id."""
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


def shown(service: Service, campaign: str) -> Any:
    status, answer = service.ask("GET", f"/campaigns/{campaign}")
    assert status == 200
    return answer


def test_a_campaign_goes_on_after_the_service_was_killed_half_way_and_ends(tmp_path: Path) -> None:
    """No host is forgotten and none is done twice: every VM has had one event, and the history
    tells each of them once.
    """
    with running(tmp_path, *FAST, fleet=FLEET) as service:
        campaign = started(service, "--name", "kernel")
        eventually(lambda: shown(service, campaign)["hosts"]["done"] >= 1)
        service.kill()
        service.start()
        eventually(lambda: bool(shown(service, campaign)["ended_at"]))

        end = shown(service, campaign)
        assert (end["state"], end["hosts"]["done"]) == ("done", 4)
        entries = service.ask("GET", "/history?limit=1000")[1]["history"]
        scheduled = [entry["resources"] for entry in entries if entry["what"] == "scheduled"]
        assert sorted(scheduled) == [["web-0"], ["web-1"], ["web-2"], ["web-3"]]
        assert {entry["by"] for entry in entries if entry["what"] == "scheduled"} == {
            "campaign kernel"
        }


def test_the_plan_is_printed_and_nothing_is_done(tmp_path: Path) -> None:
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
        "HOSTS",
        "STARTED",
        "AT",
        "ESTIMATED",
        "END",
    ]


def test_a_watch_shows_progress_and_ends_with_the_campaign(tmp_path: Path) -> None:
    """In a pipe a line whenever something is new; the exit code tells scripts that all went well."""
    with running(tmp_path, "--simulate-duration", "Reboot=10ms", fleet=FLEET) as service:
        campaign = started(service)
        with subprocess.Popen(
            [FOREWARN, "campaign", "watch", campaign],
            env=environment(FOREWARN_CONTROL=service.control, PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            text=True,
        ) as watching:
            assert watching.stdout
            first = watching.stdout.readline()
            eventually(lambda: bool(approved(service, campaign)["ended_at"]))
            rest = watching.stdout.read().splitlines()

    assert "rack-1: 1 event to start until" in first
    assert "probably ends 20" in first
    assert rest[-1] == f"campaign {campaign} is done; 4 of 4 hosts done"
    assert watching.returncode == 0


def approved(service: Service, campaign: str) -> Any:
    """The campaign, when all that is Scheduled has been approved."""
    for event in service.ask("GET", "/events")[1]["events"]:
        if event["status"] == "Scheduled":
            assert service.ask("POST", f"/events/{event['id']}/approve")[0] in (200, 202, 409)
    return shown(service, campaign)


def test_a_watch_on_a_terminal_is_a_bar(tmp_path: Path) -> None:
    with running(tmp_path, *FAST, fleet=FLEET) as service:
        campaign = started(service)
        outlet, inlet = pty.openpty()
        with subprocess.Popen(
            [FOREWARN, "campaign", "watch", campaign],
            stdout=inlet,
            env=environment(FOREWARN_CONTROL=service.control, TERM="xterm"),
        ) as process:
            os.close(inlet)
            seen = b""
            while process.poll() is None or b"is done" not in seen:  # ends with the process
                try:
                    seen += os.read(outlet, 65_536)
                except OSError:
                    break
        os.close(outlet)

    assert process.returncode == 0
    assert "━" in seen.decode()
    assert b"4/4 hosts" in seen


def test_a_failed_impact_pauses_the_campaign_and_a_resume_goes_on(tmp_path: Path) -> None:
    """A watch of it ends then, and says so by its exit code; a person decides what comes next."""
    with running(
        tmp_path,
        *FAST,
        "--simulate-failure",
        "web-1",
        "--impact-retry-seconds-max",
        "0",
        fleet=FLEET,
    ) as service:
        campaign = started(service)
        watched = forewarn("campaign", "watch", campaign, FOREWARN_CONTROL=service.control)
        resumed = forewarn("campaign", "resume", campaign, FOREWARN_CONTROL=service.control)
        eventually(lambda: bool(shown(service, campaign)["ended_at"]))
        end = shown(service, campaign)

    assert watched.returncode == 1
    assert "is paused: rack-2: event" in watched.stdout.splitlines()[-1]
    assert resumed.stdout.startswith(f"campaign {campaign} is running")
    assert (end["state"], end["hosts"]["done"], end["hosts"]["failed"]) == ("done", 3, 1)
    assert [trouble["host"] for trouble in end["troubles"]] == ["rack-2"]


def test_a_health_command_is_asked_after_each_host_and_its_no_pauses(tmp_path: Path) -> None:
    """It runs without a shell and is told the host; what it says is why the campaign was paused."""
    script = tmp_path / "health"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint('disk of', sys.argv[1])\nsys.exit(os.environ['FOREWARN_HOST'] == 'rack-2')\n"
    )
    script.chmod(0o755)
    with running(
        tmp_path, *FAST, "--campaign-health-command", f"{script} {{host}}", fleet=FLEET
    ) as service:
        campaign = started(service)
        eventually(lambda: bool(shown(service, campaign)["state"] == "paused"))
        braked = shown(service, campaign)

    assert (braked["hosts"]["done"], braked["hosts"]["failed"], braked["is_braked"]) == (1, 1, True)
    assert braked["why_paused"].endswith("exited with 1 disk of rack-2")


def test_a_cancel_takes_back_what_is_scheduled(tmp_path: Path) -> None:
    with running(tmp_path, "--rate", "1", fleet=FLEET) as service:
        campaign = started(service)
        eventually(lambda: len(service.ask("GET", "/events")[1]["events"]) == 1)
        result = forewarn("campaign", "cancel", campaign, FOREWARN_CONTROL=service.control)
        eventually(lambda: bool(shown(service, campaign)["ended_at"]))

        assert result.stdout.startswith(f"campaign {campaign} is canceled")
        assert service.ask("GET", "/events")[1]["events"] == []
        assert shown(service, campaign)["hosts"]["skipped"] == 4
        refused = forewarn("campaign", "resume", campaign, FOREWARN_CONTROL=service.control)
        assert (refused.returncode, refused.stderr) == (
            1,
            f"forewarn: campaign {campaign} is canceled; expected one that is running or paused\n",
        )


def test_a_health_command_that_hangs_is_ended_with_all_it_started_and_says_no(
    tmp_path: Path,
) -> None:
    """Its time is bounded, and nothing of it is left behind."""
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nexec sleep 1000\n")
    script.chmod(0o755)
    check = ("--campaign-health-command", str(script), "--campaign-health-seconds-max", "1")
    with running(tmp_path, *FAST, *check, fleet=FLEET) as service:
        campaign = started(service)
        eventually(lambda: bool(shown(service, campaign)["state"] == "paused"))
        braked = shown(service, campaign)

    assert "did not finish within 1 seconds and was killed" in braked["why_paused"]
    eventually(lambda: not Path(f"/proc/{(tmp_path / 'child').read_text().strip()}").exists())
