"""What `scale` measured, as tables and charts in a section of docs/benchmarks.md."""

import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.bench import shared_port
from tests.bench.chart import draw
from tests.bench.fill import COMMITTERS, VMS_PER_HOST, VMS_PER_SCOPE
from tests.bench.load import CONNECTIONS
from tests.bench.scale import (
    CHANGES,
    CLIENTS,
    OPERATIONS,
    SEEN_MILLISECONDS_MAX,
    Row,
    Scale,
)
from tests.bench.table import table

HEADING = "## Growth with the fleet"


class Chart(NamedTuple):
    """A chart with one line for each store and each of `columns`."""

    name: str
    title: str
    unit: str
    columns: dict[str, Callable[[Row], float]]

    def draw(self, rows: list[Row]) -> str:
        lines = {
            f"{store}{label}": [(row.vms, value(row)) for row in rows if row.store == store]
            for store in dict.fromkeys(row.store for row in rows)
            for label, value in self.columns.items()
        }
        return draw(self.title, "VMs", self.unit, lines)


CHARTS = [
    Chart(
        "start",
        "Applying a fleet, and starting a server with it",
        "seconds",
        {
            ", apply": lambda row: row.apply_seconds,
            ", start": lambda row: row.start_seconds,
        },
    ),
    Chart(
        "memory",
        "Resident memory of a server",
        "MB",
        {"": lambda row: row.server_bytes / 1e6},
    ),
    Chart(
        "change",
        "From a change to a poll on another server that shows it",
        "milliseconds",
        {
            ", p50": lambda row: row.p50_milliseconds,
            ", p99": lambda row: row.p99_milliseconds,
        },
    ),
    Chart(
        "writes",
        "Commits, and operations over HTTP",
        "per second",
        {
            ", commits": lambda row: row.commits_per_second,
            ", operations": lambda row: OPERATIONS / row.burst_seconds,
        },
    ),
]


def tables(measured: Scale) -> list[str]:
    return [
        *table_of_rows(measured.rows),
        "",
        *table_of_shared(measured.shared),
        "",
        *table_of_goals(measured),
    ]


def table_of_rows(rows: list[Row]) -> list[str]:
    head = [
        "VMs",
        "apply",
        "store",
        "start",
        "memory per VM",
        "seen, p50",
        "seen, p99",
        f"{OPERATIONS:,} operations",
        "commits/s",
    ]
    cells = [
        [
            f"{row.vms:,} on {row.store}",
            f"{row.apply_seconds:,.1f} s",
            f"{row.store_bytes / 1e6:,.0f} MB",
            f"{row.start_seconds:,.1f} s",
            f"{row.bytes_per_vm:,.0f} bytes",
            f"{row.p50_milliseconds:,.1f} ms",
            f"{row.p99_milliseconds:,.1f} ms",
            f"{row.burst_seconds:,.2f} s",
            f"{row.commits_per_second:,.0f}",
        ]
        for row in rows
    ]
    return table(head, cells)


def table_of_goals(measured: Scale) -> list[str]:
    cells = [
        [
            f"a change is seen on another server, p99, {row.vms:,} VMs on etcd",
            f"{row.p99_milliseconds:,.1f} ms",
            f"≤ {SEEN_MILLISECONDS_MAX:g} ms",
            "yes" if row.p99_milliseconds <= SEEN_MILLISECONDS_MAX else "NO",
        ]
        for row in measured.rows
        if row.store == "etcd"
    ]
    for shared in measured.shared:
        name = f"two servers that share a port against one, {shared.name}"
        goal, met = f"≥ {shared_port.RATIO_MIN:g}", "yes" if shared.is_met else "NO"
        if shared.name == shared_port.POLLS:
            cells.append([f"{name} per CPU time", f"{shared.cpu_ratio:.2f}", goal, met])
        else:
            cells.append([f"{name} per second", f"{shared.ratio:.2f}", goal, met])
    return table(["several servers", "measured", "goal", "met"], cells)


def table_of_shared(rows: list[shared_port.Row]) -> list[str]:
    cells = [
        [
            row.name,
            f"{row.one:,.0f}/s",
            f"{row.two:,.0f}/s",
            f"{row.ratio:.2f}",
            f"{row.cpu_ratio:.2f}",
        ]
        for row in rows
    ]
    head = ["two servers that share a port", "one", "two", "ratio", "ratio per CPU time"]
    return table(head, cells)


def write(measured: Scale, page: Path, machine: str) -> None:
    """Replace the section at the end of the page, and the charts next to it."""
    images = []
    for chart in CHARTS:
        file = page.with_name(f"{page.stem}-scale-{chart.name}.svg")
        file.write_text(chart.draw(measured.rows))
        images.append(f"![{chart.title}]({file.name})")
    version = subprocess.run(["etcd", "--version"], check=True, capture_output=True, text=True)
    section = SECTION.format(
        day=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=f"{machine}, {version.stdout.splitlines()[0].replace(' Version:', '')}",
        load=f"{measured.load_before:.1f}",
        tables="\n".join(tables(measured)),
        charts="\n\n".join(images),
        vms_per_scope=VMS_PER_SCOPE,
        vms_per_host=VMS_PER_HOST,
        changes=CHANGES,
        operations=OPERATIONS,
        clients=CLIENTS,
        committers=COMMITTERS,
        connections=CONNECTIONS,
    )
    before = page.read_text().partition(HEADING)[0].rstrip()
    page.write_text(f"{before}\n\n{HEADING}\n\n{section}")


SECTION = """\
What 10,000 to 1,000,000 VMs cost, on SQLite and on etcd. This section and its charts were
written by `python -m tests.bench scale --write docs/benchmarks.md` on {day}
({machine}, load average {load} before the run).

{tables}

The fleet has {vms_per_scope} VMs in a scope and {vms_per_host} on a host. The store is an SQLite
file, or an etcd of one member with its default quota of 2 GiB; both sync every commit to the disk.
Two real servers use it. They, etcd and the clients share the cores of one machine.

- **apply**: the whole fleet as new, in commits of at most 500 VMs.
- **store**: the size of the file or of etcd's database after that, with history.
- **start**: from the start of the process `forewarn serve` until it is ready.
- **memory per VM**: resident memory of a server, minus that of a server without a fleet.
- **seen**: from the request to one server until a poll on the other server shows the change, for
  {changes} restarts and cancellations at random times. SQLite looks for commits of other processes
  every 100 ms.
- **{operations:,} operations**: restarts of VMs in different scopes, sent to one server over
  {clients} connections, until all have been acknowledged.
- **commits/s**: by the engine, without HTTP, {committers} at a time, each for another scope.

Two servers that share a port (`--reuse-port`) take turns with one. wrk has {connections}
connections and uses the same two cores. For a poll it takes nearly as much CPU time as the server,
so two cores cannot show what two servers can answer. The goal is checked with their CPU time
instead: how many polls both answer if each has a core to itself. A request for instance metadata
takes much more CPU time in the server than in wrk, so there the goal is checked with requests per
second.

{charts}
"""
