"""The agent's one file:

TOML, read once into values. What is wrong is refused with its line and field. Nothing else is
opened.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn, TypeVar

from forewarn.agent import steps
from forewarn.agent.place import Lines
from forewarn.agent.place import Path as Place
from forewarn.agent.rules import Approve, Bounds, Concerns, Leader, OnFailure, PlannedStep, Rule
from forewarn.agent.step import Phase, Step
from forewarn.client.backoff import PERIOD_SECONDS
from forewarn.client.http1 import Endpoint
from forewarn.client.protocol import API_VERSION
from forewarn.errors import Invalid

BYTES_MAX = 1024 * 1024
RULES_MAX = 256
STEPS_MAX = 64
SECONDS_MAX = 7 * 24 * 3600
TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
SOURCES = ("Platform", "User")
PROGRAM_DATA = os.environ.get("PROGRAMDATA", "C:\\ProgramData") if os.name == "nt" else "/var/lib"

TOP = (
    "endpoint",
    "name",
    "journal",
    "socket",
    "listen",
    "hooks",
    "lease",
    "poll_seconds",
    "wait_seconds",
    "api_version",
    "rule",
)
MATCHERS = ("types", "sources", "concerns", "duration_seconds", "lead_seconds", "scope")
RULE = ("name", *MATCHERS, "approve", "leader", "hold", "applications", *Phase)
STEP = ("weight", "limit_seconds", "on_failure")

Make = Callable[[str, object, str], Step]
Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file says. `endpoint` "" is found by itself, `name` "" is asked of the endpoint,
    `listen` "" is no port.

    `hooks` is a directory of executables that ends each phase of every rule.
    """

    endpoint: str = ""
    name: str = ""
    journal: Path = Path(PROGRAM_DATA, "forewarn-agent", "journal")
    socket: Path | None = None
    listen: str = ""
    hooks: Path | None = None
    lease: Path | None = None
    poll_seconds: float = PERIOD_SECONDS
    wait_seconds: int = 30
    api_version: str = API_VERSION
    rules: tuple[Rule, ...] = ()


def load(path: Path, *, make: Make = steps.make) -> Settings:
    """The settings in a file. Invalid if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise Invalid(f"{path}: cannot be read: {error.strerror}", file=str(path)) from error
    if len(text) > BYTES_MAX:
        raise Invalid(f"{path}: expected at most {BYTES_MAX} bytes", file=str(path))
    try:
        return parse(text.decode(), str(path), make=make)
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise Invalid(
            f"{path}:{line}: expected UTF-8, got byte 0x{text[error.start]:02x}",
            file=str(path),
            line=line,
        ) from error


def parse(text: str, source: str, *, make: Make = steps.make) -> Settings:
    """The settings that a text says. `source` is what a problem calls the text."""
    try:
        return _settings(_values(text, source), text, source, make)
    except (ValueError, OverflowError, RecursionError) as error:
        message = f"{source}:1: expected numbers and nesting within reason: {error!r:.200}"
        raise Invalid(message, file=source, line=1) from error


def _values(text: str, source: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise Invalid(f"{source}:{line}: expected TOML: {error}", file=source, line=line) from error


def _settings(values: dict[str, object], text: str, source: str, make: Make) -> Settings:
    top = Table(values, (), lines=Lines(text), source=source)
    top.refuse_unknown(TOP)
    lease, hooks = top.path("lease"), top.path("hooks")
    reader = RuleReader(make, lease=lease, hooks=hooks)
    rules = tuple(reader.rule(table) for table in top.tables("rule", RULES_MAX))
    _refuse_twins(rules, top)
    given = Settings()
    return Settings(
        endpoint=_endpoint(top),
        name=top.text("name", ""),
        journal=top.path("journal") or given.journal,
        socket=top.path("socket"),
        listen=_listen(top),
        hooks=hooks,
        lease=lease,
        poll_seconds=top.number("poll_seconds", given.poll_seconds, least=PERIOD_SECONDS, most=60),
        wait_seconds=int(top.number("wait_seconds", given.wait_seconds, least=0, most=300)),
        api_version=top.text("api_version", given.api_version),
        rules=rules,
    )


class Table:
    """One table of the file, read member by member."""

    def __init__(
        self, values: dict[str, object], place: Place, *, lines: Lines, source: str
    ) -> None:
        self.values = values
        self._place = place
        self._lines = lines
        self._source = source

    def where(self, *more: str | int) -> str:
        """`file:line: field`, as every problem begins."""
        place = (*self._place, *more)
        field = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in place
        ).removeprefix(".")
        return f"{self._source}:{self._lines.find_line(place)}: {field}"

    def refuse(self, name: str, expected: str) -> NoReturn:
        got = repr(self.values[name])[:80] if name in self.values else "nothing"
        raise Invalid(
            f"{self.where(name)}: expected {expected}, got {got}", file=self._source, field=name
        )

    def refuse_unknown(self, known: Sequence[str]) -> None:
        for name in self.values:
            if name not in known:
                near = difflib.get_close_matches(name[:80], known, 1)
                hint = (
                    f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"
                )
                raise Invalid(
                    f"{self.where(name)}: unknown key; {hint}", file=self._source, field=name
                )

    def text(self, name: str, default: str | None = None, expected: str = "text") -> str:
        """Without a default it must be there, and not empty."""
        value = self.values.get(name, default)
        if (
            not isinstance(value, str)
            or len(value) > 4096
            or "\0" in value
            or (default is None and not value)
        ):
            self.refuse(name, expected)
        return value

    def path(self, name: str) -> Path | None:
        value = self.text(name, "", "the path of a file")
        return Path(value) if value else None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        value = self.values.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value <= most
        ):
            self.refuse(name, f"a number from {least:g} to {most:g}")
        return value

    def choice(self, name: str, default: Choice) -> Choice:
        value = self.values.get(name, default)
        choices = type(default)
        if not isinstance(value, str) or value not in list(choices):
            self.refuse(name, f"one of {', '.join(choices)}")
        return choices(value)

    def texts(self, name: str, known: Iterable[str] = ()) -> tuple[str, ...]:
        value = self.values.get(name, [])
        names = {one.casefold() for one in known}
        expected = f"a list of {', '.join(known)}" if names else "a list of names"
        if (
            not isinstance(value, list)
            or (name in self.values and not value)
            or not all(isinstance(one, str) for one in value)
        ):
            self.refuse(name, expected)
        if names and not all(one.casefold() in names for one in value):
            self.refuse(name, expected)
        return tuple(value)

    def bounds(self, name: str) -> Bounds:
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "a table with min, max or both")
        table = self._inner(value, name)
        table.refuse_unknown(("min", "max"))
        least, most = (
            table.number(end, 0, least=0, most=math.inf) if end in value else None
            for end in ("min", "max")
        )
        if least is not None and most is not None and least > most:
            self.refuse(name, "a min that is not above its max")
        return Bounds(least, most)

    def tables(self, name: str, count_max: int) -> Iterator["Table"]:
        value = self.values.get(name, [])
        if not isinstance(value, list) or len(value) > count_max:
            self.refuse(name, f"a list of at most {count_max} tables")
        for index, one in enumerate(value):
            if not isinstance(one, dict):
                raise Invalid(
                    f"{self.where(name, index)}: expected a table, got {one!r:.80}",
                    file=self._source,
                    field=name,
                )
            yield self._inner(one, name, index)

    def _inner(self, values: dict[str, object], *more: str | int) -> "Table":
        return Table(values, (*self._place, *more), lines=self._lines, source=self._source)


class RuleReader:
    """Rules and their steps, given what the top of the file says."""

    def __init__(self, make: Make, *, lease: Path | None, hooks: Path | None) -> None:
        self._make = make
        self._lease = lease
        self._hooks = hooks

    def rule(self, table: Table) -> Rule:
        table.refuse_unknown(RULE)
        leader = table.choice("leader", Leader.FIRST)
        if leader is Leader.LEASE and self._lease is None:
            table.refuse(
                "leader", "'first', or a lease file at the top (lease = \"/shared/lease\")"
            )
        return Rule(
            name=table.text("name", expected="a name of its own"),
            types=table.texts("types", TYPES),
            sources=table.texts("sources", SOURCES),
            concerns=table.choice("concerns", Concerns.OWN),
            duration_seconds=table.bounds("duration_seconds"),
            lead_seconds=table.bounds("lead_seconds"),
            scope=table.texts("scope"),
            approve=table.choice("approve", Approve.NEVER),
            leader=leader,
            hold=table.flag("hold", default=False),
            applications=table.flag("applications", default=True),
            prepare=self._steps(table, Phase.PREPARE),
            start=self._steps(table, Phase.START),
            recover=self._steps(table, Phase.RECOVER),
        )

    def _steps(self, table: Table, phase: Phase) -> tuple[PlannedStep, ...]:
        planned = tuple(self._step(inner) for inner in table.tables(phase, STEPS_MAX))
        if self._hooks is None:
            return planned
        return (
            *planned,
            PlannedStep(self._make("hooks", str(self._hooks), f"hooks of {table.where(phase)}")),
        )

    def _step(self, table: Table) -> PlannedStep:
        kinds = [name for name in table.values if name not in STEP]
        if len(kinds) != 1:
            got = ", ".join(kinds) or "none"
            raise Invalid(
                f"{table.where()}: expected one kind of step ({', '.join(steps.KINDS)}), got {got}"
            )
        limit = table.number("limit_seconds", 1, least=0.1, most=SECONDS_MAX)
        return PlannedStep(
            step=self._make(kinds[0], table.values[kinds[0]], table.where(kinds[0])),
            weight=table.number("weight", 1, least=0.01, most=1000),
            limit_seconds=limit if "limit_seconds" in table.values else None,
            on_failure=table.choice("on_failure", OnFailure.CONTINUE),
        )


def _refuse_twins(rules: Sequence[Rule], top: Table) -> None:
    """The journal knows a rule by its name."""
    names = [rule.name for rule in rules]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Invalid(
                f"{top.where('rule', index, 'name')}: expected a name of its own, got {name!r} again",
                field="name",
            )


def _endpoint(top: Table) -> str:
    endpoint = top.text("endpoint", "")
    try:
        if endpoint:
            Endpoint.parse(endpoint)
    except Invalid as problem:
        raise Invalid(f"{top.where('endpoint')}: {problem.message}", field="endpoint") from problem
    return endpoint


def _listen(top: Table) -> str:
    listen = top.text("listen", "")
    host, _, port = listen.rpartition(":")
    if listen and not (host and port.isascii() and port.isdigit() and int(port) < 65536):
        top.refuse("listen", "an address and a port, such as 127.0.0.1:9480")
    return listen
