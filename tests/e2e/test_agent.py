"""The real agent process against the real server.

Most tests share one server, and each has a scope of its own there. Impacts last until the test
completes the event: an agent that polls once a second could miss a short one.
"""

import itertools
import json
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.agent_process import MODULE, RULE, AgentProcess, agent_of, eventually, zipapp
from tests.e2e.faulty_endpoint import Unreachable
from tests.e2e.service import Service, running

TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
ENDLESS = [flag for kind in TYPES for flag in ("--simulate-duration", f"{kind}=1h")]
HELD = RULE.replace("when-prepared", "never")
SCOPES = 20
numbers = itertools.count()


def fleet(scopes: int) -> str:
    return "scopes:\n" + "".join(
        f"""
  - name: s{scope}
    kind: scale-set
    policy: {{terminate_notice: 5m}}
    vms:
      - {{name: s{scope}-0, address: 127.0.{scope}.1, host: host-{scope}-a}}
      - {{name: s{scope}-1, address: 127.0.{scope}.2, host: host-{scope}-b}}
      - {{name: s{scope}-2, address: 127.0.{scope}.3, host: host-{scope}-c}}
"""
        for scope in range(scopes)
    )


class Scope:
    """A scope of three VMs. The agent runs on the first."""

    def __init__(self, service: Service, number: int) -> None:
        self.service = service
        self.number = number
        self.vm = f"s{number}-0"
        self.endpoint = f"{service.metadata}/as/{self.vm}"
        self.poll()  # a scope that never polled gets no events

    def poll(self) -> dict[str, Any]:
        return self.service.poll(vm=self.vm)

    def post(self, path: str, body: object = None) -> str:
        """Request an operation, and return the id of its event."""
        status, response = self.service.ask("POST", path, body)
        assert status == 202, response
        event = response["event"] if "event" in response else response["events"][0]
        event_id: str = event["id"]
        return event_id

    def restart(self) -> str:
        return self.post(f"/vms/{self.vm}/restart")

    def approve(self, event_id: str) -> None:
        assert self.service.approve(event_id, vm=self.vm) == 200

    def complete(self, event_id: str) -> None:
        assert self.service.ask("POST", f"/events/{event_id}/complete")[0] == 200


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with running(folder, "--store", "memory", *ENDLESS, fleet=fleet(SCOPES)) as service:
        yield service


@pytest.fixture
def scope(shared_service: Service) -> Scope:
    return Scope(shared_service, next(numbers))


@pytest.fixture
def agent(tmp_path: Path, scope: Scope) -> Iterator[AgentProcess]:
    with agent_of(tmp_path / "a", scope.endpoint) as agent:
        yield agent


def start(agent: AgentProcess) -> None:
    """Returns when the endpoint has responded."""
    agent.start()
    eventually(lambda: agent.status()["contact_seconds"], lambda seconds: seconds is not None)


def complete_when_started(scope: Scope, agent: AgentProcess, kind: str, event_id: str) -> None:
    eventually(agent.ran, lambda ran: f"start {kind}" in ran)
    scope.complete(event_id)


@pytest.mark.parametrize("form", ["module", "zipapp"])
def test_each_event_type_is_prepared_approved_and_recovered(
    tmp_path: Path, scope: Scope, form: str
) -> None:
    """The promise of the agent.

    The zipapp runs with an empty environment and nothing installed; one event is enough for it. The
    last two events affect peers: the VM that they affect is not there to recover.
    """
    name, host = f"s{scope.number}", f"host-{scope.number}-a"
    operations = {
        "Freeze": (f"/hosts/{host}/maintain", {"type": "Freeze"}),
        "Reboot": (f"/vms/{name}-0/restart", None),
        "Redeploy": (f"/vms/{name}-0/redeploy", None),
        "Preempt": (f"/vms/{name}-1/evict", None),
        "Terminate": (f"/vms/{name}-2/delete", None),
    }
    command: Sequence[str] = MODULE
    environ: dict[str, str] | None = None
    if form == "zipapp":
        command, environ = zipapp(tmp_path), {}
        operations = {"Reboot": operations["Reboot"]}
    with agent_of(tmp_path / "a", scope.endpoint, command=command, environ=environ) as agent:
        agent.configure()
        start(agent)
        expected: list[str] = []
        for kind, (path, body) in operations.items():
            complete_when_started(scope, agent, kind, scope.post(path, body))
            expected += [f"{phase} {kind}" for phase in ("prepare", "start", "recover")]
            ran = eventually(agent.ran, lambda ran, last=expected[-1]: last in ran)  # type: ignore[misc]
            assert ran == expected
        eventually(agent.status, lambda status: not status["workflows"])

        assert agent.journal().count("approved") == len(operations)
        assert agent.end() == 0
        assert agent.ran() == expected
        assert not agent.socket.exists()


def test_preempt_is_prepared_and_approved_in_30_seconds(tmp_path: Path) -> None:
    """Here, in 3 seconds."""
    flags = ("--rate", "10", "--simulate-duration", "Preempt=1h")
    with running(tmp_path, *flags, fleet=fleet(1)) as service:
        scope = Scope(service, 0)
        with agent_of(tmp_path / "a", scope.endpoint) as agent:
            agent.configure()
            start(agent)
            scope.post(f"/vms/{scope.vm}/evict")
            eventually(agent.journal, lambda journal: "approved" in journal)

            assert agent.ran()[0] == "prepare Preempt"
            assert agent.status()["is_drained"]


def test_agent_with_hold_never_approves(tmp_path: Path) -> None:
    """The event starts at its NotBefore."""
    flags = ("--rate", "300", "--simulate-duration", "Reboot=10h")
    with running(tmp_path, *flags, fleet=fleet(1)) as service:
        scope = Scope(service, 0)
        with agent_of(tmp_path / "a", scope.endpoint) as agent:
            agent.configure(RULE + "hold = true\n")
            agent.start()
            event_id = scope.restart()
            eventually(agent.ran, lambda ran: ran == ["prepare Reboot", "start Reboot"])

            assert "approving" not in agent.journal()
            assert service.ask("GET", f"/events/{event_id}")[1]["approvals"] == []


def test_killed_agent_neither_repeats_prepare_nor_skips_recover(
    scope: Scope, agent: AgentProcess
) -> None:
    """Killed between prepare and start."""
    agent.configure(HELD)
    agent.start()
    event_id = scope.restart()
    eventually(agent.journal, lambda journal: "ended" in journal)
    agent.end(signal.SIGKILL)
    start(agent)
    scope.approve(event_id)
    complete_when_started(scope, agent, "Reboot", event_id)
    eventually(agent.ran, lambda ran: "recover Reboot" in ran)
    eventually(agent.status, lambda status: not status["workflows"])
    agent.end()
    start(agent)

    assert agent.ran() == ["prepare Reboot", "start Reboot", "recover Reboot"]


def test_event_that_ended_without_the_agent_is_recovered(scope: Scope, agent: AgentProcess) -> None:
    """As after the reboot itself."""
    agent.configure(HELD)
    agent.start()
    event_id = scope.restart()
    eventually(agent.journal, lambda journal: "ended" in journal)
    agent.end(signal.SIGKILL)
    scope.approve(event_id)
    scope.complete(event_id)
    agent.start()
    eventually(agent.ran, lambda ran: ran == ["prepare Reboot", "recover Reboot"])


def test_sighup_loads_rules_and_a_wrong_file_keeps_them(scope: Scope, agent: AgentProcess) -> None:
    """A typo must not leave a VM without its agent."""
    listen = "listen = '127.0.0.1:0'"
    agent.configure('[[rule]]\nname = "none"\ntypes = ["Freeze"]', more=listen)
    agent.start()
    url = f"http://{agent.log().partition('listen=')[2].split()[0]}"
    agent.configure(RULE, more=listen)
    agent.send(signal.SIGHUP)
    eventually(agent.log, lambda log: "rules loaded" in log)
    agent.config.write_text(agent.config.read_text().replace("when-prepared", "sometime"))
    agent.send(signal.SIGHUP)
    log = eventually(agent.log, lambda log: "config rejected, keeping previous rules" in log)

    line = agent.config.read_text().split("\n").index("[[rule]]") + 1
    assert f"{agent.config}:{line}: rule[0].approve: expected one of never" in log
    assert fetch(f"{url}/readyz")[0] == 503
    assert fetch(f"{url}/healthz") == (200, "alive\n")
    complete_when_started(scope, agent, "Reboot", scope.restart())
    eventually(agent.ran, lambda ran: "recover Reboot" in ran)
    agent.configure(RULE, more=listen)
    agent.send(signal.SIGHUP)
    assert eventually(lambda: fetch(f"{url}/readyz")[0], lambda status: status == 200)
    metric = 'forewarn_agent_steps_total{phase="recover",result="done"} 1'
    eventually(lambda: fetch(f"{url}/metrics")[1], lambda metrics: metric in metrics)


def test_drainz_shows_a_pending_event(scope: Scope, agent: AgentProcess) -> None:
    """From the notice until recovery."""
    agent.configure(HELD, more="listen = '127.0.0.1:0'")
    agent.start()
    drainz = f"http://{agent.log().partition('listen=')[2].split()[0]}/drainz"
    assert fetch(drainz) == (200, "in service\n")
    event_id = scope.restart()
    eventually(lambda: fetch(drainz), lambda response: response == (503, "drained\n"))
    scope.approve(event_id)
    scope.complete(event_id)
    eventually(lambda: fetch(drainz), lambda response: response == (200, "in service\n"))

    assert agent.ran()[-1] == "recover Reboot"


def test_approval_waits_for_a_local_program(scope: Scope, agent: AgentProcess) -> None:
    """A database that is still flushing decides."""
    agent.configure()
    agent.start()
    with socket.socket(socket.AF_UNIX) as program:
        program.settimeout(30)
        program.connect(str(agent.socket))
        with program.makefile() as lines:
            program.sendall(b'{"register": "db"}\n')
            assert json.loads(lines.readline()) == {"registered": "db"}
            event_id = scope.restart()
            notice = json.loads(lines.readline())
            eventually(agent.ran, lambda ran: ran == ["prepare Reboot"])
            program.sendall(json.dumps({"more": event_id, "seconds": 60}).encode() + b"\n")
            assert json.loads(lines.readline())["seconds"] == 60.0
            assert "approving" not in agent.journal()
            shown = agent.run("status", "--socket", str(agent.socket)).stdout
            program.sendall(json.dumps({"ready": event_id}).encode() + b"\n")
            complete_when_started(scope, agent, "Reboot", event_id)
            phases = [json.loads(lines.readline()).get("phase") for _ in range(3)]

    assert (notice["phase"], phases) == ("prepare", [None, "start", "recover"])
    assert "applications: db\nReboot " in shown


def test_systemd_is_notified_of_each_state(scope: Scope, agent: AgentProcess) -> None:
    """READY, WATCHDOG while it polls, RELOADING and STOPPING."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
    ):
        systemd.settimeout(30)
        systemd.bind(f"{folder}/n")
        agent.environ |= {"NOTIFY_SOCKET": f"{folder}/n", "WATCHDOG_USEC": "400000"}
        agent.configure()
        agent.start()
        messages = [systemd.recv(4096).decode() for _ in range(5)]
        agent.send(signal.SIGHUP)
        while not messages[-1].startswith("READY=1"):
            messages.append(systemd.recv(4096).decode())
        assert agent.end() == 0
        while not messages[-1].startswith("STOPPING=1"):
            messages.append(systemd.recv(4096).decode())

    states = [message.partition("=")[0] for message in messages]
    assert states[0] == "READY"
    assert "WATCHDOG" in states
    assert states.index("RELOADING") < len(states) - 1
    assert f"STATUS={scope.vm}: no events" in messages


def test_second_agent_for_the_same_journal_is_rejected(agent: AgentProcess) -> None:
    """Two would run every step twice."""
    agent.configure()
    agent.start()
    second = agent.run("run", "--config", str(agent.config))

    assert (second.returncode, second.stdout) == (4, "")
    assert "another agent uses it" in second.stderr
    assert second.stderr.count("\n") == 1


def test_dry_run_logs_and_changes_nothing(scope: Scope, agent: AgentProcess) -> None:
    """Also beside a running agent: it has its own journal and opens no socket."""
    agent.configure()
    scope.restart()
    dry = agent.run("run", "--config", str(agent.config), "--dry-run", "--once")

    assert dry.returncode == 0, dry.stderr
    assert "dry run: this would be done" in dry.stderr
    assert "prepare: run /bin/sh" in dry.stderr
    assert agent.ran() == []
    assert [path.name for path in agent.folder.iterdir()] == ["agent.toml"]
    assert scope.poll()["Events"][0]["EventStatus"] == "Scheduled"


def test_once_does_what_is_due_and_exits(scope: Scope, agent: AgentProcess) -> None:
    """For a timer, or to try a file."""
    agent.configure()
    event_id = scope.restart()
    first = agent.run("run", "--config", str(agent.config), "--once")
    assert (first.returncode, agent.ran()) == (0, ["prepare Reboot"]), first.stderr
    scope.complete(event_id)
    second = agent.run("run", "--config", str(agent.config), "--once")

    expected = ["prepare Reboot", "recover Reboot"]
    assert (second.returncode, agent.ran()) == (0, expected), second.stderr


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
def test_signal_ends_a_long_poll(agent: AgentProcess, number: int) -> None:
    """A shutdown does not wait for it."""
    agent.configure()
    start(agent)

    assert agent.end(number) == 0
    assert agent.log().endswith("agent stopped\n")


def test_sigterm_ends_the_agent_while_its_connect_hangs(tmp_path: Path) -> None:
    """Behind a firewall that drops packets, every attempt takes its whole timeout."""
    with Unreachable() as endpoint, agent_of(tmp_path / "a", endpoint.url) as agent:
        agent.configure()
        agent.start()
        eventually(endpoint.attempts)

        assert agent.end() == 0
        assert "endpoint failed" not in agent.log(), "the attempt was interrupted"
        assert agent.log().endswith("agent stopped\n")


def test_agent_needs_no_part_of_the_server(tmp_path: Path) -> None:
    """`pip install forewarn` inside a VM is enough."""
    with agent_of(tmp_path / "a", "http://127.0.0.1:1") as agent:
        agent.configure()
        parts = ("msgspec", "litestar", "uvicorn", "uvloop", "httptools", "yaml")
        hide = f"import sys; sys.modules.update(dict.fromkeys({parts}))"
        program = f"{hide}; from forewarn.cli.main import run; sys.exit(run(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "agent", "check", "--config", str(agent.config)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.endswith("agent.toml is valid: 1 rule(s)\n")


def test_zipapp_is_reproducible_and_holds_only_the_guest(tmp_path: Path) -> None:
    """A signature covers bytes, and a server does not belong inside a VM."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (Path(zipapp(tmp_path / name)[-1]) for name in ("a", "b"))
    names = zipfile.ZipFile(first).namelist()

    assert first.read_bytes() == second.read_bytes()
    assert {name.split("/")[1] for name in names if "/" in name} == {
        "__init__.py",
        "error_report.py",
        "errors.py",
        "log.py",
        "process_table.py",
        "systemd.py",
        "client",
        "agent",
    }


def fetch(url: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
