"""History entries: how they are stored, numbered and shown."""

from datetime import UTC, datetime

import msgspec
import pytest

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import Cause, EventType
from forewarn.engine.entry import (
    ENTRIES_MAX,
    decode_all,
    encode_all,
    last_number,
    make_entry,
    position_of,
)
from forewarn.store.base import HistoryValue

AT = datetime(2030, 1, 31, 12, tzinfo=UTC)
FULL = Change(
    what=ChangeKind.SCHEDULED,
    event="E1",
    detail="Reboot of web-0",
    type=EventType.REBOOT,
    cause=Cause.RESTART,
    resources=("web-0",),
    host="host-a",
    not_before=AT,
    description="As requested.",
    duration_seconds=-1,
)
ENABLED = Change(what=ChangeKind.ENABLED)


def value(*changes: Change, position: int = 1) -> HistoryValue:
    stored = encode_all(
        [make_entry(change, at=AT, by="token ci", scope="web") for change in changes]
    )
    assert stored is not None
    return HistoryValue(position, stored)


def test_an_entry_shows_everything_and_empty_fields_as_empty() -> None:
    """Programs read the same fields whatever happened."""
    (entry,) = decode_all(value(FULL))

    assert msgspec.json.encode(entry) == (
        b'{"number":4096,"at":"2030-01-31T12:00:00Z","by":"token ci","what":"scheduled",'
        b'"scope":"web","event":"E1","type":"Reboot","cause":"user-restart","resources":["web-0"],'
        b'"vm":"","host":"host-a","host_before":"","not_before":"2030-01-31T12:00:00Z",'
        b'"description":"As requested.","duration_seconds":-1,"detail":"Reboot of web-0"}'
    )


def test_empty_fields_are_not_stored() -> None:
    """A million entries must stay small."""
    assert msgspec.json.decode(value(ENABLED).value) == [
        {"what": "enabled", "at": "2030-01-31T12:00:00Z", "by": "token ci", "scope": "web"}
    ]
    assert encode_all([]) is None


def test_duration_of_zero_is_stored() -> None:
    """It means "no interruption", not "unknown"."""
    change = Change(what=ChangeKind.STARTED, event="E1", duration_seconds=0)

    assert [entry.duration_seconds for entry in decode_all(value(change, ENABLED))] == [0, None]


def test_numbers_grow_within_a_commit_and_between_commits() -> None:
    """The number is the cursor of clients, so it must never be the same or fall."""
    numbers = [
        entry.number
        for position in (6, 7)
        for entry in decode_all(value(FULL, ENABLED, position=position))
    ]

    assert numbers == [6 * 4096, 6 * 4096 + 1, 7 * 4096, 7 * 4096 + 1]
    assert [position_of(number) for number in numbers] == [6, 6, 7, 7]
    assert last_number(6) == 7 * ENTRIES_MAX - 1


@pytest.mark.parametrize("unreadable", [b'{"what":"teleported"}', b"7", b"[]"])
def test_an_unreadable_entry_does_not_hide_others(unreadable: bytes) -> None:
    """A newer server may have written it. The others keep their numbers."""
    stored = value(ENABLED).value
    mixed = HistoryValue(1, b"[" + unreadable + b"," + stored[1:])

    assert [entry.number for entry in decode_all(mixed)] == [4097]


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"{}", b"[{]"])
def test_a_damaged_value_has_no_entries(damaged: bytes) -> None:
    """Reading the history must not fail because of one commit."""
    assert decode_all(HistoryValue(1, damaged)) == []
