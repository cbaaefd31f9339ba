"""The api-versions: what each one shows and requires. `/metadata/instance` has its own list."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from forewarn.core.event import EventType


class Version(msgspec.Struct, frozen=True):
    """One Scheduled Events api-version.

    `fields` are the members of an event in wire order; others are absent.
    """

    name: str
    types: frozenset[EventType]
    fields: tuple[str, ...]
    requires_header: bool = True
    prefixes_names: bool = False


_TYPES_2017 = frozenset({EventType.FREEZE, EventType.REBOOT, EventType.REDEPLOY})
_TYPES_PREEMPT = _TYPES_2017 | {EventType.PREEMPT}
_TYPES = _TYPES_PREEMPT | {EventType.TERMINATE}
_FIELDS_2017 = ("EventId", "EventStatus", "EventType", "ResourceType", "Resources", "NotBefore")
_FIELDS_DESCRIPTION = (*_FIELDS_2017, "Description")
_FIELDS_SOURCE = (*_FIELDS_DESCRIPTION, "EventSource")
_FIELDS = (*_FIELDS_SOURCE, "DurationInSeconds")

VERSIONS: tuple[Version, ...] = (
    Version("2017-03-01", _TYPES_2017, _FIELDS_2017, requires_header=False, prefixes_names=True),
    Version("2017-08-01", _TYPES_2017, _FIELDS_2017),
    Version("2017-11-01", _TYPES_PREEMPT, _FIELDS_2017),
    Version("2019-01-01", _TYPES, _FIELDS_2017),
    Version("2019-04-01", _TYPES, _FIELDS_DESCRIPTION),
    Version("2019-08-01", _TYPES, _FIELDS_SOURCE),
    Version("2020-07-01", _TYPES, _FIELDS),
)
"""Oldest first."""

BY_NAME: Mapping[str, Version] = MappingProxyType({version.name: version for version in VERSIONS})
NEWEST = VERSIONS[-1]

# fmt: off
INSTANCE_VERSIONS: tuple[str, ...] = (
    "2017-03-01", "2017-04-02", "2017-08-01", "2017-10-01", "2017-12-01", "2018-02-01",
    "2018-04-02", "2018-10-01", "2019-02-01", "2019-03-11", "2019-04-30", "2019-06-01",
    "2019-06-04", "2019-08-01", "2019-08-15", "2019-11-01", "2020-06-01", "2020-07-15",
    "2020-09-01", "2020-10-01", "2020-12-01", "2021-01-01", "2021-02-01", "2021-03-01",
    "2021-05-01", "2021-08-01", "2021-10-01", "2021-11-01", "2021-11-15", "2021-12-13",
    "2023-07-01", "2023-11-15", "2024-03-15", "2024-07-17", "2025-04-07",
)
"""The versions of `/metadata/instance`, oldest first (protocol 1.2)."""
# fmt: on

_BAD_VERSION = (
    "Bad request. api-version is invalid or was not specified in the request."
    " For more information refer to aka.ms/azureimds"
)
_DATE = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")


def is_date(name: str) -> bool:
    return _DATE.fullmatch(name) is not None


def find_lenient(name: str) -> Version | None:
    """Return the version of that name, or for an unknown date the newest one before it."""
    if not is_date(name):
        return None
    return next((version for version in reversed(VERSIONS) if version.name <= name), None)


def bad_version_body(accepted: Sequence[str]) -> bytes:
    """The response to a missing or unknown api-version; `accepted` is oldest first.

    Clients omit it on purpose to read `newest-versions`.
    """
    return msgspec.json.encode({"error": _BAD_VERSION, "newest-versions": accepted[:-4:-1]})
