"""The rules about a request's parts, one at a time."""

import json

import pytest

from forewarn.config import Config
from forewarn.errors import Invalid, NotFound
from forewarn.web.http.message import join_headers
from forewarn.web.metadata.request import (
    BodyError,
    MetadataRequest,
    events_version,
    instance_version,
    normalize,
    parse_query,
    split,
    wait_seconds,
)
from tests.cpu_growth import LINEAR_MAX, growth

TRUE = {b"metadata": b"true"}
EVENTS = "/metadata/scheduledevents"


def make_request(
    query: str = "api-version=2020-07-01",
    headers: dict[bytes, bytes] | None = None,
    path: str = EVENTS,
) -> MetadataRequest:
    return MetadataRequest(
        "GET", "", path, query.encode(), TRUE if headers is None else headers, "10.0.0.1"
    )


@pytest.mark.parametrize(
    "path", ["/metadata/scheduledevents", "/metadata/scheduledEvents", "/METADATA/scheduledevents/"]
)
def test_paths_ignore_case_and_one_trailing_slash(path: str) -> None:
    """A published C# sample writes `scheduledEvents`."""
    assert normalize(path) == "/metadata/scheduledevents"


def test_only_one_trailing_slash_is_ignored() -> None:
    assert normalize("/metadata/scheduledevents//") == "/metadata/scheduledevents/"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/as/web-0/metadata/versions", ("web-0", "/metadata/versions")),
        ("/AS/Web-0/metadata", ("Web-0", "/metadata")),
        ("/as/web-0", ("web-0", "")),
        ("/as//metadata", ("", "/metadata")),
        ("/metadata/as/x", ("", "/metadata/as/x")),
        ("/assets/x", ("", "/assets/x")),
    ],
)
def test_path_can_name_the_vm(path: str, parts: tuple[str, str]) -> None:
    assert split(path) == parts


def test_query_is_decoded() -> None:
    assert parse_query(b"api%2Dversion=2020%2D07-01&Format=text&empty=") == {
        "api-version": "2020-07-01",
        "format": "text",
        "empty": "",
    }


@pytest.mark.parametrize(
    "query", [b"api-version=1&api-version=1", b"a=1&A=2", b"a=1&%61=2", b"&".join([b"a=1"] * 101)]
)
def test_duplicate_query_parameter_is_rejected(query: bytes) -> None:
    """The protocol rejects it: which of the two would have counted?"""
    with pytest.raises(Invalid):
        parse_query(query)


def test_repeated_headers_are_joined() -> None:
    assert join_headers([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]) == {b"a": b"1, 3", b"b": b"2"}


def test_joining_equal_headers_takes_time_linear_in_their_number() -> None:
    """Headers are joined before the client is known."""
    assert growth(lambda size: join_headers([(b"a", b"b" * 20)] * size), 5_000) < LINEAR_MAX


@pytest.mark.parametrize("value", [b"true", b"True", b"TRUE", b"true "])
def test_metadata_header_is_case_insensitive(value: bytes) -> None:
    """The documents print `Metadata:True` in one of their examples; the parser leaves spaces at the
    end.
    """
    assert events_version(make_request(headers={b"metadata": value}), Config()).name == "2020-07-01"


@pytest.mark.parametrize(
    "headers", [{}, {b"metadata": b""}, {b"metadata": b"1"}, {b"metadata": b"true, false"}]
)
def test_missing_metadata_header_is_rejected(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Invalid, match="Required metadata header not specified"):
        events_version(make_request(headers=headers), Config())


def test_first_version_needs_no_metadata_header() -> None:
    """Its own published samples send none."""
    assert events_version(make_request("api-version=2017-03-01", {}), Config()).name == "2017-03-01"


def test_missing_header_is_reported_before_the_version() -> None:
    """As on Azure: a client that looks for versions sends the header."""
    with pytest.raises(Invalid, match="Required metadata header"):
        events_version(make_request("", {}), Config())


@pytest.mark.parametrize(
    "query",
    [
        "",
        "api-version=",
        "api-version=latest",
        "api-version={latest}",
        "api-version=2021-13-01",
        "api-version=20211213",
        "api-version=2021-W50-1",
    ],
)
def test_missing_version_error_lists_the_newest(query: str) -> None:
    """Several clients call without one on purpose and read `newest-versions`."""
    with pytest.raises(BodyError) as refused:
        events_version(make_request(query), Config())
    assert json.loads(refused.value.body)["newest-versions"] == [
        "2020-07-01",
        "2019-08-01",
        "2019-04-01",
    ]


@pytest.mark.parametrize("date", ["2024-07-09", "2021-12-13", "2016-01-01"])
def test_date_that_is_not_a_version_is_not_found(date: str) -> None:
    """OpenShift's termination handler asks for 2024-07-09 first, and accepts only 200 or 404."""
    with pytest.raises(NotFound, match=r"^Not found\. Invalid version requested$"):
        events_version(make_request(f"api-version={date}"), Config())


def test_missing_header_is_reported_before_an_unknown_date() -> None:
    with pytest.raises(Invalid, match="Required metadata header"):
        events_version(make_request("api-version=2024-07-09", {}), Config())


def test_lenient_mode_serves_the_version_before_a_date() -> None:
    assert (
        events_version(make_request("api-version=2021-12-13"), Config(lenient_versions=True)).name
        == "2020-07-01"
    )
    with pytest.raises(BodyError):
        events_version(make_request("api-version=latest"), Config(lenient_versions=True))


def test_legacy_path_means_the_first_version() -> None:
    request = make_request("", {}, "/metadata/latest/scheduledevents")
    assert events_version(request, Config(legacy_path=True)).name == "2017-03-01"


def test_instance_has_its_own_versions() -> None:
    """2021-02-01 is an instance version and no Scheduled Events version;

    2020-07-01 is the other way round.
    """
    assert instance_version(make_request(), {"api-version": "2021-02-01"}) == "2021-02-01"
    with pytest.raises(BodyError) as refused:
        instance_version(make_request(), {"api-version": "2020-07-01"})
    assert json.loads(refused.value.body)["newest-versions"] == [
        "2025-04-07",
        "2024-07-17",
        "2024-03-15",
    ]


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        (b"wait=30", 30),
        (b"Wait = 5", 5),
        (b'wait="7"', 7),
        (b"respond-async, wait=10", 10),
        (b"wait=10; x=y", 10),
        (b"wait=10, wait=20", 10),
        (b"wait=600", 60),
        (b"wait=0", 0),
        (b"wait", 0),
        (b"wait=-1", 0),
        (b"wait=1.5", 0),
        (b"wait=soon", 0),
        (b"wait=1234567890", 0),
        (b"await=3", 0),
        (b"", 0),
    ],
)
def test_prefer_wait_follows_rfc_7240(prefer: bytes, seconds: int) -> None:
    """A malformed preference is ignored: the response comes at once, as on Azure."""
    assert (
        wait_seconds(make_request(headers={b"prefer": prefer}), Config(wait_seconds_max=60))
        == seconds
    )
