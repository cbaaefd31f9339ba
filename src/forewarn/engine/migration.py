"""Rewrite what version 0.2 stored as what this version reads. Pure, and used once per store.

Anything that cannot be read is kept as it is: it stays unreadable, and so read-only.
"""

from typing import Any

import msgspec

from forewarn.engine.entry import first_number
from forewarn.store.base import Upgrade

DROPPED = ("campaigns", "retention", "tokens")
"""Records that served to serialise writers, or to remember when deletions could be forgotten."""
CAMPAIGN_HOSTS_MAX = 5000
CAMPAIGN_FIELDS = {
    "wish": "spec",
    "under_way": "in_progress",
    "troubles": "skipped_hosts",
    "is_braked": "paused_by_failure",
    "why": "pause_reason",
    "asked_as": "operation_id",
}
HOST_FIELDS = {"trouble": "problem", "checker": None}
CURSOR_FIELDS = {
    "due_at": "retry_at",
    "tries": "failures",
    "refusals": "rejections",
    "claimed_by": None,
}
CHANGE_KINDS = {"ordered": "executed-silently", "amended": "updated"}
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Fields = dict[str, Any]


def upgrade_record(key: str, value: bytes) -> bytes | None:
    """The new value of a record; None if the record is no longer used."""
    kind, _, name = key.partition("/")
    if kind in DROPPED:
        return None
    if kind == "campaign-hosts":
        return value if name.endswith("/0") else None
    if kind not in ("campaign", "webhook"):
        return value
    try:
        fields = msgspec.json.decode(value, type=Fields)
        if kind == "webhook":
            return msgspec.json.encode({"format": 1, "value": _upgrade_cursor(fields)})
        return msgspec.json.encode(fields | {"value": _upgrade_campaign(fields["value"])})
    except (*UNREADABLE, KeyError, TypeError, AttributeError):
        return value


def _upgrade_campaign(campaign: Fields) -> Fields:
    """A campaign has at most 5,000 hosts now; a larger one ends with those that it has begun."""
    campaign = _rename(campaign, CAMPAIGN_FIELDS)
    if "in_progress" in campaign:
        campaign["in_progress"] = [_rename(run, HOST_FIELDS) for run in campaign["in_progress"]]
    if "ended_at" not in campaign:
        most = max(campaign.get("cursor", 0), CAMPAIGN_HOSTS_MAX)
        campaign["total"] = min(campaign["total"], most)
    return campaign


def _upgrade_cursor(cursor: Fields) -> Fields:
    """Entry N is the first one at position N now. A claim is replaced by the lease."""
    is_claimed = bool(cursor.get("claimed_by"))
    cursor = _rename(cursor, CURSOR_FIELDS) | {"number": first_number(cursor["number"])}
    if is_claimed:
        del cursor["retry_at"]  # it was the end of the claim
    return cursor


def upgrade_entry(value: bytes) -> bytes:
    """The history value of what was one entry: a list of one flat entry."""
    try:
        note = msgspec.json.decode(value, type=Fields)
        change = _rename(note.pop("change"), {"event_id": "event"})
        change["what"] = CHANGE_KINDS.get(change["what"], change["what"])
        fields = {name: field for name, field in (note | change).items() if field or name == "by"}
    except (*UNREADABLE, KeyError, TypeError, AttributeError):
        return value
    return msgspec.json.encode([fields])


def _rename(fields: Fields, names: dict[str, Any]) -> Fields:
    """The fields under their new names; without those whose new name is None."""
    renamed = {names.get(name, name): value for name, value in fields.items()}
    renamed.pop(None, None)
    return renamed


UPGRADE = Upgrade(upgrade_record, upgrade_entry)
