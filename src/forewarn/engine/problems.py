"""What is wrong with hosts and VMs, and what an impact waits for: in words, for people.

Nothing is decided here: the API, the command line and the console show it.
"""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum

import msgspec

from forewarn.core.event import Event, Impact, ImpactState, Source, Status
from forewarn.core.fleet import Scope, Vm
from forewarn.core.machine import domains_under_impact
from forewarn.engine.duplicates import DuplicateVms, describe_missing
from forewarn.engine.engine import Engine
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.engine.unserved import UnservedVms

COPIES_SHOWN_MAX = 20
"""How many VMs with a second copy a host names."""
OTHERS_SHOWN_MAX = 5


class ProblemCode(StrEnum):
    UNREACHABLE = "unreachable"
    """Nothing can be done to the VMs of the host at present."""
    BRIDGE_UNSERVED = "bridge-unserved"
    """The guests at a bridge of the host cannot read their document."""
    METADATA_UNREACHABLE = "metadata-unreachable"
    """The relay of the host gets no response from a metadata server, or a bridge is not served."""
    LEFT_RUNNING = "left-running"
    """The host was forgotten, and VMs may run there: they are not started on other hosts."""
    NOT_ACCEPTED = "not-accepted"
    """A VM of the host does not fit into the fleet."""
    ADDRESS_TAKEN = "address-taken"
    """A VM of the host has an address that another VM has: its guest may be refused."""
    HOST_UNREACHABLE = "host-unreachable"
    """The host of the VM is unreachable: its power is as it was reported last."""
    DUPLICATE = "duplicate"
    """Two hosts run the VM at the same time: both copies write to its disk."""
    DUPLICATE_NOT_ACCEPTED = "duplicate-not-accepted"
    """A host that may not have the VM runs a copy of it, too. Impacts are not blocked."""
    MISSING = "missing"
    """The VM ran, its host no longer has it, and the copy of another host is off."""
    UNSERVED = "unserved"
    """The VM asks for its document and does not get it."""


class Problem(msgspec.Struct, frozen=True):
    """What is wrong: a code for machines, and a message for people."""

    code: ProblemCode
    message: str


class ScopeIndex:
    """The events, VMs and impacts of a scope: it is walked once, however many are looked up."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.events = {event.id: event for event in scope.events}
        self.vms = {vm.name: vm for vm in scope.vms}
        self.impacts: defaultdict[str, list[Impact]] = defaultdict(list)
        for impact in scope.impacts:
            self.impacts[impact.event_id].append(impact)


class Problems:
    def __init__(
        self,
        engine: Engine,
        managed: ManagedHosts,
        unserved: UnservedVms,
        duplicates: DuplicateVms,
    ) -> None:
        self._engine = engine
        self._duplicates = duplicates
        self._managed = managed
        self._unserved = unserved

    def of_host(self, host: str) -> tuple[Problem, ...]:
        """Without those of its VMs."""
        record, reason = self._managed.find(host), self._managed.reason(host)
        problems = [Problem(ProblemCode.UNREACHABLE, reason)] if reason else []
        if self._managed.is_left_running(host):
            message = "its daemon was forgotten, and what may run there is not started elsewhere"
            problems.append(Problem(ProblemCode.LEFT_RUNNING, message))
        silence = self._describe_silence(host)
        if silence:
            problems.append(Problem(ProblemCode.METADATA_UNREACHABLE, silence))
        for each in record.unserved if record and self._managed.has_contact(host) else ():
            vms = f"{each.vms} VM{'' if each.vms == 1 else 's'}" if each.vms else "no VM at present"
            message = f"the bridge {each.bridge}, with {vms}, is not served: {each.problem}"
            problems.append(Problem(ProblemCode.BRIDGE_UNSERVED, message))
        for text in record.not_accepted if record else ():
            problems.append(Problem(ProblemCode.NOT_ACCEPTED, text))
        for text in record.taken_addresses if record else ():
            problems.append(Problem(ProblemCode.ADDRESS_TAKEN, text))
        return (*problems, *self._copies_on(host))

    def _copies_on(self, host: str) -> Iterator[Problem]:
        """That VMs run on this host and on another one: the fleet has them on only one of them."""
        ids, holders = self._duplicates.copies_on(host), self._engine.board.ids.holders
        names = sorted((next(iter(holders(vm_id)), vm_id), vm_id) for vm_id in ids)
        for name, vm_id in names[:COPIES_SHOWN_MAX]:
            yield from self._describe_copies(vm_id, name)
        more = len(names) - COPIES_SHOWN_MAX
        if more > 0:
            message = f"{more} more VM{'' if more == 1 else 's'} have two copies"
            yield Problem(ProblemCode.DUPLICATE, message)

    def _describe_copies(self, vm_id: str, name: str, vm_host: str = "") -> Iterator[Problem]:
        """What is wrong if a VM runs twice; an empty name for the problems of the VM itself."""
        hosts = self._duplicates.hosts_of(vm_id)
        if hosts:
            message = f"{name or 'it'} runs on {' and '.join(hosts)}: stop all but one"
            yield Problem(ProblemCode.DUPLICATE, message)
        hosts = self._duplicates.unaccepted_copies_of(vm_id)
        if hosts:
            others = [host for host in hosts if host != vm_host] or hosts
            copy = f"a copy of {name}" if name else "a copy"
            message = (
                f"{copy} that is not accepted runs on {' and '.join(others)}, too: stop it there,"
                " or correct the token of that host; impacts are not blocked"
            )
            yield Problem(ProblemCode.DUPLICATE_NOT_ACCEPTED, message)

    def warn_of_others(self, host: str) -> Iterator[str]:
        """That a host may run VMs that the fleet does not have there, or not as they are."""
        others, record = self._managed.others_on(host), self._managed.find(host)
        more = len(others) - OTHERS_SHOWN_MAX
        if others:
            names = ", ".join(others[:OTHERS_SHOWN_MAX])
            names += f" and {more} more VM{'' if more == 1 else 's'}" if more > 0 else ""
            they = "they are" if len(others) > 1 else "it is"
            yield f"{host} runs {names}, which the fleet does not have there: {they} not notified"
        elif record is not None and record.not_accepted:
            yield f"{host} has VMs that are not accepted, and that may run: they are not notified"

    def _describe_silence(self, host: str) -> str:
        """Since when guests of a host whose daemon is connected get no response; else empty."""
        record = self._managed.find(host)
        since = record.unconfirmed_since if record and self._managed.has_contact(host) else None
        if since is None:
            return ""
        return f"guests there have had no response from a metadata server since {_format(since)}"

    def of_vm(self, scope: Scope, vm: Vm) -> Iterator[Problem]:
        yield from self._describe_copies(vm.id, "", vm.host)
        reason = self._managed.reason(vm.host)
        if reason:
            message = f"its host {vm.host} is unreachable: {reason}"
            yield Problem(ProblemCode.HOST_UNREACHABLE, message)
        hosts = self._managed.find_copies(vm)
        if hosts:
            yield Problem(ProblemCode.MISSING, describe_missing(vm, hosts))
        unserved = self._unserved.find(scope.name, vm.name)
        if unserved is not None:
            yield Problem(ProblemCode.UNSERVED, str(unserved))

    def waits(self, scope: Scope, event_id: str) -> Iterator[tuple[Impact, str]]:
        """The impacts of an event, each with what has to happen before it goes on.

        That is empty if it runs, or is over.
        """
        impacts = [impact for impact in scope.impacts if impact.event_id == event_id]
        if not impacts:
            return
        vms = {vm.name: vm for vm in scope.vms}
        busy = {impact.vm for impact in (*scope.impacts, *scope.dropped) if impact.is_held}
        for impact in impacts:
            yield impact, self._waits_for(vms.get(impact.vm), impact, busy)

    def waits_to_start(self, scope: Scope, event: Event, *, is_stuck: bool = False) -> str:
        """What has to happen before an event starts that is due or approved, or that its VMs cannot
        read; empty if it has started, or if time alone is enough. `is_stuck`: also empty if it
        waits for its turn, and the impacts before it go on.
        """
        if event.status is not Status.SCHEDULED:
            return ""
        if event.is_approved or event.has_had_notice:
            return self._waits_for_turn(scope, event, is_stuck=is_stuck)
        if event.unreadable_since is None:
            return ""
        names = set(event.resources)
        for host in sorted({vm.host for vm in scope.vms if vm.name in names}):
            is_away = self._managed.find(host) is not None and not self._managed.has_contact(host)
            if is_away:
                return self.describe_away(host)
            silence = self._describe_silence(host)
            if silence:
                return f"{host}: {silence}"
        since = _format(event.unreadable_since)
        return f"its VMs to be able to read it: they have not been since {since}"

    def _waits_for_turn(self, scope: Scope, event: Event, *, is_stuck: bool) -> str:
        """Which update domain holds an event that is ready, and what that waits for in turn."""
        under_impact = domains_under_impact(scope)
        if event.source is not Source.PLATFORM or not under_impact:
            return ""
        others = under_impact - {event.update_domain}
        if not others:
            return (
                ""
                if is_stuck
                else f"an earlier event of {scope.name}, which waits for another update domain"
            )
        domain = min(others)
        vms = {vm.name: vm for vm in scope.vms if vm.update_domain == domain}
        stuck = ((vms[each.vm], each) for each in scope.impacts if each.vm in vms)
        reasons = (self._waits_for_hosts(vm, each) for vm, each in stuck if _is_waiting(each))
        reason = next(filter(None, reasons), "")
        text = f"update domain {domain} of {scope.name}, under impact"
        if reason:
            return f"{text}, which waits for {reason}"
        return "" if is_stuck else text

    def awaited_daemon(self, vm: Vm, *, moves: bool) -> str:
        """The daemon that has to return before an impact on a VM can begin; empty if none has."""
        return self.describe_away(self._managed.acting_host(vm, moves=moves))

    def obstacle(self, scope: ScopeIndex, event_id: str) -> str:
        """What has to change on a host before an impact of the event can go on; empty if nothing.

        Everything else that impacts wait for comes by itself.
        """
        for impact in scope.impacts.get(event_id, ()):
            vm = scope.vms.get(impact.vm)
            if vm is not None and _is_waiting(impact):
                obstacle = self._waits_for_hosts(vm, impact)
                if obstacle:
                    return obstacle
        return ""

    def describe_away(self, host: str) -> str:
        """The daemon of a host and why it is away; empty if it is not."""
        reason = self._managed.reason(host)
        return f"the daemon of {host}: {reason}" if reason else ""

    def _waits_for(self, vm: Vm | None, impact: Impact, busy: set[str]) -> str:
        if impact.state is ImpactState.BOOTING:
            return f"the VM to poll, until {_format(impact.due_at)}"
        if vm is None or not _is_waiting(impact):
            return ""
        hosts = self._waits_for_hosts(vm, impact)
        if hosts:
            return hosts
        if vm.name in busy:
            return "another impact on this VM"
        if impact.due_at > self._engine.clock.now():
            return f"its next try at {_format(impact.due_at)}"
        return "a server to begin"

    def _waits_for_hosts(self, vm: Vm, impact: Impact) -> str:
        host = self._managed.host_of(vm, impact)
        daemon = self.describe_away(host)
        if daemon:
            return daemon
        if self._managed.find(host) is not None and self._managed.is_unreported(host):
            return f"a report of {host}: its daemon is connected, and has not reported its VMs yet"
        reason = self._duplicates.reason_to_wait(vm, impact.cause, impact.tries)
        return f"other hosts: {reason}" if reason else ""


def _is_waiting(impact: Impact) -> bool:
    """Whether no host acts on the VM, and one still has to."""
    return not (impact.is_over or impact.is_held or impact.state is ImpactState.BOOTING)


def _format(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"
