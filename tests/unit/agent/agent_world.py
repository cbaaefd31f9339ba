"""A small world for an agent: a clock that is told, steps that note what they were run for, an
endpoint that shows documents.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from forewarn.agent.agent import Agent
from forewarn.agent.journal import Journal
from forewarn.agent.metrics import Tally
from forewarn.agent.rules import Approve, PlannedStep, Rule
from forewarn.agent.settings import Settings
from forewarn.agent.step import Occasion, StepFailed
from forewarn.agent.workflow import Applications, Handling, Here, NoApplications
from forewarn.client import Change, Clock, Document, EndpointError, Event, Watcher
from forewarn.client.client import Stop

NOON = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
PATIENCE_SECONDS = 20


@dataclass
class Hands:
    """The hands of a clock: the time of day may jump, the other only moves on."""

    now: datetime = NOON
    monotonic: float = 1000.0

    def pass_(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.monotonic += seconds

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.monotonic, lambda: 0.0)


def reboot(key: str = "E1", *, lead_seconds: float = 900, **more: object) -> Event:
    """A reboot of `web-0`, from NOON in so many seconds."""
    event = Event(
        key,
        "Reboot",
        "Scheduled",
        "Platform",
        ("web-0",),
        not_before=NOON + timedelta(seconds=lead_seconds),
    )
    return replace(event, **more)  # type: ignore[arg-type]


def started(event: Event) -> Event:
    return replace(event, status="Started", not_before=None)


def nothing(occasion: Occasion) -> None:
    """What a step does by default."""


def fail(occasion: Occasion) -> None:
    raise StepFailed("no luck")


@dataclass
class Noted:
    """A step that notes its name in `diary`, then does what it was given."""

    name: str
    diary: list[str]
    effect: Callable[[Occasion], None] = nothing
    occasions: list[Occasion] = field(default_factory=list)

    def describe(self) -> str:
        return self.name

    def run(self, occasion: Occasion) -> None:
        self.diary.append(self.name)
        self.occasions.append(occasion)
        self.effect(occasion)


class World:
    """Everything that handlings share, and a diary of the steps that were run.

    `again` is the agent's next life.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hands = Hands()
        self.diary: list[str] = []
        self.journal = Journal.open(folder / "journal", clock=self.hands.clock())

    def step(
        self, name: str, effect: Callable[[Occasion], None] = nothing, **more: object
    ) -> PlannedStep:
        return replace(PlannedStep(Noted(name, self.diary, effect)), **more)  # type: ignore[arg-type]

    def here(self, applications: Applications | None = None) -> Here:
        return Here(
            "web-0", self.journal, applications or NoApplications(), self.hands.clock(), Tally()
        )

    def handling(self, rule: Rule, event: Event, here: Here | None = None) -> Handling:
        handling = Handling(rule, event, here or self.here())
        handling.read(event)
        return handling

    def again(self) -> None:
        self.journal.close()
        self.journal = Journal.open(self.folder / "journal", clock=self.hands.clock())

    def rule(self, **more: object) -> Rule:
        """A rule with one step a phase, that approves when prepared."""
        steps = {phase: (self.step(phase),) for phase in ("prepare", "start", "recover")}
        return replace(Rule("all", approve=Approve.WHEN_PREPARED, **steps), **more)  # type: ignore[arg-type]


Scene = Document | EndpointError | Callable[[], object]


class Scripted:
    """An endpoint that plays its scenes, one after the other, then stops the watch.

    A function is called between two looks.
    """

    def __init__(self, hands: Hands, *scenes: Scene, refusals: int = 0) -> None:
        self.hands = hands
        self.scenes = scenes
        self.refusals = refusals
        self.approvals: list[str] = []
        self.has_approved = threading.Event()

    def name(self) -> str:
        return "web-0"

    def approve(self, *event_ids: str, timeout_seconds: float) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EndpointError("not now")
        self.approvals += event_ids
        self.has_approved.set()

    def watch(
        self,
        *,
        stop: Stop | None,
        on_error: Callable[[EndpointError], object],
        wait_seconds: float,
        watcher: Watcher | None,
        sleep: Callable[[float], object] | None,
    ) -> Iterator[Change]:
        assert watcher is not None
        for scene in self.scenes:
            if isinstance(scene, Document):
                yield from watcher.update(scene, self.hands.now)
            elif isinstance(scene, EndpointError):
                on_error(scene)
            else:
                scene()


def shows(incarnation: int, *events: Event) -> Document:
    return Document(incarnation, events)


def agent_of(
    world: World, client: Scripted, *rules: Rule, is_dry_run: bool = False, **settings: object
) -> Agent:
    given = replace(Settings(rules=rules), **settings)  # type: ignore[arg-type]
    return Agent(
        given,
        client,
        world.journal,
        clock=world.hands.clock(),
        is_dry_run=is_dry_run,
        again_seconds=0.01,
    )


def until(is_true: Callable[[], object]) -> Callable[[], None]:
    """A scene that lasts until something is so."""

    def wait() -> None:
        quiet = threading.Event()
        for _ in range(PATIENCE_SECONDS * 100):
            if is_true():
                return
            quiet.wait(0.01)
        raise AssertionError("it never came to be")

    return wait
