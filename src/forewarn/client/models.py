"""Document and Event, parsed once from the bytes of a response. No I/O.

A document with one part that cannot be understood is rejected as a whole: an event left out would
look like one that has ended. Types, statuses and members that are new to us are kept as they came.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from forewarn.client.errors import InvalidDocument, InvalidResponse, brief

DEPTH_MAX = 64
EVENTS_MAX = 1000
UNKNOWN_SECONDS = -1
UNKNOWN_INCARNATION = 0
"""For a document without an incarnation: no endpoint serves a 0 (protocol 2.6)."""

_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a document.

    Members that an older api-version lacks have defaults: `""`, and -1 for the duration.
    `not_before` is None where the endpoint left it empty, which means now. `extra` holds the
    members that we do not know.
    """

    id: str
    type: str
    status: str
    source: str = ""
    resources: tuple[str, ...] = ()
    resource_type: str = "VirtualMachine"
    not_before: datetime | None = None
    duration_seconds: int = UNKNOWN_SECONDS
    description: str = ""
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """The id for comparisons, which ignore case."""
        return self.id.upper()

    @property
    def is_scheduled(self) -> bool:
        return self.status.lower() == "scheduled"

    @property
    def is_started(self) -> bool:
        return self.status.lower() == "started"

    def is_due(self, now: datetime) -> bool:
        return self.not_before is None or self.not_before <= now

    def concerns(self, name: str) -> bool:
        """Whether it affects the VM of this name. In 2017-03-01 names begin with an underscore."""
        wanted = name.casefold()
        return any(
            wanted in (resource.casefold(), resource.casefold().removeprefix("_"))
            for resource in self.resources
        )


@dataclass(frozen=True, slots=True)
class Document:
    """What all VMs of a scope read. `incarnation` is 0 if it was missing; `etag` may be empty.

    `is_blank`: the response had no body. That means no events, or that the endpoint has a
    temporary fault.
    """

    incarnation: int
    events: tuple[Event, ...]
    etag: str = ""
    is_blank: bool = False


def read_document(body: bytes, *, etag: str = "", content_type: str = "") -> Document:
    """The document in the body of a 200. Some endpoints send no body if there are no events.

    The ETag of an empty body is dropped. It may belong to the document that should have been
    sent, and a 304 for it would prolong the fault.
    """
    if not body.strip():
        return Document(UNKNOWN_INCARNATION, (), is_blank=True)
    try:
        value = read_json(body, content_type)
    except InvalidResponse as error:
        raise InvalidDocument(error.message) from error
    if not _is_shallow(value):
        raise InvalidDocument(f"the document is nested deeper than {DEPTH_MAX}")
    if not isinstance(value, dict) or not isinstance(entries := value.get("Events"), list):
        raise InvalidDocument(f"the response is {brief(value)}; expected a list of Events")
    if len(entries) > EVENTS_MAX:
        raise InvalidDocument(
            f"the document has {len(entries)} events; expected at most {EVENTS_MAX}"
        )
    try:
        incarnation = _integer(value, "DocumentIncarnation", UNKNOWN_INCARNATION)
        events = tuple(_event(entry) for entry in entries)
    except ValueError as error:
        raise InvalidDocument(f"the document is not valid: {error}") from error
    return Document(incarnation, events, etag)


def read_json(body: bytes, content_type: str = "") -> object:
    """The JSON of a response, whatever its Content-Type: some endpoints send it as text."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidResponse(
            f"the response is not JSON (Content-Type {content_type or 'missing'}): {brief(body)}"
        ) from error


def _is_shallow(value: object, depth: int = DEPTH_MAX) -> bool:
    """Whether recursive functions can copy, compare and serialise it."""
    children: Iterable[object] = ()
    if isinstance(value, dict | list):
        children = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(child, depth - 1) for child in children)


def _event(entry: object) -> Event:
    if not isinstance(entry, dict):
        raise ValueError(f"an event is {brief(entry)}; expected an object")
    members = dict(entry)
    return Event(
        id=_text(members, "EventId"),
        type=_text(members, "EventType"),
        status=_text(members, "EventStatus"),
        source=_text(members, "EventSource", ""),
        resources=_resources(members),
        resource_type=_text(members, "ResourceType", "VirtualMachine"),
        not_before=_not_before(members),
        duration_seconds=_integer(members, "DurationInSeconds", UNKNOWN_SECONDS),
        description=_text(members, "Description", ""),
        extra=members,  # each of the above has removed its own
    )


def _text(members: dict[str, object], name: str, default: str | None = None) -> str:
    """Without a default it is required."""
    value = members.pop(name, None)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not (value or default is not None):
        raise ValueError(f"{name} is {brief(value)}; expected text")
    return value


def _integer(members: dict[str, object], name: str, default: int) -> int:
    value = members.pop(name, None)
    if value is None:
        return default
    if type(value) is int or (isinstance(value, str) and _INTEGER.fullmatch(value)):
        return int(value)
    raise ValueError(f"{name} is {brief(value)}; expected a whole number")


def _resources(members: dict[str, object]) -> tuple[str, ...]:
    value = members.pop("Resources", None)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"Resources is {brief(value)}; expected a list of names")
    return tuple(value)


def _not_before(members: dict[str, object]) -> datetime | None:
    value = _text(members, "NotBefore", "").strip()
    try:
        return parse_date(value) if value else None
    except ValueError as error:
        raise ValueError(f"NotBefore is {brief(value)}; expected a date") from error


# Dates. The wire has RFC 1123 (`Mon, 17 Apr 2017 18:40:06 GMT`), Microsoft's articles show ISO
# 8601 (protocol 2.3). Written by hand because `strptime` depends on the locale and `email.utils`
# costs memory.

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*", re.ASCII)
_RFC_1123 = re.compile(
    r"([A-Z]+,? +)?(\d{1,2}) ([A-Z]{3})[A-Z]* (\d{4}) +(\d\d:\d\d(?::\d\d)?) *(.*)", re.ASCII
)
_LEAP_SECOND = re.compile(r"(\d\d:\d\d):60")


def parse_date(text: str) -> datetime:
    """A date in any form that endpoints use, in UTC, which is also the default zone.

    Raises ValueError for anything else. The weekday is ignored: published examples have it wrong.
    """
    iso = text.strip().upper()
    try:
        if match := _RFC_1123.fullmatch(iso):
            _, day, month, year, time, zone = match.groups()
            number = _MONTHS.index(month.lower()) + 1
            offset = "Z" if zone in ("GMT", "UTC", "UT") else zone
            iso = f"{year}-{number:02}-{int(day):02}T{time}{offset}"
        if not _ISO.fullmatch(iso):
            raise ValueError
        date = datetime.fromisoformat(_LEAP_SECOND.sub(r"\1:59", iso))
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"not a date: {text[:80]!r}") from error
