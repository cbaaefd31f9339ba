"""Decoded records by key, and what a key says."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class Versioned(NamedTuple):
    """A decoded value (None: absent or deleted) and the revision that a write must name."""

    value: Any
    revision: int


ABSENT = Versioned(None, 0)


class Records:
    """The decoded records of all cached kinds except scopes and their polls, by key."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Versioned]] = {}

    def get(self, key: str) -> Versioned:
        return self._kinds.get(kind_of(key), {}).get(key, ABSENT)

    def take(self, key: str) -> Versioned:
        """Get and remove a record."""
        return self._kinds.get(kind_of(key), {}).pop(key, ABSENT)

    def has_any(self, kind: str) -> bool:
        """Whether there is a record of a kind."""
        return bool(self._kinds.get(kind))

    def values(self, kind: str) -> Iterator[tuple[str, Any]]:
        """The key and value of every record of a kind, also for threads: records may change."""
        for key, record in list(self._kinds.get(kind, {}).items()):
            yield key, record.value

    def keys(self) -> Iterator[str]:
        for records in self._kinds.values():
            yield from records

    def set(self, key: str, value: Any, revision: int) -> None:
        records = self._kinds.setdefault(kind_of(key), {})
        if value is None:
            records.pop(key, None)
        else:
            records[key] = Versioned(value, revision)


def kind_of(key: str) -> str:
    return key.partition("/")[0]


def name_of(key: str) -> str:
    return key.rstrip("/").partition("/")[2]


def describe(key: str) -> str:
    """A record's key in words, for people."""
    kind, _, name = key.rstrip("/").partition("/")
    return f"{kind} {name}" if name else f"the {kind} record"
