"""`signal`: sends a signal to a process, so that it writes a checkpoint or exits, and waits for
the file or for the exit.
"""

import os
import signal
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from forewarn.agent.config_reader import SettingError, checked
from forewarn.agent.steps.base import (
    CHECK_SECONDS,
    StepContext,
    StepFailed,
    call_with_timeout,
    pause,
)
from forewarn.agent.steps.command import RunStep, run_command

PID_BYTES_MAX = 32
PID_MAX = 2**31 - 1


def _signal_name(name: object) -> str:
    return f"SIG{str(name).upper().removeprefix('SIG')}"


def _is_signal(name: object) -> bool:
    return isinstance(name, str) and _signal_name(name) in signal.Signals.__members__


@dataclass(frozen=True, slots=True)
class SignalStep:
    send: Annotated[str, checked("the name of a signal, like USR1", _is_signal)]
    pid_file: str = ""
    unit: str = ""
    until_file: str = ""
    until_exit: bool = False

    def __post_init__(self) -> None:
        if bool(self.pid_file) is bool(self.unit):
            raise SettingError("pid_file", "either pid_file or unit")

    def describe(self) -> str:
        wait = ", wait for its end" if self.until_exit else ""
        if self.until_file:
            wait = f", wait for {self.until_file}"
        return f"send {_signal_name(self.send)} to {self.unit or self.pid_file}{wait}"

    def run(self, context: StepContext) -> None:
        """The file counts when it appears or changes after the signal. A process that exits
        without writing it has failed.
        """
        pid = self._find_pid(context)
        before = self._file_version(context)
        try:
            os.kill(pid, signal.Signals[_signal_name(self.send)])
        except OSError as error:
            raise StepFailed(f"cannot signal process {pid}: {error.strerror}", pid=pid) from error
        # Both end at the limit: `pause` raises there.
        while self.until_file and not self._is_written(pid, before, context):
            pause(context, CHECK_SECONDS, f"{self.until_file} was not written")
        while self.until_exit and not _has_exited(pid):
            pause(context, CHECK_SECONDS, f"process {pid} did not exit")

    def _is_written(self, pid: int, before: tuple[int, int] | None, context: StepContext) -> bool:
        has_exited = _has_exited(pid)  # checked first: writing the file may be its last act
        if self._file_version(context) not in (None, before):
            return True
        if has_exited:
            raise StepFailed(f"process {pid} exited without writing {self.until_file}", pid=pid)
        return False

    def _file_version(self, context: StepContext) -> tuple[int, int] | None:
        """On a lost file server, even stat() may never return."""
        if not self.until_file:
            return None
        try:
            return call_with_timeout(context, lambda: _stat_version(self.until_file))
        except TimeoutError as error:
            raise StepFailed(f"cannot read {self.until_file}: {error}") from error

    def _find_pid(self, context: StepContext) -> int:
        """Never 0, 1 or negative: those mean process groups, init, or all processes."""
        if self.unit:
            show = ("systemctl", "show", "--property=MainPID", "--value", "--", self.unit)
            text = run_command(RunStep(show), context)
        else:
            try:
                text = call_with_timeout(context, lambda: _read_regular_file(self.pid_file))
            except (OSError, ValueError) as error:
                raise StepFailed(f"cannot read {self.pid_file}: {error}") from error
        if len(text) > PID_BYTES_MAX or not text.isdecimal() or not 1 < int(text) <= PID_MAX:
            source = self.unit or self.pid_file
            raise StepFailed(f"{source} does not name a process: {text[:60]!r}")
        return int(text)


def _read_regular_file(path: str) -> str:
    """Reading a pipe or a device could block, or never end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        content = file.read(PID_BYTES_MAX + 1)
    if len(content) > PID_BYTES_MAX:
        raise OSError(f"it has more than {PID_BYTES_MAX} bytes")
    return content.decode("ascii").strip()


def _stat_version(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _has_exited(pid: int) -> bool:
    """A zombie has exited too: only its parent has not noticed yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"
