"""What an endpoint tells, as values: Document and Event, read from bytes once. Pure.

A document with one part that cannot be understood is refused whole: an event left out would be
taken for one that has ended. What is new to us (types, statuses, members) is kept as it came.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from forewarn.client import dates as moment
from forewarn.client.errors import InvalidDocument, InvalidResponse, brief

DEPTH_MAX = 64
EVENTS_MAX = 1000
UNKNOWN_SECONDS = -1
UNKNOWN_INCARNATION = 0
"""No endpoint serves it (protocol 2.6), so it stands for "it did not say"."""

_MEMBERS = frozenset(
    ("EventId", "EventStatus", "EventType", "ResourceType", "Resources", "NotBefore")
)
_MEMBERS |= {"Description", "EventSource", "DurationInSeconds"}
_WHOLE = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a document. What an older api-version lacks has its default: `""`, or -1 for the
    duration.

    `not_before` is None where the endpoint left it empty: from now on. `extra` holds the members
    that we do not know.
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
        """The id as ids are compared: in any case of letters."""
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
        """Whether a VM of this name is hit. In 2017-03-01 names begin with an underscore."""
        wanted = name.casefold()
        return any(
            wanted in (shown.casefold(), shown.casefold().removeprefix("_"))
            for shown in self.resources
        )


@dataclass(frozen=True, slots=True)
class Document:
    """What all VMs of a scope are told. `incarnation` is 0 where the endpoint did not say; `etag`
    is as it came, maybe empty.

    `is_blank`: the answer had no body at all. It may mean no events, or that the endpoint has a
    hiccup.
    """

    incarnation: int
    events: tuple[Event, ...]
    etag: str = ""
    is_blank: bool = False


def read_document(body: bytes, *, etag: str = "", content_type: str = "") -> Document:
    """The document that a 200 carries. Nothing at all means no events: endpoints of that kind exist
    (protocol 3).

    Its ETag is dropped: it may be that of the document which should have come, and a 304 to it
    would make a hiccup last.
    """
    if not body.strip():
        return Document(UNKNOWN_INCARNATION, (), is_blank=True)
    try:
        said = read_json(body, content_type)
    except InvalidResponse as problem:
        raise InvalidDocument(problem.message) from problem
    if not _is_shallow(said):
        raise InvalidDocument(
            f"the document is nested deeper than {DEPTH_MAX}; expected a list of Events"
        )
    if not isinstance(said, dict) or not isinstance(said.get("Events"), list):
        raise InvalidDocument(
            f"the answer is {brief(said)}; expected a document with a list of Events"
        )
    if len(said["Events"]) > EVENTS_MAX:
        raise InvalidDocument(
            f"the document has {len(said['Events'])} events; expected at most {EVENTS_MAX}"
        )
    try:
        incarnation = _whole(said, "DocumentIncarnation", UNKNOWN_INCARNATION)
        events = tuple(_event(entry) for entry in said["Events"])
    except ValueError as error:
        raise InvalidDocument(f"the document cannot be understood: {error}") from error
    return Document(incarnation, events, etag)


def read_json(body: bytes, content_type: str = "") -> object:
    """The JSON of an answer, whatever its Content-Type says: some endpoints send it as text
    (protocol 3).
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidResponse(
            f"the answer is no JSON (Content-Type {content_type or 'not given'}): {brief(body)}"
        ) from error


def _is_shallow(said: object) -> bool:
    """Whether it can be copied, compared and written down by functions that call themselves."""
    level = [said]
    for _ in range(DEPTH_MAX):
        level = [inner for one in level for inner in _inner(one)]
        if not level:
            return True
    return False


def _inner(one: object) -> Iterable[object]:
    if isinstance(one, dict):
        return one.values()
    return one if isinstance(one, list) else ()


def _event(entry: object) -> Event:
    if not isinstance(entry, dict):
        raise ValueError(f"an event is {brief(entry)}; expected an object")
    return Event(
        id=_required(entry, "EventId"),
        type=_required(entry, "EventType"),
        status=_required(entry, "EventStatus"),
        source=_text(entry, "EventSource", ""),
        resources=_names(entry),
        resource_type=_text(entry, "ResourceType", "VirtualMachine"),
        not_before=_not_before(entry),
        duration_seconds=_whole(entry, "DurationInSeconds", UNKNOWN_SECONDS),
        description=_text(entry, "Description", ""),
        extra={name: value for name, value in entry.items() if name not in _MEMBERS},
    )


def _required(entry: Mapping[str, object], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {brief(value)}; expected some text")
    return value


def _text(entry: Mapping[str, object], name: str, default: str) -> str:
    value = entry.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{name} is {brief(value)}; expected text")
    return value


def _whole(entry: Mapping[str, object], name: str, default: int) -> int:
    value = entry.get(name)
    if value is None:
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    raise ValueError(f"{name} is {brief(value)}; expected a whole number")


def _names(entry: Mapping[str, object]) -> tuple[str, ...]:
    value = entry.get("Resources")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"Resources is {brief(value)}; expected a list of names")
    return tuple(value)


def _not_before(entry: Mapping[str, object]) -> datetime | None:
    value = _text(entry, "NotBefore", "").strip()
    if not value:
        return None
    try:
        return moment.parse(value)
    except ValueError as error:
        raise ValueError(f"NotBefore is {brief(value)}; expected a date") from error
