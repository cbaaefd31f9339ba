"""Faults: reading them, which are in force, and which of them touch a request. Time and chance are
told.

Several may be in force at once. They are applied in the order of `Fault` in `kind.py`; of one kind,
as they came.
"""

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from random import Random
from typing import Any, NamedTuple, cast

from forewarn import duration
from forewarn.errors import Invalid, NotFound, Refused
from forewarn.fleetfile.yaml_source import FieldError, convert, explain, format_path
from forewarn.lab.fault.kinds import (
    DOCUMENTS,
    KINDS,
    SCHEMA,
    AnyRequest,
    Base,
    Distribution,
    Fault,
    FirstCall,
    Lapse,
    Latency,
    Method,
    Refuse,
    Status,
    Touching,
)

__all__ = ["FAULTS_MAX", "SCHEMA", "Call", "Fault", "Faults", "Standing", "delay_seconds", "parse"]

FAULTS_MAX = 100
CALLERS_MAX = 100_000


def parse(values: Mapping[str, Any]) -> Fault:
    """A fault from plain values. Invalid tells the field and what was expected there."""
    try:
        fault = convert(dict(values), cast("type[Base]", Fault))
        if begin_of(fault) is None:
            raise FieldError(("from",))
    except FieldError as misfit:
        path, words = explain(misfit, dict(values), SCHEMA)
        where = "" if path in ((), ("fault",)) else f"{format_path(path)}: "
        raise Invalid(f"fault: {where}{words}", field=format_path(path)) from misfit
    return cast("Fault", fault)


def begin_of(fault: Base) -> timedelta | datetime | None:
    """How long after its coming, or when, a fault begins; None if what it says is no date."""
    if fault.from_[-1] in "dhms":
        return duration.parse_duration(fault.from_)
    try:
        return datetime.fromisoformat(fault.from_)
    except ValueError:
        return None


def delay_seconds(fault: FirstCall | Latency, random: Random) -> float:
    """How long to wait this time.

    Lognormal: half take longer than `seconds`, and one in six longer than that plus the spread.
    """
    usual = float(fault.seconds)
    if isinstance(fault, FirstCall):
        return usual
    spread = float(fault.spread_seconds)
    match fault.distribution:
        case Distribution.FIXED:
            drawn = usual
        case Distribution.UNIFORM:
            drawn = random.uniform(usual - spread, usual + spread)
        case Distribution.NORMAL:
            drawn = random.gauss(usual, spread)
        case Distribution.EXPONENTIAL:
            drawn = random.expovariate(1 / usual) if usual else 0.0
        case Distribution.LOGNORMAL:
            drawn = (
                random.lognormvariate(math.log(usual), math.log1p(spread / usual)) if usual else 0.0
            )
    return min(max(drawn, 0.0), float(fault.cap_seconds))


class Call(NamedTuple):
    """A request, as faults look at it. `is_document`: it is a GET of the document."""

    vm: str
    method: str
    is_document: bool


class Standing:
    """A fault that was added, and how much of it is left.

    `left` is None where requests are not counted.
    """

    def __init__(self, id: str, fault: Fault, now: datetime) -> None:
        begin = begin_of(fault)
        if begin is None:
            raise Invalid(f"fault: from: expected a moment, got {fault.from_!r}", field="from")
        self.id = id
        self.fault = fault
        self.begins_at = now + begin if isinstance(begin, timedelta) else begin
        self.ends_at = (
            None if fault.for_ is None else self.begins_at + duration.parse_duration(fault.for_)
        )
        self.left = fault.requests if isinstance(fault, Touching) else None
        self._called: set[str] = set()

    def is_over(self, now: datetime) -> bool:
        return self.left == 0 or (self.ends_at is not None and self.ends_at <= now)

    def is_in_force(self, vm: str, now: datetime) -> bool:
        return (
            self.begins_at <= now
            and not self.is_over(now)
            and (not self.fault.vms or vm in self.fault.vms)
        )

    def touches(self, call: Call, random: Random) -> bool:
        """Whether it touches this request; if it does, it is one request nearer to its end."""
        fault = self.fault
        if not isinstance(fault, Touching) or (
            isinstance(fault, DOCUMENTS) and not call.is_document
        ):
            return False
        if isinstance(fault, AnyRequest) and fault.method not in (Method.ANY, call.method):
            return False
        if isinstance(fault, FirstCall):
            if call.vm in self._called or len(self._called) >= CALLERS_MAX:
                return False
            self._called.add(call.vm)
        if float(fault.chance) < 1 and random.random() >= float(fault.chance):
            return False
        if self.left is not None:
            self.left -= 1
        return True


class Faults:
    """The faults of a lab, by their ids.

    A caller that nobody knows has the name `""`, and no faults.
    """

    def __init__(self) -> None:
        self.standing: dict[str, Standing] = {}

    def add(self, id: str, fault: Fault, now: datetime) -> Standing:
        """From now on, or from when it says. Those that are over make room."""
        self.standing = {one.id: one for one in self.standing.values() if not one.is_over(now)}
        if id in self.standing:
            raise Refused(f"there is a fault {id!r} already; expected another id", fault=id)
        if len(self.standing) >= FAULTS_MAX:
            raise Refused(
                f"there are {FAULTS_MAX} faults already; remove one first", faults_max=FAULTS_MAX
            )
        added = self.standing[id] = Standing(id, fault, now)
        return added

    def remove(self, id: str) -> Standing:
        found = self.standing.pop(id, None)
        if found is None:
            raise NotFound(f"there is no fault {id!r}", fault=id)
        return found

    def clear(self) -> None:
        self.standing.clear()

    def active(self, vm: str, now: datetime) -> list[Standing]:
        """Those in force for a VM, in the order in which they are applied."""
        if not vm or not self.standing:
            return []
        found = [one for one in self.standing.values() if one.is_in_force(vm, now)]
        return sorted(found, key=lambda one: KINDS.index(type(one.fault)))

    def touching(self, call: Call, active: Iterable[Standing], random: Random) -> list[Standing]:
        """Those that touch a request, of the active ones.

        What refuses it is the last; an error has no document to look at.
        """
        touched: list[Standing] = []
        has_status = False
        for one in active:
            if has_status and isinstance(one.fault, (*DOCUMENTS, Status)):
                continue
            if not one.touches(call, random):
                continue
            touched.append(one)
            has_status = has_status or isinstance(one.fault, Status)
            if isinstance(one.fault, Refuse):
                break
        return touched

    def is_refusing(self, vm: str, now: datetime) -> bool:
        """Whether a VM's own door is to be closed.

        A refusal of some requests only is left to the filter.
        """
        refusals = [one.fault for one in self.active(vm, now) if isinstance(one.fault, Refuse)]
        return any(
            one.requests is None and float(one.chance) == 1 and one.method is Method.ANY
            for one in refusals
        )

    def is_lapsing(self, vm: str, now: datetime) -> bool:
        """Whether the scope of this VM is to count as one that nobody polls."""
        return any(isinstance(one.fault, Lapse) for one in self.active(vm, now))

    def next_edge(self, now: datetime) -> datetime | None:
        """When the next fault begins or ends by the clock; None if none will."""
        edges = [
            edge
            for one in self.standing.values()
            for edge in (one.begins_at, one.ends_at)
            if edge and edge > now
        ]
        return min(edges, default=None)
