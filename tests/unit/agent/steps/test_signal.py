"""Signals to real processes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed, StepTimedOut
from forewarn.agent.steps.signal import SignalStep
from tests.unit.agent.steps.build import context, script


@contextmanager
def worker(folder: Path, on_signal: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that does this on USR1. It says when it is ready, and stands in `folder/pid`."""
    text = f"trap '{on_signal}' USR1; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(["/bin/sh", "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (folder / "pid").write_text(f"{process.pid}\n")
        try:
            yield process
        finally:
            process.kill()


def checkpoint(folder: Path, **more: object) -> dict[str, object]:
    return {"send": "USR1", "pid_file": str(folder / "pid"), **more}


def test_a_checkpoint_is_waited_for(tmp_path: Path) -> None:
    """An old one does not count: it must be newer than the signal."""
    file = tmp_path / "checkpoint"
    file.write_text("old")
    with worker(tmp_path, f"echo new > {file}.new; mv {file}.new {file}"):
        make_step("signal", checkpoint(tmp_path, until_file=str(file)), "W").run(context())

    assert file.read_text() == "new\n"


def test_an_old_checkpoint_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """To approve on it would lose the work since then."""
    (tmp_path / "checkpoint").write_text("old")
    with worker(tmp_path, ":"), pytest.raises(StepTimedOut, match="checkpoint was not written"):
        make_step("signal", checkpoint(tmp_path, until_file=str(tmp_path / "checkpoint")), "W").run(
            context(is_simulated=True)
        )


def test_a_process_that_ends_without_its_checkpoint_has_failed(tmp_path: Path) -> None:
    """And is not waited for any longer."""
    with (
        worker(tmp_path, "exit 1"),
        pytest.raises(StepFailed, match="exited without writing") as failure,
    ):
        make_step("signal", checkpoint(tmp_path, until_file=str(tmp_path / "checkpoint")), "W").run(
            context()
        )

    assert not isinstance(failure.value, StepTimedOut)


def test_a_checkpoint_that_was_the_last_act_counts(tmp_path: Path) -> None:
    """Many programs write and end."""
    spec = checkpoint(tmp_path, until_file=str(tmp_path / "checkpoint"), until_exit=True)
    with worker(tmp_path, f"touch {tmp_path}/checkpoint; exit 0"):
        make_step("signal", spec, "W").run(context())

    assert (tmp_path / "checkpoint").exists()


def test_the_end_of_a_process_is_waited_for(tmp_path: Path) -> None:
    """Though nobody has asked for its exit code yet."""
    with worker(tmp_path, "exit 0") as process:
        make_step("signal", checkpoint(tmp_path, until_exit=True), "W").run(context())

        assert process.wait(5) == 0


def test_a_process_that_does_not_end_is_told_at_the_limit(tmp_path: Path) -> None:
    """By its number, so that one can look."""
    with (
        worker(tmp_path, ":") as process,
        pytest.raises(StepTimedOut, match=f"process {process.pid} did not exit"),
    ):
        make_step("signal", checkpoint(tmp_path, until_exit=True), "W").run(
            context(is_simulated=True)
        )


@pytest.mark.parametrize("text", ["", "0", "1", "-1", "-5", "12 13", "abc", "٣", "9" * 32])
def test_a_number_that_means_more_than_one_process_is_never_signalled(
    tmp_path: Path, text: str
) -> None:
    """kill(-1) is everybody, kill(0) is ourselves."""
    (tmp_path / "pid").write_text(text)
    with pytest.raises(StepFailed, match=r"does not name a process|cannot read"):
        make_step("signal", checkpoint(tmp_path), "W").run(context())


def test_a_process_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    """A stale file of a process that died long ago."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "pid").write_text(str(gone.pid))
    with pytest.raises(StepFailed, match=r"cannot signal process .*: No such process"):
        make_step("signal", checkpoint(tmp_path), "W").run(context())


def test_the_process_of_a_unit_is_asked_of_systemctl(tmp_path: Path) -> None:
    """systemd knows its main process better than any file."""
    with worker(tmp_path, "exit 0"):
        systemctl = script(
            tmp_path / "systemctl", f'echo "$@" > {tmp_path}/asked', f"cat {tmp_path}/pid"
        )
        SignalStep("sigusr1", unit="x", until_exit=True, systemctl=systemctl).run(context())

    assert (tmp_path / "asked").read_text() == "show --property=MainPID --value -- x\n"


def test_a_unit_that_is_not_running_has_no_process(tmp_path: Path) -> None:
    """systemctl says 0 then, and 0 would be ourselves."""
    step = SignalStep("USR1", unit="x", systemctl=script(tmp_path / "systemctl", "echo 0"))
    with pytest.raises(StepFailed, match="x does not name a process: '0'"):
        step.run(context())


def test_a_pid_file_that_is_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path) -> None:
    """To read from it might never end, and the agent with it."""
    os.mkfifo(tmp_path / "pid")
    for path in (str(tmp_path / "pid"), "/dev/zero"):
        with pytest.raises(
            StepFailed, match=f"cannot read {path}: it is not a regular file"
        ) as failure:
            make_step("signal", {"send": "USR1", "pid_file": path}, "W").run(context(seconds=5))

        assert not isinstance(failure.value, StepTimedOut)


def test_a_pid_file_that_is_too_long_is_refused_and_not_read_in_part(tmp_path: Path) -> None:
    """What stands first in it may be another process.

    The number here is beyond those that Linux gives.
    """
    (tmp_path / "pid").write_text("5000000" + " " * 40 + "3")
    with pytest.raises(StepFailed, match=r"cannot read .*pid: it has more than 32 bytes"):
        make_step("signal", checkpoint(tmp_path), "W").run(context())
