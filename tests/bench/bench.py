"""Speed as ratios in one run: our server and nginx take turns on the same core, and the median of
several rounds counts.

`python -m tests.bench [scale|relay] [--write docs/benchmarks.md] [--rounds N] [--seconds N]
[--vms N,N]`. With `scale`, only the growth with the fleet is measured, with `relay` only a host's
relay. Exits 1 where a goal is missed.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.bench import (
    agent,
    attack,
    relay,
    report_load,
    scale,
    scale_report,
    viewer,
    wait,
)
from tests.bench.load import (
    CLOSING,
    LOAD_CORE,
    MANY,
    PATHS,
    QUERY,
    Measured,
    Target,
    measure,
    nginx,
    ours,
    raise_limits,
    run_apart,
)
from tests.bench.rounds import ROUNDS, table_of_results
from tests.bench.table import table

VMS = 100_000
EVENTS = f"/metadata/scheduledevents?{QUERY}"

OURS, OURS_PATH, OURS_NEW = (
    "Forewarn",
    f"Forewarn, {PATHS:,} VMs by path",
    "Forewarn, new connection",
)
FILE, MEMORY, MEMORY_PATH, MEMORY_NEW = (
    "nginx, file",
    "nginx, memory",
    f"nginx, memory, {PATHS:,} paths",
    "nginx, new connection",
)


class Goal(NamedTuple):
    """`value` of one subject divided by that of another, round by round.

    `is_least`: whether more is better.
    """

    name: str
    subject: str
    against: str
    value: Callable[[Measured], float]
    bound: float
    is_least: bool

    def ratio(self, rounds: dict[str, list[Measured]]) -> float:
        pairs = zip(rounds[self.subject], rounds[self.against], strict=True)
        return statistics.median(self.value(one) / self.value(other) for one, other in pairs)

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.is_least else ratio <= self.bound


def rate(one: Measured) -> float:
    return one.polls_per_second


def p99(one: Measured) -> float:
    return one.p99_milliseconds


GOALS = [
    Goal("polls against nginx from a file", OURS, FILE, rate, 1.5, is_least=True),
    Goal("polls against nginx from memory", OURS, MEMORY, rate, 0.9, is_least=True),
    Goal(
        "polls by path against nginx from memory", OURS_PATH, MEMORY_PATH, rate, 0.8, is_least=True
    ),
    Goal("new connections against nginx", OURS_NEW, MEMORY_NEW, rate, 0.9, is_least=True),
    Goal("p99 against nginx from memory", OURS, MEMORY, p99, 2.0, is_least=False),
    Goal("p99 of new connections against nginx", OURS_NEW, MEMORY_NEW, p99, 2.0, is_least=False),
]
CHANGE_RATIO_MAX = 1.5
START_RATIO_MAX = 8
WAITING_BYTES_MAX = 6000
WOKEN_MILLISECONDS_MAX = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["scale", "relay"], help="measure nothing else")
    parser.add_argument(
        "--vms",
        type=lambda text: tuple(map(int, text.split(","))),
        default=scale.SIZES,
        help="the sizes of fleets that are compared, such as 10000,100000",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--seconds", type=int, default=1, help="how long wrk polls each subject in a round"
    )
    parser.add_argument("--write", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    raise_limits()
    if arguments.part == "scale":
        return measure_scale(arguments.vms, arguments.write)
    if arguments.part == "relay":
        return relay.main(arguments.write, machine())
    os.sched_setaffinity(0, {1} if (os.cpu_count() or 1) > 1 else {0})
    say(f"{VMS:,} VMs; {arguments.rounds} rounds of {arguments.seconds} s each")
    with ours(vms=VMS) as server, nginx() as other:
        rounds = take_turns(server.target, other, arguments.rounds, arguments.seconds)
        waited = wait.measure(server)
        alone = server.ready["filled"] / VMS
    with ours(vms=VMS, vms_per_scope=5) as server:
        together = server.ready["filled"] / VMS
    change = run_apart("tests.bench.change")
    start = run_apart("tests.bench.start")
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    guest = agent.measure()
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    attacks = attack.measure()
    compared = [viewer.measure(), report_load.measure()]
    ratios = [(goal, goal.ratio(rounds)) for goal in GOALS]
    report = "\n".join(
        [
            *table_of_rounds(rounds),
            "",
            *table_of_goals(ratios, change["ratio"], start),
            "",
            *table_of_costs(alone, together, change, start),
            "",
            *table_of_waits(waited),
            "",
            *table_of_guest(guest),
            "",
            *table_of_attacks(attacks),
            "",
            *table_of_results(compared),
        ]
    )
    print(report)
    if arguments.write:
        arguments.write.write_text(page(report))
    missed = [goal.name for goal, ratio in ratios if not goal.is_met(ratio)]
    missed += ["a change in a large fleet"] if change["ratio"] > CHANGE_RATIO_MAX else []
    missed += ["the start with a large fleet"] if start["ratio"] > START_RATIO_MAX else []
    missed += ["memory of a waiting client"] if waited.bytes_each > WAITING_BYTES_MAX else []
    is_late = waited.last_milliseconds > WOKEN_MILLISECONDS_MAX
    missed += ["the time until all waiting clients know"] if is_late else []
    missed += [row.name for row in guest if not row.is_met]
    missed += [row.name for row in attacks if not row.is_met]
    missed += [result.name for result in compared if not result.is_met]
    if missed:
        say(f"missed: {'; '.join(missed)}")
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    is_relay_slow = relay.main(arguments.write, machine())
    return max(1 if missed else 0, is_relay_slow, measure_scale(arguments.vms, arguments.write))


def measure_scale(sizes: tuple[int, ...], written: Path | None) -> int:
    """Growth with the fleet; its section of the page, with the charts next to the page."""
    measured = scale.measure(sizes)
    print("\n".join(scale_report.tables(measured)))
    if written:
        scale_report.write(measured, written, machine())
    if missed := measured.missed():
        say(f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


def take_turns(us: Target, them: Target, rounds: int, seconds: int) -> dict[str, list[Measured]]:
    """Each round measures every subject once, ours right after the one it is compared with."""
    subjects: dict[str, Callable[[], Measured]] = {
        FILE: lambda: measure(them, "/file", seconds),
        OURS: lambda: measure(us, EVENTS, seconds),
        MEMORY: lambda: measure(them, EVENTS, seconds),
        OURS_PATH: lambda: measure(us, EVENTS, seconds, MANY),
        MEMORY_PATH: lambda: measure(them, EVENTS, seconds, MANY),
        OURS_NEW: lambda: measure(us, EVENTS, seconds, CLOSING),
        MEMORY_NEW: lambda: measure(them, EVENTS, seconds, CLOSING),
    }
    measured: dict[str, list[Measured]] = {name: [] for name in subjects}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name, subject in subjects.items():
            measured[name].append(subject())
    return measured


def table_of_rounds(rounds: dict[str, list[Measured]]) -> list[str]:
    rows = [
        [
            name,
            *(
                f"{statistics.median(column):,.{digits}f}"
                for column, digits in zip(zip(*taken, strict=True), (0, 2, 1), strict=True)
            ),
        ]
        for name, taken in rounds.items()
    ]
    return table(["", "polls/s", "p99 ms", "CPU µs per poll"], rows)


def table_of_goals(
    ratios: list[tuple[Goal, float]], change: float, start: dict[str, float]
) -> list[str]:
    rows = [
        [
            goal.name,
            f"{ratio:.2f}",
            f"{'≥' if goal.is_least else '≤'} {goal.bound:g}",
            "yes" if goal.is_met(ratio) else "NO",
        ]
        for goal, ratio in ratios
    ]
    met = "yes" if change <= CHANGE_RATIO_MAX else "NO"
    rows.append(
        [
            f"cost of a change: {VMS:,} VMs against 10",
            f"{change:.2f}",
            f"≤ {CHANGE_RATIO_MAX:g}",
            met,
        ]
    )
    met = "yes" if start["ratio"] <= START_RATIO_MAX else "NO"
    name = f"start with {start['vms']:,} VMs against reading and decoding their records"
    rows.append([name, f"{start['ratio']:.2f}", f"≤ {START_RATIO_MAX:g}", met])
    return table(["ratio", "measured", "goal", "met"], rows)


def table_of_costs(
    alone: float,
    together: float,
    change: dict[str, float],
    start: dict[str, float],
) -> list[str]:
    rows = [
        ["memory per VM on the board, scopes of one", f"{alone:,.0f} bytes"],
        ["memory per VM on the board, scopes of five", f"{together:,.0f} bytes"],
        [
            f"one change, decided, committed and published, among {VMS:,} VMs",
            f"{change['large'] * 1e6:,.0f} µs",
        ],
        [
            f"start from SQLite with {start['vms']:,} VMs in scopes of {start['vms_per_scope']:,}",
            f"{start['seconds']:,.1f} s",
        ],
    ]
    return table(["cost", ""], rows)


def table_of_waits(waited: wait.Waited) -> list[str]:
    rows = [
        [
            "memory of each",
            f"{waited.bytes_each:,.0f} bytes",
            f"≤ {WAITING_BYTES_MAX:,} bytes",
            "yes" if waited.bytes_each <= WAITING_BYTES_MAX else "NO",
        ],
        ["from the change to the first answer", f"{waited.first_milliseconds:,.0f} ms", "", ""],
        [
            "from the change to the last answer",
            f"{waited.last_milliseconds:,.0f} ms",
            f"≤ {WOKEN_MILLISECONDS_MAX} ms",
            "yes" if waited.last_milliseconds <= WOKEN_MILLISECONDS_MAX else "NO",
        ],
        [
            "the slowest poll of another VM meanwhile",
            f"{waited.poll_milliseconds:,.0f} ms",
            "",
            "",
        ],
    ]
    return table([f"{waited.clients:,} waiting clients", "measured", "goal", "met"], rows)


def table_of_guest(rows: list[agent.Row]) -> list[str]:
    cells = [
        [
            row.name,
            f"{row.value:,.2f} {row.unit}",
            f"≤ {row.most:g} {row.unit}",
            "yes" if row.is_met else "NO",
        ]
        for row in rows
    ]
    return table(["the agent inside a VM", "measured", "goal", "met"], cells)


def table_of_attacks(rows: list[attack.Row]) -> list[str]:
    cells = [
        [
            row.name,
            f"{row.p50_milliseconds:,.2f} ms",
            f"{row.p99_milliseconds:,.2f} ms",
            f"{row.ratio:,.1f}",
            f"{row.lateness_seconds:,.2f} s",
            "yes" if row.is_met else "NO",
        ]
        for row in rows
    ]
    return table(
        [
            "attack",
            "another VM's p50",
            "p99",
            "p99 against quiet",
            "an event starts late by",
            "met",
        ],
        cells,
    )


def page(report: str) -> str:
    version = subprocess.run(
        ["nginx", "-v"], check=True, capture_output=True, text=True
    ).stderr.strip()
    return PAGE.format(
        day=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=f"{machine()}, {version}",
        report=report,
        vms=VMS,
        paths=PATHS,
        ratio=attack.P99_RATIO_MAX,
        milliseconds=attack.P99_MILLISECONDS_MAX,
        lateness=attack.LATENESS_SECONDS_MAX,
        rounds=ROUNDS,
        streams=viewer.STREAMS,
        lists=len(viewer.PATHS),
        viewed=viewer.VMS,
        entries=viewer.ENTRIES,
    )


def machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python"
        f" {platform.python_version()}"
    )


PAGE = """# Benchmarks

How fast the metadata endpoint is compared with nginx, what the service and the agent cost, what an
attacker can do to others, what a host's relay adds, and how cost grows with the fleet. `make bench`
measures it. Up to the last two sections, this page was written by
`python -m tests.bench --write docs/benchmarks.md` on {day} ({machine}).

Our server and nginx take turns on one core; wrk polls from another over 64 keep-alive connections.
Each number is the median of several rounds, and each ratio is the median of the ratios within a
round. Absolute numbers depend on the machine; the ratios should not. The service knows {vms:,} VMs.
wrk calls from 127.0.0.1, which is one of them, or by path as {paths:,} different ones. nginx serves
the same document from a file and, with `return 200`, from memory. "New connection" means one
connection per poll. There wrk itself is near its limit, so compare the CPU column too: it counts
only the server.

{report}

The waiting clients have sent `Prefer: wait` for one scope, and one change answers all of them.
There are 20,000 of them, or as many as file descriptors allow. When each was a task of its own,
19,900 took 15,177 bytes each, the last answer came after 1,698 ms, and a poll of another VM
took up to 1,536 ms.

During each attack another VM polls every few milliseconds, alternating between a keep-alive and a
new connection, and a platform event of a third VM comes due. Goal: the p99 is at most {ratio:g}
times that without an attack ("quiet") or under {milliseconds:g} ms, and the event starts within
{lateness:g} s of NotBefore. A p99 of `inf` means that polls failed. The attackers share the second
core with the VM that is measured. A stranger is a client whose address is not a VM's. Strangers
replace connections that the server closes, at most 500 a second together. Strangers that reconnect
as fast as they can are not in this table: on a loaded machine they raised another VM's p99 to 150
to 250 ms.

The last table compares {rounds} rounds, in which an attack and its absence take turns. Each ratio
is the median of those within a round, and the goal is a p99 of at most {ratio:g} times that without
the attack. Without it another process is as busy as the attacker was, on the same core, and talks
to nobody. The viewer reads the whole history as {streams} streams, again and again, and {lists}
lists of {viewed:,} VMs and {entries:,} history entries. The host sends its report as fast as it
can. The attacks of a guest on the relay of its host are in the next section.
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
