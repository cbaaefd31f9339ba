"""Runs a scenario: opens a lab, runs guests and steps, and returns verdicts."""

import asyncio
import random
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from msgspec.structs import replace

from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for_first
from forewarn.errors import Error, Invalid, NotFound
from forewarn.lab.clock import VirtualClock
from forewarn.lab.fault.active import parse_begin
from forewarn.lab.scenario.expectations import ScenarioVerdict, judge
from forewarn.lab.scenario.guest import Guest
from forewarn.lab.scenario.program import start_program
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.schema import NEVER, START, Scenario, list_vms
from forewarn.lab.scenario.steps import JumpStep, ScenarioStep, Stage
from forewarn.lab.scenario.timeline import Timeline, is_poll
from forewarn.lab.service import LabService, Setup, open_lab
from forewarn.lab.transcript import Transcript, TranscriptEntry, TranscriptKind

COMMAND_SECONDS_MAX = 60.0
MANUAL_SECONDS_MAX = 600.0
"""How long to wait for the first poll of an external VM, with a command and without one."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Overrides of the scenario file. External VMs are played by software at their listeners."""

    seed: int | None = None
    rate: float | None = None
    external: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    is_at_azure: bool = False
    first_poll_seconds_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    verdicts: tuple[ScenarioVerdict, ...]
    transcript: Transcript

    @property
    def is_passed(self) -> bool:
        return all(verdict.is_passed for verdict in self.verdicts)


async def run(scenario: Scenario, options: RunOptions, console: Console) -> RunResult:
    """Run a scenario: in virtual time, unless it has external VMs or a rate."""
    file = scenario.file
    seed = file.seed if options.seed is None else options.seed
    external = choose_external(scenario, options)
    rate = choose_rate(scenario, options, external)
    if rate is not None and any(isinstance(step, JumpStep) for step in file.steps):
        raise Invalid(
            f"{file.name} has a jump, which needs a virtual clock;"
            " expected neither a rate nor external VMs"
        )
    setup = Setup(
        fleet=scenario.fleets[0],
        is_virtual=rate is None,
        start=(file.clock.start or START).astimezone(UTC),
        rate=rate or 1.0,
        seed=seed,
    )
    async with open_lab(setup) as lab:
        urls = {vm: await lab.listen_vm(vm) for vm in external}
        for vm, url in urls.items():
            console.print(f"{vm} is external; its endpoint is {url}")
        if external and lab.rate > 1:
            console.print(f"one second of real time is {lab.rate:g} s of the scenario")
        software: AbstractAsyncContextManager[Process | None] = nullcontext()
        if options.command:  # it plays the first external VM
            vm, write = external[0], partial(console.print_output, external[0])
            software = start_program(
                options.command, vm, urls[vm], write, is_at_azure=options.is_at_azure
            )
        async with software as program:
            missing = await wait_for_first_polls(lab, external, program, options)
            if missing is not None:
                return RunResult(verdicts=(missing,), transcript=lab.transcript)
            return await Runner(scenario, lab, console, seed=seed, external=external).run(program)


def choose_external(scenario: Scenario, options: RunOptions) -> tuple[str, ...]:
    """Return the external VMs: those of the options, or else those without a model guest.

    With a command there is at least one.
    """
    vms = list_vms(scenario.fleets[0])
    for vm in options.external:
        if vm not in vms:
            raise NotFound(
                f"there is no VM {vm!r} in {scenario.file.name}; expected one of {', '.join(vms)}",
                vm=vm,
            )
    if options.external:
        return options.external
    free = tuple(vm for vm in vms if vm not in scenario.guests)
    return free or (vms[:1] if options.command else ())


def choose_rate(scenario: Scenario, options: RunOptions, external: Sequence[str]) -> float | None:
    """Return the rate on the real clock; None for a virtual clock."""
    if options.rate is not None:
        return options.rate
    if scenario.file.clock.rate is not None:
        return float(scenario.file.clock.rate)
    return 1.0 if external else None


async def wait_for_first_polls(
    lab: LabService, external: Sequence[str], program: Process | None, options: RunOptions
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
        ends = [program.wait()] if program else []
        await wait_for_first(has_all.wait(), *ends, timeout=seconds)
    lab.transcript.followers.remove(follow)
    if not missing:
        return None
    reason = f"no poll within {seconds:g} s"
    if program is not None and program.returncode is not None:
        reason = f"the command ended with {program.returncode} before its first poll"
    return ScenarioVerdict(f"{', '.join(missing)} polls its endpoint", reason, is_passed=False)


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
        rng = random.Random(f"steps {seed}")
        self._stage = Stage(lab, self._timeline, rng, fault_ids={})
        self._conditions = dict(scenario.conditions)
        """Those that have not been met, by step number."""
        self._waiting = set(scenario.conditions)
        """The numbers of the steps with a condition that have not run."""
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

    async def run(self, program: Process | None) -> RunResult:
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
        await self._let_time_pass(program)
        await self._lab.scheduler.cancel()
        self._lab.transcript.followers.remove(self._follow)
        if self._error is not None:
            raise self._error
        return self._conclude(program)

    async def _let_time_pass(self, program: Process | None) -> None:
        if not isinstance(self._lab.clock, VirtualClock):
            ends = [self._lab.clock.sleep_until(self._end)]
            if program is not None:
                ends.append(wait_for_failure(program))
            await wait_for_first(*ends)
            return
        jumps = [
            (self._lab.scale(step.at or ""), number, step)
            for number, step in enumerate(self._file.steps, 1)
            if isinstance(step, JumpStep)
        ]
        for at, number, step in sorted(jumps, key=lambda jump: jump[:2]):
            await self._advance_to(self._start + at)
            await self._run_step(number, step)
        await self._advance_to(self._end)

    async def _advance_to(self, time: datetime) -> None:
        remaining = time - self._lab.clock.now()
        if remaining > timedelta(0):
            # In its own task: the clock yields often, and each yield would cross our whole stack.
            await asyncio.create_task(self._lab.advance(remaining))

    def _conclude(self, program: Process | None) -> RunResult:
        self._timeline.end = self._lab.clock.now()
        verdicts = [judge(expected, self._timeline) for expected in self._file.expectations]
        verdicts += self._refused
        verdicts += [self._judge_waiting(number) for number in sorted(self._waiting)]
        if program is not None and program.returncode is not None:
            code = program.returncode
            verdicts.append(
                ScenarioVerdict("the command does not fail", f"it ended with {code}", code == 0)
            )
        for verdict in verdicts:
            what = "passed" if verdict.is_passed else "failed"
            detail = f"{verdict.expected}: {verdict.reason}"
            self._lab.transcript.add(TranscriptKind.VERDICT, what=what, detail=detail)
        return RunResult(verdicts=tuple(verdicts), transcript=self._lab.transcript)

    def _judge_waiting(self, number: int) -> ScenarioVerdict:
        """A step that never ran fails the run: what the scenario is about did not happen."""
        step = self._file.steps[number - 1]
        reason = f"`{step.when}` was never true"
        if number not in self._conditions:
            reason = f"`{step.when}` was true less than {step.after or '0s'} before the end"
        return ScenarioVerdict(f"step {number} ({step.verb}) runs", reason, is_passed=False)

    def _follow(self, entry: TranscriptEntry) -> None:
        """The engine ignores errors of its listeners, so ours are raised at the end of the run."""
        try:
            self._observe(entry)
        except Exception as error:
            self._error = self._error or error
            raise

    def _observe(self, entry: TranscriptEntry) -> None:
        observation = self._timeline.add(entry)
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
        self._lab.transcript.add(TranscriptKind.STEP, what=step.verb, detail=step.describe())
        try:
            await step.run(self._stage)
        except Error as error:
            title = f"step {number} ({step.verb}) succeeds"
            self._refused.append(ScenarioVerdict(title, error.message, is_passed=False))


async def wait_for_failure(program: Process) -> None:
    """Wait until it exits with a code other than 0: then there is nothing left to test."""
    if await program.wait() == 0:
        await asyncio.get_running_loop().create_future()
