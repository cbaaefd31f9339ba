"""`file`: removes (or creates) a health file that nginx or a load balancer's probe checks, and
restores it after the event.
"""

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from forewarn.agent.steps.base import StepContext, StepFailed, WorkflowPhase


@dataclass(frozen=True, slots=True)
class FileStep:
    """Recover undoes what prepare did, and nothing else. Hidden files next to it record that:

    kept     the file that prepare removed; recover moves it back
    absent   prepare found no file; recover creates none
    made     prepare created the file; recover removes it

    If none of them exists, a reboot has cleared the directory, and recover creates the file with
    `content`.
    """

    path: Path
    in_prepare: Literal["absent", "present"] = "absent"
    content: str = ""

    SHORT: ClassVar[str] = "path"

    def describe(self) -> str:
        return f"make {self.path} {self.in_prepare}, or in recover the opposite"

    def run(self, context: StepContext) -> None:
        must_exist = (self.in_prepare == "present") is (context.phase is not WorkflowPhase.RECOVER)
        try:
            if must_exist:
                self._create()
            else:
                self._remove()
        except OSError as error:
            state = "present" if must_exist else "absent"
            reason = error.strerror or error
            raise StepFailed(f"cannot make {self.path} {state}: {reason}") from error

    def _remove(self) -> None:
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if self.in_prepare == "present":
            if self._marker("made").exists():
                self.path.unlink(missing_ok=True)
                self._marker("made").unlink(missing_ok=True)
            return
        try:
            os.replace(self.path, self._marker("kept"))
            self._marker("absent").unlink(missing_ok=True)
        except FileNotFoundError:
            if not self._marker("kept").exists():
                # Where no marker can be written, recover can create no file either.
                with contextlib.suppress(OSError):
                    self._marker("absent").touch()

    def _create(self) -> None:
        """By a rename: a probe never sees half a file."""
        if self.path.exists():
            if self.in_prepare == "absent":  # another program restored it; ours is outdated
                self._marker("kept").unlink(missing_ok=True)
                self._marker("absent").unlink(missing_ok=True)
            return
        if self.in_prepare == "absent":
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._marker("kept"), self.path)
                return
            if self._marker("absent").exists():  # the marker stays: this may run again
                return
        else:
            self._marker("made").touch()
        new = self._marker("new")
        new.write_text(self.content, encoding="utf-8")
        os.replace(new, self.path)

    def _marker(self, kind: str) -> Path:
        return self.path.with_name(f".{self.path.name}.forewarn-{kind}")
