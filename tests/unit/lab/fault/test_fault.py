"""Faults as values: how they are read, when they are in force, and which requests they touch."""

from datetime import datetime, timedelta
from random import Random
from statistics import mean
from typing import Any

import jsonschema
import pytest

from forewarn.errors import Invalid, NotFound, Refused
from forewarn.fleetfile.yaml_source import FieldError, SourceText, convert
from forewarn.lab.fault.active import FAULTS_MAX, Call, FaultSet, parse_fault
from forewarn.lab.fault.kinds import (
    KINDS,
    SCHEMA,
    ErrorStatus,
    FirstCall,
    Latency,
)
from tests.builders import NOON, SECOND

GET = Call("web-0", "GET", is_document=True)
CHANCE = Random(1)


def added(**members: Any) -> FaultSet:
    faults = FaultSet()
    faults.add(parse_fault({"fault": "status", "code": 500, **members}), NOON)
    return faults


def list_taken(faults: FaultSet, call: Call = GET, random: Random = CHANCE) -> list[str]:
    return [
        each.fault.kind for each in faults.take(call, faults.list_active(call.vm, NOON), random)
    ]


def kinds(faults: FaultSet, now: datetime = NOON, vm: str = "web-0") -> list[str]:
    return [each.fault.kind for each in faults.list_active(vm, now)]


def test_fault_is_parsed_with_all_members() -> None:
    values = {
        "fault": "status",
        "code": 429,
        "retry_after": 5,
        "vms": ["web-0"],
        "from": "90s",
        "for": "1h30m",
        "requests": 3,
    }
    fault = parse_fault(values | {"chance": 0.5, "method": "POST"})

    assert isinstance(fault, ErrorStatus)
    assert (fault.kind, fault.code, fault.retry_after, fault.vms) == ("status", 429, 5, ("web-0",))
    assert (fault.from_, fault.for_, fault.requests, fault.chance, fault.method) == (
        "90s",
        "1h30m",
        3,
        0.5,
        "POST",
    )


def test_fraction_may_be_text() -> None:
    """The YAML reader keeps fractions as text, because of versions such as 22.10."""
    assert latency(seconds="0.25").draw_delay(CHANCE) == 0.25


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({}, "fault", "expected one of first-call, latency, .*got nothing"),
        ({"fault": "stauts"}, "fault", "expected one of .*, got 'stauts'"),
        ({"fault": "status"}, "code", "expected one of 404, 410, 429, 500, 503, got nothing"),
        ({"fault": "status", "code": 200}, "code", "expected one of 404.*, got 200"),
        ({"fault": "status", "cod": 500}, "cod", "unknown member; did you mean 'code'?"),
        ({"fault": "skew", "seconds": 1, "method": "GET"}, "method", "unknown member"),
        ({"fault": "lapse", "requests": 1}, "requests", "unknown member"),
        ({"fault": "latency", "seconds": 120.5}, "seconds", "from 0 to 120, got 120.5"),
        ({"fault": "latency", "seconds": "120.5"}, "seconds", "from 0 to 120, got '120.5'"),
        (
            {"fault": "latency", "seconds": 1, "distribution": "zipf"},
            "distribution",
            "expected one of fixed, normal, uniform",
        ),
        ({"fault": "stale", "for": "15"}, "for", "expected a duration such as 90s, 15m, 2h"),
        ({"fault": "stale", "for": "-1s"}, "for", "expected a duration"),
        ({"fault": "stale", "from": "tomorrow"}, "from", "a time such as"),
        ({"fault": "stale", "from": "2026-02-30T12:00:00Z"}, "from", "a time such as"),
        ({"fault": "stale", "from": "2026-03-04T12:00:00"}, "from", "a time such as"),
        ({"fault": "stale", "chance": 1.1}, "chance", "from 0 .never. to 1 .always., got 1.1"),
        ({"fault": "stale", "requests": 0}, "requests", "from 1 to 1000000, got 0"),
        ({"fault": "stale", "vms": ["web-0", "-"]}, r"vms[1]", "expected a name"),
        ({"fault": "stale", "vms": "web-0"}, "vms", "expected a list"),
        ({"fault": "skew", "seconds": 604_801}, "seconds", "got 604801"),
    ],
)
def test_invalid_fault_names_field_and_expectation(
    values: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(Invalid, match=words) as caught:
        parse_fault(values)
    assert caught.value.facts["field"] == field


def test_invalid_fault_in_a_file_names_its_line() -> None:
    schema = {
        "type": "object",
        "properties": {"faults": {"type": "array", "items": SCHEMA}},
        "required": [],
        "$defs": SCHEMA["$defs"],
    }
    text = b'{"faults": [\n{"fault": "lapse"},\n{"fault": "status", "cod": 500}]}'

    problem = SourceText("story.yaml", text).locate(FieldError(("faults", 1)), schema)

    assert problem.message == "story.yaml:3: faults[1].cod: unknown member; did you mean 'code'?"
    with pytest.raises(FieldError):
        convert({"fault": "status", "cod": 500}, ErrorStatus)


@pytest.mark.parametrize("kind", [each.__struct_config__.tag for each in KINDS])
def test_schema_accepts_what_the_parser_accepts(kind: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "status": {"code": 503},
        "latency": {"seconds": 0.5},
        "skew": {"seconds": -60},
        "short-notice": {"seconds": 30},
    }
    values = {
        "fault": kind,
        "vms": ["web-0"],
        "from": "2026-03-04T12:00:00Z",
        "for": "2h",
        **needed.get(kind, {}),
    }

    jsonschema.validate(values, SCHEMA)
    assert parse_fault(values).kind == kind
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "stray": 1}, SCHEMA)


def test_fault_is_active_from_begin_to_end_exactly() -> None:
    faults = added(**{"from": "10s", "for": "5s"})

    assert kinds(faults, NOON + 9 * SECOND) == []
    assert kinds(faults, NOON + 10 * SECOND) == ["status"]
    assert kinds(faults, NOON + 15 * SECOND - timedelta(microseconds=1)) == ["status"]
    assert kinds(faults, NOON + 15 * SECOND) == []


def test_fault_begins_at_a_time_and_lasts_until_removed() -> None:
    faults = added(**{"from": "2026-03-04T13:00:00+01:00"})
    assert kinds(faults, NOON - SECOND) == []
    assert kinds(faults, NOON + timedelta(days=9)) == ["status"]
    faults.remove("f1")
    assert kinds(faults) == []


def test_fault_affects_its_vms_or_all() -> None:
    assert (kinds(added(vms=["web-0"])), kinds(added(vms=["web-1"]))) == (["status"], [])
    assert kinds(added(vms=["web-0"]), vm="web-00") == []
    assert kinds(added(), vm="anybody") == ["status"]
    assert kinds(added(), vm="") == []


def test_fault_counts_its_requests() -> None:
    faults = added(requests=3)
    assert [len(list_taken(faults)) for _ in range(5)] == [1, 1, 1, 0, 0]


def test_chance_repeats_with_its_seed() -> None:
    def drawn(seed: int) -> list[int]:
        faults, random = added(chance=0.3), Random(seed)
        return [len(list_taken(faults, random=random)) for _ in range(1000)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 250 < sum(drawn(1)) < 350


def test_request_spared_by_chance_is_not_counted() -> None:
    faults, random = added(chance="0.5", requests=2), Random(3)
    assert sum(len(list_taken(faults, random=random)) for _ in range(100)) == 2


def test_fault_affects_only_its_method() -> None:
    faults = added(method="POST")
    assert list_taken(faults) == []
    assert len(list_taken(faults, Call("web-0", "POST", is_document=False))) == 1


def test_document_faults_affect_only_gets_of_it() -> None:
    faults = FaultSet()
    faults.add(parse_fault({"fault": "stale", "requests": 1}), NOON)
    assert list_taken(faults, Call("web-0", "GET", is_document=False)) == []
    assert len(list_taken(faults)) == 1


def test_faults_are_applied_in_a_fixed_order() -> None:
    faults = FaultSet()
    kinds_added = (
        "reset",
        "text-plain",
        "stale",
        "no-started",
        "first-call",
        "no-events",
        "truncate",
        "empty",
    )
    for kind in kinds_added:
        faults.add(parse_fault({"fault": kind}), NOON)

    assert list_taken(faults) == [
        *("first-call", "no-started", "stale"),
        *("no-events", "text-plain", "empty", "truncate", "reset"),
    ]


def test_fault_counts_only_requests_that_reach_it() -> None:
    faults = added(requests=1)
    faults.add(parse_fault({"fault": "refuse", "requests": 1}), NOON)
    faults.add(parse_fault({"fault": "stale", "requests": 1}), NOON)

    touched = [list_taken(faults) for _ in range(4)]
    assert touched == [["refuse"], ["status"], ["stale"], []]


def test_lapse_affects_a_vm_but_no_request() -> None:
    faults = FaultSet()
    faults.add(parse_fault({"fault": "lapse", "vms": ["web-0"], "for": "10s"}), NOON)
    assert (faults.is_lapsing("web-0", NOON), faults.is_lapsing("web-1", NOON)) == (True, False)
    assert not faults.is_lapsing("web-0", NOON + 10 * SECOND)
    assert list_taken(faults) == []


def test_unknown_id_is_refused() -> None:
    faults = added()
    with pytest.raises(NotFound, match="no fault 'f9'"):
        faults.remove("f9")


def test_at_most_a_hundred_faults_at_a_time() -> None:
    faults = FaultSet()
    for _ in range(FAULTS_MAX):
        faults.add(parse_fault({"fault": "stale", "for": "10s"}), NOON)
    with pytest.raises(Refused, match="100 faults"):
        faults.add(parse_fault({"fault": "stale"}), NOON + 9 * SECOND)
    faults.add(parse_fault({"fault": "stale"}), NOON + 10 * SECOND)
    assert list(faults.by_id) == [f"f{FAULTS_MAX + 1}"]


def latency(**members: Any) -> Latency:
    fault = parse_fault({"fault": "latency", **members})
    assert isinstance(fault, Latency)
    return fault


def drawn(count: int = 4000, **members: Any) -> list[float]:
    fault, random = latency(**members), Random(11)
    return sorted(fault.draw_delay(random) for _ in range(count))


def test_latency_follows_its_distribution() -> None:
    assert drawn(10, seconds=2) == [2.0] * 10
    uniform = drawn(distribution="uniform", seconds=2, spread_seconds=1)
    assert 1 <= uniform[0] < 1.01 < 2.99 < uniform[-1] <= 3
    normal = drawn(distribution="normal", seconds=10, spread_seconds=1)
    assert 9.9 < mean(normal) < 10.1
    assert 8.9 < normal[len(normal) * 16 // 100] < 9.1


@pytest.mark.parametrize("distribution", ["fixed", "uniform", "normal"])
def test_latency_is_between_zero_and_its_cap(distribution: str) -> None:
    some = drawn(distribution=distribution, seconds=3, spread_seconds=30, cap_seconds=5)
    assert 0 <= some[0] <= some[-1] <= 5
    assert drawn(10, distribution=distribution, seconds=0) == [0.0] * 10


def test_first_call_may_take_two_minutes() -> None:
    longest = parse_fault({"fault": "first-call", "seconds": 120})
    assert isinstance(longest, FirstCall)
    assert longest.draw_delay(CHANCE) == 120


def test_unknown_kind_lists_the_valid_kinds() -> None:
    with pytest.raises(
        Invalid, match=r"^fault: expected one of first-call, latency, .*, got 'stauts'"
    ):
        parse_fault({"fault": "stauts"})
