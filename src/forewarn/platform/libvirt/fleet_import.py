"""Updates a fleet to match the domains of its hosts. Pure: makes no calls."""

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.errors import Invalid
from forewarn.fleetfile.parser import Fleet
from forewarn.platform.libvirt.domain_xml import DiscoveredVm


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
    unique = _deduplicate(domains)
    seen = {domain.id for domain in unique}
    known = [(scope.name, vm) for scope in fleet.scopes for vm in scope.vms]
    by_id = {vm.id: (scope, vm) for scope, vm in known if vm.id}
    by_name = {
        vm.name: (scope, vm)
        for scope, vm in known
        if not vm.id or (vm.id not in seen and vm.host in ("", *hosts))
    }
    scopes = {scope.name: scope for scope in fleet.scopes}
    found = [
        (domain, *(by_id.get(domain.id) or by_name.get(domain.name) or ("", Vm(name=domain.name))))
        for domain in unique
    ]
    removed = {vm.name for _, vm in known if vm.host in hosts}
    removed |= {vm.name for _, home, vm in found if home}
    names: dict[str, Vm | DiscoveredVm] = {vm.name: vm for _, vm in known if vm.name not in removed}
    kinds: dict[str, DiscoveredVm] = {}
    added: dict[str, list[tuple[str, Vm]]] = {}
    for domain, home, vm in found:
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
    updated = [_replace_vms(scope, removed, added.get(name, [])) for name, scope in scopes.items()]
    kept = tuple(scope for scope in updated if scope.vms or scope.kind is not ScopeKind.VM)
    return Fleet(scopes=kept, hosts=tuple(dict.fromkeys((*fleet.hosts, *hosts))))


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
        other = best.get(domain.id)
        if domain.ignore != "yes" and (other is None or domain.is_active > other.is_active):
            best[domain.id] = domain
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
