"""Which VMs of a host's report are refused: those outside of its token's scopes, and names that
would make the fleet one that no fleet file can describe.

A token that is limited to scopes *covers* the VMs in them. Any other VM it may report where that
already is: on this host, or new in a scope of its own. A standalone VM that another host has is a
*claim*: see `ManagedHosts.choose_host`.
"""

from collections.abc import Collection
from typing import NamedTuple

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.engine.board import Board
from forewarn.engine.index import VmKeys
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.errors import Invalid
from forewarn.platform.libvirt.domain_xml import DiscoveredVm

SCOPES_LISTED_MAX = 5


class KnownVm(NamedTuple):
    """A VM of the fleet and its scope."""

    vm: Vm
    home: Scope


class ReportChecks:
    """The checks of one report. `scopes` are those of the token; without any it covers all."""

    def __init__(
        self, board: Board, managed: ManagedHosts, host: str, scopes: Collection[str]
    ) -> None:
        self._board = board
        self._managed = managed
        self._host = host
        self._scopes = frozenset(scopes)
        self._members: dict[str, tuple[Scope, dict[str, Vm]]] = {}
        self._foreign_holders: dict[str, list[str]] = {}
        self._seen_ids, self._seen_names, self._seen_scopes = VmKeys(), VmKeys(), VmKeys()

    def check(self, domain: DiscoveredVm) -> None:
        """Invalid if the VM is refused. Otherwise those that follow must not clash with it."""
        try:
            self._check_scope(domain)
            self._check_name(domain)
            self._check_scope_name(domain)
        except Invalid as error:
            raise Invalid(f"VM {domain.name!r}: {error.message}") from error
        self._seen_ids.assign(domain.id, domain.name)
        self._seen_names.assign(domain.name.lower(), domain.name)

    def covers(self, scope: str) -> bool:
        return not self._scopes or scope in self._scopes

    def is_claim(self, domain: DiscoveredVm) -> bool:
        """Whether this host says of a VM that another host has that it is here.

        The token does not cover the VM, so that the other host has precedence. A VM that this host
        has had before, or that no other host has any more, is not a claim.
        """
        known = self._find(domain)
        if known is None or self.covers(domain.scope or known.home.name):
            return False
        if known.vm.host == self._host and self._managed.reporting(domain.id) == (self._host,):
            return False
        record = self._managed.find(self._host)
        before = record.vms.get(domain.id) if record else None
        return before.is_claim if before else known.vm.host != self._host

    # --- scopes

    def _check_scope(self, domain: DiscoveredVm) -> None:
        if domain.id in self._board.shared_ids:
            raise Invalid(f"several VMs have the id {domain.id}; expected unique ids")
        if not self._scopes:
            return
        known = self._find(domain)
        if known is None and not domain.scope and domain.kind not in (None, ScopeKind.VM):
            # The scope of its name could be joined by the VMs of others.
            raise Invalid(
                f"the token of {self._host} is not for all scopes, and a scope of the kind"
                f" {domain.kind} can have several VMs; {self._expected()}"
            )
        home = known.home.name if known else ""
        wanted = domain.scope or home
        if wanted != home and not self.covers(wanted):
            raise self._not_covered(wanted)
        if known is None or self.covers(home) or known.vm.host == self._host:
            return
        if known.home.kind is not ScopeKind.VM or wanted != home:
            raise self._not_covered(home)
        self._check_claim(known.vm)

    def _check_claim(self, vm: Vm) -> None:
        """Refuse a standalone VM of another host, unless that had a daemon and may have lost it.

        A VM without a host was declared by an operator. One of a host that was forgotten and left
        running may still run there.
        """
        managed, host = self._managed, vm.host
        if managed.is_forgotten(host) and not managed.may_run_vms(host):
            return
        if not host:
            raise Invalid(f"it has no host in the fleet; {self._expected()}")
        if managed.find(host) is None:
            raise Invalid(f"it is on {host}, which has no daemon; {self._expected()}")
        if not vm.id and not managed.is_unreachable(host):
            raise Invalid(f"it is on {host}, whose daemon is connected; {self._expected()}")

    def _not_covered(self, scope: str) -> Invalid:
        return Invalid(
            f"the token of {self._host} is not for the scope {scope!r}; {self._expected()}"
        )

    def _expected(self) -> str:
        listed = ", ".join(sorted(self._scopes)[:SCOPES_LISTED_MAX])
        count = len(self._scopes)
        return f"expected a scope of its own, or one of the token's {count}, such as {listed}"

    def _find(self, domain: DiscoveredVm) -> KnownVm | None:
        """The VM of the fleet that a report means: the one with its id, or else with its name."""
        return self.find(self._board.ids.get(domain.id, domain.name))

    def find(self, name: str) -> KnownVm | None:
        """A VM of the fleet by its name. Each scope is searched once, however many VMs are."""
        published = self._board.vms.get(name)
        if published is None:
            return None
        scope = published.scope
        searched, members = self._members.get(scope.name, (None, {}))
        if searched is not scope:  # new to this report, or changed since
            members = {vm.name: vm for vm in scope.vms}
            self._members[scope.name] = scope, members
        return KnownVm(members[name], scope)

    # --- addresses

    def select_addresses(self, domain: DiscoveredVm) -> tuple[tuple[str, ...], str]:
        """The addresses that the VM may have, and why it may not have the others.

        A VM that another host has, in a scope that the token does not cover, keeps its address.
        """
        own, problem, kept = self._own_names(domain), "", list[str]()
        for address in domain.addresses if self._scopes else ():
            has_it = any(self._board.addresses.has(address, name) for name in own)
            holders = () if has_it else self._find_foreign_holders(address)
            holder = next((name for name in holders if name not in own), "")
            if not holder:
                kept.append(address)
                continue
            problem = problem or (
                f"VM {domain.name!r}: {address} is the address of VM {holder!r}, which keeps it,"
                f" and the token of {self._host} is not for the scope of that VM"
            )
        return (tuple(kept), problem) if problem else (domain.addresses, "")

    def _find_foreign_holders(self, address: str) -> list[str]:
        board = self._board
        if address not in self._foreign_holders:
            here = board.hosts.get(self._host, set())
            self._foreign_holders[address] = [
                name
                for name in board.addresses.holders(address)
                if name not in here and not self.covers(board.vms[name].scope.name)
            ]
        return self._foreign_holders[address]

    def is_address_taken(self, vm: Vm) -> bool:
        """Whether another VM had the address of this one before."""
        addresses = self._board.addresses
        own = {vm.name, self._board.ids.get(vm.id, vm.name)}
        own_count = sum(addresses.has(vm.address, name) for name in own)
        if addresses.count(vm.address) == own_count:
            return False
        return vm.is_address_taken or not own_count

    def describe_holder(self, vm: Vm) -> str:
        """Why the guest of a VM whose address is taken may be refused; empty if it never is.

        If the other VM's host has a daemon too, both guests are known by where they are plugged in.
        """
        holder = self.find(self._board.addresses.get(vm.address, ""))
        if holder is None or self._managed.find(holder.vm.host) is not None:
            return ""
        return (
            f"VM {vm.name!r}: {vm.address} is the address of VM {holder.vm.name!r} on"
            f" {holder.vm.host or 'no host'}, which keeps it; expected unique addresses"
        )

    def _own_names(self, domain: DiscoveredVm) -> set[str]:
        return {domain.name, self._board.ids.get(domain.id, domain.name)}

    # --- names

    def _check_name(self, domain: DiscoveredVm) -> None:
        """Refuse what a fleet file may not have. Names are compared without case there."""
        board, name = self._board, domain.name
        own = self._own_names(domain)
        folded = name.lower()
        named = board.vms_named_like(name) | self._seen_names.holders(folded)
        with_id = board.ids.holders(folded) | self._seen_ids.holders(folded)
        named_like_id = board.vms_named_like(domain.id) | self._seen_names.holders(domain.id)
        for other in sorted(with_id - own):
            raise Invalid(f"its name is the id of VM {other!r}; expected another name")
        for other in sorted(named - own):
            raise Invalid(f"the name of VM {other!r} differs only in case; expected another name")
        for other in sorted(named_like_id - own):
            raise Invalid(f"its id is the name of VM {other!r}; expected another id")

    def _check_scope_name(self, domain: DiscoveredVm) -> None:
        known = self._find(domain)
        scope = domain.scope or (known.home.name if known else domain.name)
        if scope in self._board.scopes:
            return
        others = self._board.scopes_named_like(scope) | self._seen_scopes.holders(scope.lower())
        others -= {scope}
        if others:
            raise Invalid(
                f"the name of scope {min(others)!r} differs from {scope!r} only in case;"
                " expected another name"
            )
        self._seen_scopes.assign(scope.lower(), scope)
