"""Requests of a guest, and how their responses are read."""

import math
from typing import Any

import pytest

from forewarn.client import (
    Document,
    HttpError,
    InvalidDocument,
    InvalidResponse,
    RedirectRefused,
    RetryableError,
)
from forewarn.client.http1 import Response
from forewarn.client.protocol import APPROVED_MAX, CACHE_SECONDS_MAX, Api, ConditionalCache, vm_name
from forewarn.errors import Invalid

EMPTY = b'{"DocumentIncarnation":7,"Events":[]}'
KNOWN = Document(7, (), '"7"')


def api() -> Api:
    return Api("http://host", api_version="2020-07-01", instance_version="2021-02-01")


def response(status: int = 200, body: bytes = b"", **headers: str) -> Response:
    return Response(
        status,
        {name.replace("_", "-"): value for name, value in headers.items()},
        body,
        is_last=False,
    )


def test_document_request_has_the_header_and_the_version() -> None:
    """The endpoint rejects a request without them."""
    lines = api().document().data.decode().split("\r\n")

    assert lines[0] == "GET /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1"
    assert {"Host: host", "Metadata: true"} <= set(lines)


def test_version_cannot_inject_into_the_request() -> None:
    odd = Api("http://host", api_version="1\r\nX: y&z", instance_version="x")

    assert odd.document().data.startswith(
        b"GET /metadata/scheduledevents?api-version=1%0D%0AX%3A%20y%26z HTTP/1.1\r\n"
    )


def test_wait_sends_the_known_etag_and_the_duration() -> None:
    request = api().wait(30, KNOWN)

    assert b'\r\nIf-None-Match: "7"\r\nPrefer: wait=30\r\n' in request.data
    assert request.wait_seconds == 30


def test_wait_without_an_end_takes_an_hour_at_most() -> None:
    request = api().wait(math.inf, KNOWN)

    assert b"\r\nPrefer: wait=3600\r\n" in request.data
    assert request.wait_seconds == 3600


def test_wait_for_no_number_is_rejected() -> None:
    with pytest.raises(Invalid, match="timeout_seconds is nan; expected a number"):
        api().wait(math.nan, KNOWN)


def test_wait_of_less_than_a_second_is_a_plain_poll() -> None:
    """The header counts in whole seconds."""
    assert b"Prefer" not in api().wait(0.9, KNOWN).data
    assert b"If-None-Match" in api().wait(0.9, KNOWN).data


@pytest.mark.parametrize("known", [None, Document(7, ())])
def test_wait_without_a_known_etag_is_a_plain_poll(known: Document | None) -> None:
    assert api().wait(30, known).data == api().document().data
    assert api().wait(30, known).wait_seconds == 0


def test_304_returns_the_known_document() -> None:
    assert api().wait(30, KNOWN).read(response(304)) is KNOWN


def test_304_to_an_unconditional_request_is_an_error() -> None:
    with pytest.raises(InvalidResponse, match="304"):
        api().document().read(response(304))


def test_document_is_cached_for_a_minute() -> None:
    """A 304 does not extend that."""
    times = [0.0, CACHE_SECONDS_MAX - 1, CACHE_SECONDS_MAX]
    known = ConditionalCache(lambda: times.pop(0))

    assert known.put(KNOWN) is KNOWN
    known.put(KNOWN)
    assert known.document is KNOWN
    assert known.document is None


def test_cache_can_be_cleared() -> None:
    known = ConditionalCache(lambda: 0.0)
    known.put(KNOWN)
    known.clear()

    assert known.document is None


@pytest.mark.parametrize("etag", ["", "a b", '"7"\x01', "x" * 201])
def test_invalid_etag_is_dropped(etag: str) -> None:
    assert api().document().read(response(body=EMPTY, etag=etag)) == Document(7, ())


def test_document_is_read_with_any_content_type() -> None:
    """Some endpoints send it as text."""
    assert (
        api().document().read(response(body=EMPTY, etag='"7"', content_type="text/plain")) == KNOWN
    )


def test_invalid_document_error_has_the_content_type() -> None:
    with pytest.raises(InvalidDocument, match=r"text/html.*<html>"):
        api().document().read(response(body=b"<html>", content_type="text/html"))


def test_approval_is_a_list_of_start_requests() -> None:
    request = api().approval(["A", "B"])

    assert request.data.startswith(
        b"POST /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1\r\n"
    )
    assert request.data.endswith(b'\r\n\r\n{"StartRequests": [{"EventId": "A"}, {"EventId": "B"}]}')
    assert not request.is_repeatable


@pytest.mark.parametrize("event_ids", [(), ("",), ("A", "")])
def test_empty_approval_is_rejected_without_a_request(event_ids: tuple[str, ...]) -> None:
    with pytest.raises(Invalid, match="event_ids"):
        api().approval(event_ids)


@pytest.mark.parametrize("reply", [response(), response(body=b"{}"), response(202), response(204)])
def test_any_2xx_is_a_successful_approval(reply: Response) -> None:
    """The body is undocumented, and differs."""
    client_api = api()
    client_api.approval(["a", "B"]).read(reply)

    assert list(client_api.approved) == ["A", "B"]


def test_rejected_approval_is_not_remembered() -> None:
    client_api = api()
    with pytest.raises(HttpError):
        client_api.approval(["A"]).read(response(400))

    assert list(client_api.approved) == []


def test_remembered_approvals_have_a_limit() -> None:
    client_api = api()
    client_api.approval([f"E{number}" for number in range(APPROVED_MAX + 5)]).read(response())

    assert len(client_api.approved) == APPROVED_MAX
    assert "E4" not in client_api.approved
    assert "E5" in client_api.approved


@pytest.mark.parametrize("status", [404, 408, 410, 429, 500, 502, 503, 599])
def test_temporary_status_is_retryable(status: int) -> None:
    with pytest.raises(RetryableError) as caught:
        api().document().read(response(status))
    assert caught.value.status == status


@pytest.mark.parametrize("status", [400, 401, 403, 405, 421])
def test_other_error_has_the_message_of_the_endpoint(status: int) -> None:
    """`Required metadata header not specified` says more than `400`."""
    with pytest.raises(HttpError, match=f"{status}: 'Bad request. Who") as caught:
        api().document().read(response(status, b'{"error":"Bad request. Who\\nare you"}'))
    assert not isinstance(caught.value, RetryableError)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_refused(status: int) -> None:
    """Its target is not the endpoint, and must not get our requests."""
    with pytest.raises(RedirectRefused, match=r"http://elsewhere/"):
        api().document().read(response(status, location="http://elsewhere/"))


@pytest.mark.parametrize("status", [201, 204, 206])
def test_document_needs_a_200(status: int) -> None:
    with pytest.raises(InvalidResponse, match=str(status)):
        api().document().read(response(status, EMPTY))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry_after": "7"}, 7),
        ({"retry_after": "0"}, 0),
        ({"retry_after": "9" * 5000}, 999_999_999),
        ({"retry_after": "-1"}, None),
        ({"retry_after": "soon"}, None),
        (
            {
                "retry_after": "Mon, 17 Apr 2017 18:40:36 GMT",
                "date": "Mon, 17 Apr 2017 18:40:06 GMT",
            },
            30,
        ),
        (
            {
                "retry_after": "Mon, 17 Apr 2017 18:40:00 GMT",
                "date": "Mon, 17 Apr 2017 18:40:06 GMT",
            },
            0,
        ),
        ({"retry_after": "Mon, 17 Apr 2017 18:40:36 GMT"}, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(headers: dict[str, str], seconds: float | None) -> None:
    """A date is relative to the server's own clock."""
    with pytest.raises(RetryableError) as caught:
        api().document().read(response(429, b"", **headers))
    assert caught.value.retry_after_seconds == seconds


def test_vm_name_is_the_one_in_resources() -> None:
    """The hostname of a VM in a scale set differs."""
    assert (
        vm_name({"compute": {"name": "set_4", "osProfile": {"computerName": "set000004"}}})
        == "set_4"
    )


@pytest.mark.parametrize(
    "instance",
    [{}, {"compute": None}, {"compute": {}}, {"compute": {"name": ""}}, {"compute": {"name": 5}}],
)
def test_instance_without_a_name_is_an_error(instance: dict[str, Any]) -> None:
    """Without a name no event would concern this VM."""
    with pytest.raises(InvalidResponse, match=r"compute\.name"):
        vm_name(instance)


@pytest.mark.parametrize("body", [b"", b"[]", b"web-0", b'"web-0"'])
def test_instance_that_is_not_an_object_is_an_error(body: bytes) -> None:
    with pytest.raises(InvalidResponse):
        api().instance().read(response(body=body))
