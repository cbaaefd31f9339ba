"""The page about scenarios is complete, and its examples work."""

import re
from pathlib import Path

import msgspec
import pytest

from forewarn.errors import Invalid
from forewarn.lab.scenario.expectations import Expectation
from forewarn.lab.scenario.schema import (
    Approves,
    GuestEntry,
    ScenarioFile,
    list_library,
    parse_scenario,
)
from forewarn.lab.scenario.steps import AnyStep, ScenarioStep
from forewarn.lab.scenario.timeline import FORMS
from tests.unit.lab.scenario.small_scenarios import play

PAGE = (Path(__file__).parents[4] / "docs" / "scenarios.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]


def rows(name: str) -> list[str]:
    """The rows whose first cell names this."""
    return [row for row in ROWS if f"`{name}`" in row.split(" | ")[0]]


def members(type_: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(type_)}


@pytest.mark.parametrize(
    "kind", [*ScenarioStep.__args__, *Expectation.__args__], ids=lambda kind: kind.__name__
)
def test_every_verb_and_expectation_is_documented_with_its_members(
    kind: type[msgspec.Struct],
) -> None:
    name = str(kind.__struct_config__.tag)
    documented = [set(re.findall(r"`(\w+)`", row.split(" | ")[1])) for row in rows(name)]

    assert members(kind) - members(AnyStep) in documented or members(kind) in documented


def test_members_conditions_and_library_are_documented() -> None:
    names = [
        *members(ScenarioFile),
        *members(GuestEntry),
        *list_library(),
        *(form.replace("|", "\\|") for form in FORMS),
    ]

    assert [name for name in names if not rows(name)] == []
    assert [of for of in Approves if f"`{of}`" not in PAGE] == []


def test_documented_library_is_the_library() -> None:
    section = PAGE.split("## The library")[1]

    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == set(list_library())


def test_example_of_the_page_passes() -> None:
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)

    assert example
    assert play(parse_scenario(example[1].encode(), "example.yaml")).is_passed


def test_error_on_the_page_is_real() -> None:
    text = """\
name: mine
fleet: {scopes: [{name: web, kind: scale-set, vms: [{name: web-0}, {name: web-1}]}]}
until: 5m
steps:
  - {at: 1m, do: restart, vm: web-9}
"""
    with pytest.raises(Invalid) as caught:
        parse_scenario(text.encode(), "my.yaml")

    assert f"forewarn: {caught.value}\n" in PAGE
