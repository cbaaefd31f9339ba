"""The bytes that a VM reads."""

import json
from datetime import UTC, datetime

import pytest

from forewarn.core.event import EventType, Status
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.wire.document import body, matches
from forewarn.wire.versions import BY_NAME, NEWEST, VERSIONS, Version
from tests.unit.wire.build import holding, reboot

HEAD = (
    b'{"DocumentIncarnation":2,"Events":[{"EventId":"4CAEA225-A741-474D-A72E-428C86FCD853",'
    b'"EventStatus":"Scheduled",'
)
NAMES = b'"EventType":"Reboot","ResourceType":"VirtualMachine","Resources":["flatcar-vm1"],'
OLD = HEAD + NAMES + b'"NotBefore":"Thu, 22 Jul 2021 04:50:17 GMT"'


def test_the_newest_version_gives_the_captured_bytes() -> None:
    """Protocol 2.1: this body came from Azure."""
    captured = (
        b'{"DocumentIncarnation":2,"Events":[{"EventId":"4CAEA225-A741-474D-A72E-428C86FCD853",'
        b'"EventStatus":"Scheduled","EventType":"Reboot","ResourceType":"VirtualMachine",'
        b'"Resources":["flatcar-vm1"],"NotBefore":"Thu, 22 Jul 2021 04:50:17 GMT",'
        b'"Description":"","EventSource":"User","DurationInSeconds":-1}]}'
    )
    assert body(holding(reboot()), NEWEST) == captured


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2017-03-01", OLD.replace(b'["flatcar-vm1"]', b'["_flatcar-vm1"]') + b"}]}"),
        ("2017-08-01", OLD + b"}]}"),
        ("2017-11-01", OLD + b"}]}"),
        ("2019-01-01", OLD + b"}]}"),
        ("2019-04-01", OLD + b',"Description":""}]}'),
        ("2019-08-01", OLD + b',"Description":"","EventSource":"User"}]}'),
        ("2020-07-01", OLD + b',"Description":"","EventSource":"User","DurationInSeconds":-1}]}'),
    ],
)
def test_each_version_has_its_own_bytes(version: str, expected: bytes) -> None:
    """Fields are absent in older versions, not null: a sample pinned to 2019-01-01 raised KeyError
    on Description.
    """
    assert body(holding(reboot()), BY_NAME[version]) == expected


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_an_empty_document_is_39_bytes_in_every_version(version: Version) -> None:
    """Compact, one line, no newline at the end, incarnation a number:

    Go clients unmarshal it into an int.
    """
    assert (
        body(Scope(name="web", incarnation=190), version)
        == b'{"DocumentIncarnation":190,"Events":[]}'
    )


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("2017-03-01", ["Freeze", "Reboot", "Redeploy"]),
        ("2017-08-01", ["Freeze", "Reboot", "Redeploy"]),
        ("2017-11-01", ["Freeze", "Reboot", "Redeploy", "Preempt"]),
        ("2019-01-01", ["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]),
        ("2020-07-01", ["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]),
    ],
)
def test_an_event_type_is_hidden_from_versions_older_than_it(
    version: str, shown: list[str]
) -> None:
    """Terminate needs 2019-01-01 or it is not returned; a client cannot act on a type that it does
    not know.
    """
    document = json.loads(
        body(holding(*(reboot(type=type_) for type_ in EventType)), BY_NAME[version])
    )

    assert [event["EventType"] for event in document["Events"]] == shown


def test_a_started_event_has_an_empty_not_before() -> None:
    """The member stays and is a string: the published samples call `.replace()` on it."""
    assert b'"EventStatus":"Started"' in body(holding(reboot(status=Status.STARTED)), NEWEST)
    assert b'"NotBefore":"",' in body(holding(reboot(status=Status.STARTED)), NEWEST)


@pytest.mark.parametrize("version", ["2017-03-01", "2017-08-01", "2017-11-01"])
def test_the_documented_date_format_is_iso_up_to_2017_11_01(version: str) -> None:
    """The documents of that time printed it so; the option is for clients written after them."""
    event = reboot(not_before=datetime(2016, 9, 19, 18, 29, 47, tzinfo=UTC))

    assert b'"NotBefore":"2016-09-19T18:29:47Z"' in body(
        holding(event), BY_NAME[version], iso_not_before=True
    )
    assert b'"NotBefore":"Mon, 19 Sep 2016 18:29:47 GMT"' in body(holding(event), BY_NAME[version])


@pytest.mark.parametrize("version", ["2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"])
def test_the_documented_date_format_changes_nothing_from_2019_on(version: str) -> None:
    """From then on the documents print what the wire carries."""
    assert body(holding(reboot()), BY_NAME[version], iso_not_before=True) == body(
        holding(reboot()), BY_NAME[version]
    )


def test_started_event_has_no_not_before_in_iso_format_either() -> None:
    """The option is about the form of a date, and a started event has none."""
    started = holding(reboot(status=Status.STARTED))

    assert b'"NotBefore":""' in body(started, BY_NAME["2017-08-01"], iso_not_before=True)


@pytest.mark.parametrize(
    ("day", "text"),
    [
        (datetime(2026, 1, 5, tzinfo=UTC), "Mon, 05 Jan 2026 00:00:00 GMT"),
        (datetime(2026, 2, 3, tzinfo=UTC), "Tue, 03 Feb 2026 00:00:00 GMT"),
        (datetime(2026, 3, 4, tzinfo=UTC), "Wed, 04 Mar 2026 00:00:00 GMT"),
        (datetime(2026, 4, 2, tzinfo=UTC), "Thu, 02 Apr 2026 00:00:00 GMT"),
        (datetime(2026, 5, 1, tzinfo=UTC), "Fri, 01 May 2026 00:00:00 GMT"),
        (datetime(2026, 6, 6, tzinfo=UTC), "Sat, 06 Jun 2026 00:00:00 GMT"),
        (datetime(2026, 7, 5, tzinfo=UTC), "Sun, 05 Jul 2026 00:00:00 GMT"),
        (datetime(2026, 8, 31, tzinfo=UTC), "Mon, 31 Aug 2026 00:00:00 GMT"),
        (datetime(2026, 9, 30, tzinfo=UTC), "Wed, 30 Sep 2026 00:00:00 GMT"),
        (datetime(2026, 10, 10, tzinfo=UTC), "Sat, 10 Oct 2026 00:00:00 GMT"),
        (datetime(2026, 11, 11, tzinfo=UTC), "Wed, 11 Nov 2026 00:00:00 GMT"),
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), "Thu, 31 Dec 2026 23:59:59 GMT"),
    ],
)
def test_dates_have_the_english_names_of_rfc_1123_and_two_digits(day: datetime, text: str) -> None:
    """DASK and the Go clients accept this form only, whatever language the server speaks."""
    assert f'"NotBefore":"{text}"'.encode() in body(holding(reboot(not_before=day)), NEWEST)


@pytest.mark.parametrize("kind", [ScopeKind.VM, ScopeKind.AVAILABILITY_SET, ScopeKind.SCALE_SET])
def test_2017_03_01_prefixes_vm_names_with_an_underscore(kind: ScopeKind) -> None:
    """Clients of that time drop the first character before they compare."""
    scope = holding(reboot(resources=("web_0", "web_1")), kind=kind)

    assert b'"Resources":["_web_0","_web_1"]' in body(scope, BY_NAME["2017-03-01"])
    assert b'"Resources":["web_0","web_1"]' in body(scope, BY_NAME["2017-08-01"])


def test_role_instances_of_a_cloud_service_never_have_an_underscore() -> None:
    """Every document shows `FrontEnd_IN_0` as it is."""
    scope = holding(reboot(resources=("FrontEnd_IN_0",)), kind=ScopeKind.CLOUD_SERVICE)

    assert b'"Resources":["FrontEnd_IN_0"]' in body(scope, BY_NAME["2017-03-01"])


def test_an_event_without_resources_has_an_empty_list() -> None:
    """Not null: clients iterate over it."""
    assert b'"Resources":[]' in body(holding(reboot(resources=())), NEWEST)


def test_a_description_is_utf8_and_escaped_as_json() -> None:
    """An operator may write what he likes; the document stays JSON."""
    assert '"Description":"Umzug \\"süd\\""'.encode() in body(
        holding(reboot(description='Umzug "süd"')), NEWEST
    )


def test_events_are_in_creation_order() -> None:
    """Same incarnation, same bytes."""
    document = json.loads(body(holding(reboot(id="B"), reboot(id="A")), NEWEST))

    assert [event["EventId"] for event in document["Events"]] == ["B", "A"]


@pytest.mark.parametrize(
    "header", ['"7"', "7", 'W/"7"', "W/7", '"6", "7"', '"6","7"', ' "7" ', "6, 7", "*", '"1", *']
)
def test_if_none_match_accepts_every_client_spelling(header: str) -> None:
    """Microsoft's Node sample sends the bare number; proxies weaken tags; RFC 9110 allows lists."""
    assert matches(header, 7)


@pytest.mark.parametrize(
    "header", ["", "0", '"0"', '"77"', '"17"', '"*"', 'W/"*"', '7"7', '"-7"', ",", "W/", '"6", "8"']
)
def test_if_none_match_of_another_document_does_not_match(header: str) -> None:
    """Equality only: a reset counter may be lower than what the caller holds.

    `0` is Node's word for nothing seen.
    """
    assert not matches(header, 7)
