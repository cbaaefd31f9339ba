"""Which daemon a host belongs to: the rules, without I/O.

A host is bound to the machine whose daemon connects first.

    FREE -> BOUND      the first request; the record names the machine and the session. A record of
                       an earlier version names no machine: the host is FREE, too
    BOUND -> BOUND     another session of the same machine replaces the last one at once: a machine
                       lets only one daemon of a host run (`hostd/daemon.py`), so the last one ended
    BOUND -> CLONED    a replaced session sends requests after it was refused, by any server: two
                       machines have one id. None of them is served, because they act on different
                       VMs
    CLONED -> BOUND    only one of these sessions has sent something for SILENT
    BOUND, CLONED -> FREE      an operator forgets the host, and says that it is fenced

Another machine is refused in every state but FREE. No rule depends on how long a daemon is silent,
so a server that is slow, or has lost its lease, cannot give a host away.
"""

from datetime import datetime, timedelta

from msgspec.structs import replace

from forewarn.engine.engine import CLOCK_SKEW_SECONDS_MAX
from forewarn.engine.managed_hosts import ManagedHost
from forewarn.errors import HostTaken
from forewarn.platform.remote import WorkRequest

SILENT = timedelta(seconds=15)
"""After its last request a daemon counts as lost. It repeats requests after WAIT at the latest."""
NOTE_EVERY = timedelta(seconds=5)
"""How often the record of a host notes that a session of a cloned machine sends requests."""
MERGE_AFTER = timedelta(seconds=5 + CLOCK_SKEW_SECONDS_MAX)
"""A daemon that replaces one in contact may be the clone of its machine, with other VMs. The other
one sends a request in this time, by the clock of any server, and then none is served.
"""
RIVALS_MAX = 8
REPLACED_MAX = 8
"""How many replaced sessions are remembered: more than two machines may have one id."""


def bind(known: ManagedHost, request: WorkRequest, now: datetime) -> ManagedHost:
    """The record after a request: it names the session of the request if that is to be served.

    HostTaken if it is the request of another machine. One of a session that was replaced may have
    come late, so it is only noted: if it was sent after that, both are alive.
    """
    if known.machine not in ("", request.machine):
        raise HostTaken(
            f"{known.host} belongs to another machine; expected the daemon of that machine, or"
            f" `forewarn host forget {known.host} --fenced` when that machine is off",
            since=known.since,
        )
    known = replace(known, machine=request.machine)
    if known.rivals:
        return _choose(known, request.session, now)
    if request.session == known.session:
        return known
    if request.session not in known.replaced:
        replaced = (known.session, *known.replaced)[:REPLACED_MAX]
        late = {each: number for each, number in known.late.items() if each in replaced}
        return replace(known, session=request.session, replaced=replaced, late=late)
    number = known.late.get(request.session)
    if number is None:
        return replace(known, late=known.late | {request.session: request.number})
    if 0 < request.number <= number:
        return known
    return replace(known, server="", rivals={known.session: now, request.session: now})


def _choose(known: ManagedHost, session: str, now: datetime) -> ManagedHost:
    """Note that a session of a cloned machine sends requests, and end that if it is the only one.

    A session that has not ended would be a rival again as soon as it sends something.
    """
    active = {each: at for each, at in known.rivals.items() if now - at < SILENT or each == session}
    others = [each for each in active if each != session]
    if not others:
        before = dict.fromkeys((*known.rivals, *known.replaced))
        replaced = tuple(each for each in before if each != session)[:REPLACED_MAX]
        return replace(known, session=session, replaced=replaced, late={}, rivals={})
    if session in active and now - active[session] < NOTE_EVERY:
        return known
    newest = dict(sorted(active.items(), key=lambda each: each[1])[-RIVALS_MAX + 1 :])
    return replace(known, rivals=newest | {session: now})


def find_refusal(known: ManagedHost, session: str) -> HostTaken | None:
    """Why no server serves this session; None if one does."""
    if known.rivals:
        return cloned(known)
    if session == known.session:
        return None
    problem = f"another run of the daemon of {known.host} has replaced this one"
    return HostTaken(problem, since=known.since)


def cloned(known: ManagedHost) -> HostTaken:
    """Why no daemon of a cloned machine is served."""
    return HostTaken(
        f"{len(known.rivals)} machines with one id run a daemon for {known.host}, and none of them"
        f" is served; stop the wrong one, or give it another id (systemd-machine-id-setup, or the"
        f" option `machine`) and another host name",
        since=known.since,
    )
