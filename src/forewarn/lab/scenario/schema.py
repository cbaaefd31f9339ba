"""The scenario file: its types, its parser and the library of scenarios.

The types validate the file, and the JSON Schema and the error messages are derived from them. The
kinds of steps are in `steps.py`, those of expectations in `expectations.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from importlib import resources
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from forewarn.core.event import EventType
from forewarn.duration import EXPECTED, PATTERN, Duration, parse_duration
from forewarn.errors import NotFound
from forewarn.fleetfile import parser as fleet_parser
from forewarn.fleetfile.parser import Fleet
from forewarn.fleetfile.schema import FleetFile, Name, Text, list_of, make_schema, number_from
from forewarn.fleetfile.yaml_source import FieldError, Path, SourceText, convert
from forewarn.lab.fault.active import check_begin
from forewarn.lab.fault.kinds import Fault
from forewarn.lab.names import EVENT, FAULT, HOST, VM, VmNames, check_names
from forewarn.lab.scenario.expectations import Expectation
from forewarn.lab.scenario.steps import ApplyStep, FaultStep, JumpStep, ScenarioStep
from forewarn.lab.scenario.timeline import Condition, parse_condition

COUNT_MAX = 1000
UNTIL_MAX = timedelta(days=366)
START_YEARS = range(1971, 8991)
START = datetime(2030, 1, 1, tzinfo=UTC)
NEVER = "never"
LIBRARY = resources.files(__package__) / "library"

DurationOrNever = Annotated[
    str, Meta(pattern=rf"^(never|{PATTERN})$(?!\n)", description=f"{EXPECTED}, or never")
]
Time = Annotated[datetime, Meta(tz=True, description="a time such as 2030-01-01T00:00:00Z")]


class Approves(StrEnum):
    """Which events a guest approves. `foreign` is wrong on purpose: those that do not name it."""

    OWN = "own"
    LEADER = "leader"
    ANY = "any"
    FOREIGN = "foreign"


class ClockEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A virtual clock that begins at `start`, or the real one with times shortened by `rate`."""

    start: Time | None = None
    rate: Annotated[int, number_from(1, 100_000)] | None = None


class GuestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model guests: they poll, and approve an event `approve` after they first saw it.

    Without `vms`: all VMs that no other entry names.
    """

    vms: VmNames = ()
    poll: DurationOrNever = "1s"
    approve: DurationOrNever = "0s"
    of: Approves = Approves.OWN
    types: tuple[EventType, ...] = ()


class ScenarioFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario: the fleet, what happens and when, what is expected, how long it lasts."""

    name: Name
    fleet: FleetFile
    until: Duration
    about: Text = ""
    seed: Annotated[int, Meta(ge=0, le=2**53, description="a whole number, 0 or more")] = 1
    clock: ClockEntry = ClockEntry()
    guests: Annotated[tuple[GuestEntry, ...], list_of("guests", COUNT_MAX)] = ()
    faults: Annotated[tuple[Fault, ...], list_of("faults", COUNT_MAX)] = ()
    steps: Annotated[tuple[ScenarioStep, ...], list_of("steps", COUNT_MAX)] = ()
    expectations: Annotated[tuple[Expectation, ...], list_of("expectations", COUNT_MAX)] = ()


SCHEMA = make_schema(ScenarioFile)
"""Only the parser checks what a schema cannot express: unknown names, times that do not fit."""


@dataclass(frozen=True)
class Scenario:
    """A checked scenario. `fleets` are its own and those that steps apply.

    `guests` are the VMs that a model guest plays. `conditions` are those of steps, by the number
    of the step, from 1.
    """

    file: ScenarioFile
    fleets: tuple[Fleet, ...]
    guests: dict[str, GuestEntry]
    conditions: dict[int, Condition]


def list_vms(*fleets: Fleet) -> tuple[str, ...]:
    vms = (vm.name for fleet in fleets for scope in fleet.scopes for vm in scope.vms)
    return tuple(dict.fromkeys(vms))


def parse_scenario(text: bytes, source: str) -> Scenario:
    """Parse YAML or JSON. Errors call the text `source`."""
    file = SourceText(source, text)
    values: Any = file.load()
    try:
        return _build(convert(values, ScenarioFile, strict=False))
    except FieldError as error:
        raise file.locate(error, SCHEMA) from error


def list_library() -> tuple[str, ...]:
    """Return the names of the scenarios that come with the package."""
    files = (file.name for file in LIBRARY.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def load_from_library(name: str) -> Scenario:
    if name not in list_library():
        raise NotFound(
            f"there is no scenario {name!r}; expected a file, or one of"
            f" {', '.join(list_library())}",
            scenario=name,
        )
    return parse_scenario((LIBRARY / f"{name}.yaml").read_bytes(), f"{name}.yaml")


def _build(file: ScenarioFile) -> Scenario:
    """Check what types cannot, in the order of the file."""
    _check_clock(file)
    fleets = [_build_fleet(file.fleet, ("fleet",))]
    fleets += [
        _build_fleet(step.fleet, ("steps", index, "fleet"))
        for index, step in enumerate(file.steps)
        if isinstance(step, ApplyStep)
    ]
    names = _collect_names(file, fleets)
    for section in ("guests", "faults", "steps", "expectations"):
        for index, entry in enumerate(getattr(file, section)):
            check_names(entry, names, (section, index))
    guests = _assign_guests(file, names[VM])
    for index, fault in enumerate(file.faults):
        check_begin(fault, ("faults", index))
    for index, step in enumerate(file.steps):
        _check_time(step, file.until, ("steps", index))
    conditions = {
        index + 1: parse_condition(step.when, names, ("steps", index, "when"))
        for index, step in enumerate(file.steps)
        if step.when is not None
    }
    return Scenario(file, tuple(fleets), guests, conditions)


def _check_clock(file: ScenarioFile) -> None:
    start = file.clock.start
    if parse_duration(file.until) > UNTIL_MAX:
        raise FieldError(("until",), f"at most {UNTIL_MAX.days}d")
    if start is not None and start.year not in START_YEARS:
        years = f"{START_YEARS[0]} to {START_YEARS[-1]}"
        raise FieldError(("clock", "start"), f"a time in the years {years}")
    if start is not None and file.clock.rate is not None:
        raise FieldError(("clock", "rate"), "no rate with `start`: the real clock starts now")


def _build_fleet(fleet: FleetFile, at: Path) -> Fleet:
    try:
        return fleet_parser.build(fleet)
    except FieldError as error:
        raise FieldError((*at, *error.path), error.expected) from error


def _collect_names(file: ScenarioFile, fleets: list[Fleet]) -> dict[str, tuple[str, ...]]:
    """Return the names that entries may refer to."""
    vms = list_vms(*fleets)
    events, faults = dict[str, None](), dict[str, None]()
    for index, step in enumerate(file.steps):
        name = getattr(step, "as_", None)
        if name in vms:
            raise FieldError(("steps", index, "as"), "a name that is not a VM's")
        if name is not None:
            (faults if isinstance(step, FaultStep) else events)[name] = None
    hosts = [
        *(vm.host for fleet in fleets for scope in fleet.scopes for vm in scope.vms if vm.host),
        *(host for fleet in fleets for host in fleet.hosts),
    ]
    return {VM: vms, HOST: tuple(dict.fromkeys(hosts)), EVENT: tuple(events), FAULT: tuple(faults)}


def _assign_guests(file: ScenarioFile, vms: Collection[str]) -> dict[str, GuestEntry]:
    guests: dict[str, GuestEntry] = {}
    default = next((guest for guest in file.guests if not guest.vms), None)
    for number, guest in enumerate(file.guests):
        for index, vm in enumerate(guest.vms):
            if vm in guests:
                path = ("guests", number, "vms", index)
                raise FieldError(path, "a VM that no guest above plays")
            guests[vm] = guest
        if guest.poll != NEVER and not parse_duration(guest.poll):
            raise FieldError(("guests", number, "poll"), "a second or more")
    if default is not None:
        guests = {vm: guests.get(vm, default) for vm in vms}
    return guests


def _check_time(step: ScenarioStep, until: str, at: Path) -> None:
    if (step.at is None) == (step.when is None):
        raise FieldError((*at, "at") if step.at else at, "either `at` or `when`")
    if step.after is not None and step.when is None:
        raise FieldError((*at, "after"), "`after` only with `when`")
    if step.repeat is not None and step.at is None:
        raise FieldError((*at, "repeat"), "`repeat` only with `at`")
    if isinstance(step, JumpStep) and (step.at is None or step.repeat is not None):
        raise FieldError(at, "a jump with `at` and without `repeat`")
    if isinstance(step, FaultStep) and step.set.from_ != "0s":
        raise FieldError((*at, "set", "from"), "a fault that begins with its step: no `from`")
    if step.at is not None:
        last = parse_duration(step.at)
        if step.repeat is not None:
            last += parse_duration(step.repeat.every) * (step.repeat.times - 1)
        if last > parse_duration(until):
            field = "repeat" if step.repeat else "at"
            raise FieldError((*at, field), f"nothing later than `until`, which is {until}")
