"""Verdicts: what passes, what fails and in which words, and what is not run."""

import pytest

from forewarn.conformance import checks as topic
from forewarn.conformance.check import CHECKS, SHOWN_MAX, fail, same
from forewarn.conformance.check import Failed as FailedCheck
from forewarn.conformance.raw_http import Endpoint
from forewarn.conformance.run import Result, Verdict, run
from forewarn.errors import Unavailable
from tests.unit.conformance.canned import saying, stage

EMPTY = b'HTTP/1.1 200 OK\r\nContent-Length: 37\r\n\r\n{"DocumentIncarnation":1,"Events":[]}'
NONSENSE = b'HTTP/1.1 200 OK\r\nContent-Length: 37\r\n\r\n{"DocumentIncarnation":1,"Events":[1]'
assert topic.TOPICS


def result(name: str, *answers: bytes) -> Result:
    with saying(*answers) as endpoint:
        (found,) = run(stage(endpoint), [CHECKS[name]])
    return found


def test_an_endpoint_that_keeps_a_rule_passes() -> None:
    found = result("document-number-is-at-least-1", EMPTY)

    assert (found.verdict, found.detail) == (Verdict.PASSED, "")


def test_a_failure_says_what_was_expected_and_what_came() -> None:
    found = result("document-number-is-at-least-1", EMPTY.replace(b":1,", b":0,"))

    assert (found.verdict, found.detail) == (
        Verdict.FAILED,
        "expected a DocumentIncarnation of at least 1; got 0",
    )
    assert not found.is_must_failed
    assert result("document-number-is-an-integer", EMPTY.replace(b":1,", b":[],")).is_must_failed


def test_a_missing_member_is_told_by_its_name() -> None:
    found = result(
        "document-number-is-at-least-1", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    )

    assert found.detail == "expected a member 'DocumentIncarnation'; got {}"


def test_json_that_is_cut_off_is_a_failure_and_no_bug_of_ours() -> None:
    found = result("document-is-a-json-object", NONSENSE)

    assert found.verdict is Verdict.FAILED
    assert found.detail.startswith(
        "expected a body that is JSON in UTF-8; got status 200 with the body b'{"
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("event-id-is-a-guid", "it needs an event in the document, or `--control` to make one"),
        ("approval-of-nothing-is-400", "it needs `--approve`, to send a POST"),
        ("events-overlap", "it needs `--control`, to make an event"),
        ("scope-of-nobody-is-403", "it needs `--as`, to call in the name of a VM"),
        (
            "scope-is-told-the-same",
            "it needs a second `--as` of the same scope, and `--control` to know the scopes",
        ),
    ],
)
def test_a_check_that_lacks_something_is_not_run_and_says_what(name: str, why: str) -> None:
    """Never passed: a green line must mean that somebody looked."""
    found = result(name, *([EMPTY] if name == "event-id-is-a-guid" else []))

    assert (found.verdict, found.detail) == (Verdict.NOT_RUN, f"not run, because {why}")


def test_a_document_that_cannot_be_read_fails_the_checks_that_need_an_event() -> None:
    assert result("event-id-is-a-guid", NONSENSE).verdict is Verdict.FAILED


def test_where_nothing_answers_there_is_no_verdict() -> None:
    with saying() as endpoint:
        gone = Endpoint(endpoint.host, endpoint.port)
    with pytest.raises(Unavailable, match="no endpoint answers at http"):
        stage(gone).reach()


def test_what_came_is_cut_where_it_is_long() -> None:
    with pytest.raises(FailedCheck, match=r"… \(10002 characters\)$") as caught:
        fail("less", "x" * 10_000)
    assert len(str(caught.value)) < SHOWN_MAX + 100


@pytest.mark.parametrize(("came", "wanted"), [(1.0, 1), ("1", 1), ([], ())])
def test_types_count(came: object, wanted: object) -> None:
    """A client in Go reads 1 into an int, and breaks on 1.0."""
    with pytest.raises(FailedCheck):
        same("the number", came, wanted)


TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


def test_a_first_429_on_a_connection_of_its_own_does_not_fail_the_check() -> None:
    """The endpoint takes five requests a second; that the check came sixth says nothing about the
    rule it looks at.
    """
    assert result("http-1-0-is-answered-and-closed", TOO_MANY, EMPTY).verdict is Verdict.PASSED
    assert result("http-1-0-is-answered-and-closed", TOO_MANY, TOO_MANY).verdict is Verdict.FAILED
