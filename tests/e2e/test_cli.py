"""The command line against a real service: output, exit codes, signals, pipes.

Commands run in this process where they only print. `forewarn_process` starts one where it matters.
"""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from forewarn import __version__
from tests.e2e.cli_service import (
    FLEET,
    FOREWARN,
    ROOT,
    SECONDS_MAX,
    Service,
    environment,
    forewarn,
    forewarn_process,
    interruptible,
    poll,
    running,
    serving,
)
from tests.e2e.waiting import eventually


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_service_reports_ready_and_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    """A supervisor waits for the line, sends the signal, and expects exit code 0."""
    with serving(tmp_path, "--log-level", "warning") as service:
        assert poll(service) == b'{"DocumentIncarnation":1,"Events":[]}'

        service.process.send_signal(number)
        out, err = service.process.communicate(timeout=SECONDS_MAX)

    assert (service.process.returncode, out, err) == (0, "", "")


def test_operator_restarts_and_approves(tmp_path: Path) -> None:
    """The life of an event, by hand."""
    with serving(tmp_path, "--simulate-duration", "Reboot=100ms") as service:
        poll(service)

        scheduled = service.forewarn("vm", "restart", "web-0")
        match = re.fullmatch(
            r"Reboot (\S+) of web-0 is Scheduled, not before \S+Z\n", scheduled.stdout
        )
        assert match, scheduled.stderr
        event = match[1]
        assert event.encode() in poll(service)
        shown = service.forewarn("event", "show", event.lower()).stdout
        approved = service.forewarn("event", "approve", event, "--vm", "web-1").stdout

        assert re.search(r"^status +Scheduled$", shown, re.MULTILINE)
        assert approved == f"Reboot {event} of web-0 is Started\n"
        eventually(lambda: b'"Events":[]' in poll(service))
        ended = service.forewarn("event", "show", event)
        assert (ended.returncode, ended.stdout) == (3, "")
        assert f"event {event} is over: completed at " in ended.stderr
        again = service.forewarn("event", "complete", event[:5])
        assert (again.returncode, again.stdout) == (0, f"event {event} was completed before\n")


def test_operation_without_an_event_says_why(tmp_path: Path) -> None:
    """Who expected a notice learns what is missing."""
    with serving(tmp_path) as service:
        restarted = service.forewarn("vm", "reboot", "web-0")
        later = service.forewarn("vm", "restart", "web-1", "--not-before", "+1h")

    assert restarted.stdout == (
        "the VM is restarted now, without an event: no VM of web has polled in the last 24h\n"
    )
    assert " of web-1 is Scheduled, not before " in later.stdout


def test_shell_completes_what_the_service_knows(service: Service) -> None:
    """Without a service there is nothing, not even an error."""

    def complete(control: str, *words: str) -> list[str]:
        completed = forewarn_process(
            FOREWARN_CONTROL=control,
            _FOREWARN_COMPLETE="complete_bash",
            COMP_WORDS=" ".join(("forewarn", *words)),
            COMP_CWORD=str(len(words)),
        )
        assert completed.stderr == ""
        return completed.stdout.split()

    assert complete(service.control, "vm", "restart", "w") == ["web-0", "web-1"]
    assert complete(service.control, "host", "fail", "host-b") == ["host-b"]
    assert complete(service.control, "host", "maintain", "x", "--type", "re") == [
        "Reboot",
        "Redeploy",
    ]
    assert complete(service.control, "history", "--what", "im") == ["impacted", "impact-failed"]
    assert complete("http://127.0.0.1:9", "vm", "restart", "w") == []
    assert complete("http://127.0.0.1:9", "lab", "run", "spo") == ["spot-eviction"]
    assert complete(service.control, "vm", "re") == ["restart", "redeploy"]


def test_host_is_maintained_and_events_are_ended(tmp_path: Path) -> None:
    """The operator's other commands, each with one line of output."""
    with serving(tmp_path) as service:
        options = (
            "--type",
            "Freeze",
            "--cause",
            "live-migration",
            "--duration-seconds",
            "5",
            "--description",
            "moving you",
        )
        maintained = service.forewarn("host", "maintain", "host-a", *options, "--json")
        event = json.loads(maintained.stdout)["events"][0]
        canceled = service.forewarn("event", "cancel", event["id"])
        failed = service.forewarn("host", "fail", "host-b")
        started = re.fullmatch(r"Reboot (\S+) of web-1 is Started\n", failed.stdout)
        assert started, failed
        completed = service.forewarn("event", "complete", started[1])
        degraded = service.forewarn(
            "host", "degrade", "host-a", "--not-before", "2000-01-01T00:00:00Z"
        )

    assert (event["description"], event["cause"], event["duration_seconds"]) == (
        "moving you",
        "live-migration",
        5,
    )
    assert canceled.stdout == f"Freeze {event['id'][:8]} of web-0 is canceled\n"
    assert completed.stdout == f"Reboot {started[1]} of web-1 is completed\n"
    assert (degraded.returncode, degraded.stdout) == (1, "")
    assert "needs a notice of 7d, so " in degraded.stderr


def test_fleet_is_exported_checked_and_applied(tmp_path: Path) -> None:
    """Export, edit, check, preview, apply."""
    with serving(tmp_path) as service:
        file = tmp_path / "exported.json"
        file.write_text(service.forewarn("fleet", "export").stdout)
        checked = forewarn("fleet", "check", str(file))
        same = service.forewarn("fleet", "apply", str(file))
        file.write_text(FLEET.replace("web-1", "web-2").replace("127.0.0.1", "127.0.0.9"))
        dry = service.forewarn("fleet", "apply", str(file), "--dry-run")
        unchanged = service.forewarn("vm", "show", "web-1")
        applied = service.forewarn("fleet", "apply", str(file), "--json")
        shown = service.forewarn("fleet", "show")

    assert checked.stdout == f"{file}: OK, 1 scopes with 2 VMs\n"
    assert same.stdout == "no changes\n"
    assert (
        dry.stdout == "changed: web\nvms joined: web-2\nvms left: web-1\n"
        "VM web-0: address 127.0.0.1 -> 127.0.0.9\ndry run: nothing was changed\n"
    )
    assert unchanged.returncode == 0
    assert json.loads(applied.stdout)["vms_left"] == ["web-1"]
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["NAME", "SCOPE", "HOST", "UPDATE", "DOMAIN", "KIND", "ADDRESS"],
        ["web-0", "web", "host-a", "0", "availability-set", "127.0.0.9"],
        ["web-2", "web", "host-b", "1", "availability-set", "127.0.0.2"],
    ]


def test_folder_of_fleet_files_works_like_a_file(tmp_path: Path) -> None:
    """In `serve --fleet`, `fleet check` and `fleet apply`."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    (folder / "web.yaml").write_text(FLEET)
    (folder / "db.json").write_text('{"scopes": [{"name": "db", "vms": [{"name": "db-0"}]}]}')
    with running(tmp_path, "serve", "--fleet", "fleet", "--store", "memory") as service:
        served = json.loads(service.forewarn("vm", "list", "--json").stdout)["vms"]
        checked = service.forewarn("fleet", "check", str(folder))
        same = service.forewarn("fleet", "apply", str(folder))
        (folder / "db.json").unlink()
        applied = service.forewarn("fleet", "apply", str(folder))
        (folder / "twin.yaml").write_text(FLEET)
        refused = service.forewarn("fleet", "apply", str(folder))

    assert [vm["name"] for vm in served] == ["db-0", "web-0", "web-1"]
    assert checked.stdout == f"{folder}: OK, 2 scopes with 3 VMs\n"
    assert same.stdout == "no changes\n"
    assert applied.stdout == "removed: db\nvms left: db-0\n"
    assert refused.returncode == 2
    message = (
        f"web.yaml:3: scopes[0].name: expected a scope name not used by {folder}/twin.yaml:3: "
    )
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("vm", "show", "nope"), 3, "there is no VM 'nope'; `forewarn vm list` lists them"),
        (("vm", "restart", "a/../b"), 3, r"no such path: .*"),
        (("scope", "show", "wep"), 3, "there is no scope 'wep'; did you mean 'web'[?]"),
        (
            ("host", "fail", "hosta"),
            3,
            "there is no host 'hosta'; did you mean 'host-a' or 'host-b'[?]",
        ),
        (
            ("event", "approve", "nope"),
            3,
            "there is no event 'nope'; `forewarn event list` lists them",
        ),
        (
            ("campaign", "pause", "nope"),
            3,
            "there is no campaign 'nope'; `forewarn campaign list` lists them",
        ),
        (
            ("host", "maintain", "host-a", "--type", "Freez"),
            2,
            (
                "Invalid value for '--type': 'Freez' is not one of 'Freeze', 'Reboot', 'Redeploy'; "
                "did you mean 'Freeze'[?] "
                "Try 'forewarn host maintain --help'"
            ),
        ),
        (
            ("host", "maintain", "host-a", "--type", "Freeze", "--duration-seconds", "-7"),
            2,
            "Invalid value for '--duration-seconds': expected a number greater .* -1, got '-7'; .*",
        ),
        (
            ("campaign", "start", "--type", "freeze", "--hosts", "h*", "--max-hosts", "0"),
            2,
            "--max-hosts: expected a number of hosts, 1 to 250, got 0",
        ),
        (
            ("token", "create", "A!", "--role", "ADMIN"),
            2,
            "NAME: expected .*, got 'A!'",
        ),
        (
            ("vm", "restart", "web-0", "--not-before", "noon"),
            2,
            "--not-before: expected a time such as .*, got 'noon'",
        ),
        (
            ("history", "--since", "soon"),
            2,
            "--since: expected a time such as .*, got 'soon'",
        ),
        (("history", "--what", "x"), 2, "Invalid value for '--what': 'x' is not one of .*"),
        (
            ("fleet", "apply", "/nonexistent.yaml"),
            2,
            "cannot read the fleet file /nonexistent.yaml: No such file or directory",
        ),
        (("vm", "restart"), 2, "Missing argument 'VM'; try 'forewarn vm restart --help'"),
        (
            ("vm", "list", "--limit", "0"),
            2,
            (
                "Invalid value for '--limit': expected a number greater than or equal to 1, "
                "got '0'; try 'forewarn vm list --help'"
            ),
        ),
        (("vm", "explode"), 2, "No such command 'explode'; try 'forewarn vm --help'"),
        (
            ("vm", "restrat", "web-0"),
            2,
            "No such command 'restrat'; did you mean 'restart'[?] Try 'forewarn vm --help'",
        ),
        (
            ("vm", "list", "--jsn"),
            2,
            "No such option: --jsn; did you mean --json[?] Try 'forewarn vm list --help'",
        ),
        (
            ("--control-url", "elsewhere", "vm", "list"),
            2,
            "control_url .from --control-url.: expected http://HOST:PORT, got 'elsewhere'",
        ),
    ],
)
def test_error_is_one_line_and_an_exit_code(
    service: Service, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """Scripts read the code, people the line; nobody reads a traceback."""
    refused = service.forewarn(*arguments)

    assert (refused.returncode, refused.stdout) == (code, "")
    assert re.fullmatch(f"forewarn: ({message})\n", refused.stderr), refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("--control", "0.0.0.0:0"),
            2,
            "control is 0.0.0.0:0, but there are no tokens, .*; expected a loopback address, or .*",
        ),
        (
            ("--fleet", "nope.yaml"),
            2,
            "cannot read the fleet file nope.yaml: No such file or directory",
        ),
        (
            ("--fleet", "bad.yaml"),
            2,
            r"bad.yaml:2: scopes\[0\].knd: unknown member; did you mean 'kind'\?",
        ),
        (("--store", "sqlite:////nonexistent/x.db"), 4, ".*/nonexistent/x.db.*"),
        (
            ("--simulate-duration", "Restart=1s"),
            2,
            "simulate_duration: unknown event type 'Restart'; expected one of Freeze, Reboot.*",
        ),
    ],
)
def test_service_that_cannot_start_prints_the_reason(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """It is the one line that an operator finds in the journal."""
    (tmp_path / "bad.yaml").write_text("scopes:\n- {name: a, knd: vm}\n")
    ports = ("--store", "memory", "--metadata", "127.0.0.1:0", "--control", "127.0.0.1:0")

    refused = forewarn_process("serve", *ports, *arguments, cwd=tmp_path)

    assert (refused.returncode, refused.stdout) == (code, "")
    assert re.fullmatch(f"forewarn: {message}\n", refused.stderr), refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), r"rate \(from --rate\): expected a number from 0.001 to 100000, got '0'"),
        (("--identify", "proxy"), "identify proxy needs proxy_key_file, which is not set; .*"),
        (
            ("--lagacy-path",),
            r"No such option: --lagacy-path; did you mean .*\? Try 'forewarn serve --help'",
        ),
    ],
)
def test_wrong_options_are_rejected_before_the_start(
    arguments: tuple[str, ...], message: str
) -> None:
    """Exit code 2, after which systemd does not restart the service."""
    refused = forewarn("serve", *arguments)

    assert refused.returncode == 2
    assert re.fullmatch(f"forewarn: {message}\n", refused.stderr), refused.stderr


def test_port_in_use_is_reported(tmp_path: Path, service: Service) -> None:
    """The most frequent mistake: it is running already."""
    taken = service.metadata.removeprefix("http://")

    refused = forewarn_process(
        "serve", "--store", "memory", "--metadata", taken, "--control", "127.0.0.1:0", cwd=tmp_path
    )

    assert refused.returncode == 4
    assert refused.stderr == f"forewarn: cannot listen on {taken}: the address is in use\n"


def test_missing_service_has_its_own_exit_code() -> None:
    """4 means: retry later, or check the URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    absent = forewarn("--control-url", url, "vm", "list")
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as other:
        assert other.stdout
        port = re.search(r"port (\d+)", other.stdout.readline())
        assert port
        stranger = forewarn("--control-url", f"http://127.0.0.1:{port[1]}", "vm", "list")
        other.kill()

    assert absent.returncode == stranger.returncode == 4
    assert absent.stderr == (
        f"forewarn: no service is reachable at {url}: Connection refused; "
        "set FOREWARN_CONTROL to its URL, or start one with `forewarn demo`\n"
    )
    assert "is not a Forewarn control API (status 404)\n" in stranger.stderr


def test_json_output_is_the_response_of_the_api(service: Service) -> None:
    """A program that reads one can read the other."""
    for noun in ("scope", "vm", "host", "event"):
        printed = json.loads(service.forewarn(noun, "list", "--json").stdout)
        with urlopen(f"{service.control}/api/v1/{noun}s", timeout=SECONDS_MAX) as response:
            assert printed == json.load(response)


def test_list_is_text_in_a_pipe_and_a_table_on_a_terminal(service: Service) -> None:
    """For awk, and for people."""
    piped = service.forewarn("host", "list")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        command = [FOREWARN, "host", "list"]
        variables = environment(FOREWARN_CONTROL=service.control, TERM="xterm")
        subprocess.run(
            command, env=variables, stdout=theirs, stderr=theirs, timeout=SECONDS_MAX, check=True
        )
        table = screen.read(4096).decode()
        os.close(theirs)

    assert (
        piped.stdout == "NAME    STATE      PROBLEMS  EVENTS  VMS    SCOPES\n"
        "host-a  unmanaged  -         -       web-0  web\n"
        "host-b  unmanaged  -         -       web-1  web\n"
    )
    assert "─" in table
    assert "host-a" in table


def test_incomplete_list_is_announced(service: Service) -> None:
    """Otherwise it would look complete."""
    cut = service.forewarn("vm", "list", "--limit", "1")

    assert [line.split()[0] for line in cut.stdout.splitlines()] == ["NAME", "web-0"]
    assert cut.stderr == "showing 1 of 2 vms; use --limit to see more\n"


def test_closed_pipe_prints_nothing(service: Service) -> None:
    """`forewarn vm list | head -1` is common."""
    reading, writing = os.pipe()
    os.close(reading)
    variables = environment(FOREWARN_CONTROL=service.control)
    command = [FOREWARN, "vm", "list"]
    left = subprocess.run(
        command,
        env=variables,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=SECONDS_MAX,
        check=False,
    )
    os.close(writing)

    assert (left.returncode, left.stderr) == (1, b"")


def test_interrupted_command_prints_nothing() -> None:
    """Ctrl-C while waiting for a response: exit code 130, as shells expect."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = environment(FOREWARN_CONTROL=f"http://127.0.0.1:{silent.getsockname()[1]}")
        command = [FOREWARN, "vm", "list"]
        with (
            interruptible(),
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as client,
        ):
            silent.settimeout(SECONDS_MAX)
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(SECONDS_MAX)
                assert connection.recv(3) == b"GET"
                client.send_signal(signal.SIGINT)
                out, err = client.communicate(timeout=SECONDS_MAX)

    assert (client.returncode, out, err) == (130, b"", b"")


@pytest.mark.system
def test_commands_that_the_demo_prints_work() -> None:
    """They are the first minute with the product."""
    program = os.path.relpath(FOREWARN, ROOT)
    with running(ROOT, "demo", program=program) as demo:
        assert demo.process.stdout
        lines = []
        while not (line := demo.process.stdout.readline()).startswith("Changes are printed here."):
            lines += [line.strip()] if line.startswith("   ") else []
        printed = [paste(line) for line in lines]
        last = paste(lines[0])
        demo.process.send_signal(signal.SIGINT)
        changes, errors = demo.process.communicate(timeout=SECONDS_MAX)

    assert (len(lines), demo.process.returncode, errors) == (3, 0, "")
    assert lines[1].endswith(f" {program} vm restart web-0")
    assert printed[0] == '{"DocumentIncarnation":1,"Events":[]}'
    assert re.fullmatch(r"Reboot \S+ of web-0 is Scheduled, not before \S+\n", printed[1])
    assert printed[2] == ""
    assert '"EventStatus":"Started"' in last
    for part in ("first poll", "Scheduled: Reboot of web-0", "approved by web-0", "Started"):
        assert part in changes


def paste(line: str) -> str:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


def run_without(modules: tuple[str, ...], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as if these modules were not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules}))"
    program = f"{hide}; from forewarn.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_client_commands_work_without_the_server_extra(service: Service) -> None:
    """`pip install 'forewarn[cli]'` has no msgspec, Litestar, uvicorn and YAML."""
    absent = "msgspec", "litestar", "uvicorn", "uvloop", "yaml"

    assert run_without(absent, "--control-url", service.control, "vm", "list").returncode == 0
    assert run_without(absent, "config").returncode == 0
    commands = {("serve",): "server", ("fleet", "check", "x"): "server", ("lab", "run", "x"): "lab"}
    for command, extra in commands.items():
        refused = run_without(absent, *command)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert re.fullmatch(
            rf"forewarn: `forewarn {command[0]}.*` needs \w+; "
            rf"install it with pip install 'forewarn\[{extra}\]'\n",
            refused.stderr,
        ), refused.stderr


def test_lab_works_without_what_only_the_server_needs() -> None:
    """`pip install 'forewarn[lab]'` has no uvloop and no prometheus-client."""
    absent = "uvloop", "prometheus_client"

    scenario = run_without(absent, "lab", "run", "host-reboot", "--quiet")

    assert scenario.returncode == 0, scenario.stderr
    for command in ("serve", "demo"):
        assert run_without(absent, command).stderr == (
            f"forewarn: `forewarn {command}` needs prometheus_client;"
            " install it with pip install 'forewarn[server]'\n"
        )


def test_agent_and_conform_work_without_any_extra(service: Service) -> None:
    """`pip install forewarn` in a VM has no dependencies."""
    absent = "typer", "rich", "httpx", "msgspec", "litestar", "uvicorn", "uvloop", "yaml"
    only = ("--only", "version-missing-is-400")

    agent = run_without(absent, "agent", "--help")
    conform = run_without(absent, "conform", service.metadata, "--as", "web-0", *only)
    version = run_without(absent, "--version")

    assert (agent.returncode, conform.returncode) == (0, 0), conform.stderr
    assert "version: 1 of 1 passed" in conform.stdout
    assert (version.returncode, version.stdout) == (0, f"forewarn {__version__}\n")
    for command, extra in {"vm": "cli", "serve": "server", "lab": "lab"}.items():
        other = run_without(absent, command, "list")
        assert other.returncode == 1
        assert other.stderr == (
            f"forewarn: this command needs pip install 'forewarn[{extra}]';"
            " without it there are `forewarn agent` and `forewarn conform`\n"
        )
    for flag in ("--help", "-h"):
        shown = run_without(absent, flag)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "  forewarn agent      " in shown.stdout
        assert "  forewarn conform    " in shown.stdout
        assert "pip install 'forewarn[cli]'" in shown.stdout
    mistyped = run_without(absent, "agnet")
    assert (mistyped.returncode, mistyped.stderr) == (
        2,
        "forewarn: No such command 'agnet'; try 'forewarn --help'\n",
    )


def test_config_shows_sources_and_no_secrets(tmp_path: Path) -> None:
    """The file in the current folder is read, and secrets are hidden."""
    (tmp_path / "forewarn.toml").write_text("rate = 2\nstore = 'memory'\n")
    variables = {
        "FOREWARN_RATE": "4",
        "FOREWARN_TOKEN": "hunter2",
        "FOREWARN_WEBHOOK": "https://h.example/hunter2?x=hunter2",
        "FOREWARN_WEBHOOK_SECRET_FILE": "x",
    }

    shown = forewarn_process("config", "--show", "--no-legacy-path", cwd=tmp_path, **variables)
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}

    assert rows["rate"] == ["4", "FOREWARN_RATE"]
    assert rows["store"] == ["memory", "store", "in", "forewarn.toml"]
    assert rows["legacy_path"] == ["false", "--legacy-path"]
    assert rows["token"] == ["***", "FOREWARN_TOKEN"]
    assert rows["webhook"] == ["https://h.example/***", "FOREWARN_WEBHOOK"]
    assert "hunter2" not in shown.stdout


def test_config_flag_applies_to_service_and_client(tmp_path: Path) -> None:
    """One file, one `--config`, before or after the command."""
    file = tmp_path / "other.toml"
    file.write_text("rate = 2\ncontrol_url = 'http://127.0.0.1:9'\n")

    for arguments in (("config", "--config", str(file)), ("--config", str(file), "config")):
        shown = forewarn(*arguments).stdout
        rows = {line.split()[0]: line.split()[1] for line in shown.splitlines()}
        assert (rows["rate"], rows["control_url"]) == ("2", "http://127.0.0.1:9")
    called = forewarn("--config", str(file), "vm", "list")
    assert called.returncode == 4
    assert "no service is reachable at http://127.0.0.1:9: " in called.stderr


def test_version_and_help_are_printed_on_stdout() -> None:
    """The two things that everybody tries first."""
    assert re.fullmatch(r"forewarn \d+\.\d+\.\d+\n", forewarn_process("--version").stdout)
    assert "serve" in forewarn("--help").stdout
    assert "--identify" in forewarn("serve", "--help").stdout
