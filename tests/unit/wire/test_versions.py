"""The table of api-versions."""

import json

import pytest

from forewarn.core.event import EventType
from forewarn.wire.versions import (
    BY_NAME,
    INSTANCE_VERSIONS,
    NEWEST,
    VERSIONS,
    bad_version_body,
    find_lenient,
)

OLD_TYPES = {EventType.FREEZE, EventType.REBOOT, EventType.REDEPLOY}
OLD_FIELDS = ("EventId", "EventStatus", "EventType", "ResourceType", "Resources", "NotBefore")


def test_seven_versions_are_served_oldest_first() -> None:
    """Protocol 1.1. A client pinned to any of them must be understood."""
    assert [version.name for version in VERSIONS] == [
        "2017-03-01",
        "2017-08-01",
        "2017-11-01",
        "2019-01-01",
        "2019-04-01",
        "2019-08-01",
        "2020-07-01",
    ]
    assert list(BY_NAME.values()) == list(VERSIONS)
    assert NEWEST.name == "2020-07-01"


@pytest.mark.parametrize(
    ("name", "types", "fields"),
    [
        ("2017-03-01", OLD_TYPES, OLD_FIELDS),
        ("2017-08-01", OLD_TYPES, OLD_FIELDS),
        ("2017-11-01", OLD_TYPES | {EventType.PREEMPT}, OLD_FIELDS),
        ("2019-01-01", set(EventType), OLD_FIELDS),
        ("2019-04-01", set(EventType), (*OLD_FIELDS, "Description")),
        ("2019-08-01", set(EventType), (*OLD_FIELDS, "Description", "EventSource")),
        (
            "2020-07-01",
            set(EventType),
            (*OLD_FIELDS, "Description", "EventSource", "DurationInSeconds"),
        ),
    ],
)
def test_each_version_shows_its_own_types_and_fields(
    name: str, types: set[EventType], fields: tuple[str, ...]
) -> None:
    """A version never grew: a client that reads an old one gets what it got then."""
    assert BY_NAME[name].types == types
    assert BY_NAME[name].fields == fields


def test_only_2017_03_01_needs_no_header_and_prefixes_names() -> None:
    """Its published samples POST without the header; both ended with 2017-08-01."""
    assert [version.name for version in VERSIONS if not version.requires_header] == ["2017-03-01"]
    assert [version.name for version in VERSIONS if version.prefixes_names] == ["2017-03-01"]


def test_invalid_version_error_lists_the_three_newest() -> None:
    """MSAL and Ohai call without api-version and read `newest-versions` from this very body."""
    assert (
        bad_version_body([*BY_NAME])
        == b'{"error":"Bad request. api-version is invalid or was not specified in the request. For'
        b" more information refer to"
        b' aka.ms/azureimds","newest-versions":["2020-07-01","2019-08-01","2019-04-01"]}'
    )


def test_invalid_instance_version_error_lists_instance_versions() -> None:
    """The two endpoints have different lists: 2020-07-01 is no version of the instance endpoint."""
    result = json.loads(bad_version_body(INSTANCE_VERSIONS))

    assert list(result) == ["error", "newest-versions"]
    assert result["newest-versions"] == ["2025-04-07", "2024-07-17", "2024-03-15"]
    assert "2020-07-01" not in INSTANCE_VERSIONS


def test_instance_versions_are_the_35_published_ones_sorted() -> None:
    """`/metadata/versions` lists them ascending, and the per-version members compare names."""
    assert len(INSTANCE_VERSIONS) == len(set(INSTANCE_VERSIONS)) == 35
    assert list(INSTANCE_VERSIONS) == sorted(INSTANCE_VERSIONS)
    assert {"2019-06-01", "2019-08-01", "2021-02-01", "2021-05-01", "2021-12-13"} <= set(
        INSTANCE_VERSIONS
    )


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("2021-12-13", "2020-07-01"),
        ("2020-07-01", "2020-07-01"),
        ("2020-06-30", "2019-08-01"),
        ("2017-03-02", "2017-03-01"),
    ],
)
def test_lenient_mode_serves_the_newest_version_before_a_date(asked: str, served: str) -> None:
    """An installer in the field sends 2021-12-13 here, because it is an instance version."""
    assert find_lenient(asked) is BY_NAME[served]


@pytest.mark.parametrize(
    "asked",
    ["2017-02-28", "latest", "{latest}", "", "2020-07-01 ", "2020-07", "20200701", "9999-99-99x"],
)
def test_lenient_mode_refuses_early_dates_and_non_dates(
    asked: str,
) -> None:
    """`{latest}` was withdrawn in 2017, and what is older than the first version has no meaning."""
    assert find_lenient(asked) is None
