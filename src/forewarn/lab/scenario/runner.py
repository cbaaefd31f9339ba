"""Runs a scenario: opens a lab, runs guests and steps, and returns verdicts."""

import asyncio
import random
import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial

from msgspec.structs import replace

from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for_first
from forewarn.errors import Error, Invalid
from forewarn.lab import azure_address
from forewarn.lab.clock import VirtualClock
from forewarn.lab.fault.active import parse_begin
from forewarn.lab.scenario.guest import Guest
from forewarn.lab.scenario.program import start_program
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.run_options import (
    RunOptions,
    choose_external,
    choose_rate,
    describe_plan,
)
from forewarn.lab.scenario.schema import NEVER, START, Scenario
from forewarn.lab.scenario.steps import FaultStep, JumpStep, ScenarioStep, Stage
from forewarn.lab.scenario.timeline import Timeline, is_poll
from forewarn.lab.scenario.verdict import RunResult, ScenarioVerdict, VerdictOutcome, judge
from forewarn.lab.service import LabService, Setup, open_lab
from forewarn.lab.transcript import TranscriptEntry, TranscriptKind
from forewarn.platform.process_group import ProcessGroup

COMMAND_SECONDS_MAX = 60.0
MANUAL_SECONDS_MAX = 600.0
"""How long to wait for the first poll of an external VM, with a command and without one."""
LOOK_EVERY, LOOK_EVERY_VIRTUAL = timedelta(seconds=0.25), timedelta(seconds=10)
"""How often a run looks whether everything is decided, on the real and on a virtual clock."""


async def run(scenario: Scenario, options: RunOptions, console: Console) -> RunResult:
    """Run a scenario: in virtual time, unless it has external VMs or a rate.

    Cancelled, it ends early, and returns what is decided by then.
    """
    file = scenario.file
    seed = file.seed if options.seed is None else options.seed
    external = choose_external(scenario, options)
    rate = choose_rate(scenario, options, external)
    if rate is not None and any(isinstance(step, JumpStep) for step in file.steps):
        raise Invalid(
            f"{file.name} has a jump, which needs a virtual clock;"
            " expected neither a rate nor external VMs"
        )
    if options.command and shutil.which(options.command[0]) is None:
        raise Invalid(f"there is no program {options.command[0]!r}; expected one that can be run")
    if options.is_at_azure:
        await asyncio.to_thread(azure_address.check_allowed)
    setup = Setup(
        fleet=scenario.fleets[0],
        is_virtual=rate is None,
        start=(file.clock.start or START).astimezone(UTC),
        rate=rate or 1.0,
        seed=seed,
    )
    async with open_lab(setup) as lab:
        urls = {vm: await lab.listen_vm(vm) for vm in external}
        played = external[0] if options.command else ""
        for vm, url in urls.items():
            who = f"your command plays {vm}" if vm == played else f"{vm} is external"
            shown = azure_address.URL if options.is_at_azure and vm == played else url
            console.print(f"{who}; its endpoint is {shown}")
        if external and lab.rate > 1:
            console.print(f"one second of real time is {lab.rate:g} s of the scenario")
        console.print(describe_plan(file.until, rate, lab.clock.now()))
        software: AbstractAsyncContextManager[ProcessGroup | None] = nullcontext()
        if played:
            write = partial(console.print_output, played)
            software = start_program(
                options.command, played, urls[played], write, is_at_azure=options.is_at_azure
            )
        async with software as program:
            missing = await wait_for_first_polls(lab, external, program, options, console)
            runner = Runner(scenario, lab, console, seed=seed, external=external)
            if missing is not None:
                return runner.conclude(program, missing)
            return await runner.run(program, to_the_end=options.to_the_end)


async def wait_for_first_polls(
    lab: LabService,
    external: Sequence[str],
    program: ProcessGroup | None,
    options: RunOptions,
    console: Console,
) -> ScenarioVerdict | None:
    """Wait until every external VM has polled. Returns a failed verdict if one does not."""
    missing = dict.fromkeys(external)
    has_all = asyncio.Event()

    def follow(entry: TranscriptEntry) -> None:
        if is_poll(entry):
            missing.pop(entry.vm, None)
        if not missing:
            has_all.set()

    seconds = options.first_poll_seconds_max or (
        COMMAND_SECONDS_MAX if program else MANUAL_SECONDS_MAX
    )
    lab.transcript.followers.append(follow)
    if missing:
        console.print(f"waiting for the first poll of {', '.join(missing)}, at most {seconds:g} s")
        ends = [program.wait()] if program else []
        with suppress(asyncio.CancelledError):
            await wait_for_first(has_all.wait(), *ends, timeout=seconds)
    lab.transcript.followers.remove(follow)
    if not missing:
        return None
    expected = f"{', '.join(missing)} polls its endpoint"
    if is_interrupted():
        return ScenarioVerdict(expected, "interrupted", VerdictOutcome.NOT_REACHED)
    reason = f"no poll within {seconds:g} s"
    if program is not None and program.returncode is not None:
        reason = f"the command ended with {program.returncode} before its first poll"
    if program is not None and not options.is_at_azure:
        reason += f"; does it call {azure_address.ADDRESS[0]}? add --at-azure-address"
    return ScenarioVerdict(expected, reason, VerdictOutcome.FAILED)


def is_interrupted() -> bool:
    """Return whether the run was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Runner:
    """One run of a scenario, from its start to its verdicts."""

    def __init__(
        self,
        scenario: Scenario,
        lab: LabService,
        console: Console,
        *,
        seed: int,
        external: Sequence[str],
    ) -> None:
        self._file = scenario.file
        self._lab = lab
        self._console = console
        self._start = lab.clock.now()
        self._end = self._start + lab.scale(self._file.until)
        is_real = not isinstance(lab.clock, VirtualClock)
        find = lab.engine.board.find_event
        self._timeline = Timeline(self._start, find, rate=lab.rate, is_real=is_real)
        self._timeline.planned_end = self._end
        for step in self._file.steps:
            times = step.repeat.times if step.repeat else 1
            self._timeline.coming[get_event_name(step)] += times
        self._open = dict(enumerate(self._file.expectations))
        """The expectations that are not decided yet, by number."""
        self._decided_at: dict[int, float] = {}
        self._look_at = self._start
        self._may_end_early = False
        rng = random.Random(f"steps {seed}")
        self._stage = Stage(lab, self._timeline, rng, fault_ids={})
        self._conditions = dict(scenario.conditions)
        """Those that have not been met, by step number."""
        self._waiting = set(scenario.conditions)
        """The numbers of the steps with a condition that have not run."""
        self._unreached = set(range(1, len(self._file.steps) + 1))
        self._refused: list[ScenarioVerdict] = []
        self._error: Exception | None = None
        rng = random.Random(f"guests {seed}")
        self._guests = {
            vm: Guest(vm, entry, lab, phase=rng.random())
            for vm, entry in scenario.guests.items()
            if vm not in external and entry.poll != NEVER
        }
        self._incarnations = {
            vm: published.scope.incarnation for vm, published in lab.engine.board.vms.items()
        }

    async def run(self, program: ProcessGroup | None, *, to_the_end: bool) -> RunResult:
        self._lab.transcript.followers.append(self._follow)
        self._lab.engine.board.subscribe(self._wake_guests)
        for guest in self._guests.values():
            guest.start()
        for fault in self._file.faults:
            begin = parse_begin(fault)
            if isinstance(begin, datetime):
                begin = max(begin - (self._file.clock.start or START), timedelta(0))
            now = replace(fault, from_="0s")
            add = partial(self._lab.add_fault, now, rate=self._lab.rate)
            self._lab.scheduler.run_at(self._start + begin / self._lab.rate, add)
        for number, step in enumerate(self._file.steps, 1):
            if step.at is not None and not isinstance(step, JumpStep):
                self._plan(number, step, self._start + self._lab.scale(step.at))
        self._may_end_early = bool(self._open) and not to_the_end
        with suppress(asyncio.CancelledError):
            await self._let_time_pass(program)
        await self._lab.scheduler.cancel()
        self._lab.transcript.followers.remove(self._follow)
        if self._error is not None:
            raise self._error
        return self.conclude(program)

    async def _let_time_pass(self, program: ProcessGroup | None) -> None:
        clock = self._lab.clock
        if not isinstance(clock, VirtualClock):
            while (now := clock.now()) < self._end and not self._is_decided():
                nap = clock.sleep_until(min(self._end, now + LOOK_EVERY))
                if program is None or program.returncode == 0:
                    await nap
                else:
                    await wait_for_first(nap, program.wait())
                if program is not None and program.returncode:
                    return  # there is nothing left to test
            return
        jumps = [
            (self._lab.scale(step.at or ""), number, step)
            for number, step in enumerate(self._file.steps, 1)
            if isinstance(step, JumpStep)
        ]
        for at, number, step in sorted(jumps, key=lambda jump: jump[:2]):
            await self._advance_to(self._start + at)
            if self._is_decided():
                return
            await self._run_step(number, step)
        await self._advance_to(self._end)

    async def _advance_to(self, time: datetime) -> None:
        remaining = time - self._lab.clock.now()
        if remaining > timedelta(0):
            # In its own task: the clock yields often, and each yield would cross our whole stack.
            await asyncio.create_task(self._lab.advance(remaining, self._is_decided))

    def _is_decided(self) -> bool:
        """Return whether the run may end early. A look costs time, so it is not taken always."""
        timeline = self._timeline
        timeline.end = self._lab.clock.now()
        if timeline.end >= self._look_at:
            self._look_at = timeline.end + (LOOK_EVERY if timeline.is_real else LOOK_EVERY_VIRTUAL)
            waiting = []
            for number, expected in list(self._open.items()):
                is_coming = timeline.may_come(expected.subject)
                until = self._end if is_coming else judge(expected, timeline).open_until
                if until is None:
                    self._decided_at[number] = timeline.seconds
                    del self._open[number]
                else:
                    waiting.append((until, expected.describe()))
            self._console.show_progress(timeline, waiting)
        return self._may_end_early and not self._open and not self._waiting

    def conclude(
        self, program: ProcessGroup | None, missing: ScenarioVerdict | None = None
    ) -> RunResult:
        """Judge the run as it is now. `missing`: it did not begin, for this reason."""
        timeline, steps = self._timeline, self._file.steps
        timeline.end = self._lab.clock.now()
        is_early = timeline.end < self._end
        timeline.is_cut = is_early and not self._is_decided()
        verdicts = [missing] if missing else []
        for number, expected in enumerate(self._file.expectations):
            took = self._decided_at.get(number, timeline.seconds)
            verdicts.append(judge(expected, timeline)._replace(seconds=took))
        verdicts += self._refused
        verdicts += [self._judge_waiting(number) for number in sorted(self._waiting)]
        if program is not None and program.returncode is not None and missing is None:
            code = program.returncode
            outcome = VerdictOutcome.FAILED if code else VerdictOutcome.PASSED
            verdicts.append(
                ScenarioVerdict("the command does not fail", f"it ended with {code}", outcome)
            )
        for verdict in verdicts:
            detail = f"{verdict.expected}: {verdict.reason}"
            self._lab.transcript.add(TranscriptKind.VERDICT, what=verdict.outcome, detail=detail)
        how = "interrupted" if is_interrupted() else "ended"
        ending = f"{how} at {timeline.format_time(timeline.end)} of {self._file.until}"
        if is_early and not timeline.is_cut:
            ending += ", when everything was decided; --to-the-end runs the rest"
        return RunResult(
            verdicts=tuple(verdicts),
            transcript=self._lab.transcript,
            timeline=timeline,
            ending=ending,
            is_interrupted=is_interrupted(),
            skipped=tuple(
                f"step {number} ({steps[number - 1].verb})"
                for number in sorted(self._unreached - self._waiting)
            ),
        )

    def _judge_waiting(self, number: int) -> ScenarioVerdict:
        """A step that never ran fails the run: what the scenario is about did not happen."""
        step = self._file.steps[number - 1]
        reason = f"`{step.when}` was never true"
        if number not in self._conditions:
            reason = f"`{step.when}` was true less than {step.after or '0s'} before the end"
        return ScenarioVerdict(
            f"step {number} ({step.verb}) runs", reason, VerdictOutcome.NOT_REACHED
        )

    def _follow(self, entry: TranscriptEntry) -> None:
        """The engine ignores errors of its listeners, so ours are raised at the end of the run."""
        try:
            self._observe(entry)
        except Exception as error:
            self._error = self._error or error
            raise

    def _observe(self, entry: TranscriptEntry) -> None:
        observation = self._timeline.add(entry)
        if not is_poll(entry) or (observation.document and observation.document.events):
            self._look_at = entry.at
        self._console.print_observation(observation, self._timeline)
        for number, is_met in list(self._conditions.items()):
            if is_met(observation, self._timeline):
                del self._conditions[number]
                step = self._file.steps[number - 1]
                self._plan(number, step, entry.at + self._lab.scale(step.after or "0s"))
        if entry.kind is TranscriptKind.FAULT:
            for guest in self._guests.values():
                guest.notify()

    def _wake_guests(self, published: PublishedScope) -> None:
        """Notify guests of a new document, and guests of new VMs."""
        scope = published.scope
        for vm in scope.vms:
            guest = self._guests.get(vm.name)
            if guest is not None and self._incarnations.get(vm.name) != scope.incarnation:
                self._incarnations[vm.name] = scope.incarnation
                guest.notify()

    def _plan(self, number: int, step: ScenarioStep, time: datetime, times: int = 1) -> None:
        async def act() -> None:
            if step.repeat is not None and times < step.repeat.times:
                self._plan(number, step, time + self._lab.scale(step.repeat.every), times + 1)
            await self._run_step(number, step)

        self._lab.scheduler.run_at(time, act)

    async def _run_step(self, number: int, step: ScenarioStep) -> None:
        """A step that is refused fails the run: what the scenario is about did not happen."""
        self._waiting.discard(number)
        self._unreached.discard(number)
        self._lab.transcript.add(TranscriptKind.STEP, what=step.verb, detail=step.describe())
        try:
            await step.run(self._stage)
        except Error as error:
            title = f"step {number} ({step.verb}) succeeds"
            self._refused.append(ScenarioVerdict(title, error.message, VerdictOutcome.FAILED))
        self._timeline.coming[get_event_name(step)] -= 1


def get_event_name(step: ScenarioStep) -> str | None:
    """Return the name of the events that a step creates; None if it creates none."""
    if isinstance(step, FaultStep) or not hasattr(step, "as_"):
        return None
    return step.as_ or ""
