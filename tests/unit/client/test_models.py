"""Documents, events and dates: strict about known members, tolerant of new ones."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest

from forewarn.client import Document, Event, InvalidDocument
from forewarn.client.models import parse_date, read_document
from tests.unit.client.build import NOON, SOON, reboot

CAPTURE = (
    b'{"DocumentIncarnation":2,"Events":[{"EventId":"4CAEA225-A741-474D-A72E-428C86FCD853",'
    b'"EventStatus":"Scheduled","EventType":"Reboot","ResourceType":"VirtualMachine",'
    b'"Resources":["flatcar-vm1"],'
    b'"NotBefore":"Thu, 22 Jul 2021 04:50:17 GMT","Description":"","EventSource":"User",'
    b'"DurationInSeconds":-1}]}'
)
ENTRY = json.loads(CAPTURE)["Events"][0]


def read(value: object) -> Document:
    return read_document(json.dumps(value).encode())


def read_event(**members: object) -> Event:
    """The captured event with these members; None removes one."""
    entry = {name: value for name, value in (ENTRY | members).items() if value is not None}
    return read({"DocumentIncarnation": 2, "Events": [entry]}).events[0]


def test_real_document_is_read() -> None:
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


def test_members_missing_from_old_versions_have_defaults() -> None:
    """A real client crashed on a missing member."""
    event = read_event(Description=None, EventSource=None, DurationInSeconds=None)

    assert (event.description, event.source, event.duration_seconds) == ("", "", -1)


def test_unknown_types_statuses_and_members_are_kept() -> None:
    """A caller may know them."""
    event = read_event(EventType="Hibernate", EventStatus="Paused", Severity={"level": 3})

    assert (event.type, event.status, event.extra) == (
        "Hibernate",
        "Paused",
        {"Severity": {"level": 3}},
    )


def test_event_converts_to_plain_values() -> None:
    """The journal of the agent stores it."""
    assert asdict(read_event(Severity=3))["extra"] == {"Severity": 3}


@pytest.mark.parametrize("members", [{"NotBefore": ""}, {"NotBefore": "  "}, {"NotBefore": None}])
def test_empty_not_before_means_now(members: dict[str, Any]) -> None:
    """It is empty once an event has started."""
    event = read_event(**members)

    assert event.not_before is None
    assert event.is_due(NOON)


def test_null_not_before_means_now() -> None:
    assert read({"Events": [ENTRY | {"NotBefore": None}]}).events[0].not_before is None


def test_event_is_due_at_not_before_and_not_a_second_earlier() -> None:
    assert not reboot(not_before=SOON).is_due(SOON.replace(minute=14, second=59))
    assert reboot(not_before=SOON).is_due(SOON)


@pytest.mark.parametrize(("incarnation", "expected"), [(5, 5), ("5", 5), (None, 0)])
def test_incarnation_may_be_a_number_as_text(incarnation: object, expected: int) -> None:
    """Some samples have it as text; the first preview had none."""
    assert read({"DocumentIncarnation": incarnation, "Events": []}).incarnation == expected


@pytest.mark.parametrize("body", [b"", b"  \r\n"])
def test_empty_body_means_no_events(body: bytes) -> None:
    """Some hosts respond so. Its ETag is dropped: a 304 for it would prolong a fault."""
    assert read_document(body, etag='"7"') == Document(0, (), is_blank=True)


@pytest.mark.parametrize("name", ["web-0", "WEB-0"])
@pytest.mark.parametrize("shown", ["web-0", "Web-0", "_web-0"])
def test_event_concerns_a_vm_in_any_case_and_with_an_underscore(name: str, shown: str) -> None:
    """2017-03-01 has the underscore. A VM that misses its name is not warned."""
    assert read_event(Resources=["db", shown]).concerns(name)


@pytest.mark.parametrize("shown", ["web-00", "web", "__web-0", ""])
def test_event_does_not_concern_another_vm(shown: str) -> None:
    assert not read_event(Resources=[shown]).concerns("web-0")


def test_ids_are_compared_ignoring_case() -> None:
    assert read_event(EventId="abc").key == read_event(EventId="ABC").key
    assert read_event(EventId="abc").id == "abc"


@pytest.mark.parametrize(
    "value",
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
def test_invalid_document_is_rejected(value: object) -> None:
    """As an empty document it would end every known event."""
    with pytest.raises(InvalidDocument):
        read(value)


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
def test_one_invalid_event_rejects_the_whole_document(
    members: dict[str, Any],
) -> None:
    """Left out, it would look as if it had ended. The message names the member."""
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
def test_invalid_json_is_rejected_and_quoted(body: bytes) -> None:
    """The message has what was received, shortened to a line."""
    with pytest.raises(InvalidDocument, match=r"not JSON \(Content-Type text/html\)") as caught:
        read_document(body, content_type="text/html")
    assert len(caught.value.message) < 200


def test_document_nested_too_deeply_is_rejected() -> None:
    """Serialising it would hit the recursion limit, and fail for all events."""
    deep: object = 0
    for _ in range(700):
        deep = [deep]
    with pytest.raises(InvalidDocument, match="nested deeper"):
        read_event(Odd=deep)


def test_document_with_too_many_events_is_rejected() -> None:
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
