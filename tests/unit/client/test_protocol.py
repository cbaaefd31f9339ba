"""What a guest asks, and what it makes of the answers."""

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


def answer(status: int = 200, body: bytes = b"", **headers: str) -> Response:
    return Response(
        status,
        {name.replace("_", "-"): value for name, value in headers.items()},
        body,
        is_last=False,
    )


def test_a_document_is_asked_for_with_the_header_and_the_version() -> None:
    """Without them the endpoint refuses."""
    lines = api().document().data.decode().split("\r\n")

    assert lines[0] == "GET /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1"
    assert {"Host: host", "Metadata: true"} <= set(lines)


def test_an_odd_version_cannot_break_the_request() -> None:
    odd = Api("http://host", api_version="1\r\nX: y&z", instance_version="x")

    assert odd.document().data.startswith(
        b"GET /metadata/scheduledevents?api-version=1%0D%0AX%3A%20y%26z HTTP/1.1\r\n"
    )


def test_a_wait_names_what_is_known_and_how_long() -> None:
    question = api().wait(30, KNOWN)

    assert b'\r\nIf-None-Match: "7"\r\nPrefer: wait=30\r\n' in question.data
    assert question.wait_seconds == 30


def test_a_wait_of_less_than_a_second_is_a_look() -> None:
    """The header counts in whole seconds."""
    assert b"Prefer" not in api().wait(0.9, KNOWN).data
    assert b"If-None-Match" in api().wait(0.9, KNOWN).data


@pytest.mark.parametrize("known", [None, Document(7, ())])
def test_a_wait_without_anything_to_compare_is_a_look(known: Document | None) -> None:
    assert api().wait(30, known).data == api().document().data
    assert api().wait(30, known).wait_seconds == 0


def test_unchanged_means_the_document_that_was_named() -> None:
    assert api().wait(30, KNOWN).read(answer(304)) is KNOWN


def test_unchanged_without_a_condition_is_no_answer_to_it() -> None:
    with pytest.raises(InvalidResponse, match="304"):
        api().document().read(answer(304))


def test_a_document_is_known_for_a_minute_from_when_it_was_read() -> None:
    """That it is unchanged is not a new reading."""
    times = [0.0, CACHE_SECONDS_MAX - 1, CACHE_SECONDS_MAX]
    known = ConditionalCache(lambda: times.pop(0))

    assert known.put(KNOWN) is KNOWN
    known.put(KNOWN)
    assert known.document is KNOWN
    assert known.document is None


def test_a_document_that_was_forgotten_is_not_known() -> None:
    known = ConditionalCache(lambda: 0.0)
    known.put(KNOWN)
    known.clear()

    assert known.document is None


@pytest.mark.parametrize("etag", ["", "a b", '"7"\x01', "x" * 201])
def test_a_tag_that_cannot_be_sent_back_is_not_kept(etag: str) -> None:
    assert api().document().read(answer(body=EMPTY, etag=etag)) == Document(7, ())


def test_a_document_is_read_whatever_its_content_type() -> None:
    """Some endpoints send it as text."""
    assert api().document().read(answer(body=EMPTY, etag='"7"', content_type="text/plain")) == KNOWN


def test_a_page_that_is_no_document_is_shown_with_its_content_type() -> None:
    with pytest.raises(InvalidDocument, match=r"text/html.*<html>"):
        api().document().read(answer(body=b"<html>", content_type="text/html"))


def test_an_approval_is_a_list_of_start_requests() -> None:
    question = api().approval(["A", "B"])

    assert question.data.startswith(
        b"POST /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1\r\n"
    )
    assert question.data.endswith(
        b'\r\n\r\n{"StartRequests": [{"EventId": "A"}, {"EventId": "B"}]}'
    )
    assert not question.is_repeatable


@pytest.mark.parametrize("event_ids", [(), ("",), ("A", "")])
def test_an_approval_of_nothing_is_refused_here(event_ids: tuple[str, ...]) -> None:
    with pytest.raises(Invalid, match="event_ids"):
        api().approval(event_ids)


@pytest.mark.parametrize("reply", [answer(), answer(body=b"{}"), answer(202), answer(204)])
def test_any_success_is_the_success_of_an_approval(reply: Response) -> None:
    """What the body holds is said nowhere, and differs."""
    one = api()
    one.approval(["a", "B"]).read(reply)

    assert list(one.approved) == ["A", "B"]


def test_an_approval_that_was_refused_is_not_remembered() -> None:
    one = api()
    with pytest.raises(HttpError):
        one.approval(["A"]).read(answer(400))

    assert list(one.approved) == []


def test_only_so_many_approvals_are_remembered() -> None:
    one = api()
    one.approval([f"E{number}" for number in range(APPROVED_MAX + 5)]).read(answer())

    assert len(one.approved) == APPROVED_MAX
    assert "E4" not in one.approved
    assert "E5" in one.approved


@pytest.mark.parametrize("status", [404, 408, 410, 429, 500, 502, 503, 599])
def test_a_status_that_passes_says_try_later(status: int) -> None:
    with pytest.raises(RetryableError) as caught:
        api().document().read(answer(status))
    assert caught.value.status == status


@pytest.mark.parametrize("status", [400, 401, 403, 405, 421])
def test_any_other_error_is_a_refusal_with_the_words_of_the_endpoint(status: int) -> None:
    """`Required metadata header not specified` says more than `400`."""
    with pytest.raises(HttpError, match=f"{status}: 'Bad request. Who") as caught:
        api().document().read(answer(status, b'{"error":"Bad request. Who\\nare you"}'))
    assert not isinstance(caught.value, RetryableError)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_named(status: int) -> None:
    """Following it would ask a stranger what is about to happen to us."""
    with pytest.raises(RedirectRefused, match=r"http://elsewhere/"):
        api().document().read(answer(status, location="http://elsewhere/"))


@pytest.mark.parametrize("status", [201, 204, 206])
def test_a_document_comes_with_a_200_and_nothing_else(status: int) -> None:
    with pytest.raises(InvalidResponse, match=str(status)):
        api().document().read(answer(status, EMPTY))


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
def test_when_to_come_back_is_read_in_seconds_or_as_a_date(
    headers: dict[str, str], seconds: float | None
) -> None:
    """A date is held against the server's own clock."""
    with pytest.raises(RetryableError) as caught:
        api().document().read(answer(429, b"", **headers))
    assert caught.value.retry_after_seconds == seconds


def test_the_name_of_a_vm_is_the_one_that_resources_use() -> None:
    """The hostname of a scale set's VM is another."""
    assert (
        vm_name({"compute": {"name": "set_4", "osProfile": {"computerName": "set000004"}}})
        == "set_4"
    )


@pytest.mark.parametrize(
    "instance",
    [{}, {"compute": None}, {"compute": {}}, {"compute": {"name": ""}}, {"compute": {"name": 5}}],
)
def test_an_instance_without_a_name_is_a_problem(instance: dict[str, Any]) -> None:
    """No name would concern nobody, and no event would be ours."""
    with pytest.raises(InvalidResponse, match=r"compute\.name"):
        vm_name(instance)


@pytest.mark.parametrize("body", [b"", b"[]", b"web-0", b'"web-0"'])
def test_an_instance_that_is_no_object_is_a_problem(body: bytes) -> None:
    with pytest.raises(InvalidResponse):
        api().instance().read(answer(body=body))
