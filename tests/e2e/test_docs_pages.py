"""The examples of the documentation pages work as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.console_blocks import ROOT, matches, parse_steps, run_page


@pytest.mark.system
def test_lab_tutorial_works_as_printed(tmp_path: Path) -> None:
    assert run_page(ROOT / "docs/lab.md", tmp_path, "Five minutes") == 14


@pytest.mark.system
def test_handler_tutorial_works_as_printed(tmp_path: Path) -> None:
    """An Azure developer's first fifteen minutes; it ends with the report of a whole run."""
    assert run_page(ROOT / "docs/tutorial.md", tmp_path) == 9
    assert "<svg" in (tmp_path / "shop/report.html").read_text()


@pytest.mark.system
def test_ci_files_of_the_tutorial_do_what_they_say(tmp_path: Path) -> None:
    """Their commands are run here; the services themselves cannot be."""
    page = ROOT / "docs/tutorial.md"
    github, azure = map(
        yaml.safe_load,
        re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL),
    )
    steps = github["jobs"]["scheduled-events"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == [step["script"] for step in azure["steps"] if "script" in step]
    assert commands.pop(0) == "pip install 'forewarn[lab]' pytest"

    files = [step.command for step in parse_steps(page) if re.match("cat |python3 -", step.command)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in [*files, *commands]:
        as_root = command.replace('sudo -E env "PATH=$PATH" ', "")
        subprocess.run(["bash", "-c", as_root], cwd=tmp_path, env=environment, check=True)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"pytest.xml", "lab.xml", "report.html"} <= written


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
