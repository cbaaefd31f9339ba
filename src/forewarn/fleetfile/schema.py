"""The types of the fleet file.

They validate the file, and the JSON Schema and the error messages are derived from them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forewarn.core.fleet import Approval, AutoApprove, Instance, Policy, RedeployMethod, ScopeKind

COUNT_MAX = 100_000
VMS_PER_SCOPE_MAX = 1_000
"""Every change of a scope writes its whole record, and all its VMs read one document."""
_IS_ADDRESS = {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}


def _pattern(pattern: str, description: str) -> Meta:
    """Python's `$` also matches before a trailing newline. This is the end here and in a schema."""
    return Meta(pattern=rf"^(?:{pattern})$(?!\n)", description=description)


def number_from(first: int, last: int, what: str = "a whole number") -> Meta:
    return Meta(ge=first, le=last, description=f"{what} from {first} to {last}")


def _text(length_max: int) -> Meta:
    return Meta(max_length=length_max, description=f"text of at most {length_max} characters")


def list_of(what: str, length_max: int) -> Meta:
    return Meta(max_length=length_max, description=f"a list of at most {length_max} {what}")


def make_schema(type_: Any) -> dict[str, Any]:
    """The JSON Schema of a type. The round trip makes lists of tuples, and text of enum members."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(dialect | msgspec.json.schema(type_))
    )
    return schema


Name = Annotated[
    str,
    _pattern(
        r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}",
        "a name of 1 to 128 letters, digits, '.', '_' and '-', not starting with '.' or '-'",
    ),
]
NameOrNothing = Annotated[
    str, _pattern(r"|[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "the name of a host, or nothing")
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
    _pattern(
        "off|(?:PT)?(?=[0-9])(?:[0-9]{1,3}[mM])?(?:[0-9]{1,3}[sS])?",
        "a time from 5m to 15m, such as 10m, 5m30s, 600s or PT10M, or off",
    ),
]
VmId = Annotated[str, _pattern("[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", "a UUID")]
Mac = Annotated[str, _pattern("([0-9A-Fa-f]{2}[:-]?){5}[0-9A-Fa-f]{2}", "a MAC address")]
Domain = Annotated[int, number_from(0, 99)]
Operations = Annotated[int, number_from(1, 10_000)]
MaxUnavailable = Annotated[
    Annotated[int, number_from(1, COUNT_MAX)]
    | Annotated[str, _pattern("(?:[1-9][0-9]?|100)%", "a percentage from 1% to 100%")]
    | None,
    Meta(description="a number of VMs from 1 to 100000, or a percentage from 1% to 100%"),
]
FailureType = Annotated[Literal["Reboot", "Redeploy"], Meta(description="Reboot or Redeploy")]
Flag = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, _text(256)]
UserData = Annotated[str, _text(65_536)]
Tags = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=512)], Annotated[str, Meta(max_length=256)]],
    Meta(
        max_length=50,
        description="at most 50 tags, a mapping of text (at most 512 characters) to text (at most"
        " 256)",
    ),
]


class InstanceEntry(msgspec.Struct, forbid_unknown_fields=True):
    """What the VM can read about itself at /metadata/instance.

    `user_data` is plain text here and is served in base64.
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
    plan_name: Text = ""
    plan_product: Text = ""
    plan_publisher: Text = ""
    admin_username: Text = ""
    public_keys: Annotated[tuple[Annotated[str, _text(8_192)], ...], list_of("keys", 50)] = ()
    disable_password_authentication: Flag | None = None
    license_type: Text = ""
    physical_zone: Text = ""
    security_type: Text = ""
    secure_boot: Flag | None = None
    virtual_tpm: Flag | None = None
    encryption_at_host: Flag | None = None
    user_data: UserData = ""
    tags: Tags = {}


class VmEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One VM. Its name is what Resources shows; names and ids are unique, addresses on a host."""

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
    failed_hardware: FailureType = "Reboot"
    redeploy: RedeployMethod = Policy().redeploy


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
    vms: Annotated[tuple[VmEntry, ...], list_of("VMs", VMS_PER_SCOPE_MAX)] = ()


class FleetFile(msgspec.Struct, forbid_unknown_fields=True):
    """A fleet: its scopes with their VMs, and hosts that exist before a VM runs on them."""

    scopes: Annotated[
        tuple[Annotated[ScopeEntry, Meta(extra_json_schema=_KIND_VM_HAS_ONE_VM)], ...],
        list_of("scopes", COUNT_MAX),
    ]
    hosts: Annotated[tuple[Name, ...], list_of("host names", COUNT_MAX)] = ()


SCHEMA = make_schema(FleetFile)
"""The JSON Schema of the types above.

Only the parser checks what a schema cannot express: duplicate names, addresses and ids, a subnet
that is not a network, a terminate_notice outside its limits.
"""
