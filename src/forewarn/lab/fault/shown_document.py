"""What a VM is shown of its document while a fault is in force. Pure: the memory is all that is
kept, and it is bounded.

What the VM sees has numbers of its own: the same number is always the same document, and a change
that only it can see (an event that has been hidden long enough) counts. So they may run ahead of
the real ones, and then stay ahead when the fault is over. Only the faults that are about numbers
break this.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from email.utils import format_datetime
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import msgspec

from forewarn.client.models import parse_date
from forewarn.lab.fault.active import Standing
from forewarn.lab.fault.kinds import (
    Base,
    Duplicate,
    IncarnationReset,
    NoStarted,
    Reorder,
    ShortNotice,
    Skew,
    Stale,
)

DOCUMENTS_MAX = 64

Entry = dict[str, Any]


class Document(NamedTuple):
    """A document as it stands on the wire."""

    number: int
    events: list[Entry]

    def body(self) -> bytes:
        """Compact, in wire order."""
        return msgspec.json.encode({"DocumentIncarnation": self.number, "Events": self.events})


def read(body: bytes) -> Document | None:
    """The document of an answer; None if it is none."""
    try:
        said = msgspec.json.decode(body)
        return Document(said["DocumentIncarnation"], said["Events"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


class Memory:
    """What one VM was offered in one api-version.

    `real` is the number that the newest of it really has.
    """

    def __init__(self) -> None:
        self.offered: deque[Document] = deque(maxlen=DOCUMENTS_MAX)
        self.real = 0
        self._scheduled: dict[str, Entry] = {}
        self._stages: WeakKeyDictionary[Standing, Stage] = WeakKeyDictionary()

    @property
    def is_renumbered(self) -> bool:
        return bool(self.offered) and self.offered[-1].number != self.real

    def note(self, real: Document) -> None:
        """It was shown the document as it really is."""
        self._learn(real)
        self._offer(real, real.number)

    def look(self, real: Document, touching: Sequence[Standing], now: datetime) -> Document:
        """What it is shown of a document under these faults, which are in order."""
        self._learn(real)
        before = self.offered[-1] if self.offered else None
        events = list(self._entries(real.events, [one.fault for one in touching], now))
        shown = self._offer(Document(self._number(real, events), events), real.number)
        for one in touching:
            if type(one.fault) in STAGES:
                stage = self._stages.setdefault(one, STAGES[type(one.fault)](one.fault, before))
                shown = stage.next(shown, self.offered)
        return shown

    def _learn(self, real: Document) -> None:
        """Keep each event as it was while it was Scheduled."""
        known = {
            entry["EventId"]: entry for entry in real.events if entry["EventStatus"] == "Scheduled"
        }
        self._scheduled = {
            id: known.get(id) or self._scheduled[id]
            for id in (entry["EventId"] for entry in real.events)
            if id in known or id in self._scheduled
        }

    def _entries(
        self, entries: list[Entry], faults: Iterable[Base], now: datetime
    ) -> Iterable[Entry]:
        seen: Iterable[Entry] = entries
        for fault in faults:
            match fault:
                case ShortNotice(seconds=seconds):
                    seen = [
                        entry for entry in seen if _rest(entry, now) <= timedelta(seconds=seconds)
                    ]
                case NoStarted():
                    known = self._scheduled
                    seen = [known[entry["EventId"]] for entry in seen if entry["EventId"] in known]
                case Skew(seconds=seconds):
                    seen = [_shifted(entry, seconds) for entry in seen]
        return seen

    def _number(self, real: Document, events: list[Entry]) -> int:
        if not self.offered:
            return real.number
        last = self.offered[-1]
        if events == last.events and (events != real.events or real.number <= last.number):
            return last.number
        return max(real.number, last.number + 1)

    def _offer(self, document: Document, real: int) -> Document:
        if not self.offered or self.offered[-1] != document:
            self.offered.append(document)
        self.real = real
        return document


class Stage(Protocol):
    """One fault that picks another document than the newest, and what it remembers of one VM."""

    def __init__(self, fault: Any, before: Document | None) -> None: ...

    def next(self, document: Document, offered: Sequence[Document]) -> Document: ...


class _Stale:
    def __init__(self, fault: Stale, before: Document | None) -> None:
        self._by = fault.by
        self._frozen = before

    def next(self, document: Document, offered: Sequence[Document]) -> Document:
        if self._by is not None:
            return offered[max(len(offered) - 1 - self._by, 0)]
        self._frozen = self._frozen or document
        return self._frozen


class _Duplicate:
    """B after A is shown as B, A, B."""

    def __init__(self, fault: Duplicate, before: Document | None) -> None:
        self._last = before
        self._again: Document | None = None

    def next(self, document: Document, offered: Sequence[Document]) -> Document:
        again, self._again = self._again, None
        if again is not None:
            return again
        if document != self._last:
            self._last, self._again = document, self._last
        return document


class _Reorder:
    def __init__(self, fault: Reorder, before: Document | None) -> None:
        self._is_older = True

    def next(self, document: Document, offered: Sequence[Document]) -> Document:
        self._is_older = not self._is_older
        older = [one for one in offered if one.number < document.number]
        return older[-1] if self._is_older and older else document


class _Reset:
    def __init__(self, fault: IncarnationReset, before: Document | None) -> None:
        self._count = 0
        self._numbers: dict[int, int] = {}

    def next(self, document: Document, offered: Sequence[Document]) -> Document:
        if document.number not in self._numbers:
            self._count += 1
            self._numbers[document.number] = self._count
            if len(self._numbers) > DOCUMENTS_MAX:
                del self._numbers[next(iter(self._numbers))]
        return document._replace(number=self._numbers[document.number])


STAGES: dict[type[Base], type[Stage]] = {
    Stale: _Stale,
    Duplicate: _Duplicate,
    Reorder: _Reorder,
    IncarnationReset: _Reset,
}


def _rest(entry: Entry, now: datetime) -> timedelta:
    """How long until NotBefore; nothing once it has started."""
    return parse_date(entry["NotBefore"]) - now if entry["NotBefore"] else timedelta(0)


def _shifted(entry: Entry, seconds: int) -> Entry:
    text = entry["NotBefore"]
    if not text:
        return entry
    shifted = parse_date(text) + timedelta(seconds=seconds)
    is_iso = text[0].isdigit()
    return entry | {
        "NotBefore": f"{shifted:%Y-%m-%dT%H:%M:%SZ}"
        if is_iso
        else format_datetime(shifted, usegmt=True)
    }
