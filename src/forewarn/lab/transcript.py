"""The transcript of a lab: every request with its response, every change, step and fault."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from forewarn.client.errors import InvalidDocument
from forewarn.client.models import Document, read_document
from forewarn.engine.entry import Entry

ENTRIES_MAX = 200_000
CHARS_MAX = 64 * 1024 * 1024
ENTRY_CHARS = 200
"""The size of an entry without its long members."""
BODY_CHARS_MAX = 16 * 1024
SHOWN_CHARS_MAX = 160
SHOWN_EVENTS_MAX = 3
SHOWN_ENTRIES_MAX = 200
SETUP = "lab"
"""The author of the fleet that a lab begins with."""
TEXTS = {"approved": "approved by {}", "started": "started: {}", "claimed": "the {} has begun"}
"""Changes whose detail says who caused them."""


class TranscriptKind(StrEnum):
    REQUEST = "request"
    CHANGE = "change"
    STEP = "step"
    FAULT = "fault"
    CLOCK = "clock"
    VERDICT = "verdict"


class TranscriptEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry. `vm`, `scope` and `event` are its subject, `by` is who caused it.

    `method`, `path`, `status` and the bodies belong to a request; status 0: it got no complete
    response. `faults` are the kinds that affected it.
    """

    number: int
    at: datetime
    kind: TranscriptKind
    vm: str = ""
    scope: str = ""
    event: str = ""
    what: str = ""
    by: str = ""
    detail: str = ""
    method: str = ""
    path: str = ""
    status: int = 0
    request_body: str = ""
    response_body: str = ""
    faults: tuple[str, ...] = ()


class Transcript:
    """The newest entries, within limits of number and size. `followers` get each new entry.

    The lab writes from its own thread while a test reads from another: readers get a copy, made
    under the writer's lock.
    """

    def __init__(self, now: Callable[[], datetime], *, chars_max: int = CHARS_MAX) -> None:
        self._entries: deque[TranscriptEntry] = deque()
        self._lock = threading.Lock()
        self.followers: list[Callable[[TranscriptEntry], None]] = []
        self._now = now
        self._count = 0
        self._chars = 0
        self._chars_max = chars_max

    def add(self, kind: TranscriptKind, **members: Any) -> TranscriptEntry:
        """Append an entry, stamped with its number and the lab's time."""
        with self._lock:
            self._count += 1
            entry = TranscriptEntry(number=self._count, at=self._now(), kind=kind, **members)
            kept = self._entries
            self._chars += _count_chars(entry)
            while kept and (len(kept) >= ENTRIES_MAX or self._chars > self._chars_max):
                self._chars -= _count_chars(kept.popleft())
            kept.append(entry)  # the newest one always stays
        for follower in self.followers:
            follower(entry)
        return entry

    @property
    def entries(self) -> tuple[TranscriptEntry, ...]:
        """A copy of all entries, the oldest first."""
        with self._lock:
            return tuple(self._entries)

    def add_change(self, entry: Entry) -> None:
        """Append a change that the engine has committed."""
        self.add(
            TranscriptKind.CHANGE,
            vm=entry.vm,
            scope=entry.scope,
            event=entry.event,
            what=str(entry.what),
            by=entry.by,
            detail=entry.detail,
        )

    def dump(self) -> bytes:
        """Return all entries as JSON lines."""
        return b"".join(msgspec.json.encode(entry) + b"\n" for entry in self.entries)

    def __str__(self) -> str:
        """Format the newest entries, one per line, without how the fleet came to be."""
        entries = [entry for entry in self.entries if entry.by != SETUP]
        shown = list(map(format_entry, entries[-SHOWN_ENTRIES_MAX:]))
        if len(shown) < len(entries):
            shown.insert(0, f"… {len(entries) - len(shown)} earlier lines")
        return "\n".join(shown)


def decode_body(body: bytes) -> str:
    """Decode a body for an entry, cut to the limit."""
    return body[: 4 * BODY_CHARS_MAX].decode(errors="replace")[:BODY_CHARS_MAX]


def format_entry(entry: TranscriptEntry) -> str:
    """Format an entry as one line. Terminal control characters are replaced."""
    subject = entry.vm or entry.scope or entry.kind
    line = f"{entry.at:%Y-%m-%d %H:%M:%S}  {subject:<14}  {_describe(entry)}"
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
    )


def _describe(entry: TranscriptEntry) -> str:
    if entry.kind is TranscriptKind.REQUEST:
        return _describe_request(entry)
    event = f" ({entry.event[:8]})" if entry.event else ""
    if entry.kind is TranscriptKind.CHANGE and entry.what in TEXTS:
        return _shorten(f"{TEXTS[entry.what].format(entry.detail)}{event}")
    detail = f": {entry.detail}" if entry.detail else ""
    by = f" by {entry.by}" if entry.by else ""
    return _shorten(f"{entry.what}{detail}{by}{event}")


def _describe_request(entry: TranscriptEntry) -> str:
    request = f"{entry.method} {entry.path} {entry.request_body}".rstrip()
    status = str(entry.status) if entry.status else "no response"
    faults = f"  [{', '.join(entry.faults)}]" if entry.faults else ""
    body = _summarize_document(entry.response_body) or _shorten(entry.response_body)
    return f"{_shorten(request)} -> {status}{faults} {body}".rstrip()


def read_shown(body: bytes) -> Document | None:
    """Return the document in a response, if a careful client would accept it."""
    with suppress(InvalidDocument):
        return read_document(body) if body else None
    return None


def _summarize_document(body: str) -> str:
    """Summarize a document; empty if the body is not one."""
    document = read_shown(body.encode())
    if document is None:
        return ""
    shown = [
        f"{event.type} {event.status} of {_shorten(', '.join(event.resources))} ({event.id[:8]})"
        for event in document.events[:SHOWN_EVENTS_MAX]
    ]
    if len(document.events) > len(shown):
        shown.append(f"{len(document.events) - len(shown)} more")
    return f"document {document.incarnation}: {'; '.join(shown) or 'no events'}"


def _count_chars(entry: TranscriptEntry) -> int:
    """Estimate the size, by the members that a client can make long."""
    bodies = len(entry.request_body) + len(entry.response_body)
    return bodies + len(entry.path) + len(entry.detail) + ENTRY_CHARS


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
