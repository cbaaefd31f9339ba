"""Runs a scenario: opens a lab, runs guests and steps, and returns verdicts."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from msgspec.structs import replace

from forewarn.duration import parse_duration
from forewarn.engine.board import PublishedScope
from forewarn.engine.operations import ScopedEvent
from forewarn.errors import Error, Invalid, NotFound
from forewarn.lab.clock import VirtualClock
from forewarn.lab.environment import make_environment
from forewarn.lab.fault.active import parse_begin
from forewarn.lab.fault.kinds import Fault
from forewarn.lab.scenario.condition import is_met
from forewarn.lab.scenario.guest import Guest
from forewarn.lab.scenario.program import Program, start_program
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.scheduler import Scheduler
from forewarn.lab.scenario.schema import NEVER, Scenario, list_vms
from forewarn.lab.scenario.steps import ScenarioStep, StepRunner
from forewarn.lab.scenario.timeline import Timeline, is_poll
from forewarn.lab.scenario.verdicts import ScenarioVerdict, judge
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
    if rate is not None and any(step.do == "jump" for step in file.steps):
        raise Invalid(
            f"{file.name} has a jump, which needs a virtual clock;"
            " expected neither a rate nor external VMs"
        )
    setup = Setup(
        fleet=scenario.fleet,
        is_virtual=rate is None,
        start=file.clock.start.astimezone(UTC),
        rate=rate or 1.0,
        seed=seed,
    )
    async with open_lab(setup) as lab:
        urls = {vm: await lab.listen_vm(vm) for vm in external}
        for vm, url in urls.items():
            console.print(f"{vm} is external; its endpoint is {url}")
        if external and lab.rate > 1:
            console.print(f"one second of real time is {lab.rate:g} s of the scenario")
        async with start_command(options.command, urls, console) as program:
            missing = await wait_for_first_polls(lab, external, program, options)
            if missing is not None:
                return RunResult(verdicts=(missing,), transcript=lab.transcript)
            return await Runner(scenario, lab, console, seed=seed, external=external).run(program)


def choose_external(scenario: Scenario, options: RunOptions) -> tuple[str, ...]:
    """Return the external VMs: those of the options, or else those without a model guest.

    With a command there is at least one.
    """
    vms = list_vms(scenario.fleet)
    for vm in options.external:
        if vm not in vms:
            raise NotFound(
                f"there is no VM {vm!r} in {scenario.file.name}; expected one of {', '.join(vms)}",
                vm=vm,
            )
    if options.external:
        return options.external
    guests = dict(scenario.list_guests())
    free = tuple(vm for vm in vms if vm not in guests)
    return free or (vms[:1] if options.command else ())


def choose_rate(scenario: Scenario, options: RunOptions, external: Sequence[str]) -> float | None:
    """Return the rate on the real clock; None for a virtual clock."""
    if options.rate is not None:
        return options.rate
    if scenario.file.clock.rate is not None:
        return float(scenario.file.clock.rate)
    return 1.0 if external else None


@asynccontextmanager
async def start_command(
    command: Sequence[str], urls: dict[str, str], console: Console
) -> AsyncIterator[Program | None]:
    """Run the software under test, if there is a command. It plays the first external VM."""
    if not command:
        yield None
        return
    vm, url = next(iter(urls.items()))
    environment = {**make_environment(url), "FOREWARN_ENDPOINT": url, "FOREWARN_VM": vm}
    write = partial(console.print_output, vm)
    async with start_program(
        command, endpoint=url, environment=environment, write=write
    ) as program:
        yield program


async def wait_for_first_polls(
    lab: LabService, external: Sequence[str], program: Program | None, options: RunOptions
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
        await wait_for_first(
            has_all.wait(), *([program.wait()] if program else []), timeout=seconds
        )
    lab.transcript.followers.remove(follow)
    if not missing:
        return None
    reason = f"no poll within {seconds:g} s"
    if program is not None and program.exit_code is not None:
        reason = f"the command ended with {program.exit_code} before its first poll"
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
        self._end = self._start + self._scale(self._file.until)
        is_real = not isinstance(lab.clock, VirtualClock)
        self._timeline = Timeline(self._start, self._find_event, rate=lab.rate, is_real=is_real)
        self._scheduler = Scheduler(lab.clock)
        self._steps = StepRunner(
            lab,
            self._timeline,
            fleets=scenario.fleets,
            rng=random.Random(f"steps {seed}"),
            set_fault=self._set_fault,
        )
        self._conditions = dict(scenario.conditions)
        """Those that have not been met, by step number."""
        self._waiting = set(scenario.conditions)
        """The numbers of the steps with a condition that have not run."""
        self._refused: list[ScenarioVerdict] = []
        self._error: Exception | None = None
        rng = random.Random(f"guests {seed}")
        self._guests = {
            vm: Guest(vm, entry, lab, self._scheduler, phase=rng.random())
            for vm, entry in scenario.list_guests()
            if vm not in external and entry.poll != NEVER
        }
        self._incarnations = {
            vm: published.scope.incarnation for vm, published in lab.engine.board.vms.items()
        }

    async def run(self, program: Program | None) -> RunResult:
        self._lab.transcript.followers.append(self._follow)
        self._lab.engine.board.subscribe(self._wake_guests)
        async with self._scheduler:
            for guest in self._guests.values():
                guest.start()
            for fault in self._file.faults:
                self._scheduler.run_at(self._begin_of(fault), partial(self._add_fault, fault))
            for step in self._file.steps:
                if step.at is not None and step.do != "jump":
                    self._plan(step, self._start + self._scale(step.at))
            await self._let_time_pass(program)
        self._lab.transcript.followers.remove(self._follow)
        if self._error is not None:
            raise self._error
        return self._conclude(program)

    async def _let_time_pass(self, program: Program | None) -> None:
        if not isinstance(self._lab.clock, VirtualClock):
            ends: list[Awaitable[object]] = [self._lab.clock.sleep_until(self._end)]
            if program is not None:
                ends.append(program.wait_for_failure())
            await wait_for_first(*ends)
            return
        jumps = [step for step in self._file.steps if step.do == "jump"]
        for step in sorted(jumps, key=lambda step: parse_duration(step.at or "")):
            await self._advance_to(self._start + parse_duration(step.at or ""))
            await self._run_step(step)
        await self._advance_to(self._end)

    async def _advance_to(self, time: datetime) -> None:
        remaining = time - self._lab.clock.now()
        if remaining > timedelta(0):
            # In its own task: the clock yields often, and each yield would cross our whole stack.
            await asyncio.create_task(self._lab.advance(remaining))

    def _conclude(self, program: Program | None) -> RunResult:
        self._timeline.end = self._lab.clock.now()
        verdicts = [judge(expected, self._timeline) for expected in self._file.expectations]
        verdicts += self._refused
        verdicts += [self._judge_waiting(number) for number in sorted(self._waiting)]
        if program is not None and program.exit_code is not None:
            reason = f"it ended with {program.exit_code}"
            verdicts.append(
                ScenarioVerdict(
                    "the command does not fail", reason, is_passed=program.exit_code == 0
                )
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
        return ScenarioVerdict(f"{step.title} runs", reason, is_passed=False)

    def _follow(self, entry: TranscriptEntry) -> None:
        """The engine ignores errors of its listeners, so ours are raised at the end of the run."""
        try:
            self._observe(entry)
        except Exception as error:
            self._error = self._error or error
            raise

    def _observe(self, entry: TranscriptEntry) -> None:
        observation = self._timeline.add(entry)
        self._console.print_observation(observation)
        for number, condition in list(self._conditions.items()):
            if is_met(condition, observation):
                del self._conditions[number]
                step = self._file.steps[number - 1]
                self._plan(step, entry.at + self._scale(step.after or "0s"))
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

    def _plan(self, step: ScenarioStep, time: datetime, times: int = 1) -> None:
        async def act() -> None:
            if step.repeat is not None and times < step.repeat.times:
                self._plan(step, time + self._scale(step.repeat.every), times + 1)
            await self._run_step(step)

        self._scheduler.run_at(time, act)

    async def _run_step(self, step: ScenarioStep) -> None:
        """A step that is refused fails the run: what the scenario is about did not happen."""
        self._waiting.discard(step.number)
        self._lab.transcript.add(TranscriptKind.STEP, what=step.do, detail=step.describe())
        try:
            await self._steps.run(step)
        except Error as error:
            verdict = ScenarioVerdict(f"{step.title} succeeds", error.message, is_passed=False)
            self._refused.append(verdict)
            self._console.print_failure(verdict)

    def _begin_of(self, fault: Fault) -> datetime:
        begin = parse_begin(fault)
        assert begin is not None, "the parser has checked it"
        since = begin - self._file.clock.start if isinstance(begin, datetime) else begin
        return self._start + max(since, timedelta(0)) / self._lab.rate

    async def _add_fault(self, fault: Fault) -> None:
        await self._set_fault(fault)

    async def _set_fault(self, fault: Fault) -> str:
        """Begin a fault now, and end it by the scenario's time, which may be faster."""
        added = await self._lab.add_fault(replace(fault, from_="0s", for_=None))
        if fault.for_ is not None:
            ends_at = self._lab.clock.now() + self._scale(fault.for_)
            self._scheduler.run_at(ends_at, partial(self._end_fault, added.id))
        return added.id

    async def _end_fault(self, fault_id: str) -> None:
        with suppress(NotFound):  # a step has cleared it
            self._lab.remove_fault(fault_id)

    def _scale(self, duration: str) -> timedelta:
        """Convert a duration of the scenario to the lab's clock."""
        return parse_duration(duration) / self._lab.rate

    def _find_event(self, event_id: str) -> ScopedEvent | None:
        with suppress(Error):
            return self._lab.operations.find_event(event_id)
        return None


async def wait_for_first(*works: Awaitable[object], timeout: float | None = None) -> None:
    """Wait until one of them is done or the time is up, and cancel the rest."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
