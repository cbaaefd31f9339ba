"""`log`: one line with the event's facts, to the agent's own log or to syslog."""

import logging
from dataclasses import dataclass

from forewarn.agent.step import Occasion
from forewarn.agent.steps import fact
from forewarn.agent.steps.spec import Spec, only_on_unix

MEMBERS = ("text", "level", "to")
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}  # RFC 5424
log = logging.getLogger("forewarn.agent.event")


@dataclass(frozen=True, slots=True)
class Log:
    text: str
    level: str = "info"
    to: str = "log"

    def describe(self) -> str:
        return f"log {self.text!r}"

    def run(self, occasion: Occasion) -> None:
        facts = {name: fact.in_line(value) for name, value in fact.facts(occasion).items()}
        line = fact.fill(self.text, facts, fact.in_line)
        if self.to == "log":
            log.log(LEVELS[self.level], "%s", line, extra={"facts": facts})
            return
        import syslog  # only Unix has it

        syslog.syslog(
            PRIORITIES[self.level],
            f"{line} " + " ".join(f"{name}={value!r}" for name, value in facts.items()),
        )


def make(value: object, where: str) -> Log:
    spec = Spec(value, where, members=MEMBERS, short="text")
    to = spec.choice("to", ("log", "syslog"), "log")
    if to == "syslog":
        only_on_unix("syslog", where)
    return Log(
        fact.check(spec, "text", spec.text("text")), spec.choice("level", tuple(LEVELS), "info"), to
    )
