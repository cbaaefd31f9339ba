"""A history note: one change, when it became true, where, and by whom. Written in the same commit as the change itself."""

from datetime import datetime

import msgspec

from forewarn.core.change import Change


class Note(msgspec.Struct, frozen=True):
    at: datetime
    by: str
    scope: str
    change: Change


def encode(note: Note) -> bytes:
    return msgspec.json.encode(note)


def decode(body: bytes) -> Note:
    return msgspec.json.decode(body, type=Note)
