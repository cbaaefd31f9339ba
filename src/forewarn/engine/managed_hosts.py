"""What every server knows of the hosts that run a daemon: who serves them, and their VMs.

A host is *managed* while it has a record with a session. It is connected while its record names a
server and that server has its lease; else it is unreachable. So a lost server is noticed without a
write. The record of a host that was forgotten stays, without a session.
"""

from datetime import datetime
from typing import NamedTuple

import msgspec

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Abandon
from forewarn.core.fleet import Vm
from forewarn.engine.engine import Engine
from forewarn.engine.lease import lease_key
from forewarn.engine.record import RecordCodec
from forewarn.engine.transaction import Transaction
from forewarn.errors import Refused, UnknownHost

HOST_KEY = "hostd/{}/"


class HostedVm(NamedTuple):
    """A VM as its host has reported it."""

    memory_bytes: int
    is_running: bool


class ManagedHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`session` is one run of its daemon, `server` the worker that serves it; empty if none does.

    `since` is when that began. `vms` are by id, as the daemon reported them last. `number` is that
    of the request that changed the record last.
    """

    host: str
    session: str
    server: str
    since: datetime
    memory_bytes: int = 0
    vms: dict[str, HostedVm] = {}
    number: int = 0

    def free_bytes(self, but: str) -> int:
        """Its memory without that of its running VMs, but for the one with this id."""
        running = (vm for vm_id, vm in self.vms.items() if vm.is_running and vm_id != but)
        return self.memory_bytes - sum(vm.memory_bytes for vm in running)


MANAGED_HOST = RecordCodec("host", ManagedHost)


def unless_forgotten(record: ManagedHost | None) -> ManagedHost | None:
    return record if record is not None and record.session else None


class ManagedHosts:
    """All records of hosts. Create it before the engine loads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reported_by: dict[str, tuple[str, ...]] = {}
        engine.register("hostd", MANAGED_HOST)
        engine.on_change("hostd", self._on_change)

    def _on_change(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        """Keep the index of VMs, and show the host even if it has none."""
        host = (after or before).host  # type: ignore[union-attr]
        before, after = unless_forgotten(before), unless_forgotten(after)
        old, new = before.vms if before else {}, after.vms if after else {}
        for vm_id in old.keys() - new.keys():
            others = tuple(each for each in self._reported_by.pop(vm_id) if each != host)
            self._reported_by.update({vm_id: others} if others else {})
        for vm_id in new.keys() - old.keys():
            self._reported_by[vm_id] = (*self._reported_by.get(vm_id, ()), host)
        self._engine.board.declare_hosts((host,) if before else (), (host,) if after else ())

    def find(self, host: str) -> ManagedHost | None:
        """The record of a host; None if it is not managed."""
        return unless_forgotten(self._engine.records.get(HOST_KEY.format(host)).value)

    def is_forgotten(self, host: str) -> bool:
        """Whether it had a daemon."""
        return self._engine.records.get(HOST_KEY.format(host)).value is not self.find(host)

    def is_unreachable(self, host: str) -> bool:
        """Whether no server has contact with the daemon of this host."""
        record, records = self.find(host), self._engine.records
        if record is None:
            return False
        return not record.server or records.get(lease_key(record.server)).value is None

    def count_unreachable(self) -> int:
        return len(self._all()) - len(self.connected())

    def connected(self) -> list[ManagedHost]:
        return [record for record in self._all() if not self.is_unreachable(record.host)]

    def _all(self) -> list[ManagedHost]:
        return [record for _, record in self._engine.records.values("hostd") if record.session]

    def memory_of(self, vm: Vm) -> int:
        """The memory of a VM as its host has reported it; 0 if that is unknown."""
        record = self.find(vm.host)
        reported = record.vms.get(vm.id) if record else None
        return reported.memory_bytes if reported else 0

    def running_on(self, vm_id: str) -> list[str]:
        """The hosts that report the VM as running."""
        hosts = [(host, self.find(host)) for host in self._reported_by.get(vm_id, ())]
        return [host for host, record in hosts if record and record.vms[vm_id].is_running]

    def may_run_on(self, name: str, but: str) -> tuple[str, ...]:
        """The other hosts than this one that a VM may run on."""
        published = self._engine.board.vms.get(name)
        vm = published.scope.vm(name) if published else None
        return tuple(sorted({*self.running_on(vm.id), vm.host} - {but, ""})) if vm else ()

    def choose_host(self, vm_id: str, known: str) -> str:
        """Where a VM belongs that hosts have reported: where it runs. Empty if none has it.

        While it moves, two hosts have it: it stays on the one that it is known on, until that no
        longer runs it.
        """

        running = self.running_on(vm_id)

        def rank(host: str) -> tuple[bool, bool, bool, str]:
            is_running = host in running
            return is_running and not self.is_unreachable(host), is_running, host == known, host

        return max(self._reported_by.get(vm_id, ()), key=rank, default="")

    def acting_host(self, vm: Vm, *, moves: bool) -> str:
        """The host whose daemon carries out an impact on a VM: the one that runs it.

        Someone else may have moved it there. A move is carried out where the VM was, in any case.
        """
        running = self.running_on(vm.id)
        is_elsewhere = running and vm.host not in running and not moves
        return self.choose_host(vm.id, vm.host) if is_elsewhere else vm.host

    def vms_of(self, *records: ManagedHost | None) -> set[str]:
        """The VMs whose impacts a change of these records concerns."""
        board, known = self._engine.board, [record for record in records if record is not None]
        ids = {vm_id for record in known for vm_id in record.vms} & board.ids.keys()
        placed = (board.hosts.get(record.host, set()) for record in known)
        return {board.ids[vm_id] for vm_id in ids}.union(*placed)

    async def forget(self, host: str, *, by: str, fail_impacts: bool = False) -> None:
        """Manage a host no longer, because its daemon is gone for good.

        Refused while its VMs have impacts, unless these are to fail: nothing can tell whether they
        were carried out.
        """
        if self.is_unreachable(host):
            await self._abandon(host, by, is_accepted=fail_impacts)

        def decide(transaction: Transaction) -> None:
            known = unless_forgotten(transaction.get(HOST_KEY.format(host)))
            if known is None:
                raise UnknownHost(f"there is no host {host!r} with a daemon", host=host)
            if not self.is_unreachable(host):
                raise Refused(f"the daemon of {host} is connected; stop it first", host=host)
            forgotten = ManagedHost(host, session="", server="", since=transaction.now)
            transaction.put(HOST_KEY.format(host), forgotten)
            detail = f"host {host} is no longer managed by a daemon"
            transaction.record(Change(ChangeKind.UPDATED, host=host, detail=detail))

        await self._engine.update([HOST_KEY.format(host)], decide, by=by)

    async def _abandon(self, host: str, by: str, *, is_accepted: bool) -> None:
        await self._engine.require_caught_up()
        found = self._engine.board.hosts.get(host, ())
        scopes = {name: self._engine.board.vms[name].scope for name in sorted(found)}
        impacts = [
            f"the {impact.type} of {impact.vm}"
            for name, scope in scopes.items()
            for impact in scope.impacts
            if impact.vm == name and not impact.is_over
        ]
        if impacts and not is_accepted:
            raise Refused(
                f"{len(impacts)} impacts wait for the daemon of {host}: {', '.join(impacts[:5])};"
                " complete or cancel their events, or forget it with fail_impacts",
                host=host,
            )
        problem = f"the daemon of {host} is gone for good"
        for scope in dict.fromkeys(each.name for each in scopes.values() if impacts):
            await self._engine.submit(scope, Abandon(host=host, problem=problem), by=by)
