"""The transcript: what a person is shown of it, and that it stays within its limits."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec

from forewarn.lab.transcript import Transcript, TranscriptEntry, TranscriptKind, format_entry
from tests.builders import NOON

EVENT = {
    "EventId": "602D9444-D2CD-49C7-8624-8643E7171297",
    "EventStatus": "Scheduled",
    "EventType": "Reboot",
    "ResourceType": "VirtualMachine",
    "Resources": ["web-0"],
    "NotBefore": "Wed, 04 Mar 2026 12:15:00 GMT",
    "Description": "Virtual machine is going to be restarted as requested by authorized user.",
    "EventSource": "User",
    "DurationInSeconds": -1,
}


def request(**members: object) -> TranscriptEntry:
    defaults = {
        "vm": "web-0",
        "method": "GET",
        "path": "/metadata/scheduledevents",
        "status": 200,
        **members,
    }
    return msgspec.convert(
        {"number": 1, "at": NOON, "kind": "request", **defaults}, TranscriptEntry
    )


def page(*events: dict[str, object]) -> str:
    return msgspec.json.encode({"DocumentIncarnation": 7, "Events": events}).decode()


def test_document_is_summarized() -> None:
    """The status is what a test has failed for, more often than not."""
    started = {
        **EVENT,
        "EventStatus": "Started",
        "EventType": "Freeze",
        "Resources": ["web-0", "web-1"],
    }
    shown = format_entry(request(response_body=page(EVENT, started)))

    assert shown.endswith(
        "-> 200 document 7: Reboot Scheduled of web-0 (602D9444); Freeze Started of web-0,"
        " web-1 (602D9444)"
    ), shown
    assert format_entry(request(response_body=page())).endswith("-> 200 document 7: no events")
    assert format_entry(request(response_body=page(*[EVENT] * 5))).endswith("(602D9444); 2 more")


def test_other_bodies_are_shown_shortened() -> None:
    assert format_entry(request(response_body='{"error":"Gone"}', status=410)).endswith(
        '-> 410 {"error":"Gone"}'
    )
    assert format_entry(request(response_body=page(EVENT)[:40])).endswith(page(EVENT)[:40])
    assert format_entry(request(response_body="x" * 500)).endswith("-> 200 " + "x" * 160 + "…")
    assert "-> no response" in format_entry(request(status=0, request_body="y" * 500))


def test_control_characters_are_replaced() -> None:
    shown = format_entry(
        request(
            request_body="\x1b[31mred\nnext",
            response_body=page({**EVENT, "Resources": ["\x1b]0;title\x07"]}),
        )
    )

    assert shown.isprintable()
    assert "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}next" in shown


def test_change_says_once_who_caused_it() -> None:
    transcript = Transcript(lambda: NOON)
    for what, by, detail in (
        ("joined", "lab", ""),
        ("scheduled", "test", "Reboot of web-0"),
        ("approved", "vm web-0", "web-0"),
        ("started", "vm web-0", "approved by web-0"),
        ("claimed", "platform", "platform"),
        ("completed", "platform", ""),
    ):
        transcript.add(TranscriptKind.CHANGE, scope="web", what=what, by=by, detail=detail)

    assert [line.split(maxsplit=3)[3] for line in str(transcript).splitlines()] == [
        "scheduled: Reboot of web-0 by test",
        "approved by web-0",
        "started: approved by web-0",
        "the platform has begun",
        "completed by platform",
    ]


def test_oldest_entries_are_dropped_over_the_size_limit() -> None:
    transcript = Transcript(lambda: NOON + timedelta(0), chars_max=10_000)
    for number in range(20):
        transcript.add(
            TranscriptKind.REQUEST, method="GET", path=f"/{number}", response_body="z" * 800
        )

    assert [entry.path for entry in transcript.entries] == [
        f"/{number}" for number in range(11, 20)
    ]
    transcript.add(TranscriptKind.REQUEST, method="GET", path="/20", response_body="z" * 20_000)
    assert [entry.path for entry in transcript.entries] == ["/20"], "the newest is always there"
    transcript.add(TranscriptKind.STEP, what="small")
    assert [entry.what for entry in transcript.entries] == ["small"]


def test_entries_can_be_read_while_another_thread_writes() -> None:
    """A test reads the transcript while the program under test polls, and each poll is recorded by
    the lab's own thread.
    """
    transcript = Transcript(lambda: NOON)
    for number in range(3):
        transcript.add(TranscriptKind.REQUEST, path=f"/{number}")

    with ThreadPoolExecutor(1) as lab:
        seen = [
            (entry.path, lab.submit(transcript.add, TranscriptKind.REQUEST, path="/late").result())
            for entry in transcript.entries
        ]

    assert [path for path, _ in seen] == ["/0", "/1", "/2"]
    assert len(transcript.entries) == 6


def test_dump_is_complete_while_another_thread_writes() -> None:
    """Written at the end of a test, when the program under test may still run: each line is an
    entry, in order.
    """
    transcript = Transcript(lambda: NOON)

    def record() -> None:
        for number in range(20_000):
            transcript.add(TranscriptKind.REQUEST, path=f"/{number}")

    with ThreadPoolExecutor(1) as lab:
        recording = lab.submit(record)
        while not recording.done():  # ends: it records so many and no more
            transcript.dump()
            str(transcript)
        recording.result()

    assert [msgspec.json.decode(line)["number"] for line in transcript.dump().splitlines()] == list(
        range(1, 20_001)
    )
