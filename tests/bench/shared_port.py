"""Two real servers that share a port, against one. `python -m tests.bench.shared_port`.

The load needs CPU time too. With two cores it has none of its own while two servers run: for a poll
wrk takes nearly as long as the server. So polls are compared by the CPU time of the servers. A
request for instance metadata costs the server much more than it costs wrk, so there the requests
per second show what two cores serve.
"""

import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.bench.load import LOAD_CORE, QUERY, SERVER_CORE, cpu_seconds, raise_limits, run_wrk
from tests.e2e.service import Service, call, steady_port

ROUNDS = 7
SECONDS = 2
POLLS, INSTANCE = "polls", "instance metadata"
PATHS = {
    POLLS: f"/metadata/scheduledevents?{QUERY}",
    INSTANCE: "/metadata/instance?api-version=2021-02-01",
}
RATIO_MIN = 1.7
REQUESTS = re.compile(rb"^forewarn_requests_total\{.*\} (\S+)$", re.MULTILINE)


class Load(NamedTuple):
    """`per_cpu_second`: what the servers answer together if each has a core to itself."""

    per_second: float
    per_cpu_second: float


class Row(NamedTuple):
    """Requests per second of one server and of two, and two against one."""

    name: str
    one: float
    two: float
    ratio: float
    cpu_ratio: float

    @property
    def is_met(self) -> bool:
        return (self.cpu_ratio if self.name == POLLS else self.ratio) >= RATIO_MIN


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        alone = [stack.enter_context(serving(Path(folder), SERVER_CORE, steady_port()))]
        port = steady_port()
        pair = [
            stack.enter_context(serving(Path(folder), core, port))
            for core in (SERVER_CORE, LOAD_CORE)
        ]
        for servers in (alone, pair):
            for path in PATHS.values():
                load(servers, path)  # warm up
        return [compare(name, alone, pair) for name in PATHS]


def compare(name: str, alone: Sequence[Service], pair: Sequence[Service]) -> Row:
    """One and two take turns; each ratio is the median of those within a round."""
    path = PATHS[name]
    rounds = [(load(alone, path), load(pair, path)) for _ in range(ROUNDS)]
    return Row(
        name,
        one=statistics.median(one.per_second for one, _ in rounds),
        two=statistics.median(two.per_second for _, two in rounds),
        ratio=statistics.median(two.per_second / one.per_second for one, two in rounds),
        cpu_ratio=statistics.median(two.per_cpu_second / one.per_cpu_second for one, two in rounds),
    )


def load(servers: Sequence[Service], path: str) -> Load:
    before = [(count_requests(server), spent_seconds(server)) for server in servers]
    cores = f"{SERVER_CORE},{LOAD_CORE}"
    url = f"{servers[0].metadata}{path}"
    done = run_wrk(url, SECONDS, cores=cores, threads=2)
    rates = [
        (count_requests(server) - requests) / (spent_seconds(server) - spent)
        for server, (requests, spent) in zip(servers, before, strict=True)
    ]
    return Load(done.polls / done.seconds, sum(rates))


def count_requests(server: Service) -> float:
    _, text = call("GET", f"{server.control}/metrics", headers={})
    return sum(map(float, REQUESTS.findall(text)))


def spent_seconds(server: Service) -> float:
    assert server.process is not None
    return cpu_seconds(server.process.pid)


@contextmanager
def serving(folder: Path, core: str, port: int) -> Iterator[Service]:
    """A server on this core; those of one port share it, and a store."""
    own = folder / f"{port}-{core}"
    own.mkdir()
    store = f"sqlite:///{folder}/{port}.db"
    addresses = ("--metadata", f"127.0.0.1:{port}", "--control", f"127.0.0.1:{steady_port()}")
    service = Service(own, "--reuse-port", *addresses, "--store", store).start()
    try:
        assert service.process is not None
        os.sched_setaffinity(service.process.pid, {int(core)})
        yield service
    finally:
        service.kill()


if __name__ == "__main__":
    raise_limits()
    measured = measure()
    print(*measured, sep="\n")
    sys.exit(not all(row.is_met for row in measured))
