"""The real agent process against the real server."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.agent_process import MODULE, RULE, AgentProcess, agent_of, eventually, zipapp
from tests.e2e.crooked import Unreachable
from tests.e2e.service import Service, running

FLEET = """
scopes:
  - name: web
    kind: scale-set
    policy: {terminate_notice: 5m}
    vms:
      - {name: web-0, address: 127.0.0.1, host: host-a}
      - {name: web-1, address: 127.0.0.2, host: host-b}
      - {name: web-2, address: 127.0.0.3, host: host-c}
"""
TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
QUICK = [flag for kind in TYPES for flag in ("--simulate-duration", f"{kind}=1s")]
"""Over before an agent, which asks once a second, has surely seen that it started."""
LASTING = [flag for kind in TYPES for flag in ("--simulate-duration", f"{kind}=1h")]
"""For tests that want to see Started: it lasts until the test completes the event."""
EVENTS = {
    "Freeze": ("/hosts/host-a/maintain", {"type": "Freeze"}),
    "Reboot": ("/vms/web-0/restart", None),
    "Redeploy": ("/vms/web-0/redeploy", None),
    "Preempt": ("/vms/web-1/evict", None),
    "Terminate": ("/vms/web-2/delete", None),
}
"""The last two hit peers: the VM that they hit is not there to recover."""
HELD = RULE.replace("when-prepared", "never")


def seen(service: Service) -> Service:
    """Who polls is told."""
    service.poll()
    return service


def complete_when_started(
    service: Service, agent: AgentProcess, kind: str, answer: dict[str, Any]
) -> None:
    """End the impact when the agent has seen that it began."""
    event = answer["event"] if "event" in answer else answer["events"][0]
    eventually(agent.ran, lambda ran: f"start {kind}" in ran)
    assert service.ask("POST", f"/events/{event['id']}/complete")[0] == 200


@pytest.fixture(params=["module", "zipapp"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Sequence[str]:
    return MODULE if request.param == "module" else zipapp(tmp_path)


def test_each_event_type_is_prepared_approved_and_recovered(
    tmp_path: Path, command: Sequence[str]
) -> None:
    """The promise of the agent. The zipapp runs with an empty environment and nothing installed."""
    environ: dict[str, str] | None = None if command == MODULE else {}
    with (
        running(tmp_path, *LASTING, fleet=FLEET) as service,
        agent_of(
            tmp_path / "a", f"{service.metadata}/as/web-0", command=command, environ=environ
        ) as agent,
    ):
        agent.configure()
        agent.start()
        eventually(lambda: agent.status()["contact_seconds"], lambda heard: heard is not None)
        expected: list[str] = []
        for kind, (path, body) in EVENTS.items():
            status, answer = service.ask("POST", path, body)
            assert status == 202, answer
            complete_when_started(service, agent, kind, answer)
            expected += [f"{phase} {kind}" for phase in ("prepare", "start", "recover")]
            recovered = expected[-1]
            ran = eventually(agent.ran, lambda ran: recovered in ran)  # noqa: B023
            assert ran == expected
        eventually(agent.status, lambda status: not status["workflows"])

        assert agent.journal().count("approved") == len(EVENTS)
        assert agent.end() == 0
        assert agent.ran() == expected
        assert not agent.socket.exists()


def test_preempt_is_prepared_and_approved_in_30_seconds(tmp_path: Path) -> None:
    """Here, in 3 seconds."""
    with (
        running(
            tmp_path, "--rate", "10", "--simulate-duration", "Preempt=5s", fleet=FLEET
        ) as service,
        agent_of(tmp_path / "a", f"{service.metadata}/as/web-1") as agent,
    ):
        agent.configure()
        agent.start()
        eventually(lambda: agent.status()["contact_seconds"], lambda heard: heard is not None)
        service.ask("POST", "/vms/web-1/evict")
        eventually(agent.journal, lambda journal: "approved" in journal)

        assert agent.ran()[0] == "prepare Preempt"
        assert agent.status()["is_drained"]


def test_agent_with_hold_never_approves(tmp_path: Path) -> None:
    """The event starts at its NotBefore."""
    with (
        running(
            tmp_path, "--rate", "300", "--simulate-duration", "Reboot=5s", fleet=FLEET
        ) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
    ):
        agent.configure(RULE + "hold = true\n")
        agent.start()
        _, answer = service.ask("POST", "/vms/web-0/restart")
        eventually(agent.ran, lambda ran: ran == ["prepare Reboot", "start Reboot"])

        assert "approving" not in agent.journal()
        assert service.ask("GET", f"/events/{answer['event']['id']}")[1]["approvals"] == []


def test_killed_agent_neither_repeats_prepare_nor_skips_recover(tmp_path: Path) -> None:
    """Killed between prepare and start."""
    with (
        running(tmp_path, *LASTING, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
    ):
        agent.configure(HELD)
        agent.start()
        _, answer = service.ask("POST", "/vms/web-0/restart")
        eventually(agent.journal, lambda journal: "ended" in journal)
        agent.end(signal.SIGKILL)
        agent.start()
        eventually(lambda: agent.status()["contact_seconds"], lambda heard: heard is not None)
        service.approve(answer["event"]["id"])
        complete_when_started(service, agent, "Reboot", answer)
        eventually(agent.ran, lambda ran: "recover Reboot" in ran)
        eventually(agent.status, lambda status: not status["workflows"])
        agent.end()
        agent.start()
        eventually(lambda: agent.status()["contact_seconds"], lambda heard: heard is not None)

        assert agent.ran() == ["prepare Reboot", "start Reboot", "recover Reboot"]


def test_event_that_ended_without_the_agent_is_recovered(tmp_path: Path) -> None:
    """As after the reboot itself."""
    with (
        running(tmp_path, *QUICK, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
    ):
        agent.configure(HELD)
        agent.start()
        _, answer = service.ask("POST", "/vms/web-0/restart")
        eventually(agent.journal, lambda journal: "ended" in journal)
        agent.end(signal.SIGKILL)
        service.approve(answer["event"]["id"])
        eventually(service.poll, lambda document: not document["Events"])
        agent.start()
        eventually(agent.ran, lambda ran: ran == ["prepare Reboot", "recover Reboot"])


def test_sighup_loads_rules_and_a_wrong_file_keeps_them(tmp_path: Path) -> None:
    """A typo must not leave a VM without its agent."""
    with (
        running(tmp_path, *QUICK, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
    ):
        agent.configure(
            '[[rule]]\nname = "none"\ntypes = ["Freeze"]', more="listen = '127.0.0.1:0'"
        )
        agent.start()
        listen = agent.log().partition("listen=")[2].split()[0]
        agent.configure(RULE, more="listen = '127.0.0.1:0'")
        agent.send(signal.SIGHUP)
        eventually(agent.log, lambda log: "rules loaded" in log)
        agent.config.write_text(agent.config.read_text().replace("when-prepared", "sometime"))
        agent.send(signal.SIGHUP)
        log = eventually(agent.log, lambda log: "config rejected, keeping previous rules" in log)

        line = agent.config.read_text().split("\n").index("[[rule]]") + 1
        assert f"{agent.config}:{line}: rule[0].approve: expected one of never" in log
        assert fetch(f"http://{listen}/readyz")[0] == 503
        assert fetch(f"http://{listen}/healthz") == (200, "alive\n")
        service.ask("POST", "/vms/web-0/restart")
        eventually(agent.ran, lambda ran: "recover Reboot" in ran)
        agent.configure(RULE, more="listen = '127.0.0.1:0'")
        agent.send(signal.SIGHUP)
        assert eventually(lambda: fetch(f"http://{listen}/readyz")[0], lambda status: status == 200)
        assert (
            'forewarn_agent_steps_total{phase="recover",result="done"} 1'
            in fetch(f"http://{listen}/metrics")[1]
        )


def test_drainz_shows_a_pending_event(tmp_path: Path) -> None:
    """From the notice until recovery."""
    with (
        running(tmp_path, *QUICK, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
    ):
        agent.configure(HELD, more="listen = '127.0.0.1:0'")
        agent.start()
        drainz = f"http://{agent.log().partition('listen=')[2].split()[0]}/drainz"
        assert fetch(drainz) == (200, "in service\n")
        _, answer = service.ask("POST", "/vms/web-0/restart")
        eventually(lambda: fetch(drainz), lambda said: said == (503, "drained\n"))
        service.approve(answer["event"]["id"])
        eventually(lambda: fetch(drainz), lambda said: said == (200, "in service\n"))

        assert agent.ran()[-1] == "recover Reboot"


def test_approval_waits_for_a_local_program(tmp_path: Path) -> None:
    """A database that is still flushing decides."""
    with (
        running(tmp_path, *LASTING, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
        socket.socket(socket.AF_UNIX) as program,
    ):
        agent.configure()
        agent.start()
        program.settimeout(30)
        program.connect(str(agent.socket))
        with program.makefile() as lines:
            program.sendall(b'{"register": "db"}\n')
            assert json.loads(lines.readline()) == {"registered": "db"}
            _, answer = service.ask("POST", "/vms/web-0/restart")
            told = json.loads(lines.readline())
            eventually(agent.ran, lambda ran: ran == ["prepare Reboot"])
            program.sendall(
                json.dumps({"more": told["event"]["id"], "seconds": 60}).encode() + b"\n"
            )
            assert json.loads(lines.readline())["seconds"] == 60.0
            assert "approving" not in agent.journal()
            shown = agent.run("status", "--socket", str(agent.socket)).stdout
            program.sendall(json.dumps({"ready": told["event"]["id"]}).encode() + b"\n")
            complete_when_started(service, agent, "Reboot", answer)
            phases = [json.loads(lines.readline()).get("phase") for _ in range(3)]

        assert (told["phase"], phases) == ("prepare", [None, "start", "recover"])
        assert "applications: db\nReboot " in shown


def test_systemd_is_notified_of_each_state(tmp_path: Path) -> None:
    """READY, WATCHDOG while it polls, RELOADING and STOPPING."""
    with (
        running(tmp_path, fleet=FLEET) as service,
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        agent_of(tmp_path / "a", f"{service.metadata}/as/web-0") as agent,
    ):
        systemd.settimeout(30)
        systemd.bind(f"{folder}/n")
        agent.environ |= {"NOTIFY_SOCKET": f"{folder}/n", "WATCHDOG_USEC": "400000"}
        agent.configure()
        agent.start()
        said = [systemd.recv(4096).decode() for _ in range(5)]
        agent.send(signal.SIGHUP)
        while not said[-1].startswith("READY=1"):  # ends with READY, or with the time
            said.append(systemd.recv(4096).decode())
        assert agent.end() == 0
        while not said[-1].startswith("STOPPING=1"):  # ends with STOPPING, or with the time
            said.append(systemd.recv(4096).decode())

    stages = [words.partition("=")[0] for words in said]
    assert stages[0] == "READY"
    assert "WATCHDOG" in stages
    assert stages.index("RELOADING") < len(stages) - 1
    assert "STATUS=web-0: no events" in said


def test_second_agent_for_the_same_journal_is_rejected(tmp_path: Path) -> None:
    """Two would run every step twice."""
    with (
        running(tmp_path, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{service.metadata}/as/web-0") as agent,
    ):
        agent.configure()
        agent.start()
        second = agent.run("run", "--config", str(agent.config))

        assert (second.returncode, second.stdout) == (4, "")
        assert "another agent uses it" in second.stderr
        assert second.stderr.count("\n") == 1


def test_dry_run_logs_and_changes_nothing(tmp_path: Path) -> None:
    """Also beside a running agent: it has its own journal and opens no socket."""
    with (
        running(tmp_path, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
    ):
        agent.configure()
        service.ask("POST", "/vms/web-0/restart")
        dry = agent.run("run", "--config", str(agent.config), "--dry-run", "--once")

        assert dry.returncode == 0, dry.stderr
        assert "dry run: this would be done" in dry.stderr
        assert "prepare: run /bin/sh" in dry.stderr
        assert agent.ran() == []
        assert [path.name for path in agent.folder.iterdir()] == ["agent.toml"]
        assert service.poll()["Events"][0]["EventStatus"] == "Scheduled"


def test_once_does_what_is_due_and_exits(tmp_path: Path) -> None:
    """For a timer, or to try a file."""
    with (
        running(tmp_path, *QUICK, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{seen(service).metadata}/as/web-0") as agent,
    ):
        agent.configure()
        service.ask("POST", "/vms/web-0/restart")
        first = agent.run("run", "--config", str(agent.config), "--once")
        assert (first.returncode, agent.ran()) == (0, ["prepare Reboot"]), first.stderr
        eventually(service.poll, lambda document: not document["Events"])
        second = agent.run("run", "--config", str(agent.config), "--once")

        assert (second.returncode, agent.ran()) == (0, ["prepare Reboot", "recover Reboot"]), (
            second.stderr
        )


def test_once_without_an_endpoint_is_exit_code_4(tmp_path: Path) -> None:
    """Nothing listens on port 1."""
    with agent_of(tmp_path / "a", "http://127.0.0.1:1") as agent:
        agent.configure()
        ended = agent.run("run", "--config", str(agent.config), "--once")

        assert ended.returncode == 4
        assert ended.stderr.splitlines()[-1].startswith(
            "forewarn-agent: no response from 127.0.0.1:1: Connection refused"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_long_poll(tmp_path: Path, number: int) -> None:
    """A shutdown does not wait for it."""
    with (
        running(tmp_path, fleet=FLEET) as service,
        agent_of(tmp_path / "a", f"{service.metadata}/as/web-0") as agent,
    ):
        agent.configure()
        agent.start()
        eventually(lambda: agent.status()["contact_seconds"], lambda heard: heard is not None)

        assert agent.end(number) == 0
        assert agent.log().endswith("agent stopped\n")


def test_sigterm_ends_the_agent_while_its_connect_hangs(tmp_path: Path) -> None:
    """Behind a firewall that drops packets, every attempt takes its whole timeout."""
    with Unreachable() as endpoint, agent_of(tmp_path / "a", endpoint.url) as agent:
        agent.configure()
        agent.start()
        eventually(endpoint.attempts)

        assert agent.end() == 0
        assert "did not answer in time" not in agent.log(), "it was not waited for"
        assert agent.log().endswith("agent stopped\n")


def test_agent_needs_no_part_of_the_server(tmp_path: Path) -> None:
    """`pip install forewarn` inside a VM is enough."""
    with agent_of(tmp_path / "a", "http://127.0.0.1:1") as agent:
        agent.configure()
        parts = ("msgspec", "litestar", "uvicorn", "uvloop", "httptools", "yaml")
        hide = f"import sys; sys.modules.update(dict.fromkeys({parts}))"
        program = f"{hide}; from forewarn.cli.main import run; sys.exit(run(sys.argv[1:]))"
        words = [sys.executable, "-c", program, "agent", "check", "--config", str(agent.config)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.endswith("agent.toml is valid: 1 rule(s)\n")


def test_zipapp_is_reproducible_and_holds_only_the_guest(tmp_path: Path) -> None:
    """A signature covers bytes, and a server does not belong inside a VM."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (Path(zipapp(tmp_path / name)[-1]) for name in ("a", "b"))
    names = zipfile.ZipFile(one).namelist()

    assert one.read_bytes() == other.read_bytes()
    assert {name.split("/")[1] for name in names if "/" in name} == {
        "__init__.py",
        "errors.py",
        "systemd.py",
        "client",
        "agent",
    }


def fetch(url: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
