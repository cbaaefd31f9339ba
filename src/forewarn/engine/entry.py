"""History entries: changes with their time, author and scope, written in the commit they describe.

All entries of a commit are one value in the store. The number of an entry is its public position:
numbers only grow and are not dense.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import asdict, force_setattr

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import Cause, EventType, Time
from forewarn.log import log
from forewarn.store.base import HistoryValue

ENTRIES_MAX = 4096
"""How many entries a commit can have."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A change with its time, author and scope, as the history, the stream and webhooks show it.

    The number is 0 until the entry is read from the history.
    """

    number: int = 0
    at: Time
    by: str
    what: ChangeKind
    scope: str = ""
    event: str = ""
    type: EventType | None = None
    cause: Cause | None = None
    resources: tuple[str, ...] = ()
    vm: str = ""
    host: str = ""
    host_before: str = ""
    not_before: Time | None = None
    description: str = ""
    duration_seconds: int | None = None
    detail: str = ""


LEVEL = {
    ChangeKind.CLAIMED: logging.DEBUG,
    ChangeKind.JOINED: logging.DEBUG,
    ChangeKind.LEFT: logging.DEBUG,
    ChangeKind.UPDATED: logging.DEBUG,
    ChangeKind.IMPACT_FAILED: logging.WARNING,
    ChangeKind.UNSERVED: logging.WARNING,
    ChangeKind.FAILED: logging.ERROR,
}
"""The log level of changes that are not INFO. A whole fleet may join in one apply."""
LOGGED = ("scope", "event", "vm", "detail", "by")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_RAW = msgspec.json.Decoder(list[msgspec.Raw])
_ENTRY = msgspec.json.Decoder(Entry)


def make_entry(change: Change, *, at: datetime, by: str, scope: str = "") -> Entry:
    return Entry(at=at, by=by, scope=scope, **asdict(change))


def encode_all(entries: Sequence[Entry]) -> bytes | None:
    """The history value of a commit: the fields of each entry that are not empty."""
    assert len(entries) <= ENTRIES_MAX
    fields = [
        {
            name: value
            for name, value in asdict(entry).items()
            if value or name == "by" or (name, value) == ("duration_seconds", 0)
        }
        for entry in entries
    ]
    return msgspec.json.encode(fields) if fields else None


def log_all(entries: Sequence[Entry]) -> None:
    for entry in entries:
        level = LEVEL.get(entry.what, logging.INFO)
        if log.isEnabledFor(level):
            facts = {name: value for name in LOGGED if (value := getattr(entry, name))}
            log.logger.log(level, entry.what, extra={"facts": facts})


def decode_all(value: HistoryValue) -> list[Entry]:
    """The entries of a history value, oldest first.

    An entry that cannot be read is left out: a newer server wrote it, or it is damaged.
    """
    return list(decode_each(value))


def decode_each(value: HistoryValue) -> Iterator[Entry]:
    """As `decode_all`, one at a time."""
    return _decode(value, enumerate(_split(value)))


def decode_last(value: HistoryValue) -> Entry | None:
    """The last entry of a history value that can be read, without decoding those before it."""
    numbered = list(enumerate(_split(value)))
    return next(_decode(value, reversed(numbered)), None)


def _split(value: HistoryValue) -> list[msgspec.Raw]:
    try:
        return _RAW.decode(value.value)
    except UNREADABLE:
        return []


def _decode(value: HistoryValue, raw_entries: Iterable[tuple[int, msgspec.Raw]]) -> Iterator[Entry]:
    for index, raw in raw_entries:
        try:
            entry = _ENTRY.decode(raw)
        except UNREADABLE:
            continue
        force_setattr(entry, "number", first_number(value.position) + index)
        yield entry


def first_number(position: int) -> int:
    """The number of the first entry of the commit at this position of the store's history."""
    return position * ENTRIES_MAX


def last_number(position: int) -> int:
    """A number that covers all entries of the commit at this position."""
    return first_number(position + 1) - 1


def position_of(number: int) -> int:
    """The position of the commit that the entry with this number belongs to."""
    return number // ENTRIES_MAX
