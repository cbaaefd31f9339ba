"""The fleet of a run: sets of three VMs with different approval policies, and single VMs."""

from tests.chaos.history import Kind, Members

RATE = 60
"""15 minutes of notice take 15 seconds: longer than servers need to start events after an outage,
so that a checker can tell whether they gave notice then.
"""
NOTICE_SECONDS = {Kind.RESTART: 900 / RATE, Kind.REDEPLOY: 600 / RATE, Kind.MAINTAIN: 900 / RATE}
SERVERS = ("s0", "s1", "s2")
HOSTS = tuple(f"h{number}" for number in range(6))
APPROVALS = ("any",) * 5 + ("quorum", "all")
SETS = {
    f"set-{number}": Members(approval, tuple(f"set-{number}-{vm}" for vm in range(3)))
    for number, approval in enumerate(APPROVALS)
}
SINGLES = {f"one-{number}": Members("any", (f"one-{number}",)) for number in range(12)}
FLEET = SETS | SINGLES
VMS = tuple(vm for members in FLEET.values() for vm in members.vms)
ANNOUNCER = "announcer"
ANNOUNCED = ("one-9", "one-10", "one-11")
"""A VM of each server that this client restarts, only during faults. Its guest approves nothing."""
SCOPE_OF = {vm: scope for scope, members in FLEET.items() for vm in members.vms}


def server_of(vm: str) -> str:
    """The server whose clients operate on this VM: no two clients operate on one VM."""
    return SERVERS[VMS.index(vm) % len(SERVERS)]


def fleet_file() -> str:
    """As YAML, for `--fleet`."""
    lines = ["scopes:"]
    for scope, members in FLEET.items():
        kind = "vm" if len(members.vms) == 1 else "availability-set"
        lines += [f"  - name: {scope}", f"    kind: {kind}"]
        lines += [f"    policy: {{approval: {members.approval}}}", "    vms:"]
        for domain, vm in enumerate(members.vms):
            host = HOSTS[VMS.index(vm) % len(HOSTS)]
            lines.append(f"      - {{name: {vm}, update_domain: {domain}, host: {host}}}")
    return "\n".join(lines)
