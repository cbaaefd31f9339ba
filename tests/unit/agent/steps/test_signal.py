"""Signals to real processes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed
from forewarn.agent.steps.signal import SignalStep
from tests.unit.agent.steps.build import context, script


@contextmanager
def worker(folder: Path, on_signal: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that does this on USR1, with its pid in `folder/pid`."""
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


def test_checkpoint_is_awaited(tmp_path: Path) -> None:
    """An old one does not count: it must be newer than the signal."""
    file = tmp_path / "checkpoint"
    file.write_text("old")
    with worker(tmp_path, f"echo new > {file}.new; mv {file}.new {file}"):
        make_step("signal", checkpoint(tmp_path, until_file=str(file)), "W").run(context())

    assert file.read_text() == "new\n"


def test_old_checkpoint_does_not_count(tmp_path: Path) -> None:
    """Approving then would lose the work since."""
    (tmp_path / "checkpoint").write_text("old")
    with (
        worker(tmp_path, ":"),
        pytest.raises(StepFailed, match=r"timed out: .*checkpoint was not written"),
    ):
        make_step("signal", checkpoint(tmp_path, until_file=str(tmp_path / "checkpoint")), "W").run(
            context(is_simulated=True)
        )


def test_process_that_exits_without_its_checkpoint_fails(tmp_path: Path) -> None:
    with (
        worker(tmp_path, "exit 1"),
        pytest.raises(StepFailed, match="exited without writing") as failure,
    ):
        make_step("signal", checkpoint(tmp_path, until_file=str(tmp_path / "checkpoint")), "W").run(
            context()
        )

    assert "time" not in failure.value.message


def test_checkpoint_written_before_the_exit_counts(tmp_path: Path) -> None:
    """Many programs write and exit."""
    spec = checkpoint(tmp_path, until_file=str(tmp_path / "checkpoint"), until_exit=True)
    with worker(tmp_path, f"touch {tmp_path}/checkpoint; exit 0"):
        make_step("signal", spec, "W").run(context())

    assert (tmp_path / "checkpoint").exists()


def test_exit_of_a_process_is_awaited(tmp_path: Path) -> None:
    """Even a zombie has exited."""
    with worker(tmp_path, "exit 0") as process:
        make_step("signal", checkpoint(tmp_path, until_exit=True), "W").run(context())

        assert process.wait(5) == 0


def test_process_that_does_not_exit_is_reported(tmp_path: Path) -> None:
    with (
        worker(tmp_path, ":") as process,
        pytest.raises(StepFailed, match=rf"timed out: .*process {process.pid} did not exit"),
    ):
        make_step("signal", checkpoint(tmp_path, until_exit=True), "W").run(
            context(is_simulated=True)
        )


@pytest.mark.parametrize("text", ["", "0", "1", "-1", "-5", "12 13", "abc", "٣", "9" * 32])
def test_pid_that_means_several_processes_is_never_signalled(tmp_path: Path, text: str) -> None:
    """kill(-1) is everything, kill(0) is the agent's own group."""
    (tmp_path / "pid").write_text(text)
    with pytest.raises(StepFailed, match=r"does not name a process|cannot read"):
        make_step("signal", checkpoint(tmp_path), "W").run(context())


def test_missing_process_fails_the_step(tmp_path: Path) -> None:
    """A stale file of a process that died long ago."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "pid").write_text(str(gone.pid))
    with pytest.raises(StepFailed, match=r"cannot signal process .*: No such process"):
        make_step("signal", checkpoint(tmp_path), "W").run(context())


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the beginning of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_process_of_a_unit_comes_from_systemctl(tmp_path: Path, commands: Path) -> None:
    with worker(tmp_path, "exit 0"):
        script(commands / "systemctl", f'echo "$@" > {tmp_path}/arguments', f"cat {tmp_path}/pid")
        SignalStep("sigusr1", unit="x", until_exit=True).run(context())

    assert (tmp_path / "arguments").read_text() == "show --property=MainPID --value -- x\n"


def test_unit_that_is_not_running_has_no_process(commands: Path) -> None:
    """systemctl prints 0 then, and 0 would be the agent's own group."""
    script(commands / "systemctl", "echo 0")
    with pytest.raises(StepFailed, match="x does not name a process: '0'"):
        SignalStep("USR1", unit="x").run(context())


def test_pid_file_must_be_a_regular_file(tmp_path: Path) -> None:
    """Reading a pipe or a device may never end."""
    os.mkfifo(tmp_path / "pid")
    for path in (str(tmp_path / "pid"), "/dev/zero"):
        with pytest.raises(
            StepFailed, match=f"cannot read {path}: it is not a regular file"
        ) as failure:
            make_step("signal", {"send": "USR1", "pid_file": path}, "W").run(context(seconds=5))

        assert "time" not in failure.value.message


def test_long_pid_file_is_rejected(tmp_path: Path) -> None:
    """Its beginning may be another process. The number is beyond Linux's largest."""
    (tmp_path / "pid").write_text("5000000" + " " * 40 + "3")
    with pytest.raises(StepFailed, match=r"cannot read .*pid: it has more than 32 bytes"):
        make_step("signal", checkpoint(tmp_path), "W").run(context())
