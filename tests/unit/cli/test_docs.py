"""docs/cli.md has every command and every exit code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from forewarn.cli.app import app
from forewarn.cli.exit_codes import Exit

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()


def commands(group: Any, before: str = "forewarn") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}"


def test_every_command_is_documented() -> None:
    """Nobody finds a command that is not documented."""
    found = list(commands(get_command(app)))

    assert len(found) == 64
    assert [name for name in found if f"| `{name}" not in PAGE] == []


def test_every_exit_code_is_documented() -> None:
    """Scripts depend on them."""
    assert [code for code in Exit if f"\n| {code} |" not in PAGE] == []
