"""Faults for as long as you like: `python -m tests.chaos --minutes 60 --seed 7 --folder out`.

Without `--minutes`, every fault once. Prints the report, and ends with 1 if a promise was broken.
Makes namespaces, then starts itself again inside of one; see `cluster.py`. Needs root, etcd, ip,
nft and libfaketime.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.chaos.checker import check
from tests.chaos.cluster import Cluster, enter, namespaces, wait_until
from tests.chaos.faults import FAULTS, make_fault
from tests.chaos.fleet import FLEET, NOTICE_SECONDS, SERVERS
from tests.chaos.history import RUN_FILE, Fault, Run, read_recording
from tests.chaos.report import render

CALM_SECONDS = (3.0, 6.0)
LONG_CALM_SECONDS = (10.0, 30.0)
DRAIN_SECONDS_MAX = 120
FINAL_SECONDS = 0.5
PROGRAM = ("-m", "tests.chaos.planted")
REPORT_FILE = "report.md"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--calm-seconds", type=float, default=0.0, help="no faults, only a load")
    parser.add_argument("--only", choices=FAULTS, action="append", help="only these faults")
    parser.add_argument("--planted", default="none", help="a fault in the code; see planted.py")
    parser.add_argument("--namespaces", default="", help="as JSON; set when started again")
    return parser.parse_args()


def main() -> int:
    chosen = parse()
    if chosen.namespaces:
        run_inside(chosen)
        return 0
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {chosen.seed}, folder {folder}", flush=True)
    with namespaces() as names:
        command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        command += ["--seed", str(chosen.seed), "--folder", str(folder.resolve())]
        command += ["--namespaces", json.dumps(names)]
        subprocess.run([*enter(names["hub"]), *command], check=True)
    recording = read_recording(folder)
    violations = check(recording)
    report = render(recording, violations)
    (folder / REPORT_FILE).write_text(report)
    print(report)
    return 1 if violations else 0


def run_inside(chosen: argparse.Namespace) -> None:
    """Start everything, make the faults, and leave the recording in the folder."""
    folder: Path = chosen.folder
    cluster = Cluster(folder, json.loads(chosen.namespaces), (*PROGRAM, chosen.planted))
    chance = random.Random(chosen.seed)
    faults: list[Fault] = []
    try:
        cluster.start()
        began_at = time.time()
        for server in cluster.servers:
            server.start_clients(chosen.seed)
        if chosen.calm_seconds:
            time.sleep(chosen.calm_seconds)
        for name in plan(chosen, chance):
            fault = make_fault(cluster, name, chance)
            faults.append(fault)
            clock = f" {fault.clock_seconds:+g} s" if fault.clock_seconds else ""
            print(f"{time.time() - began_at:6.1f} s  {name}: {fault.target}{clock}", flush=True)
            time.sleep(chance.uniform(*(LONG_CALM_SECONDS if chosen.minutes else CALM_SECONDS)))
        for server in cluster.servers:
            server.request("quiet")
        has_converged = drain(cluster)
        ended_at = time.time()
        print(f"{ended_at - began_at:6.1f} s  converged: {has_converged}", flush=True)
        cluster.servers[0].request("history")
        for server in cluster.servers:
            server.end_clients()
        run = Run(
            seed=chosen.seed,
            began_at=began_at,
            ended_at=ended_at,
            servers=SERVERS,
            notice_seconds={str(kind): seconds for kind, seconds in NOTICE_SECONDS.items()},
            fleet=FLEET,
            faults=tuple(faults),
        )
        (folder / RUN_FILE).write_bytes(msgspec.json.encode(run))
    finally:
        cluster.stop()


def plan(chosen: argparse.Namespace, chance: random.Random) -> Iterator[str]:
    """The names of the faults, until the time is over."""
    if chosen.calm_seconds:
        return
    time.sleep(CALM_SECONDS[1])
    until = time.monotonic() + chosen.minutes * 60
    names = chosen.only or list(FAULTS)
    if not chosen.minutes:
        yield from names
    while time.monotonic() < until:
        chance.shuffle(names)
        for name in names:
            if time.monotonic() < until:
                yield name


def drain(cluster: Cluster) -> bool:
    """Wait until all servers show the same documents, without events. The checker judges."""

    def is_over() -> bool:
        time.sleep(FINAL_SECONDS)
        found = [json.loads(server.request("final")) for server in cluster.servers]
        is_same = all(each == found[0] for each in found)
        return is_same and all(number and not events for number, events in found[0].values())

    try:
        wait_until(is_over, "convergence", DRAIN_SECONDS_MAX)
    except TimeoutError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
