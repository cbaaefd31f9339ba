"""Active faults: parse them, know when they are active and which requests they affect.

The time and the random source are arguments. Several faults may be active at a time. They are
applied in the order of `Fault` in `kinds.py`, and within one kind in the order they were added.
"""

from asyncio import Task
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from random import Random
from typing import Any, NamedTuple, cast

from forewarn.duration import parse_duration
from forewarn.errors import Invalid, NotFound, Refused
from forewarn.fleetfile.yaml_source import FieldError, Path, convert, explain, format_path
from forewarn.lab.fault import kinds
from forewarn.lab.fault.kinds import AnyFault, Fault

FAULTS_MAX = 100
VMS_MAX = 100_000


def parse_fault(values: Mapping[str, Any]) -> Fault:
    """Parse a fault from plain values. Invalid names the field and what was expected."""
    try:
        fault = convert(dict(values), cast("type[AnyFault]", Fault), strict=False)
        check_begin(fault, ())
    except FieldError as error:
        path, message = explain(error, dict(values), kinds.SCHEMA)
        where = "" if path in ((), ("fault",)) else f"{format_path(path)}: "
        raise Invalid(f"fault: {where}{message}", field=format_path(path)) from error
    return cast("Fault", fault)


def parse_begin(fault: AnyFault) -> timedelta | datetime:
    """Return the delay or the time after which a fault begins. ValueError: an impossible date."""
    if fault.from_[-1] in "dhms":
        return parse_duration(fault.from_)
    return datetime.fromisoformat(fault.from_)


def check_begin(fault: AnyFault, at: Path) -> None:
    try:
        parse_begin(fault)
    except ValueError as error:
        raise FieldError((*at, "from")) from error


class Call(NamedTuple):
    """The parts of a request that faults match on. `is_document`: a GET of the document."""

    vm: str
    method: str
    is_document: bool


class ActiveFault:
    """A fault that was added, and its remaining requests (None: not counted).

    States:  PENDING -> ACTIVE -> OVER, at `begins_at`, and at `ends_at` or after its last request.
    """

    def __init__(self, id: str, fault: Fault, now: datetime, rate: float = 1.0) -> None:
        begin, duration = parse_begin(fault), parse_duration(fault.for_ or "0s")
        self.id = id
        self.fault = fault
        self.begins_at = now + begin if isinstance(begin, timedelta) else begin
        self.ends_at = None if fault.for_ is None else self.begins_at + duration / rate
        self.requests_left = fault.requests if isinstance(fault, kinds.RequestFault) else None
        self.end: Task[None] | None = None
        """What removes it at `ends_at`."""
        self._seen_vms: set[str] = set()

    def is_over(self, now: datetime) -> bool:
        return self.requests_left == 0 or (self.ends_at is not None and self.ends_at <= now)

    def is_active(self, vm: str, now: datetime) -> bool:
        return (
            self.begins_at <= now
            and not self.is_over(now)
            and (not self.fault.vms or vm in self.fault.vms)
        )

    def take(self, call: Call, random: Random) -> bool:
        """Return whether it affects this request, and count the request if it does."""
        fault = self.fault
        if not isinstance(fault, kinds.RequestFault):
            return False
        if isinstance(fault, kinds.DOCUMENT_FAULTS) and not call.is_document:
            return False
        if isinstance(fault, kinds.MethodFault) and fault.method not in ("any", call.method):
            return False
        if isinstance(fault, kinds.FirstCall):
            if call.vm in self._seen_vms or len(self._seen_vms) >= VMS_MAX:
                return False
            self._seen_vms.add(call.vm)
        if fault.chance < 1 and random.random() >= fault.chance:
            return False
        if self.requests_left is not None:
            self.requests_left -= 1
        return True


class FaultSet:
    """The faults of a lab, by id. A client that is not a VM (`""`) has no faults."""

    def __init__(self) -> None:
        self.by_id: dict[str, ActiveFault] = {}
        self._count = 0

    def add(self, fault: Fault, now: datetime, rate: float = 1.0) -> ActiveFault:
        """Add a fault, which ends `rate` times sooner. Faults that are over are removed."""
        self.by_id = {each.id: each for each in self.by_id.values() if not each.is_over(now)}
        if len(self.by_id) >= FAULTS_MAX:
            raise Refused(
                f"there are {FAULTS_MAX} faults already; remove one first", faults_max=FAULTS_MAX
            )
        self._count += 1
        added = ActiveFault(f"f{self._count}", fault, now, rate)
        self.by_id[added.id] = added
        return added

    def remove(self, id: str) -> ActiveFault:
        removed = self.by_id.pop(id, None)
        if removed is None:
            raise NotFound(f"there is no fault {id!r}", fault=id)
        return removed

    def list_active(self, vm: str, now: datetime) -> list[ActiveFault]:
        """Return the faults that are active for a VM, in the order in which they are applied."""
        if not vm or not self.by_id:
            return []
        active = [each for each in self.by_id.values() if each.is_active(vm, now)]
        return sorted(active, key=lambda each: kinds.KINDS.index(type(each.fault)))

    def take(self, call: Call, active: Iterable[ActiveFault], random: Random) -> list[ActiveFault]:
        """Return those of the active faults that affect a request, and count it.

        A refusal is the last one. An error status has no document to change.
        """
        taken: list[ActiveFault] = []
        has_status = False
        for each in active:
            if has_status and isinstance(each.fault, (*kinds.DOCUMENT_FAULTS, kinds.ErrorStatus)):
                continue
            if not each.take(call, random):
                continue
            taken.append(each)
            has_status = has_status or isinstance(each.fault, kinds.ErrorStatus)
            if isinstance(each.fault, kinds.Refuse):
                break
        return taken

    def is_lapsing(self, vm: str, now: datetime) -> bool:
        """Return whether the scope of this VM counts as one that is never polled."""
        return any(
            isinstance(each.fault, kinds.EnablementLapse) for each in self.list_active(vm, now)
        )
