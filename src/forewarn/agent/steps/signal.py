"""`signal`: sends a signal to a process, so that it writes a checkpoint or ends, and waits for the
file or for its end.
"""

import os
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

from forewarn.agent.step import Occasion, StepFailed, StepTimedOut
from forewarn.agent.steps import process
from forewarn.agent.steps.spec import Spec, only_on_unix
from forewarn.agent.steps.wait import until, within

MEMBERS = ("send", "pid_file", "unit", "until_file", "until_exit", "systemctl")
PID_BYTES_MAX = 32
PID_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Signal:
    number: int
    pid_file: str = ""
    unit: str = ""
    until_file: str = ""
    is_until_exit: bool = False
    systemctl: str = "systemctl"

    def describe(self) -> str:
        wait = (
            f", wait for {self.until_file}"
            if self.until_file
            else ", wait for its end"
            if self.is_until_exit
            else ""
        )
        return f"send {signal.Signals(self.number).name} to {self.unit or self.pid_file}{wait}"

    def run(self, occasion: Occasion) -> None:
        """The file counts when it appears or changes after the signal; a process that ends without
        it has failed.
        """
        pid = self._pid(occasion)
        before = self._mark(occasion)
        try:
            os.kill(pid, self.number)
        except OSError as error:
            raise StepFailed(
                f"process {pid} cannot be sent a signal: {error.strerror}", pid=pid
            ) from error
        if self.until_file:
            until(
                occasion, lambda: self._is_written(pid, before, occasion), waiting_for=self._missing
            )
        if self.is_until_exit:
            until(
                occasion, lambda: _has_ended(pid), waiting_for=lambda: f"process {pid} did not end"
            )

    def _is_written(self, pid: int, before: tuple[int, int] | None, occasion: Occasion) -> bool:
        has_ended = _has_ended(pid)  # asked first: its last act may have been the file
        if self._mark(occasion) not in (None, before):
            return True
        if has_ended:
            raise StepFailed(f"process {pid} ended without writing {self.until_file}", pid=pid)
        return False

    def _missing(self) -> str:
        return f"{self.until_file} was not written"

    def _mark(self, occasion: Occasion) -> tuple[int, int] | None:
        """On a file server that is lost, even to look has no end of its own."""
        try:
            return (
                within(occasion, occasion.seconds_left, lambda: _mark(self.until_file))
                if self.until_file
                else None
            )
        except TimeoutError as error:
            raise StepTimedOut(f"{self.until_file} cannot be looked at: {error}") from error

    def _pid(self, occasion: Occasion) -> int:
        """Never 0, 1 or less: to the system these mean whole groups, init, or everybody."""
        if self.unit:
            systemctl = process.find(self.systemctl)
            text = process.run(
                process.Command(
                    (systemctl, "show", "--property=MainPID", "--value", "--", self.unit)
                ),
                occasion,
            )
        else:
            try:
                text = (
                    within(occasion, occasion.seconds_left, lambda: _read(self.pid_file))
                    .decode("ascii")
                    .strip()
                )
            except (OSError, ValueError) as error:
                raise StepFailed(f"{self.pid_file} cannot be read: {error}") from error
        if len(text) > PID_BYTES_MAX or not text.isdecimal() or not 1 < int(text) <= PID_MAX:
            raise StepFailed(f"{self.unit or self.pid_file} names no process: {text[:60]!r}")
        return int(text)


def _read(path: str) -> bytes:
    """A pipe or a device would keep us waiting, or would never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is not a regular file")
        found = os.read(handle, PID_BYTES_MAX + 1)
        if len(found) > PID_BYTES_MAX:
            raise OSError(f"it has more than {PID_BYTES_MAX} bytes")
        return found
    finally:
        os.close(handle)


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
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[0]
            == "Z"
        )
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
