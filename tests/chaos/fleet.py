"""The fleet of a run: sets of three VMs with different approval policies, single VMs, and sets that
VMs are evicted and deleted from.
"""

from tests.chaos.history import Kind, Members

RATE = 60
"""15 minutes of notice take 15 seconds: longer than servers need to start events after an outage,
so that a checker can tell whether they gave notice then.
"""
TERMINATE_NOTICE = "15m"
"""The longest that a scope may have."""
NOTICE_SECONDS = {
    Kind.RESTART: 900 / RATE,
    Kind.REDEPLOY: 600 / RATE,
    Kind.MAINTAIN: 900 / RATE,
    Kind.EVICT: 30.0,
    Kind.DELETE: 900 / RATE,
}
"""A Preempt has its real notice: see `planted.py`. Servers add an Age 12 seconds after the store is
lost, so with a shorter notice the checker could not tell whether they counted the time after that.
"""
SERVERS = ("s0", "s1", "s2")
HOSTS = tuple(f"h{number}" for number in range(6))
UPDATE_DOMAINS = 3
APPROVALS = ("any",) * 5 + ("quorum", "all")
SETS = {
    f"set-{number}": Members(approval, tuple(f"set-{number}-{vm}" for vm in range(3)))
    for number, approval in enumerate(APPROVALS)
}
SINGLES = {f"one-{number}": Members("any", (f"one-{number}",)) for number in range(12)}
VMS = tuple(vm for members in (SETS | SINGLES).values() for vm in members.vms)
"""What operators work on."""
ANNOUNCER = "announcer"
ANNOUNCED = ("one-9", "one-10", "one-11")
"""A VM of each server that this client restarts, only during faults. Its guest approves nothing."""
SPARES = 100
"""How many VMs of a set can be evicted or deleted. An hour of faults takes about 30."""


def sets_with_spares(kind: Kind) -> dict[str, Members]:
    """A set for each server, whose announcer takes one spare after the other. The first VM stays,
    and polls.
    """
    names = (f"{kind}-{server}" for server in SERVERS)
    return {
        name: Members("any", tuple(f"{name}-{number}" for number in range(1 + SPARES)))
        for name in names
    }


FLEET = SETS | SINGLES | sets_with_spares(Kind.EVICT) | sets_with_spares(Kind.DELETE)
SCOPE_OF = {vm: scope for scope, members in FLEET.items() for vm in members.vms}


def spares_of(server: str, kind: Kind) -> tuple[str, ...]:
    """The VMs that the announcer of a server evicts, or deletes."""
    return FLEET[f"{kind}-{server}"].vms[1:]


def server_of(vm: str) -> str:
    """The server whose clients operate on this VM: no two clients operate on one VM."""
    return SERVERS[VMS.index(vm) % len(SERVERS)]


def host_of(vm: str) -> str:
    """Spares are on a host of their own: no maintenance is of all of them."""
    return HOSTS[VMS.index(vm) % len(HOSTS)] if vm in VMS else "spares"


def fleet_file() -> str:
    """As YAML, for `--fleet`."""
    lines = ["scopes:"]
    for scope, members in FLEET.items():
        kind = "vm" if len(members.vms) == 1 else "availability-set"
        lines += [f"  - name: {scope}", f"    kind: {kind}"]
        policy = f"{{approval: {members.approval}, terminate_notice: {TERMINATE_NOTICE}}}"
        lines += [f"    policy: {policy}", "    vms:"]
        for number, vm in enumerate(members.vms):
            domain = number % UPDATE_DOMAINS
            lines.append(f"      - {{name: {vm}, update_domain: {domain}, host: {host_of(vm)}}}")
    return "\n".join(lines)
