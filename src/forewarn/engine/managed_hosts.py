"""What every server knows of the hosts that run a daemon: who serves them, and their VMs.

A host is *managed* while it has a record. It is connected while its record names a server and that
server has its lease; else it is unreachable. So a lost server is noticed without a write.
"""

from collections import Counter
from datetime import datetime
from typing import NamedTuple

import msgspec

from forewarn.core.fleet import Vm
from forewarn.engine.engine import Engine
from forewarn.engine.lease import lease_key
from forewarn.engine.record import RecordCodec

HOST_KEY = "hostd/{}/"


class HostedVm(NamedTuple):
    """A VM as its host has reported it."""

    memory_bytes: int
    is_running: bool


class ManagedHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`session` is one run of its daemon, `server` the worker that serves it; empty if none does.

    `since` is when that began. `vms` are by id, as the daemon reported them last.
    """

    host: str
    session: str
    server: str
    since: datetime
    memory_bytes: int = 0
    vms: dict[str, HostedVm] = {}

    def free_bytes(self, but: str) -> int:
        """Its memory without that of its running VMs, but for the one with this id."""
        running = (vm for vm_id, vm in self.vms.items() if vm.is_running and vm_id != but)
        return self.memory_bytes - sum(vm.memory_bytes for vm in running)


MANAGED_HOST = RecordCodec("host", ManagedHost)


class ManagedHosts:
    """All records of hosts. Create it before the engine loads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reported_by: dict[str, tuple[str, ...]] = {}
        self._servers: Counter[str] = Counter()
        engine.register("hostd", MANAGED_HOST)
        engine.on_change("hostd", self._on_change)

    def _on_change(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        """Keep the index of VMs, and show the host even if it has none."""
        old, new = before.vms if before else {}, after.vms if after else {}
        host = (after or before).host  # type: ignore[union-attr]
        for vm_id in old.keys() - new.keys():
            others = tuple(each for each in self._reported_by[vm_id] if each != host)
            self._reported_by[vm_id] = others
            if not others:
                del self._reported_by[vm_id]
        for vm_id in new.keys() - old.keys():
            self._reported_by[vm_id] = (*self._reported_by.get(vm_id, ()), host)
        self._servers.update([after.server] if after else ())
        self._servers.subtract([before.server] if before else ())
        self._engine.board.declare_hosts((host,) if before else (), (host,) if after else ())

    def find(self, host: str) -> ManagedHost | None:
        """The record of a host; None if it is not managed."""
        record: ManagedHost | None = self._engine.records.get(HOST_KEY.format(host)).value
        return record

    def has_lease(self, server: str) -> bool:
        return self._engine.records.get(lease_key(server)).value is not None

    def is_unreachable(self, host: str) -> bool:
        """Whether no server has contact with the daemon of this host."""
        record = self.find(host)
        return record is not None and not (record.server and self.has_lease(record.server))

    def count_unreachable(self) -> int:
        """The work grows with the servers, not with the hosts."""
        servers = self._servers.items()
        return sum(count for name, count in servers if not (name and self.has_lease(name)))

    def connected(self) -> list[ManagedHost]:
        records = (record for _, record in self._engine.records.values("hostd"))
        return [record for record in records if not self.is_unreachable(record.host)]

    def memory_of(self, vm: Vm) -> int:
        """The memory of a VM as its host has reported it; 0 if that is unknown."""
        record = self.find(vm.host)
        reported = record.vms.get(vm.id) if record else None
        return reported.memory_bytes if reported else 0

    def running_on(self, vm_id: str) -> list[str]:
        """The hosts that report the VM as running."""
        hosts = [(host, self.find(host)) for host in self._reported_by.get(vm_id, ())]
        return [host for host, record in hosts if record and record.vms[vm_id].is_running]

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
