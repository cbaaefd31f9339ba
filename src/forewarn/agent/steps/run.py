"""`run`: a command.

Its exit code decides; the event is in its environment, never in its words, so no shell can be
tricked.
"""

import os
from dataclasses import dataclass

from forewarn.agent.step import Occasion
from forewarn.agent.steps import process
from forewarn.agent.steps.spec import Spec

MEMBERS = ("command", "shell", "directory", "environment", "grace_seconds")
GRACE_SECONDS_MAX = 60


@dataclass(frozen=True, slots=True)
class Run:
    command: process.Command

    def describe(self) -> str:
        return f"run {' '.join(self.command.words)}"

    def run(self, occasion: Occasion) -> None:
        process.run(self.command, occasion)


def make(value: object, where: str) -> Run:
    spec = Spec(value, where, members=MEMBERS, short="command")
    return Run(
        process.Command(
            words=_words(spec),
            directory=spec.text("directory", "") or None,
            variables=spec.pairs("environment", expected="a table of names and texts"),
            grace_seconds=spec.seconds(
                "grace_seconds", process.GRACE_SECONDS, most=GRACE_SECONDS_MAX
            ),
        )
    )


def _words(spec: Spec) -> tuple[str, ...]:
    if not spec.is_set("shell"):
        return spec.texts(
            "command",
            expected="a list of a command and its arguments (or a text, with shell = true)",
        )
    text = spec.text("command", expected="a text for the shell")
    return (
        (os.environ.get("COMSPEC", "cmd.exe"), "/c", text)
        if os.name == "nt"
        else ("/bin/sh", "-c", text)
    )
