"""Everything an agent needs in a test: a clock that the test sets, steps that record what they ran
for, and an endpoint that plays a script.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from forewarn.agent.agent import Agent
from forewarn.agent.journal import Journal
from forewarn.agent.participants import Participants
from forewarn.agent.rules import ApproveWhen, PlannedStep, Rule
from forewarn.agent.settings import AgentSettings
from forewarn.agent.status import Counters
from forewarn.agent.steps.base import StepContext, StepFailed
from forewarn.agent.workflow import AgentContext, Workflow
from forewarn.client import Client, ClientClock, Document, EndpointError, Event
from forewarn.client.client import Stop

NOON = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
TIMEOUT_SECONDS = 20
STACK_BYTES_TOO_MANY = 2**47
"""The whole address space."""


@dataclass
class FakeTime:
    """The time of day may jump; the monotonic clock only advances."""

    now: datetime = NOON
    monotonic: float = 1000.0

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.monotonic += seconds

    def clock(self) -> ClientClock:
        return ClientClock(lambda: self.now, lambda: self.monotonic, lambda: 0.0)


def reboot(key: str = "E1", *, lead_seconds: float = 900, **more: object) -> Event:
    """A reboot of `web-0`, `lead_seconds` after NOON."""
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


def do_nothing(context: StepContext) -> None:
    """The default effect of a step."""


def fail(context: StepContext) -> None:
    raise StepFailed("failed on purpose")


@dataclass
class RecordingStep:
    """Records its name in `ran`, then has its effect."""

    name: str
    ran: list[str] = field(compare=False)
    effect: Callable[[StepContext], None] = field(default=do_nothing, compare=False)
    contexts: list[StepContext] = field(default_factory=list, compare=False)

    def describe(self) -> str:
        return self.name

    def run(self, context: StepContext) -> None:
        self.ran.append(self.name)
        self.contexts.append(context)
        self.effect(context)


class UnsyncedJournal(Journal):
    """Without fsync, which is faster."""

    @staticmethod
    def sync(handle: int) -> None:
        pass


class World:
    """What workflows share, and the names of the steps that `ran`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = FakeTime()
        self.ran: list[str] = []
        self.journal: Journal = UnsyncedJournal(folder / "journal")

    def step(
        self, name: str, effect: Callable[[StepContext], None] = do_nothing, **options: object
    ) -> PlannedStep:
        return PlannedStep(RecordingStep(name, self.ran, effect), **options)  # type: ignore[arg-type]

    def context(self, programs: Participants | None = None) -> AgentContext:
        clock = self.time.clock()
        return AgentContext("web-0", self.journal, programs or Participants(), clock, Counters())

    def workflow(self, rule: Rule, event: Event, context: AgentContext | None = None) -> Workflow:
        workflow = Workflow(rule, event, context or self.context())
        workflow.update(event)
        return workflow

    def restart(self) -> None:
        """A new process opens the journal."""
        self.use_journal(UnsyncedJournal)

    def use_journal(self, kind: type[Journal]) -> None:
        self.journal.close()
        self.journal = kind(self.folder / "journal")

    def rule(self, **more: object) -> Rule:
        """A rule with one step per phase, that approves when prepared."""
        steps = {phase: (self.step(phase),) for phase in ("prepare", "start", "recover")}
        return replace(Rule("all", approve=ApproveWhen.WHEN_PREPARED, **steps), **more)  # type: ignore[arg-type]


Scene = Document | EndpointError | Callable[[], object]


class ScriptedClient:
    """An endpoint that plays its scenes in order, then ends. Functions run between two polls."""

    def __init__(self, time: FakeTime, *scenes: Scene, refusals: int = 0) -> None:
        self.time = time
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

    def document(self) -> Document:
        return next(self.documents())  # type: ignore[return-value]

    def documents(
        self,
        *,
        stop: Stop | None = None,
        wait_seconds: float = 0,
        period_seconds: float = 1,
        may_wait: Callable[[], bool] = bool,
    ) -> Iterator[Document | EndpointError]:
        for scene in self.scenes:
            if isinstance(scene, Document | EndpointError):
                yield scene
            else:
                scene()


def shows(incarnation: int, *events: Event) -> Document:
    return Document(incarnation, events)


def agent_of(
    world: World,
    client: ScriptedClient,
    *rules: Rule,
    is_dry_run: bool = False,
    is_once: bool = False,
    **settings: object,
) -> Agent:
    return Agent(
        replace(AgentSettings(rules=rules), **settings),  # type: ignore[arg-type]
        cast("Client", client),
        world.journal,
        clock=world.time.clock(),
        is_dry_run=is_dry_run,
        is_once=is_once,
        retry_seconds=0.01,
    )


@contextmanager
def no_new_threads() -> Iterator[None]:
    """The operating system starts no thread meanwhile, as without memory."""
    before = threading.stack_size(STACK_BYTES_TOO_MANY)
    try:
        yield
    finally:
        threading.stack_size(before)


def until(condition: Callable[[], object]) -> Callable[[], None]:
    """A scene that lasts until the condition is true."""

    def wait() -> None:
        pause = threading.Event()
        for _ in range(TIMEOUT_SECONDS * 100):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("the condition never became true")

    return wait
