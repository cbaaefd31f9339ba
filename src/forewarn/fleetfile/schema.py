"""The fleet file.

Its entries are types, and the types are the parser, the JSON Schema and the words of the errors.
"""

import functools
import hashlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from forewarn.core.fleet import (
    DEFAULT_INSTANCE,
    Approval,
    AutoApprove,
    Budget,
    Instance,
    Policy,
    Scope,
    ScopeKind,
    Vm,
)
from forewarn.core.timing import TERMINATE_NOTICE_MAX, TERMINATE_NOTICE_MIN
from forewarn.errors import Invalid
from forewarn.fleetfile.yaml_source import Misfit, Path, convert, field, line_of, read, refusal

COUNT_MAX = 100_000
VMS_PER_SCOPE_MAX = 1_000
"""A scope is one record that every change of it writes, and one document that all its VMs read."""
# Python's `$` also stands before a last newline; this is the end in Python and in JSON Schema
# alike.
_END = r"$(?!\n)"
_NOTICE = rf"^(?:off|(?:PT)?(?=[0-9])(?:([0-9]{{1,3}})[mM])?(?:([0-9]{{1,3}})[sS])?){_END}"
_IS_ADDRESS = {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}

Name = Annotated[
    str,
    Meta(
        pattern=rf"^[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}{_END}",
        description="a name of 1 to 128 letters, digits, '.', '_' and '-', not starting with '.' or '-'",
    ),
]
Address = Annotated[
    str,
    Meta(
        min_length=2,
        max_length=45,
        description="an IPv4 or IPv6 address",
        extra_json_schema=_IS_ADDRESS,
    ),
]
Subnet = Annotated[
    str, Meta(min_length=3, max_length=49, description="a network such as 10.0.0.0/24")
]
Notice = Annotated[
    str,
    Meta(
        pattern=_NOTICE,
        description="a time from 5m to 15m, such as 10m, 5m30s, 600s or PT10M, or off",
    ),
]
VmId = Annotated[
    str,
    Meta(
        pattern=rf"^[0-9A-Fa-f]{{8}}(-[0-9A-Fa-f]{{4}}){{3}}-[0-9A-Fa-f]{{12}}{_END}",
        description="a UUID",
    ),
]
Mac = Annotated[
    str,
    Meta(
        pattern=rf"^([0-9A-Fa-f]{{2}}[:-]?){{5}}[0-9A-Fa-f]{{2}}{_END}", description="a MAC address"
    ),
]
Domain = Annotated[int, Meta(ge=0, le=99, description="a whole number from 0 to 99")]
Operations = Annotated[int, Meta(ge=1, le=10_000, description="a whole number from 1 to 10000")]
MaxUnavailable = Annotated[
    Annotated[int, Meta(ge=1, le=COUNT_MAX)]
    | Annotated[str, Meta(pattern=rf"^(?:[1-9][0-9]?|100)%{_END}")]
    | None,
    Meta(description="a number of VMs from 1 to 100000, or a percentage from 1% to 100%"),
]
Flag = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, Meta(max_length=256, description="text of at most 256 characters")]
UserData = Annotated[str, Meta(max_length=65_536, description="text of at most 65536 characters")]
Tags = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=512)], Annotated[str, Meta(max_length=256)]],
    Meta(
        max_length=50,
        description="at most 50 tags, a mapping of text (at most 512 characters) to text (at most 256)",
    ),
]


class InstanceEntry(msgspec.Struct, forbid_unknown_fields=True):
    """What the VM may read about itself at /metadata/instance.

    `user_data` is written plainly here and served in base64.
    """

    computer_name: Text = ""
    location: Text = ""
    zone: Text = ""
    size: Text = ""
    os_type: Text = Instance().os_type
    priority: Text = ""
    mac: Mac = msgspec.field(default_factory=str)
    public_address: Address = msgspec.field(default_factory=str)
    subnet: Subnet = msgspec.field(default_factory=str)
    resource_group: Text = ""
    subscription: Text = ""
    publisher: Text = ""
    offer: Text = ""
    sku: Text = ""
    version: Text = ""
    user_data: UserData = ""
    tags: Tags = {}


_UNTOLD = InstanceEntry()


class VmEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One VM.

    Its name is its entry in Resources; names, addresses and ids stand once in the fleet.
    """

    name: Name
    address: Address = msgspec.field(default_factory=str)
    update_domain: Domain = 0
    host: Name = msgspec.field(default_factory=str)
    id: VmId = msgspec.field(default_factory=str)
    fault_domain: Domain = 0
    instance: InstanceEntry = msgspec.field(default_factory=InstanceEntry)


class PolicyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """What the owner of a scope chose."""

    approval: Approval = Policy().approval
    auto_approve: tuple[AutoApprove, ...] = Policy().auto_approve
    terminate_notice: Notice = "5m"
    couple_terminates: Flag = Policy().couple_terminates
    user_operations_max: Operations = Policy().user_operations_max
    max_unavailable: MaxUnavailable = None


_KIND_VM_HAS_ONE_VM = {
    "anyOf": [
        {"required": ["kind"], "properties": {"kind": {"not": {"const": "vm"}}}},
        {"required": ["vms"], "properties": {"vms": {"minItems": 1, "maxItems": 1}}},
    ]
}


class ScopeEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A delivery group: all its VMs see one document."""

    name: Name
    kind: ScopeKind = ScopeKind.VM
    policy: PolicyEntry = msgspec.field(default_factory=PolicyEntry)
    vms: Annotated[
        tuple[VmEntry, ...],
        Meta(
            max_length=VMS_PER_SCOPE_MAX, description=f"a list of at most {VMS_PER_SCOPE_MAX} VMs"
        ),
    ] = ()


class FleetFile(msgspec.Struct, forbid_unknown_fields=True):
    """A fleet: its scopes with their VMs, and hosts that are to be known before a VM stands on
    them.
    """

    scopes: Annotated[
        tuple[Annotated[ScopeEntry, Meta(extra_json_schema=_KIND_VM_HAS_ONE_VM)], ...],
        Meta(max_length=COUNT_MAX, description="a list of at most 100000 scopes"),
    ]
    hosts: Annotated[
        tuple[Name, ...],
        Meta(max_length=COUNT_MAX, description="a list of at most 100000 host names"),
    ] = ()


class Fleet(msgspec.Struct, frozen=True):
    """What a fleet file says. The scopes are new: no events yet, every VM running."""

    scopes: tuple[Scope, ...] = ()
    hosts: tuple[str, ...] = ()


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: lists for tuples, text for enumerations."""
    return msgspec.json.decode(msgspec.json.encode(value), type=dict[str, Any])


SCHEMA = _plain(
    {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(FleetFile)}
)
"""Made from the types above.

What a schema cannot say, the parser says alone: names, addresses and ids that stand twice, a subnet
that is no network, a terminate_notice outside its limits.
"""


class FleetText(NamedTuple):
    """The text of a fleet file, and what an error calls it."""

    name: str
    text: bytes


def parse(text: bytes, source: str) -> Fleet:
    """The fleet of a YAML or JSON text. `source` is what an error calls the text."""
    values = read(text, source)
    try:
        fleet = _fleet(values)
        _refuse_twins(fleet)
    except Misfit as misfit:
        raise refusal(misfit, values, text=text, source=source, schema=SCHEMA) from misfit
    return fleet


def parse_all(sources: Sequence[FleetText]) -> Fleet:
    """The fleet of several files together.

    What must be unique in a fleet must be unique in all of them.
    """
    parts = [parse(source.text, source.name) for source in sources]
    if len(parts) == 1:
        return parts[0]
    fleet = Fleet(
        scopes=tuple(scope for part in parts for scope in part.scopes),
        hosts=tuple(dict.fromkeys(host for part in parts for host in part.hosts)),
    )
    try:
        _refuse_twins(fleet)
    except Twin as twin:
        here, path = _in_its_file(twin.path, sources, parts)
        there, other = _in_its_file(twin.owner, sources, parts)
        line, owner = (
            line_of(here.text, path),
            f"{there.name}:{line_of(there.text, other)}: {field(other)}",
        )
        message = f"{here.name}:{line}: {field(path)}: expected {twin.rule} {owner}, got {_value_at(fleet, twin.path)!r}"
        raise Invalid(message, source=here.name, line=line, field=field(path)) from twin
    return fleet


def _in_its_file(
    path: Path, sources: Sequence[FleetText], parts: Sequence[Fleet]
) -> tuple[FleetText, Path]:
    """The file that a path of the whole fleet leads into, and the path within it."""
    scopes, index, *rest = path
    assert isinstance(index, int), "what must be unique stands in a scope"
    for source, part in zip(sources, parts, strict=True):
        if index < len(part.scopes):
            return source, (scopes, index, *rest)
        index -= len(part.scopes)
    raise AssertionError("the path leads into none of the files")


def _value_at(fleet: Fleet, path: Path) -> object:
    found: Any = fleet
    for step in path:
        found = found[step] if isinstance(step, int) else getattr(found, step)
    return found


def _fleet(values: object) -> Fleet:
    """Scope by scope, so that other threads get their turn in between: a fleet may be large."""
    entries = values.get("scopes") if isinstance(values, dict) else None
    is_list = isinstance(entries, list) and len(entries) <= COUNT_MAX
    file = convert(
        values | {"scopes": []} if isinstance(values, dict) and is_list else values, FleetFile
    )
    places: list[Path] = [("scopes", index) for index in range(len(entries or ()))]
    return Fleet(
        scopes=tuple(
            _scope(convert(entry, ScopeEntry, at), at)
            for entry, at in zip(entries or (), places, strict=True)
        ),
        hosts=tuple(dict.fromkeys(file.hosts)),
    )


def dump(fleet: Fleet) -> dict[str, Any]:
    """The file that says this fleet, defaults left out.

    What happened since (events, power) is no part of a fleet file.
    """
    return msgspec.json.decode(dump_json(fleet), type=dict[str, Any])


def dump_json(fleet: Fleet) -> bytes:
    """The same as JSON. Made scope by scope, so that other threads get their turn in between."""
    scopes = b",".join([msgspec.json.encode(_dump_scope(scope)) for scope in fleet.scopes])
    hosts = b',"hosts":' + msgspec.json.encode(fleet.hosts) if fleet.hosts else b""
    return b'{"scopes":[' + scopes + b"]" + hosts + b"}"


def tag(text: bytes) -> str:
    """Identifies a fleet, as `dump_json` gives it: for a request that is meant for the fleet as it
    was read.
    """
    return hashlib.sha256(text).hexdigest()[:32]


def _scope(entry: ScopeEntry, at: Path) -> Scope:
    if entry.kind is ScopeKind.VM and len(entry.vms) != 1:
        raise Misfit((*at, "vms"), "exactly one VM in a scope of kind vm")
    return Scope(
        name=entry.name,
        kind=entry.kind,
        policy=_policy(entry.policy, (*at, "policy")),
        vms=tuple(_vm(vm, (*at, "vms", index)) for index, vm in enumerate(entry.vms)),
    )


def _policy(entry: PolicyEntry, at: Path) -> Policy:
    return Policy(
        approval=entry.approval,
        auto_approve=tuple(dict.fromkeys(entry.auto_approve)),
        terminate_notice=_notice(entry.terminate_notice, (*at, "terminate_notice")),
        couple_terminates=entry.couple_terminates,
        user_operations_max=entry.user_operations_max,
        max_unavailable=budget_of(entry.max_unavailable),
    )


def budget_of(said: int | str | None) -> Budget | None:
    """What a MaxUnavailable means; None: nothing but the update domains bounds it."""
    if said is None or isinstance(said, int):
        return None if said is None else Budget(said)
    return Budget(int(said.removesuffix("%")), is_percent=True)


def said_of(budget: Budget | None) -> int | str | None:
    """A budget as a file says it."""
    if budget is None:
        return None
    return str(budget) if budget.is_percent else budget.number


def _vm(entry: VmEntry, at: Path) -> Vm:
    return Vm(
        name=entry.name,
        address=_address(entry.address, (*at, "address")),
        update_domain=entry.update_domain,
        host=entry.host,
        id=entry.id.lower(),
        fault_domain=entry.fault_domain,
        instance=_instance(entry.instance, (*at, "instance")),
    )


def _instance(entry: InstanceEntry, at: Path) -> Instance:
    if entry == _UNTOLD:
        return DEFAULT_INSTANCE
    told = msgspec.structs.asdict(entry) | {
        "public_address": _address(entry.public_address, (*at, "public_address")),
        "subnet": _subnet(entry.subnet, (*at, "subnet")),
        "tags": tuple(entry.tags.items()),
    }
    return Instance(**told)


def _address(text: str, at: Path) -> str:
    """In its one normal form, so that the address of a caller can be looked up: no IPv4 in IPv6
    clothes, no zone.
    """
    if not text:
        return ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise Misfit(at) from error
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.scope_id is not None:
        raise Misfit(at)
    return str(address.ipv4_mapped or address)


def _subnet(text: str, at: Path) -> str:
    if not text:
        return ""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise Misfit(at) from error


def _notice(text: str, at: Path) -> timedelta | None:
    match = re.search(_NOTICE, text)
    assert match, "the entry's type has the same pattern"
    if text == "off":
        return None
    notice = timedelta(minutes=int(match[1] or 0), seconds=int(match[2] or 0))
    if not TERMINATE_NOTICE_MIN <= notice <= TERMINATE_NOTICE_MAX:
        raise Misfit(at)
    return notice


def _refuse_twins(fleet: Fleet) -> None:
    """Names are compared without case, as Azure compares them: two that differ in case only would
    be one to many a client.
    """
    scopes = [(scope, ("scopes", index)) for index, scope in enumerate(fleet.scopes)]
    vms = [(vm, (*at, "vms", index)) for scope, at in scopes for index, vm in enumerate(scope.vms)]
    _refuse_twin(((scope.name.lower(), (*at, "name")) for scope, at in scopes), "a scope name")
    _refuse_twin(((vm.name.lower(), (*at, "name")) for vm, at in vms), "a VM name")
    _refuse_twin(((vm.address, (*at, "address")) for vm, at in vms if vm.address), "an address")
    _refuse_twin(((vm.id, (*at, "id")) for vm, at in vms if vm.id), "an id")
    _refuse_names_that_are_ids(vms)


class Twin(Misfit):
    """A value that must be unique and is not: the path of the other one is `owner`."""

    def __init__(self, path: Path, rule: str, owner: Path) -> None:
        super().__init__(path, f"{rule} {field(owner)}")
        self.rule = rule
        self.owner = owner


def _refuse_twin(claims: Iterable[tuple[str, Path]], what: str) -> None:
    owners: dict[str, Path] = {}
    for value, at in claims:
        owner = owners.setdefault(value, at)
        if owner != at:
            raise Twin(at, f"{what} not used by", owner)


def _refuse_names_that_are_ids(vms: Sequence[tuple[Vm, Path]]) -> None:
    """A proxy signs a name or an id, so a VM named like another's id could be taken for it."""
    owners = {vm.id: (vm, at) for vm, at in vms if vm.id}
    for vm, at in vms:
        owner, owner_at = owners.get(vm.name.lower(), (vm, at))
        if owner is not vm:
            raise Twin((*at, "name"), "a VM name that is not", (*owner_at, "id"))


def _dump_scope(scope: Scope) -> dict[str, Any]:
    told = _told(scope, ScopeEntry)
    if "policy" in told:
        told["policy"] = _dump_policy(scope.policy)
    if "vms" in told:
        told["vms"] = [_dump_vm(vm) for vm in scope.vms]
    return told


def _dump_policy(policy: Policy) -> dict[str, Any]:
    told = _told(policy, PolicyEntry)
    if "terminate_notice" in told:
        told["terminate_notice"] = _dump_notice(policy.terminate_notice)
    if "max_unavailable" in told:
        told["max_unavailable"] = said_of(policy.max_unavailable)
    return told


def _dump_vm(vm: Vm) -> dict[str, Any]:
    told = _told(vm, VmEntry)
    if "instance" in told:
        told["instance"] = _told(vm.instance, InstanceEntry)
    if vm.instance.tags:
        told["instance"]["tags"] = dict(vm.instance.tags)
    return told


def _dump_notice(notice: timedelta | None) -> str:
    if notice is None:
        return "off"
    minutes, seconds = divmod(int(notice.total_seconds()), 60)
    return f"{minutes}m{seconds}s" if seconds else f"{minutes}m"


def _told(value: msgspec.Struct, entry: type[msgspec.Struct]) -> dict[str, Any]:
    """The members of an entry that differ from the default. msgspec's own `omit_defaults` compares
    identity, not equality.
    """
    defaults = _defaults(type(value))
    members = {name: getattr(value, name) for name in entry.__struct_fields__}
    return {name: member for name, member in members.items() if member != defaults[name]}


@functools.cache
def _defaults(type_: type[msgspec.Struct]) -> dict[str, Any]:
    fields = msgspec.structs.fields(type_)
    return {
        each.name: each.default
        if each.default_factory is msgspec.NODEFAULT
        else each.default_factory()
        for each in fields
    }
