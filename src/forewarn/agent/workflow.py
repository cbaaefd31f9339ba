"""Carries out what `plan` decides for one event: runs the phases and their steps.

Everything is in the journal before it is done, so a workflow can be rebuilt from its Progress. A
phase ends early when the event has moved on: the running step is interrupted and the rest is
skipped. A step interrupted by the agent's own end has no end in the journal, and runs again.

`update`, `finish` and `stop` may be called from any thread at any time.
"""

import logging
import math
import threading
from dataclasses import dataclass, replace
from typing import Any

from forewarn.agent.journal import Journal
from forewarn.agent.participants import Participants
from forewarn.agent.plan import Sighting, is_outdated, next_phase, wants_approval
from forewarn.agent.progress import EntryKind, Progress, for_journal
from forewarn.agent.rules import (
    DEFAULT_LIMIT_SECONDS,
    Concerns,
    OnFailure,
    PlannedStep,
    Rule,
    prepare_deadline,
    seconds_for_step,
    seconds_to_not_before,
)
from forewarn.agent.status import Counters, WorkflowStatus
from forewarn.agent.steps.base import StepContext, WorkflowPhase, fingerprint
from forewarn.client import ClientClock, Event
from forewarn.errors import Error
from forewarn.log import log

OVERDUE_SECONDS = 30.0
"""The time assumed for an event that is Scheduled although its NotBefore has passed or is unknown:
the clock may be wrong. It is the notice of a Preempt, the shortest there is.
"""
CHECK_SECONDS = 0.1
MESSAGE_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What the workflows of one agent share. `vm` is the name of this VM.

    `wait_for_others`: recover waits for the end of this VM's other events. An agent that runs once
    cannot wait.
    """

    vm: str
    journal: Journal
    programs: Participants
    clock: ClientClock
    counters: Counters
    wait_for_others: bool = True


class Workflow:
    """`run` does what is due and returns. After `update` or `finish`, call it again.

    The public variables belong to the Approver. `is_approved_alone`: not in one request with other
    events.
    """

    def __init__(self, rule: Rule, event: Event, context: AgentContext) -> None:
        self.rule = rule
        self.approval_failures = 0
        self.approve_again_at = -math.inf
        self.is_approved_alone = False
        self._context = context
        self._deadline: float | None = None
        self._prepare_deadline = math.inf
        self._stopped = threading.Event()
        self._announced: set[WorkflowPhase] = set()
        self._phase: WorkflowPhase | None = None
        self._step = ""
        self._unwritten: tuple[EntryKind, dict[str, object]] | None = None
        self._interrupt = threading.Event()
        self._lock = threading.Lock()
        self._sighting = Sighting(event)
        self._sighting = Sighting(event, is_over=self.progress.is_finished)

    @property
    def event(self) -> Event:
        return self._sighting.event

    @property
    def progress(self) -> Progress:
        new = Progress(self.event, self.rule.name, resources=self.event.resources)
        return self._context.journal.progress.get(self.event.key, new)

    def update(self, event: Event) -> None:
        """The event as a document shows it. Only here is NotBefore compared with the time of day.

        An event of this VM that no longer names it is over for this VM.
        """
        now = self._context.clock.monotonic()
        lead_seconds = seconds_to_not_before(event, self._context.clock.now())
        with self._lock:
            self._deadline = now + (lead_seconds if lead_seconds > 0 else OVERDUE_SECONDS)
            self._prepare_deadline = prepare_deadline(self._deadline, now)
            is_gone = self.rule.concerns is Concerns.OWN and not event.concerns(self._context.vm)
            is_over = self._sighting.is_over or is_gone
            self._sighting = Sighting(event, is_shown=True, is_over=is_over)
            self._interrupt_outdated_phase()

    def finish(self) -> None:
        """The event is over: finished or canceled."""
        with self._lock:
            self._sighting = replace(self._sighting, is_over=True)
            self._interrupt_outdated_phase()

    def stop(self) -> None:
        """The agent must end. What is running is left for the next start."""
        with self._lock:
            self._stopped.set()
            self._interrupt.set()

    def pause(self, seconds: float) -> None:
        """Before another attempt. `stop` ends it."""
        self._stopped.wait(seconds)

    @property
    def seconds_left(self) -> float | None:
        """The time to NotBefore. None until a document of this process has shown the event."""
        if self._deadline is None:
            return None
        return self._deadline - self._context.clock.monotonic()

    @property
    def next_phase(self) -> WorkflowPhase | None:
        context, key = self._context, self.event.key
        others = (
            other
            for other_key, other in context.journal.progress.items()
            if context.wait_for_others and other_key != key
        )
        return next_phase(self.progress, self._sighting, others, context.vm)

    @property
    def has_work(self) -> bool:
        if self._stopped.is_set():
            return False
        return self._has_unwritten_changes() or self.next_phase is not None

    @property
    def wants_approval(self) -> bool:
        may_work = not self._stopped.is_set()
        return may_work and wants_approval(self.progress, self.rule, self._sighting)

    def run(self) -> None:
        """Do what is due until nothing is.

        Raises JournalLost: nothing was done that is not on disk; call again later.
        """
        while not self._stopped.is_set():  # each turn ends one of the three phases
            self._write_changes()
            phase = self.next_phase
            if phase is None:
                return
            self._run_phase(phase)

    def status(self) -> WorkflowStatus:
        progress = self.progress
        return WorkflowStatus(
            event=self.event,
            rule=self.rule.name,
            phase=self._phase or "",
            step=self._step,
            seconds_left=self.seconds_left,
            is_prepared=progress.is_prepared,
            is_approved=EntryKind.APPROVED in progress.marks,
            is_late=EntryKind.LATE in progress.marks,
            is_held=not self.rule.may_approve,
        )

    def _has_unwritten_changes(self) -> bool:
        progress, sighting = self.progress, self._sighting
        if progress.is_done:  # shown again by a lagging endpoint
            return False
        is_new = self.event.key not in self._context.journal.progress
        is_changed = progress.event != for_journal(sighting.event)
        return is_new or is_changed or sighting.is_over != progress.is_finished

    def _write_changes(self) -> None:
        journal, sighting = self._context.journal, self._sighting
        self._write_step_end()
        journal.write_event(sighting.event, self.rule.name)
        if sighting.is_over:
            journal.write(sighting.event.key, EntryKind.FINISHED)

    def _write_step_end(self) -> None:
        """Kept until it can be written: a step that was done is not run again because the disk was
        full.
        """
        if self._unwritten is not None:
            kind, facts = self._unwritten
            self._context.journal.write(self.event.key, kind, **facts)
            self._unwritten = None

    def _interrupt_outdated_phase(self) -> None:
        if self._phase is not None and is_outdated(self._phase, self._sighting):
            self._interrupt.set()

    def _run_phase(self, phase: WorkflowPhase) -> None:
        with self._lock:
            self._phase, self._interrupt = phase, threading.Event()
            if self._stopped.is_set() or is_outdated(phase, self._sighting):
                self._interrupt.set()
        try:
            self._context.journal.write(self.event.key, EntryKind.BEGUN, phase=phase)
            if self.rule.applications and phase not in self._announced:
                self._announce(phase)
            is_stopped = not self._run_steps(phase)
            if phase is WorkflowPhase.PREPARE and self.rule.applications and not is_stopped:
                self._wait_for_programs()
            if not self._interrupt.is_set():
                self._context.journal.write(
                    self.event.key, EntryKind.ENDED, phase=phase, is_stopped=is_stopped
                )
                self._log("phase ended", phase=phase, is_stopped=is_stopped)
        finally:
            self._phase, self._step = None, ""

    def _announce(self, phase: WorkflowPhase) -> None:
        deadline = self._deadline_of(phase)
        if deadline == math.inf:
            deadline = self._context.clock.monotonic() + DEFAULT_LIMIT_SECONDS
        self._context.programs.begin(self._event_for(phase), phase, deadline)
        self._announced.add(phase)

    def _deadline_of(self, phase: WorkflowPhase) -> float:
        return self._prepare_deadline if phase is WorkflowPhase.PREPARE else math.inf

    def _event_for(self, phase: WorkflowPhase) -> Event:
        """Recover is for all the resources that the event had at first."""
        return self.progress.original_event if phase is WorkflowPhase.RECOVER else self.event

    def _run_steps(self, phase: WorkflowPhase) -> bool:
        """Whether the phase may continue after its steps. Steps with an end in the journal are
        skipped.
        """
        steps = self.rule.steps(phase)
        for index, planned in enumerate(steps):
            if self._interrupt.is_set():
                return True
            if not self.progress.is_step_over(phase, index, fingerprint(planned.step)):
                self._warn_if_late(phase, index)
                self._run_step(phase, index, steps[index:])
            must_succeed = planned.on_failure is OnFailure.STOP
            if must_succeed and self.progress.has_step_failed(phase, index):
                return False
        return True

    def _run_step(self, phase: WorkflowPhase, index: int, left: tuple[PlannedStep, ...]) -> None:
        context, key, step = self._context, self.event.key, left[0].step
        began = context.clock.monotonic()
        weights = [planned.weight for planned in left]
        limit = left[0].limit_seconds
        seconds = seconds_for_step(self._deadline_of(phase), weights, limit, began)
        if seconds <= 0:
            self._end_step(EntryKind.STEP_CUT, phase, index, problem="no time left")
            return
        self._step = step.describe()
        facts = {"step": self._step, "fingerprint": fingerprint(step)}
        context.journal.write(key, EntryKind.STEP_BEGUN, phase=phase, index=index, **facts)
        self._log("step started", phase=phase, step=self._step, seconds=round(seconds, 1))
        event, now = self._event_for(phase), context.clock.monotonic
        try:
            step.run(StepContext(event, phase, context.vm, began + seconds, self._interrupt, now))
        except Exception as error:
            if self._stopped.is_set():
                return
            if not isinstance(error, Error):
                log.exception("step raised an unexpected error", event=key, step=self._step)
            message = str(error)[:MESSAGE_LENGTH_MAX] or type(error).__name__
            self._end_step(EntryKind.STEP_FAILED, phase, index, problem=message)
            return
        took = round(context.clock.monotonic() - began, 3)
        self._end_step(EntryKind.STEP_DONE, phase, index, seconds=took)

    def _end_step(self, kind: EntryKind, phase: WorkflowPhase, index: int, **facts: object) -> None:
        ended = self.rule.steps(phase)[index].step
        step, result = ended.describe(), kind.removeprefix("step-")
        where = {"phase": phase, "index": index, "fingerprint": fingerprint(ended)}
        self._unwritten = (kind, {**where, "step": step, **facts})
        self._write_step_end()
        self._context.counters.add("steps", phase=phase, result=result)
        level = logging.INFO if kind is EntryKind.STEP_DONE else logging.WARNING
        self._log("step ended", level, phase=phase, step=step, result=result, **facts)

    def _warn_if_late(self, phase: WorkflowPhase, index: int) -> None:
        """Warn once, as early as possible, that the limits of the steps, or how long they took
        before, exceed the time.
        """
        context = self._context
        if EntryKind.LATE in self.progress.marks:
            return
        expected = [
            self._last_seconds(phase, number) or planned.limit_seconds or 0.0
            for number, planned in enumerate(self.rule.steps(phase))
            if number >= index
        ]
        if sum(expected) <= self._deadline_of(phase) - context.clock.monotonic():
            return
        seconds = round(sum(expected), 1)
        context.journal.write(self.event.key, EntryKind.LATE, expected_seconds=seconds)
        context.counters.add("late")
        message = f"not enough time to finish the {phase} steps"
        self._log(message, logging.WARNING, expected_seconds=seconds)

    def _last_seconds(self, phase: WorkflowPhase, index: int) -> float | None:
        """How long this step of the rule took, for the last event for which it was done."""
        progresses = self._context.journal.progress.values()
        steps = (one.steps.get((phase, index)) for one in progresses if one.rule == self.rule.name)
        seconds = [step.seconds for step in steps if step and step.seconds is not None]
        return seconds[-1] if seconds else None

    def _wait_for_programs(self) -> None:
        programs = self._context.programs
        self._step = "waiting for local programs"
        while not programs.all_ready(self.event.id):
            if self._context.clock.monotonic() >= self._prepare_deadline:
                self._log("local programs were not ready in time", logging.WARNING)
                return
            if self._interrupt.wait(CHECK_SECONDS):
                return

    def _log(self, message: str, level: int = logging.INFO, **facts: Any) -> None:
        log.log(level, message, event=self.event.key, rule=self.rule.name, **facts)
