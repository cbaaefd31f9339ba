"""`wall`: tells everybody who is logged in."""

from dataclasses import dataclass

from forewarn.agent.step import Occasion
from forewarn.agent.steps import fact, process
from forewarn.agent.steps.spec import Spec, only_on_unix


@dataclass(frozen=True, slots=True)
class Wall:
    text: str
    wall: str = "wall"

    def describe(self) -> str:
        return f"tell all who are logged in {self.text!r}"

    def run(self, occasion: Occasion) -> None:
        line = fact.fill(self.text, fact.facts(occasion), fact.in_line)
        process.run(process.Command((process.find(self.wall), "--", line)), occasion)


def make(value: object, where: str) -> Wall:
    only_on_unix("wall", where)
    spec = Spec(value, where, members=("text", "wall"), short="text")
    return Wall(fact.check(spec, "text", spec.text("text")), spec.text("wall", "wall"))
