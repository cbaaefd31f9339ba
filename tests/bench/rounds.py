"""What an attack costs the polls of another VM, in rounds with and without it, in turns.

The server has one core. The VM that polls and the attacker, which is a process of its own, share
the other one.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.bench.attack import P99_RATIO_MAX, metadata_port, poll_times
from tests.bench.load import LOAD_CORE, cpu_seconds
from tests.bench.table import table
from tests.e2e.service import Service

ROUNDS = 5
WARM_UP_SECONDS = 1.0
PERIOD_SECONDS = 0.01
PROCESS_SECONDS_MAX = 60
"""Attackers stop by themselves after this."""


class Polls(NamedTuple):
    """How long the polls of the VM took in one round, in milliseconds."""

    p50: float
    p99: float
    longest: float


class Result(NamedTuple):
    """The rounds, in pairs, and what the attacker got, per second."""

    name: str
    quiet: list[Polls]
    attacked: list[Polls]
    got: dict[str, float]

    @property
    def ratios(self) -> Polls:
        """The medians of the ratios within a round."""
        pairs = zip(self.quiet, self.attacked, strict=True)
        ratios = [[two / one for one, two in zip(*pair, strict=True)] for pair in pairs]
        return Polls(*map(statistics.median, zip(*ratios, strict=True)))

    @property
    def is_met(self) -> bool:
        return self.ratios.p99 <= P99_RATIO_MAX

    def lines(self) -> Iterator[str]:
        for name, rounds in (("quiet", self.quiet), (self.name, self.attacked)):
            p50, p99, longest = map(statistics.median, zip(*rounds, strict=True))
            yield f"{name:30} p50 {p50:7.2f} ms  p99 {p99:7.2f} ms  longest {longest:7.2f} ms"
        p50, p99, longest = self.ratios
        yield f"{'':30} p50 {p50:7.1f} x   p99 {p99:7.1f} x   longest {longest:7.1f} x"
        yield f"the attacker got per second: {json.dumps(self.got)}"


def take_rounds(name: str, observe: Callable[[], Polls], *command: str) -> Result:
    """The command attacks: it prints "ready", and at its end what it got."""
    observe()  # everything that happens only once happens here
    quiet, attacked = list[Polls](), list[Polls]()
    got, seconds = Counter[str](), 0.0
    for number in range(ROUNDS):
        print(f"{name}: round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        with running(*command) as attacker:
            before, began = cpu_seconds(attacker.pid), time.monotonic()
            attacked.append(observe())
            lasted = time.monotonic() - began
            busy_share = (cpu_seconds(attacker.pid) - before) / lasted
            got.update(end(attacker))
            seconds += lasted + WARM_UP_SECONDS
        # The VM and the attacker share a core, so the quiet rounds have a process there too: as
        # busy as the attacker just was, without a word to the server. So the ratio has only what
        # the attack does to the server in it.
        with running(sys.executable, "-m", "tests.bench.rounds", str(busy_share)):
            quiet.append(observe())
    return Result(name, quiet, attacked, {key: got[key] / seconds for key in got})


def table_of_results(results: list[Result]) -> list[str]:
    cells = [
        [
            result.name,
            f"{statistics.median(polls.p50 for polls in result.attacked):,.2f} ms",
            f"{result.ratios.p50:,.1f}",
            f"{statistics.median(polls.p99 for polls in result.attacked):,.2f} ms",
            f"{result.ratios.p99:,.1f}",
            "yes" if result.is_met else "NO",
        ]
        for result in results
    ]
    head = ["attack in rounds", "another VM's p50", "ratio", "p99", "ratio", "met"]
    return table(head, cells)


def observe_service(service: Service) -> Polls:
    """Polls of the VM at the server itself."""
    return summarize(poll_times(metadata_port(service)))


def summarize(poll_seconds: Iterable[float]) -> Polls:
    milliseconds = sorted(1000 * seconds for seconds in poll_seconds)
    p99 = milliseconds[len(milliseconds) * 99 // 100]
    return Polls(statistics.median(milliseconds), p99, milliseconds[-1])


@contextmanager
def running(*command: str) -> Iterator["subprocess.Popen[str]"]:
    """A process on the core of the load; the VM that polls goes before it."""
    words = ["nice", "-n", "10", "taskset", "-c", LOAD_CORE]
    with subprocess.Popen([*words, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(WARM_UP_SECONDS)
            yield process
        finally:
            process.kill()


def end(attacker: "subprocess.Popen[str]") -> dict[str, int]:
    """What the attacker got."""
    assert attacker.poll() is None, "the attacker ended before the measurement"
    attacker.terminate()
    assert attacker.stdout is not None
    got: dict[str, int] = json.loads(attacker.stdout.readline())
    return got


def be_busy(share: float) -> None:
    """Use this share of a core."""
    ends_at = time.monotonic() + PROCESS_SECONDS_MAX
    print("ready", flush=True)
    while (began := time.monotonic()) < ends_at:
        while time.monotonic() < began + share * PERIOD_SECONDS:
            pass
        time.sleep(max(began + PERIOD_SECONDS - time.monotonic(), 0))


if __name__ == "__main__":
    be_busy(float(sys.argv[1]))
