"""`/metadata/instance` and `/metadata/versions`: what a VM can read about itself."""

import base64
import uuid
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.errors import Invalid, NotFound
from forewarn.wire.versions import INSTANCE_VERSIONS

Node = str | Mapping[str, "Node"] | Sequence["Node"]

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"

UNDECLARED = (str(uuid.UUID(int=0)), "forewarn")
"""The subscription and resource group of events whose VMs declare none."""
_NAMESPACE = uuid.UUID("5e7c1d0a-3f0b-5d6e-9a51-0f0e5ca1ab1e")
"""Undeclared ids are derived from names in this namespace, the same on every server."""

_FIRST = INSTANCE_VERSIONS[0]
# fmt: off
_TYPES = {
    ScopeKind.VM: "virtualMachines", ScopeKind.CLOUD_SERVICE: "cloudServices",
    ScopeKind.AVAILABILITY_SET: "availabilitySets", ScopeKind.SCALE_SET: "virtualMachineScaleSets",
}
# fmt: on
_FLAG = {None: "", False: "false", True: "true"}


class InstanceResponse(msgspec.Struct, frozen=True):
    content_type: str
    body: bytes


def tree(scope: Scope, vm: Vm, version: str) -> dict[str, Node]:
    """Build everything that a VM can read in one version. Undeclared values are `""`."""
    return {"compute": _compute(scope, vm, version), "network": _network(vm)}


def select(tree: Node, path: Sequence[str], format: str) -> InstanceResponse:
    """Render the node at a path as JSON or text.

    The text of a leaf is its bare value: clients compare it with Resources.
    """
    if format not in ("json", "text"):
        raise Invalid(f"Bad request. format is {format!r}; expected json or text")
    node = tree
    for segment in path:
        children = {name.lower(): child for name, child in _children(node).items()}
        if segment.lower() not in children:
            raise NotFound(f"Not found. There is no {segment!r} at this path")
        node = children[segment.lower()]
    if format == "json":
        if isinstance(node, str):
            raise Invalid("Bad request. A single value is given only with format=text")
        return InstanceResponse(JSON, msgspec.json.encode(node))
    if isinstance(node, str):
        return InstanceResponse(TEXT, node.encode())
    names = (
        name if isinstance(child, str) else f"{name}/" for name, child in _children(node).items()
    )
    return InstanceResponse(TEXT, "\n".join(names).encode())


def versions_body() -> bytes:
    return msgspec.json.encode({"apiVersions": INSTANCE_VERSIONS})


def _children(node: Node) -> Mapping[str, Node]:
    if isinstance(node, str):
        return {}
    if isinstance(node, Mapping):
        return node
    return {str(index): child for index, child in enumerate(node)}


def _compute(scope: Scope, vm: Vm, version: str) -> dict[str, Node]:
    """Each member with its first version (protocol 8.1), in wire order. A dot separates levels.

    What the documentation dates 2017-04-02 is served from the first version on: it does not say
    what that one held, and an empty response helps no client.
    """
    instance = vm.instance
    scale_set = scope.name if scope.kind is ScopeKind.SCALE_SET else ""
    set_id = _resource_id(vm, f"virtualMachineScaleSets/{scale_set}") if scale_set else ""
    user = instance.admin_username
    no_password = _FLAG[instance.disable_password_authentication]
    file = f"/home/{user}/.ssh/authorized_keys" if user else ""
    keys = [{"keyData": key, "path": file} for key in instance.public_keys]
    tags = [{"name": name, "value": value} for name, value in instance.tags]
    members: dict[str, tuple[str, Any]] = {
        "additionalCapabilities.hibernationEnabled": ("2021-11-01", ""),
        "azEnvironment": ("2018-10-01", "AzurePublicCloud"),
        "customData": ("2019-02-01", ""),
        "evictionPolicy": ("2020-12-01", "Deallocate" if instance.priority == "Spot" else ""),
        "extendedLocation": ("2021-03-01", {"name": "", "type": ""}),
        "host.id": ("2021-11-15", ""),
        "hostGroup.id": ("2021-11-15", ""),
        "isHostCompatibilityLayerVm": ("2020-06-01", ""),
        "licenseType": ("2020-09-01", instance.license_type),
        "location": (_FIRST, instance.location),
        "name": (_FIRST, vm.name),
        "offer": (_FIRST, instance.offer),
        "osProfile.adminUsername": ("2020-07-15", instance.admin_username),
        "osProfile.computerName": ("2020-07-15", instance.computer_name or vm.name),
        "osProfile.disablePasswordAuthentication": ("2020-10-01", no_password),
        "osType": (_FIRST, instance.os_type),
        "physicalZone": ("2023-11-15", instance.physical_zone),
        "placementGroupId": ("2017-08-01", _make_id(f"scope/{scale_set}") if scale_set else ""),
        "plan.name": ("2018-04-02", instance.plan_name),
        "plan.product": ("2018-04-02", instance.plan_product),
        "plan.publisher": ("2018-04-02", instance.plan_publisher),
        "platformFaultDomain": (_FIRST, str(vm.fault_domain)),
        "platformSubFaultDomain": ("2021-10-01", ""),
        "platformUpdateDomain": (_FIRST, str(vm.update_domain)),
        "priority": ("2020-12-01", instance.priority),
        "provider": ("2018-10-01", "Microsoft.Compute"),
        "publicKeys": ("2018-04-02", keys),
        "publisher": (_FIRST, instance.publisher),
        "resourceGroupName": ("2017-08-01", instance.resource_group),
        "resourceId": ("2019-03-11", _resource_id(vm, _vm_resource(vm.name, scale_set))),
        "securityProfile.encryptionAtHost": ("2021-11-01", _FLAG[instance.encryption_at_host]),
        "securityProfile.secureBootEnabled": ("2020-06-01", _FLAG[instance.secure_boot]),
        "securityProfile.securityType": ("2021-12-13", instance.security_type),
        "securityProfile.virtualTpmEnabled": ("2020-06-01", _FLAG[instance.virtual_tpm]),
        "sku": (_FIRST, instance.sku),
        "storageProfile": ("2019-06-01", _storage(vm)),
        "storageProfile.resourceDisk": ("2021-02-01", {"size": ""}),
        "subscriptionId": ("2017-08-01", instance.subscription),
        "tags": ("2017-08-01", ";".join(f"{name}:{value}" for name, value in instance.tags)),
        "tagsList": ("2019-06-04", tags),
        "userData": ("2021-01-01", base64.b64encode(instance.user_data.encode()).decode()),
        "version": (_FIRST, instance.version),
        "virtualMachineScaleSet": ("2021-03-01", {"id": set_id}),
        "vmId": (_FIRST, vm.id or _make_id(f"vm/{vm.name}")),
        "vmScaleSetName": ("2017-12-01", scale_set),
        "vmSize": (_FIRST, instance.size),
        "zone": ("2017-12-01", instance.zone),
    }
    compute: dict[str, Any] = {}
    for path, (since, value) in members.items():
        if since <= version:
            parent, dot, name = path.rpartition(".")
            (compute.setdefault(parent, {}) if dot else compute)[name] = value
    return compute


def _make_id(name: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, name))


def _vm_resource(name: str, scale_set: str) -> str:
    """Return the resource path. VM `web_7` of a uniform scale set is number 7 of the set."""
    number = name.removeprefix(f"{scale_set}_")
    if scale_set and number != name and number.isdecimal():
        return f"virtualMachineScaleSets/{scale_set}/virtualMachines/{number}"
    return f"virtualMachines/{name}"


def _resource_id(vm: Vm, resource: str, undeclared: tuple[str, str] = ("", "")) -> str:
    """The id of a resource in the VM's subscription and group, or else in these."""
    subscription = vm.instance.subscription or undeclared[0]
    group = vm.instance.resource_group or undeclared[1]
    if not (subscription and group):
        return ""
    path = f"/subscriptions/{subscription}/resourceGroups/{group}"
    return f"{path}/providers/Microsoft.Compute/{resource}"


def event_resource(scope: Scope, vm: str, undeclared: tuple[str, str] = UNDECLARED) -> str:
    """The id of the resource that Azure attaches an event of this VM to: the VM, or its set."""
    resource = f"{_TYPES[scope.kind]}/{vm if scope.kind is ScopeKind.VM else scope.name}"
    return _resource_id(find_member(scope, vm), resource, undeclared)


def find_member(scope: Scope, vm: str) -> Vm:
    """The VM; if it was deleted, another one of its set, which is in the same group."""
    return scope.vm(vm) or next(iter(scope.vms), Vm(vm))


def has_resource(scope: Scope, vm: str, resource_id: str) -> bool:
    """Whether a client means this resource. What the fleet file does not declare matches any."""
    return fnmatchcase(resource_id.lower(), event_resource(scope, vm, ("*", "*")).lower())


def _storage(vm: Vm) -> Node:
    """The structure that clients look for. Forewarn knows the image but no disks."""
    instance = vm.instance
    return {
        "dataDisks": [],
        "imageReference": {
            "id": "",
            "offer": instance.offer,
            "publisher": instance.publisher,
            "sku": instance.sku,
            "version": instance.version,
        },
        "osDisk": {
            "caching": "",
            "createOption": "",
            "diffDiskSettings": {"option": ""},
            "diskSizeGB": "",
            "encryptionSettings": {"enabled": "false"},
            "image": {"uri": ""},
            "managedDisk": {"id": "", "storageAccountType": ""},
            "name": "",
            "osType": instance.os_type,
            "vhd": {"uri": ""},
            "writeAcceleratorEnabled": "false",
        },
    }


def _network(vm: Vm) -> Node:
    instance = vm.instance
    ipv4 = {"privateIpAddress": vm.address, "publicIpAddress": instance.public_address}
    ipv6 = {"privateIpAddress": vm.address}
    subnet, _, prefix = instance.subnet.partition("/")
    is_ipv6 = ":" in vm.address
    is_ipv4 = bool(vm.address) and not is_ipv6
    interface: Node = {
        "ipv4": {
            "ipAddress": [ipv4] if is_ipv4 else [],
            "subnet": [{"address": subnet, "prefix": prefix}] if is_ipv4 else [],
        },
        "ipv6": {"ipAddress": [ipv6] if is_ipv6 else []},
        "macAddress": instance.mac.replace(":", "").replace("-", "").upper(),
    }
    return {"interface": [interface]}
