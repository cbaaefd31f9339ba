"""What a VM reads about itself."""

import json
from typing import Any

import pytest

from forewarn.core.fleet import Instance, Scope, ScopeKind, Vm
from forewarn.errors import Invalid, NotFound
from forewarn.wire.instance import JSON, TEXT, InstanceResponse, select, tree, versions_body
from forewarn.wire.versions import INSTANCE_VERSIONS

NEWEST = INSTANCE_VERSIONS[-1]
TOLD = Instance(
    computer_name="web000007",
    location="rack-3",
    zone="1",
    size="large",
    priority="Spot",
    mac="00:0d:3a:46:e8:76",
    public_address="203.0.113.9",
    subnet="10.0.0.0/24",
    resource_group="shop",
    subscription="8d10da13-8125-4ba9-a717-bf7490507b3d",
    publisher="debian",
    offer="debian-12",
    sku="12",
    version="12.5",
    plan_name="pro",
    plan_product="shop",
    plan_publisher="acme",
    admin_username="op",
    public_keys=("ssh-ed25519 AAAA op@desk", "ssh-rsa BBBB"),
    disable_password_authentication=True,
    license_type="RHEL_BYOS",
    physical_zone="rack-3-AZ01",
    security_type="TrustedLaunch",
    secure_boot=True,
    virtual_tpm=False,
    user_data="foobar",
    tags=(("role", "front"), ("tier", "1")),
)
VM = Vm(
    "web_7",
    address="10.0.0.7",
    update_domain=4,
    fault_domain=2,
    id="02aab8a4-74ef-476e-8182-f6d2ba4166a6",
    instance=TOLD,
)
SCALE_SET = Scope(name="web", kind=ScopeKind.SCALE_SET, vms=(VM,))
PREFIX = (
    "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/shop"
    "/providers/Microsoft.Compute"
)


def compute(scope: Scope = SCALE_SET, vm: Vm = VM, version: str = NEWEST) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(select(tree(scope, vm, version), ["compute"], "json").body)
    return result


def standalone(vm: Vm) -> Scope:
    return Scope(name=vm.name, vms=(vm,))


def test_a_vm_of_a_scale_set_reads_everything_about_itself() -> None:
    """Protocol 8.1. `name` is the entry in Resources: a client finds its own events by it."""
    result = compute()
    storage = result.pop("storageProfile")

    assert result == {
        "additionalCapabilities": {"hibernationEnabled": ""},
        "azEnvironment": "AzurePublicCloud",
        "customData": "",
        "evictionPolicy": "Deallocate",
        "extendedLocation": {"name": "", "type": ""},
        "host": {"id": ""},
        "hostGroup": {"id": ""},
        "isHostCompatibilityLayerVm": "",
        "licenseType": "RHEL_BYOS",
        "location": "rack-3",
        "name": "web_7",
        "offer": "debian-12",
        "osProfile": {
            "adminUsername": "op",
            "computerName": "web000007",
            "disablePasswordAuthentication": "true",
        },
        "osType": "Linux",
        "physicalZone": "rack-3-AZ01",
        "placementGroupId": "3c90b10a-1f1d-5b7b-9c2f-d52e495fea48",
        "plan": {"name": "pro", "product": "shop", "publisher": "acme"},
        "platformFaultDomain": "2",
        "platformSubFaultDomain": "",
        "platformUpdateDomain": "4",
        "priority": "Spot",
        "provider": "Microsoft.Compute",
        "publicKeys": [
            {"keyData": "ssh-ed25519 AAAA op@desk", "path": "/home/op/.ssh/authorized_keys"},
            {"keyData": "ssh-rsa BBBB", "path": "/home/op/.ssh/authorized_keys"},
        ],
        "publisher": "debian",
        "resourceGroupName": "shop",
        "resourceId": f"{PREFIX}/virtualMachineScaleSets/web/virtualMachines/7",
        "securityProfile": {
            "encryptionAtHost": "",
            "secureBootEnabled": "true",
            "securityType": "TrustedLaunch",
            "virtualTpmEnabled": "false",
        },
        "sku": "12",
        "subscriptionId": "8d10da13-8125-4ba9-a717-bf7490507b3d",
        "tags": "role:front;tier:1",
        "tagsList": [{"name": "role", "value": "front"}, {"name": "tier", "value": "1"}],
        "userData": "Zm9vYmFy",
        "version": "12.5",
        "virtualMachineScaleSet": {"id": f"{PREFIX}/virtualMachineScaleSets/web"},
        "vmId": "02aab8a4-74ef-476e-8182-f6d2ba4166a6",
        "vmScaleSetName": "web",
        "vmSize": "large",
        "zone": "1",
    }
    assert storage["dataDisks"] == []
    assert storage["imageReference"] == {
        "id": "",
        "offer": "debian-12",
        "publisher": "debian",
        "sku": "12",
        "version": "12.5",
    }
    assert storage["osDisk"]["osType"] == "Linux"


def test_undeclared_values_are_empty_strings() -> None:
    """All primitives are strings, also the missing ones; a client may call string methods on any of
    them.
    """
    vm = Vm("db-0")
    result = compute(standalone(vm), vm)

    empty = {name for name, value in result.items() if value == ""}
    assert empty == {
        "customData",
        "evictionPolicy",
        "isHostCompatibilityLayerVm",
        "licenseType",
        "location",
        "offer",
        "physicalZone",
        "placementGroupId",
        "platformSubFaultDomain",
        "priority",
        "publisher",
        "resourceGroupName",
        "resourceId",
        "sku",
        "subscriptionId",
        "tags",
        "userData",
        "version",
        "vmScaleSetName",
        "vmSize",
        "zone",
    }
    assert result["tagsList"] == []
    assert result["virtualMachineScaleSet"] == {"id": ""}
    assert result["osProfile"] == {
        "adminUsername": "",
        "computerName": "db-0",
        "disablePasswordAuthentication": "",
    }
    assert result["plan"] == {"name": "", "product": "", "publisher": ""}
    assert result["publicKeys"] == []


@pytest.mark.parametrize(
    ("path", "since"),
    [
        ("securityProfile/secureBootEnabled", "2020-06-01"),
        ("securityProfile/virtualTpmEnabled", "2020-06-01"),
        ("osProfile/adminUsername", "2020-07-15"),
        ("osProfile/disablePasswordAuthentication", "2020-10-01"),
        ("storageProfile/resourceDisk", "2021-02-01"),
        ("securityProfile/encryptionAtHost", "2021-11-01"),
        ("securityProfile/securityType", "2021-12-13"),
    ],
)
def test_inner_member_is_there_from_its_version_on_and_not_before(path: str, since: str) -> None:
    """A strict client of an older version rejects what it does not know (protocol 8.1)."""
    before = INSTANCE_VERSIONS[INSTANCE_VERSIONS.index(since) - 1]
    segments = ["compute", *path.split("/")]

    assert select(tree(SCALE_SET, VM, since), segments, "text")
    with pytest.raises(NotFound):
        select(tree(SCALE_SET, VM, before), segments, "text")


def test_leaves_are_strings_and_members_are_sorted() -> None:
    """The order of the published examples, and the rule on primitives, all the way down."""

    def check(node: object) -> None:
        if isinstance(node, dict):
            assert list(node) == sorted(node)
            for child in node.values():
                check(child)
        elif isinstance(node, list):
            for child in node:
                check(child)
        else:
            assert isinstance(node, str)

    check(json.loads(select(tree(SCALE_SET, VM, NEWEST), [], "json").body))


def test_undeclared_id_is_derived_from_the_name() -> None:
    """Every server, and every start of it, must give the same vmId."""
    vm = Vm("db-0")

    assert compute(standalone(vm), vm)["vmId"] == "6d27e5f3-1345-5a98-a241-fbbf70673b85"
    assert (
        compute(standalone(Vm("db-1")), Vm("db-1"))["vmId"] != compute(standalone(vm), vm)["vmId"]
    )


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("web_7", "virtualMachineScaleSets/web/virtualMachines/7"),
        ("web_x", "virtualMachines/web_x"),
        ("web_", "virtualMachines/web_"),
        ("other_7", "virtualMachines/other_7"),
    ],
)
def test_a_numbered_vm_of_a_scale_set_has_its_resource_below_the_set(
    name: str, resource: str
) -> None:
    """Uniform sets number their VMs; flexible ones hold VMs with names of their own."""
    assert compute(vm=Vm(name, instance=TOLD))["resourceId"] == f"{PREFIX}/{resource}"


def test_vm_outside_a_scale_set_has_no_scale_set_name() -> None:
    """Clients tell the kinds apart by vmScaleSetName."""
    vm = Vm("web_7", instance=TOLD)
    result = compute(Scope(name="web", kind=ScopeKind.AVAILABILITY_SET, vms=(vm,)), vm)

    assert (
        result["vmScaleSetName"],
        result["virtualMachineScaleSet"],
        result["placementGroupId"],
    ) == (
        "",
        {"id": ""},
        "",
    )
    assert result["resourceId"] == f"{PREFIX}/virtualMachines/web_7"


@pytest.mark.parametrize(
    ("version", "added"),
    [
        ("2017-08-01", {"placementGroupId", "resourceGroupName", "subscriptionId", "tags"}),
        ("2017-12-01", {"vmScaleSetName", "zone"}),
        ("2018-04-02", {"plan", "publicKeys"}),
        ("2018-10-01", {"azEnvironment", "provider"}),
        ("2019-02-01", {"customData"}),
        ("2019-03-11", {"resourceId"}),
        ("2019-06-01", {"storageProfile"}),
        ("2019-06-04", {"tagsList"}),
        ("2020-06-01", {"isHostCompatibilityLayerVm", "securityProfile"}),
        ("2020-07-15", {"osProfile"}),
        ("2020-09-01", {"licenseType"}),
        ("2020-12-01", {"evictionPolicy", "priority"}),
        ("2021-01-01", {"userData"}),
        ("2021-02-01", set()),
        ("2021-03-01", {"extendedLocation", "virtualMachineScaleSet"}),
        ("2021-10-01", {"platformSubFaultDomain"}),
        ("2021-11-01", {"additionalCapabilities"}),
        ("2021-11-15", {"host", "hostGroup"}),
        ("2023-11-15", {"physicalZone"}),
    ],
)
def test_a_member_is_there_from_its_version_on_and_not_before(
    version: str, added: set[str]
) -> None:
    """Protocol 8.1, the first version of each member."""
    before = INSTANCE_VERSIONS[INSTANCE_VERSIONS.index(version) - 1]

    assert set(compute(version=version)) - set(compute(version=before)) == added


@pytest.mark.parametrize("version", ["2017-03-01", "2017-04-02"])
def test_oldest_versions_have_the_eleven_oldest_members(version: str) -> None:
    """The documents date them 2017-04-02 and do not say what 2017-03-01 held."""
    assert list(compute(version=version)) == [
        "location",
        "name",
        "offer",
        "osType",
        "platformFaultDomain",
        "platformUpdateDomain",
        "publisher",
        "sku",
        "version",
        "vmId",
        "vmSize",
    ]


def test_the_network_of_an_ipv4_vm() -> None:
    """cloud-init configures interfaces from it; the MAC address has no separators and is in upper
    case.
    """
    assert tree(SCALE_SET, VM, NEWEST)["network"] == {
        "interface": [
            {
                "ipv4": {
                    "ipAddress": [
                        {"privateIpAddress": "10.0.0.7", "publicIpAddress": "203.0.113.9"}
                    ],
                    "subnet": [{"address": "10.0.0.0", "prefix": "24"}],
                },
                "ipv6": {"ipAddress": []},
                "macAddress": "000D3A46E876",
            }
        ]
    }


def test_the_network_of_an_ipv6_vm() -> None:
    """The address stands with its own family."""
    vm = Vm("db-0", address="fd00::7", instance=Instance(mac="00-0d-3a-46-e8-76"))

    assert tree(standalone(vm), vm, NEWEST)["network"] == {
        "interface": [
            {
                "ipv4": {"ipAddress": [], "subnet": []},
                "ipv6": {"ipAddress": [{"privateIpAddress": "fd00::7"}]},
                "macAddress": "000D3A46E876",
            }
        ]
    }


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("compute/name", b"web_7"),
        ("Compute/NAME", b"web_7"),
        ("compute/tags", b"role:front;tier:1"),
        ("compute/tagsList/1/value", b"1"),
        ("compute/tagsList", b"0/\n1/"),
        ("compute/plan", b"name\nproduct\npublisher"),
        ("compute/plan/name", b"pro"),
        ("compute/publicKeys/0/keyData", b"ssh-ed25519 AAAA op@desk"),
        ("compute/securityProfile/virtualTpmEnabled", b"false"),
        ("compute/storageProfile/dataDisks", b""),
        ("network", b"interface/"),
        ("network/interface/0", b"ipv4/\nipv6/\nmacAddress"),
        ("network/interface/0/ipv4/ipAddress/0/privateIpAddress", b"10.0.0.7"),
    ],
)
def test_text_is_the_bare_value_or_the_names_of_the_children(path: str, text: bytes) -> None:
    """No newline at the end: drainsafe compares the answer raw with Resources."""
    assert select(tree(SCALE_SET, VM, NEWEST), path.split("/"), "text") == InstanceResponse(
        TEXT, text
    )


def test_the_root_lists_its_two_categories_as_directories() -> None:
    """A shell walks the tree by this."""
    assert select(tree(SCALE_SET, VM, NEWEST), [], "text").body == b"compute/\nnetwork/"


def test_a_node_is_compact_json() -> None:
    """As the rest of the service."""
    assert select(tree(SCALE_SET, VM, NEWEST), ["compute", "plan"], "json") == InstanceResponse(
        JSON, b'{"name":"pro","product":"shop","publisher":"acme"}'
    )
    assert (
        select(tree(SCALE_SET, VM, NEWEST), ["network", "interface", "0", "ipv6"], "json").body
        == b'{"ipAddress":[]}'
    )


def test_a_leaf_needs_format_text() -> None:
    """As documented: a bare string is no JSON document on this service."""
    with pytest.raises(Invalid, match="only with format=text"):
        select(tree(SCALE_SET, VM, NEWEST), ["compute", "name"], "json")


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "compute/nothing",
        "compute/name/more",
        "network/interface/1",
        "network/interface/-1",
        "network/interface/00",
        "",
    ],
)
def test_missing_path_is_not_found(path: str) -> None:
    """404, not an empty answer: a script must see that it asked for the wrong thing."""
    with pytest.raises(NotFound):
        select(tree(SCALE_SET, VM, NEWEST), path.split("/"), "text")


@pytest.mark.parametrize("format", ["xml", "", "JSON", "text "])
def test_unknown_format_is_refused(format: str) -> None:
    """There are two."""
    with pytest.raises(Invalid, match="expected json or text"):
        select(tree(SCALE_SET, VM, NEWEST), ["compute"], format)


def test_the_versions_are_listed_oldest_first() -> None:
    """The one endpoint without api-version, so that a client can choose one."""
    assert versions_body().startswith(b'{"apiVersions":["2017-03-01","2017-04-02","2017-08-01",')
    assert versions_body().endswith(b'"2024-07-17","2025-04-07"]}')
