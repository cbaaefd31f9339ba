"""The table of statuses and the two forms of an error."""

import json
from datetime import timedelta

import pytest

from forewarn import errors
from forewarn.web import http_status as problems
from forewarn.web.http_status import METADATA_STATUS, STATUS, control_body, metadata_body, status_of


@pytest.mark.parametrize(
    ("error", "status"),
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
def test_status_is_that_of_the_nearest_class(error: type[errors.Error], status: int) -> None:
    assert status_of(error) == status
    assert status_of(error("text")) == status


@pytest.mark.parametrize("error", [errors.UnknownEvent, errors.EventEnded])
def test_unknown_event_is_a_400_for_a_vm(
    error: type[errors.Error],
) -> None:
    """The protocol knows 200 and 400 for a POST; a 404 would say that the endpoint is not there."""
    assert status_of(error, METADATA_STATUS) == 400


def test_every_error_has_a_status() -> None:
    """An error without one would be a crash."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.Error)
    ]
    assert len(kinds) > 15
    assert all(400 <= status_of(kind) < 600 for kind in kinds)


def test_metadata_statuses_differ_only_for_events() -> None:
    assert all(
        METADATA_STATUS[kind] == status
        for kind, status in STATUS.items()
        if kind is not errors.EventEnded
    )


def test_metadata_error_has_the_message_only() -> None:
    """Clients of the protocol read the member `error` and show it."""
    assert metadata_body(errors.Invalid('a "b"', vm="web-0")) == b'{"error":"a \\"b\\""}'


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")],
)
def test_internal_messages_are_not_shown_to_vms(
    kind: type[errors.Error],
) -> None:
    """It may name files, hosts or commands of the server.

    Errors of the VM itself are shown to it.
    """
    is_ours = status_of(kind, METADATA_STATUS) >= 500

    assert (b"/var/lib" not in metadata_body(kind("/var/lib/forewarn"))) == is_ours


@pytest.mark.parametrize("kind", [problems.TooManyConnections, problems.WrongHttpVersion])
def test_connection_errors_are_shown_to_vms(kind: type[errors.Error]) -> None:
    """These are about the connection alone, and are needed to debug a client."""
    assert metadata_body(kind("too many")) == b'{"error":"too many"}'


def test_control_error_has_code_message_and_facts() -> None:
    error = errors.NoticeTooShort("too soon", notice=timedelta(minutes=1), vm="web-0")
    body = json.loads(control_body(error))
    assert body["error"] == "notice_too_short"
    assert body["message"] == "too soon"
    assert body["facts"]["vm"] == "web-0"
    assert body["facts"]["notice"] == "PT60S"


def test_error_codes_are_unique() -> None:
    kinds = [
        kind
        for module in (errors, problems)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, errors.Error)
    ]
    codes = {kind: kind.code for kind in kinds}
    assert len(set(codes.values())) == len(codes)
