"""Merges what a host daemon reports into the fleet: the VMs of its host and their scopes.

The rules are those of `fleet sync libvirt`. They are applied to the scopes that the report concerns
and to no others, so that the work grows with the host and not with the fleet.
"""

import ipaddress
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from forewarn.core.command import UpdateMembers
from forewarn.core.fleet import Power, Scope, ScopeKind, Vm
from forewarn.core.machine import decide
from forewarn.engine.engine import Engine
from forewarn.engine.fleet_apply import Commands, check_size, definition
from forewarn.engine.managed_hosts import HostedVm, ManagedHosts
from forewarn.errors import Invalid
from forewarn.fleetfile.parser import Fleet
from forewarn.fleetfile.yaml_source import FieldError, convert, explain, format_path
from forewarn.platform.libvirt.domain_xml import DiscoveredVm
from forewarn.platform.libvirt.fleet_import import sync_fleet
from forewarn.platform.remote import ReportedVm

EMPTY_SCOPES_MAX = 1000
SCOPES_LISTED_MAX = 5
PROBLEMS_MAX = 100
"""In a response; a daemon reads a limited number of bytes."""


class HostInventory:
    """One report of a host. `problems` name the VMs that do not fit into the fleet.

    What is known of such a VM stays as it is. New ones may be placed in these `scopes`, or in any
    if there are none.
    """

    def __init__(
        self,
        engine: Engine,
        managed: ManagedHosts,
        host: str,
        vms: Iterable[dict[str, Any]],
        scopes: Collection[str] = (),
    ) -> None:
        self._engine = engine
        self._managed = managed
        self._host = host
        self._refused_ids: set[str] = set()
        self.problems: list[str] = []
        self._domains = {each.id: each for each in self._parse(vms)}
        self._refuse_scopes(scopes)
        self.vms = {
            vm_id: HostedVm(domain.memory_bytes, domain.is_active)
            for vm_id, domain in self._domains.items()
        }

    def _parse(self, vms: Iterable[dict[str, Any]]) -> Iterator[DiscoveredVm]:
        for values in vms:
            try:
                vm = _convert(values)
            except Invalid as error:
                self.problems.append(error.message)
                self._refused_ids.add(str(values.get("id")).lower())
                continue
            fields = asdict(vm) | {"id": vm.id.lower()}
            is_active = fields.pop("power") == Power.RUNNING
            yield DiscoveredVm(**fields, host=self._host, is_active=is_active)

    def _refuse_scopes(self, scopes: Collection[str]) -> None:
        """Refuse VMs outside of these scopes, if there are any, and too many new scopes.

        Scopes stay when they are empty.
        """
        board = self._engine.board
        is_full = len(board.scopes) - len(board.vms) >= EMPTY_SCOPES_MAX
        allowed, listed = frozenset(scopes), ", ".join(sorted(scopes)[:SCOPES_LISTED_MAX])
        for domain in list(self._domains.values()):
            other = self._find_scope(domain) if scopes else ""
            if other and other not in allowed:
                problem = (
                    f"the token of {self._host} is not for the scope {other!r}; expected a scope of"
                    f" its own, or one of the token's {len(scopes)}, such as {listed}"
                )
            elif is_full and domain.scope and domain.scope not in board.scopes:
                problem = (
                    f"{EMPTY_SCOPES_MAX} scopes have no VM; expected a scope that exists,"
                    f" got {domain.scope!r}"
                )
            else:
                continue
            del self._domains[domain.id]
            self._refused_ids.add(domain.id)
            self.problems.append(f"VM {domain.name!r}: {problem}")

    def _find_scope(self, domain: DiscoveredVm) -> str:
        """The scope that a VM would be in; empty if it is its own, or if it is there already."""
        board = self._engine.board
        name = board.ids.get(domain.id, domain.name)
        if name not in board.vms:
            return domain.scope
        home = board.vms[name].scope
        is_there = home.kind is ScopeKind.VM or name in board.hosts.get(self._host, ())
        is_new = domain.scope not in ("", home.name)
        return domain.scope if is_new else "" if is_there else home.name

    def plan(self) -> Commands:
        """The commands that bring the fleet up to date, those that free a VM first.

        The record of the host has the VMs of this report already.
        """
        present = {scope.name: scope for scope in self._concerned()}
        domains, found = self._select(present.values())
        part = Fleet(scopes=tuple(map(definition, present.values())))
        problems = list[str]()
        after = {
            scope.name: scope for scope in sync_fleet(part, domains, [self._host], problems).scopes
        }
        staying = {vm.id or vm.name for scope in after.values() for vm in scope.vms}
        commands = list[tuple[str, UpdateMembers]]()
        for name in sorted(present.keys() | after.keys()):
            old = present.get(name) or self._engine.new_scope(name)
            new = after.get(name) or replace(old, vms=())
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
        self.problems += [each for each in problems if each not in self.problems]
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

    def _select(self, scopes: Iterable[Scope]) -> tuple[list[DiscoveredVm], frozenset[str]]:
        """The domains that count, and the VMs that were found here after their host was lost.

        A VM that another host runs is there. One that is under impact keeps its name and scope.
        """
        domains, found, managed = dict(self._domains), set[str](), self._managed
        for scope in scopes:
            busy = {impact.vm for impact in scope.impacts if not impact.is_over}
            for vm in scope.vms:
                domain = domains.get(vm.id)
                place = managed.choose_host(vm.id, vm.host)
                if domain is not None and place == self._host:
                    if vm.name in busy:
                        domains[vm.id] = replace(domain, name=vm.name, scope="", kind=None)
                    if managed.is_unreachable(vm.host) and domain.is_active:
                        found.add(vm.name)
                elif vm.host == self._host and (place or vm.id in self._refused_ids):
                    domains[vm.id] = DiscoveredVm(
                        name=vm.name, id=vm.id, host=place or vm.host, is_active=False
                    )
                elif domain is not None:
                    del domains[vm.id]
        return list(domains.values()), frozenset(found)

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
        pairs = [(known.get(vm.name), self._with_power(vm)) for vm in new.vms]
        return UpdateMembers(
            host=self._host,
            kind=new.kind,
            vms=tuple((old_vm.host if old_vm else "", vm) for old_vm, vm in pairs if old_vm != vm),
            gone=tuple(vm.name for vm in lost if (vm.id or vm.name) not in staying),
            left=tuple(vm.name for vm in lost if (vm.id or vm.name) in staying),
            found=found,
        )

    def _with_power(self, vm: Vm) -> Vm:
        reported = self.vms.get(vm.id) if vm.host == self._host else None
        if reported is None:
            return vm
        return replace(vm, power=Power.RUNNING if reported.is_running else Power.STOPPED)


def _convert(values: dict[str, Any]) -> ReportedVm:
    """Invalid, in one line, if it is not a VM that can be in a fleet."""
    try:
        vm = convert({name: each for name, each in values.items() if each != ""}, ReportedVm)
        addresses = tuple(str(ipaddress.ip_address(address)) for address in vm.addresses)
        return replace(vm, addresses=addresses)
    except FieldError as error:
        path, message = explain(error, values, msgspec.json.schema(ReportedVm))
        problem = f"{format_path(path)}: {message}"
    except ValueError as error:
        problem = f"addresses: {error}"
    raise Invalid(f"VM {str(values.get('name'))[:80]!r}: {problem}")
