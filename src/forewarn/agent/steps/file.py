"""`file`: a health file that nginx or a balancer's probe looks at, taken away (or put there) for
the event and back after it.
"""

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from forewarn.agent.step import Occasion, Phase, StepFailed
from forewarn.agent.steps.spec import Spec

MEMBERS = ("path", "in_prepare", "content")
STATES = ("absent", "present")


@dataclass(frozen=True, slots=True)
class File:
    """Recover undoes what prepare did, and nothing else: marks beside the file tell what that was.

    A file taken away is kept there and put back as it was. One that was absent before has a mark,
    and stays absent. Where there is neither, a reboot has swept them away, and the file is made
    anew with `content`. One that we put there is marked as made.
    """

    path: Path
    in_prepare: str = "absent"
    content: str = ""

    def describe(self) -> str:
        return f"make {self.path} {self.in_prepare}, or in recover the opposite"

    def run(self, occasion: Occasion) -> None:
        is_present = (self.in_prepare == "present") is (occasion.phase is not Phase.RECOVER)
        try:
            if is_present:
                self._put()
            else:
                self._take()
        except OSError as error:
            raise StepFailed(
                f"{self.path} cannot be made {STATES[is_present]}: {error.strerror or error}"
            ) from error

    def _take(self) -> None:
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if self.in_prepare == "present":
            if self._beside("made").exists():
                self.path.unlink(missing_ok=True)
                self._beside("made").unlink(missing_ok=True)
            return
        try:
            os.replace(self.path, self._beside("kept"))
            self._beside("absent").unlink(missing_ok=True)
        except FileNotFoundError:
            if not self._beside("kept").exists():
                with contextlib.suppress(
                    OSError
                ):  # where no mark can be put, no file will be either
                    self._beside("absent").touch()

    def _put(self) -> None:
        """In one move: a probe never sees half a file."""
        if self.path.exists():
            if self.in_prepare == "absent":  # somebody was faster, and what we kept is old
                self._beside("kept").unlink(missing_ok=True)
                self._beside("absent").unlink(missing_ok=True)
            return
        if self.in_prepare == "absent":
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._beside("kept"), self.path)
                return
            if self._beside("absent").exists():  # it stays: this may be run again
                return
        else:
            self._beside("made").touch()
        new = self._beside("new")
        new.write_text(self.content, encoding="utf-8")
        os.replace(new, self.path)

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f".{self.path.name}.forewarn-{what}")


def make(value: object, where: str) -> File:
    spec = Spec(value, where, members=MEMBERS, short="path")
    return File(
        path=Path(spec.text("path", expected="the path of a file")),
        in_prepare=spec.choice("in_prepare", STATES, "absent"),
        content=spec.text("content", ""),
    )
