"""A fleet from what libvirt tells: domain XML to values, and a fleet brought in line with them.
Pure: nobody is asked here.

What Forewarn needs and libvirt does not know stands in the domain's metadata, in an element of
ours:

    <metadata>
      <forewarn:vm xmlns:forewarn="urn:forewarn:vm:1" scope="web" kind="availability-set"
      update-domain="1" fault-domain="0"/>
    </metadata>
"""

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from xml.etree import ElementTree

import msgspec
from msgspec.structs import replace

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.errors import Invalid
from forewarn.fleetfile.schema import Fleet

NAMESPACE = "urn:forewarn:vm:1"
KINDS = [kind.value for kind in ScopeKind]
DOMAIN_MAX = 99


class Discovered(msgspec.Struct, frozen=True, kw_only=True):
    """A domain of a host. What its metadata does not say is None or empty."""

    name: str
    id: str
    host: str
    mac: str = ""
    address: str = ""
    is_active: bool = True
    is_ignored: bool = False
    scope: str = ""
    kind: ScopeKind | None = None
    update_domain: int | None = None
    fault_domain: int | None = None


def parse(
    xml: str, *, host: str, is_active: bool, leases: Mapping[str, Sequence[str]]
) -> Discovered:
    """A domain from its XML. `leases` are the addresses by MAC."""
    root = ElementTree.fromstring(xml)  # noqa: S314 what libvirt wrote, with libvirt's limits
    name, ours = root.findtext("name", ""), root.find(f"metadata/{{{NAMESPACE}}}vm")
    told = {} if ours is None else dict(ours.attrib)
    macs = [mac.get("address", "").lower() for mac in root.iterfind("devices/interface/mac")]
    kind = told.get("kind")
    if kind is not None and kind not in KINDS:
        raise _misfit(name, "kind", kind, f"one of {', '.join(KINDS)}")
    return Discovered(
        name=name,
        id=root.findtext("uuid", "").lower(),
        host=host,
        mac=macs[0] if macs else "",
        address=_address([address for mac in macs for address in leases.get(mac, ())]),
        is_active=is_active,
        is_ignored=told.get("ignore") == "yes",
        scope=told.get("scope", ""),
        kind=None if kind is None else ScopeKind(kind),
        update_domain=_number(name, told, "update-domain"),
        fault_domain=_number(name, told, "fault-domain"),
    )


def synced(fleet: Fleet, domains: Iterable[Discovered], hosts: Collection[str]) -> Fleet:
    """The fleet as libvirt tells it for the `hosts` that were looked at; of other hosts nothing is
    known, so nothing changes.

    A VM that is known, by id or else by name, keeps its scope, its domains and what its instance
    tells, unless its domain's metadata say otherwise. One that is new and whose metadata name no
    scope has a scope of its own.
    """
    found = _once_each(domains)
    _refuse_namesakes(found)
    _refuse_two_kinds(found)
    seen = {domain.id for domain in found}
    known = [(scope.name, vm) for scope in fleet.scopes for vm in scope.vms]
    by_id = {vm.id: (scope, vm) for scope, vm in known if vm.id}
    by_name = {
        vm.name: (scope, vm)
        for scope, vm in known
        if not vm.id or (vm.id not in seen and vm.host in ("", *hosts))
    }
    scopes = {scope.name: scope for scope in fleet.scopes}
    leaving = {vm.name for _, vm in known if vm.host in hosts}
    coming: dict[str, list[tuple[str, Vm]]] = {}
    for domain in found:
        home, vm = by_id.get(domain.id) or by_name.get(domain.name) or ("", Vm(name=domain.name))
        was = vm.name if home else ""
        leaving.add(was)
        name = domain.scope or home or domain.name
        if name in scopes and not (domain.scope or home):
            why = f"domain {name!r} is in no scope, and its own would be called {name!r}, which is taken"
            raise Invalid(f"{why}; expected metadata with a scope", domain=name)
        old = scopes.get(name) or Scope(
            name=name, kind=ScopeKind.AVAILABILITY_SET if domain.scope else ScopeKind.VM
        )
        scopes[name] = replace(old, kind=domain.kind or old.kind)
        coming.setdefault(name, []).append((was, _merged(vm, domain)))
    filled = [_filled(scope, leaving, coming.get(name, [])) for name, scope in scopes.items()]
    _refuse_namesakes(vm for scope in filled for vm in scope.vms)
    kept = tuple(scope for scope in filled if scope.vms or scope.kind is not ScopeKind.VM)
    return Fleet(scopes=kept, hosts=tuple(dict.fromkeys((*fleet.hosts, *hosts))))


def _filled(scope: Scope, leaving: Collection[str], coming: Sequence[tuple[str, Vm]]) -> Scope:
    """The scope with its members as they are now, each in its old place.

    `coming` has the names they had; new ones had none.
    """
    now, old = dict(coming), {vm.name for vm in scope.vms}
    stay = [now.get(vm.name, vm) for vm in scope.vms if vm.name in now or vm.name not in leaving]
    return replace(scope, vms=(*stay, *(vm for was, vm in coming if was not in old)))


def _refuse_namesakes(vms: Iterable[Vm | Discovered]) -> None:
    """A fleet knows a VM by its name.

    The other one may stand on a host that nobody asked, and must not be lost.
    """
    first: dict[str, Vm | Discovered] = {}
    for vm in vms:
        other = first.setdefault(vm.name, vm)
        if other is not vm:
            both = " and ".join(
                f"{one.id or 'one without an id'} on {one.host or 'no host'}" for one in (other, vm)
            )
            why = f"two VMs would be called {vm.name!r}: {both}"
            raise Invalid(
                f'{why}; expected a name for each, or metadata with ignore="yes" for one',
                domain=vm.name,
            )


def _refuse_two_kinds(domains: Iterable[Discovered]) -> None:
    told: dict[str, Discovered] = {}
    for domain in domains:
        other = told.setdefault(domain.scope, domain) if domain.scope and domain.kind else domain
        if other.kind is not domain.kind:
            both = " and ".join(f"{one.kind} by domain {one.name!r}" for one in (other, domain))
            raise Invalid(
                f"scope {domain.scope!r} is called {both}; expected one kind", scope=domain.scope
            )


def _once_each(domains: Iterable[Discovered]) -> list[Discovered]:
    """A domain that is defined on several hosts counts where it runs."""
    best: dict[str, Discovered] = {}
    for domain in domains:
        if not domain.is_ignored and (
            domain.id not in best or (domain.is_active and not best[domain.id].is_active)
        ):
            best[domain.id] = domain
    return list(best.values())


def _merged(vm: Vm, domain: Discovered) -> Vm:
    return replace(
        vm,
        name=domain.name,
        id=domain.id,
        host=domain.host,
        address=domain.address or vm.address,
        update_domain=vm.update_domain if domain.update_domain is None else domain.update_domain,
        fault_domain=vm.fault_domain if domain.fault_domain is None else domain.fault_domain,
        instance=replace(vm.instance, mac=domain.mac) if domain.mac else vm.instance,
    )


def _address(addresses: Iterable[str]) -> str:
    """The first IPv4 address, else the first other one that is not link-local: a VM calls us from
    it.
    """
    found = [ipaddress.ip_address(address) for address in addresses]
    usable = [address for address in found if not address.is_link_local]
    return str(min(usable, key=lambda address: address.version, default=""))


def _number(name: str, told: Mapping[str, str], attribute: str) -> int | None:
    text = told.get(attribute)
    if text is None:
        return None
    if not text.isdecimal() or not text.isascii() or int(text) > DOMAIN_MAX:
        raise _misfit(name, attribute, text, f"a whole number from 0 to {DOMAIN_MAX}")
    return int(text)


def _misfit(name: str, attribute: str, text: str, expected: str) -> Invalid:
    return Invalid(
        f"metadata of domain {name!r}: {attribute}: expected {expected}, got {text!r}", domain=name
    )
