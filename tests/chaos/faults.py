"""The faults, each from its beginning to its end.

A seed decides the targets, the order and the pauses, so that a run can be repeated.
"""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from forewarn.engine.lease import TTL_SECONDS
from tests.chaos.cluster import IMPACT_SECONDS, Cluster, Server, wait_until
from tests.chaos.history import Fault, Kind

LONGER_THAN_A_LEASE = TTL_SECONDS + 2
STORE_DOWN_SECONDS = 30
QUORUM_LOST = "quorum of etcd lost"
QUORUM_LOST_SECONDS = 25
QUORUM_TRIES_MAX = 3
SHOWN_SECONDS = 1.0
"""After this time, what was announced is in the documents."""
CLOCK_SECONDS = (30.0, -30.0)
CLOCK_WRONG_SECONDS = 15
RECOVERY_SECONDS_MAX = 180
IMPACT_SECONDS_MAX = 60


class Hit(NamedTuple):
    """What a fault hit, by how much its clock was wrong, and when it ended if that is not now."""

    target: str
    clock_seconds: float = 0.0
    ended_at: float = 0.0


def kill_leader(cluster: Cluster, chance: random.Random) -> Hit:
    """kill -9 of the etcd leader; it comes back after another one leads."""
    member = cluster.etcd.members[cluster.find_leader()]
    member.kill()
    time.sleep(chance.uniform(3, 5))
    cluster.etcd.launch(member)
    return Hit(member.name)


def kill_server(cluster: Cluster, chance: random.Random) -> Hit:
    """kill -9 of a server in the middle of an impact, which ends with it."""
    names: list[str] = []

    def has_just_begun() -> bool:
        recent = time.time() - IMPACT_SECONDS / 2
        names[:] = [impact.server for impact in cluster.running_impacts() if impact.at > recent]
        return bool(names)

    wait_until(has_just_begun, "an impact", IMPACT_SECONDS_MAX)
    server = next(server for server in cluster.servers if server.name == names[-1])
    server.kill()
    time.sleep(chance.uniform(0, 2))
    restart(server)
    return Hit(server.name)


def stop_member(cluster: Cluster, chance: random.Random) -> Hit:
    """SIGSTOP of an etcd member for longer than a lease."""
    member = chance.choice(cluster.etcd.members)
    member.signal(signal.SIGSTOP)
    try:
        time.sleep(LONGER_THAN_A_LEASE)
    finally:
        member.signal(signal.SIGCONT)
    return Hit(member.name)


def stop_server(cluster: Cluster, chance: random.Random) -> Hit:
    """SIGSTOP of a server for longer than its lease."""
    server = chance.choice(cluster.servers)
    server.signal(signal.SIGSTOP)
    try:
        time.sleep(LONGER_THAN_A_LEASE)
    finally:
        server.signal(signal.SIGCONT)
    return Hit(server.name)


def stop_servers(cluster: Cluster, chance: random.Random) -> Hit:
    """SIGSTOP of all servers for longer than their leases: no guest can read anything.

    Events that were announced just before are due when the servers continue.
    """
    for server in cluster.servers:
        server.signal(signal.SIGSTOP)
    try:
        time.sleep(LONGER_THAN_A_LEASE)
    finally:
        for server in cluster.servers:
            server.signal(signal.SIGCONT)
    return Hit("all servers")


def cut_network(cluster: Cluster, chance: random.Random) -> Hit:
    """No packet between one server and etcd for longer than a lease."""
    server = chance.choice(cluster.servers)
    server.cut()
    try:
        time.sleep(LONGER_THAN_A_LEASE)
    finally:
        server.mend()
    return Hit(server.name)


def stop_store(cluster: Cluster, chance: random.Random) -> Hit:
    """All of etcd is down for 30 s."""
    for member in cluster.etcd.members:
        member.kill()
    time.sleep(STORE_DOWN_SECONDS)
    for member in cluster.etcd.members:
        cluster.etcd.launch(member)
    return Hit("etcd")


def lose_quorum(cluster: Cluster, chance: random.Random) -> Hit:
    """SIGSTOP of all followers: the leader has announcements in its log, and commits them later.

    Again, if it has committed none: a write that was in its log before them, and that each of them
    compares, makes all of them void.
    """
    known = count_late(cluster)
    for _ in range(QUORUM_TRIES_MAX):
        stop_followers(cluster)
        ended_at = time.time()
        wait_until(cluster.has_recovered, "recovery of the quorum", RECOVERY_SECONDS_MAX)
        if count_late(cluster) > known:
            break
    return Hit("followers", ended_at=ended_at)


def stop_followers(cluster: Cluster) -> None:
    """Evictions and deletions are announced on each server just before, so that guests can read
    them from memory only, and again meanwhile, with a restart.

    A follower alone has no quorum with the leader unless it accepts the leader's log, so the first
    one continues before the others: together, they could overrule the leader.
    """
    leader = cluster.let_busiest_lead()
    followers = [member for member in cluster.etcd.members if member is not leader]
    announce(cluster, Kind.EVICT, Kind.DELETE)
    time.sleep(SHOWN_SECONDS)
    for member in followers:
        member.signal(signal.SIGSTOP)
    try:
        announce(cluster, Kind.RESTART, Kind.EVICT, Kind.DELETE)
        time.sleep(QUORUM_LOST_SECONDS)
    finally:
        followers[0].signal(signal.SIGCONT)
        wait_until(leader.is_healthy, "an election", RECOVERY_SECONDS_MAX)
        for member in followers[1:]:
            member.signal(signal.SIGCONT)


def announce(cluster: Cluster, *kinds: Kind) -> None:
    """One operation of each kind on each server; does not wait for the responses."""
    for server in cluster.servers:
        server.request(" ".join(("announce", *kinds)))


def count_late(cluster: Cluster) -> int:
    """How many announcements were committed that the operator believes to have failed."""
    return sum(int(server.request("late")) for server in cluster.servers)


def restart_all(cluster: Cluster, chance: random.Random) -> Hit:
    """kill -9 of everything, and a start in any order."""
    for server in cluster.servers:
        server.kill()
    for member in cluster.etcd.members:
        member.kill()
    starts: list[Callable[[], None]] = [server.launch for server in cluster.servers]
    starts += [partial(cluster.etcd.launch, member) for member in cluster.etcd.members]
    chance.shuffle(starts)
    for start in starts:
        start()
    for server in cluster.servers:
        server.wait_until_up()
    return Hit("everything")


def skew_clock(cluster: Cluster, chance: random.Random) -> Hit:
    """A server runs with a clock that is 30 s off, until an operator repairs it."""
    server, seconds = chance.choice(cluster.servers), chance.choice(CLOCK_SECONDS)
    server.kill()
    server.fake_clock(seconds)
    restart(server)
    time.sleep(CLOCK_WRONG_SECONDS)
    server.kill()
    server.environ = {}
    restart(server)
    return Hit(server.name, seconds)


FAULTS: dict[str, Callable[[Cluster, random.Random], Hit]] = {
    "etcd leader killed": kill_leader,
    "server killed during an impact": kill_server,
    "clock 30 s off": skew_clock,
    "etcd member stopped": stop_member,
    "server stopped": stop_server,
    "all servers stopped": stop_servers,
    "server cut off from etcd": cut_network,
    "all of etcd down": stop_store,
    QUORUM_LOST: lose_quorum,
    "everything restarted": restart_all,
}


def restart(server: Server) -> None:
    server.launch()
    server.wait_until_up()


def make_fault(cluster: Cluster, name: str, chance: random.Random) -> Fault:
    """Make a fault and wait until all servers report that they are ready."""
    began_at = time.time()
    hit = FAULTS[name](cluster, chance)
    ended_at = hit.ended_at or time.time()
    wait_until(cluster.has_recovered, f"recovery after: {name}", RECOVERY_SECONDS_MAX)
    return Fault(name, hit.target, began_at, ended_at, time.time(), hit.clock_seconds)
