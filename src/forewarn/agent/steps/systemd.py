"""`systemd`: stops units in their order, and starts them again in the reverse order when the event
is over.
"""

from dataclasses import dataclass

from forewarn.agent.step import Occasion, Phase
from forewarn.agent.steps import process
from forewarn.agent.steps.spec import Spec, only_on_unix

MEMBERS = ("units", "action", "systemctl")
ACTIONS = ("by-phase", "stop", "start", "restart", "reload")
FORWARD = ("stop", "reload")


@dataclass(frozen=True, slots=True)
class Systemd:
    """systemctl waits for the job by itself. A unit that is already as wanted is no change."""

    units: tuple[str, ...]
    action: str = "by-phase"
    systemctl: str = "systemctl"

    def describe(self) -> str:
        words = "stop, or in recover start," if self.action == "by-phase" else self.action
        return f"{words} {' '.join(self.units)}"

    def run(self, occasion: Occasion) -> None:
        action = self.action
        if action == "by-phase":
            action = "start" if occasion.phase is Phase.RECOVER else "stop"
        units = self.units if action in FORWARD else self.units[::-1]
        systemctl = process.find(self.systemctl)
        process.run_each(
            [process.Command((systemctl, action, "--", unit)) for unit in units], occasion
        )


def make(value: object, where: str) -> Systemd:
    only_on_unix("systemd", where)
    spec = Spec(value, where, members=MEMBERS, short="units")
    return Systemd(
        units=spec.texts("units", expected="a list of units"),
        action=spec.choice("action", ACTIONS, "by-phase"),
        systemctl=spec.text("systemctl", "systemctl"),
    )
