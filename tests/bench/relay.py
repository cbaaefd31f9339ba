"""What the relay adds to a poll, and what a hostile guest does to the polls of another one:
`python -m tests.bench relay`.

wrk polls a real server directly and through the relay, in turns. The relay has a core to itself;
wrk and the server share the other one.
"""

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.bench import relay_attack, rounds
from tests.bench.load import LOAD_CORE, QUERY, SERVER_CORE, Measured, Target, measure
from tests.bench.table import table
from tests.e2e.service import Service

VM_ID = "5f3c9c1e-0000-4000-8000-000000000001"
FLEET = f"""
scopes:
  - name: web
    kind: vm
    vms: [{{name: web-0, id: {VM_ID}, address: 127.0.0.1, host: h}}]
"""
PATH = f"/metadata/scheduledevents?{QUERY}"
POLL = f"GET {PATH} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n\r\n".encode()
ROUNDS, SECONDS, POLLS = 7, 2, 2000
RATE_MIN, ADDED_MILLISECONDS_MAX, MEMORY_MB_MAX = 5000, 1.0, 50
MEMORY_NOTE = "of 60 MB for the daemon"
SECTION = re.compile(r"\n## The relay of a host\n.*?(?=\n## |\Z)", re.DOTALL)


class Result(NamedTuple):
    """`added_milliseconds` at the median; `megabytes` are resident after the load."""

    direct: list[Measured]
    relayed: list[Measured]
    direct_milliseconds: float
    added_milliseconds: float
    megabytes: float

    @property
    def rate(self) -> float:
        return statistics.median(each.polls_per_second for each in self.relayed)

    def missed(self) -> list[str]:
        goals = {
            "relayed polls per second": self.rate >= RATE_MIN,
            "what the relay adds to a poll": self.added_milliseconds < ADDED_MILLISECONDS_MAX,
            "memory of the relay": self.megabytes <= MEMORY_MB_MAX,
        }
        return [name for name, is_met in goals.items() if not is_met]


class RelayProcess(NamedTuple):
    process: "subprocess.Popen[str]"
    port: int

    def megabytes(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("rss", file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()) / 1e6


def run() -> Result:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        token = create_host_token(server)
        assert server.process is not None
        direct = Target(server.process.pid, int(server.metadata.rpartition(":")[2]))
        with relaying(server.metadata, token) as relay:
            relayed = Target(relay.process.pid, relay.port)
            for target in (direct, relayed):
                measure(target, PATH, SECONDS)  # warm up
            pairs = [
                (measure(direct, PATH, SECONDS), measure(relayed, PATH, SECONDS))
                for _ in range(ROUNDS)
            ]
            one, other = compare_latency(direct.port, relay.port)
            megabytes = relay.megabytes()
    return Result(
        [each for each, _ in pairs], [each for _, each in pairs], one, other - one, megabytes
    )


def create_host_token(server: Service) -> str:
    """The first token is an admin's, and must be."""
    created = server.ask("POST", "/tokens", {"name": "admin", "role": "admin"})
    assert created[0] == 201, created
    body = {"name": "h", "role": "host", "host": "h"}
    status, made = server.ask("POST", "/tokens", body, token=created[1]["text"])
    assert status == 201, made
    text: str = made["text"]
    return text


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    service = Service(folder, "--store", "memory", fleet=FLEET).start()
    try:
        assert service.process is not None
        os.sched_setaffinity(service.process.pid, {int(LOAD_CORE)})
        yield service
    finally:
        service.kill()


@contextmanager
def relaying(server: str, token: str) -> Iterator[RelayProcess]:
    module = ["-m", "tests.bench.relay_server"]
    options = [f"--server={server}", f"--token={token}", f"--vm={VM_ID}"]
    command = ["taskset", "-c", SERVER_CORE, sys.executable, *module, *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield RelayProcess(process, int(process.stdout.readline()))
    finally:
        process.communicate(timeout=30)


def compare_latency(direct: int, relayed: int) -> tuple[float, float]:
    """The medians in milliseconds; one client, in turns, one poll at a time."""
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    clients = [socket.create_connection(("127.0.0.1", port)) for port in (direct, relayed)]
    times: list[list[float]] = [[], []]
    try:
        for _ in range(POLLS):
            for client, taken in zip(clients, times, strict=True):
                began = time.perf_counter()
                client.sendall(POLL)
                response = b""
                while not response.endswith(b"}"):
                    response += client.recv(65536)
                assert response.startswith(b"HTTP/1.1 200")
                taken.append((time.perf_counter() - began) * 1000)
    finally:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        for client in clients:
            client.close()
    return statistics.median(times[0]), statistics.median(times[1])


def report(result: Result) -> list[str]:
    rows = [
        [
            name,
            *(
                f"{statistics.median(column):,.{digits}f}"
                for column, digits in zip(zip(*taken, strict=True), (0, 2, 1), strict=True)
            ),
        ]
        for name, taken in (("direct", result.direct), ("relayed", result.relayed))
    ]
    missed = result.missed()
    pairs = zip(result.relayed, result.direct, strict=True)
    share = statistics.median(one.polls_per_second / two.polls_per_second for one, two in pairs)
    goals = [
        ("relayed polls per second", f"{result.rate:,.0f}", f"≥ {RATE_MIN:,}"),
        ("against direct polls", f"{share:.2f}", ""),
        ("what the relay adds to a poll", f"{result.added_milliseconds:.2f} ms", "< 1 ms"),
        ("memory of the relay", f"{result.megabytes:.0f} MB", f"≤ {MEMORY_MB_MAX} MB"),
    ]
    met = [
        [name, value, goal, ("NO" if name in missed else "yes") if goal else ""]
        for name, value, goal in goals
    ]
    return [
        *table(["", "polls/s", "p99 ms", "CPU µs per poll"], rows),
        "",
        *table(["one relay", "measured", "goal", "met"], met),
    ]


def report_attacks(attacks: list[rounds.Result], load: float) -> list[str]:
    """What one guest's attacks cost another guest; nothing if they were left out."""
    if not attacks:
        return []
    text = f"""
In the table below, one guest attacks the relay of its host, in network namespaces, and the VM that
is measured is another guest of that host. An attack and its absence take turns in {rounds.ROUNDS}
rounds, as in the section before, with the same goal. The relay has a core to itself; the server and
the guests share the other one. Load average before these rounds: {load:.1f}.
"""
    return [*text.splitlines(), "", *rounds.table_of_results(attacks)]


def write(result: Result, attacks: list[str], page: Path, machine: str) -> None:
    """Replace the section of the page, or add it before the growth with the fleet."""
    text = SECTION.sub("", page.read_text())
    rest = "".join(f"{line}\n" for line in attacks)
    section = f"""
## The relay of a host

What `forewarn hostd` adds to a guest's poll. Written by
`python -m tests.bench relay --write docs/benchmarks.md` on {datetime.now(UTC):%Y-%m-%d}
({machine}).

{chr(10).join(report(result))}

wrk polls with 64 connections, directly and through the relay in turns. The relay has a core to
itself, and the server and wrk share the other one, so the direct row is not what a server can do
alone. The relay identifies the guest and signs at every poll, over kept connections to the server;
it is on loopback, and what it adds is measured with one client that sends one poll at a time, at
the median ({result.direct_milliseconds:.2f} ms directly). The memory is that of a process that has
only the relay; the goal leaves room for the rest of the daemon, which has 60 MB in all.
{rest}"""
    before, heading, after = text.partition("\n## Growth with the fleet\n")
    page.write_text(before.rstrip() + "\n" + section + heading + after)


def main(page: Path | None, machine: str) -> int:
    result = run()
    print("\n".join(report(result)))
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    load, _, _ = os.getloadavg()
    attacks = relay_attack.measure()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    lines = report_attacks(attacks, load)
    print("\n".join(lines))
    if page:
        write(result, lines, page, machine)
    missed = result.missed() + [attack.name for attack in attacks if not attack.is_met]
    if missed:
        print(f"missed: {json.dumps(missed)}", file=sys.stderr)
    return 1 if missed else 0
