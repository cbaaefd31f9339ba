"""One event being taken care of: which phase is due, and running it. News comes at any time, from
another thread.

Everything is in the journal before it is done, so a handling can be made again from its Progress
and goes on. A phase ends early when the event has moved on: Started ends prepare, and the event's
end ends prepare and start. The step under way is then told to stop, and the rest is left. A step
that the agent's own end cut short has no end in the journal: it is in doubt, and is run again.
"""

import logging
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from forewarn.agent.budget import LIMIT_SECONDS, Budget
from forewarn.agent.journal import Journal
from forewarn.agent.metrics import Tally
from forewarn.agent.progress import Progress, What, journaled
from forewarn.agent.rules import Approve, Concerns, OnFailure, PlannedStep, Rule
from forewarn.agent.step import Occasion, Phase
from forewarn.client import Clock, Event
from forewarn.errors import Error

log = logging.getLogger("forewarn.agent")

OVERDUE_SECONDS = 30.0
"""How long we plan for when NotBefore has come, or is not told, and the event has not started:
nobody knows, and a clock may be wrong. As long as a Preempt's notice, the shortest there is.
"""
LOOK_SECONDS = 0.1
PROBLEM_LENGTH_MAX = 500


class Applications(Protocol):
    """Local programs that take part. `deadline` is a moment of the monotonic clock."""

    def begin(self, event: Event, phase: Phase, deadline: float) -> None:
        """Tell those who registered. Only prepare waits for their answers."""

    def all_ready(self, event_id: str) -> bool:
        """Whether none of them still needs time for this event."""


class NoApplications:
    def begin(self, event: Event, phase: Phase, deadline: float) -> None: ...

    def all_ready(self, event_id: str) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Here:
    """What the handlings of one agent share. `took` is how long each step took last, by rule, phase
    and place.

    One that `is_patient` will be there when other events end, so recover can wait for that.
    """

    name: str
    journal: Journal
    applications: Applications
    clock: Clock
    tally: Tally
    took: MutableMapping[tuple[str, Phase, int], float] = field(default_factory=dict)
    is_patient: bool = True

    def is_taken(self, key: str) -> bool:
        """Whether another event that hits this VM has begun here and is not over: what it took away
        must stay away.
        """
        others = (one for other, one in self.journal.progress.items() if other != key)
        return any(
            one.begun
            and What.FINISHED not in one.marks
            and replace(one.event, resources=one.resources).concerns(self.name)
            for one in others
        )


@dataclass(frozen=True, slots=True)
class HandlingStatus:
    """A handling as it is shown.

    `phase` and `step` are "" while it waits; `seconds_left` is the time to NotBefore, if known.
    """

    event: Event
    rule: str
    phase: str
    step: str
    seconds_left: float | None
    is_prepared: bool
    is_approved: bool
    is_late: bool
    is_held: bool


class Handling:
    """`work` does what is due and returns; whoever has news says it, and sees to it that `work` is
    called again.
    """

    def __init__(self, rule: Rule, event: Event, here: Here) -> None:
        self.rule = rule
        self.event = event
        self._here = here
        self._deadline: float | None = None
        self._budget = Budget()
        self._is_over = False
        self._ended = threading.Event()
        self._told: set[Phase] = set()
        self._phase: Phase | None = None
        self._step = ""
        self._unwritten: tuple[What, dict[str, object]] | None = None
        self._interrupt = threading.Event()
        self._turn = threading.Lock()
        progress = self.progress
        if progress is not None:
            self._is_over = What.FINISHED in progress.marks

    @property
    def progress(self) -> Progress | None:
        return self._here.journal.progress.get(self.event.key)

    def read(self, event: Event) -> None:
        """The event as a document shows it. Only here is NotBefore compared with the time of day.

        Resources may lose a name. An event that was for us and no longer hits us is over for us.
        """
        now = self._here.clock.monotonic()
        lead_seconds = lead(event, self._here.clock.now())
        with self._turn:
            self.event = event
            self._deadline = now + (lead_seconds if lead_seconds > 0 else OVERDUE_SECONDS)
            self._budget = Budget.until(self._deadline, now)
            if self.rule.concerns is Concerns.OWN and not event.concerns(self._here.name):
                self._is_over = True
            self._stop_overtaken()

    def finish(self) -> None:
        """The event is over: finished or canceled."""
        with self._turn:
            self._is_over = True
            self._stop_overtaken()

    def end(self) -> None:
        """The agent must end. What is under way is left as it is, for the next start."""
        with self._turn:
            self._ended.set()
            self._interrupt.set()

    def rest(self, seconds: float) -> None:
        """Before another try; the agent's end ends it."""
        self._ended.wait(seconds)

    @property
    def seconds_left(self) -> float | None:
        """The time to NotBefore; None before a document has shown the event in this life."""
        return None if self._deadline is None else self._deadline - self._here.clock.monotonic()

    @property
    def is_shown(self) -> bool:
        """Whether a document has shown the event in this life."""
        return self._deadline is not None

    @property
    def has_work(self) -> bool:
        progress = self.progress
        return not self._ended.is_set() and (
            progress is None or self._is_news(progress) or self._due(progress) is not None
        )

    @property
    def is_done(self) -> bool:
        progress = self.progress
        return progress is not None and progress.is_done

    @property
    def wants_approval(self) -> bool:
        """Whether the rule lets us approve now; leaders and quiet are for the approver to judge.

        Only an event that a document showed in this life is approved.
        """
        if (
            self._deadline is None
            or self._is_over
            or not self.event.is_scheduled
            or self._ended.is_set()
        ):
            return False
        progress = self.progress or Progress(self.event, self.rule.name)
        if not self.rule.may_approve or What.APPROVED in progress.marks:
            return False
        return self.rule.approve is Approve.AT_ONCE or progress.is_prepared

    def work(self) -> None:
        """Do what is due, until nothing is.

        JournalLost: nothing was done that is not written; try again later.
        """
        while (
            not self._ended.is_set()
        ):  # each turn ends a phase, and there are three; or the agent ends
            self._note_news()
            progress = self.progress
            phase = None if progress is None else self._due(progress)
            if phase is None:
                return
            self._run(phase)

    def status(self) -> HandlingStatus:
        progress = self.progress or Progress(self.event, self.rule.name)
        return HandlingStatus(
            event=self.event,
            rule=self.rule.name,
            phase=self._phase or "",
            step=self._step,
            seconds_left=self.seconds_left,
            is_prepared=progress.is_prepared,
            is_approved=What.APPROVED in progress.marks,
            is_late=What.LATE in progress.marks,
            is_held=not self.rule.may_approve,
        )

    def _write_end(self) -> None:
        """The end of a step outlives trouble with the disk: what was done is not done again because
        it could not be written.
        """
        if self._unwritten is not None:
            what, facts = self._unwritten
            self._here.journal.write(self.event.key, what, **facts)
            self._unwritten = None

    def _note_news(self) -> None:
        journal, event = self._here.journal, self.event
        self._write_end()
        journal.see(event, self.rule.name)
        if self._is_over:
            journal.write(event.key, What.FINISHED)

    def _is_news(self, progress: Progress) -> bool:
        return progress.event != journaled(self.event) or self._is_over != (
            What.FINISHED in progress.marks
        )

    def _due(self, progress: Progress) -> Phase | None:
        """The phase to run now.

        Recover is due once, after anything was begun here. A status that is new to us is left
        alone.
        """
        if self._is_over:
            return None if progress.is_done or self._must_wait(progress) else Phase.RECOVER
        if self._deadline is None or not (self.event.is_started or self.event.is_scheduled):
            return None
        phase = Phase.START if self.event.is_started else Phase.PREPARE
        return None if phase in progress.ended else phase

    def _must_wait(self, progress: Progress) -> bool:
        """Whether recover would bring back what another event of this VM has just taken away."""
        is_own = self._whole(Phase.RECOVER, progress).concerns(self._here.name)
        return (
            self._here.is_patient
            and is_own
            and bool(progress.begun)
            and self._here.is_taken(self.event.key)
        )

    def _whole(self, phase: Phase, progress: Progress | None) -> Event:
        """The event as a phase is run for it: recover is for all the names that it had at first."""
        if phase is not Phase.RECOVER or progress is None:
            return self.event
        return replace(self.event, resources=progress.resources)

    def _is_overtaken(self, phase: Phase) -> bool:
        return phase is not Phase.RECOVER and (
            self._is_over or (phase is Phase.PREPARE and self.event.is_started)
        )

    def _stop_overtaken(self) -> None:
        if self._phase is not None and self._is_overtaken(self._phase):
            self._interrupt.set()

    def _run(self, phase: Phase) -> None:
        with self._turn:
            self._phase, self._interrupt = phase, threading.Event()
            if self._ended.is_set() or self._is_overtaken(phase):
                self._interrupt.set()
        try:
            self._here.journal.write(self.event.key, What.BEGUN, phase=phase)
            if self.rule.applications and phase not in self._told:
                limit = self._here.clock.monotonic() + LIMIT_SECONDS
                event = self._whole(phase, self.progress)
                self._here.applications.begin(event, phase, self._limits(phase).deadline or limit)
                self._told.add(phase)
            is_stopped = not self._run_steps(phase)
            if phase is Phase.PREPARE and self.rule.applications and not is_stopped:
                self._await_applications()
            if not self._interrupt.is_set():
                self._here.journal.write(
                    self.event.key, What.ENDED, phase=phase, is_stopped=is_stopped
                )
                self._say("the phase has ended", phase=phase, is_stopped=is_stopped)
        finally:
            self._phase, self._step = None, ""

    def _limits(self, phase: Phase) -> Budget:
        return self._budget if phase is Phase.PREPARE else Budget()

    def _run_steps(self, phase: Phase) -> bool:
        """Whether the phase may go on after its steps.

        Those that have an end in the journal are behind us.
        """
        planned = self.rule.steps(phase)
        for index, one in enumerate(planned):
            if self._interrupt.is_set():
                return True
            progress = self.progress
            assert progress is not None, "begun is in the journal"
            if not progress.is_settled(phase, index, one.step.describe()):
                self._warn_if_late(phase, index)
                self._run_step(phase, index, planned[index:])
                progress = self.progress
            if (
                one.on_failure is OnFailure.STOP
                and progress is not None
                and progress.fell_short(phase, index)
            ):
                return False
        return True

    def _run_step(self, phase: Phase, index: int, left: tuple[PlannedStep, ...]) -> None:
        here, key, step = self._here, self.event.key, left[0].step
        began = here.clock.monotonic()
        seconds = self._limits(phase).seconds_for(
            [one.weight for one in left], left[0].limit_seconds, began
        )
        if seconds <= 0:
            self._end_step(What.STEP_CUT, phase, index, problem="no time was left")
            return
        self._step = step.describe()
        here.journal.write(key, What.STEP_BEGUN, phase=phase, index=index, step=self._step)
        self._say("the step has begun", phase=phase, step=self._step, seconds=round(seconds, 1))
        event = self._whole(phase, self.progress)
        occasion = Occasion(
            event, phase, here.name, began + seconds, self._interrupt, here.clock.monotonic
        )
        try:
            step.run(occasion)
        except Exception as error:
            if self._ended.is_set():
                return
            if not isinstance(error, Error):
                log.exception("a step broke", extra={"facts": {"event": key, "step": self._step}})
            self._end_step(
                What.STEP_FAILED,
                phase,
                index,
                problem=str(error)[:PROBLEM_LENGTH_MAX] or type(error).__name__,
            )
            return
        took = here.took[self.rule.name, phase, index] = here.clock.monotonic() - began
        self._end_step(What.STEP_DONE, phase, index, seconds=round(took, 3))

    def _end_step(self, what: What, phase: Phase, index: int, **facts: object) -> None:
        step = self.rule.steps(phase)[index].step.describe()
        self._unwritten = (what, {"phase": phase, "index": index, "step": step, **facts})
        self._write_end()
        self._here.tally.add("steps", phase=phase, result=what.removeprefix("step-"))
        level = logging.INFO if what is What.STEP_DONE else logging.WARNING
        self._say(
            "the step has ended",
            level,
            phase=phase,
            step=step,
            result=what.removeprefix("step-"),
            **facts,
        )

    def _warn_if_late(self, phase: Phase, index: int) -> None:
        """Say once, as early as it is known, that not all can be done in time: by limits, or by how
        long it took before.
        """
        progress = self.progress
        if progress is None or What.LATE in progress.marks:
            return
        expected = [
            self._here.took.get((self.rule.name, phase, number), one.limit_seconds or 0.0)
            for number, one in enumerate(self.rule.steps(phase))
            if number >= index
        ]
        if not self._limits(phase).will_make_it(expected, self._here.clock.monotonic()):
            self._here.journal.write(
                self.event.key, What.LATE, expected_seconds=round(sum(expected), 1)
            )
            self._here.tally.add("late")
            self._say(
                "the time will not suffice",
                logging.WARNING,
                phase=phase,
                expected_seconds=round(sum(expected), 1),
            )

    def _await_applications(self) -> None:
        while not self._here.applications.all_ready(
            self.event.id
        ):  # ends with the answers, the time, or other news
            if self._here.clock.monotonic() >= (self._budget.deadline or 0.0):
                self._say("applications did not answer in time", logging.WARNING)
                return
            if self._interrupt.wait(LOOK_SECONDS):
                return

    def _say(self, text: str, level: int = logging.INFO, **facts: object) -> None:
        log.log(
            level, text, extra={"facts": {"event": self.event.key, "rule": self.rule.name, **facts}}
        )


def lead(event: Event, now: datetime) -> float:
    """The seconds to NotBefore, at least 0; not told means from now on."""
    return 0.0 if event.not_before is None else max(0.0, (event.not_before - now).total_seconds())
