"""Fleet files to scopes and back: parse, check what must be unique, dump."""

import hashlib
import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from forewarn.core.event import EventType
from forewarn.core.fleet import DEFAULT_INSTANCE, DEFAULT_POLICY, Budget, Scope, ScopeKind, Vm
from forewarn.core.timing import TERMINATE_NOTICE_MAX, TERMINATE_NOTICE_MIN
from forewarn.duration import parse_duration
from forewarn.fleetfile import schema
from forewarn.fleetfile.yaml_source import FieldError, Path, SourceText, convert, format_path


class Fleet(msgspec.Struct, frozen=True):
    """The content of a fleet file. Its scopes are new: no events, every VM running."""

    scopes: tuple[Scope, ...] = ()
    hosts: tuple[str, ...] = ()


def parse(text: bytes, source: str) -> Fleet:
    """Parse YAML or JSON. Errors call the text `source`."""
    return parse_all([SourceText(source, text)])


def build(file: schema.FleetFile) -> Fleet:
    """Build the fleet of a file that was converted as part of another one. Raises FieldError."""
    scopes = [_build_scope(entry, ("scopes", index)) for index, entry in enumerate(file.scopes)]
    fleet = Fleet(tuple(scopes), tuple(dict.fromkeys(file.hosts)))
    _refuse_duplicates([SourceText("", b"")], [fleet])
    return fleet


def parse_all(files: Sequence[SourceText]) -> Fleet:
    """Parse several files as one fleet: what must be unique is unique across all of them."""
    parts = [_parse_file(file) for file in files]
    try:
        _refuse_duplicates(files, parts)
    except DuplicateValue as error:
        raise error.file.locate(error, schema.SCHEMA) from error
    return Fleet(
        scopes=tuple(scope for part in parts for scope in part.scopes),
        hosts=tuple(dict.fromkeys(host for part in parts for host in part.hosts)),
    )


def _parse_file(file: SourceText) -> Fleet:
    try:
        return _build_fleet(file.load())
    except FieldError as error:
        raise file.locate(error, schema.SCHEMA) from error


def _build_fleet(values: object) -> Fleet:
    """Convert scope by scope: a fleet may be large, and other threads must be able to run."""
    entries = values.get("scopes") if isinstance(values, dict) else None
    if isinstance(values, dict) and isinstance(entries, list) and len(entries) <= schema.COUNT_MAX:
        values = values | {"scopes": []}
    file = convert(values, schema.FleetFile)
    scopes = [
        _build_scope(convert(entry, schema.ScopeEntry, ("scopes", index)), ("scopes", index))
        for index, entry in enumerate(entries or ())
    ]
    return Fleet(tuple(scopes), file.hosts)


def _build_scope(entry: schema.ScopeEntry, at: Path) -> Scope:
    if entry.kind is ScopeKind.VM and len(entry.vms) != 1:
        raise FieldError((*at, "vms"), "exactly one VM in a scope of kind vm")
    scope: Scope = _build(entry, at)
    return scope


def _build(entry: msgspec.Struct, at: Path) -> Any:
    """The value that an entry of the file describes."""
    default = _DEFAULTS[type(entry)]
    if entry == _EMPTY_INSTANCE:
        return default  # one value for all VMs without one of their own
    members = msgspec.structs.asdict(entry)
    for name, member in members.items():
        if isinstance(member, msgspec.Struct):
            members[name] = _build(member, (*at, name))
        elif name == "vms":
            members[name] = tuple(_build(vm, (*at, name, i)) for i, vm in enumerate(member))
        elif name in _PARSERS:
            try:
                members[name] = _PARSERS[name](member)
            except ValueError as error:
                raise FieldError((*at, name)) from error
    return type(default)(**members)


def parse_address(text: str) -> str:
    """Normalize, so that a client's address can be looked up.

    IPv4-mapped IPv6 is unwrapped; scope ids are rejected.
    """
    if not text:
        return ""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.scope_id is not None:
        raise ValueError("an address with a scope id")
    return str(address.ipv4_mapped or address)


def _parse_notice(text: str) -> timedelta | None:
    if text == "off":
        return None
    notice = parse_duration(text.removeprefix("PT").lower())
    if not TERMINATE_NOTICE_MIN <= notice <= TERMINATE_NOTICE_MAX:
        raise ValueError("a notice outside the limits")
    return notice


def _format_notice(notice: timedelta | None) -> str:
    if notice is None:
        return "off"
    minutes, seconds = divmod(int(notice.total_seconds()), 60)
    return f"{minutes}m{seconds}s" if seconds else f"{minutes}m"


def parse_budget(value: int | str | None) -> Budget | None:
    """Parse a MaxUnavailable. None: only update domains limit a campaign."""
    if isinstance(value, str):
        return Budget(int(value.removesuffix("%")), is_percent=True)
    return None if value is None else Budget(value)


def format_budget(budget: Budget | None) -> int | str | None:
    """Format a budget as a fleet file writes it."""
    if budget is None:
        return None
    return str(budget) if budget.is_percent else budget.number


_EMPTY_INSTANCE = schema.InstanceEntry()
_DEFAULTS: dict[type[msgspec.Struct], msgspec.Struct] = {
    schema.ScopeEntry: Scope(name=""),
    schema.PolicyEntry: DEFAULT_POLICY,
    schema.VmEntry: Vm(name=""),
    schema.InstanceEntry: DEFAULT_INSTANCE,
}
"""What an entry without members describes. `dump_json` leaves equal members out."""
_ENTRIES = {type(default): entry for entry, default in _DEFAULTS.items()}
_PARSERS: dict[str, Callable[[Any], object]] = {
    "address": parse_address,
    "id": str.lower,
    "public_address": parse_address,
    "subnet": lambda text: str(ipaddress.ip_network(text)) if text else "",
    "tags": lambda tags: tuple(tags.items()),
    "auto_approve": lambda names: tuple(dict.fromkeys(names)),
    "terminate_notice": _parse_notice,
    "max_unavailable": parse_budget,
    "failed_hardware": EventType,
}
"""Members that are something else in the fleet than in the file. ValueError: an invalid value."""


class _Place(NamedTuple):
    """Where something is declared."""

    file: SourceText
    path: Path

    def member(self, *steps: str | int) -> "_Place":
        return _Place(self.file, (*self.path, *steps))


class DuplicateValue(FieldError):
    """A value that must be unique. `owner` is the place of the first one."""

    def __init__(self, place: _Place, rule: str, owner: _Place) -> None:
        first = format_path(owner.path)
        if owner.file is not place.file:
            first = f"{owner.file.name}:{owner.file.find_line(owner.path)}: {first}"
        super().__init__(place.path, f"{rule} {first}")
        self.file = place.file


def _refuse_duplicates(files: Sequence[SourceText], parts: Sequence[Fleet]) -> None:
    """Names are compared without case, as Azure does; many clients do so too."""
    scopes = [
        (scope, _Place(file, ("scopes", index)))
        for file, part in zip(files, parts, strict=True)
        for index, scope in enumerate(part.scopes)
    ]
    vms = [
        (vm, place.member("vms", index))
        for scope, place in scopes
        for index, vm in enumerate(scope.vms)
    ]
    for what, declared, field in (
        ("a scope name", scopes, "name"),
        ("a VM name", vms, "name"),
        ("an address", vms, "address"),
        ("an id", vms, "id"),
    ):
        owners: dict[str, _Place] = {}
        for value, place in declared:
            key = getattr(value, field).lower()
            if key and field == "address" and isinstance(value, Vm):
                key = f"{key} {value.host}"  # networks of different hosts may be separate
            if key and owners.setdefault(key, place) is not place:
                owner = owners[key].member(field)
                raise DuplicateValue(place.member(field), f"{what} not used by", owner)
    # A proxy signs a name or an id: a VM named like another VM's id could pass as that VM.
    for vm, place in vms:
        owner = owners.get(vm.name.lower(), place)
        if owner is not place:
            raise DuplicateValue(place.member("name"), "a VM name that is not", owner.member("id"))


def dump_json(fleet: Fleet) -> bytes:
    """The file that describes this fleet as JSON, without defaults, events and power states."""
    return b"".join(dump_parts(fleet.scopes, fleet.hosts))


def dump_parts(scopes: Iterable[Scope], hosts: Sequence[str]) -> Iterator[bytes]:
    """`dump_json` in small parts, at most one VM each: a fleet may be large, and others must be
    able to run in between.
    """
    yield b'{"scopes":['
    for number, scope in enumerate(scopes):
        head = msgspec.json.encode(_dump(replace(scope, vms=())))
        yield b"," + head[:-1] if number else head[:-1]
        for index, vm in enumerate(scope.vms):
            yield (b"," if index else b',"vms":[') + msgspec.json.encode(_dump(vm))
        yield b"]}" if scope.vms else b"}"
    yield b"]" + (b',"hosts":' + msgspec.json.encode(hosts) if hosts else b"") + b"}"


def compute_etag(parts: Iterable[bytes]) -> str:
    """Identify a fleet as `dump_json` wrote it, in any parts, for conditional requests."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


def _dump(value: msgspec.Struct) -> dict[str, Any]:
    """The members that a file has and that differ from the default.

    `omit_defaults` would compare by identity.
    """
    entry = _ENTRIES[type(value)]
    members = ((name, getattr(value, name)) for name in entry.__struct_fields__)
    return {
        name: _DUMPERS[name](member) if name in _DUMPERS else member
        for name, member in members
        if member != getattr(_DEFAULTS[entry], name)
    }


_DUMPERS: dict[str, Callable[[Any], object]] = {
    "policy": _dump,
    "vms": lambda vms: [_dump(vm) for vm in vms],
    "instance": _dump,
    "tags": dict,
    "terminate_notice": _format_notice,
    "max_unavailable": format_budget,
}


class FieldChange(msgspec.Struct, frozen=True):
    """A field whose value changes, as a fleet file writes it."""

    field: str
    before: Any
    after: Any


def compare_fields(before: msgspec.Struct, after: msgspec.Struct) -> list[FieldChange]:
    """What differs between two scopes or two VMs. The VMs of a scope are not compared."""
    changes = list[FieldChange]()
    for name in _ENTRIES[type(after)].__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if name == "vms" or old == new:
            continue
        if type(new) in _ENTRIES:
            inner = compare_fields(old, new)
            changes += [FieldChange(f"{name}.{one.field}", one.before, one.after) for one in inner]
        else:
            old, new = (
                _DUMPERS[name](value) if name in _DUMPERS else value for value in (old, new)
            )
            changes.append(FieldChange(name, old, new))
    return changes
