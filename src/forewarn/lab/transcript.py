"""What happened in a lab, in order: every request with its answer, every change, every step."""

import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from forewarn.engine.entry import Note

ENTRIES_MAX = 200_000
CHARS_MAX = 64 * 1024 * 1024
ENTRY_CHARS = 200
"""What an entry takes besides its long members."""
BODY_CHARS_MAX = 16 * 1024
SHOWN_CHARS_MAX = 160
SHOWN_EVENTS_MAX = 3
SHOWN_ENTRIES_MAX = 200


class Kind(StrEnum):
    REQUEST = "request"
    CHANGE = "change"
    STEP = "step"
    FAULT = "fault"
    CLOCK = "clock"
    VERDICT = "verdict"


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `vm`, `scope` and `event` say what it is about, `what` and `detail` what it was,
    `by` whose doing.

    A request has `method`, `path` and `status` too; status 0: it got no whole answer. `faults` are
    the kinds that touched it.
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
    """The entries so far; the oldest leave when there are too many, or too long ones. `followers`
    hear of each as it comes.

    The lab writes from its own thread while a test reads from another: readers get a copy, made
    under the writer's lock.
    """

    def __init__(self, now: Callable[[], datetime], *, chars_max: int = CHARS_MAX) -> None:
        self._entries: deque[Entry] = deque()
        self._lock = threading.Lock()
        self.followers: list[Callable[[Entry], None]] = []
        self._now = now
        self._count = 0
        self._chars = 0
        self._chars_max = chars_max

    def add(self, kind: Kind, **members: Any) -> Entry:
        """Write a line, stamped with its number and the lab's time."""
        with self._lock:
            self._count += 1
            entry = Entry(number=self._count, at=self._now(), kind=kind, **members)
            self._entries.append(entry)
            self._chars += _chars(entry)
            while self._is_over_limit():  # ends: one less each
                self._chars -= _chars(self._entries.popleft())
        for follower in self.followers:
            follower(entry)
        return entry

    def _is_over_limit(self) -> bool:
        """Whether the oldest entry has to go. The newest always stays."""
        return len(self._entries) > ENTRIES_MAX or (
            self._chars > self._chars_max and len(self._entries) > 1
        )

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries up to now, the oldest first. What is recorded later is not in it."""
        with self._lock:
            return tuple(self._entries)

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
        entries = self.entries
        shown = entries[-SHOWN_ENTRIES_MAX:]
        left_out = (
            [f"… {len(entries) - len(shown)} lines before"] if len(shown) < len(entries) else []
        )
        return "\n".join([*left_out, *map(readable, shown)])


def line(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def text(body: bytes) -> str:
    """A body as it stands in an entry."""
    return body[: 4 * BODY_CHARS_MAX].decode(errors="replace")[:BODY_CHARS_MAX]


def readable(entry: Entry) -> str:
    """One line for a person. What a terminal would obey instead of showing it is replaced."""
    line = f"{entry.at:%Y-%m-%d %H:%M:%S}  {_subject(entry):<14}  {_words(entry)}"
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
    )


def _subject(entry: Entry) -> str:
    return entry.vm or entry.scope or entry.kind


def _words(entry: Entry) -> str:
    event = f" ({entry.event[:8]})" if entry.event else ""
    if entry.kind is Kind.REQUEST:
        touched = f"  [{', '.join(entry.faults)}]" if entry.faults else ""
        asked = f" {entry.asked}" if entry.asked else ""
        answered = f" {_document(entry.answered) or _cut(entry.answered)}" if entry.answered else ""
        return f"{_cut(f'{entry.method} {entry.path}{asked}')} -> {entry.status or 'no answer'}{touched}{answered}"
    detail = f": {entry.detail}" if entry.detail else ""
    by = f" by {entry.by}" if entry.by else ""
    return _cut(f"{entry.what}{detail}{by}{event}")


class _Shown(msgspec.Struct, rename="pascal"):
    """Of an event, what a person looks for first."""

    event_id: str
    event_type: str
    event_status: str
    resources: list[str]

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_status} of {_cut(', '.join(self.resources))} ({self.event_id[:8]})"


class _Page(msgspec.Struct, rename="pascal"):
    document_incarnation: int
    events: list[_Shown]


def _document(answered: str) -> str:
    """A document in short; empty if this is none."""
    try:
        page = msgspec.json.decode(answered, type=_Page)
    except msgspec.DecodeError:
        return ""
    shown = [str(event) for event in page.events[:SHOWN_EVENTS_MAX]]
    more = [f"{len(page.events) - len(shown)} more"] if len(page.events) > len(shown) else []
    return f"document {page.document_incarnation}: {'; '.join([*shown, *more]) or 'no events'}"


def _chars(entry: Entry) -> int:
    """About how large it is, by what a caller can make large."""
    return (
        len(entry.asked) + len(entry.answered) + len(entry.path) + len(entry.detail) + ENTRY_CHARS
    )


def _cut(words: str) -> str:
    return words if len(words) <= SHOWN_CHARS_MAX else words[:SHOWN_CHARS_MAX] + "…"
