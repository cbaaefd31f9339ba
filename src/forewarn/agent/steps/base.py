"""What a step is, and what all kinds of steps share: waiting within the step's time, and the facts
about the event that commands, texts and requests get.
"""

import json
import math
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields
from datetime import UTC
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from forewarn.agent.config_reader import is_text, reject, suggest
from forewarn.client import Event
from forewarn.errors import Error

CHECK_SECONDS = 0.1
NOT_BEFORE_FORMAT = "%a, %d %b %Y %H:%M:%S GMT"
FACT_BYTES_MAX = 4096  # Linux runs no command with 128 KiB in one variable
RESOURCES_BYTES_MAX = 64 * 1024
T = TypeVar("T")


class WorkflowPhase(StrEnum):
    """When a step runs: the event is Scheduled, it is Started, it is over."""

    PREPARE = "prepare"
    START = "start"
    RECOVER = "recover"


class StepFailed(Error, code="step_failed"):
    """The step did not do its job."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step runs for, and how long it may take.

    `vm` is the name of this VM. `stop` is set when the step must end early. `deadline` is a time of
    the monotonic clock `now`. `wait` sleeps for some seconds or until `stop` is set; a step that
    waits uses it in small portions and checks both.
    """

    event: Event
    phase: WorkflowPhase
    vm: str
    deadline: float
    stop: threading.Event = field(default_factory=threading.Event)
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] | None = None

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - self.now())

    def wait(self, seconds: float) -> bool:
        """Sleep, at most until the deadline. True if the step must stop."""
        (self.sleep or self.stop.wait)(min(seconds, self.seconds_left))
        return self.stop.is_set()


class Step(Protocol):
    """One step of a rule. `run` returns when it is done, or raises StepFailed.

    A step is a dataclass of its settings. `describe` says in a few words what it would do, for the
    log, the status and a dry run, without secrets.
    """

    def describe(self) -> str: ...

    def run(self, context: StepContext) -> None: ...


def fingerprint(step: Step) -> str:
    """What the journal recognizes a step by: a checksum of its kind and its settings.

    Settings may be secrets, and 32 bits are too few to guess one from. Settings with their default
    value do not count, so a new one does not change the steps of an older version.
    """
    settings = {
        each.name: getattr(step, each.name)
        for each in fields(step)  # type: ignore[arg-type] # every step is a dataclass
        if each.compare and getattr(step, each.name) != each.default
    }
    text = json.dumps([type(step).__name__, settings], sort_keys=True, default=str)
    return f"{zlib.crc32(text.encode()):08x}"


@runtime_checkable
class ReversibleStep(Step, Protocol):
    """A step that recover must repeat with the same `target`, or its effect stays. The target is
    the part of the configuration that says what is changed, as it is written in the file.
    """

    def target(self) -> str: ...

    def is_for_another(self, step: Step) -> bool:
        """Whether it certainly changes something else than this step does. What is not configured
        may turn out to be the same.
        """
        ...


@runtime_checkable
class RunsFiles(Step, Protocol):
    """A step that runs whatever it finds in a directory. Other users must not be able to write
    these files and directories, so the configuration is refused if they are.
    """

    def files(self) -> list[Path]: ...


def pause(context: StepContext, seconds: float, waiting_for: str) -> None:
    """Sleep before another attempt. Raises at the limit, so a last attempt without time cannot hide
    the previous error.
    """
    if context.wait(seconds):
        raise StepFailed(f"stopped early: {waiting_for}")
    if context.seconds_left <= 0:
        raise StepFailed(f"timed out: {waiting_for}")


def run_each(attempts: Iterable[Callable[[], object]]) -> None:
    """A failure does not stop the others; all failures are raised as one."""
    failures: list[str] = []
    for attempt in attempts:
        try:
            attempt()
        except StepFailed as failure:
            failures.append(failure.message)
    if failures:
        raise StepFailed("; ".join(dict.fromkeys(failures)))


def call_with_timeout(context: StepContext, work: Callable[[], T], seconds: float = math.inf) -> T:
    """Return what `work` returns, or raise TimeoutError and leave it behind in its thread.

    For calls that have no limit of their own: DNS lookups, slow responses, lost file servers.
    """
    future: Future[T] = Future()

    def attempt() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    seconds = min(seconds, context.seconds_left)
    end = context.now() + seconds
    threading.Thread(target=attempt, name="forewarn-step-call", daemon=True).start()
    while not wait([future], CHECK_SECONDS / 2).done:  # ends with the work or one of its limits
        if context.stop.is_set():
            raise StepFailed("stopped early: no response yet")
        if context.now() >= end:
            raise TimeoutError(f"no response within {seconds:.3g} seconds")
    return future.result()


# Facts about the event: `EVENT_ID` in an environment, `{event_id}` in a text. The names are those
# that existing scripts read. The endpoint's values are not trusted: each place that a fact is put
# into has its own way to escape it.

FACTS: dict[str, Callable[[StepContext], object]] = {
    "event_id": lambda context: context.event.id,
    "event_type": lambda context: context.event.type,
    "event_status": lambda context: context.event.status,
    "event_source": lambda context: context.event.source,
    "event_notbefore": lambda context: format_not_before(context.event, NOT_BEFORE_FORMAT),
    "event_resources": lambda context: " ".join(context.event.resources),
    "event_resourcetype": lambda context: context.event.resource_type,
    "event_duration": lambda context: context.event.duration_seconds,
    "event_description": lambda context: context.event.description,
    "event_phase": lambda context: context.phase.value,
    "event_deadline_seconds": lambda context: int(context.seconds_left),
    "event_vm": lambda context: context.vm,
}
NUMERIC_FACTS = ("event_duration", "event_deadline_seconds")

_PLACEHOLDER = re.compile(r"\{(event_[a-z_]*)\}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def event_facts(context: StepContext) -> dict[str, str]:
    """The facts by name. Long values are cut."""
    return {
        name: _cut(name, str(get(context)).replace("\0", "").encode("utf-8", "replace"))
        for name, get in FACTS.items()
    }


def format_not_before(event: Event, form: str) -> str:
    """Empty if the event may start at any time."""
    return event.not_before.astimezone(UTC).strftime(form) if event.not_before else ""


def _cut(name: str, value: bytes) -> str:
    """Resources are cut between two names: half a name may be that of another VM."""
    if name != "event_resources":
        return value[:FACT_BYTES_MAX].decode("utf-8", "ignore")
    if len(value) > RESOURCES_BYTES_MAX:
        value = value[:RESOURCES_BYTES_MAX].rpartition(b" ")[0]
    return value.decode()


def event_environment(context: StepContext) -> dict[str, str]:
    return {name.upper(): value for name, value in event_facts(context).items()}


def fill(template: str, facts: dict[str, str], escape: Callable[[str], str]) -> str:
    """Replace each `{event_…}`. Other braces stay: they belong to JSON or another template."""
    return _PLACEHOLDER.sub(lambda match: escape(facts[match[1]]), template)


def template(value: object, path: str) -> str:
    """The converter of a setting that may name facts."""
    if not is_text(value):
        reject(path, value, "text")
    text = str(value)
    for name in _PLACEHOLDER.findall(text):
        if name not in FACTS:
            hint = suggest(name, FACTS)
            reject(path, text, f"known facts of an event ({{{name}}} is unknown; {hint})")
    return text


def escape_json(value: str) -> str:
    """For use inside the quotes of a JSON string."""
    return json.dumps(value)[1:-1]


def escape_line(value: str) -> str:
    """For use in one line: control characters become spaces."""
    return _CONTROL.sub(" ", value)
