"""The fleet file: what it says, and what it says when it is wrong."""

import json
from datetime import timedelta
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from forewarn.core.event import EventType
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
from forewarn.engine import record
from forewarn.errors import Invalid
from forewarn.fleetfile.parser import Fleet, dump_json, parse
from forewarn.fleetfile.schema import SCHEMA, FleetFile, InstanceEntry

SCHEMA_SAYS = Draft202012Validator(SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER)

A_NAME = "a name of 1 to 128 letters, digits, '.', '_' and '-', not starting with '.' or '-'"
ID, UPPER_ID = b"6f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f10", b"6F1C0C1E-6D0B-5A7E-9D5C-0A4E5C2B7F10"
A_NOTICE = "a time from 5m to 15m, such as 10m, 5m30s, 600s or PT10M, or off"
DESIGNED = b"""\
scopes:
  - name: web
    kind: availability-set            # vm | cloud-service | availability-set | scale-set
    policy: {terminate_notice: 10m}
    vms:
      - {name: web-0, address: 10.0.0.10, update_domain: 0, host: host-a}
      - {name: web-1, address: 10.0.0.11, update_domain: 1, host: host-b}
"""
WEB = Scope(
    name="web",
    kind=ScopeKind.AVAILABILITY_SET,
    policy=Policy(terminate_notice=timedelta(minutes=10)),
    vms=(
        Vm("web-0", address="10.0.0.10", update_domain=0, host="host-a"),
        Vm("web-1", address="10.0.0.11", update_domain=1, host="host-b"),
    ),
)


def message(text: str | bytes) -> str:
    """What a person reads who got a file wrong."""
    with pytest.raises(Invalid) as refused:
        parse(text if isinstance(text, bytes) else text.encode(), "fleet.yaml")
    return refused.value.message


def vm(**members: Any) -> dict[str, Any]:
    return {"scopes": [{"name": "web", "vms": [{"name": "web-0"} | members]}]}


def policy(**members: Any) -> dict[str, Any]:
    return {"scopes": [{"name": "web", "kind": "scale-set", "policy": members}]}


def dump(fleet: Fleet) -> Any:
    return json.loads(dump_json(fleet))


def read(file: dict[str, Any]) -> Fleet:
    return parse(json.dumps(file).encode(), "fleet.json")


def test_documented_example_is_parsed() -> None:
    """DESIGN.md, section 5."""
    assert parse(DESIGNED, "fleet.yaml") == Fleet(scopes=(WEB,))


def test_json_and_yaml_give_the_same_fleet() -> None:
    """JSON is what the control API speaks; both come from one fleet."""
    file = {
        "scopes": [
            {
                "name": "web",
                "kind": "availability-set",
                "policy": {"terminate_notice": "PT10M"},
                "vms": [
                    {"name": "web-0", "address": "10.0.0.10", "host": "host-a"},
                    {"name": "web-1", "address": "10.0.0.11", "update_domain": 1, "host": "host-b"},
                ],
            }
        ]
    }

    assert (
        read(file)
        == parse(json.dumps(file, indent="\t").encode(), "fleet.json")
        == parse(DESIGNED, "fleet.yaml")
    )


def test_every_member_is_parsed() -> None:
    """All that a file can say, once."""
    fleet = parse(
        b"""
hosts: [host-a, host-b, host-a]
scopes:
- name: api
  kind: scale-set
  policy:
    approval: quorum
    auto_approve: [user-restart, user-redeploy]
    terminate_notice: off
    couple_terminates: true
    user_operations_max: 10000
    failed_hardware: Redeploy
  vms:
  - name: api_0
    address: 2001:DB8:0::1
    update_domain: 99
    host: host-a
    id: 02AAB8A4-74EF-476E-8182-F6D2BA4166A6
    fault_domain: 3
    instance:
      computer_name: api000000
      location: rack-3
      zone: "1"
      size: large
      os_type: Windows
      priority: Spot
      mac: 00:0d:3a:46:e8:76
      public_address: 203.0.113.9
      subnet: 10.0.0.0/24
      resource_group: shop
      subscription: s
      publisher: debian
      offer: debian-12
      sku: 22.10
      version: latest
      plan_name: pro
      plan_product: shop
      plan_publisher: acme
      admin_username: op
      public_keys: [ssh-ed25519 AAAA op@desk]
      disable_password_authentication: true
      license_type: RHEL_BYOS
      physical_zone: rack-3-AZ01
      security_type: TrustedLaunch
      secure_boot: true
      virtual_tpm: false
      encryption_at_host: null
      user_data: |
        #cloud-config
      tags: {role: front, tier: "1"}
""",
        "fleet.yaml",
    )

    assert fleet == Fleet(
        hosts=("host-a", "host-b"),
        scopes=(
            Scope(
                name="api",
                kind=ScopeKind.SCALE_SET,
                policy=Policy(
                    approval=Approval.QUORUM,
                    auto_approve=(AutoApprove.USER_RESTART, AutoApprove.USER_REDEPLOY),
                    terminate_notice=None,
                    couple_terminates=True,
                    user_operations_max=10000,
                    failed_hardware=EventType.REDEPLOY,
                ),
                vms=(
                    Vm(
                        "api_0",
                        address="2001:db8::1",
                        update_domain=99,
                        host="host-a",
                        id="02aab8a4-74ef-476e-8182-f6d2ba4166a6",
                        fault_domain=3,
                        instance=Instance(
                            computer_name="api000000",
                            location="rack-3",
                            zone="1",
                            size="large",
                            os_type="Windows",
                            priority="Spot",
                            mac="00:0d:3a:46:e8:76",
                            public_address="203.0.113.9",
                            subnet="10.0.0.0/24",
                            resource_group="shop",
                            subscription="s",
                            publisher="debian",
                            offer="debian-12",
                            sku="22.10",
                            version="latest",
                            plan_name="pro",
                            plan_product="shop",
                            plan_publisher="acme",
                            admin_username="op",
                            public_keys=("ssh-ed25519 AAAA op@desk",),
                            disable_password_authentication=True,
                            license_type="RHEL_BYOS",
                            physical_zone="rack-3-AZ01",
                            security_type="TrustedLaunch",
                            secure_boot=True,
                            virtual_tpm=False,
                            encryption_at_host=None,
                            user_data="#cloud-config\n",
                            tags=(("role", "front"), ("tier", "1")),
                        ),
                    ),
                ),
            ),
        ),
    )


def test_omitted_members_have_the_rules_defaults() -> None:
    """The defaults are written once, in `core`."""
    assert read({"scopes": [{"name": "web", "vms": [{"name": "web-0"}]}]}).scopes == (
        Scope(name="web", vms=(Vm("web-0"),)),
    )
    assert read(vm()).scopes[0].vms[0].instance is DEFAULT_INSTANCE
    assert InstanceEntry.__struct_fields__ == Instance.__struct_fields__


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("10m", 600),
        ("5m30s", 330),
        ("900s", 900),
        ("15m", 900),
        ("14m60s", 900),
        ("PT5M", 300),
        ("PT5M30S", 330),
    ],
)
def test_notice_accepts_short_and_iso_durations(text: str, seconds: int) -> None:
    """Azure's setting is an ISO duration, `PT5M` to `PT15M`."""
    assert read(policy(terminate_notice=text)).scopes[0].policy.terminate_notice == timedelta(
        seconds=seconds
    )


@pytest.mark.parametrize(
    ("hosts", "is_accepted"),
    [
        (("host-a", "host-b"), True),
        (("host-a", ""), True),
        (("host-a", "host-a"), False),
        (("", ""), False),
    ],
)
def test_an_address_is_unique_on_each_host(hosts: tuple[str, str], is_accepted: bool) -> None:
    """Hosts may have networks of their own; what they route to each other we do not know."""
    vms = [
        {"name": f"vm-{number}", "address": "10.0.0.1"} | ({"host": host} if host else {})
        for number, host in enumerate(hosts)
    ]
    text = json.dumps({"scopes": [{"name": "web", "kind": "scale-set", "vms": vms}]}).encode()
    if is_accepted:
        assert len(parse(text, "fleet.json").scopes[0].vms) == 2
        return
    with pytest.raises(
        Invalid,
        match=r"scopes\[0\]\.vms\[1\]\.address: expected an address not used by"
        r" scopes\[0\]\.vms\[0\]\.address, got '10\.0\.0\.1'",
    ):
        parse(text, "fleet.json")


@pytest.mark.parametrize(
    ("written", "kept"),
    [("::FFFF:10.0.0.1", "10.0.0.1"), ("FD00:0:0::7", "fd00::7"), ("10.0.0.1", "10.0.0.1")],
)
def test_addresses_are_normalized(written: str, kept: str) -> None:
    """The caller's address is looked up as text, so there must be one text for it."""
    assert read(vm(address=written)).scopes[0].vms[0].address == kept


def test_yaml_aliases_are_resolved() -> None:
    """A rack of equal machines is described once."""
    fleet = parse(
        b"scopes: [{name: a, vms: [{name: a, instance: &rack {location: r1}}]}, {name: b, vms:"
        b" [{name: b, instance: *rack}]}]",
        "fleet.yaml",
    )

    assert [scope.vms[0].instance.location for scope in fleet.scopes] == ["r1", "r1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            DESIGNED.replace(b"update_domain: 1", b"update_domain: x"),
            (
                "fleet.yaml:7: scopes[0].vms[1].update_domain: expected a whole number from 0 to"
                " 99, got 'x'"
            ),
        ),
        (
            DESIGNED.replace(b"update_domain: 1", b"update_domain: 100"),
            (
                "fleet.yaml:7: scopes[0].vms[1].update_domain: expected a whole number from 0 to"
                " 99, got 100"
            ),
        ),
        (
            DESIGNED.replace(b"update_domain: 1", b"updatedomain: 1"),
            (
                "fleet.yaml:7: scopes[0].vms[1].updatedomain: unknown member; did you mean"
                " 'update_domain'?"
            ),
        ),
        (
            DESIGNED.replace(b"    vms:", b"    zzz: 1\n    vms:"),
            "fleet.yaml:5: scopes[0].zzz: unknown member; expected one of name, kind, policy, vms",
        ),
        (
            DESIGNED.replace(b"name: web-1, ", b""),
            f"fleet.yaml:7: scopes[0].vms[1].name: expected {A_NAME}, got nothing",
        ),
        (
            DESIGNED.replace(b"availability-set ", b"zone"),
            (
                "fleet.yaml:3: scopes[0].kind: expected one of availability-set, cloud-service,"
                " scale-set, vm, got 'zone'"
            ),
        ),
        (
            DESIGNED.replace(b"terminate_notice: 10m", b"terminate_notice: 299s"),
            f"fleet.yaml:4: scopes[0].policy.terminate_notice: expected {A_NOTICE}, got '299s'",
        ),
        (
            DESIGNED.replace(b"10.0.0.11", b"10.0.0.256"),
            (
                "fleet.yaml:7: scopes[0].vms[1].address: expected an IPv4 or IPv6 address, got"
                " '10.0.0.256'"
            ),
        ),
        (
            DESIGNED.replace(b"name: web-1", b"name: WEB-0"),
            (
                "fleet.yaml:7: scopes[0].vms[1].name: expected a VM name not used by"
                " scopes[0].vms[0].name, got 'WEB-0'"
            ),
        ),
        (
            DESIGNED.replace(b"10.0.0.10", b"fd00:0::1")
            .replace(b"10.0.0.11", b"fd00::1")
            .replace(b"host-b", b"host-a"),
            (
                "fleet.yaml:7: scopes[0].vms[1].address: expected an address not used by"
                " scopes[0].vms[0].address, got 'fd00::1'"
            ),
        ),
        (
            DESIGNED + b"  - name: Web\n    kind: scale-set\n",
            (
                "fleet.yaml:8: scopes[1].name: expected a scope name not used by scopes[0].name,"
                " got 'Web'"
            ),
        ),
        (
            b"scopes:\n- name: web\n  vms: [{name: a}, {name: b}]",
            (
                "fleet.yaml:3: scopes[0].vms: expected exactly one VM in a scope of kind vm, got"
                ' [{"name": "a"}, {"name": "b"}]'
            ),
        ),
        (
            DESIGNED.replace(b"host: host-a", b"name: web-9"),
            "fleet.yaml:6: scopes[0].vms[0].name: duplicate key",
        ),
        (
            DESIGNED.replace(b"    vms:", b"\tvms:"),
            "fleet.yaml:5: not valid YAML or JSON: found character that cannot start any token",
        ),
        (
            b"scopes:\n- name: a\n  vms:\n",
            "fleet.yaml:3: scopes[0].vms: expected a list of at most 1000 VMs, got nothing",
        ),
        (b"scopes: []\nhosts: [-x]", f"fleet.yaml:2: hosts[0]: expected {A_NAME}, got '-x'"),
        (b"", "fleet.yaml:1: expected a mapping with scopes, hosts, got nothing"),
        (b"- a", 'fleet.yaml:1: expected a mapping with scopes, hosts, got ["a"]'),
        (
            b"hosts: []",
            "fleet.yaml:1: scopes: expected a list of at most 100000 scopes, got nothing",
        ),
        (
            b"scopes:\n- web",
            "fleet.yaml:2: scopes[0]: expected a mapping with name, kind, policy, vms, got 'web'",
        ),
        (b"a: 1\n--- 2", "fleet.yaml:2: expected one document, got a second one"),
        (
            b"scopes: !!set {a}",
            "fleet.yaml:1: scopes: expected a value without a tag, got 'tag:yaml.org,2002:set'",
        ),
        (b"a: 1\n? [b]\n: c", "fleet.yaml:2: expected a name as key, got another kind of value"),
        (b"a: 1\nb: *c", "fleet.yaml:2: b: expected a defined anchor, got '*c'"),
        (b"a: 1\nb: \xff", "fleet.yaml:2: expected UTF-8, got the byte 0xff"),
        (
            b"a: 1\nb: \x01",
            "fleet.yaml:2: not valid YAML or JSON: control characters are not allowed",
        ),
    ],
)
def test_error_names_line_field_expected_and_actual(text: bytes, expected: str) -> None:
    """A fleet file is written by hand: the message is all the help there is."""
    assert message(text) == expected


def test_error_facts_hold_the_location() -> None:
    """The console marks the field, an editor the line."""
    with pytest.raises(Invalid) as refused:
        parse(DESIGNED.replace(b"update_domain: 1", b"update_domain: x"), "fleet.yaml")

    assert refused.value.facts == {
        "source": "fleet.yaml",
        "line": 7,
        "field": "scopes[0].vms[1].update_domain",
    }


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            b"name: web-0, id: %b" % ID,
            b"name: web-1, id: %b" % UPPER_ID,
            (
                "fleet.yaml:7: scopes[0].vms[1].id: expected an id not used by scopes[0].vms[0].id,"
                " got "
            ),
        ),
        (
            b"name: %b" % UPPER_ID,
            b"name: web-1, id: %b" % ID,
            (
                "fleet.yaml:6: scopes[0].vms[0].name: expected a VM name that is not"
                " scopes[0].vms[1].id, got "
            ),
        ),
    ],
)
def test_no_vm_may_have_another_vms_id_as_its_id_or_name(
    first: bytes, second: bytes, expected: str
) -> None:
    """A proxy signs ids: with such a fleet a VM would read and approve as another.

    The refusal names both places.
    """
    text = DESIGNED.replace(b"name: web-0", first).replace(b"name: web-1", second)

    with pytest.raises(Invalid) as refused:
        parse(text, "fleet.yaml")
    assert refused.value.message == f"{expected}'{UPPER_ID.decode()}'"


def test_a_vm_may_be_named_by_its_own_id() -> None:
    """Where names come from a hypervisor's UUIDs; nobody can be taken for somebody else."""
    text = DESIGNED.replace(b"name: web-0", b"name: %b, id: %b" % (ID, ID))

    assert parse(text, "fleet.yaml").scopes[0].vms[0].name == ID.decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"scopes": [\n  {"name": "a",\n   "vms": [{"name": "a", "update_domain": 1.5}]}]}',
            (
                "fleet.yaml:3: scopes[0].vms[0].update_domain: expected a whole number from 0 to"
                " 99, got 1.5"
            ),
        ),
        (
            '{"scopes": [],\n "scopes": []}',
            "fleet.yaml:2: scopes: duplicate key",
        ),
        (
            '{"scopes": [\n[',
            "fleet.yaml:2: not valid YAML or JSON: did not find expected node content",
        ),
        (
            '{"scopes": [\n  {"name": "a", "vms": [{"name": "\\ud83d\\ude00"}]}]}',
            f"fleet.yaml:2: scopes[0].vms[0].name: expected {A_NAME}, got '😀'",
        ),
    ],
)
def test_json_errors_have_lines(text: str, expected: str) -> None:
    """It is read the fast way, and again with lines when it is wrong."""
    assert message(text) == expected


def test_lone_surrogate_is_refused() -> None:
    """A lone surrogate is legal in JSON's grammar and in no output of ours."""
    assert "invalid Unicode character escape" in message(
        json.dumps(vm(instance={"location": "\ud800"}))
    )


def test_quoted_values_are_text() -> None:
    """The way to write a zone `1` or a tag `true`."""
    fleet = parse(
        b"""
        scopes:
          - name: a
            vms: [{name: a, instance: {zone: '1', tags: {a: "true", b: 'null'}}}]
        """,
        "fleet.yaml",
    )

    assert fleet.scopes[0].vms[0].instance == Instance(
        zone="1", tags=(("a", "true"), ("b", "null"))
    )


def test_yes_no_on_off_are_text() -> None:
    """`off` is a notice, `no` a country and `yes` no boolean here."""
    fleet = parse(
        b"scopes: [{name: no, policy: {terminate_notice: off}, vms: [{name: on, instance:"
        b" {location: yes}}]}]",
        "fleet.yaml",
    )

    assert (fleet.scopes[0].name, fleet.scopes[0].vms[0].name) == ("no", "on")
    assert fleet.scopes[0].policy.terminate_notice is None
    assert message(
        "scopes: [{name: a, kind: scale-set, policy: {couple_terminates: yes}}]"
    ).endswith("expected true or false, got 'yes'")


@pytest.mark.parametrize("text", ["[" * 1_000_000, "- " * 1_000_000, '{"a":' * 1_000_000])
def test_deep_nesting_is_refused(text: str) -> None:
    """libyaml's composer recurses in C: this text would end the process."""
    assert "expected at most 16 levels, got more" in message(text)


def test_nested_aliases_count_fully_against_the_limit() -> None:
    """Nine lines can say a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]

    assert message("\n".join(lines)).endswith("expected at most 4000000 values, got more")


def test_one_alias_may_be_used_by_thousands_of_vms() -> None:
    """The limit is on what is said, not on how often a rack is pointed at."""
    vms = [
        ", ".join(f"{{name: v{scope}-{n}, instance: *rack}}" for n in range(1000))
        for scope in range(5)
    ]
    scopes = "".join(
        f", {{name: s{number}, kind: scale-set, vms: [{each}]}}" for number, each in enumerate(vms)
    )
    text = "scopes: [{name: a, vms: [{name: w, instance: &rack {location: r1}}]}" + scopes + "]"

    assert sum(len(scope.vms) for scope in parse(text.encode(), "fleet.yaml").scopes) == 5001


def test_file_over_64_mib_is_not_parsed() -> None:
    """Everything has a limit."""
    assert (
        message(b" " * (64 * 1024 * 1024 + 1))
        == "fleet.yaml: expected at most 67108864 bytes, got 67108865"
    )


GOOD: list[dict[str, Any]] = [
    {"scopes": []},
    {"scopes": [], "hosts": ["a", "a"]},
    {"scopes": [{"name": "a", "kind": kind} for kind in ("cloud-service",)]},
    {
        "scopes": [
            {"name": "a", "kind": "scale-set", "vms": []},
            {"name": "b", "kind": "availability-set"},
        ]
    },
    vm(),
    vm(name="_" + "a" * 127),
    vm(name="a.b-C_9", host="9"),
    vm(
        address="10.0.0.1",
        update_domain=99,
        fault_domain=0,
        host="h",
        id="02aab8a4-74ef-476e-8182-f6d2ba4166a6",
    ),
    vm(address="::1"),
    vm(instance={}),
    vm(
        instance={
            "mac": "000d3a46e876",
            "subnet": "fd00::/64",
            "public_address": "::2",
            "user_data": "x" * 65536,
        }
    ),
    vm(instance={"tags": {"k" * 512: "v" * 256}, "location": "ü" * 256}),
    vm(instance={"public_keys": ["k" * 8192] * 50, "secure_boot": None, "virtual_tpm": False}),
    policy(),
    policy(approval="all", auto_approve=[], couple_terminates=True, user_operations_max=1),
    policy(auto_approve=["user-restart", "user-restart"], terminate_notice="off"),
    policy(terminate_notice="PT15M"),
    policy(max_unavailable=1),
    policy(max_unavailable="100%"),
    policy(failed_hardware="Reboot"),
]
BAD: list[Any] = [
    None,
    [],
    "scopes",
    {},
    {"scopes": None},
    {"scopes": {}},
    {"scopes": [None]},
    {"scopes": [], "host": []},
    {"scopes": [], "hosts": "a"},
    {"scopes": [], "hosts": [""]},
    {"scopes": [{}]},
    {"scopes": [{"name": "a"}]},
    {"scopes": [{"name": "a", "vms": []}]},
    {"scopes": [{"name": "a", "kind": "vm"}]},
    {"scopes": [{"name": "a", "vms": [{"name": "b"}, {"name": "c"}]}]},
    {"scopes": [{"name": "a", "kind": "VM", "vms": [{"name": "b"}]}]},
    {"scopes": [{"name": "a", "kind": "scale-set", "events": []}]},
    vm(name=""),
    vm(name="a" * 129),
    vm(name="-a"),
    vm(name=".a"),
    vm(name="a b"),
    vm(name="a/b"),
    vm(name="ä"),
    vm(name="a\n"),
    vm(name=5),
    vm(name=None),
    vm(address=""),
    vm(address="10.0.0"),
    vm(address="10.0.0.01"),
    vm(address="10.0.0.1/24"),
    vm(address="fe80::1%eth0"),
    vm(address="host-a"),
    vm(address=167772161),
    vm(update_domain=-1),
    vm(update_domain=100),
    vm(update_domain="1"),
    vm(update_domain=True),
    vm(update_domain=1.5),
    vm(fault_domain=100),
    vm(host=""),
    vm(id="02aab8a4"),
    vm(id="02aab8a474ef476e8182f6d2ba4166a6"),
    vm(power="running"),
    vm(instance=[]),
    vm(instance={"name": "x"}),
    vm(instance={"zone": 1}),
    vm(instance={"location": "x" * 257}),
    vm(instance={"mac": "00:0d"}),
    vm(instance={"plan": {"name": "pro"}}),
    vm(instance={"public_keys": "ssh-rsa AAAA"}),
    vm(instance={"public_keys": [{"keyData": "ssh-rsa AAAA"}]}),
    vm(instance={"public_keys": ["k"] * 51}),
    vm(instance={"public_keys": ["k" * 8193]}),
    vm(instance={"secure_boot": "true"}),
    vm(instance={"public_address": "x.example"}),
    vm(instance={"subnet": ""}),
    vm(instance={"user_data": "x" * 65537}),
    vm(instance={"tags": []}),
    vm(instance={"tags": {"a": 1}}),
    vm(instance={"tags": {"": "a"}}),
    vm(instance={"tags": {"k" * 513: ""}}),
    vm(instance={"tags": {"k": "v" * 257}}),
    vm(instance={"tags": {str(n): "" for n in range(51)}}),
    policy(approval="most"),
    policy(failed_hardware="Freeze"),
    policy(failed_hardware="redeploy"),
    policy(failed_hardware=None),
    policy(approval=None),
    policy(auto_approve="user-restart"),
    policy(auto_approve=["user-delete"]),
    policy(terminate_notice=300),
    policy(terminate_notice=False),
    policy(terminate_notice=""),
    policy(terminate_notice="PT"),
    policy(terminate_notice="5"),
    policy(terminate_notice="1h"),
    policy(terminate_notice="OFF"),
    policy(couple_terminates=1),
    policy(user_operations_max=0),
    policy(user_operations_max=10001),
    policy(max_unavailable=0),
    policy(max_unavailable=100_001),
    policy(max_unavailable="0%"),
    policy(max_unavailable="101%"),
    policy(max_unavailable="2"),
    policy(max_unavailable="5%\n"),
    policy(max_unavailable=True),
]
BEYOND_A_SCHEMA: list[dict[str, Any]] = [
    policy(terminate_notice="4m59s"),
    policy(terminate_notice="15m1s"),
    policy(terminate_notice="PT16M"),
    vm(instance={"subnet": "10.0.0.1/24"}),
    vm(instance={"subnet": "nowhere"}),
    vm(update_domain=1.0),
    {"scopes": [{"name": "a", "kind": "scale-set"}, {"name": "A", "kind": "scale-set"}]},
    {"scopes": [{"name": "a", "vms": [{"name": "x"}]}, {"name": "b", "vms": [{"name": "X"}]}]},
    {"scopes": [{"name": n, "vms": [{"name": n, "address": "10.0.0.1"}]} for n in ("a", "b")]},
]


@pytest.mark.parametrize("file", GOOD, ids=range(len(GOOD)))
def test_schema_and_parser_accept_the_same_good_files(file: dict[str, Any]) -> None:
    """An editor that follows the schema must not mark what the server takes."""
    SCHEMA_SAYS.validate(file)
    assert read(file) == read(dump(read(file)))


@pytest.mark.parametrize("file", BAD, ids=range(len(BAD)))
def test_schema_and_parser_refuse_the_same_bad_files(file: Any) -> None:
    """Nor may it pass what the server refuses."""
    assert not SCHEMA_SAYS.is_valid(file)
    assert message(json.dumps(file)).startswith("fleet.yaml:1: ")


@pytest.mark.parametrize("file", BEYOND_A_SCHEMA, ids=range(len(BEYOND_A_SCHEMA)))
def test_parser_refuses_what_a_schema_cannot_express(file: dict[str, Any]) -> None:
    """Spans, networks and what stands twice in the fleet.

    (JSON Schema also takes 1.0 for a whole number; we do not.)
    """
    SCHEMA_SAYS.validate(file)
    assert message(json.dumps(file)).startswith("fleet.yaml:1: scopes[")


def test_schema_is_valid_and_so_are_its_defaults() -> None:
    """Draft 2020-12; editors offer the defaults."""
    Draft202012Validator.check_schema(SCHEMA)
    for entry in SCHEMA["$defs"].values():
        for member in entry.get("properties", {}).values():
            if "default" in member:
                assert SCHEMA_SAYS.evolve(schema={"$defs": SCHEMA["$defs"], **member}).is_valid(
                    member["default"]
                )
    assert SCHEMA["$ref"] == f"#/$defs/{FleetFile.__name__}"


def test_dump_omits_defaults() -> None:
    """`forewarn fleet show` gives back what a person would have written."""
    assert dump(parse(DESIGNED, "fleet.yaml")) == {
        "scopes": [
            {
                "name": "web",
                "kind": "availability-set",
                "policy": {"terminate_notice": "10m"},
                "vms": [
                    {"name": "web-0", "address": "10.0.0.10", "host": "host-a"},
                    {"name": "web-1", "address": "10.0.0.11", "update_domain": 1, "host": "host-b"},
                ],
            }
        ]
    }
    assert dump(Fleet()) == {"scopes": []}
    assert dump(Fleet(hosts=("host-a",))) == {"scopes": [], "hosts": ["host-a"]}
    assert dump(read(policy(terminate_notice="off")))["scopes"][0]["policy"] == {
        "terminate_notice": "off"
    }
    assert dump(read(policy(terminate_notice="5m30s")))["scopes"][0]["policy"] == {
        "terminate_notice": "5m30s"
    }
    assert dump(read(policy(terminate_notice="5m")))["scopes"][0] == {
        "name": "web",
        "kind": "scale-set",
    }


def test_budget_is_a_number_or_percentage_and_round_trips() -> None:
    for said, budget in ((2, Budget(2)), ("25%", Budget(25, is_percent=True))):
        read_back = read(policy(max_unavailable=said))

        assert read_back.scopes[0].policy.max_unavailable == budget
        assert dump(read_back)["scopes"][0]["policy"] == {"max_unavailable": said}


def test_a_scope_holds_at_most_1000_vms() -> None:
    """Every change of a scope writes all of it, and all its VMs read one document."""
    names = [f"{{name: v{number}}}" for number in range(1001)]
    text = "scopes:\n- name: big\n  kind: scale-set\n  vms: [{}]\n"

    assert (
        len(parse(text.format(", ".join(names[:1000])).encode(), "fleet.yaml").scopes[0].vms)
        == 1000
    )
    with pytest.raises(
        Invalid, match=r"fleet.yaml:4: scopes\[0\].vms: expected a list of at most 1000 VMs"
    ):
        parse(text.format(", ".join(names)).encode(), "fleet.yaml")


def test_stored_scope_over_the_limit_is_still_loaded() -> None:
    """A store from before the limit must open: its VMs are there, and somebody has to tell them."""
    scope = Scope(name="big", vms=tuple(Vm(name=f"v{number}") for number in range(1001)))

    assert record.SCOPE.decode(record.SCOPE.encode(scope)) == scope
