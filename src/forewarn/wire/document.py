"""Renders the document of a scope in one api-version.

Same incarnation and version, same bytes.
"""

import re
from collections.abc import Set
from email.utils import format_datetime

import msgspec

from forewarn.core.event import Event, Status
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.wire.versions import Version

ISO_VERSION_MAX = "2017-11-01"
"""The last version whose documentation shows NotBefore in ISO 8601 (protocol 2.3)."""

_INCARNATION = re.compile(r"[1-9][0-9]{0,17}")
_encode = msgspec.json.Encoder().encode


def body(scope: Scope, version: Version, *, iso_not_before: bool = False) -> bytes:
    """Render compact JSON in wire order, without events of types unknown to the version."""
    prefix = "_" if version.prefixes_names and scope.kind is not ScopeKind.CLOUD_SERVICE else ""
    is_iso = iso_not_before and version.name <= ISO_VERSION_MAX
    events = [
        _entry(event, version, prefix=prefix, is_iso=is_iso)
        for event in scope.events
        if event.type in version.types
    ]
    return _encode({"DocumentIncarnation": scope.incarnation, "Events": events})


def read_tags(if_none_match: str) -> frozenset[str]:
    """Parse an If-None-Match header. Clients send quoted, bare and weak tags.

    A bare `*` matches any document; a quoted one is an ordinary tag.
    """
    if not if_none_match:
        return frozenset()
    tags = {tag.strip() for tag in if_none_match.split(",")}
    bare = {tag.removeprefix("W/").strip('"') for tag in tags}
    return frozenset((bare - {"*"}) | (tags & {"*"}))


def read_incarnations(tags: Set[str]) -> frozenset[int]:
    """The tags that can be those of a document, as numbers. A guest may send any others."""
    return frozenset(int(tag) for tag in tags if _INCARNATION.fullmatch(tag))


def is_known(incarnation: int, tags: Set[str]) -> bool:
    """Whether the client already has this document. `tags` come from `read_tags`."""
    return "*" in tags or str(incarnation) in tags


def matches(if_none_match: str, incarnation: int) -> bool:
    """Whether an If-None-Match header names this document."""
    return is_known(incarnation, read_tags(if_none_match))


def _entry(event: Event, version: Version, *, prefix: str, is_iso: bool) -> dict[str, object]:
    members = {
        "EventId": event.id,
        "EventStatus": event.status,
        "EventType": event.type,
        "ResourceType": "VirtualMachine",
        "Resources": [prefix + name for name in event.resources],
        "NotBefore": _not_before(event, is_iso=is_iso),
        "Description": event.description,
        "EventSource": event.source,
        "DurationInSeconds": event.duration_seconds,
    }
    return {field: members[field] for field in version.fields}


def _not_before(event: Event, *, is_iso: bool) -> str:
    """Always a string: published samples call string methods on it.

    `format_datetime` does not depend on the locale.
    """
    if event.status is Status.STARTED:
        return ""
    if is_iso:
        return event.not_before.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"
    return format_datetime(event.not_before, usegmt=True)
