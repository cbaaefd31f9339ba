"""What servers and members of etcd cost for fleets of 3, 30 and 300 hosts with 20 VMs each.

`python -m tests.bench.layout` prints a row for each: three members and three servers on this
machine, with nobody polling. What polls cost is on the page of the benchmarks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.service import Service
from tests.etcd_cluster import EtcdCluster

HOST_VMS, SCOPE_VMS, SERVERS = 20, 5, 3
IDLE_SECONDS = 30.0
MIB = 1024 * 1024


def write_fleet(hosts: int) -> str:
    """VMs of a scope are on different hosts."""
    scopes: dict[str, list[dict[str, object]]] = {}
    for number in range(hosts * HOST_VMS):
        vm = {
            "name": f"vm-{number}",
            "address": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            "update_domain": number % SCOPE_VMS,
            "host": f"host-{number % hosts}",
        }
        scopes.setdefault(f"scope-{number // SCOPE_VMS}", []).append(vm)
    kind = {"kind": "availability-set"}
    return json.dumps(
        {"scopes": [{"name": name, **kind, "vms": vms} for name, vms in scopes.items()]}
    )


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def db_bytes(cluster: EtcdCluster) -> int:
    command = ["etcdctl", f"--endpoints={cluster.members[0].client}", "endpoint", "status"]
    found = subprocess.run([*command, "-w", "json"], check=True, capture_output=True)
    size: int = json.loads(found.stdout)[0]["Status"]["dbSize"]
    return size


def measure(hosts: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="layout-") as name:
        folder = Path(name)
        cluster = EtcdCluster(folder / "etcd", size=3)
        services: list[Service] = []
        try:
            cluster.start()
            began = time.monotonic()
            for number in range(SERVERS):
                (folder / f"s{number}").mkdir()
                service = Service(
                    folder / f"s{number}", "--store", cluster.url(), fleet=write_fleet(hosts)
                )
                services.append(service.start())
            started = time.monotonic() - began
            servers = [service.process.pid for service in services if service.process]
            members = [member.process.pid for member in cluster.members if member.process]
            before = [cpu_seconds(pid) for pid in (*servers, *members)]
            time.sleep(IDLE_SECONDS)
            after = [cpu_seconds(pid) for pid in (*servers, *members)]
            shares = [
                (end - begin) / IDLE_SECONDS * 100 for begin, end in zip(before, after, strict=True)
            ]
            return {
                "hosts": hosts,
                "vms": hosts * HOST_VMS,
                "all three started after s": round(started, 1),
                "server MiB": round(max(map(rss_bytes, servers)) / MIB),
                "member MiB": round(max(map(rss_bytes, members)) / MIB),
                "server idle % of a core": round(max(shares[:SERVERS]), 1),
                "member idle % of a core": round(max(shares[SERVERS:]), 1),
                "etcd db MiB": round(db_bytes(cluster) / MIB, 1),
            }
        finally:
            for service in services:
                service.kill()
            cluster.stop()


if __name__ == "__main__":
    for hosts in map(int, sys.argv[1:] or ("3", "30", "300")):
        print(json.dumps(measure(hosts)))
