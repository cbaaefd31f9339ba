"""What the agent costs inside a VM, and how soon it acts. `python -m tests.bench.agent`: a table; 1
where a goal is missed.

Memory and CPU are those of the real process with its socket open, polling once a second.
Growth is that of the real agent and client, over real HTTP, without the rest between two polls.
Latency is from the operator's call of the real server to the log line of the first step.
"""

import argparse
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from forewarn.agent.agent import Agent
from forewarn.agent.journal import Journal
from forewarn.agent.settings import AgentSettings
from forewarn.client import Client, Document, EndpointError
from forewarn.client.client import Stop
from tests.e2e.agent_process import AgentProcess, agent_of, eventually
from tests.e2e.service import running

SECONDS = 20
POLLS = 100_000
POLLS_BEFORE = 10_000
"""So many until all that is made once has been made."""
SAMPLES = 30
PAGE = b'{"DocumentIncarnation":1,"Events":[]}'
ANSWER = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n'
    % len(PAGE)
    + PAGE
)
HELD = '[[rule]]\nname = "all"\nconcerns = "any"\n'
BEGUN = re.compile(r"^(\S+)Z +info +step started +event=(\S+) .*phase=prepare", re.MULTILINE)


class Row(NamedTuple):
    """`value` must not be above `most`."""

    name: str
    value: float
    most: float
    unit: str

    @property
    def is_met(self) -> bool:
        return self.value <= self.most


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        say(f"the agent at one poll a second, {SECONDS} s")
        rows = costs(Path(folder))
        say(f"the agent over {POLLS:,} polls")
        rows.append(growth(Path(folder)))
        say(f"the agent and {SAMPLES} changes, waiting and polling")
        waiting = latencies(Path(folder), "waiting", wait_seconds=30)
        polling = latencies(Path(folder), "polling", wait_seconds=0)
    worst = f"of {SAMPLES}, the worst"
    rows.append(
        Row(f"from a change to the first step, waiting ({worst})", max(waiting) * 1000, 50, "ms")
    )
    rows.append(
        Row(f"from a change to the first step, polling ({worst})", max(polling) * 1000, 1100, "ms")
    )
    return rows


def main() -> int:
    rows = measure()
    for row in rows:
        print(
            f"{row.name:62} {row.value:8,.2f} {row.unit:2}  goal ≤ {row.most:g}"
            f" {row.unit}{'' if row.is_met else '  MISSED'}"
        )
    return 0 if all(row.is_met for row in rows) else 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def costs(folder: Path) -> list[Row]:
    with endpoint() as url, agent_of(folder / "cost", url) as agent:
        agent.configure(HELD, name="web-0", more="wait_seconds = 0")
        agent.start()
        time.sleep(2)
        assert agent.process is not None
        pid = agent.process.pid
        before, began = cpu_seconds(pid), time.monotonic()
        time.sleep(SECONDS)
        share = (cpu_seconds(pid) - before) / (time.monotonic() - began)
        rows = [
            Row("resident memory", memory(pid) / 1e6, 25, "MB"),
            Row("share of a core at one poll a second", share * 100, 0.5, "%"),
        ]
        agent.end()
        agent.configure(HELD, name="web-0", more="listen = '127.0.0.1:0'")
        agent.start()
        time.sleep(2)
        rows.append(Row("resident memory with `listen`", memory(agent.process.pid) / 1e6, 30, "MB"))
        return rows


def growth(folder: Path) -> Row:
    with endpoint() as url:
        words = [
            sys.executable,
            "-m",
            "tests.bench.agent",
            "--polls",
            str(POLLS),
            "--url",
            url,
            "--folder",
            str(folder),
        ]
        output = subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=600
        ).stdout
    before, after = map(int, output.split())
    return Row(
        f"growth from {POLLS_BEFORE:,} to {POLLS:,} polls", (after - before) / 1e6, 0.3, "MB"
    )


def latencies(folder: Path, name: str, *, wait_seconds: int) -> list[float]:
    """In seconds.

    Changes come at any moment of the agent's second, but not before it has seen the last one.
    """
    names = [f"vm-{number}" for number in range(SAMPLES)]
    vms = "".join(
        f"      - {{name: {vm}, address: 127.0.1.{number}, host: host-a}}\n"
        for number, vm in enumerate(names)
    )
    fleet = f"scopes:\n  - name: web\n    kind: availability-set\n    vms:\n{vms}"
    (folder / name).mkdir()
    chance = random.Random(1)
    with (
        running(folder / name, "--store", "memory", fleet=fleet) as service,
        agent_of(folder / name / "a", f"{service.metadata}/as/vm-0") as agent,
    ):
        agent.configure(HELD, more=f"wait_seconds = {wait_seconds}")
        agent.start()
        eventually(lambda: agent.status()["contact_seconds"], lambda heard: heard is not None)
        requested: dict[str, float] = {}
        for vm in names:
            time.sleep(1.2 + chance.random())
            now = time.time()
            _, response = service.ask("POST", f"/vms/{vm}/restart")
            requested[response["event"]["id"]] = now
        begun = eventually(lambda: steps_begun(agent), lambda found: len(found) == SAMPLES)
    return [begun[event] - started for event, started in requested.items()]


def steps_begun(agent: AgentProcess) -> dict[str, float]:
    return {
        event: datetime.fromisoformat(f"{at}+00:00").timestamp()
        for at, event in BEGUN.findall(agent.log())
    }


class Hurried(Client):
    """A client that takes no rest between two polls, and tells of each."""

    polls = 0
    on_poll: Callable[[int], None] = staticmethod(lambda polls: None)

    def documents(
        self, *, stop: Stop | None = None, **options: Any
    ) -> Iterator[Document | EndpointError]:
        assert stop is not None
        return super().documents(stop=NoRest(stop, self._rest), **options)

    def _rest(self) -> None:
        self.polls += 1
        self.on_poll(self.polls)


class NoRest:
    """A stop that calls a function instead of waiting."""

    def __init__(self, stop: Stop, on_wait: Callable[[], None]) -> None:
        self.is_set = stop.is_set
        self._on_wait = on_wait

    def wait(self, timeout: float) -> None:
        self._on_wait()


def poll_many(url: str, polls: int, folder: Path) -> None:
    """In a process of its own: prints its memory early and late."""
    stop = threading.Event()

    def look(done: int) -> None:
        if done in (POLLS_BEFORE, polls):
            print(memory(os.getpid()), flush=True)
        if done >= polls:
            stop.set()

    client = Hurried(url)
    client.on_poll = look
    journal = Journal(folder / "growth")
    Agent(AgentSettings(endpoint=url, name="web-0", wait_seconds=0), client, journal).run(stop)
    client.close()
    journal.close()


@contextmanager
def endpoint() -> Iterator[str]:
    """A fast endpoint that has no events and cannot wait, as a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.agent", "--serve"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:  # ends when it is killed
            connection, _ = listening.accept()
            with connection:
                while connection.recv(
                    65536
                ):  # ends with the connection; a question is one packet here
                    connection.sendall(ANSWER)


def memory(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond."""
    return (
        sum(
            int(file.read_text().split()[0])
            for file in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
        / 1e9
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--polls", type=int, default=0)
    parser.add_argument("--url")
    parser.add_argument("--folder", type=Path)
    asked_for = parser.parse_args()
    if asked_for.serve:
        serve()
    elif asked_for.polls:
        poll_many(asked_for.url, asked_for.polls, asked_for.folder)
    else:
        sys.exit(main())
