"""A fleet from what libvirt tells."""

import pytest
from msgspec.structs import replace

from forewarn.core.fleet import Instance, Scope, ScopeKind, Vm
from forewarn.errors import Invalid
from forewarn.fleetfile.parser import Fleet
from forewarn.platform.libvirt.domain_xml import DiscoveredVm, parse
from forewarn.platform.libvirt.fleet_import import sync_fleet

UUID = "11111111-2222-3333-4444-555555555555"
METADATA = '<metadata><f:vm xmlns:f="urn:forewarn:vm:1" {}/></metadata>'
XML = """<domain type='kvm'><name>web-0</name>
<uuid>11111111-2222-3333-4444-55555555555{number}</uuid>
{metadata}<memory unit='KiB'>1048576</memory>
<devices>
<interface type='bridge'><mac address='52:54:00:AA:00:01'/><target dev='vnet3'/></interface>
<interface type='network'><mac address='52:54:00:aa:00:02'/></interface></devices></domain>"""


def parsed(attributes: str = "", leases: dict[str, list[str]] | None = None) -> DiscoveredVm:
    metadata = METADATA.format(attributes) if attributes else ""
    return parse(
        XML.format(number=5, metadata=metadata), host="host-a", is_active=True, leases=leases or {}
    )


def found(name: str, **more: object) -> DiscoveredVm:
    made = DiscoveredVm(name=name, id=f"id-of-{name}", host="host-a")
    return replace(made, **more)


def shape(fleet: Fleet) -> dict[str, list[str]]:
    return {scope.name: [f"{vm.name}@{vm.host}" for vm in scope.vms] for scope in fleet.scopes}


FLEET = Fleet(
    scopes=(
        Scope(
            name="web",
            kind=ScopeKind.AVAILABILITY_SET,
            vms=(Vm(name="web-0", host="host-a", update_domain=3), Vm(name="web-1", host="host-b")),
        ),
        Scope(name="db", vms=(Vm(name="db", host="host-a", id="id-of-db"),)),
    ),
    hosts=("host-c",),
)


def test_domain_xml_gives_name_id_all_macs_and_addresses() -> None:
    result = parsed(leases={"52:54:00:aa:00:02": ["fe80::1", "2001:db8::7", "10.0.0.7"]})

    assert result == DiscoveredVm(
        name="web-0",
        id=UUID,
        host="host-a",
        macs=("52:54:00:aa:00:01", "52:54:00:aa:00:02"),
        addresses=("10.0.0.7", "2001:db8::7"),
        ports=("vnet3",),
        memory_bytes=1 << 30,
    )


def test_a_domain_that_is_off_has_no_ports() -> None:
    """A port may be defined by name; while the domain is off another one can have that name."""
    assert parse(XML.format(number=5, metadata=""), host="", is_active=False, leases={}).ports == ()


def test_metadata_gives_scope_kind_and_domains() -> None:
    result = parsed('scope="web" kind="scale-set" update-domain="4" fault-domain="1"')

    assert (result.scope, result.kind, result.update_domain, result.fault_domain) == (
        "web",
        ScopeKind.SCALE_SET,
        4,
        1,
    )


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            'kind="herd"',
            "metadata of domain 'web-0': Invalid enum value 'herd' .*; kind is one of vm, cloud",
        ),
        ('update-domain="100"', "`int` <= 99 - at `..update-domain`, got {'update-domain': '100'}"),
        ('fault-domain="-1"', "`int` >= 0 - at `..fault-domain`, got {'fault-domain': '-1'}"),
        ('fault-domain="²"', "Expected `int | null`, got `str` - at `..fault-domain`"),
    ],
)
def test_invalid_metadata_is_refused(attributes: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parsed(attributes)


def test_known_vm_keeps_what_libvirt_does_not_know() -> None:
    known = Vm(
        name="web-0",
        host="host-b",
        update_domain=3,
        address="10.0.0.1",
        instance=Instance(size="big"),
    )
    fleet = Fleet(scopes=(Scope(name="web", kind=ScopeKind.AVAILABILITY_SET, vms=(known,)),))

    (scope,) = sync_fleet(
        fleet, [found("web-0", macs=("52:54:00:aa:00:01", "52:54:00:aa:00:02"))], ["host-a"]
    ).scopes

    result = Instance(size="big", mac="52:54:00:aa:00:01")
    assert scope.vms == (replace(known, host="host-a", id="id-of-web-0", instance=result),)


@pytest.mark.parametrize(
    ("known", "leased", "expected"),
    [
        ("10.0.0.7", ("10.0.0.8", "10.0.0.7"), "10.0.0.7"),
        ("10.0.0.6", ("10.0.0.8", "10.0.0.7"), "10.0.0.8"),
        ("", ("10.0.0.8", "10.0.0.7"), "10.0.0.8"),
        ("10.0.0.6", (), "10.0.0.6"),
    ],
)
def test_known_address_stays_while_it_is_among_the_leases(
    known: str, leased: tuple[str, ...], expected: str
) -> None:
    """A second interface, or a lease that ends later, must not lock out a VM that polls."""
    fleet = Fleet(scopes=(Scope(name="db", vms=(Vm(name="db", address=known, host="host-a"),)),))

    (scope,) = sync_fleet(fleet, [found("db", addresses=leased)], ["host-a"]).scopes

    assert scope.vms[0].address == expected


def test_new_domain_gets_its_own_scope() -> None:
    fleet = sync_fleet(FLEET, [found("web-0"), found("db"), found("new")], ["host-a"])

    assert shape(fleet)["new"] == ["new@host-a"]
    assert fleet.scopes[-1].kind is ScopeKind.VM


def test_metadata_assigns_a_domain_to_a_scope() -> None:
    fleet = sync_fleet(
        Fleet(),
        [found("a", scope="web", update_domain=1), found("b", scope="web", update_domain=2)],
        ["host-a"],
    )

    (scope,) = fleet.scopes
    assert (scope.name, scope.kind) == ("web", ScopeKind.AVAILABILITY_SET)
    assert [(vm.name, vm.update_domain) for vm in scope.vms] == [("a", 1), ("b", 2)]


def test_changed_metadata_moves_a_vm_to_another_scope() -> None:
    fleet = sync_fleet(FLEET, [found("web-0"), found("db", scope="web")], ["host-a"])

    assert shape(fleet) == {"web": ["web-0@host-a", "web-1@host-b", "db@host-a"]}


def test_vm_is_removed_only_if_its_host_was_queried() -> None:
    """Of a host that nobody asked nothing is known."""
    assert shape(sync_fleet(FLEET, [], ["host-a"])) == {"web": ["web-1@host-b"]}
    assert shape(sync_fleet(FLEET, [found("web-0"), found("db")], ["host-a"])) == shape(FLEET)


def test_a_vm_that_was_renamed_is_known_by_its_id() -> None:
    fleet = sync_fleet(FLEET, [found("web-0"), found("db-2", id="id-of-db")], ["host-a"])

    assert shape(fleet)["db"] == ["db-2@host-a"]


def test_recreated_domain_is_matched_by_name() -> None:
    known = Vm(name="web-0", host="host-a", id="old", update_domain=3)
    fleet = Fleet(scopes=(Scope(name="web", kind=ScopeKind.AVAILABILITY_SET, vms=(known,)),))

    (scope,) = sync_fleet(fleet, [found("web-0", host="host-b")], ["host-a", "host-b"]).scopes

    assert scope.vms == (replace(known, id="id-of-web-0", host="host-b"),)


def test_vm_of_the_same_name_on_another_host_is_not_lost() -> None:
    """It may still be there, with the id that the fleet knows."""
    with pytest.raises(
        Invalid,
        match="two VMs are named 'db': another on host-b and id-of-db on host-a; expected",
    ):
        sync_fleet(FLEET, [found("db", id="another", host="host-b", scope="web")], ["host-b"])


def test_new_domain_with_a_freed_name_is_another_vm() -> None:
    domains = [found("db-2", id="id-of-db"), found("db", id="another", scope="db")]

    assert shape(sync_fleet(FLEET, [found("web-0"), *domains], ["host-a"]))["db"] == [
        "db-2@host-a",
        "db@host-a",
    ]
    with pytest.raises(
        Invalid,
        match="domain 'db' names no scope, and a scope 'db' already exists",
    ):
        sync_fleet(FLEET, [domains[0], found("db", id="another")], ["host-a"])


@pytest.mark.parametrize("known", [Fleet(), FLEET])
@pytest.mark.parametrize("scope", ["", "web"])
def test_duplicate_domain_names_are_refused(scope: str, known: Fleet) -> None:
    two = [
        found("web-0", id="one", scope=scope),
        found("web-0", id="other", host="host-b", scope=scope),
    ]

    with pytest.raises(
        Invalid,
        match="two VMs are named 'web-0': one on host-a and other on host-b; expected",
    ):
        sync_fleet(known, two, ["host-a", "host-b"])


def test_conflicting_scope_kinds_are_refused() -> None:
    two = [
        found("a", scope="web", kind=ScopeKind.SCALE_SET),
        found("b", scope="web", kind=ScopeKind.CLOUD_SERVICE),
    ]

    message = (
        "scope 'web' is scale-set in domain 'a' and cloud-service in domain 'b'; expected one kind"
    )
    with pytest.raises(Invalid, match=message):
        sync_fleet(Fleet(), two, ["host-a"])
    (scope,) = sync_fleet(Fleet(), [two[0], found("b", scope="web")], ["host-a"]).scopes
    assert scope.kind is ScopeKind.SCALE_SET


def test_domain_defined_twice_counts_where_it_runs() -> None:
    copies = [found("web-0", is_active=False), found("web-0", host="host-b")]

    assert "web-0@host-b" in shape(sync_fleet(FLEET, copies, ["host-a", "host-b"]))["web"]
    assert "web-0@host-b" in shape(sync_fleet(FLEET, copies[::-1], ["host-a", "host-b"]))["web"]


def test_metadata_can_exclude_a_domain() -> None:
    assert shape(sync_fleet(Fleet(), [parsed('ignore="yes"')], ["host-a"])) == {}


def test_queried_hosts_are_added_to_the_fleet() -> None:
    assert sync_fleet(FLEET, [], ["host-c", "host-z"]).hosts == ("host-c", "host-z")


def test_syncing_again_changes_nothing() -> None:
    domains = [found("web-0", scope="web"), found("db"), found("new", addresses=("10.0.0.9",))]
    once = sync_fleet(FLEET, domains, ["host-a"])

    assert sync_fleet(once, domains, ["host-a"]) == once
