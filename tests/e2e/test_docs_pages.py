"""The examples of the documentation pages work as printed."""

from pathlib import Path

import pytest

from tests.e2e.console_blocks import ROOT, matches, run_page


@pytest.mark.system
def test_lab_tutorial_works_as_printed(tmp_path: Path) -> None:
    assert run_page(ROOT / "docs/lab.md", tmp_path, "Five minutes") == 14


@pytest.mark.system
def test_operator_tutorial_works_as_printed(tmp_path: Path) -> None:
    assert run_page(ROOT / "docs/operate.md", tmp_path, "Tutorial: four hosts") == 22


@pytest.mark.system
@pytest.mark.parametrize(
    ("section", "commands"),
    [
        ("Three of each, on one machine", 29),
        ("TLS and users", 20),
        ("Backup and restore", 22),
        ("Compaction and disk", 15),
    ],
)
def test_many_machines_work_as_printed(tmp_path: Path, section: str, commands: int) -> None:
    assert run_page(ROOT / "docs/many-machines.md", tmp_path, section) == commands


def test_unexpected_output_is_detected() -> None:
    assert matches("a … c\n", "a b c\n")
    assert not matches("a … c\n", "a b d\n")
    assert not matches("", "something\n")
