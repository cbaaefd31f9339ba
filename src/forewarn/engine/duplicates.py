"""VMs that two hosts run at a time: both copies write to the same disk, and destroy it.

    (runs once) -> SUSPECTED    a host reports it as running while another connected host does
    SUSPECTED -> CONFIRMED      a report of this host that was taken CONFIRMED_AFTER later says so
    SUSPECTED, CONFIRMED -> (runs once)    a report of this host, if one of them no longer runs it

Each host's record has this for its VMs. Hosts are asked for reports until it is settled. A VM is a
duplicate while two hosts have confirmed it: nothing acts on it then, also if one of them becomes
unreachable, until that reports or an operator fences it. While an impact moves a VM, both have it
for a while, and nothing is confirmed. What is confirmed stays so, whatever is planned: an impact
that waits because of it moves nothing. An incoming migration is not reported as running, so one
that was started by hand is no duplicate either.

A host may also run a copy of a VM that it may not have: its token does not cover the VM, so that
the copy was refused, or is a claim. Such a copy is *not accepted*. It blocks nothing, because
otherwise every host could stop the impacts on every VM, but it is shown, counted and logged. Each
server finds that out itself, from reports that are current, and writes nothing.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import Cause, is_move
from forewarn.core.fleet import Vm
from forewarn.engine.board import Board
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import Engine
from forewarn.engine.isolation import isolated
from forewarn.engine.managed_hosts import (
    HOST_KEY,
    HostedVm,
    ManagedHost,
    ManagedHosts,
    unless_fenced,
)
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.engine.transaction import Transaction
from forewarn.log import log
from forewarn.platform.base import STARTS

CONFIRMED_AFTER = timedelta(seconds=10)
LOOK_EVERY = timedelta(seconds=5)
"""How often the hosts of unaccepted copies are looked at: they may lose contact, or be back."""
HOSTS_COMPARED_MAX = 50
"""How many records of other hosts one commit compares: a store has a limit."""
ENTRIES_MAX = 1000
"""How many VMs one commit names in the history: its size has a limit."""


class DuplicateVms:
    """What the records of all hosts say. Create it before the engine loads."""

    def __init__(self, engine: Engine, managed: ManagedHosts) -> None:
        self._engine = engine
        self._managed = managed
        self._confirmed: defaultdict[str, set[str]] = defaultdict(set)
        self._running: defaultdict[str, set[str]] = defaultdict(set)
        self._shared: set[str] = set()  # VMs that several hosts report as running
        self._unaccepted: defaultdict[str, set[str]] = defaultdict(set)  # hosts that may not run it
        self._looked_at: set[str] = set()  # VMs with such a copy that another host runs, too
        self._suspected_since: dict[str, datetime] = {}
        self._shown: dict[str, tuple[str, ...]] = {}
        self._hosts: dict[str, frozenset[str]] = {}  # of both kinds of copies, by VM
        self._by_host: defaultdict[str, set[str]] = defaultdict(set)  # the same, by host
        self._changed = asyncio.Event()
        engine.on_change("hostd", self._on_change)

    def hosts_of(self, vm_id: str) -> tuple[str, ...]:
        """The hosts that run this VM at the same time; empty if it runs once."""
        hosts = self._confirmed.get(vm_id, ())
        return tuple(sorted(hosts)) if len(hosts) > 1 else ()

    def unaccepted_copies_of(self, vm_id: str) -> tuple[str, ...]:
        """The hosts with a copy of this VM that they may not have, while another host runs it."""
        return self._shown.get(vm_id, ())

    def copies_on(self, host: str) -> set[str]:
        """The VMs that this host and another one run at the same time, accepted or not."""
        return self._by_host.get(host, set())

    def count_not_accepted(self) -> int:
        return len(self._shown)

    def count(self) -> int:
        return sum(len(hosts) > 1 for hosts in self._confirmed.values())

    def reason_to_wait(self, vm: Vm, cause: Cause, tries: int) -> str:
        """Why nothing acts on a VM although its host can: it runs twice, or might after a start.

        `tries` were made before.
        """
        hosts = self.hosts_of(vm.id)
        if hosts:
            return f"it runs on {' and '.join(hosts)}: stop all but one"
        hosts = self._managed.find_copies(vm)
        if hosts and not tries:  # else it is moved, and has left its host
            return describe_missing(vm, hosts)
        host = self._managed.not_answering(vm) if may_start(vm, cause, tries) else ""
        if not host:
            return ""
        if self._managed.is_forgotten(host):
            return (
                f"it may run on {host}, which was forgotten and left running; expected its daemon,"
                f" or `forewarn host forget {host} --fenced` when it is off"
            )
        reason = self._managed.reason(host)
        if not reason:
            return f"it may run on {host}, which is back and has not reported its VMs yet"
        return f"it may run on {host}, which is unreachable: {reason}"

    def has_suspects(self, host: str) -> bool:
        """Whether another report of this host is wanted now."""
        moving = MovingVms(self._engine.board)
        return any(
            host not in self._confirmed.get(vm_id, ())
            and self._others(host, vm_id)
            and vm_id not in moving
            for vm_id in self._shared
            if host in self._running[vm_id]
        )

    def compare(
        self, record: ManagedHost, vms: Mapping[str, HostedVm], taken_at: datetime, t: Transaction
    ) -> dict[str, HostedVm]:
        """The VMs of a new report, with what is known of those that another host runs, too."""
        host, after = record.host, dict[str, HostedVm]()
        moving = MovingVms(self._engine.board)
        for vm_id, vm in vms.items():
            old = record.vms.get(vm_id)
            after[vm_id] = vm.after(old, t.now)
            was_double = old is not None and old.is_double
            others = set(self._others(host, vm_id))
            if was_double:
                others |= self._confirmed.get(vm_id, set()) - {host}
            if runs(vm) and others and (was_double or vm_id not in moving):
                since = (old.double_since if old else None) or t.now
                is_double = was_double or taken_at - since > CONFIRMED_AFTER
                after[vm_id] = after[vm_id]._replace(double_since=since, is_double=is_double)
        changed = [
            vm_id
            for vm_id in record.vms.keys() | after.keys()
            if is_double_in(record.vms, vm_id) != is_double_in(after, vm_id)
        ]
        self._record(t, host, after, sorted(changed)[:ENTRIES_MAX])
        return after

    def _others(self, host: str, vm_id: str) -> list[str]:
        running = self._running.get(vm_id, ())
        return [each for each in running if each != host and self._managed.has_contact(each)]

    def _record(
        self, t: Transaction, host: str, after: Mapping[str, HostedVm], changed: list[str]
    ) -> None:
        """Write into the history which VMs are duplicates now, or no longer.

        The records of the other hosts are compared at the commit, so that one of two servers
        writes it.
        """
        known = dict[str, ManagedHost | None]()
        for vm_id in changed:
            others = list[str]()
            known_on = {*self._managed.running_on(vm_id), *self._confirmed.get(vm_id, ())}
            for other in sorted(known_on - {host}):
                if other not in known and len(known) < HOSTS_COMPARED_MAX:
                    known[other] = unless_fenced(t.get(HOST_KEY.format(other)))
                record = known[other] if other in known else self._managed.find(other)
                if record is not None and is_double_in(record.vms, vm_id):
                    others.append(other)
            name = next(iter(self._engine.board.ids.holders(vm_id)), "")
            if not others or not name:
                continue
            hosts = " and ".join(sorted((host, *others)))
            is_double = is_double_in(after, vm_id)
            detail = f"runs on {hosts}" if is_double else f"no longer runs on both {hosts}"
            scope = self._engine.board.vms[name].scope.name
            change = Change(ChangeKind.UPDATED, vm=name, host=host, detail=detail)
            t.record(change, scope=scope)

    async def run(self) -> None:
        """Look for unaccepted copies, until cancelled. Sleeps while there are no suspects."""
        clock = self._engine.clock
        while True:  # ends when cancelled
            self._changed.clear()
            await self._look()
            look_at = clock.now() + LOOK_EVERY if self._looked_at else None
            await wait_for(clock, self._changed, look_at)

    async def _look(self) -> None:
        now, moving = self._engine.clock.now(), MovingVms(self._engine.board)
        for number, vm_id in enumerate(self._looked_at | self._suspected_since.keys(), start=1):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
                moving = MovingVms(self._engine.board)
            text = "bug while looking at copies of a VM"
            with isolated(self._engine.throttled_log, text, vm=self._name(vm_id)):
                self._look_at(vm_id, now, moving)

    def _look_at(self, vm_id: str, now: datetime, moving: "MovingVms") -> None:
        hosts = () if vm_id in moving else self._find_unaccepted(vm_id)
        if not hosts:
            self._suspected_since.pop(vm_id, None)
            if self._shown.pop(vm_id, None):
                self._update_hosts(vm_id)
        elif now - self._suspected_since.setdefault(vm_id, now) > CONFIRMED_AFTER:
            if vm_id not in self._shown:
                name, unaccepted = self._name(vm_id), " ".join(hosts)
                log.warning("VM may run on two hosts", vm=name, unaccepted=unaccepted)
            self._shown[vm_id] = hosts
            self._update_hosts(vm_id)

    def _update_hosts(self, vm_id: str) -> None:
        """Keep the hosts that have a copy of this VM, while there are two."""
        copies = {*self.unaccepted_copies_of(vm_id), *self._running.get(vm_id, ())}
        hosts = frozenset(self.hosts_of(vm_id)) | (copies if vm_id in self._shown else set())
        for host in self._hosts.pop(vm_id, frozenset()):
            keep(self._by_host, host, vm_id, is_kept=False)
        for host in hosts:
            keep(self._by_host, host, vm_id, is_kept=True)
            self._hosts[vm_id] = hosts

    def _find_unaccepted(self, vm_id: str) -> tuple[str, ...]:
        """The hosts with an unaccepted copy of a VM of the fleet; none unless another host runs it.

        Hosts count whose report is current. Two VMs with one id are another problem: both are
        refused.
        """
        unaccepted, managed = self._unaccepted.get(vm_id, set()), self._managed
        current = {
            host
            for host in unaccepted | self._running.get(vm_id, set())
            if not managed.is_unreachable(host) and not managed.is_unreported(host)
        }
        is_one_vm = len(self._engine.board.ids.holders(vm_id)) == 1
        if len(current) < 2 or not is_one_vm:
            return ()
        return tuple(sorted(unaccepted & current))

    def _on_change(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        host = (after or before).host  # type: ignore[union-attr]
        before, after = unless_fenced(before), unless_fenced(after)
        old, new = before.vms if before else {}, after.vms if after else {}
        were_refused, are_refused = ({*each.refused} if each else set() for each in (before, after))
        changed = {vm_id for vm_id in old.keys() | new.keys() if old.get(vm_id) != new.get(vm_id)}
        for vm_id in changed | (were_refused ^ are_refused):
            self._update(host, vm_id, new.get(vm_id), is_refused=vm_id in are_refused)

    def _update(self, host: str, vm_id: str, vm: HostedVm | None, *, is_refused: bool) -> None:
        had = self.hosts_of(vm_id)
        is_claimed = vm is not None and vm.is_running and vm.is_claim
        keep(self._unaccepted, vm_id, host, is_kept=is_refused or is_claimed)
        keep(self._running, vm_id, host, is_kept=runs(vm))
        keep(self._confirmed, vm_id, host, is_kept=vm is not None and vm.is_double)
        (self._shared.add if len(self._running.get(vm_id, ())) > 1 else self._shared.discard)(vm_id)
        unaccepted = self._unaccepted.get(vm_id, set())
        is_suspect = unaccepted and len(unaccepted | self._running.get(vm_id, set())) > 1
        if is_suspect or vm_id in self._looked_at:
            (self._looked_at.add if is_suspect else self._looked_at.discard)(vm_id)
            self._changed.set()
        hosts = self.hosts_of(vm_id)
        if hosts != had:
            self._update_hosts(vm_id)
        if hosts and not had:
            log.error("VM runs on two hosts", vm=self._name(vm_id), hosts=" ".join(hosts))
        elif had and not hosts:
            log.info("VM runs on one host again", vm=self._name(vm_id))

    def _name(self, vm_id: str) -> str:
        return next(iter(self._engine.board.ids.holders(vm_id)), vm_id)


class MovingVms:
    """The VMs that an impact moves at present. One that waits has not begun, and a VM that boots
    has moved.

    The impacts of a scope are read once, however many of its VMs are looked up.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._by_scope: dict[str, frozenset[str]] = {}

    def __contains__(self, vm_id: str) -> bool:
        return any(name in self._names(name) for name in self._board.ids.holders(vm_id))

    def _names(self, vm: str) -> frozenset[str]:
        """The names of those in the scope of this VM."""
        scope = self._board.vms[vm].scope
        if scope.name not in self._by_scope:
            self._by_scope[scope.name] = frozenset(
                impact.vm
                for impact in scope.impacts
                if impact.is_held and is_move(impact.type, impact.cause)
            )
        return self._by_scope[scope.name]


def describe_missing(vm: Vm, hosts: Sequence[str]) -> str:
    """What an operator has to do about a VM that ran, and that its host no longer has."""
    copies = " and ".join(hosts)
    return (
        f"it ran on {vm.host}, which no longer has it, and its copy on {copies} is off: it may run"
        f" on a host without a daemon; start it on {copies}, or undefine the copy"
    )


def may_start(vm: Vm, cause: Cause, tries: int) -> bool:
    """Whether an impact may start a VM that is off: one that it or its owner wants to run."""
    has_failed = cause is Cause.FAILED and not vm.power.is_off
    return cause in STARTS or has_failed or tries > 0


def runs(vm: HostedVm | None) -> bool:
    """Whether a host runs a VM that it may have: a claim to a VM of another one does not count."""
    return vm is not None and vm.is_running and not vm.is_claim


def keep(index: defaultdict[str, set[str]], key: str, item: str, *, is_kept: bool) -> None:
    """Add an item to those of a key, or remove it: a host of a VM, or a VM of a host."""
    (index[key].add if is_kept else index[key].discard)(item)
    if not index[key]:
        del index[key]


def is_double_in(vms: Mapping[str, HostedVm], vm_id: str) -> bool:
    vm = vms.get(vm_id)
    return vm is not None and vm.is_double
