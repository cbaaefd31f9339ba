"""Verdicts: what passes, what fails and with which message, and what is not run."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from forewarn.client.http1 import Endpoint
from forewarn.conformance.check import VALUE_LENGTH_MAX, Failed, expect_equal, fail
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.run import Result, Verdict, run
from forewarn.errors import Unavailable
from tests.unit.conformance.scripted_endpoint import reading_session, serving

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 37\r\n\r\n"
EMPTY = HEAD + b'{"DocumentIncarnation":1,"Events":[]}'
CUT_OFF = HEAD + b'{"DocumentIncarnation":1,"Events":[1]'
TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


def run_check(name: str, *responses: bytes) -> Result:
    with serving(*responses) as endpoint:
        (result,) = run(reading_session(endpoint), [CHECKS[name]])
    return result


def test_endpoint_that_follows_a_rule_passes() -> None:
    result = run_check("document-incarnation-is-at-least-1", EMPTY)

    assert (result.verdict, result.detail) == (Verdict.PASSED, "")


def test_failure_has_what_was_expected_and_what_came() -> None:
    result = run_check("document-incarnation-is-at-least-1", EMPTY.replace(b":1,", b":0,"))
    expected = "expected a DocumentIncarnation of at least 1; got 0"
    not_an_integer = EMPTY.replace(b":1,", b":[],")

    assert (result.verdict, result.detail) == (Verdict.FAILED, expected)
    assert not result.fails_run()
    assert run_check("document-incarnation-is-an-integer", not_an_integer).fails_run()


def test_missing_member_is_named() -> None:
    empty = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    result = run_check("document-incarnation-is-at-least-1", empty)

    assert result.detail == "expected a member 'DocumentIncarnation'; got {}"


def test_invalid_json_fails_the_check() -> None:
    result = run_check("document-is-a-json-object", CUT_OFF)
    expected = "expected a body that is JSON in UTF-8; got status 200 with the body b'{"

    assert result.verdict is Verdict.FAILED
    assert result.detail.startswith(expected)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("event-id-is-a-guid", "an event in the document, or `--control` to create one"),
        ("approval-of-nothing-is-400", "`--approve`, to send a POST"),
        ("events-may-overlap", "`--control`, to create an event"),
        ("scope-unknown-vm-is-403", "`--as`, to call as a VM"),
        (
            "scope-shares-one-document",
            "a second `--as` of the same scope, and `--control` to know the scopes",
        ),
    ],
)
def test_check_with_an_unmet_need_is_not_run(name: str, reason: str) -> None:
    """Never passed: a green line must mean that the rule was checked."""
    result = run_check(name, *([EMPTY] if name == "event-id-is-a-guid" else []))

    assert result.verdict is Verdict.NOT_RUN
    assert result.detail == f"needs {reason}"


class HostOfOthers:
    """A control API in which maintenance of the host has no event of our VM."""

    def get(self, *path: str) -> Any:
        return {"host": "host-a", "scope": "web", "seen_at": "2030-01-31T12:00:00Z"}

    def post(self, *path: str, body: Mapping[str, object] | None = None) -> Any:
        return {"events": []}


def test_check_is_not_run_if_maintenance_has_no_event_of_the_vm() -> None:
    """As for a VM that has just moved. The other checks still run."""
    with serving(EMPTY, EMPTY) as endpoint:
        session = replace(reading_session(endpoint, "web-0"), control_api=HostOfOthers())
        checks = ("freeze-has-a-duration", "document-incarnation-is-at-least-1")
        first, second = run(session, [CHECKS[name] for name in checks])

    assert (first.verdict, second.verdict) == (Verdict.NOT_RUN, Verdict.PASSED)
    assert first.detail == "the freeze has no event of web-0"


def test_unreadable_document_fails_checks_that_need_an_event() -> None:
    assert run_check("event-id-is-a-guid", CUT_OFF).verdict is Verdict.FAILED


def test_unreachable_endpoint_gives_no_verdicts() -> None:
    """The port is bound and does not listen, so no other program can get it."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], "")
        with pytest.raises(Unavailable, match="no endpoint at http"):
            reading_session(endpoint).reach()


def test_long_value_is_shortened_in_a_message() -> None:
    with pytest.raises(Failed, match=r"… \(10002 characters\)$") as caught:
        fail("less", "x" * 10_000)
    assert len(str(caught.value)) < VALUE_LENGTH_MAX + 100


@pytest.mark.parametrize(("actual", "wanted"), [(1.0, 1), (True, 1), ("1", 1), ([], ())])
def test_types_are_compared_too(actual: object, wanted: object) -> None:
    """A Go client decodes 1 into an int, and fails on 1.0."""
    with pytest.raises(Failed):
        expect_equal("the number", actual, wanted)


def test_first_429_is_retried() -> None:
    """The endpoint allows five requests a second; being sixth does not break the rule."""
    check = "http-1-0-is-supported-and-closed"

    assert run_check(check, TOO_MANY, EMPTY).verdict is Verdict.PASSED
    assert run_check(check, TOO_MANY, TOO_MANY).verdict is Verdict.FAILED
