"""Fleet files to scopes and back: parse, check what must be unique, dump."""

import functools
import hashlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from forewarn.core.fleet import DEFAULT_INSTANCE, Budget, Instance, Policy, Scope, ScopeKind, Vm
from forewarn.core.timing import TERMINATE_NOTICE_MAX, TERMINATE_NOTICE_MIN
from forewarn.errors import Invalid
from forewarn.fleetfile.schema import (
    COUNT_MAX,
    NOTICE_PATTERN,
    SCHEMA,
    FleetFile,
    InstanceEntry,
    PolicyEntry,
    ScopeEntry,
    VmEntry,
)
from forewarn.fleetfile.yaml_source import (
    FieldError,
    Path,
    convert,
    find_line,
    format_path,
    load,
    locate,
)


class Fleet(msgspec.Struct, frozen=True):
    """The content of a fleet file. Its scopes are new: no events, every VM running."""

    scopes: tuple[Scope, ...] = ()
    hosts: tuple[str, ...] = ()


class FleetText(NamedTuple):
    """The text of a fleet file, and the name that errors give it."""

    name: str
    text: bytes


class DuplicateValue(FieldError):
    """A value that must be unique. `owner` is the path of the first one."""

    def __init__(self, path: Path, rule: str, owner: Path) -> None:
        super().__init__(path, f"{rule} {format_path(owner)}")
        self.rule = rule
        self.owner = owner


def parse(text: bytes, source: str) -> Fleet:
    """Parse YAML or JSON. Errors call the text `source`."""
    values = load(text, source)
    try:
        fleet = _build_fleet(values)
        _refuse_duplicates(fleet)
    except FieldError as error:
        raise locate(error, values, text=text, source=source, schema=SCHEMA) from error
    return fleet


def build(file: FleetFile) -> Fleet:
    """Build the fleet of a file that was converted as part of another one. Raises FieldError."""
    scopes = (_build_scope(entry, ("scopes", index)) for index, entry in enumerate(file.scopes))
    fleet = Fleet(scopes=tuple(scopes), hosts=tuple(dict.fromkeys(file.hosts)))
    _refuse_duplicates(fleet)
    return fleet


def parse_all(sources: Sequence[FleetText]) -> Fleet:
    """Parse several files as one fleet: what must be unique is unique across all of them."""
    parts = [parse(source.text, source.name) for source in sources]
    if len(parts) == 1:
        return parts[0]
    fleet = Fleet(
        scopes=tuple(scope for part in parts for scope in part.scopes),
        hosts=tuple(dict.fromkeys(host for part in parts for host in part.hosts)),
    )
    try:
        _refuse_duplicates(fleet)
    except DuplicateValue as error:
        here, path = _find_file(error.path, sources, parts)
        there, owner = _find_file(error.owner, sources, parts)
        line = find_line(here.text, path)
        owner_line = f"{there.name}:{find_line(there.text, owner)}: {format_path(owner)}"
        raise Invalid(
            f"{here.name}:{line}: {format_path(path)}: expected {error.rule} {owner_line},"
            f" got {_value_at(fleet, error.path)!r}",
            source=here.name,
            line=line,
            field=format_path(path),
        ) from error
    return fleet


def _find_file(
    path: Path, sources: Sequence[FleetText], parts: Sequence[Fleet]
) -> tuple[FleetText, Path]:
    """Return the file that a path of the merged fleet points into, and the path within it."""
    scopes, index, *rest = path
    assert isinstance(index, int), "only values inside scopes must be unique"
    for source, part in zip(sources, parts, strict=True):
        if index < len(part.scopes):
            return source, (scopes, index, *rest)
        index -= len(part.scopes)
    raise AssertionError("the path is in none of the files")


def _value_at(fleet: Fleet, path: Path) -> object:
    value: Any = fleet
    for step in path:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def _build_fleet(values: object) -> Fleet:
    """Convert scope by scope: a fleet may be large, and other threads must be able to run."""
    entries = values.get("scopes") if isinstance(values, dict) else None
    if isinstance(values, dict) and isinstance(entries, list) and len(entries) <= COUNT_MAX:
        values = values | {"scopes": []}
    file = convert(values, FleetFile)
    return Fleet(
        scopes=tuple(
            _build_scope(convert(entry, ScopeEntry, ("scopes", index)), ("scopes", index))
            for index, entry in enumerate(entries or ())
        ),
        hosts=tuple(dict.fromkeys(file.hosts)),
    )


def _build_scope(entry: ScopeEntry, at: Path) -> Scope:
    if entry.kind is ScopeKind.VM and len(entry.vms) != 1:
        raise FieldError((*at, "vms"), "exactly one VM in a scope of kind vm")
    return Scope(
        name=entry.name,
        kind=entry.kind,
        policy=_build_policy(entry.policy, (*at, "policy")),
        vms=tuple(_build_vm(vm, (*at, "vms", index)) for index, vm in enumerate(entry.vms)),
    )


def _build_policy(entry: PolicyEntry, at: Path) -> Policy:
    members = msgspec.structs.asdict(entry) | {
        "auto_approve": tuple(dict.fromkeys(entry.auto_approve)),
        "terminate_notice": _parse_notice(entry.terminate_notice, (*at, "terminate_notice")),
        "max_unavailable": parse_budget(entry.max_unavailable),
    }
    return Policy(**members)


def parse_budget(value: int | str | None) -> Budget | None:
    """Parse a MaxUnavailable. None: only update domains limit a campaign."""
    if value is None or isinstance(value, int):
        return None if value is None else Budget(value)
    return Budget(int(value.removesuffix("%")), is_percent=True)


def format_budget(budget: Budget | None) -> int | str | None:
    """Format a budget as a fleet file writes it."""
    if budget is None:
        return None
    return str(budget) if budget.is_percent else budget.number


def _build_vm(entry: VmEntry, at: Path) -> Vm:
    return Vm(
        name=entry.name,
        address=_normalize_address(entry.address, (*at, "address")),
        update_domain=entry.update_domain,
        host=entry.host,
        id=entry.id.lower(),
        fault_domain=entry.fault_domain,
        instance=_build_instance(entry.instance, (*at, "instance")),
    )


def _build_instance(entry: InstanceEntry, at: Path) -> Instance:
    if entry == InstanceEntry():
        return DEFAULT_INSTANCE
    members = msgspec.structs.asdict(entry) | {
        "public_address": _normalize_address(entry.public_address, (*at, "public_address")),
        "subnet": _normalize_subnet(entry.subnet, (*at, "subnet")),
        "tags": tuple(entry.tags.items()),
    }
    return Instance(**members)


def _normalize_address(text: str, at: Path) -> str:
    """Normalize, so that a client's address can be looked up.

    IPv4-mapped IPv6 is unwrapped; scope ids are rejected.
    """
    if not text:
        return ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise FieldError(at) from error
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.scope_id is not None:
        raise FieldError(at)
    return str(address.ipv4_mapped or address)


def _normalize_subnet(text: str, at: Path) -> str:
    try:
        return str(ipaddress.ip_network(text)) if text else ""
    except ValueError as error:
        raise FieldError(at) from error


def _parse_notice(text: str, at: Path) -> timedelta | None:
    match = re.search(NOTICE_PATTERN, text)
    assert match, "the entry's type has the same pattern"
    if text == "off":
        return None
    notice = timedelta(minutes=int(match[1] or 0), seconds=int(match[2] or 0))
    if not TERMINATE_NOTICE_MIN <= notice <= TERMINATE_NOTICE_MAX:
        raise FieldError(at)
    return notice


def _refuse_duplicates(fleet: Fleet) -> None:
    """Names are compared without case, as Azure does; many clients do so too."""
    scopes = [(scope, ("scopes", index)) for index, scope in enumerate(fleet.scopes)]
    vms = [(vm, (*at, "vms", index)) for scope, at in scopes for index, vm in enumerate(scope.vms)]
    _refuse_duplicate(((scope.name.lower(), (*at, "name")) for scope, at in scopes), "a scope name")
    _refuse_duplicate(((vm.name.lower(), (*at, "name")) for vm, at in vms), "a VM name")
    _refuse_duplicate(((vm.address, (*at, "address")) for vm, at in vms), "an address")
    _refuse_duplicate(((vm.id, (*at, "id")) for vm, at in vms), "an id")
    _refuse_names_that_are_ids(vms)


def _refuse_duplicate(values: Iterable[tuple[str, Path]], what: str) -> None:
    owners: dict[str, Path] = {}
    for value, at in values:
        if value and owners.setdefault(value, at) != at:
            raise DuplicateValue(at, f"{what} not used by", owners[value])


def _refuse_names_that_are_ids(vms: Sequence[tuple[Vm, Path]]) -> None:
    """A proxy signs a name or an id: a VM named like another VM's id could pass as that VM."""
    owners = {vm.id: (vm, at) for vm, at in vms if vm.id}
    for vm, at in vms:
        owner, owner_at = owners.get(vm.name.lower(), (vm, at))
        if owner is not vm:
            raise DuplicateValue((*at, "name"), "a VM name that is not", (*owner_at, "id"))


def dump(fleet: Fleet) -> dict[str, Any]:
    """Return the file that describes this fleet, without defaults, events and power states."""
    return msgspec.json.decode(dump_json(fleet), type=dict[str, Any])


def dump_json(fleet: Fleet) -> bytes:
    """Dump as JSON, scope by scope: other threads must be able to run in between."""
    scopes = b",".join([msgspec.json.encode(_dump_scope(scope)) for scope in fleet.scopes])
    hosts = b',"hosts":' + msgspec.json.encode(fleet.hosts) if fleet.hosts else b""
    return b'{"scopes":[' + scopes + b"]" + hosts + b"}"


def compute_etag(text: bytes) -> str:
    """Identify a fleet as `dump_json` wrote it, for conditional requests."""
    return hashlib.sha256(text).hexdigest()[:32]


def _dump_scope(scope: Scope) -> dict[str, Any]:
    members = _changed_members(scope, ScopeEntry)
    if "policy" in members:
        members["policy"] = _dump_policy(scope.policy)
    if "vms" in members:
        members["vms"] = [_dump_vm(vm) for vm in scope.vms]
    return members


def _dump_policy(policy: Policy) -> dict[str, Any]:
    members = _changed_members(policy, PolicyEntry)
    if "terminate_notice" in members:
        members["terminate_notice"] = _format_notice(policy.terminate_notice)
    if "max_unavailable" in members:
        members["max_unavailable"] = format_budget(policy.max_unavailable)
    return members


def _dump_vm(vm: Vm) -> dict[str, Any]:
    members = _changed_members(vm, VmEntry)
    if "instance" in members:
        members["instance"] = _changed_members(vm.instance, InstanceEntry)
    if vm.instance.tags:
        members["instance"]["tags"] = dict(vm.instance.tags)
    return members


def _format_notice(notice: timedelta | None) -> str:
    if notice is None:
        return "off"
    minutes, seconds = divmod(int(notice.total_seconds()), 60)
    return f"{minutes}m{seconds}s" if seconds else f"{minutes}m"


def _changed_members(value: msgspec.Struct, entry: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the members that differ from the default. `omit_defaults` compares by identity."""
    defaults = _defaults(type(value))
    members = {name: getattr(value, name) for name in entry.__struct_fields__}
    return {name: member for name, member in members.items() if member != defaults[name]}


@functools.cache
def _defaults(type_: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        each.name: each.default
        if each.default_factory is msgspec.NODEFAULT
        else each.default_factory()
        for each in msgspec.structs.fields(type_)
    }
