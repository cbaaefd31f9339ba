"""The health file."""

from pathlib import Path

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed
from tests.unit.agent.steps.build import context


def test_health_file_is_removed_and_restored_as_it_was(tmp_path: Path) -> None:
    """With its content and mode."""
    path = tmp_path / "ready"
    path.write_text("as it was")
    path.chmod(0o640)
    made = make_step("file", str(path), "W")
    made.run(context("prepare"))
    made.run(context("start"))

    assert not path.exists()
    made.run(context("recover"))
    made.run(context("recover"))

    assert path.read_text() == "as it was"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_health_file_lost_in_the_reboot_is_created(tmp_path: Path) -> None:
    """/run does not survive a reboot."""
    make_step("file", {"path": str(tmp_path / "ready"), "content": "ok\n"}, "W").run(
        context("recover")
    )

    assert (tmp_path / "ready").read_text() == "ok\n"
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def test_drain_file_exists_during_the_event(tmp_path: Path) -> None:
    """For load balancers that check for a file that means no."""
    made = make_step(
        "file", {"path": str(tmp_path / "drain"), "in_prepare": "present", "content": "x"}, "W"
    )
    made.run(context("prepare"))
    made.run(context("prepare"))

    assert (tmp_path / "drain").read_text() == "x"
    made.run(context("recover"))
    made.run(context("recover"))

    assert list(tmp_path.iterdir()) == []


def test_missing_directory_fails_the_step(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"cannot make .*ready present: No such file or directory"):
        make_step("file", str(tmp_path / "no" / "ready"), "W").run(context("recover"))


def test_directory_is_never_moved(tmp_path: Path) -> None:
    """A path that is too short must not remove the whole site."""
    with pytest.raises(StepFailed, match=r"cannot make .* absent: it is a directory"):
        make_step("file", str(tmp_path), "W").run(context())

    assert tmp_path.is_dir()


def test_health_file_removed_by_an_operator_stays_removed(tmp_path: Path) -> None:
    """Recover undoes what prepare did, and prepare removed nothing."""
    path = tmp_path / "ready"
    made = make_step("file", str(path), "W")
    for phase in ("prepare", "start", "recover", "recover"):
        made.run(context(phase))

    assert not path.exists()
    path.write_text("back")
    made.run(context("prepare"))
    assert not path.exists()
    made.run(context("recover"))

    assert path.read_text() == "back"
    assert list(tmp_path.iterdir()) == [path]


def test_kept_file_is_dropped_if_an_operator_restored_it(tmp_path: Path) -> None:
    """Otherwise the old one would come back after the next event."""
    path = tmp_path / "ready"
    path.write_text("old")
    made = make_step("file", str(path), "W")
    made.run(context("prepare"))
    path.write_text("by hand")
    made.run(context("recover"))

    assert path.read_text() == "by hand"
    assert list(tmp_path.iterdir()) == [path]


def test_drain_file_created_by_an_operator_stays(tmp_path: Path) -> None:
    """The machine was out of the load balancer before the event, for another reason."""
    path = tmp_path / "drain"
    path.write_text("by hand")
    made = make_step("file", {"path": str(path), "in_prepare": "present"}, "W")
    made.run(context("prepare"))
    made.run(context("recover"))

    assert path.read_text() == "by hand"
