"""`forewarn serve` and other commands as processes, on free ports, in a clean environment."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

from forewarn.cli.main import run
from tests.e2e.waiting import eventually

ROOT = Path(__file__).parents[2]
FOREWARN = str(Path(sys.executable).with_name("forewarn"))
READY = re.compile(
    r"forewarn is ready: metadata (http://\S+), control (https?://\S+), store (\S+)\n"
)
SECONDS_MAX = 30
FLEET = """
scopes:
  - name: web
    kind: availability-set
    vms:
      - {name: web-0, address: 127.0.0.1, update_domain: 0, host: host-a}
      - {name: web-1, address: 127.0.0.2, update_domain: 1, host: host-b}
"""


class Service(NamedTuple):
    """A running service: its process and its URLs."""

    process: "subprocess.Popen[str]"
    metadata: str
    control: str

    def forewarn(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command against this service."""
        return forewarn("--control-url", self.control, *arguments)


def forewarn(
    *arguments: str, cwd: Path = ROOT, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, in this process: starting one costs half a second of CPU."""
    out, err = io.StringIO(), io.StringIO()
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment(**variables))
    try:
        with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
            code = run(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def forewarn_process(
    *arguments: str, cwd: Path = ROOT, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, as a user does: for `serve`, and for what a process can leak."""
    return subprocess.run(
        [FOREWARN, *arguments],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def environment(**variables: str) -> dict[str, str]:
    """The environment without FOREWARN_* variables, and with a wide terminal."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FOREWARN_")}
    return clean | {"COLUMNS": "200", "NO_PROXY": "*"} | variables


@contextmanager
def interruptible() -> Iterator[None]:
    """Let processes that are started within this receive SIGINT.

    A shell starts background jobs with SIGINT ignored, and their children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def running(
    folder: Path, *arguments: str, program: str = FOREWARN, control: str = "127.0.0.1:0"
) -> Iterator[Service]:
    """A service on free ports in a folder. It is killed at the end of the block."""
    command = [program, *arguments, "--metadata", "127.0.0.1:0", "--control", control]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            line = process.stdout.readline()
            console = line if arguments[0] == "demo" else ""
            if console:
                line = process.stdout.readline()
            match = READY.fullmatch(line)
            assert match, line or process.communicate(timeout=SECONDS_MAX)[1]
            assert console in ("", f"Console: {match[2]}/\n"), "the demo prints it first"
            yield Service(process, match[1], match[2])
        finally:
            process.kill()


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Service]:
    (folder / "fleet.yaml").write_text(FLEET)
    with running(folder, "serve", "--fleet", "fleet.yaml", "--store", "memory", *arguments) as made:
        yield made


def poll(service: Service) -> bytes:
    url = f"{service.metadata}/metadata/scheduledevents?api-version=2020-07-01"
    with urlopen(Request(url, headers={"Metadata": "true"}), timeout=SECONDS_MAX) as response:
        body: bytes = response.read()
    return body


soon = eventually
