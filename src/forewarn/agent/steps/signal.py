"""`signal`: sends a signal to a process, so that it writes a checkpoint or ends, and waits for the file or for its end."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from forewarn.agent.step import Occasion, StepFailed
from forewarn.agent.steps import process
from forewarn.agent.steps.spec import Spec, only_on_unix
from forewarn.agent.steps.wait import until

MEMBERS = ("send", "pid_file", "unit", "until_file", "until_exit", "systemctl")


@dataclass(frozen=True, slots=True)
class Signal:
    number: int
    pid_file: str = ""
    unit: str = ""
    until_file: str = ""
    is_until_exit: bool = False
    systemctl: str = "systemctl"

    def describe(self) -> str:
        wait = f", wait for {self.until_file}" if self.until_file else ", wait for its end" if self.is_until_exit else ""
        return f"send {signal.Signals(self.number).name} to {self.unit or self.pid_file}{wait}"

    def run(self, occasion: Occasion) -> None:
        """The file counts when it appears or changes after the signal; a process that ends without it has failed."""
        pid = self._pid(occasion)
        before = _mark(self.until_file)
        try:
            os.kill(pid, self.number)
        except OSError as error:
            raise StepFailed(f"process {pid} cannot be sent a signal: {error.strerror}", pid=pid) from error
        if self.until_file:
            until(occasion, lambda: self._is_written(pid, before), waiting_for=lambda: f"{self.until_file} was not written")
        if self.is_until_exit:
            until(occasion, lambda: _has_ended(pid), waiting_for=lambda: f"process {pid} did not end")

    def _is_written(self, pid: int, before: tuple[int, int] | None) -> bool:
        has_ended = _has_ended(pid)  # asked first: its last act may have been the file
        if _mark(self.until_file) not in (None, before):
            return True
        if has_ended:
            raise StepFailed(f"process {pid} ended without writing {self.until_file}", pid=pid)
        return False

    def _pid(self, occasion: Occasion) -> int:
        """Never 0, 1 or less: to the system these mean whole groups, init, or everybody."""
        if self.unit:
            systemctl = process.find(self.systemctl)
            text = process.run(process.Command((systemctl, "show", "--property=MainPID", "--value", "--", self.unit)), occasion)
        else:
            try:
                text = Path(self.pid_file).read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                raise StepFailed(f"{self.pid_file} cannot be read: {error}") from error
        if not text.isdecimal() or int(text) <= 1:
            raise StepFailed(f"{self.unit or self.pid_file} names no process: {text[:60]!r}")
        return int(text)


def _mark(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _has_ended(pid: int) -> bool:
    """A process whose parent has not asked for its exit code is over too."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except OSError:
        return False  # no /proc here


def make(value: object, where: str) -> Signal:
    only_on_unix("signal", where)
    spec = Spec(value, where, members=MEMBERS)
    pid_file, unit = spec.text("pid_file", ""), spec.text("unit", "")
    if bool(pid_file) is bool(unit):
        raise spec.refused("pid_file", "either pid_file or unit")
    return Signal(
        number=_number(spec),
        pid_file=pid_file,
        unit=unit,
        until_file=spec.text("until_file", ""),
        is_until_exit=spec.is_set("until_exit"),
        systemctl=spec.text("systemctl", "systemctl"),
    )


def _number(spec: Spec) -> int:
    name = spec.text("send", expected="the name of a signal, like USR1")
    for known in signal.Signals:
        if name.upper().removeprefix("SIG") == known.name.removeprefix("SIG"):
            return known.value
    raise spec.refused("send", "the name of a signal, like USR1")
