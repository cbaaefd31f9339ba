"""An engine with a bug that some commands meet, on one scope."""

from typing import Any

from forewarn.core.command import Command
from forewarn.core.machine import Outcome
from forewarn.engine.engine import Engine


class BuggyEngine(Engine):
    """The bug shows with commands of these types on these scopes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.bugs: set[tuple[str, type[Command]]] = set()
        self.late_bugs: set[tuple[str, type[Command]]] = set()
        """As `bugs`, but after the commit."""
        self.bug_in_update = ""
        """The begin of a key that an update meets the bug with, once."""

    async def submit(self, scope: str, command: Command, *arguments: Any, **more: Any) -> Outcome:
        if (scope, type(command)) in self.bugs:
            raise KeyError("a bug")
        outcome = await super().submit(scope, command, *arguments, **more)
        if (scope, type(command)) in self.late_bugs:
            raise KeyError("a bug")
        return outcome

    async def update(self, keys: Any, *arguments: Any, **more: Any) -> Any:
        if self.bug_in_update and keys[0].startswith(self.bug_in_update):
            self.bug_in_update = ""
            raise KeyError("a bug")
        return await super().update(keys, *arguments, **more)
