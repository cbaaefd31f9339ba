"""The document as a VM is shown it while faults are active. Pure, with a bounded memory.

Each VM has its own numbering: the same number is always the same document, and a change that only
this VM can see (an event that is no longer hidden) counts. So its numbers may run ahead of the
real ones, and they stay ahead when the fault is over. Only `stale` and `incarnation-reset`, which
are about numbers, break this rule.
"""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from email.utils import format_datetime
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from forewarn.client.models import parse_date
from forewarn.lab.fault.active import ActiveFault
from forewarn.lab.fault.kinds import AnyFault, IncarnationReset, NoStarted, ShortNotice, Skew, Stale

DOCUMENTS_MAX = 64

EventEntry = dict[str, Any]


class ShownDocument(msgspec.Struct, frozen=True):
    """A document as it is on the wire."""

    number: int = msgspec.field(name="DocumentIncarnation")
    events: list[EventEntry] = msgspec.field(name="Events")


class DocumentView:
    """What one VM was shown in one api-version. `real_number` is the newest real incarnation."""

    def __init__(self) -> None:
        self.shown: deque[ShownDocument] = deque(maxlen=DOCUMENTS_MAX)
        self.real_number = 0
        self._scheduled: dict[str, EventEntry] = {}
        self._frozen: WeakKeyDictionary[ActiveFault, ShownDocument] = WeakKeyDictionary()
        self._renumbered: WeakKeyDictionary[ActiveFault, dict[int, int]] = WeakKeyDictionary()

    @property
    def is_renumbered(self) -> bool:
        return bool(self.shown) and self.shown[-1].number != self.real_number

    def apply(
        self, real: ShownDocument, faults: Sequence[ActiveFault], now: datetime
    ) -> ShownDocument:
        """Return what the VM is shown under these faults, which are in order."""
        self._remember_scheduled(real)
        before = self.shown[-1] if self.shown else None
        events = real.events
        for each in faults:
            events = self._change_events(events, each.fault, now)
        document = ShownDocument(self._choose_number(real, events), events)
        if document != before:
            self.shown.append(document)
        self.real_number = real.number
        for each in faults:
            match each.fault:
                case Stale(by=None):
                    document = self._frozen.setdefault(each, before or document)
                case Stale(by=changes) if changes is not None:
                    document = self.shown[max(len(self.shown) - 1 - changes, 0)]
                case IncarnationReset():
                    document = replace(document, number=self._renumber(each, document.number))
        return document

    def _remember_scheduled(self, real: ShownDocument) -> None:
        """Keep each event as it was while it was Scheduled."""
        previous, self._scheduled = self._scheduled, {}
        for event in real.events:
            event_id = event["EventId"]
            if event["EventStatus"] == "Scheduled":
                self._scheduled[event_id] = event
            elif event_id in previous:
                self._scheduled[event_id] = previous[event_id]

    def _change_events(
        self, events: list[EventEntry], fault: AnyFault, now: datetime
    ) -> list[EventEntry]:
        match fault:
            case ShortNotice(seconds=seconds):
                notice = timedelta(seconds=seconds)
                return [event for event in events if _time_left(event, now) <= notice]
            case NoStarted():
                scheduled = self._scheduled
                ids = [event["EventId"] for event in events]
                return [scheduled[event_id] for event_id in ids if event_id in scheduled]
            case Skew(seconds=seconds):
                return [_shift(event, seconds) for event in events]
        return events

    def _choose_number(self, real: ShownDocument, events: list[EventEntry]) -> int:
        if not self.shown:
            return real.number
        last = self.shown[-1]
        if events == last.events and (events != real.events or real.number <= last.number):
            return last.number
        return max(real.number, last.number + 1)

    def _renumber(self, fault: ActiveFault, number: int) -> int:
        numbers = self._renumbered.setdefault(fault, {})
        if number not in numbers:
            numbers[number] = max(numbers.values(), default=0) + 1
            if len(numbers) > DOCUMENTS_MAX:
                del numbers[next(iter(numbers))]
        return numbers[number]


def _time_left(event: EventEntry, now: datetime) -> timedelta:
    """Return the time until NotBefore; zero once the event has started."""
    return parse_date(event["NotBefore"]) - now if event["NotBefore"] else timedelta(0)


def _shift(event: EventEntry, seconds: int) -> EventEntry:
    text = event["NotBefore"]
    if not text:
        return event
    shifted = parse_date(text) + timedelta(seconds=seconds)
    is_iso = text[0].isdigit()
    text = f"{shifted:%Y-%m-%dT%H:%M:%SZ}" if is_iso else format_datetime(shifted, usegmt=True)
    return event | {"NotBefore": text}
