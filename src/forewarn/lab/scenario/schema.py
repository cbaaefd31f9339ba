"""The scenario file: its types, its parser and the library of scenarios.

The types validate the file, and the JSON Schema and the error messages are derived from them.
Steps and expectations are tables of members (`VERBS` in `steps.py`, `EXPECTATIONS` here): a strict
type is generated for each kind. The checked entries are `ScenarioStep` and `Expectation`.
"""

import functools
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta

from forewarn.core.event import EventType, Source, Status
from forewarn.duration import EXPECTED, PATTERN, Duration, parse_duration
from forewarn.errors import Invalid, NotFound
from forewarn.fleetfile import parser as fleet_parser
from forewarn.fleetfile.parser import Fleet
from forewarn.fleetfile.schema import FleetFile, Name, Text
from forewarn.fleetfile.yaml_source import FieldError, Path, convert, load, locate
from forewarn.lab.fault.active import parse_begin
from forewarn.lab.fault.kinds import REMOVED, Fault
from forewarn.lab.scenario.condition import Condition, parse_condition, shorten_list
from forewarn.lab.scenario.steps import ANY, TIMES, VERBS, EventName, NameOrAny, ScenarioStep

COUNT_MAX = 1000
RATE_MAX = 100_000
UNTIL_MAX = timedelta(days=366)
START_YEARS = range(1971, 8991)
START = datetime(2030, 1, 1, tzinfo=UTC)
NEVER, OWN, LEADER = "never", "own", "leader"

_END = r"$(?!\n)"
_PATH_STEP = re.compile(r"\w[\w-]*|\[[0-9]+\]")
_EXPECTED = re.compile(r"expected (.*), got ")

DurationOrNever = Annotated[
    str, Meta(pattern=rf"^(never|{PATTERN}){_END}", description=f"{EXPECTED}, or never")
]
Rate = Annotated[int, Meta(ge=1, le=RATE_MAX, description=f"a whole number from 1 to {RATE_MAX}")]
Seed = Annotated[int, Meta(ge=0, le=2**53, description="a whole number, 0 or more")]
Time = Annotated[datetime, Meta(tz=True, description="a time such as 2030-01-01T00:00:00Z")]
Approver = Annotated[
    Name, Meta(description="a VM; own: one that the event names; leader: the first that it names")
]
VmNames = Annotated[tuple[Name, ...], Meta(max_length=10_000, description="a list of VM names")]
TwoVmNames = Annotated[
    tuple[Name, ...],
    Meta(min_length=2, max_length=10_000, description="a list of two or more VM names"),
]


class Becomes(StrEnum):
    APPROVED = "approved"
    STARTED = "started"
    COMPLETED = "completed"
    CANCELED = "canceled"
    FAILED = "failed"


class Shows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event in a document. Members that are left out may have any value."""

    event: EventName | None = None
    type: EventType | None = None
    status: Status | None = None
    source: Source | None = None


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """An expectation that the parser has checked. `verdicts.py` judges it.

    Members that its kind does not have keep their default.
    """

    expect: str
    of: str = ""
    by: str | None = None
    after: str | None = None
    within: str | None = None
    becomes: str = ""
    vm: str = ""
    vms: tuple[str, ...] = ()
    shows: Shows = Shows()
    every: str = ""


class ExpectationSchema(NamedTuple):
    about: str
    members: dict[str, Any]


EXPECTATIONS = {
    "approval": ExpectationSchema(
        "A VM approves each event of that name, not sooner than `after`, within `within`.",
        {
            "of": EventName,
            "by": Approver | None,
            "after": Duration | None,
            "within": Duration | None,
        },
    ),
    "no-approval": ExpectationSchema(
        "No VM, or not this one, approves an event of that name.",
        {"of": EventName, "by": Name | None},
    ),
    "no-foreign-approval": ExpectationSchema(
        "None of these VMs (none given: no VM) approves an event that does not name it.",
        {"vms": VmNames | None},
    ),
    "order": ExpectationSchema(
        "The first approvals of these VMs come in this order.",
        {"vms": TwoVmNames, "of": EventName | None},
    ),
    "document": ExpectationSchema(
        "A VM is shown such an event.",
        {"vm": Name, "shows": Shows, "within": Duration | None},
    ),
    "event": ExpectationSchema(
        "Each event of that name reaches this state.",
        {"of": EventName, "becomes": Becomes, "within": Duration | None},
    ),
    "one-at-a-time": ExpectationSchema(
        "Events of that name are never Started at the same time.", {"of": EventName}
    ),
    "together": ExpectationSchema(
        "Events of that name are Started at the same time.", {"of": EventName}
    ),
    "polls": ExpectationSchema(
        "The VM polls at least this often, from start to end.", {"vm": Name, "every": Duration}
    ),
    "recovery": ExpectationSchema(
        "After every bad response the VM retries within this time, until it gets a good one.",
        {"vm": Name, "within": Duration},
    ),
}


class Approves(StrEnum):
    """Which events a guest approves. `foreign` is wrong on purpose: those that do not name it."""

    OWN = "own"
    LEADER = "leader"
    ANY = "any"
    FOREIGN = "foreign"


class ClockEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A virtual clock that begins at `start`, or the real one with times shortened by `rate`."""

    start: Time = START
    rate: Rate | None = None


class GuestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model guests: they poll, and approve an event `approve` after they first saw it.

    Without `vms`: all VMs that no other entry names.
    """

    vms: VmNames = ()
    poll: DurationOrNever = "1s"
    approve: DurationOrNever = "0s"
    of: Approves = Approves.OWN
    types: tuple[EventType, ...] = ()


def _list_of(what: str) -> Meta:
    return Meta(max_length=COUNT_MAX, description=f"a list of at most {COUNT_MAX} {what}")


class ScenarioFile(msgspec.Struct, frozen=True):
    """A scenario: the fleet, what happens and when, what is expected, how long it lasts."""

    name: Name
    fleet: FleetFile
    until: Duration
    about: Text = ""
    seed: Seed = 1
    clock: ClockEntry = ClockEntry()
    guests: Annotated[tuple[GuestEntry, ...], _list_of("guests")] = ()
    faults: Annotated[tuple[Fault, ...], _list_of("faults")] = ()
    steps: tuple[ScenarioStep, ...] = ()
    expectations: tuple[Expectation, ...] = ()


def _make_union(tag: str, kinds: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
    """Generate a strict type for each kind. A member whose type includes None is optional."""
    types = [
        msgspec.defstruct(
            f"{tag}-{kind}".title().replace("-", ""),
            [
                (member, type_, None) if type(None) in get_args(type_) else (member, type_)
                for member, type_ in (kinds[kind].members | shared).items()
            ],
            namespace={"__doc__": kinds[kind].about},
            tag_field=tag,
            tag=kind,
            kw_only=True,
            forbid_unknown_fields=True,
        )
        for kind in kinds
    ]
    return functools.reduce(operator.or_, types)


if TYPE_CHECKING:
    StrictStep = ScenarioStep
    StrictExpectation = Expectation
else:
    StrictStep = _make_union("do", VERBS, TIMES)
    StrictExpectation = _make_union("expect", EXPECTATIONS, {})


class StrictScenarioFile(ScenarioFile, frozen=True, forbid_unknown_fields=True):
    """The file as it is validated."""

    steps: Annotated[tuple[StrictStep, ...], _list_of("steps")] = ()
    expectations: Annotated[tuple[StrictExpectation, ...], _list_of("expectations")] = ()


SCHEMA: dict[str, Any] = msgspec.json.decode(
    msgspec.json.encode(
        {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        | msgspec.json.schema(StrictScenarioFile)
    )
)
"""Only the parser checks what a schema cannot express: unknown names, times that do not fit."""


class Scenario(msgspec.Struct, frozen=True):
    """A checked scenario. `fleets` and `conditions` are those of steps, by step number."""

    file: ScenarioFile
    fleet: Fleet
    fleets: dict[int, Fleet]
    conditions: dict[int, Condition]

    @property
    def vms(self) -> tuple[str, ...]:
        """All VMs, including those of fleets that steps apply."""
        return list_vms(self.fleet, *self.fleets.values())

    def list_guests(self) -> Iterator[tuple[str, GuestEntry]]:
        """Yield each VM that a model guest plays, with its entry."""
        entries = {vm: entry for entry in self.file.guests for vm in entry.vms}
        default = next((entry for entry in self.file.guests if not entry.vms), None)
        for vm in self.vms:
            entry = entries.get(vm, default)
            if entry is not None:
                yield vm, entry


def list_vms(*fleets: Fleet) -> tuple[str, ...]:
    vms = (vm.name for fleet in fleets for scope in fleet.scopes for vm in scope.vms)
    return tuple(dict.fromkeys(vms))


def parse_scenario(text: bytes, source: str) -> Scenario:
    """Parse YAML or JSON. Errors call the text `source`."""
    values: Any = load(text, source)
    try:
        _refuse_removed_faults(values)
        convert(values, StrictScenarioFile, strict=False)
        return _build(values)
    except FieldError as error:
        raise locate(error, values, text=text, source=source, schema=SCHEMA) from error


def list_library() -> tuple[str, ...]:
    """Return the names of the scenarios that come with the package."""
    files = (file.name for file in _library().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def load_from_library(name: str) -> Scenario:
    if name not in list_library():
        raise NotFound(
            f"there is no scenario {name!r}; expected a file, or one of"
            f" {', '.join(list_library())}",
            scenario=name,
        )
    return parse_scenario((_library() / f"{name}.yaml").read_bytes(), f"{name}.yaml")


def _library() -> Any:
    return resources.files(__package__) / "library"


def _build(values: dict[str, Any]) -> Scenario:
    """Check what types cannot, in the order of the file."""
    file = msgspec.convert(values, ScenarioFile, strict=False)
    steps = tuple(
        msgspec.structs.replace(step, number=number) for number, step in enumerate(file.steps, 1)
    )
    file = msgspec.structs.replace(file, steps=steps)
    if parse_duration(file.until) > UNTIL_MAX:
        raise FieldError(("until",), f"at most {UNTIL_MAX.days}d")
    if file.clock.start.year not in START_YEARS:
        years = f"{START_YEARS[0]} to {START_YEARS[-1]}"
        raise FieldError(("clock", "start"), f"a time in the years {years}")
    if file.clock.rate is not None and "start" in values["clock"]:
        raise FieldError(("clock", "rate"), "no rate with `start`: the real clock starts now")
    fleet = _parse_fleet(values["fleet"], ("fleet",))
    fleets = {
        step.number: _parse_fleet(
            values["steps"][step.number - 1]["fleet"], ("steps", step.number - 1, "fleet")
        )
        for step in steps
        if step.do == "apply"
    }
    names = _Names(file, (fleet, *fleets.values()))
    names.check_all(values)
    _check_guests(file)
    for number, fault in enumerate(file.faults):
        if parse_begin(fault) is None:
            raise FieldError(("faults", number, "from"))
    for step in steps:
        _check_time(step, file.until, ("steps", step.number - 1))
    conditions = {
        step.number: names.parse_condition(step) for step in steps if step.when is not None
    }
    return Scenario(file, fleet, fleets, conditions)


def _refuse_removed_faults(values: Any) -> None:
    """Say what to write instead of a fault that earlier versions had."""
    for section, path in (("faults", ()), ("steps", ("set",))):
        entries = values.get(section) if isinstance(values, dict) else None
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            fault = entry.get("set") if path and isinstance(entry, dict) else entry
            kind = fault.get("fault") if isinstance(fault, dict) else None
            if isinstance(kind, str) and kind in REMOVED:
                raise FieldError((section, number, *path, "fault"), f"instead: {REMOVED[kind]}")


def _parse_fleet(values: object, at: Path) -> Fleet:
    """Parse with the fleet file's parser; its error becomes one of this file."""
    try:
        return fleet_parser.parse(msgspec.json.encode(values), "fleet")
    except Invalid as error:
        steps = _PATH_STEP.findall(str(error.facts["field"]))
        path = tuple(int(step[1:-1]) if step.startswith("[") else step for step in steps)
        expected = _EXPECTED.search(error.message)
        raise FieldError((*at, *path), expected[1] if expected else "") from error


def _check_guests(file: ScenarioFile) -> None:
    seen: set[str] = set()
    for number, guest in enumerate(file.guests):
        for index, vm in enumerate(guest.vms):
            if vm in seen:
                path = ("guests", number, "vms", index)
                raise FieldError(path, "a VM that no guest above plays")
            seen.add(vm)
        if guest.poll != NEVER and not parse_duration(guest.poll):
            raise FieldError(("guests", number, "poll"), "a second or more")


def _check_time(step: ScenarioStep, until: str, at: Path) -> None:
    if (step.at is None) == (step.when is None):
        raise FieldError((*at, "at") if step.at else at, "either `at` or `when`")
    if step.after is not None and step.when is None:
        raise FieldError((*at, "after"), "`after` only with `when`")
    if step.repeat is not None and step.at is None:
        raise FieldError((*at, "repeat"), "`repeat` only with `at`")
    if step.do == "jump" and (step.at is None or step.repeat is not None):
        raise FieldError(at, "a jump with `at` and without `repeat`")
    if step.set is not None and step.set.from_ != "0s":
        raise FieldError((*at, "set", "from"), "a fault that begins with its step: no `from`")
    if step.at is not None:
        last = parse_duration(step.at)
        if step.repeat is not None:
            last += parse_duration(step.repeat.every) * (step.repeat.times - 1)
        if last > parse_duration(until):
            field = "repeat" if step.repeat else "at"
            raise FieldError((*at, field), f"nothing later than `until`, which is {until}")


class _Names:
    """The names that entries may refer to: VMs, hosts, and the `as` names of steps."""

    def __init__(self, file: ScenarioFile, fleets: Collection[Fleet]) -> None:
        self.vms = list_vms(*fleets)
        hosts = [
            *(vm.host for fleet in fleets for scope in fleet.scopes for vm in scope.vms if vm.host),
            *(host for fleet in fleets for host in fleet.hosts),
        ]
        named = [step for step in file.steps if step.as_ is not None]
        for step in named:
            if step.as_ in self.vms:
                raise FieldError(("steps", step.number - 1, "as"), "a name that is not a VM's")
        self.events = tuple(dict.fromkeys(str(step.as_) for step in named if step.do != "fault"))
        faults = tuple(dict.fromkeys(str(step.as_) for step in named if step.do == "fault"))
        vm = ("a VM of the fleet", self.vms)
        event = ("a name that a step gives with `as`", self.events)
        self._known: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
            "guests": {"vms": vm},
            "faults": {"vms": vm},
            "steps": {
                "vm": vm,
                "host": ("a host of the fleet", tuple(dict.fromkeys(hosts))),
                "event": event,
                "fault": ("a name that a step gives to a fault with `as`", faults),
            },
            "set": {"vms": vm},
            "expectations": {"of": event, "vm": vm, "vms": vm, "by": vm},
            "shows": {"event": event},
        }

    def check_all(self, values: dict[str, Any]) -> None:
        """Check every member that refers to a name."""
        for section in ("guests", "faults", "steps", "expectations"):
            for number, entry in enumerate(values.get(section, ())):
                self._check_entry(section, entry, (section, number))

    def _check_entry(self, section: str, entry: dict[str, Any], at: Path) -> None:
        special: tuple[str, ...] = ()
        if section == "steps" and NameOrAny in VERBS[entry["do"]].members.values():
            special = (ANY,)
        for member, value in entry.items():
            if member in ("set", "shows") and isinstance(value, dict):
                self._check_entry(member, value, (*at, member))
            if member not in self._known[section] or value is None:
                continue
            if member == "by" and entry["expect"] == "approval":
                special = (OWN, LEADER)
            what, known = self._known[section][member]
            names = value if isinstance(value, list) else [value]
            for index, name in enumerate(names):
                if name not in (*known, *special):
                    path = (*at, member, index) if isinstance(value, list) else (*at, member)
                    raise FieldError(path, f"{what}: {shorten_list(known)}")

    def parse_condition(self, step: ScenarioStep) -> Condition:
        try:
            return parse_condition(step.when or "", vms=self.vms, names=self.events)
        except ValueError as error:
            raise FieldError(("steps", step.number - 1, "when"), str(error)) from error
