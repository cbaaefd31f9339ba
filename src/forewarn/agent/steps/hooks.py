"""`hooks`: a drop-in directory. What is executable in `prepare.d`, `start.d` or `recover.d` is run
in the order of the names.

Names are as run-parts wants them, letters, digits, `_` and `-`, so that editors' and packages'
leftovers are not run.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from forewarn.agent.step import Occasion, StepFailed
from forewarn.agent.steps import process
from forewarn.agent.steps.spec import Spec

HOOKS_MAX = 256
NAME = re.compile(r"[A-Za-z0-9_-]+" if os.name != "nt" else r"[A-Za-z0-9_-]+\.(exe|cmd|bat)")


@dataclass(frozen=True, slots=True)
class Hooks:
    directory: Path

    def describe(self) -> str:
        return f"run the hooks in {self.directory}"

    def run(self, occasion: Occasion) -> None:
        """A phase without a directory has no hooks. No directory at all is a mistake."""
        if not self.directory.is_dir():
            raise StepFailed(f"there is no directory {self.directory}")
        hooks = self._hooks(self.directory / f"{occasion.phase.value}.d")
        process.run_each([process.Command((str(hook),)) for hook in hooks], occasion)

    def _hooks(self, folder: Path) -> list[Path]:
        try:
            found = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StepFailed(f"{folder} cannot be read: {error.strerror}") from error
        if len(found) > HOOKS_MAX:
            raise StepFailed(f"{folder} has {len(found)} hooks; expected at most {HOOKS_MAX}")
        return [path for path in found if path.is_file() and os.access(path, os.X_OK)]


def make(value: object, where: str) -> Hooks:
    spec = Spec(value, where, members=("directory",), short="directory")
    return Hooks(Path(spec.text("directory", expected="the path of a directory")))
