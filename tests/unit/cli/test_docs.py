"""docs/cli.md has every command and every exit code; every command has an example."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from forewarn.auth.tokens import Role
from forewarn.cli.app import app
from forewarn.cli.exit_codes import Exit
from forewarn.cli.lab import FaultName
from forewarn.cli.main import COMMANDS, run
from forewarn.cli.resource import EventCause as CauseChoice
from forewarn.cli.resource import EventType as TypeChoice
from forewarn.core.event import MAINTENANCE_CAUSES, EventType
from forewarn.core.scheduling import MAINTENANCE_TYPES
from forewarn.lab.fault.kinds import SCHEMA as FAULTS
from forewarn.lab.scenario import steps
from forewarn.testing.objects import LabVm

STEPS = {
    step.__struct_config__.tag
    for step in vars(steps).values()
    if hasattr(step, "__struct_config__")
}

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()


def commands(group: Any, before: str = "forewarn") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before} {name}")
        elif not command.hidden:
            yield f"{before} {name}", command


FOUND = dict(commands(get_command(app)))


def test_every_command_is_documented() -> None:
    """Nobody finds a command that is not documented."""
    assert len(FOUND) == 65
    assert [name for name in FOUND if f"| `{name}" not in PAGE] == []


def test_bare_install_knows_the_commands_that_need_an_extra() -> None:
    """It cannot import them, and must tell them from a typing error."""
    assert {*COMMANDS, "agent", "conform"} == {name.split()[1] for name in FOUND}


@pytest.mark.parametrize("name", FOUND)
def test_every_help_has_an_example_that_can_be_typed(name: str) -> None:
    """People read the example first. Its flags must exist."""
    command = FOUND[name]
    (example,) = re.findall(r"^ *Example: (.*)$", command.help, re.MULTILINE)

    assert example == name or example.startswith(f"{name} ")
    if name not in ("forewarn agent", "forewarn hostd", "forewarn conform"):  # argparse has these
        words = shlex.split(example.partition(" > ")[0].removeprefix(name))
        flags = {
            flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= {*flags, "--"}
        command.make_context(name, words, resilient_parsing=True)


@pytest.mark.parametrize("name", ["agent", "hostd", "conform"])
def test_help_without_typer_has_an_example_too(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run([name, "--help"])
    assert f"Example: forewarn {name} " in capsys.readouterr().out


@pytest.mark.parametrize("alias", ["reboot", "preempt", "terminate"])
def test_word_of_the_wire_is_accepted_but_not_listed(alias: str) -> None:
    """Who knows the event type, or the test API, guesses right."""
    vm: Any = get_command(app).commands["vm"]  # type: ignore[attr-defined]

    assert vm.commands[alias].hidden
    assert f"`{alias}`" in PAGE


def test_vocabulary_has_every_event_type() -> None:
    """One table for the words of Azure, the wire, the command line, pytest and scenarios."""
    table = PAGE.partition("## Vocabulary")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    by_wire = [re.findall(r"`(\w+)`", row[2])[0] for row in rows[1:]]

    assert set(by_wire) == {type_.value for type_ in EventType}
    for row in rows[1:]:
        for name in re.findall(r"`vm\.(\w+)\(", row[4]):
            assert hasattr(LabVm, name), name
        for name in re.findall(r"`forewarn (\w+) ([\w-]+)", row[3]):
            assert f"forewarn {' '.join(name)}" in FOUND, name
        for name in re.findall(r"do: (\w+)", row[5]):
            assert name in STEPS, name


def test_choices_are_those_of_the_service() -> None:
    """The command line repeats them, because it works without the service's modules."""
    assert set(get_args(TypeChoice)) == set(MAINTENANCE_TYPES)
    assert set(get_args(CauseChoice)) == set(MAINTENANCE_CAUSES)
    assert list(get_args(FaultName)) == list(FAULTS["discriminator"]["mapping"])
    (role,) = (each for each in FOUND["forewarn token create"].params if each.name == "role")
    assert set(role.type_descriptor.choices) == {each.value for each in Role}


def test_every_exit_code_is_documented() -> None:
    """Scripts depend on them."""
    assert [code for code in Exit if f"\n| {code} |" not in PAGE] == []
