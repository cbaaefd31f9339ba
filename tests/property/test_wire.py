"""What must always hold of bytes and values, whatever they are."""

import contextlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from forewarn.core.event import Ended, Event, Impact, Status
from forewarn.core.fleet import AutoApprove, Instance, Policy, Power, Scope, ScopeKind, Vm
from forewarn.engine.record import SCOPE, SEEN
from forewarn.errors import Invalid, StoreUnusable
from forewarn.fleetfile import parser as fleet
from forewarn.fleetfile.parser import Fleet
from forewarn.fleetfile.schema import SCHEMA
from forewarn.wire import approval
from forewarn.wire.document import body, matches
from forewarn.wire.instance import select, tree
from forewarn.wire.versions import INSTANCE_VERSIONS, VERSIONS, Version

SCHEMA_SAYS = Draft202012Validator(SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER)

patient = settings(deadline=None, max_examples=60)  # a busy machine must not fail the test
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,12}", fullmatch=True)
moments = st.datetimes(
    min_value=datetime(1970, 1, 1),  # noqa: DTZ001 hypothesis adds the time zone
    max_value=datetime(9999, 12, 31),  # noqa: DTZ001
    timezones=st.just(UTC),
)
seconds = moments.map(lambda moment: moment.replace(microsecond=0))
domains = st.integers(0, 99)
events = st.builds(
    Event,
    id=st.uuids().map(lambda id: str(id).upper()),
    resources=st.lists(names, max_size=3).map(tuple),
    not_before=seconds,
    duration_seconds=st.integers(-1, 10**6),
    description=text,
    created_at=moments,
    started_at=st.none() | moments,
    approvals=st.lists(names, max_size=3).map(tuple),
)
tags = st.dictionaries(text.filter(bool), text, max_size=3).map(lambda tags: tuple(tags.items()))
instances = st.builds(
    Instance,
    **dict.fromkeys(
        (
            "computer_name",
            "location",
            "zone",
            "size",
            "os_type",
            "resource_group",
            "sku",
            "user_data",
        ),
        text,
    ),
    priority=st.sampled_from(["", "Regular", "Spot"]),
    mac=st.sampled_from(["", "00:0d:3a:46:e8:76", "000D3A46E876"]),
    public_address=st.just("") | st.ip_addresses(v=4).map(str),
    subnet=st.sampled_from(["", "10.0.0.0/24", "fd00::/64"]),
    tags=tags,
)
notices = st.none() | st.integers(300, 900).map(lambda seconds: timedelta(seconds=seconds))
policies = st.builds(
    Policy,
    auto_approve=st.lists(st.sampled_from(AutoApprove), unique=True).map(tuple),
    terminate_notice=notices,
    user_operations_max=st.integers(1, 10_000),
)
vms = st.builds(
    Vm,
    name=names,
    update_domain=domains,
    fault_domain=domains,
    host=names | st.just(""),
    instance=instances,
)
impacts = st.builds(Impact, due_at=moments, tries=st.integers(0, 100), failures=st.integers(0, 100))
scopes = st.builds(
    Scope,
    name=names,
    policy=policies,
    vms=st.lists(vms, max_size=3).map(tuple),
    events=st.lists(events, max_size=4).map(tuple),
    impacts=st.lists(impacts, max_size=3).map(tuple),
    ended=st.lists(st.builds(Ended, at=moments), max_size=3).map(tuple),
    incarnation=st.integers(1, 2**53),
    seen_at=st.none() | moments,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """A fleet that a file can say: names and addresses once, one VM in a scope of kind vm, no
    events, all running.
    """
    members = draw(st.lists(vms, max_size=6, unique_by=lambda vm: vm.name.lower()))
    addresses = st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6, network="fd00::/8").map(str)
    found = draw(st.lists(addresses, min_size=len(members), max_size=len(members), unique=True))
    ids = draw(
        st.lists(st.just("") | st.uuids().map(str), min_size=len(members), max_size=len(members))
    )
    placed = [
        Vm(
            vm.name,
            address,
            vm.update_domain,
            vm.host,
            Power.RUNNING,
            id,
            vm.fault_domain,
            vm.instance,
        )
        for vm, address, id in zip(members, found, ids, strict=True)
    ]
    titles = draw(
        st.lists(names, min_size=len(placed) + 1, max_size=len(placed) + 1, unique_by=str.lower)
    )
    single = [
        Scope(name=title, policy=draw(policies), vms=(vm,))
        for title, vm in zip(titles, placed[1:], strict=False)
    ]
    kind = draw(st.sampled_from([kind for kind in ScopeKind if kind is not ScopeKind.VM]))
    group = Scope(name=titles[-1], kind=kind, policy=draw(policies), vms=tuple(placed[:1]))
    return Fleet(
        scopes=(*single, group), hosts=tuple(draw(st.lists(names, max_size=3, unique=True)))
    )


@patient
@given(scopes)
def test_a_scope_survives_its_record(scope: Scope) -> None:
    """Encode and decode are each other's inverse, to the microsecond. Polls have a record."""
    assert SCOPE.decode(SCOPE.encode(scope)) == replace(scope, seen_at=None)
    assert scope.seen_at is None or SEEN.decode(SEEN.encode(scope.seen_at)) == scope.seen_at


@patient
@given(scopes, st.data())
def test_truncated_record_is_never_accepted(scope: Scope, data: st.DataObject) -> None:
    """A torn write is found, wherever it tore."""
    record = SCOPE.encode(scope)
    torn = record[: data.draw(st.integers(0, len(record) - 1))]

    with pytest.raises(StoreUnusable):
        SCOPE.decode(torn)


@patient
@given(scopes, st.sampled_from(VERSIONS), st.booleans())
def test_document_is_compact_json_in_wire_order(scope: Scope, version: Version, iso: bool) -> None:
    """For every scope and every version, not only for the captured ones."""
    page = body(scope, version, iso_not_before=iso)
    document = json.loads(page)

    assert page == json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    assert list(document) == ["DocumentIncarnation", "Events"]
    assert document["DocumentIncarnation"] == scope.incarnation
    assert [event["EventId"] for event in document["Events"]] == [
        event.id for event in scope.events if event.type in version.types
    ]
    assert all(tuple(event) == version.fields for event in document["Events"])
    assert all(isinstance(event["NotBefore"], str) for event in document["Events"])


@patient
@given(scopes)
def test_not_before_can_be_read_back_to_the_second(scope: Scope) -> None:
    """What the guest parses is the moment that the rules promised."""
    for result, event in zip(
        json.loads(body(scope, VERSIONS[-1]))["Events"], scope.events, strict=True
    ):
        if event.status is Status.SCHEDULED:
            read = datetime.strptime(result["NotBefore"], "%a, %d %b %Y %H:%M:%S GMT").replace(
                tzinfo=UTC
            )
            assert read == event.not_before


@patient
@given(
    st.integers(1, 2**53),
    st.integers(1, 2**53),
    st.sampled_from(["{}", "W/{}", "{}, x", " x ,{} "]),
)
def test_a_tag_matches_its_own_incarnation_and_no_other(mine: int, other: int, form: str) -> None:
    """304 for the wrong document would hide an event."""
    header = form.format(f'"{mine}"')

    assert matches(header, mine)
    assert matches(header, other) == (mine == other)


@patient
@given(st.binary() | st.text().map(str.encode) | values.map(json.dumps).map(str.encode))
def test_any_approval_body_is_accepted_or_refused(sent: bytes) -> None:
    """A guest may send anything."""
    with contextlib.suppress(Invalid):
        approval.parse(sent)


@patient
@given(st.lists(values | st.fixed_dictionaries({"EventId": values}), max_size=3), values)
def test_approval_like_bodies_are_accepted_or_refused(starts: list[Any], extra: Any) -> None:
    """Near misses are likelier than noise."""
    sent = json.dumps({"DocumentIncarnation": extra, "StartRequests": starts}).encode()
    with contextlib.suppress(Invalid):
        assert approval.parse(sent) == tuple(
            dict.fromkeys(start["EventId"].upper() for start in starts)
        )


@patient
@given(fleets())
def test_a_fleet_survives_its_file_in_json_and_in_yaml(before: Fleet) -> None:
    """`fleet show > file; fleet apply file` changes nothing."""
    file = json.loads(fleet.dump_json(before))

    assert fleet.parse(json.dumps(file).encode(), "fleet.json") == before
    assert fleet.parse(json.dumps(file, ensure_ascii=False).encode(), "fleet.json") == before
    assert fleet.parse(yaml.safe_dump(file, sort_keys=False).encode(), "fleet.yaml") == before
    SCHEMA_SAYS.validate(file)


@patient
@given(
    st.binary()
    | st.text().map(str.encode)
    | values.map(json.dumps).map(str.encode)
    | values.map(yaml.safe_dump).map(str.encode)
)
def test_any_fleet_text_is_accepted_or_refused(text: bytes) -> None:
    """The message always has source and line."""
    refused = _refusal(text)

    assert refused is None or refused.message.startswith(f"fleet.yaml:{refused.facts['line']}: ")


@patient
@given(fleets(), values, st.data())
def test_mutated_file_is_accepted_only_if_the_schema_agrees(
    before: Fleet, value: Any, data: st.DataObject
) -> None:
    """Whatever the parser takes, the schema takes; and what it refuses, it refuses with a place."""
    file = json.loads(fleet.dump_json(before))
    _change_something(file, value, data)
    refused = _refusal(json.dumps(file).encode())

    assert refused is not None or SCHEMA_SAYS.is_valid(file)
    assert refused is None or refused.message.startswith("fleet.yaml:1: ")


@patient
@given(scopes.filter(lambda scope: bool(scope.vms)), st.sampled_from(INSTANCE_VERSIONS))
def test_every_listed_path_can_be_selected(scope: Scope, version: str) -> None:
    """Text of a node names its children; each of them is there, a directory with a slash and a
    value without.
    """
    root = tree(scope, scope.vms[0], version)
    waiting: list[list[str]] = [[]]
    while waiting:  # ends with the tree, which is finite
        path = waiting.pop()
        for name in filter(None, select(root, path, "text").body.decode().split("\n")):
            child = [*path, name.removesuffix("/")]
            if name.endswith("/"):
                waiting.append(child)
            else:
                select(root, child, "text")


def _refusal(text: bytes) -> Invalid | None:
    try:
        fleet.parse(text, "fleet.yaml")
    except Invalid as refused:
        return refused
    return None


def _change_something(file: Any, value: Any, data: st.DataObject) -> None:
    """Goes down by chance and puts another value in, or a member that is not known."""
    node = file
    while True:  # ends where the chosen child is a leaf, at the latest
        keys: list[Any] = (
            [*node, data.draw(text)] if isinstance(node, dict) else list(range(len(node)))
        )
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        child = node[key] if isinstance(node, list) else node.get(key)
        if not isinstance(child, dict | list) or data.draw(st.booleans()):
            node[key] = value
            return
        node = child
