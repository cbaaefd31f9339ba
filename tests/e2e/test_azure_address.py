"""`lab exec` and `lab run --at-azure-address`: a program with Azure's address built in, unchanged.

Network namespaces need Linux and permission, so these tests are for `make test-all`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.testing import Lab
from tests.e2e.cli_service import FOREWARN, environment, serving
from tests.e2e.test_lab_run import SCENARIO
from tests.e2e.waiting import eventually

pytestmark = pytest.mark.system

SECONDS_MAX = 60
APPROVE_ONCE = """\
import json, os, sys, urllib.request

url = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"

def call(data=None):
    request = urllib.request.Request(url, data=data, headers={"Metadata": "true"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read()

def approve():
    ids = [{"EventId": event["EventId"]} for event in json.loads(call())["Events"]]
    if ids:
        call(json.dumps({"StartRequests": ids}).encode())
"""
UNPRIVILEGED = ("setpriv", "--bounding-set", "-sys_admin")
"""Root without the permission to make a network namespace: a user namespace gives it."""
NO_NAMESPACES = ("unshare", "--user", "--map-root-user", "sh", "-c")
FORBID = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
"""Only within a user namespace of its own."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(timeout_seconds=SECONDS_MAX) as lab:
        lab.vm("web-0")
        yield lab


def handler(folder: Path, text: str) -> tuple[str, str]:
    path = folder / "handler.py"
    path.write_text(APPROVE_ONCE + text)
    return sys.executable, str(path)


def start(lab: Lab, *command: str, vm: str = "web-0", prefix: tuple[str, ...] = ()) -> "Program":
    return subprocess.Popen(
        [*prefix, FOREWARN, "lab", "exec", "--vm", vm, "--", *command],
        env={**environment(), "FOREWARN_CONTROL": lab.control_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


Program = subprocess.Popen[str]


def run(
    lab: Lab, *command: str, vm: str = "web-0", prefix: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    with start(lab, *command, vm=vm, prefix=prefix) as process:
        output, errors = process.communicate(timeout=SECONDS_MAX)
        return process.returncode, output, errors


def is_gone(url: str) -> bool:
    """No relay to this URL is left."""
    lines = [Path("/proc", pid, "cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    texts = [line.read_bytes() for line in lines if line.exists()]
    return not any(url.encode() in text for text in texts)


@pytest.mark.parametrize("prefix", [(), UNPRIVILEGED], ids=["root", "user-namespace"])
def test_handler_runs_unchanged_beside_a_lab(
    lab: Lab, tmp_path: Path, prefix: tuple[str, ...]
) -> None:
    """Its exit code is that of the command, and its user is the same inside."""
    event = lab.vm("web-0").reboot()
    names = 'print(os.environ["FOREWARN_ENDPOINT"], os.environ["FOREWARN_VM"], os.getuid())'
    command = handler(tmp_path, f"approve()\n{names}\nsys.exit(7)\n")

    code, output, errors = run(lab, *command, prefix=prefix)

    assert (code, output, errors) == (7, f"http://169.254.169.254 web-0 {os.getuid()}\n", "")
    assert event.approved_by == "web-0"
    eventually(lambda: is_gone(lab.vm("web-0").url))


def test_signals_reach_the_handler_and_nothing_is_left(lab: Lab, tmp_path: Path) -> None:
    """The command becomes the handler, so there is nobody who could lose a signal."""
    text = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
call()
print("ready", flush=True)
time.sleep(60)
"""
    with start(lab, *handler(tmp_path, text)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_MAX) == 5
    eventually(lambda: is_gone(lab.vm("web-0").url))


def test_killed_handler_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    text = 'import time; call(); print("ready", flush=True); time.sleep(60)\n'
    with start(lab, *handler(tmp_path, text)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.wait(SECONDS_MAX) == -signal.SIGKILL
    eventually(lambda: is_gone(lab.vm("web-0").url))


def test_handler_has_no_other_network(lab: Lab, tmp_path: Path) -> None:
    """A handler under test must not reach the machine's services by accident."""
    port = lab.url.rpartition(":")[2]
    text = f"""
import socket
def reach(address):
    try:
        socket.create_connection(address, 5)
    except OSError as error:
        return error.strerror
print(reach(("127.0.0.1", {port})), reach(("192.0.2.1", 80)), reach(("169.254.169.253", 80)))
"""
    _, output, _ = run(lab, *handler(tmp_path, text))
    assert output == "Connection refused Network is unreachable Network is unreachable\n"


def test_reset_of_the_endpoint_reaches_the_handler(lab: Lab, tmp_path: Path) -> None:
    """Faults below HTTP are what the lab is for."""
    lab.fault("reset")
    text = """
try:
    call()
except OSError as error:
    print(type(getattr(error, "reason", error)).__name__)
"""
    assert run(lab, *handler(tmp_path, text))[1] == "ConnectionResetError\n"


def test_missing_permission_is_one_clear_line(lab: Lab) -> None:
    code, output, errors = run(lab, "true", prefix=(*NO_NAMESPACES, FORBID, "sh"))
    assert (code, output) == (127, "")
    assert errors == (
        "forewarn: network namespaces are not allowed here (the sysctl user.max_user_namespaces or"
        " user.max_net_namespaces is too low); run as root,"
        ' or see "A program at Azure\'s address" in docs/lab.md\n'
    )


def test_run_without_permission_does_not_begin(tmp_path: Path) -> None:
    """The reason is not a line of the handler's output, before five steps that were not reached."""
    run = ("lab", "run", "host-reboot", "--at-azure-address")
    done = subprocess.run(
        [*NO_NAMESPACES, FORBID, "sh", FOREWARN, *run, "--html", str(tmp_path / "x"), "--", "true"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("forewarn: network namespaces are not allowed")
    assert list(tmp_path.iterdir()) == []


def test_wrong_command_lines_are_one_clear_line(lab: Lab, tmp_path: Path) -> None:
    lab.vm("web-1")
    assert run(lab, "true", vm="web-9") == (
        3,
        "",
        "forewarn: the lab has no VM 'web-9'; did you mean 'web-0' or 'web-1'?\n",
    )
    assert run(lab, "./nothing") == (
        127,
        "",
        "forewarn: './nothing' cannot be started: No such file or directory\n",
    )
    code, _, errors = run(lab)
    assert (code, len(errors.splitlines())) == (2, 1), errors


def test_service_that_is_not_a_lab_is_one_clear_line(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        done = subprocess.run(
            [FOREWARN, "lab", "exec", "--vm", "web-0", "--", "true"],
            env={**environment(), "FOREWARN_CONTROL": service.control},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    assert done.returncode == 3
    assert done.stderr == (
        "forewarn: this service is not a lab; start one with `forewarn lab serve`, and set"
        " FOREWARN_CONTROL if it is elsewhere\n"
    )


@pytest.mark.parametrize(("text", "code"), [("approve()", 0), ("call()", 1)])
def test_scenario_runs_a_handler_at_azures_address(tmp_path: Path, text: str, code: int) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(SCENARIO)
    loop = f"import time\nwhile True:\n    {text}\n    time.sleep(0.1)\n"
    command = (FOREWARN, "lab", "run", str(scenario), "--rate", "60", "--at-azure-address", "--")
    done = subprocess.run(
        [*command, *handler(tmp_path, loop)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first == "your command plays app-0; its endpoint is http://169.254.169.254"


def test_azure_address_without_a_command_is_a_usage_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [FOREWARN, "lab", "run", "host-reboot", "--at-azure-address"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "forewarn: --at-azure-address needs a command; expected it after --, as in -- ./handler\n",
    )
