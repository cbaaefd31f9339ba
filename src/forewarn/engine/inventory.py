"""Merges what a host daemon reports into the fleet: the VMs of its host and their scopes.

The rules are those of `fleet sync libvirt`. They are applied to the scopes that the report concerns
and to no others, so that the work grows with the host and not with the fleet.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from forewarn.core.command import UpdateMembers
from forewarn.core.fleet import Power, Scope, ScopeKind, Vm
from forewarn.core.machine import decide
from forewarn.core.membership import runs_on
from forewarn.engine.engine import Engine
from forewarn.engine.fleet_apply import Commands, check_size, definition
from forewarn.engine.managed_hosts import HostedVm, ManagedHosts
from forewarn.engine.report_checks import ReportChecks
from forewarn.errors import Invalid
from forewarn.fleetfile.parser import Fleet, parse_address
from forewarn.fleetfile.yaml_source import FieldError, convert, explain, format_path
from forewarn.platform.libvirt.domain_xml import DiscoveredVm
from forewarn.platform.libvirt.fleet_import import sync_in_steps
from forewarn.platform.remote import UNDECODABLE, ReportedVm
from forewarn.steps import Steps, in_turns

PROBLEMS_MAX = 100
"""In a response; a daemon reads a limited number of bytes."""
NOT_ACCEPTED_MAX = 20
NOT_ACCEPTED_LENGTH_MAX = 300
"""In the record of the host."""
VM_SCHEMA = msgspec.json.schema(ReportedVm)
VM_BYTES_MAX = 16 * 1024
"""A VM with 64 MAC addresses and as many IPv6 addresses has less than half of it."""
VM_BYTES_PER_STEP = 1024
"""Decoding so much takes about as long as the rest of the work on a VM."""


class HostInventory:
    """One report of a host, which is read and then planned, both in turns with everything else.

    `vms` are those of the host, and `problems` name the ones that do not fit into the fleet. What
    is known of such a VM stays as it is; `refused` has the ids of those that run. A VM that is in
    `address_problems` fits, without that address. New ones may be placed in these `scopes`, or in
    any if there are none.
    """

    def __init__(
        self,
        engine: Engine,
        managed: ManagedHosts,
        host: str,
        vms: Iterable[msgspec.Raw],
        scopes: Collection[str] = (),
    ) -> None:
        self._engine = engine
        self._managed = managed
        self._host = host
        self._reported = vms
        self._scopes = scopes
        self._refused: set[str] = set()  # ids and names
        self._domains: dict[str, DiscoveredVm] = {}
        self._missing: set[str] = set()  # names of VMs that this host no longer has
        self.vms: dict[str, HostedVm] = {}
        self.refused: set[str] = set()
        self.problems: list[str] = []
        self.address_problems: list[str] = []

    async def read(self) -> None:
        """Find out what the host has, before it is planned."""
        await in_turns(self._read())

    async def plan(self) -> Commands:
        """The commands that bring the fleet up to date, those that free a VM first.

        The record of the host has the VMs of this report already. The fleet may change meanwhile,
        so a commit of the commands has to compare it.
        """
        return await in_turns(self._plan())

    @property
    def not_accepted(self) -> tuple[str, ...]:
        """The problems as they are kept for people. Complete after `plan`."""
        return limit_lines(self.problems)

    @property
    def taken_addresses(self) -> tuple[str, ...]:
        """The same for the addresses that other VMs have."""
        return limit_lines(self.address_problems)

    def _read(self) -> Steps[None]:
        for encoded in self._reported:
            yield 1 + len(encoded) // VM_BYTES_PER_STEP
            try:
                vm = _decode(encoded)
            except Invalid as error:
                name, vm_id = _identify(encoded)
                self.problems.append(f"VM {name[:80]!r}: {error.message}")
                self._refused |= {vm_id.lower(), name}
                continue
            fields = asdict(vm) | {"id": vm.id.lower()}
            is_active = fields.pop("power") == Power.RUNNING
            domain = DiscoveredVm(**fields, host=self._host, is_active=is_active)
            self._domains[domain.id] = domain
        checks = yield from self._refuse()
        for vm_id, domain in self._domains.items():
            yield 1
            is_claim = checks.is_claim(domain)
            self.vms[vm_id] = HostedVm(
                domain.memory_bytes, domain.is_active, is_claim, domain.unmovable
            )

    def _refuse(self) -> Steps[ReportChecks]:
        """Drop the VMs that this host may not report."""
        checks = ReportChecks(self._engine.board, self._managed, self._host, self._scopes)
        for domain in list(self._domains.values()):
            yield 1
            try:
                checks.check(domain)
            except Invalid as error:
                del self._domains[domain.id]
                self._refused |= {domain.id, domain.name}
                self.refused |= {domain.id} if domain.is_active else set()
                self.problems.append(error.message)
                continue
            addresses, problem = checks.select_addresses(domain)
            if problem:
                self._domains[domain.id] = replace(domain, addresses=addresses)
                self.address_problems.append(problem)
        return checks

    def _plan(self) -> Steps[Commands]:
        # again: the fleet may have changed since the report was read
        checks = yield from self._refuse()
        present = {scope.name: scope for scope in self._concerned()}
        domains, found = yield from self._select(present.values())
        part = Fleet(scopes=tuple(map(definition, present.values())))
        problems = list[str]()
        synced = yield from sync_in_steps(part, domains, [self._host], problems)
        after = yield from self._with_state(synced.scopes, checks)
        staying = {vm.id or vm.name for scope in after.values() for vm in scope.vms}
        commands = list[tuple[str, UpdateMembers]]()
        for name in sorted(present.keys() | after.keys()):
            old = present.get(name) or self._engine.new_scope(name)
            new = after.get(name) or replace(old, vms=())
            yield 1 + len(old.vms) + len(new.vms)
            if name in present and new.kind is not old.kind:
                problems.append(
                    f"scope {name!r} is of the kind {old.kind}, not {new.kind}, and a report does"
                    " not change that; expected a fleet file with its new kind"
                )
                new = replace(new, kind=old.kind)
            try:
                command = self._compare(old, new, staying, found)
            except Invalid as error:
                problems.append(error.message)
                continue
            has_news = command.vms or command.gone or command.left
            if name not in present or (has_news and self._has_effect(old, command)):
                commands.append((name, command))
        self.problems = list(dict.fromkeys([*self.problems, *problems]))
        self.address_problems = list(dict.fromkeys(self.address_problems))
        return [*sorted(commands, key=lambda each: not each[1].left)]

    def _has_effect(self, scope: Scope, command: UpdateMembers) -> bool:
        """Whether the command changes anything now: a VM under impact stays as it is."""
        return decide(scope, command, self._engine.clock.now(), self._engine.timing).scope != scope

    def _concerned(self) -> list[Scope]:
        """The scopes of the host's VMs, of all that it reports, and those that these name."""
        board = self._engine.board
        names = {domain.scope or domain.name for domain in self._domains.values()}
        vms = {*board.hosts.get(self._host, ()), *(each.name for each in self._domains.values())}
        vms |= {board.ids[vm_id] for vm_id in self._domains if vm_id in board.ids}
        names |= {board.vms[vm].scope.name for vm in vms if vm in board.vms}
        return [board.scopes[name].scope for name in sorted(names) if name in board.scopes]

    def _select(self, scopes: Iterable[Scope]) -> Steps[tuple[list[DiscoveredVm], frozenset[str]]]:
        """The domains that count, and the VMs that were found here after their host was lost.

        A VM that another host runs is there. One that is under impact keeps its name and scope,
        also if the host no longer has it. So does a claim: with another name its events would be
        canceled, and its host may be back in a second.
        VMs of the fleet come first: a new one must not take the name of one that stays.
        """
        domains, found, managed = dict(self._domains), set[str](), self._managed
        known = set[str]()
        for scope in scopes:
            busy = {impact.vm for impact in scope.impacts if not impact.is_over}
            for vm in scope.vms:
                yield 1
                known.add(vm.id)
                domain = domains.get(vm.id)
                place = managed.choose_host(vm)
                if domain is not None and place == self._host:
                    if vm.name in busy or self.vms[vm.id].is_claim:
                        domains[vm.id] = replace(domain, name=vm.name, scope="", kind=None)
                    if managed.is_away(vm.host) and domain.is_active:
                        found.add(vm.name)
                elif vm.host == self._host and (
                    place
                    or vm.name in busy
                    or (vm.id or vm.name) in self._refused
                    or self._is_missing(vm)
                ):
                    domains[vm.id or vm.name] = DiscoveredVm(
                        name=vm.name, id=vm.id, host=place or vm.host, is_active=False
                    )
                elif domain is not None:
                    del domains[vm.id]
                    if self.vms[vm.id].is_claim:
                        self.problems.append(
                            f"VM {domain.name!r}: it is on {place}, and the token of {self._host}"
                            f" is not for the scope {scope.name!r}"
                        )
        ordered = sorted(domains.values(), key=lambda domain: domain.id not in known)
        return ordered, frozenset(found)

    def _is_missing(self, vm: Vm) -> bool:
        """Whether a VM that is gone may run elsewhere: then it stays, and its power is unknown."""
        if not self._managed.find_copies(vm):
            return False
        self._missing.add(vm.name)
        return True

    def _compare(
        self, old: Scope, new: Scope, staying: set[str], found: frozenset[str]
    ) -> UpdateMembers:
        """What changes in a scope; Invalid if it cannot hold these VMs."""
        check_size(old, new)
        if new.kind is ScopeKind.VM and len(new.vms) > max(len(old.vms), 1):
            several = ", ".join(vm.name for vm in new.vms)
            raise Invalid(
                f"scope {new.name!r} is of the kind vm, which has one VM, not {several};"
                " expected metadata with another kind or scope"
            )
        known, names = {vm.name: vm for vm in old.vms}, {vm.name for vm in new.vms}
        lost = [vm for vm in old.vms if vm.name not in names]
        pairs = [(known.get(vm.name), vm) for vm in new.vms]
        tried = {each.vm for each in old.tried_moves}
        return UpdateMembers(
            host=self._host,
            kind=new.kind,
            vms=tuple(
                (old_vm.host if old_vm else "", vm)
                for old_vm, vm in pairs
                if old_vm != vm or (vm.name in tried and runs_on(vm, self._host))
            ),
            gone=tuple(vm.name for vm in lost if (vm.id or vm.name) not in staying),
            left=tuple(vm.name for vm in lost if (vm.id or vm.name) in staying),
            found=found,
        )

    def _with_state(self, scopes: Iterable[Scope], checks: ReportChecks) -> Steps[dict[str, Scope]]:
        """The scopes with the power of this host's VMs, and whose addresses they have."""
        powered = list[Scope]()
        for scope in scopes:
            yield 1 + len(scope.vms)
            powered.append(replace(scope, vms=tuple(map(self._with_power, scope.vms))))
        holders = yield from self._choose_holders(vm for scope in powered for vm in scope.vms)
        after = dict[str, Scope]()
        for scope in powered:
            vms = list[Vm]()
            for vm in scope.vms:
                yield 1
                if self._is_reported(vm) and vm.address:
                    vms.append(self._with_address(vm, holders[vm.address], checks))
                else:
                    vms.append(vm)
            after[scope.name] = replace(scope, vms=tuple(vms))
        return after

    def _is_reported(self, vm: Vm) -> bool:
        return vm.host == self._host and vm.id in self.vms

    def _with_power(self, vm: Vm) -> Vm:
        if vm.host == self._host and vm.name in self._missing:
            return replace(vm, power=Power.UNKNOWN)
        if not self._is_reported(vm):
            return vm
        is_running = self.vms[vm.id].is_running
        return replace(vm, power=Power.RUNNING if is_running else Power.STOPPED)

    def _choose_holders(self, vms: Iterable[Vm]) -> Steps[dict[str, str]]:
        """Which of several VMs on this host has an address, by address: a fleet has it once there.

        One that runs rather than one that does not, and else the one that has it already.
        """
        addresses, ranks = self._engine.board.addresses, dict[str, tuple[tuple[bool, bool], str]]()
        for vm in vms:
            yield 1
            if vm.host == self._host and vm.address:
                rank = vm.power.is_off, not addresses.has(vm.address, vm.name)
                best = ranks.get(vm.address)
                if best is None or rank < best[0]:
                    ranks[vm.address] = rank, vm.name
        return {address: name for address, (_, name) in ranks.items()}

    def _with_address(self, vm: Vm, holder: str, checks: ReportChecks) -> Vm:
        if holder != vm.name:
            self.address_problems.append(
                f"VM {vm.name!r}: {vm.address} is the address of VM {holder!r} on this host too,"
                " which keeps it; expected unique addresses"
            )
            return replace(vm, address="", is_address_taken=False)
        is_taken = checks.is_address_taken(vm)
        if is_taken and (problem := checks.describe_holder(vm)):
            self.address_problems.append(problem)
        return replace(vm, is_address_taken=is_taken)


def limit_lines(lines: Sequence[str]) -> tuple[str, ...]:
    kept = [each[:NOT_ACCEPTED_LENGTH_MAX] for each in lines[:NOT_ACCEPTED_MAX]]
    more = len(lines) - len(kept)
    return (*kept, f"and {more} more VMs") if more else tuple(kept)


class VmIdentity(msgspec.Struct):
    """What a VM that is not accepted is called. The rest of it is skipped, however large."""

    name: msgspec.Raw = msgspec.Raw(b"null")
    id: msgspec.Raw = msgspec.Raw(b"null")


def _identify(encoded: msgspec.Raw) -> tuple[str, str]:
    """The name and the id of a VM that is not accepted; empty if it has none."""
    try:
        vm = msgspec.json.decode(encoded, type=VmIdentity)
    except UNDECODABLE:
        return "", ""
    return _decode_text(vm.name), _decode_text(vm.id)


def _decode_text(encoded: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(encoded, type=str)
    except UNDECODABLE:
        return ""


def _decode(encoded: msgspec.Raw) -> ReportedVm:
    """Invalid, in one line, if it is not a VM that can be in a fleet."""
    if len(encoded) > VM_BYTES_MAX:
        raise Invalid(f"it has {len(encoded)} bytes; at most {VM_BYTES_MAX} are accepted")
    try:
        fields = msgspec.json.decode(encoded, type=dict[str, Any])
    except UNDECODABLE as error:
        raise Invalid(f"not a JSON object: {error}") from error
    values = {name: each for name, each in fields.items() if each != ""}
    try:
        vm = convert(values, ReportedVm)
        unmovable = "".join(each if each.isprintable() else " " for each in vm.unmovable)
        return replace(vm, addresses=tuple(map(parse_address, vm.addresses)), unmovable=unmovable)
    except FieldError as error:
        path, message = explain(error, values, VM_SCHEMA)
        raise Invalid(f"{format_path(path)}: {message}") from error
    except ValueError as error:
        raise Invalid(f"addresses: {error}") from error
