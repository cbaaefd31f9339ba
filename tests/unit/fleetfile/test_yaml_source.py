"""The words for a misfit: every member of every schema says what is expected there, whether it must
be told or not.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.json import schema

from forewarn.fleetfile.schema import SCHEMA as FLEET
from forewarn.fleetfile.yaml_source import FieldError, explain
from forewarn.lab.fault.kinds import SCHEMA as FAULT
from forewarn.lab.scenario.schema import SCHEMA as SCENARIO
from forewarn.platform.remote import ReportedVm, WorkRequest

DAEMON = {"$defs": {**schema(WorkRequest)["$defs"], **schema(ReportedVm)["$defs"]}}
SCHEMAS = {"fleet": FLEET, "fault": FAULT, "scenario": SCENARIO, "daemon": DAEMON}
WRONG = 5.5
"""Which no member takes but those for a number, and they are told so anyhow."""


def members(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each mapping that a schema speaks of, with each of its members."""
    for name, node in schema["$defs"].items():
        for member in node.get("properties", ()):
            yield name, member


def is_list(node: dict[str, Any]) -> bool:
    return any(one.get("type") == "array" for one in (node, *node.get("anyOf", ())))


EVERY = [(which, *member) for which, schema in SCHEMAS.items() for member in members(schema)]


@pytest.mark.parametrize(("which", "name", "member"), EVERY)
def test_invalid_member_error_says_what_is_expected(which: str, name: str, member: str) -> None:
    found = {"$ref": f"#/$defs/{name}", "$defs": SCHEMAS[which]["$defs"]}

    path, words = explain(FieldError((member,)), {member: WRONG}, found)

    assert path == (member,)
    assert words.startswith("expected ")
    assert words.endswith(", got 5.5")
    assert words != "expected a list, got 5.5" or is_list(
        found["$defs"][name]["properties"][member]
    )


def schema_of(member: dict[str, Any]) -> dict[str, Any]:
    inner = {
        "properties": {"size": {"description": "a size"}},
        "required": [],
        "additionalProperties": False,
    }
    return {"properties": {"thing": member}, "required": [], "$defs": {"Thing": inner}}


def test_errors_inside_optional_members_are_located() -> None:
    optional = schema_of({"anyOf": [{"$ref": "#/$defs/Thing"}, {"type": "null"}], "default": None})

    assert explain(FieldError(("thing", "size")), {"thing": {"size": 7}}, optional) == (
        ("thing", "size"),
        "expected a size, got 7",
    )
    assert (
        explain(FieldError(("thing",)), {"thing": {"sise": 7}}, optional)[1]
        == "unknown member; did you mean 'size'?"
    )


def test_member_description_wins_over_type_description() -> None:
    optional = schema_of(
        {"description": "a fine thing", "anyOf": [{"description": "a thing"}, {"type": "null"}]}
    )

    assert (
        explain(FieldError(("thing",)), {"thing": 5}, optional)[1] == "expected a fine thing, got 5"
    )


def test_union_uses_its_own_description() -> None:
    either = schema_of(
        {"description": "this or that", "anyOf": [{"description": "this"}, {"description": "that"}]}
    )

    assert (
        explain(FieldError(("thing",)), {"thing": 5}, either)[1] == "expected this or that, got 5"
    )
