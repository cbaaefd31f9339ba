"""The page of faults names every kind and member, and its examples are faults."""

import re
from pathlib import Path

import pytest

from forewarn.fleetfile.yaml_source import SourceText
from forewarn.lab.fault.active import parse_fault
from forewarn.lab.fault.kinds import KINDS, SCHEMA, AnyFault


def get_kind(type_: type[AnyFault]) -> str:
    return str(type_.__struct_config__.tag)


PAGE = (Path(__file__).parents[4] / "docs" / "faults.md").read_text()
SHARED = ("fault", "vms", "from", "for", "requests", "chance", "method")


def test_every_kind_has_a_section() -> None:
    assert set(re.findall(r"^### (.+)$", PAGE, re.MULTILINE)) == {get_kind(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=get_kind)
def test_every_member_of_a_kind_is_documented(kind: type) -> None:
    section = PAGE.partition(f"### {get_kind(kind)}\n")[2].partition("\n#")[0]
    members = [name for name in SCHEMA["$defs"][kind.__name__]["properties"] if name not in SHARED]

    assert [name for name in members if f"\n| `{name}` |" not in section] == []
    example = re.search(r"```yaml\n(.+?)```", section, re.DOTALL)
    assert example is not None
    values = SourceText("page", example[1].encode()).load()
    assert isinstance(values, dict)
    assert parse_fault(values).kind == get_kind(kind)


def test_shared_members_are_documented() -> None:
    assert [name for name in SHARED if f"\n| `{name}` |" not in PAGE.partition("\n## ")[0]] == []
