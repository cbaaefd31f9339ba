"""Turns domain XML into values. Pure: makes no calls.

What Forewarn needs and libvirt does not know is in the domain's metadata, in our own element:

    <metadata>
      <forewarn:vm xmlns:forewarn="urn:forewarn:vm:1" scope="web" kind="availability-set"
                   update-domain="1" fault-domain="0"/>
    </metadata>
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree

import msgspec

from forewarn.core.fleet import ScopeKind
from forewarn.errors import Invalid
from forewarn.fleetfile.schema import Domain as DomainField

NAMESPACE = "urn:forewarn:vm:1"
Leases = Mapping[str, Sequence[str]]
"""The addresses that a MAC has leased, the preferred ones first."""


class DomainMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What our element may say. An attribute that it omits is None or empty."""

    scope: str = ""
    kind: ScopeKind | None = None
    update_domain: DomainField | None = None
    fault_domain: DomainField | None = None
    ignore: str = ""


class DiscoveredVm(DomainMetadata, frozen=True, kw_only=True):
    """A domain on a host, with its metadata. The preferred one of its addresses comes first.

    `ports` are the names of its interfaces on the host; a domain that is off has none. `unmovable`
    is why it cannot run on another host.
    """

    name: str
    id: str
    host: str
    macs: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    memory_bytes: int = 0
    is_active: bool = True
    unmovable: str = ""


def parse(
    xml: str, *, host: str, is_active: bool, leases: Leases, problems: list[Invalid] | None = None
) -> DiscoveredVm:
    """Parse a domain's XML. Invalid if our element in its metadata is.

    With a list of `problems` that is added there, and the element is ignored.
    """
    root = ElementTree.fromstring(xml)  # noqa: S314 what libvirt wrote, with libvirt's limits
    name, ours = root.findtext("name", ""), root.find(f"metadata/{{{NAMESPACE}}}vm")
    attributes = ours.attrib if ours is not None else {}
    try:
        metadata = msgspec.convert(attributes, DomainMetadata, strict=False)
    except msgspec.ValidationError as error:
        problem = Invalid(
            f"metadata of domain {name!r}: {error}, got {attributes};"
            f" kind is one of {', '.join(ScopeKind)}, domains are numbers from 0 to 99",
            domain=name,
        )
        if problems is None:
            raise problem from error
        problems.append(problem)
        metadata = DomainMetadata()
    ports = [target.get("dev", "") for target in root.iterfind("devices/interface/target")]
    macs = [mac.get("address", "").lower() for mac in root.iterfind("devices/interface/mac")]
    return DiscoveredVm(
        **msgspec.structs.asdict(metadata),
        name=name,
        id=root.findtext("uuid", "").lower(),
        host=host,
        macs=tuple(macs),
        addresses=sort_addresses(address for mac in macs for address in leases.get(mac, ())),
        ports=tuple(ports) if is_active else (),
        memory_bytes=int(root.findtext("memory", "0")) * 1024,  # libvirt always writes KiB
        is_active=is_active,
    )


def sort_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return IPv4 addresses first, else in their order, without link-local ones."""
    parsed = [ipaddress.ip_address(address) for address in addresses]
    usable = [address for address in parsed if not address.is_link_local]
    return tuple(map(str, sorted(usable, key=lambda address: address.version)))
