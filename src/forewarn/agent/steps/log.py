"""`log`: one line with the facts about the event, in the agent's log."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from forewarn.agent.steps.base import (
    StepContext,
    check_template,
    escape_line,
    event_facts,
    fill,
)

log = logging.getLogger("forewarn.agent.event")


@dataclass(frozen=True, slots=True)
class LogStep:
    text: str
    level: Literal["debug", "info", "warning", "error"] = "info"

    SHORT: ClassVar[str] = "text"
    REMOVED: ClassVar[Mapping[str, str]] = {
        "to": 'systemd collects the agent\'s log; for syslog use run = ["logger", "text"]'
    }

    def __post_init__(self) -> None:
        check_template("text", self.text)

    def describe(self) -> str:
        return f"log {self.text!r}"

    def run(self, context: StepContext) -> None:
        facts = {name: escape_line(value) for name, value in event_facts(context).items()}
        level = logging.getLevelNamesMapping()[self.level.upper()]
        log.log(level, "%s", fill(self.text, facts, str), extra={"facts": facts})
