"""The scenario file.

Its entries are types, and the types are the parser, the JSON Schema and the words of the errors.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from importlib import resources
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from forewarn import duration
from forewarn.core.event import EventType
from forewarn.duration import PATTERN as SPAN
from forewarn.duration import Duration
from forewarn.errors import Invalid, NotFound
from forewarn.fleetfile import parser as fleet_file
from forewarn.fleetfile.parser import Fleet
from forewarn.fleetfile.schema import FleetFile, Name, Text
from forewarn.fleetfile.yaml_source import FieldError, Path, convert, load, locate
from forewarn.lab.fault.active import begin_of
from forewarn.lab.fault.kinds import Fault
from forewarn.lab.scenario import condition, step
from forewarn.lab.scenario import expectation as expect

COUNT_MAX = 1000
RATE_MAX = 100_000
UNTIL_MAX = timedelta(days=366)
START_YEARS = range(1971, 8991)
START = datetime(2030, 1, 1, tzinfo=UTC)
NEVER = "never"
LIBRARY = "library"

_END = r"$(?!\n)"
_STEPS = re.compile(r"\w[\w-]*|\[[0-9]+\]")
_TOLD = re.compile(r"expected (.*), got ")

Approve = Annotated[
    str, Meta(pattern=rf"^(never|{SPAN}){_END}", description=f"{duration.EXPECTED}, or never")
]
Rate = Annotated[int, Meta(ge=1, le=RATE_MAX, description=f"a whole number from 1 to {RATE_MAX}")]
Seed = Annotated[int, Meta(ge=0, le=2**53, description="a whole number, 0 or more")]


class Of(StrEnum):
    """Which events a guest approves. `foreign` is wrong on purpose: those that do not name it."""

    OWN = "own"
    LEADER = "leader"
    ANY = "any"
    FOREIGN = "foreign"


class Clock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Virtual, from `start` on; or the real one with every time shortened by `rate`."""

    start: step.Moment = START
    rate: Rate | None = None


class GuestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model guests: they poll, and approve `approve` after they first saw an event.

    Nobody named: all VMs not named elsewhere.
    """

    vms: Annotated[
        tuple[Name, ...], Meta(max_length=10_000, description="a list of names of VMs")
    ] = ()
    poll: Approve = "1s"
    approve: Approve = "0s"
    of: Of = Of.OWN
    types: tuple[EventType, ...] = ()


class ScenarioFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario: who there is, what happens and when, what is expected, how long it lasts."""

    name: Name
    fleet: FleetFile
    until: Duration
    about: Text = ""
    seed: Seed = 1
    clock: Clock = Clock()
    guests: Annotated[
        tuple[GuestEntry, ...],
        Meta(max_length=COUNT_MAX, description="a list of at most 1000 guests"),
    ] = ()
    faults: Annotated[
        tuple[Fault, ...], Meta(max_length=COUNT_MAX, description="a list of at most 1000 faults")
    ] = ()
    steps: Annotated[
        tuple[step.Action, ...],
        Meta(max_length=COUNT_MAX, description="a list of at most 1000 steps"),
    ] = ()
    expectations: Annotated[
        tuple[expect.Expectation, ...],
        Meta(max_length=COUNT_MAX, description="a list of at most 1000 expectations"),
    ] = ()


class Scenario(msgspec.Struct, frozen=True):
    """What a scenario file says, checked. `fleets` are those that steps apply, by their number."""

    file: ScenarioFile
    fleet: Fleet
    fleets: dict[int, Fleet]
    conditions: dict[int, condition.Condition]

    @property
    def vms(self) -> tuple[str, ...]:
        """The VMs that there ever are, those of fleets to come included."""
        return names_in(self.fleet, *self.fleets.values())


def names_in(*fleets: Fleet) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(vm.name for one in fleets for scope in one.scopes for vm in scope.vms)
    )


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(value), type=dict[str, Any])


SCHEMA = _plain(
    {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(ScenarioFile)}
)
"""Made from the types above.

What a schema cannot say, the parser says alone: names that nobody has, times that do not fit.
"""


def parse(text: bytes, source: str) -> Scenario:
    """The scenario of a YAML or JSON text. `source` is what an error calls the text."""
    values = load(text, source)
    try:
        file = convert(values, ScenarioFile)
        return _checked(file, values)
    except FieldError as misfit:
        raise locate(misfit, values, text=text, source=source, schema=SCHEMA) from misfit


def library() -> tuple[str, ...]:
    """The names of the scenarios that come with the package."""
    folder = resources.files(__package__) / LIBRARY
    return tuple(
        sorted(
            file.name.removesuffix(".yaml")
            for file in folder.iterdir()
            if file.name.endswith(".yaml")
        )
    )


def shipped(name: str) -> Scenario:
    """A scenario of the library."""
    if name not in library():
        raise NotFound(
            f"there is no scenario {name!r}; expected a file, or one of {', '.join(library())}",
            scenario=name,
        )
    text = (resources.files(__package__) / LIBRARY / f"{name}.yaml").read_bytes()
    return parse(text, f"{name}.yaml")


def _checked(file: ScenarioFile, values: Any) -> Scenario:
    if duration.parse_duration(file.until) > UNTIL_MAX:
        raise FieldError(("until",), f"at most {UNTIL_MAX.days}d")
    if file.clock.start.year not in START_YEARS:
        raise FieldError(
            ("clock", "start"), f"a moment of the years {START_YEARS[0]} to {START_YEARS[-1]}"
        )
    if file.clock.rate is not None and "start" in values["clock"]:
        raise FieldError(
            ("clock", "rate"),
            "no rate beside `start`: only a virtual clock begins where it is told",
        )
    whole = _fleet(values["fleet"], ("fleet",))
    fleets = {
        number: _fleet(values["steps"][number]["fleet"], ("steps", number, "fleet"))
        for number, one in enumerate(file.steps)
        if isinstance(one, step.Apply)
    }
    names = Names(file, (whole, *fleets.values()))
    for number, guest in enumerate(file.guests):
        names.check_guest(guest, ("guests", number))
    for number, fault in enumerate(file.faults):
        if begin_of(fault) is None:
            raise FieldError(("faults", number, "from"))
        names.check(fault.vms, names.vms, "a VM of the fleet", ("faults", number, "vms"))
    for number, one in enumerate(file.steps):
        names.check_step(one, ("steps", number))
        _check_time(one, file, ("steps", number))
    for number, expected in enumerate(file.expectations):
        names.check_expected(expected, ("expectations", number))
    conditions = {
        number: names.condition(one.when, number)
        for number, one in enumerate(file.steps)
        if one.when is not None
    }
    return Scenario(file, whole, fleets, conditions)


def _fleet(values: object, at: Path) -> Fleet:
    """By the fleet file's own parser; its refusal becomes one of this file."""
    try:
        return fleet_file.parse(msgspec.json.encode(values), "fleet")
    except Invalid as problem:
        field = str(problem.facts["field"])
        path = tuple(
            int(part[1:-1]) if part.startswith("[") else part for part in _STEPS.findall(field)
        )
        told = _TOLD.search(problem.message)
        raise FieldError((*at, *path), told[1] if told else "") from problem


def _check_time(one: step.Step, file: ScenarioFile, at: Path) -> None:
    if (one.at is None) == (one.when is None):
        raise FieldError((*at, "at") if one.at else at, "either `at` or `when`")
    if one.after is not None and one.when is None:
        raise FieldError((*at, "after"), "`after` only with `when`")
    if one.repeat is not None and one.at is None:
        raise FieldError((*at, "repeat"), "`repeat` only with `at`")
    if isinstance(one, step.Jump) and (one.at is None or one.repeat is not None):
        raise FieldError(at, "a jump with `at` and without `repeat`")
    if one.at is not None:
        last = duration.parse_duration(one.at)
        if one.repeat is not None:
            last += duration.parse_duration(one.repeat.every) * (one.repeat.times - 1)
        if last > duration.parse_duration(file.until):
            field = "repeat" if one.repeat else "at"
            raise FieldError((*at, field), f"nothing later than `until`, which is {file.until}")


class Names:
    """Who can be spoken of: VMs and hosts of the fleet, and what steps name."""

    def __init__(self, file: ScenarioFile, fleets: tuple[Fleet, ...]) -> None:
        vms = [vm for one in fleets for scope in one.scopes for vm in scope.vms]
        self.vms = dict.fromkeys(vm.name for vm in vms)
        self.hosts = dict.fromkeys(
            [*(vm.host for vm in vms if vm.host), *(host for one in fleets for host in one.hosts)]
        )
        self.events: dict[str, None] = {}
        self.faults: dict[str, None] = {}
        self._played: set[str] = set()
        for number, one in enumerate(file.steps):
            name = getattr(one, "as_", None)
            if name is None:
                continue
            if name in self.vms:
                raise FieldError(("steps", number, "as"), "a name that no VM has")
            (self.faults if isinstance(one, step.SetFault) else self.events)[name] = None

    def check(self, told: tuple[str, ...], known: dict[str, None], what: str, at: Path) -> None:
        for number, name in enumerate(told):
            if name not in known:
                raise FieldError((*at, number), f"{what}: {condition.some(known)}")

    def check_one(self, name: str | None, known: dict[str, None], what: str, at: Path) -> None:
        if name is not None and name not in known:
            raise FieldError(at, f"{what}: {condition.some(known)}")

    def check_guest(self, guest: GuestEntry, at: Path) -> None:
        self.check(guest.vms, self.vms, "a VM of the fleet", (*at, "vms"))
        for number, vm in enumerate(guest.vms):
            if vm in self._played:
                raise FieldError((*at, "vms", number), "a VM that no guest above plays")
            self._played.add(vm)
        if guest.poll != NEVER and not duration.parse_duration(guest.poll):
            raise FieldError((*at, "poll"), "a second or more")

    def check_step(self, one: step.Step, at: Path) -> None:
        is_free = isinstance(one, step.OnVm | step.OnHost)  # who may be chosen by the seed
        for member, known, what in (
            ("vm", self.vms, "a VM of the fleet"),
            ("host", self.hosts, "a host of the fleet"),
            ("event", self.events, "a name that a step gives with `as`"),
            ("fault", self.faults, "a name that a step gives to a fault with `as`"),
        ):
            name = getattr(one, member, None)
            if not (is_free and name == step.ANY):
                self.check_one(name, known, what, (*at, member))
        if isinstance(one, step.SetFault):
            if one.set.from_ != "0s":
                raise FieldError(
                    (*at, "set", "from"), "a fault that begins with its step: no `from`"
                )
            self.check(one.set.vms, self.vms, "a VM of the fleet", (*at, "set", "vms"))

    def check_expected(self, one: expect.Expected, at: Path) -> None:
        self.check_one(
            getattr(one, "of", None), self.events, "a name that a step gives with `as`", (*at, "of")
        )
        self.check_one(getattr(one, "vm", None), self.vms, "a VM of the fleet", (*at, "vm"))
        self.check(getattr(one, "vms", ()), self.vms, "a VM of the fleet", (*at, "vms"))
        if isinstance(one, expect.Document):
            self.check_one(
                one.shows.event,
                self.events,
                "a name that a step gives with `as`",
                (*at, "shows", "event"),
            )
        if isinstance(one, expect.Approval) and one.by in (expect.OWN, expect.LEADER):
            return
        self.check_one(getattr(one, "by", None), self.vms, "a VM of the fleet", (*at, "by"))

    def condition(self, text: str, number: int) -> condition.Condition:
        try:
            return condition.parse(text, vms=self.vms, names=self.events)
        except ValueError as error:
            raise FieldError(("steps", number, "when"), str(error)) from error


def every_vm_played(file: ScenarioFile, vms: tuple[str, ...]) -> Iterator[tuple[str, GuestEntry]]:
    """Each VM that a model guest plays, with its entry."""
    named = {vm: entry for entry in file.guests for vm in entry.vms}
    rest = next((entry for entry in file.guests if not entry.vms), None)
    for vm in vms:
        entry = named.get(vm, rest)
        if entry is not None:
            yield vm, entry
