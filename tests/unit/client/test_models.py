"""A document as a guest reads it: strict about what matters, patient with what is new."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest

from forewarn.client import Document, Event, InvalidDocument
from forewarn.client.models import parse_date, read_document
from tests.unit.client.build import NOON, SOON, reboot

CAPTURE = (
    b'{"DocumentIncarnation":2,"Events":[{"EventId":"4CAEA225-A741-474D-A72E-428C86FCD853","EventStatus":"Scheduled",'
    b'"EventType":"Reboot","ResourceType":"VirtualMachine","Resources":["flatcar-vm1"],'
    b'"NotBefore":"Thu, 22 Jul 2021 04:50:17 GMT","Description":"","EventSource":"User","DurationInSeconds":-1}]}'
)
ENTRY = json.loads(CAPTURE)["Events"][0]


def read(said: object) -> Document:
    return read_document(json.dumps(said).encode())


def read_event(**members: object) -> Event:
    """The event of a document whose only entry is the capture's with these members;

    None leaves one out.
    """
    entry = {name: value for name, value in (ENTRY | members).items() if value is not None}
    return read({"DocumentIncarnation": 2, "Events": [entry]}).events[0]


def test_a_real_document_is_read_as_it_came() -> None:
    """Captured from Azure."""
    assert read_document(CAPTURE, etag='"2"') == Document(
        2,
        (
            Event(
                id="4CAEA225-A741-474D-A72E-428C86FCD853",
                type="Reboot",
                status="Scheduled",
                source="User",
                resources=("flatcar-vm1",),
                not_before=datetime(2021, 7, 22, 4, 50, 17, tzinfo=UTC),
            ),
        ),
        '"2"',
    )


def test_what_an_older_version_lacks_has_a_default() -> None:
    """A client that asked for a missing member has crashed in the field."""
    event = read_event(Description=None, EventSource=None, DurationInSeconds=None)

    assert (event.description, event.source, event.duration_seconds) == ("", "", -1)


def test_what_a_newer_version_adds_survives() -> None:
    """Types, statuses and members of tomorrow reach who knows them."""
    event = read_event(EventType="Hibernate", EventStatus="Pondering", Severity={"level": 3})

    assert (event.type, event.status, event.extra) == (
        "Hibernate",
        "Pondering",
        {"Severity": {"level": 3}},
    )


def test_an_event_can_be_written_down_as_plain_values() -> None:
    """A journal needs it."""
    assert asdict(read_event(Severity=3))["extra"] == {"Severity": 3}


@pytest.mark.parametrize("members", [{"NotBefore": ""}, {"NotBefore": "  "}, {"NotBefore": None}])
def test_an_empty_not_before_means_now(members: dict[str, Any]) -> None:
    """It is empty once an event has started."""
    event = read_event(**members)

    assert event.not_before is None
    assert event.is_due(NOON)


def test_a_null_not_before_means_now() -> None:
    assert read({"Events": [ENTRY | {"NotBefore": None}]}).events[0].not_before is None


def test_an_event_is_due_at_not_before_and_not_a_second_earlier() -> None:
    assert not reboot(not_before=SOON).is_due(SOON.replace(minute=14, second=59))
    assert reboot(not_before=SOON).is_due(SOON)


@pytest.mark.parametrize(("incarnation", "expected"), [(5, 5), ("5", 5), (None, 0)])
def test_the_incarnation_is_a_number_or_a_number_as_text(
    incarnation: object, expected: int
) -> None:
    """Some samples hold it as text; the first preview had none."""
    assert read({"DocumentIncarnation": incarnation, "Events": []}).incarnation == expected


@pytest.mark.parametrize("body", [b"", b"  \r\n"])
def test_an_empty_body_means_no_events(body: bytes) -> None:
    """Some hosts answer so when there are none.

    Its ETag is dropped: a 304 to it would make a hiccup last.
    """
    assert read_document(body, etag='"7"') == Document(0, (), is_blank=True)


@pytest.mark.parametrize("name", ["web-0", "WEB-0"])
@pytest.mark.parametrize("shown", ["web-0", "Web-0", "_web-0"])
def test_an_event_concerns_a_vm_in_any_case_of_letters_and_with_the_underscore_of_2017(
    name: str, shown: str
) -> None:
    """A VM that does not find itself in the list is not warned."""
    assert read_event(Resources=["db", shown]).concerns(name)


@pytest.mark.parametrize("shown", ["web-00", "web", "__web-0", ""])
def test_an_event_does_not_concern_a_vm_of_another_name(shown: str) -> None:
    assert not read_event(Resources=[shown]).concerns("web-0")


def test_ids_are_one_in_any_case_of_letters() -> None:
    assert read_event(EventId="abc").key == read_event(EventId="ABC").key
    assert read_event(EventId="abc").id == "abc"


@pytest.mark.parametrize(
    "said",
    [
        None,
        5,
        [],
        "Events",
        {},
        {"DocumentIncarnation": 1},
        {"error": "Bad request"},
        {"Events": None},
        {"Events": {}},
        {"DocumentIncarnation": "five", "Events": []},
        {"DocumentIncarnation": 1.5, "Events": []},
        {"DocumentIncarnation": True, "Events": []},
        {"DocumentIncarnation": [1], "Events": []},
        {"Events": [None]},
        {"Events": [[]]},
        {"Events": [{}]},
    ],
)
def test_what_is_no_document_is_refused(said: object) -> None:
    """Taken for an empty one, it would end every event that is known."""
    with pytest.raises(InvalidDocument):
        read(said)


@pytest.mark.parametrize(
    "members",
    [
        {"EventId": None},
        {"EventId": ""},
        {"EventId": 5},
        {"EventType": None},
        {"EventStatus": None},
        {"EventStatus": ["Started"]},
        {"Resources": None},
        {"Resources": "web-0"},
        {"Resources": [5]},
        {"NotBefore": "soon"},
        {"NotBefore": 5},
        {"Description": 5},
        {"EventSource": {}},
        {"DurationInSeconds": "long"},
        {"DurationInSeconds": 1.5},
    ],
)
def test_one_event_that_cannot_be_understood_refuses_the_whole_document(
    members: dict[str, Any],
) -> None:
    """Left out, it would be taken for one that has ended. The message names the member."""
    with pytest.raises(InvalidDocument, match=next(iter(members))):
        read_event(**members)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"\xff\xfe\xfd",
        b'{"Events":[',
        b"[" * 100_000,
        b'{"DocumentIncarnation":' + b"9" * 5000,
    ],
)
def test_what_is_no_json_is_refused_and_shown(body: bytes) -> None:
    """The message says what came, and no more of it than a line."""
    with pytest.raises(InvalidDocument, match=r"not JSON \(Content-Type text/html\)") as caught:
        read_document(body, content_type="text/html")
    assert len(caught.value.message) < 200


def test_a_document_nested_too_deep_is_refused() -> None:
    """What it can be written down with has a limit, and would fail for all events at once."""
    deep: object = 0
    for _ in range(700):
        deep = [deep]
    with pytest.raises(InvalidDocument, match="nested deeper"):
        read_event(Odd=deep)


def test_a_document_of_too_many_events_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="1001 events"):
        read({"DocumentIncarnation": 1, "Events": [None] * 1001})


DATE = datetime(2017, 4, 17, 18, 40, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "Mon, 17 Apr 2017 18:40:06 GMT",
        "Sat, 17 Apr 2017 18:40:06 GMT",  # a wrong weekday
        "mon, 17 apr 2017 18:40:06 gmt",
        "17 Apr 2017 18:40:06 GMT",
        "Mon, 17 April 2017 18:40:06 UTC",
        "  Mon, 17 Apr 2017 18:40:06 GMT ",
        "Mon, 17 Apr 2017 20:40:06 +0200",
        "2017-04-17T18:40:06Z",
        "2017-04-17t18:40:06z",
        "2017-04-17T18:40:06",
        "2017-04-17 18:40:06",
        "2017-04-17T20:40:06+02:00",
        "2017-04-17T10:40:06-0800",
        "2017-04-17T18:40:06.0000000Z",  # seven digits, as .NET prints them
    ],
)
def test_date_is_read_in_every_form_that_endpoints_use(text: str) -> None:
    """A NotBefore that we cannot read would leave a guest without a deadline."""
    assert parse_date(text) == DATE
    assert parse_date(text).tzinfo is UTC


def test_date_without_seconds_is_the_full_minute() -> None:
    assert parse_date("17 Apr 2017 18:40 -0000") == DATE.replace(second=0)
    assert parse_date("2017-04-17T18:40Z") == DATE.replace(second=0)


def test_fraction_of_a_second_is_kept() -> None:
    assert parse_date("2017-04-17T18:40:06.25Z") == DATE.replace(microsecond=250_000)
    assert parse_date("2017-04-17T18:40:06,1234567+00:00") == DATE.replace(microsecond=123_456)


def test_leap_second_is_read() -> None:
    leap = parse_date("Sat, 31 Dec 2016 23:59:60 GMT")

    assert leap == datetime(2016, 12, 31, 23, 59, 59, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "tomorrow, 17 Apr 2017 18:40:06 GMT or so",
        "2017-04-17",
        "1492454406",
        "Mon, 31 Feb 2017 18:40:06 GMT",
        "Mon, 17 Foo 2017 18:40:06 GMT",
        "Mon, 17 Apr 2017 25:40:06 GMT",
        "Mon, 17 Apr 2017 18:40:61 GMT",
        "Mon, 17 Apr 17 18:40:06 GMT",  # which century?
        "Mon, 17 Apr 2017 18:40:06 CET",  # a guessed zone could be an hour off
        "2017-04-17T18:40:06+99:99",
        "0001-01-01T00:00:00+05:00",  # before the first year in UTC
        "٢٠١٧-04-17T18:40:06Z",
        "04/17/2017 18:40:06",
    ],
)
def test_date_is_never_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="not a date"):
        parse_date(text)
