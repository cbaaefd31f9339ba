"""Updates a fleet to match the domains of its hosts. Pure: makes no calls."""

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.errors import Invalid
from forewarn.fleetfile.parser import Fleet
from forewarn.platform.libvirt.domain_xml import DiscoveredVm
from forewarn.steps import Steps, at_once

KnownVm = tuple[str, Vm]
"""A VM of the fleet, after the name of its scope."""


def sync_fleet(
    fleet: Fleet,
    domains: Iterable[DiscoveredVm],
    hosts: Collection[str],
    problems: list[str] | None = None,
) -> Fleet:
    """Return the fleet updated from the `hosts` that were queried; other hosts stay unchanged.

    A known VM, by id or else by name, keeps its scope, domains and instance metadata unless its
    domain's metadata overrides them. A new VM without a scope gets one of its own. A domain that
    does not fit is refused; with a list of `problems` it is named there, and its VM stays as it is.
    """
    return at_once(sync_in_steps(fleet, domains, hosts, problems))


def sync_in_steps(
    fleet: Fleet,
    domains: Iterable[DiscoveredVm],
    hosts: Collection[str],
    problems: list[str] | None = None,
) -> Steps[Fleet]:
    """As `sync_fleet`, in steps."""
    found, removed, names = yield from _match(fleet, _deduplicate(domains), hosts)
    scopes = {scope.name: scope for scope in fleet.scopes}
    kinds: dict[str, DiscoveredVm] = {}
    added: dict[str, list[tuple[str, Vm]]] = {}
    for domain, home, vm in found:
        yield 1
        name = domain.scope or home or domain.name
        old = scopes.get(name) or Scope(
            name=name, kind=ScopeKind.AVAILABILITY_SET if domain.scope else ScopeKind.VM
        )
        try:
            _refuse_duplicate_name(names, domain)
            _refuse_conflicting_kind(kinds, domain)
            if name in scopes and not (domain.scope or home):
                raise Invalid(
                    f"domain {name!r} names no scope, and a scope {name!r} already exists;"
                    " expected metadata with a scope",
                    domain=name,
                )
        except Invalid as error:
            if problems is None:
                raise
            problems.append(error.message)
            removed.discard(vm.name)
            continue
        scopes[name] = replace(old, kind=domain.kind or old.kind)
        added.setdefault(name, []).append((vm.name if home else "", _merge(vm, domain)))
    kept = list[Scope]()
    for name, old in scopes.items():
        scope = _replace_vms(old, removed, added.get(name, []))
        yield 1 + len(scope.vms)
        if scope.vms or scope.kind is not ScopeKind.VM:
            kept.append(scope)
    return Fleet(scopes=tuple(kept), hosts=tuple(dict.fromkeys((*fleet.hosts, *hosts))))


def _match(
    fleet: Fleet, domains: Sequence[DiscoveredVm], hosts: Collection[str]
) -> Steps[tuple[list[tuple[DiscoveredVm, str, Vm]], set[str], dict[str, Vm | DiscoveredVm]]]:
    """Each domain with the scope of its VM, empty if it is new, and the VM.

    Also the names of VMs that are no longer where they were, and the others by their name.
    """
    seen = {domain.id for domain in domains}
    known, by_id, by_name = list[KnownVm](), dict[str, KnownVm](), dict[str, KnownVm]()
    for scope in fleet.scopes:
        yield 1 + len(scope.vms)
        for vm in scope.vms:
            known.append((scope.name, vm))
            if vm.id:
                by_id[vm.id] = known[-1]
            if not vm.id or (vm.id not in seen and vm.host in ("", *hosts)):
                by_name[vm.name] = known[-1]
    found, removed = list[tuple[DiscoveredVm, str, Vm]](), set[str]()
    for domain in domains:
        yield 1
        new = "", Vm(name=domain.name)
        home, vm = by_id.get(domain.id) or by_name.get(domain.name) or new
        found.append((domain, home, vm))
        if home:
            removed.add(vm.name)
    removed |= {vm.name for _, vm in known if vm.host in hosts}
    return found, removed, {vm.name: vm for _, vm in known if vm.name not in removed}


def _replace_vms(scope: Scope, removed: Collection[str], added: Sequence[tuple[str, Vm]]) -> Scope:
    """Return the scope with its present VMs, in their old order.

    `added` has each VM with its old name, empty if it is new.
    """
    new, old = dict(added), {vm.name for vm in scope.vms}
    kept = [new.get(vm.name, vm) for vm in scope.vms if vm.name in new or vm.name not in removed]
    return replace(scope, vms=(*kept, *(vm for name, vm in added if name not in old)))


def _refuse_duplicate_name(names: dict[str, Vm | DiscoveredVm], domain: DiscoveredVm) -> None:
    """A VM's name identifies it. The other one may be on a host that was not queried."""
    other = names.setdefault(domain.name, domain)
    if other is not domain:
        two = (other, domain) if isinstance(other, DiscoveredVm) else (domain, other)
        both = " and ".join(
            f"{each.id or 'one without an id'} on {each.host or 'no host'}" for each in two
        )
        raise Invalid(
            f"two VMs are named {domain.name!r}: {both};"
            ' expected unique names, or metadata with ignore="yes" for one',
            domain=domain.name,
        )


def _refuse_conflicting_kind(kinds: dict[str, DiscoveredVm], domain: DiscoveredVm) -> None:
    other = kinds.setdefault(domain.scope, domain) if domain.scope and domain.kind else domain
    if other.kind is not domain.kind:
        raise Invalid(
            f"scope {domain.scope!r} is {other.kind} in domain {other.name!r}"
            f" and {domain.kind} in domain {domain.name!r}; expected one kind",
            scope=domain.scope,
        )


def _deduplicate(domains: Iterable[DiscoveredVm]) -> list[DiscoveredVm]:
    """A domain that is defined on several hosts counts where it runs."""
    best: dict[str, DiscoveredVm] = {}
    for domain in domains:
        key = domain.id or domain.name
        other = best.get(key)
        if domain.ignore != "yes" and (other is None or domain.is_active > other.is_active):
            best[key] = domain
    return list(best.values())


def _merge(vm: Vm, domain: DiscoveredVm) -> Vm:
    return replace(
        vm,
        name=domain.name,
        id=domain.id,
        host=domain.host,
        address=_choose_address(vm.address, domain.addresses),
        update_domain=vm.update_domain if domain.update_domain is None else domain.update_domain,
        fault_domain=vm.fault_domain if domain.fault_domain is None else domain.fault_domain,
        instance=replace(vm.instance, mac=domain.macs[0]) if domain.macs else vm.instance,
    )


def _choose_address(known: str, addresses: Sequence[str]) -> str:
    """Keep the known address while the VM has it: it may be the one that polls come from."""
    return known if known in addresses or not addresses else addresses[0]
