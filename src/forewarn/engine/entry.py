"""A history note: one change, when it became true, where, and by whom.

Written in the same commit as the change itself.
"""

from datetime import datetime

import msgspec

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import Cause, EventType


class Note(msgspec.Struct, frozen=True):
    at: datetime
    by: str
    scope: str
    change: Change


class Entry(msgspec.Struct, frozen=True):
    """A note as it is shown, in the history, the stream and webhooks alike: its number, and what
    was empty as empty.
    """

    number: int
    at: datetime
    by: str
    what: ChangeKind
    scope: str
    event: str
    type: EventType | None
    cause: Cause | None
    resources: tuple[str, ...]
    vm: str
    host: str
    host_before: str
    not_before: datetime | None
    description: str
    detail: str


def encode(note: Note) -> bytes:
    return msgspec.json.encode(note)


def decode(body: bytes) -> Note:
    return msgspec.json.decode(body, type=Note)


def entry(number: int, body: bytes) -> Entry | None:
    """The note of this number as it is shown;

    None if we cannot read it: a newer server wrote it, or it is damaged.
    """
    try:
        note = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    change = note.change
    return Entry(
        number=number,
        at=note.at,
        by=note.by,
        what=change.what,
        scope=note.scope,
        event=change.event_id,
        type=change.type,
        cause=change.cause,
        resources=change.resources,
        vm=change.vm,
        host=change.host,
        host_before=change.host_before,
        not_before=change.not_before,
        description=change.description,
        detail=change.detail,
    )


def encode_entry(shown: Entry) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(shown)
