"""Conditions of steps: a small fixed grammar, parsed from `when` and checked live."""

from collections.abc import Collection
from enum import StrEnum

import msgspec

from forewarn.core.event import EventType, Status
from forewarn.lab.scenario.timeline import ObservedEntry

FORMS = (
    "VM approved",
    "VM approved NAME",
    "VM polled",
    "VM sees TYPE STATUS",
    "NAME scheduled|approved|started|completed|canceled|failed",
)
"""VM is a VM of the fleet, NAME a name that a step gives with `as`."""

CHANGES = ("scheduled", "approved", "started", "completed", "canceled", "failed")


class ConditionVerb(StrEnum):
    APPROVED = "approved"
    POLLED = "polled"
    SEES = "sees"
    BECAME = "became"


class Condition(msgspec.Struct, frozen=True):
    """`subject` is a VM; for BECAME it is the name of events, and `status` is a change."""

    verb: ConditionVerb
    subject: str
    name: str = ""
    type: str = ""
    status: str = ""


def parse_condition(text: str, *, vms: Collection[str], names: Collection[str]) -> Condition:
    """Parse a condition. ValueError says what was expected."""
    match text.split():
        case [vm, "approved"] if vm in vms:
            return Condition(ConditionVerb.APPROVED, vm)
        case [vm, "approved", name] if vm in vms and name in names:
            return Condition(ConditionVerb.APPROVED, vm, name=name)
        case [vm, "polled"] if vm in vms:
            return Condition(ConditionVerb.POLLED, vm)
        case [vm, "sees", type_, status] if (
            vm in vms and type_ in list(EventType) and status in list(Status)
        ):
            return Condition(ConditionVerb.SEES, vm, type=type_, status=status)
        case [name, status] if name in names and status in CHANGES:
            return Condition(ConditionVerb.BECAME, name, status=status)
    subjects = f"with {shorten_list(vms)} for VM and {shorten_list(names)} for NAME"
    raise ValueError(f"one of: {'; '.join(FORMS)}; {subjects}")


def is_met(condition: Condition, observation: ObservedEntry) -> bool:
    """Return whether this observation makes the condition true."""
    entry = observation.entry
    match condition.verb:
        case ConditionVerb.APPROVED:
            return any(
                vm == condition.subject and condition.name in ("", event.name)
                for vm, event in observation.approvals
            )
        case ConditionVerb.POLLED:
            return observation.is_poll and entry.vm == condition.subject
        case ConditionVerb.SEES:
            if entry.vm != condition.subject or observation.document is None:
                return False
            expected = (condition.type, condition.status)
            events = observation.document.events
            return any((event.type, event.status) == expected for event in events)
        case ConditionVerb.BECAME:
            return (
                observation.event is not None
                and observation.event.name == condition.subject
                and observation.change == condition.status
                and observation.timeline.has_all(condition.subject, condition.status)
            )


def shorten_list(names: Collection[str], count_max: int = 8) -> str:
    """Join the first names for a message."""
    shown = ", ".join(list(names)[:count_max]) or "(none)"
    return f"{shown}, …" if len(names) > count_max else shown
