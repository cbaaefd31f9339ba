"""Conditions: what must have happened before a step is done. A small fixed grammar."""

from collections.abc import Collection
from enum import StrEnum

import msgspec

from forewarn.core.event import EventType, Status
from forewarn.lab.scenario.timeline import Happening

FORMS = (
    "VM approved",
    "VM approved NAME",
    "VM polled",
    "VM sees TYPE STATUS",
    "NAME scheduled|approved|started|completed|canceled|failed",
)
"""VM is a VM of the fleet, NAME one that a step gives with `as`."""

BECOMES = ("scheduled", "approved", "started", "completed", "canceled", "failed")


class Verb(StrEnum):
    APPROVED = "approved"
    POLLED = "polled"
    SEES = "sees"
    BECAME = "became"


class Condition(msgspec.Struct, frozen=True):
    """`subject` is a VM, but for BECAME: there it is the name of events and `status` a change."""

    verb: Verb
    subject: str
    name: str = ""
    type: str = ""
    status: str = ""


def parse(text: str, *, vms: Collection[str], names: Collection[str]) -> Condition:
    """The condition that a text says. ValueError, with what was expected, for what is none."""
    words = text.split()
    match words:
        case [vm, "approved"] if vm in vms:
            return Condition(Verb.APPROVED, vm)
        case [vm, "approved", name] if vm in vms and name in names:
            return Condition(Verb.APPROVED, vm, name=name)
        case [vm, "polled"] if vm in vms:
            return Condition(Verb.POLLED, vm)
        case [vm, "sees", type_, status] if (
            vm in vms and type_ in list(EventType) and status in list(Status)
        ):
            return Condition(Verb.SEES, vm, type=type_, status=status)
        case [name, status] if name in names and status in BECOMES:
            return Condition(Verb.BECAME, name, status=status)
    subjects = f"with {some(vms)} for VM and {some(names)} for NAME"
    raise ValueError(f"one of: {'; '.join(FORMS)}; {subjects}")


def is_met(condition: Condition, happening: Happening) -> bool:
    """Whether this entry makes it true."""
    match condition.verb:
        case Verb.APPROVED:
            return any(
                vm == condition.subject and condition.name in ("", known.name)
                for vm, known in happening.approvals
            )
        case Verb.POLLED:
            return happening.is_poll and happening.entry.vm == condition.subject
        case Verb.SEES:
            if happening.entry.vm != condition.subject or happening.document is None:
                return False
            wanted_event = (condition.type, condition.status)
            return any(
                (event.type, event.status) == wanted_event for event in happening.document.events
            )
        case Verb.BECAME:
            known = happening.known
            if (
                known is None
                or known.name != condition.subject
                or happening.change != condition.status
            ):
                return False
            return happening.story.have_all(condition.subject, condition.status)


def some(names: Collection[str], count_max: int = 8) -> str:
    """A few of them, for a person."""
    shown = ", ".join(list(names)[:count_max]) or "(there is none)"
    return f"{shown}, …" if len(names) > count_max else shown
