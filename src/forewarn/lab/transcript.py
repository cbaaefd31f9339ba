"""What happened in a lab, in order: every request with its answer, every change, every step."""

from collections import deque
from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from forewarn.wire.note import Note

ENTRIES_MAX = 200_000
BODY_CHARS_MAX = 16 * 1024
SHOWN_CHARS_MAX = 160
SHOWN_ENTRIES_MAX = 200


class Kind(StrEnum):
    REQUEST = "request"
    CHANGE = "change"
    STEP = "step"
    FAULT = "fault"
    CLOCK = "clock"
    VERDICT = "verdict"


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `vm`, `scope` and `event` say what it is about, `what` and `detail` what it was, `by` whose doing.

    A request has `method`, `path` and `status` too; status 0: it got no whole answer. `faults` are the kinds that touched it.
    """

    number: int
    at: datetime
    kind: Kind
    vm: str = ""
    scope: str = ""
    event: str = ""
    what: str = ""
    by: str = ""
    detail: str = ""
    method: str = ""
    path: str = ""
    status: int = 0
    asked: str = ""
    answered: str = ""
    faults: tuple[str, ...] = ()


class Transcript:
    """The entries so far; the oldest leave when there are too many. `followers` hear of each as it comes."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.entries: deque[Entry] = deque(maxlen=ENTRIES_MAX)
        self.followers: list[Callable[[Entry], None]] = []
        self._now = now
        self._count = 0

    def add(self, kind: Kind, **members: Any) -> Entry:
        """Write a line, stamped with its number and the lab's time."""
        self._count += 1
        entry = Entry(number=self._count, at=self._now(), kind=kind, **members)
        self.entries.append(entry)
        for follower in self.followers:
            follower(entry)
        return entry

    def hear(self, note: Note) -> None:
        """A change, as the engine tells it."""
        change = note.change
        self.add(
            Kind.CHANGE,
            vm=change.vm,
            scope=note.scope,
            event=change.event_id,
            what=str(change.what),
            by=note.by,
            detail=change.detail,
        )

    def dump(self) -> bytes:
        """JSON lines."""
        return b"".join(line(entry) for entry in self.entries)

    def __str__(self) -> str:
        """The newest lines, as a person reads them."""
        entries = list(self.entries)[-SHOWN_ENTRIES_MAX:]
        left_out = [f"… {len(self.entries) - len(entries)} lines before"] if len(entries) < len(self.entries) else []
        return "\n".join([*left_out, *map(readable, entries)])


def line(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def text(body: bytes) -> str:
    """A body as it stands in an entry."""
    return body[: 4 * BODY_CHARS_MAX].decode(errors="replace")[:BODY_CHARS_MAX]


def readable(entry: Entry) -> str:
    """One line for a person."""
    return f"{entry.at:%Y-%m-%d %H:%M:%S}  {_subject(entry):<14}  {_cut(_words(entry))}"


def _subject(entry: Entry) -> str:
    return entry.vm or entry.scope or entry.kind


def _words(entry: Entry) -> str:
    event = f" ({entry.event[:8]})" if entry.event else ""
    if entry.kind is Kind.REQUEST:
        touched = f"  [{', '.join(entry.faults)}]" if entry.faults else ""
        asked = f" {entry.asked}" if entry.asked else ""
        answered = f" {entry.answered}" if entry.answered else ""
        return f"{entry.method} {entry.path}{asked} -> {entry.status or 'no answer'}{touched}{answered}"
    detail = f": {entry.detail}" if entry.detail else ""
    by = f" by {entry.by}" if entry.by else ""
    return f"{entry.what}{detail}{by}{event}"


def _cut(words: str) -> str:
    return words if len(words) <= SHOWN_CHARS_MAX else words[:SHOWN_CHARS_MAX] + "…"
