"""The agent as a real process: as an installed module, or as the zipapp."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from forewarn.agent.participant_socket import request_status

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 60
MODULE = (sys.executable, "-m", "forewarn.agent")
RULE = """
[[rule]]
name = "all"
concerns = "any"
approve = "when-prepared"
"""


def zipapp(folder: Path) -> tuple[str, ...]:
    """The command that runs the zipapp under a Python with nothing installed."""
    target = folder / "forewarn-agent.pyz"
    subprocess.run(
        [sys.executable, ROOT / "tools" / "make_agent.py", target],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return (sys.executable, "-I", "-S", str(target))


def eventually(look: Callable[[], T], is_right: Callable[[T], bool] = bool) -> T:
    """Poll until the value is right, and return it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:  # ends at the deadline
        seen = look()
        if is_right(seen):
            return seen
        assert time.monotonic() < deadline, f"the last value was {seen}"
        time.sleep(0.03)


class AgentProcess:
    """One agent in a folder. Its files survive a kill."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        *,
        command: Sequence[str] = MODULE,
        environ: Mapping[str, str] | None = None,
    ):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.command = tuple(command)
        self.environ = dict(os.environ if environ is None else environ)
        self.endpoint = endpoint
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        return self.folder / "agent.toml"

    def configure(self, rule: str = RULE, *, name: str = "", more: str = "") -> None:
        """Write a file with this rule and one step per phase."""
        ran = self.folder / "ran"
        steps = [
            f"{phase} = [{{run = ['/bin/sh', '-c', 'echo {phase} $EVENT_TYPE >> {ran}']}}]"
            for phase in ("prepare", "start", "recover")
        ]
        top = f"endpoint = '{self.endpoint}'\nname = '{name}'\n"
        top += f"journal = '{self.folder}/journal'\nsocket = '{self.socket}'\n"
        self.config.write_text("\n".join([top, more, rule, *steps, ""]))

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    def start(self, *options: str) -> "AgentProcess":
        """Returns when it is ready."""
        begun = self.log().count("agent ready")
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [*self.command, "run", "--config", str(self.config), *options],
                env=self.environ,
                stderr=log,
                cwd=self.folder,
            )
        eventually(
            lambda: (
                self.log().count("agent ready") > begun
                or self.process is None
                or self.process.poll() is not None
            )
        )
        assert self.process.poll() is None, self.log()
        return self

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        return subprocess.run(
            [*self.command, *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Returns the exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        return process.wait(TIMEOUT_SECONDS)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def ran(self) -> list[str]:
        """The steps that ran, each as `phase type`."""
        path = self.folder / "ran"
        return path.read_text().splitlines() if path.exists() else []

    def journal(self) -> list[str]:
        """The kind of each journal entry."""
        return [
            json.loads(line)["what"] for line in (self.folder / "journal").read_text().splitlines()
        ]

    def status(self) -> dict[str, object]:
        return request_status(self.socket)


@contextmanager
def agent_of(folder: Path, endpoint: str, **options: object) -> Iterator[AgentProcess]:
    """An agent that is killed at the end."""
    agent = AgentProcess(folder, endpoint, **options)  # type: ignore[arg-type]
    try:
        yield agent
    finally:
        agent.end(signal.SIGKILL)
