"""`log`: one line with the facts about the event, in the agent's log."""

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from forewarn.agent.steps.base import StepContext, escape_line, event_facts, fill, template

log = logging.getLogger("forewarn.agent.event")


@dataclass(frozen=True, slots=True)
class LogStep:
    text: Annotated[str, template]
    level: Literal["debug", "info", "warning", "error"] = "info"

    SHORT: ClassVar[str] = "text"

    def describe(self) -> str:
        return f"log {self.text!r}"

    def run(self, context: StepContext) -> None:
        facts = {name: escape_line(value) for name, value in event_facts(context).items()}
        level = logging.getLevelNamesMapping()[self.level.upper()]
        log.log(level, "%s", fill(self.text, facts, str), extra={"facts": facts})
