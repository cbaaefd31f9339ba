"""Running a scenario: the lab is set up, guests and steps do their part, monitors watch, and there
is a verdict.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
from msgspec.structs import replace

from forewarn import duration
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import VirtualClock
from forewarn.engine.operations import Told
from forewarn.errors import Error, Invalid, NotFound
from forewarn.lab.fault.active import begin_of
from forewarn.lab.fault.kinds import Fault
from forewarn.lab.scenario import step as do
from forewarn.lab.scenario.action import Actions
from forewarn.lab.scenario.condition import is_met
from forewarn.lab.scenario.guest import Guest
from forewarn.lab.scenario.monitor import monitor
from forewarn.lab.scenario.program import Program, running
from forewarn.lab.scenario.report import Progress
from forewarn.lab.scenario.result import Verdict
from forewarn.lab.scenario.scheduler import Agenda
from forewarn.lab.scenario.schema import NEVER, Scenario, every_vm_played, names_in
from forewarn.lab.scenario.timeline import Story, is_poll
from forewarn.lab.service import LabService, Setup, laboratory
from forewarn.lab.transcript import Entry, Kind, Transcript
from forewarn.testing.lab import ENVIRONMENT

COMMAND_SECONDS_MAX = 60.0
SOMEBODY_SECONDS_MAX = 600.0
"""How long the first poll of a VM that is played from outside is waited for, with a command of ours
and without.
"""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How a scenario is to be run, where not as its file says.

    VMs `outside` are played by software at their doors.
    """

    seed: int | None = None
    rate: float | None = None
    outside: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    patience_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it."""

    verdicts: tuple[Verdict, ...]
    transcript: Transcript

    @property
    def is_passed(self) -> bool:
        return all(verdict.is_passed for verdict in self.verdicts)


async def run(scenario: Scenario, wish: Wish, progress: Progress) -> Result:
    """The whole scenario, in virtual time unless somebody outside takes part or a rate says
    otherwise.
    """
    file = scenario.file
    seed = file.seed if wish.seed is None else wish.seed
    outside = players(scenario, wish)
    rate = rate_of(scenario, wish, outside)
    if rate is not None and any(isinstance(one, do.Jump) for one in file.steps):
        raise Invalid(
            f"{file.name} has a jump, which only a virtual clock can make; expected neither a rate nor VMs outside"
        )
    start = file.clock.start.astimezone(UTC)
    setup = Setup(
        fleet=scenario.fleet, is_virtual=rate is None, start=start, rate=rate or 1.0, seed=seed
    )
    async with laboratory(setup) as lab:
        urls = {vm: await lab.door(vm) for vm in outside}
        for vm, url in urls.items():
            progress.say(f"{vm} is played from outside, at {url}")
        if outside and lab.rate > 1:
            progress.say(f"at this rate, each second of its own counts as {lab.rate:g} s")
        async with started(wish.command, urls, progress) as program:
            absent = await first_polls(lab, outside, program, wish)
            if absent:
                return Result(verdicts=(absent,), transcript=lab.transcript)
            return await Run(scenario, lab, progress, seed=seed, outside=outside).play(program)


def players(scenario: Scenario, wish: Wish) -> tuple[str, ...]:
    """The VMs that are played from outside: those asked for, else those without a model guest; with
    a command, one at least.
    """
    vms = names_in(scenario.fleet)
    for vm in wish.outside:
        if vm not in vms:
            raise NotFound(
                f"there is no VM {vm!r} in {scenario.file.name}; expected one of {', '.join(vms)}",
                vm=vm,
            )
    if wish.outside:
        return wish.outside
    played = dict(every_vm_played(scenario.file, scenario.vms))
    free = tuple(vm for vm in vms if vm not in played)
    return free or (vms[:1] if wish.command else ())


def rate_of(scenario: Scenario, wish: Wish, outside: Sequence[str]) -> float | None:
    """How many times shorter than told the times are, on the real clock;

    None for the virtual clock.
    """
    if wish.rate is not None:
        return wish.rate
    if scenario.file.clock.rate is not None:
        return float(scenario.file.clock.rate)
    return 1.0 if outside else None


@asynccontextmanager
async def started(
    command: Sequence[str], urls: dict[str, str], progress: Progress
) -> AsyncIterator[Program | None]:
    """The software under test, if it is ours to start.

    It plays the first VM that is played from outside.
    """
    if not command:
        yield None
        return
    vm, url = next(iter(urls.items()))
    address = url.removeprefix("http://")
    told = {name: value.format(address=address) for name, value in ENVIRONMENT.items()}
    environment = {**told, "FOREWARN_ENDPOINT": url, "FOREWARN_VM": vm}
    tell = partial(progress.output, vm)
    async with running(command, endpoint=url, environment=environment, tell=tell) as program:
        yield program


async def first_polls(
    lab: LabService, outside: Sequence[str], program: Program | None, wish: Wish
) -> Verdict | None:
    """Wait until everybody outside has asked once; the verdict, if somebody does not."""
    missing = dict.fromkeys(outside)
    has_all = asyncio.Event()

    def hear(entry: Entry) -> None:
        if missing and is_poll(entry):
            missing.pop(entry.vm, None)
            if not missing:
                has_all.set()

    seconds = wish.patience_seconds or (COMMAND_SECONDS_MAX if program else SOMEBODY_SECONDS_MAX)
    lab.transcript.followers.append(hear)
    waits = [
        asyncio.ensure_future(has_all.wait()),
        *([asyncio.ensure_future(program.wait())] if program else []),
    ]
    if missing:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in waits:
        one.cancel()
    lab.transcript.followers.remove(hear)
    if not missing:
        return None
    ended = program.exit_code if program else None
    reason = (
        f"nobody polled within {seconds:g} s"
        if ended is None
        else f"the command ended with {ended} before it had polled"
    )
    return Verdict(f"{', '.join(missing)} polls its endpoint", reason, is_passed=False)


class Run:
    """One run, from its start to its verdict."""

    def __init__(
        self,
        scenario: Scenario,
        lab: LabService,
        progress: Progress,
        *,
        seed: int,
        outside: Sequence[str],
    ) -> None:
        file = scenario.file
        self._scenario = scenario
        self._lab = lab
        self._progress = progress
        self._start = lab.clock.now()
        self._end = self._start + duration.parse_duration(file.until) / lab.rate
        self._story = Story(
            self._start, self._find, rate=lab.rate, is_real=not isinstance(lab.clock, VirtualClock)
        )
        self._monitors = [monitor(expected, self._story) for expected in file.expectations]
        self._agenda = Agenda(lab.clock)
        self._actions = Actions(scenario, lab, self._story, random.Random(f"steps {seed}"))
        self._armed = dict(scenario.conditions)
        self._undone = dict.fromkeys(scenario.conditions)
        self._refusals: list[Verdict] = []
        self._broken: Exception | None = None
        chance = random.Random(f"guests {seed}")
        self._guests = {
            vm: Guest(vm, entry, lab, self._agenda, phase=chance.random())
            for vm, entry in every_vm_played(file, scenario.vms)
            if vm not in outside and entry.poll != NEVER
        }
        self._incarnations = {
            vm: place.scope.incarnation for vm, place in lab.engine.board.vms.items()
        }
        self._words = [told(step) for step in file.steps]

    async def play(self, program: Program | None) -> Result:
        self._lab.transcript.followers.append(self._hear)
        self._lab.engine.board.subscribe(self._wake_guests)
        async with self._agenda:
            for guest in self._guests.values():
                guest.begin()
            for fault in self._scenario.file.faults:
                self._agenda.at(self._begin_of(fault), partial(self._set_fault, fault))
            for number, step in enumerate(self._scenario.file.steps):
                if step.at is not None and not isinstance(step, do.Jump):
                    self._plan(number, step, self._start + self._real(step.at))
            await self._let_time_pass(program)
        self._lab.transcript.followers.remove(self._hear)
        if self._broken is not None:
            raise self._broken
        return self._conclude(program)

    async def _let_time_pass(self, program: Program | None) -> None:
        if isinstance(self._lab.clock, VirtualClock):
            await self._advance()
            return
        waits: list[asyncio.Future[object]] = [
            asyncio.ensure_future(self._lab.clock.sleep_until(self._end))
        ]
        if program is not None:
            waits.append(asyncio.ensure_future(self._trouble(program)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def _trouble(self, program: Program) -> None:
        """Until the program has ended with what is not 0: then there is nobody left to test."""
        if await program.wait() == 0:
            await asyncio.get_running_loop().create_future()

    async def _advance(self) -> None:
        """Time passes between the jumps: nobody can jump while it does."""
        jumps = [
            (duration.parse_duration(step.at or ""), number, step)
            for number, step in enumerate(self._scenario.file.steps)
            if isinstance(step, do.Jump)
        ]
        for at, number, step in sorted(jumps, key=lambda jump: jump[:2]):
            await self._advance_to(self._start + at)
            await self._do(number, step)
        await self._advance_to(self._end)

    async def _advance_to(self, moment: datetime) -> None:
        left = moment - self._lab.clock.now()
        if left > timedelta(0):
            await asyncio.create_task(
                self._lab.advance(left)
            )  # from here, each turn of the loop would cost the whole stack

    def _conclude(self, program: Program | None) -> Result:
        now = self._lab.clock.now()
        verdicts = [
            *(one.close(now) for one in self._monitors),
            *self._refusals,
            *map(self._left_undone, self._undone),
        ]
        if program is not None and program.exit_code is not None:
            ended = f"it ended by itself with {program.exit_code}"
            verdicts.append(
                Verdict("the command does not fail", ended, is_passed=program.exit_code == 0)
            )
        for verdict in verdicts:
            what = "passed" if verdict.is_passed else "failed"
            self._lab.transcript.add(
                Kind.VERDICT, what=what, detail=f"{verdict.expected}: {verdict.reason}"
            )
        return Result(verdicts=tuple(verdicts), transcript=self._lab.transcript)

    def _left_undone(self, number: int) -> Verdict:
        """What the scenario is about did not happen, whatever the expectations say."""
        step = self._scenario.file.steps[number]
        late = f"held, but {step.after or '0s'} after it the scenario was over"
        reason = f"`{step.when}` {'never held' if number in self._armed else late}"
        return Verdict(f"step {number + 1} ({step.action}) is done", reason, is_passed=False)

    def _hear(self, entry: Entry) -> None:
        """What breaks here would be swallowed by whoever tells us, and a monitor that broke would
        seem content.
        """
        try:
            self._look(entry)
        except Exception as broken:
            self._broken = self._broken or broken
            raise

    def _look(self, entry: Entry) -> None:
        happening = self._story.see(entry)
        self._progress.tell(happening, self._story)
        for one in self._monitors:
            if not one.failure:
                one.watch(happening)
                if one.failure:
                    self._progress.failure(one.expected.words(), one.failure)
        for number, condition in list(self._armed.items()):
            if is_met(condition, happening):
                del self._armed[number]
                step = self._scenario.file.steps[number]
                self._plan(number, step, entry.at + self._real(step.after or "0s"))
        if entry.kind is Kind.FAULT:
            for guest in self._guests.values():
                guest.notice()

    def _wake_guests(self, place: PublishedScope) -> None:
        """A new document is worth a look; so is a VM that has come."""
        scope = place.scope
        for vm in scope.vms:
            guest = self._guests.get(vm.name)
            if guest is not None and self._incarnations.get(vm.name) != scope.incarnation:
                self._incarnations[vm.name] = scope.incarnation
                guest.notice()

    def _plan(self, number: int, step: do.Step, moment: datetime, times: int = 1) -> None:
        async def act() -> None:
            if step.repeat is not None and times < step.repeat.times:
                self._plan(number, step, moment + self._real(step.repeat.every), times + 1)
            await self._do(number, step)

        self._agenda.at(moment, act)

    async def _do(self, number: int, step: do.Step) -> None:
        """A step that cannot be done fails the run: what the scenario is about did not happen."""
        self._undone.pop(number, None)
        self._lab.transcript.add(Kind.STEP, what=step.action, detail=self._words[number])
        try:
            if isinstance(step, do.SetFault):
                await self._set_fault(step.set, step.as_)
            else:
                await self._actions.run_impact(number, step)
        except Error as problem:
            verdict = Verdict(
                f"step {number + 1} ({step.action}) can be done", problem.message, is_passed=False
            )
            self._refusals.append(verdict)
            self._progress.failure(verdict.expected, verdict.reason)

    def _begin_of(self, fault: Fault) -> datetime:
        begin = begin_of(fault)
        assert begin is not None, "the parser has checked it"
        since = begin - self._scenario.file.clock.start if isinstance(begin, datetime) else begin
        return self._start + max(since, timedelta(0)) / self._lab.rate

    async def _set_fault(self, fault: Fault, name: str | None = None) -> None:
        """Begin it now.

        Its end is ours to keep too: at a rate, it comes sooner than the fault itself would say.
        """
        standing = self._lab.add_fault(replace(fault, from_="0s", for_=None))
        if name is not None:
            self._actions.name_fault(name, standing.id)
        if fault.for_ is not None:
            self._agenda.at(
                self._lab.clock.now() + self._real(fault.for_),
                partial(self._end_fault, standing.id),
            )

    async def _end_fault(self, fault_id: str) -> None:
        with suppress(NotFound):  # it was cleared before
            self._lab.remove_fault(fault_id)

    def _real(self, told: str) -> timedelta:
        """A length of the scenario's time on the lab's clock."""
        return duration.parse_duration(told) / self._lab.rate

    def _find(self, event_id: str) -> Told | None:
        with suppress(Error):
            return self._lab.operations.find_event(event_id)
        return None


def told(step: do.Step) -> str:
    """A step in words: what it says, but for the time and what is too long for a line."""
    if isinstance(step, do.Log):
        return step.text
    members = [
        field for field in msgspec.structs.fields(step) if field.name not in ("at", "when", "after")
    ]
    said = [
        (field.encode_name, getattr(step, field.name))
        for field in members
        if getattr(step, field.name) != field.default
    ]
    return ", ".join(f"{name} {value}" for name, value in said if isinstance(value, str | int))
