"""History notes as stored bytes and as entries."""

from datetime import UTC, datetime

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import Cause, EventType
from forewarn.engine.entry import Note, encode, encode_entry, entry

AT = datetime(2030, 1, 31, 12, tzinfo=UTC)
FULL = Change(
    what=ChangeKind.SCHEDULED,
    event_id="E1",
    detail="Reboot of web-0",
    type=EventType.REBOOT,
    cause=Cause.RESTART,
    resources=("web-0",),
    host="host-a",
    not_before=AT,
    description="As asked.",
)


def test_an_entry_tells_all_that_its_note_holds_and_what_is_empty_as_empty() -> None:
    """Programs read the same members whatever happened."""
    shown = entry(7, encode(Note(AT, "token ci", "web", FULL)))

    assert shown is not None
    assert encode_entry(shown) == (
        b'{"number":7,"at":"2030-01-31T12:00:00Z","by":"token ci","what":"scheduled","scope":"web","event":"E1","type":"Reboot",'
        b'"cause":"user-restart","resources":["web-0"],"vm":"","host":"host-a","host_before":"",'
        b'"not_before":"2030-01-31T12:00:00Z","description":"As asked.","detail":"Reboot of web-0"}'
    )


def test_a_note_from_before_there_were_concerns_is_still_read() -> None:
    """An upgrade must not lose the history."""
    shown = entry(
        1,
        b'{"at":"2030-01-31T12:00:00Z","by":"ann","scope":"web","change":{"what":"started","event_id":"E1"}}',
    )

    assert shown is not None
    assert (shown.what, shown.event, shown.host, shown.resources) == (
        ChangeKind.STARTED,
        "E1",
        "",
        (),
    )


def test_a_note_that_a_newer_server_wrote_is_none_of_ours() -> None:
    assert (
        entry(
            1,
            b'{"at":"2030-01-31T12:00:00Z","by":"ann","scope":"web","change":{"what":"teleported"}}',
        )
        is None
    )
    assert entry(1, b"\xff not JSON") is None
