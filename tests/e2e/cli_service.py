"""A Forewarn service and its commands as real processes, on free ports, with an environment that
configures nothing.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[2]
FOREWARN = str(Path(sys.executable).with_name("forewarn"))
READY = re.compile(r"forewarn is ready: metadata (http://\S+), control (https?://\S+)\n")
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
    """A running service: its process, where it stands, and what it said when it was ready."""

    process: "subprocess.Popen[str]"
    metadata: str
    control: str
    said: str

    def forewarn(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return forewarn(*arguments, FOREWARN_CONTROL=self.control)


def forewarn(
    *arguments: str, cwd: Path = ROOT, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """One command, run to its end."""
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
    """This one without anything that configures Forewarn, and as wide a terminal everywhere."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FOREWARN_")}
    return clean | {"COLUMNS": "200", "NO_PROXY": "*"} | variables


@contextmanager
def interruptible() -> Iterator[None]:
    """Processes that are started within this take SIGINT as usual.

    A shell starts background jobs with SIGINT ignored, and all their children inherit that: then
    Ctrl-C is nothing to test.
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
    """A service on free ports, in a folder of its own.

    It is ended with the block, if it has not ended by itself.
    """
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
            said = process.stdout.readline()
            found = READY.fullmatch(said)
            assert found, said or process.communicate(timeout=SECONDS_MAX)[1]
            yield Service(process, found[1], found[2], said)
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


def soon(is_so: Callable[[], bool]) -> None:
    """Wait until it is so, but not for ever."""
    end = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < end, "it did not become so in time"
        time.sleep(0.05)
