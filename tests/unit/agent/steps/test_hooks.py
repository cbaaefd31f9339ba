"""The drop-in directory."""

from pathlib import Path

import pytest

from forewarn.agent.step import StepFailed
from forewarn.agent.steps import make
from tests.unit.agent.steps.build import occasion, script


def hook(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    script(path, f'echo "$(basename $0) $EVENT_ID $EVENT_PHASE" >> {folder}/said', *lines)
    return path


def test_the_hooks_of_a_phase_are_run_in_the_order_of_their_names(tmp_path: Path) -> None:
    """As every drop-in directory does it."""
    for name in ("prepare.d/20-b", "prepare.d/10-a", "recover.d/10-c"):
        hook(tmp_path, name)
    made = make("hooks", str(tmp_path), "W")
    made.run(occasion("prepare"))
    made.run(occasion("start"))
    made.run(occasion("recover"))

    assert (tmp_path / "said").read_text().splitlines() == [
        "10-a E1 prepare",
        "20-b E1 prepare",
        "10-c E1 recover",
    ]


def test_leftovers_of_editors_and_packages_are_not_run(tmp_path: Path) -> None:
    """Nor what was switched off by taking its x away, nor directories."""
    for name in (
        "prepare.d/a~",
        "prepare.d/a.dpkg-old",
        "prepare.d/.a",
        "prepare.d/a.sh",
        "prepare.d/off",
    ):
        hook(tmp_path, name)
    (tmp_path / "prepare.d" / "off").chmod(0o644)
    (tmp_path / "prepare.d" / "folder").mkdir()
    make("hooks", str(tmp_path), "W").run(occasion())

    assert not (tmp_path / "said").exists()


def test_a_hook_that_fails_or_hangs_does_not_keep_the_others(tmp_path: Path) -> None:
    """They were dropped in by different people."""
    hook(tmp_path, "prepare.d/1", "sleep 600")
    hook(tmp_path, "prepare.d/2", "echo no; exit 4")
    hook(tmp_path, "prepare.d/3")
    with pytest.raises(StepFailed, match="1 was ended at its limit; 2 ended with exit code 4: no"):
        make("hooks", str(tmp_path), "W").run(occasion(seconds=6))

    assert (tmp_path / "said").read_text().splitlines()[-1] == "3 E1 prepare"


def test_a_directory_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    """It was named, so somebody believes that his hooks are run."""
    with pytest.raises(StepFailed, match="there is no directory"):
        make("hooks", str(tmp_path / "hoks.d"), "W").run(occasion())
