"""What every server knows of the hosts that run a daemon: who serves them, and their VMs.

A host is *managed* while it has a record with a session. Its daemon is in contact while the record
names a server and that server has its lease. So a lost server is noticed without a write. A host is
unreachable if its daemon is not in contact, or says that it cannot act. The record of a host that
was forgotten stays, without a session; `host_removal.py` says what it has.
"""

from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

import msgspec

from forewarn.core.event import Gap, Impact, ImpactState, Time, is_move
from forewarn.core.fleet import Scope, Vm
from forewarn.engine.engine import Engine
from forewarn.engine.lease import lease_key
from forewarn.engine.record import RecordCodec
from forewarn.engine.transaction import Transaction
from forewarn.errors import Refused
from forewarn.platform.remote import UnservedBridge

HOST_KEY = "hostd/{}/"


class HostedVm(NamedTuple):
    """A VM as its host has reported it.

    One that is off may have run, here or elsewhere, until `running_at`. Since `double_since`,
    another host reports it as running, too; `is_double` says that a later report has confirmed it.
    `is_claim`: another host has it, and the token of this one does not cover its scope.
    `unmovable` is why it cannot run on another host.
    """

    memory_bytes: int
    is_running: bool
    is_claim: bool = False
    unmovable: str = ""
    running_at: Time | None = None
    double_since: Time | None = None
    is_double: bool = False

    def after(self, old: "HostedVm | None", now: datetime) -> "HostedVm":
        """This report, with what is known from the last one."""
        if self.is_running or old is None:
            return self
        return self._replace(running_at=now if old.is_running else old.running_at)

    def after_absence(self, now: datetime) -> "HostedVm":
        """What is known when its host is back: an operator may have started it elsewhere since."""
        is_seen = not self.is_running and self.running_at is not None
        return self._replace(running_at=now) if is_seen else self


class ManagedHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`session` is one run of its daemon, `server` the worker that serves it; empty if none does.

    `since` is when that began. `vms` are by id, as the daemon reported them last. `number` is that
    of the request that changed the record last. `machine` is what the host belongs to, `replaced`
    the sessions before this one, the last one first, and `late` those of them that have sent a
    request since, with its number. `rivals` are sessions of machines with one id, and when each has
    sent something; while there are any, no server serves the host. Reports of a session that has
    replaced one which had not ended count from `merge_at`. `problem` is why the daemon cannot act
    on its VMs at present, `unserved` are the bridges whose guests it cannot serve. `not_accepted`
    has a line for each VM that does not fit into the fleet, `refused` the ids of those that run,
    and `taken_addresses` a line for each VM whose address another one has. `away_since` is the time
    of its last request, while no server has contact; `gaps` are recent times without contact: see
    `host_contact.py`. Its guests ask and get no answer of any server since `unconfirmed_since`,
    which stays if it is away then. Unless it `relays`, they ask the servers. `unreported_since` is
    set from when the host is unreachable until its next report, and `reported_at`, when its last
    one was taken: since then, VMs may have been moved to it.
    """

    host: str
    session: str
    server: str
    since: Time
    memory_bytes: int = 0
    vms: dict[str, HostedVm] = {}
    number: int = 0
    machine: str = ""
    replaced: tuple[str, ...] = ()
    late: dict[str, int] = {}
    rivals: dict[str, Time] = {}
    merge_at: Time | None = None
    problem: str = ""
    unserved: tuple[UnservedBridge, ...] = ()
    not_accepted: tuple[str, ...] = ()
    taken_addresses: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    away_since: Time | None = None
    gaps: tuple[Gap, ...] = ()
    unconfirmed_since: Time | None = None
    unreported_since: Time | None = None
    reported_at: Time | None = None
    relays: bool = True

    @property
    def last_contact_at(self) -> datetime:
        """When its daemon sent its last request, while no server has contact."""
        return self.away_since or self.since


MANAGED_HOST = RecordCodec("host", ManagedHost)


def unless_forgotten(record: ManagedHost | None) -> ManagedHost | None:
    return record if record is not None and record.session else None


def unless_fenced(record: ManagedHost | None) -> ManagedHost | None:
    """The record of a host on which VMs may run: it is managed, or was left running."""
    is_left = record is not None and record.unreported_since is not None
    return record if is_left else unless_forgotten(record)


def is_left_running(record: ManagedHost | None) -> bool:
    """Whether a host was forgotten, and VMs may run there."""
    return unless_forgotten(record) is None and unless_fenced(record) is not None


def refuse_left_running(host: str, transaction: Transaction) -> None:
    """Refuse to start VMs that may run where the daemon was forgotten. The commit compares that."""
    if is_left_running(transaction.get(HOST_KEY.format(host))):
        raise Refused(
            f"VMs may run on {host}, which was forgotten and left running; expected"
            f" `forewarn host forget {host} --fenced` first, when they are off",
            host=host,
        )


def is_served(record: ManagedHost, get: Callable[[str], object | None]) -> bool:
    """Whether the server of the record is alive, by the leases that `get` reads.

    A commit has to read them from its transaction: a server whose watch is late may not know the
    lease of one that has just started.
    """
    return bool(record.server) and get(lease_key(record.server)) is not None


class ManagedHosts:
    """All records of hosts. Create it before the engine loads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reported_by: dict[str, tuple[str, ...]] = {}
        self._served_by: defaultdict[str, set[str]] = defaultdict(set)  # hosts by server
        self._free_bytes: dict[str, int] = {}  # by host, without what its running VMs use
        self._unable: set[str] = set()  # hosts that no server can act on, also if one serves them
        self._unreported: set[str] = set()
        self._refused_by: defaultdict[str, set[str]] = defaultdict(set)  # hosts by the id of a VM
        engine.register("hostd", MANAGED_HOST)
        engine.on_change("hostd", self._on_change)

    def _on_change(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        """Keep the indexes, and show the host even if it has no VMs."""
        host = (after or before).host  # type: ignore[union-attr]
        is_unreported = after is not None and after.unreported_since is not None
        (self._unreported.add if is_unreported else self._unreported.discard)(host)
        shown = [(host,) if unless_fenced(each) else () for each in (before, after)]
        self._engine.board.declare_hosts(*shown)
        before, after = unless_forgotten(before), unless_forgotten(after)
        if before is not None:
            del self._free_bytes[host]
            self._served_by[before.server].discard(host)
            if not self._served_by[before.server]:
                del self._served_by[before.server]
        if after is not None:
            self._served_by[after.server].add(host)
            used = sum(vm.memory_bytes for vm in after.vms.values() if vm.is_running)
            self._free_bytes[host] = after.memory_bytes - used
        is_unable = after is not None and bool(after.problem or after.rivals)
        (self._unable.add if is_unable else self._unable.discard)(host)
        old, new = before.vms if before else {}, after.vms if after else {}
        for vm_id in old.keys() - new.keys():
            others = tuple(each for each in self._reported_by.pop(vm_id) if each != host)
            self._reported_by.update({vm_id: others} if others else {})
        for vm_id in new.keys() - old.keys():
            self._reported_by[vm_id] = (*self._reported_by.get(vm_id, ()), host)
        for vm_id in before.refused if before else ():
            self._refused_by[vm_id].discard(host)
            if not self._refused_by[vm_id]:
                del self._refused_by[vm_id]
        for vm_id in after.refused if after else ():
            self._refused_by[vm_id].add(host)

    def find_record(self, host: str) -> ManagedHost | None:
        """The record of a host that has a daemon, or had one until it was forgotten."""
        record: ManagedHost | None = self._engine.records.get(HOST_KEY.format(host)).value
        return record

    def find(self, host: str) -> ManagedHost | None:
        """The record of a host; None if it is not managed."""
        return unless_forgotten(self.find_record(host))

    def is_forgotten(self, host: str) -> bool:
        """Whether it had a daemon."""
        return self.find_record(host) is not self.find(host)

    def is_left_running(self, host: str) -> bool:
        """Whether it was forgotten, and VMs may run there."""
        return is_left_running(self.find_record(host))

    def why_not_moved(self, host: str) -> str:
        """Why VMs of this host are moved to no other one; empty if they may be.

        The platform of a server would act on them, and might start elsewhere what runs there.
        """
        if not self.is_left_running(host):
            return ""
        return (
            f"VMs of {host} are not moved: it was forgotten and left running; expected its daemon,"
            f" or `forewarn host forget {host} --fenced` when they are off"
        )

    def may_run_vms(self, host: str) -> bool:
        """Whether a host is managed, or was forgotten and left running."""
        return self._find_unless_fenced(host) is not None

    def _find_unless_fenced(self, host: str) -> ManagedHost | None:
        return unless_fenced(self.find_record(host))

    def is_unreachable(self, host: str) -> bool:
        """Whether nothing can be done to the VMs of this host at present."""
        return bool(self.reason(host))

    def is_away(self, host: str) -> bool:
        """Whether it is unreachable, and not only because its daemon looks for another server.

        Such a daemon finishes what it does, and reports it in a few seconds.
        """
        record = self.find(host)
        is_searching = record is not None and bool(record.server) and not self.has_contact(host)
        is_noted = record is not None and record.away_since is not None
        return self.is_unreachable(host) and (is_noted or not is_searching)

    def has_contact(self, host: str) -> bool:
        """Whether a server has contact with the daemon of this host."""
        record = self.find(host)
        records = self._engine.records
        return record is not None and is_served(record, lambda key: records.get(key).value)

    def reason(self, host: str) -> str:
        """Why nothing can be done to the VMs of this host at present; empty if something can."""
        record = self.find(host)
        if record is None:
            return ""
        if record.rivals:
            return f"{len(record.rivals)} machines with one id run its daemon; none is served"
        if self.has_contact(host):
            return record.problem
        if record.server:
            return "its server is lost, and its daemon has not found another one yet"
        return f"its daemon has been away since {record.last_contact_at:%Y-%m-%dT%H:%M:%SZ}"

    def count_unreachable(self) -> int:
        """Does not walk all hosts: `/metrics` reads it."""
        away = sum(len(hosts) for server, hosts in self._served_by.items() if self._is_lost(server))
        return away + sum(map(self.has_contact, self._unable))

    def _is_lost(self, server: str) -> bool:
        """Whether a server in the records has no lease; empty stands for none."""
        return not server or self._engine.records.get(lease_key(server)).value is None

    def connected(self) -> list[ManagedHost]:
        return [record for record in self._all() if not self.is_unreachable(record.host)]

    def count_others(self, host: str) -> int:
        """How many other hosts are managed, connected or not. Does not walk all hosts."""
        hosts = sum(map(len, self._served_by.values()))
        return hosts - (self.find(host) is not None)

    def _all(self) -> list[ManagedHost]:
        return [record for _, record in self._engine.records.values("hostd") if record.session]

    def free_bytes(self, host: str, but: str) -> int:
        """Its memory without that of its running VMs, but for the one with this id.

        Does not walk its VMs: each choice of a target reads this of all hosts.
        """
        record = self.find(host)
        vm = record.vms.get(but) if record else None
        own_bytes = vm.memory_bytes if vm and vm.is_running else 0
        return self._free_bytes[host] + own_bytes if record else 0

    def memory_of(self, vm: Vm) -> int:
        """The memory of a VM as its host has reported it; 0 if that is unknown."""
        record = self.find(vm.host)
        reported = record.vms.get(vm.id) if record else None
        return reported.memory_bytes if reported else 0

    def unmovable_on(self, host: str) -> dict[str, str]:
        """The VMs of a host that cannot run elsewhere, and why, as its daemon has reported."""
        record, board = self.find(host), self._engine.board
        reported = record.vms.items() if record else ()
        reasons = {board.ids.get(vm_id): vm.unmovable for vm_id, vm in reported if vm.unmovable}
        if not reasons:  # as on most hosts; a plan has thousands of them
            return {}
        return {vm: reasons[vm] for vm in sorted(board.hosts.get(host, ())) if vm in reasons}

    def others_on(self, host: str) -> list[str]:
        """The VMs that run on a host by its last report, and that the fleet does not have there: by
        name, or by id if the fleet has none with it. No operation on the host concerns them.
        """
        record, ids = self.find(host), self._engine.board.ids
        if record is None:
            return []
        running = {vm_id for vm_id, vm in record.vms.items() if vm.is_running}
        placed = self._engine.board.hosts.get(host, set())
        others = (vm_id for vm_id in running.union(record.refused) if ids.get(vm_id) not in placed)
        return sorted(ids.get(vm_id) or vm_id for vm_id in others)

    def running_on(self, vm_id: str) -> list[str]:
        """The hosts that report the VM as running."""
        hosts = [(host, self.find(host)) for host in self._reported_by.get(vm_id, ())]
        return [host for host, record in hosts if record and record.vms[vm_id].is_running]

    def may_run_on(self, name: str, but: str) -> tuple[str, ...]:
        """The other hosts than this one that a VM may run on.

        If no host reports it as running now: those that have it, and those that have reported
        nothing since before it was last seen running, or a try to move it ended, because it may
        have been moved there since.
        """
        published = self._engine.board.vms.get(name)
        vm = published.scope.vm(name) if published else None
        if published is None or vm is None:
            return ()
        hosts = {*self.running_on(vm.id), vm.host}
        if not self._runs_now(vm):
            last_run = self._last_run(published.scope, vm)
            hosts |= self._hosts_with(vm.id) | self._unreported_since(last_run)
        return tuple(sorted(hosts - {but, ""}))

    def _hosts_with(self, vm_id: str) -> set[str]:
        """The hosts that have a VM by their last report, also if their token is for other scopes,
        or if they were forgotten and left running.
        """
        known = filter(None, map(self._find_unless_fenced, self._unreported))
        left = [each for each in known if not each.session]
        return {
            *self._reported_by.get(vm_id, ()),
            *self._refused_by.get(vm_id, ()),
            *(each.host for each in left if vm_id in each.vms or vm_id in each.refused),
        }

    def _runs_now(self, vm: Vm) -> bool:
        """Whether a host reports the VM as running that has not been unreachable since.

        One that only claims it proves nothing.
        """
        return any(
            not self.is_unreported(host) and not self.is_unreachable(host)
            for host in self.running_on(vm.id)
            if host == vm.host or not self._claims(host, vm.id)
        )

    def _last_run(self, scope: Scope, vm: Vm) -> datetime | None:
        """When a VM that is off was last seen running, or may have been started by a move; None if
        that is not known.

        It may have run until now if the last report that says so is not current.
        """
        records = filter(None, map(self.find, self._reported_by.get(vm.id, ())))
        reported = [record.vms[vm.id] for record in records]
        seen = [each.running_at for each in reported if each.running_at is not None]
        if not seen or any(each.is_running for each in reported):
            return None
        tried = [each.at for each in scope.tried_moves if each.vm == vm.name]
        return max(seen + tried)

    def _unreported_since(self, time: datetime | None) -> set[str]:
        """The hosts whose VMs are not known since before this time, or at all without one.

        They are or were unreachable, and no report was merged since. Contact after the last report
        proves nothing: what was started there may not be reported yet. The record of a host whose
        server is lost says when it was connected, which is earlier. While several machines with one
        id are refused, the last report may be that of a clone, which does not run the VMs.
        """
        hosts = set(self._unreported)
        for server, served in self._served_by.items():
            if self._is_lost(server):
                hosts |= served
        if time is None:
            return hosts
        known = filter(None, map(self._find_unless_fenced, hosts))
        return {
            each.host for each in known if each.rivals or (each.reported_at or each.since) <= time
        }

    def is_unreported(self, host: str) -> bool:
        """Whether a report of this host is wanted, because it was unreachable since its last.

        Until then, nobody knows which VMs it runs, and nothing acts on them.
        """
        return host in self._unreported

    def not_answering(self, vm: Vm) -> str:
        """Another host that may run a VM that is off, and has not said so; empty if none may.

        It is unreachable, or has not reported its VMs since it was. For a VM whose own host has no
        daemon, only hosts that have it count: no report says when it was last seen running.
        """
        if self._runs_now(vm):
            return ""
        if self.find(vm.host) is not None:
            others = self.may_run_on(vm.name, but=vm.host)
        else:
            others = tuple(sorted(self._hosts_with(vm.id) - {vm.host}))
        return next((h for h in others if self.is_unreported(h) or self.is_unreachable(h)), "")

    def find_copies(self, vm: Vm) -> tuple[str, ...]:
        """The hosts with a copy, which is off, of a VM that ran, and that its host no longer has.

        It may run on a host that has not reported it, or that has no daemon.
        """
        hosts, record = self.reporting(vm.id), self.find(vm.host)
        is_current = record is not None and not self.is_unreported(vm.host)
        if not is_current or vm.host in hosts or self.running_on(vm.id):
            return ()
        return hosts if self._ran_until_gone(vm) else ()

    def _ran_until_gone(self, vm: Vm) -> bool:
        """Whether a VM that its host no longer has may run where nobody has said so.

        Not if an impact was to move it: the hosts that it may have come to are known.
        """
        published = self._engine.board.vms.get(vm.name)
        tried = published.scope.tried_moves if published else ()
        return not vm.power.is_off and not any(each.vm == vm.name for each in tried)

    def reporting(self, vm_id: str) -> tuple[str, ...]:
        """The hosts that have reported the VM, running or not."""
        return self._reported_by.get(vm_id, ())

    def choose_host(self, vm: Vm) -> str:
        """Where a VM belongs that hosts have reported: where it runs. Empty if none has it.

        While it moves, two hosts have it: it stays on the one that it is known on, until that no
        longer runs it. A copy that is off counts only if the VM was off, and the host that it is
        known on is fenced, or has reported what it has, and does not have it: otherwise the VM may
        run there, or on a host that has not reported it yet. A claim counts only if no connected
        host without one runs the VM, and if the VM is not known on such a host, running or not: so
        a VM that is stopped for a moment stays, and one that was taken while its host was away
        comes back.
        """
        vm_id, known = vm.id, vm.host
        running, hosts = self.running_on(vm_id), self.reporting(vm_id)
        is_known = self.find(known) is not None and not self.is_unreported(known)
        is_fenced = self.is_forgotten(known) and not self.may_run_vms(known)
        may_be_there = known and not is_fenced and (not is_known or self.is_unreachable(known))
        if not running and known not in hosts and (may_be_there or self._ran_until_gone(vm)):
            return ""
        claiming = {host for host in hosts if self._claims(host, vm_id)}
        if any(
            (host in running or host == known) and not self.is_unreachable(host)
            for host in hosts
            if host not in claiming
        ):
            hosts = tuple(host for host in hosts if host not in claiming)

        def rank(host: str) -> tuple[bool, bool, bool, str]:
            is_running = host in running
            return is_running and not self.is_unreachable(host), is_running, host == known, host

        return max(hosts, key=rank, default="")

    def _claims(self, host: str, vm_id: str) -> bool:
        record = self.find(host)
        return record is not None and record.vms[vm_id].is_claim

    def host_of(self, vm: Vm, impact: Impact) -> str:
        """The host whose daemon carries out an impact.

        A try whose result is not known stays with its daemon, wherever the VM is by now: that may
        still act on it, even while no server has contact.
        """
        if impact.state is ImpactState.CLAIMED and self.find(impact.host) is not None:
            return impact.host
        return self.acting_host(vm, moves=is_move(impact.type, impact.cause))

    def acting_host(self, vm: Vm, *, moves: bool) -> str:
        """The host whose daemon carries out an impact on a VM: the one that runs it.

        Someone else may have moved it there. A move is carried out where the VM was, in any case.
        """
        running = self.running_on(vm.id)
        is_elsewhere = running and vm.host not in running and not moves
        return self.choose_host(vm) if is_elsewhere else vm.host

    def vms_of(self, *records: ManagedHost | None) -> set[str]:
        """The VMs whose impacts a change of these records concerns: all that share an id, too."""
        board, known = self._engine.board, [record for record in records if record is not None]
        ids = {vm_id for record in known for vm_id in record.vms}
        placed = (board.hosts.get(record.host, set()) for record in known)
        return set().union(*map(board.ids.holders, ids), *placed)
