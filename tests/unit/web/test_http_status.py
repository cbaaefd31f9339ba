"""The table of statuses and the two forms of an error."""

import json
from datetime import timedelta

import pytest

from forewarn import errors
from forewarn.web import http_status as problems
from forewarn.web.http_status import METADATA_STATUS, STATUS, control_body, metadata_body, status_of


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (errors.Invalid, 400),
        (errors.Forbidden, 403),
        (errors.UnknownVm, 404),
        (errors.UnknownEvent, 404),
        (errors.EventEnded, 404),
        (errors.NoticeTooShort, 409),
        (errors.AlreadyPending, 409),
        (errors.StoreLost, 503),
        (errors.Error, 500),
    ],
)
def test_an_operator_gets_the_status_of_the_nearest_class_in_the_table(
    problem: type[errors.Error], status: int
) -> None:
    assert status_of(problem) == status
    assert status_of(problem("text")) == status


@pytest.mark.parametrize("problem", [errors.UnknownEvent, errors.EventEnded])
def test_to_a_vm_an_event_that_it_cannot_approve_is_a_bad_request(
    problem: type[errors.Error],
) -> None:
    """The protocol knows 200 and 400 for a POST; a 404 would say that the endpoint is not there."""
    assert status_of(problem, METADATA_STATUS) == 400


def test_every_problem_of_the_tree_has_a_status() -> None:
    """A problem without one would be answered by a crash."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.Error)
    ]
    assert len(kinds) > 15
    assert all(400 <= status_of(kind) < 600 for kind in kinds)


def test_statuses_stand_in_one_table_only() -> None:
    assert all(
        METADATA_STATUS[kind] == status
        for kind, status in STATUS.items()
        if kind is not errors.EventEnded
    )


def test_a_vm_gets_the_message_alone() -> None:
    """Clients of the protocol read the member `error` and show it."""
    assert metadata_body(errors.Invalid('a "b"', vm="web-0")) == b'{"error":"a \\"b\\""}'


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")],
)
def test_a_vm_never_reads_the_message_of_a_failure_inside_the_service(
    kind: type[errors.Error],
) -> None:
    """It may name files, hosts or commands of the server.

    What a VM did wrong itself is told to it.
    """
    is_ours = status_of(kind, METADATA_STATUS) >= 500

    assert (b"/var/lib" not in metadata_body(kind("/var/lib/forewarn"))) == is_ours


@pytest.mark.parametrize("kind", [problems.TooManyConnections, problems.WrongHttpVersion])
def test_a_vm_reads_what_its_connection_was_refused_for(kind: type[errors.Error]) -> None:
    """These are about the connection alone, and whoever debugs a client needs them."""
    assert metadata_body(kind("too many")) == b'{"error":"too many"}'


def test_an_operator_gets_code_message_and_facts() -> None:
    problem = errors.NoticeTooShort("too soon", notice=timedelta(minutes=1), vm="web-0")
    told = json.loads(control_body(problem))
    assert told["error"] == "notice_too_short"
    assert told["message"] == "too soon"
    assert told["facts"]["vm"] == "web-0"
    assert told["facts"]["notice"] == "PT60S"


def test_no_code_stands_for_two_things() -> None:
    kinds = [
        kind
        for module in (errors, problems)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, errors.Error)
    ]
    codes = {kind: kind.code for kind in kinds}
    assert len(set(codes.values())) == len(codes)
