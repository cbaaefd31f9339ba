"""Rewrite what version 0.2 stored (format 1) as what this version reads (format 2). Pure.

Anything that cannot be read is kept as it is, so that it stays unreadable and read-only.
"""

from typing import Any

import msgspec

from forewarn.engine.entry import first_number
from forewarn.store.base import Upgrade

DROPPED_KINDS = ("retention", "tokens")
"""Records that no longer exist."""


def upgrade(key: str, value: bytes) -> bytes | None:
    """The new value of a record; None if the record is no longer needed."""
    kind = key.partition("/")[0]
    if kind in DROPPED_KINDS:
        return None
    try:
        fields = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return value
    if not isinstance(fields, dict):
        return value
    if kind == "webhook":
        return _webhook(fields)
    return value


def _webhook(cursor: dict[str, Any]) -> bytes:
    """A number N of before is N at index 0 now. The lease replaces the claim."""
    kept = {"due_at", "tries", "refusals"}
    return msgspec.json.encode(
        {"number": first_number(cursor.get("number", 0))}
        | {name: value for name, value in cursor.items() if name in kept}
    )


def upgrade_entry(value: bytes) -> bytes:
    """The history value of what was one entry: a list of one flat entry."""
    try:
        note = msgspec.json.decode(value)
        change = note.pop("change")
        change["event"] = change.pop("event_id", "")
        fields = {name: field for name, field in (note | change).items() if field or name == "by"}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError, KeyError):
        return value
    return msgspec.json.encode([fields])


UPGRADE = Upgrade(upgrade, upgrade_entry)
