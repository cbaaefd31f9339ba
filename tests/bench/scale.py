"""Growth with the fleet, on SQLite and on etcd: `python -m tests.bench scale`.

For each store and size: a fleet is applied, then two real servers start on the store, one after the
other. Changes are made on the first and looked for on the second. Servers, store and clients share
the cores of the machine.
"""

import http.client
import json
import os
import random
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench import shared_port
from tests.bench.fill import VMS_PER_SCOPE, vm_name
from tests.bench.load import QUERY
from tests.e2e.service import call
from tests.etcd_cluster import EtcdCluster

SIZES = (10_000, 100_000, 1_000_000)
STORES = ("SQLite", "etcd")
CHANGES = 200
OPERATIONS = 1000
CLIENTS = 32
"""How many connections the burst of operations uses."""
POLL_PAUSE_SECONDS = 0.001
PAUSE_SECONDS_MAX = 0.1
"""Changes come at random times: SQLite looks every 100 ms for commits of another process."""
START_SECONDS_MAX, SEEN_SECONDS_MAX, FILL_SECONDS_MAX = 300.0, 30.0, 900.0
SEEN_MILLISECONDS_MAX = 50.0
"""The goal for the p99 on etcd."""
READY = re.compile(r"metadata http://(\S+?), control http://(\S+)")
ETCD_SIZE = re.compile(rb"^etcd_mvcc_db_total_size_in_bytes (\S+)$", re.MULTILINE)


class Row(NamedTuple):
    """What one size on one store took."""

    store: str
    vms: int
    apply_seconds: float
    store_bytes: float
    start_seconds: float
    server_bytes: float
    bytes_per_vm: float
    p50_milliseconds: float
    p99_milliseconds: float
    burst_seconds: float
    commits_per_second: float


class Scale(NamedTuple):
    """`load_before`: the load average of other programs, which disturb what is measured."""

    load_before: float
    rows: list[Row]
    shared: list[shared_port.Row]

    def missed(self) -> list[str]:
        late = [
            f"a change seen on another server, {row.vms:,} VMs on etcd"
            for row in self.rows
            if row.store == "etcd" and row.p99_milliseconds > SEEN_MILLISECONDS_MAX
        ]
        shared = [f"two servers, {row.name}" for row in self.shared if not row.is_met]
        return [*late, *shared]


class Place(NamedTuple):
    """A store: its URL, and how large it is."""

    url: str
    size_bytes: Callable[[], float]


class Server:
    """A `forewarn serve` on a store that has its fleet already."""

    def __init__(self, url: str) -> None:
        flags = ["--store", url, "--identify", "path", "--log-level", "error"]
        addresses = ["--metadata", "127.0.0.1:0", "--control", "127.0.0.1:0"]
        command = [sys.executable, "-m", "forewarn", "serve", *flags, *addresses]
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        is_ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS_MAX)
        match = READY.search(self.process.stdout.readline() if is_ready else "")
        self.start_seconds = time.perf_counter() - began
        if not match:
            self.process.kill()
            raise RuntimeError(f"no server after {self.start_seconds:.0f} s")
        self.metadata, self.control = match.groups()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Client:
    """A keep-alive connection to one listener."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=SEEN_SECONDS_MAX)

    def poll(self, vm: str) -> bytes:
        self._connection.request(
            "GET", f"/as/{vm}/metadata/scheduledevents?{QUERY}", headers={"Metadata": "true"}
        )
        return self.receive()

    def send(self, path: str) -> None:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/api/v1{path}", b"{}", headers)

    def receive(self) -> bytes:
        response = self._connection.getresponse()
        body = response.read()
        if response.status not in (200, 202):
            raise RuntimeError(f"{response.status} {body!r}")
        return body

    def operate(self, path: str) -> dict[str, Any]:
        self.send(path)
        result: dict[str, Any] = json.loads(self.receive())
        return result

    def close(self) -> None:
        self._connection.close()


def measure(sizes: tuple[int, ...]) -> Scale:
    load_before, rows = os.getloadavg()[0], []
    for store in STORES:
        with empty_store(store) as place, serving(place.url, 1) as (server,):
            base = server.resident_bytes()
        for vms in sizes:
            print(f"{vms:,} VMs on {store}", file=sys.stderr, flush=True)
            with empty_store(store) as place:
                rows.append(measure_fleet(store, place, vms, base))
    print("two servers that share a port", file=sys.stderr, flush=True)
    return Scale(load_before, rows, shared_port.measure())


def measure_fleet(store: str, place: Place, vms: int, base: int) -> Row:
    filled = fill(place.url, vms)
    size = place.size_bytes()
    with serving(place.url, 2) as (one, other):
        resident = statistics.mean(server.resident_bytes() for server in (one, other))
        poll_scopes(one)
        delays = sorted(seen_seconds(one, other, vms))
        burst = burst_seconds(one)
        return Row(
            store=store,
            vms=vms,
            apply_seconds=filled["apply_seconds"],
            store_bytes=size,
            start_seconds=statistics.mean((one.start_seconds, other.start_seconds)),
            server_bytes=resident,
            bytes_per_vm=(resident - base) / vms,
            p50_milliseconds=statistics.median(delays) * 1000,
            p99_milliseconds=delays[len(delays) * 99 // 100] * 1000,
            burst_seconds=burst,
            commits_per_second=filled["commits_per_second"],
        )


@contextmanager
def empty_store(store: str) -> Iterator[Place]:
    """A new store on disk: an SQLite file, or an etcd of one member."""
    with tempfile.TemporaryDirectory(prefix="forewarn-scale-") as folder:
        file = Path(folder, "forewarn.db")
        if store == "SQLite":
            yield Place(f"sqlite:///{file}", lambda: file.stat().st_size)
            return
        cluster = EtcdCluster(Path(folder))
        try:
            cluster.start()
            yield Place(cluster.url(), lambda: etcd_bytes(cluster))
        finally:
            cluster.stop()


def etcd_bytes(cluster: EtcdCluster) -> float:
    _, metrics = call("GET", f"{cluster.members[0].health_url}/metrics", headers={})
    (size,) = ETCD_SIZE.findall(metrics)
    return float(size)


@contextmanager
def serving(url: str, servers: int) -> Iterator[list[Server]]:
    running: list[Server] = []
    try:
        for _ in range(servers):
            running.append(Server(url))
        yield running
    finally:
        for server in running:
            server.stop()


def fill(url: str, vms: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.fill", url, str(vms)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=FILL_SECONDS_MAX
    )
    output: dict[str, float] = json.loads(done.stdout)
    return output


def first_vm(scope: int) -> str:
    return vm_name(scope * VMS_PER_SCOPE)


def poll_scopes(server: Server) -> None:
    """A restart makes an event only in a scope that is polled."""
    client = Client(server.metadata)
    for scope in range(OPERATIONS):
        client.poll(first_vm(scope))
    client.close()


def seen_seconds(one: Server, other: Server, vms: int) -> Iterator[float]:
    """From a request to the first server until a poll on the other shows the change."""
    operator, guest = Client(one.control), Client(other.metadata)
    rng = random.Random(vms)
    for scope in rng.sample(range(OPERATIONS), CHANGES // 2):
        vm, event = first_vm(scope), ""
        for _ in ("restart", "cancel"):
            before = guest.poll(vm)
            time.sleep(rng.uniform(0, PAUSE_SECONDS_MAX))
            began = time.perf_counter()
            operator.send(f"/events/{event}/cancel" if event else f"/vms/{vm}/restart")
            while guest.poll(vm) == before:
                if time.perf_counter() - began > SEEN_SECONDS_MAX:
                    raise RuntimeError(f"{vm}: the change was not seen")
                time.sleep(POLL_PAUSE_SECONDS)
            yield time.perf_counter() - began
            event = json.loads(operator.receive())["event"]["id"]
    operator.close()
    guest.close()


def burst_seconds(server: Server) -> float:
    """Until every restart of a VM in another scope has been acknowledged."""

    def restart(client: Client, scopes: range) -> None:
        for scope in scopes:
            if client.operate(f"/vms/{first_vm(scope)}/restart")["event"] is None:
                raise RuntimeError("a restart made no event")
        client.close()

    clients = [Client(server.control) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        began = time.perf_counter()
        working = [
            pool.submit(restart, client, range(number, OPERATIONS, CLIENTS))
            for number, client in enumerate(clients)
        ]
        for work in working:
            work.result()
        return time.perf_counter() - began
