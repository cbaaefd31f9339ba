"""The page about scenarios names all that there is to write, and its example is one."""

import re
from pathlib import Path

import msgspec
import pytest

from forewarn.errors import Invalid
from forewarn.lab.scenario.condition import FORMS
from forewarn.lab.scenario.expectation import EXPECTATIONS
from forewarn.lab.scenario.schema import GuestEntry, Of, ScenarioFile, library, parse
from forewarn.lab.scenario.step import ACTIONS
from tests.unit.lab.scenario.stage import play

PAGE = (Path(__file__).parents[4] / "docs" / "scenarios.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
TIMES = {"at", "when", "after", "repeat"}


def rows(name: str) -> list[str]:
    """The rows whose first cell names this."""
    return [row for row in ROWS if f"`{name}`" in row.split(" | ")[0]]


def members(type_: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(type_)}


@pytest.mark.parametrize("type_", [*ACTIONS, *EXPECTATIONS], ids=lambda type_: type_.__name__)
def test_an_action_or_expectation_stands_in_the_page_with_all_its_members(
    type_: type[msgspec.Struct],
) -> None:
    said = [
        set(re.findall(r"`(\w+)`", row.split(" | ")[1]))
        for row in rows(str(type_.__struct_config__.tag))
    ]

    assert members(type_) - (TIMES if type_ in ACTIONS else set()) in said


def test_members_guests_conditions_and_the_library_stand_in_the_page() -> None:
    names = [
        *members(ScenarioFile),
        *members(GuestEntry),
        *library(),
        *(form.replace("|", "\\|") for form in FORMS),
    ]

    assert [name for name in names if not rows(name)] == []
    assert [of for of in Of if f"`{of}`" not in PAGE] == []


def test_the_page_names_nothing_that_is_not_there() -> None:
    section = PAGE.split("## The library")[1]

    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == set(library())


def test_the_example_is_a_scenario_that_passes() -> None:
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)

    assert example
    assert play(parse(example[1].encode(), "example.yaml")).is_passed


def test_the_mistake_in_the_page_is_told_as_the_page_says() -> None:
    text = """\
name: mine
fleet: {scopes: [{name: web, kind: scale-set, vms: [{name: web-0}, {name: web-1}]}]}
until: 5m
steps:
  - {at: 1m, do: restart, vm: web-9}
"""
    with pytest.raises(Invalid) as told:
        parse(text.encode(), "my.yaml")

    assert f"forewarn: {told.value}\n" in PAGE
