"""The health file."""

from pathlib import Path

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed
from tests.unit.agent.steps.build import context


def test_a_health_file_goes_before_the_event_and_comes_back_as_it_was(tmp_path: Path) -> None:
    """Content and mode are somebody else's business."""
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


def test_a_health_file_that_the_reboot_swept_away_is_made_anew(tmp_path: Path) -> None:
    """/run does not survive what the event was about."""
    make_step("file", {"path": str(tmp_path / "ready"), "content": "ok\n"}, "W").run(
        context("recover")
    )

    assert (tmp_path / "ready").read_text() == "ok\n"
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def test_a_drain_file_is_there_for_the_event_and_gone_after_it(tmp_path: Path) -> None:
    """The other way round, for balancers that look for a file that says no."""
    made = make_step(
        "file", {"path": str(tmp_path / "drain"), "in_prepare": "present", "content": "x"}, "W"
    )
    made.run(context("prepare"))
    made.run(context("prepare"))

    assert (tmp_path / "drain").read_text() == "x"
    made.run(context("recover"))
    made.run(context("recover"))

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_failure_of_the_step(tmp_path: Path) -> None:
    """And what is there already is left as it is."""
    with pytest.raises(StepFailed, match=r"cannot make .*ready present: No such file or directory"):
        make_step("file", str(tmp_path / "no" / "ready"), "W").run(context("recover"))


def test_a_directory_is_never_moved(tmp_path: Path) -> None:
    """A path that is one word too short must not take the whole site away."""
    with pytest.raises(StepFailed, match=r"cannot make .* absent: it is a directory"):
        make_step("file", str(tmp_path), "W").run(context())

    assert tmp_path.is_dir()


def test_a_health_file_that_an_operator_had_removed_stays_removed(tmp_path: Path) -> None:
    """Recover undoes what prepare did, and prepare found nothing to take away."""
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


def test_what_was_kept_is_dropped_where_somebody_put_the_file_back_by_hand(tmp_path: Path) -> None:
    """Else the old one would come back after the next event."""
    path = tmp_path / "ready"
    path.write_text("old")
    made = make_step("file", str(path), "W")
    made.run(context("prepare"))
    path.write_text("by hand")
    made.run(context("recover"))

    assert path.read_text() == "by hand"
    assert list(tmp_path.iterdir()) == [path]


def test_a_drain_file_that_an_operator_had_put_there_stays_there(tmp_path: Path) -> None:
    """The machine was out of the balancer before the event, and for another reason."""
    path = tmp_path / "drain"
    path.write_text("by hand")
    made = make_step("file", {"path": str(path), "in_prepare": "present"}, "W")
    made.run(context("prepare"))
    made.run(context("recover"))

    assert path.read_text() == "by hand"
