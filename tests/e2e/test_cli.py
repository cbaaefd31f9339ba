"""The command line with real processes: a service on free ports, commands that call it, signals,
pipes and exit codes.
"""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.e2e.cli_service import (
    FLEET,
    FOREWARN,
    ROOT,
    SECONDS_MAX,
    Service,
    environment,
    forewarn,
    interruptible,
    poll,
    running,
    serving,
    soon,
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that tests only look at."""
    with serving(tmp_path_factory.mktemp("service")) as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_service_says_once_that_it_is_ready_and_stops_cleanly(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A supervisor waits for the line, sends the signal, and expects 0."""
    with serving(tmp_path, "--log-level", "warning") as service:
        assert poll(service) == b'{"DocumentIncarnation":1,"Events":[]}'

        service.process.send_signal(number)
        out, err = service.process.communicate(timeout=SECONDS_MAX)

    assert (service.process.returncode, out, err) == (0, "", "")


def test_a_vm_is_told_and_answers_and_the_operator_sees_it(tmp_path: Path) -> None:
    """The whole of issue 2, as a person would do it by hand."""
    with serving(tmp_path, "--simulate-duration", "Reboot=100ms") as service:
        poll(service)

        scheduled = service.forewarn("vm", "restart", "web-0")
        found = re.fullmatch(
            r"Reboot (\S+) of web-0 is Scheduled, not before \S+Z\n", scheduled.stdout
        )
        assert found, scheduled.stderr
        assert found[1].encode() in poll(service)
        shown = service.forewarn("event", "show", found[1].lower()).stdout
        approved = service.forewarn("event", "approve", found[1], "--vm", "web-1").stdout

        assert re.search(r"^status +Scheduled$", shown, re.MULTILINE)
        assert approved == f"Reboot {found[1]} of web-0 is Started\n"
        soon(lambda: b'"Events":[]' in poll(service))
        ended = service.forewarn("event", "show", found[1])
        assert (ended.returncode, ended.stdout) == (3, "")
        assert f"event {found[1]} is over: completed at " in ended.stderr


def test_a_host_is_maintained_and_its_event_canceled_or_completed(tmp_path: Path) -> None:
    """The operator's other verbs, each in a sentence."""
    with serving(tmp_path) as service:
        said = (
            "--type",
            "Freeze",
            "--cause",
            "live-migration",
            "--duration-seconds",
            "5",
            "--description",
            "moving you",
        )
        maintained = service.forewarn("host", "maintain", "host-a", *said, "--json")
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
    assert canceled.stdout == f"Freeze {event['id']} of web-0 is canceled\n"
    assert completed.stdout == f"Reboot {started[1]} of web-1 is completed\n"
    assert (degraded.returncode, degraded.stdout) == (1, "")
    assert "needs a notice of 7 days" in degraded.stderr


def test_a_fleet_is_exported_checked_and_applied(tmp_path: Path) -> None:
    """Export, edit, check, look, apply."""
    with serving(tmp_path) as service:
        file = tmp_path / "exported.json"
        file.write_text(service.forewarn("fleet", "export").stdout)
        checked = forewarn("fleet", "check", str(file))
        same = service.forewarn("fleet", "apply", str(file))
        file.write_text(FLEET.replace("web-1", "web-2"))
        dry = service.forewarn("fleet", "apply", str(file), "--dry-run")
        unchanged = service.forewarn("vm", "show", "web-1")
        applied = service.forewarn("fleet", "apply", str(file), "--json")
        shown = service.forewarn("fleet", "show")

    assert checked.stdout == f"{file}: 1 scopes with 2 VMs, all well\n"
    assert same.stdout == "the fleet is so already\n"
    assert (
        dry.stdout
        == "changed: web\nvms joined: web-2\nvms left: web-1\nnothing was changed: this was a dry run\n"
    )
    assert unchanged.returncode == 0
    assert json.loads(applied.stdout)["vms_left"] == ["web-1"]
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["SCOPE", "KIND", "NAME", "UPDATE", "DOMAIN", "HOST", "ADDRESS"],
        ["web", "availability-set", "web-0", "0", "host-a", "127.0.0.1"],
        ["web", "availability-set", "web-2", "1", "host-b", "127.0.0.2"],
    ]


def test_a_folder_of_files_is_served_checked_and_applied(tmp_path: Path) -> None:
    """Wherever a fleet file may be named."""
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
    assert checked.stdout == f"{folder}: 2 scopes with 3 VMs, all well\n"
    assert same.stdout == "the fleet is so already\n"
    assert applied.stdout == "removed: db\nvms left: db-0\n"
    assert refused.returncode == 1
    assert (
        f"{folder}/web.yaml:3: scopes[0].name: expected a scope name not used by {folder}/twin.yaml:3: "
        in refused.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("vm", "show", "nope"), 3, "there is no VM 'nope'"),
        (("vm", "restart", "a/../b"), 3, r"no such path: .*"),
        (("scope", "show", "nope"), 3, "there is no scope 'nope'"),
        (("host", "fail", "nope"), 3, "there is no host 'nope'"),
        (("event", "approve", "nope"), 3, "there is no event 'nope'"),
        (
            ("host", "maintain", "host-a", "--type", "Freez"),
            1,
            "body.type: Invalid enum value 'Freez'; expected one of Freeze, Reboot, Redeploy",
        ),
        (
            ("vm", "restart", "web-0", "--not-before", "noon"),
            1,
            'body.not_before: Invalid RFC3339 encoded datetime, got "noon"',
        ),
        (
            ("fleet", "apply", "/nonexistent.yaml"),
            1,
            "'/nonexistent.yaml' cannot be read: No such file or directory",
        ),
        (("vm", "restart"), 2, "Missing argument 'VM'; try 'forewarn vm restart --help'"),
        (
            ("vm", "list", "--limit", "0"),
            2,
            "Invalid value for '--limit': Input should be greater than or equal to 1; try 'forewarn vm list --help'",
        ),
        (("vm", "explode"), 2, "No such command 'explode'; try 'forewarn vm --help'"),
        (
            ("--control-url", "elsewhere", "vm", "list"),
            2,
            "control_url .from --control-url.: expected http://HOST:PORT, got 'elsewhere'",
        ),
    ],
)
def test_what_is_refused_is_one_line_and_an_exit_code(
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
            ("--rate", "0"),
            2,
            r"rate \(from --rate\): expected a number from 0.001 to 100000, got '0'",
        ),
        (
            ("--control", "0.0.0.0:0"),
            2,
            "control is 0.0.0.0:0: there are no tokens, .*; expected a loopback address, or .*",
        ),
        (
            ("--fleet", "nope.yaml"),
            2,
            "the fleet file nope.yaml cannot be read: No such file or directory",
        ),
        (
            ("--fleet", "bad.yaml"),
            2,
            r"bad.yaml:2: scopes\[0\].knd: unknown member; did you mean 'kind'\?",
        ),
        (("--store", "sqlite:////nonexistent/x.db"), 4, ".*/nonexistent/x.db.*"),
        (
            ("--identify", "proxy"),
            2,
            r"identify \(from --identify\): proxy needs proxy_key_file, which is not given",
        ),
        (("--lagacy-path",), 2, "No such option: --lagacy-path.*; try 'forewarn serve --help'"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """The line is what ends up in the journal of whoever installs it."""
    (tmp_path / "bad.yaml").write_text("scopes:\n- {name: a, knd: vm}\n")
    ports = ("--store", "memory", "--metadata", "127.0.0.1:0", "--control", "127.0.0.1:0")

    refused = forewarn("serve", *ports, *arguments, cwd=tmp_path)

    assert (refused.returncode, refused.stdout) == (code, "")
    assert re.fullmatch(f"forewarn: {message}\n", refused.stderr), refused.stderr


def test_a_port_that_is_taken_is_told(tmp_path: Path, service: Service) -> None:
    """The most frequent mistake of all: it runs already."""
    taken = service.metadata.removeprefix("http://")

    refused = forewarn(
        "serve", "--store", "memory", "--metadata", taken, "--control", "127.0.0.1:0", cwd=tmp_path
    )

    assert refused.returncode == 4
    assert refused.stderr == f"forewarn: cannot listen on {taken}: the address is in use\n"


def test_no_service_or_another_one_is_told_from_a_refusal() -> None:
    """4 says: try again later, or look where you are calling."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    absent = forewarn("vm", "list", FOREWARN_CONTROL=url)
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as other:
        assert other.stdout
        port = re.search(r"port (\d+)", other.stdout.readline())
        assert port
        stranger = forewarn("vm", "list", FOREWARN_CONTROL=f"http://127.0.0.1:{port[1]}")
        other.kill()

    assert absent.returncode == stranger.returncode == 4
    assert (
        absent.stderr
        == f"forewarn: no service answers at {url}: Connection refused; FOREWARN_CONTROL tells where it is\n"
    )
    assert "is no Forewarn control API (status 404)\n" in stranger.stderr


def test_json_is_the_apis_own(service: Service) -> None:
    """A program that reads one can read the other."""
    for noun in ("scope", "vm", "host", "event"):
        with urlopen(f"{service.control}/api/v1/{noun}s", timeout=SECONDS_MAX) as response:
            assert json.loads(service.forewarn(noun, "list", "--json").stdout) == json.load(
                response
            )


def test_a_list_is_aligned_text_in_a_pipe_and_a_table_on_a_terminal(service: Service) -> None:
    """awk reads the one, a person the other."""
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
        piped.stdout
        == "NAME    VMS    SCOPES  EVENTS\nhost-a  web-0  web     -\nhost-b  web-1  web     -\n"
    )
    assert "─" in table
    assert "host-a" in table


def test_a_list_that_is_cut_says_so(service: Service) -> None:
    """Silence would look like all there is."""
    cut = service.forewarn("vm", "list", "--limit", "1")

    assert [line.split()[0] for line in cut.stdout.splitlines()] == ["NAME", "web-0"]
    assert cut.stderr == "1 of 2 vms are shown; --limit shows more\n"


def test_a_reader_who_leaves_early_causes_no_noise(service: Service) -> None:
    """`forewarn vm list | head -1` is what everybody types."""
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


def test_an_interrupted_command_ends_without_a_word() -> None:
    """Ctrl-C while a service does not answer: 130, as shells expect."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        variables = environment(FOREWARN_CONTROL=f"http://127.0.0.1:{mute.getsockname()[1]}")
        command = [FOREWARN, "vm", "list"]
        with (
            interruptible(),
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as waiting,
        ):
            mute.settimeout(SECONDS_MAX)
            connection, _ = mute.accept()
            with connection:
                connection.settimeout(SECONDS_MAX)
                assert connection.recv(3) == b"GET"
                waiting.send_signal(signal.SIGINT)
                out, err = waiting.communicate(timeout=SECONDS_MAX)

    assert (waiting.returncode, out, err) == (130, b"", b"")


@pytest.mark.system
def test_the_three_lines_of_the_demo_work_when_pasted() -> None:
    """The first minute decides whether there is a second one."""
    program = os.path.relpath(FOREWARN, ROOT)
    with running(ROOT, "demo", program=program) as demo:
        assert demo.process.stdout
        said = "".join(
            line
            for line in iter(
                demo.process.stdout.readline, "What happens is told here; Ctrl-C ends it.\n"
            )
        )
        lines = [line.strip() for line in said.splitlines() if line.startswith("   ")]
        told = [pasted(line) for line in lines]
        last = pasted(lines[0])
        demo.process.send_signal(signal.SIGINT)
        happened, errors = demo.process.communicate(timeout=SECONDS_MAX)

    assert (len(lines), demo.process.returncode, errors) == (3, 0, "")
    assert lines[1].endswith(f" {program} vm restart web-0")
    assert told[0] == '{"DocumentIncarnation":1,"Events":[]}'
    assert re.fullmatch(r"Reboot \S+ of web-0 is Scheduled, not before \S+\n", told[1])
    assert told[2] == ""
    assert '"EventStatus":"Started"' in last
    for part in ("a VM polls", "Scheduled: Reboot of web-0", "approved by web-0", "Started"):
        assert part in happened


def pasted(line: str) -> str:
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


def test_without_the_servers_parts_the_client_works_and_the_server_says_what_is_missing(
    service: Service,
) -> None:
    """`pip install forewarn` is what stands in a VM or on a laptop: no msgspec, no Litestar, no
    uvicorn, no YAML.
    """
    absent = "msgspec", "litestar", "uvicorn", "uvloop", "yaml"
    start = f"import sys; sys.modules.update(dict.fromkeys({absent})); from forewarn.cli.main import main; main()"

    def bare(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", start, *arguments]
        variables = environment(FOREWARN_CONTROL=service.control)
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )

    assert bare("vm", "list").returncode == 0
    assert bare("config", "--show").returncode == 0
    for command in (("serve",), ("demo",), ("fleet", "check", "x"), ("fleet", "schema")):
        refused = bare(*command)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert re.fullmatch(
            rf"forewarn: `forewarn {command[0]}.*` needs \w+; pip install 'forewarn\[server\]' brings it\n",
            refused.stderr,
        ), refused.stderr


def test_the_config_in_force_is_shown_with_its_origins_and_without_secrets(tmp_path: Path) -> None:
    """The file of the current folder counts, a variable beats it, a flag beats both."""
    (tmp_path / "forewarn.toml").write_text("rate = 2\nimpacts_max = 3\nstore = 'memory'\n")
    variables = {"FOREWARN_RATE": "4", "FOREWARN_IMPACTS_MAX": "5", "FOREWARN_TOKEN": "hunter2"}
    variables |= {
        "FOREWARN_WEBHOOK": "https://h.example/hunter2?x=hunter2",
        "FOREWARN_WEBHOOK_SECRET_FILE": "x",
    }

    shown = forewarn(
        "config", "--show", "--rate", "6", "--no-legacy-path", cwd=tmp_path, **variables
    )
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}

    assert rows["rate"] == ["6", "--rate"]
    assert rows["impacts_max"] == ["5", "FOREWARN_IMPACTS_MAX"]
    assert rows["store"] == ["memory", "store", "in", "forewarn.toml"]
    assert rows["legacy_path"] == ["false", "--legacy-path"]
    assert rows["token"] == ["***", "FOREWARN_TOKEN"]
    assert rows["control_url"] == ["http://127.0.0.1:8081", "default"]
    assert rows["webhook"] == ["https://h.example/***", "FOREWARN_WEBHOOK"]
    assert "hunter2" not in shown.stdout


def test_a_file_that_is_named_counts_for_the_service_and_the_client(tmp_path: Path) -> None:
    """One file, one `--config`: what is shown must be what either of them would take."""
    file = tmp_path / "other.toml"
    file.write_text("rate = 2\ncontrol_url = 'http://127.0.0.1:9'\n")

    for arguments in (
        ("config", "--show", "--config", str(file)),
        ("--config", str(file), "config", "--show"),
    ):
        shown = forewarn(*arguments, cwd=tmp_path).stdout
        rows = {line.split()[0]: line.split()[1] for line in shown.splitlines()}
        assert (rows["rate"], rows["control_url"]) == ("2", "http://127.0.0.1:9")
    called = forewarn("--config", str(file), "vm", "list", cwd=tmp_path)
    assert "no service answers at http://127.0.0.1:9: " in called.stderr


def test_the_version_and_help_are_told_on_stdout() -> None:
    """The two things that everybody tries first."""
    assert re.fullmatch(r"forewarn \d+\.\d+\.\d+\n", forewarn("--version").stdout)
    assert "serve" in forewarn("--help").stdout
    assert "--identify" in forewarn("serve", "--help").stdout
