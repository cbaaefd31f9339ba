"""The faults, each from its beginning to its end.

A seed decides the targets, the order and the pauses, so that a run can be repeated.
"""

import random
import signal
import time
from collections.abc import Callable

from forewarn.engine.lease import TTL_SECONDS
from tests.chaos.cluster import Cluster, Server, wait_until
from tests.chaos.history import Fault

LONGER_THAN_A_LEASE = TTL_SECONDS + 2
STORE_DOWN_SECONDS = 30
RECOVERY_SECONDS_MAX = 60
IMPACT_SECONDS_MAX = 60


def kill_leader(cluster: Cluster, chance: random.Random) -> str:
    """kill -9 of the etcd leader; it comes back after another one leads."""
    member = cluster.etcd.members[cluster.find_leader()]
    member.kill()
    time.sleep(chance.uniform(3, 5))
    cluster.etcd.launch(member)
    return member.name


def kill_server(cluster: Cluster, chance: random.Random) -> str:
    """kill -9 of a server in the middle of an impact, which ends with it."""
    wait_until(lambda: bool(cluster.running_impacts()), "an impact", IMPACT_SECONDS_MAX)
    server = by_name(cluster, cluster.running_impacts()[-1].server)
    server.kill()
    time.sleep(chance.uniform(0, 2))
    server.launch()
    server.wait_until_up()
    return server.name


def stop_member(cluster: Cluster, chance: random.Random) -> str:
    """SIGSTOP of an etcd member for longer than a lease."""
    member = chance.choice(cluster.etcd.members)
    member.signal(signal.SIGSTOP)
    try:
        time.sleep(LONGER_THAN_A_LEASE)
    finally:
        member.signal(signal.SIGCONT)
    return member.name


def stop_server(cluster: Cluster, chance: random.Random) -> str:
    """SIGSTOP of a server for longer than its lease."""
    server = chance.choice(cluster.servers)
    server.signal(signal.SIGSTOP)
    try:
        time.sleep(LONGER_THAN_A_LEASE)
    finally:
        server.signal(signal.SIGCONT)
    return server.name


def cut_network(cluster: Cluster, chance: random.Random) -> str:
    """No packet between one server and etcd for longer than a lease."""
    server = chance.choice(cluster.servers)
    server.cut()
    try:
        time.sleep(LONGER_THAN_A_LEASE)
    finally:
        server.mend()
    return server.name


def stop_store(cluster: Cluster, chance: random.Random) -> str:
    """All of etcd is down for 30 s."""
    for member in cluster.etcd.members:
        member.kill()
    time.sleep(STORE_DOWN_SECONDS)
    for member in cluster.etcd.members:
        cluster.etcd.launch(member)
    return "etcd"


def restart_all(cluster: Cluster, chance: random.Random) -> str:
    """kill -9 of everything, and a start in any order."""
    for server in cluster.servers:
        server.kill()
    for member in cluster.etcd.members:
        member.kill()
    starts: list[Callable[[], None]] = [server.launch for server in cluster.servers]
    for member in cluster.etcd.members:
        starts.append(lambda member=member: cluster.etcd.launch(member))  # type: ignore[misc]
    chance.shuffle(starts)
    for start in starts:
        start()
    for server in cluster.servers:
        server.wait_until_up()
    return "everything"


FAULTS: dict[str, Callable[[Cluster, random.Random], str]] = {
    "etcd leader killed": kill_leader,
    "server killed during an impact": kill_server,
    "etcd member stopped": stop_member,
    "server stopped": stop_server,
    "server cut off from etcd": cut_network,
    "all of etcd down": stop_store,
    "everything restarted": restart_all,
}


def by_name(cluster: Cluster, name: str) -> Server:
    return next(server for server in cluster.servers if server.name == name)


def make_fault(cluster: Cluster, name: str, chance: random.Random) -> Fault:
    """Make a fault and wait until all servers report that they are ready."""
    began_at = time.time()
    target = FAULTS[name](cluster, chance)
    ended_at = time.time()
    cluster.etcd.wait_until_healthy()
    wait_until(cluster.are_all_ready, f"recovery after: {name}", RECOVERY_SECONDS_MAX)
    return Fault(name, target, began_at, ended_at, time.time())
