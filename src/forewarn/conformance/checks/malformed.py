"""Approvals that cannot be meant: refused, and nothing happens."""

from forewarn.conformance.check import Level, Need, check, holds
from forewarn.conformance.checks.path import status
from forewarn.conformance.checks.refusal import is_refusal
from forewarn.conformance.document import Entry
from forewarn.conformance.session import Stage, approval

MUST, SHOULD = Level.MUST, Level.SHOULD
UNKNOWN_ID = "00000000-0000-4000-8000-000000000000"
BAD_BODIES = (b"", b"{", b"{}", b"[]", b'{"StartRequests":null}', b'{"StartRequests":[{}]}')
D400 = "PROTOCOL 4: 400 for a malformed payload"


def are_refused(stage: Stage, *bodies: bytes) -> None:
    for body in bodies:
        status(stage.post(body), 400)


@check(MUST, D400, Need.APPROVE)
def approval_that_is_no_json_is_400(stage: Stage) -> None:
    """A quoting mistake in a shell script must show, not look like an approval."""
    are_refused(
        stage, b'{"StartRequests":[', b"EventId=4CAEA225-A741-474D-A72E-428C86FCD853", b"\xff\xfe"
    )


@check(MUST, D400, Need.APPROVE)
def approval_without_a_body_is_400(stage: Stage) -> None:
    """An empty variable in a script gives an empty body, which approves nothing."""
    are_refused(stage, b"")


@check(MUST, D400, Need.APPROVE)
def approval_that_is_no_object_is_400(stage: Stage) -> None:
    """A bare list of ids looks reasonable and is not the protocol."""
    are_refused(stage, b"[]", b'"4CAEA225-A741-474D-A72E-428C86FCD853"', b"null")


@check(MUST, D400, Need.APPROVE)
def approval_without_start_requests_is_400(stage: Stage) -> None:
    """A misspelt member would otherwise be ignored like any other, and approve nothing."""
    are_refused(stage, b"{}", b'{"startrequest":[]}')


@check(MUST, D400, Need.APPROVE)
def approval_whose_start_requests_are_no_list_is_400(stage: Stage) -> None:
    """PowerShell turns a list of one into a bare object: its user must learn so."""
    values = (b'{"EventId":"4CAEA225-A741-474D-A72E-428C86FCD853"}', b"null", b'"x"', b"1")
    are_refused(stage, *(b'{"StartRequests":%b}' % value for value in values))


@check(SHOULD, "PROTOCOL 4: an empty list, 400", Need.APPROVE)
def approval_of_nothing_is_400(stage: Stage) -> None:
    """Whoever approves nothing has lost an id on the way."""
    are_refused(stage, b'{"StartRequests":[]}')


@check(MUST, D400, Need.APPROVE)
def approval_of_an_entry_without_id_is_400(stage: Stage) -> None:
    """A misspelt EventId approves nothing."""
    entries = (b"{}", b'{"EventID":"4CAEA225-A741-474D-A72E-428C86FCD853"}', b"1", b'{"EventId":1}')
    are_refused(stage, *(b'{"StartRequests":[%b]}' % entry for entry in entries))


@check(SHOULD, "PROTOCOL 4 and 10: unknown id, 400", Need.APPROVE)
def approval_of_an_unknown_id_is_400(stage: Stage) -> None:
    """200 is for a valid id, say the documents; an approver must not believe that it said go ahead."""
    are_refused(stage, approval(UNKNOWN_ID))


@check(MUST, "PROTOCOL 1.3", Need.APPROVE)
def approval_without_version_is_400(stage: Stage) -> None:
    """The rule is the same for GET and POST."""
    for version in (None, "2016-01-01"):
        status(stage.post(approval(UNKNOWN_ID), version), 400)


@check(MUST, "PROTOCOL 4: 400 with an error", Need.APPROVE)
def approval_refused_has_an_error(stage: Stage) -> None:
    """Pacemaker's agent logs what the answer says."""
    is_refusal(stage.post(b"{"), 400)


@check(SHOULD, "PROTOCOL 10: all or nothing", Need.APPROVE)
def approval_refused_changes_nothing(stage: Stage) -> None:
    """A refused request is nobody's change."""
    before = stage.document()
    for body in (*BAD_BODIES, approval(UNKNOWN_ID)):
        stage.post(body)
    after = stage.document()
    holds(
        before.number == after.number or before.events != after.events,
        f"DocumentIncarnation {before.number} again",
        after,
    )


@check(SHOULD, "PROTOCOL 4: one bad id among good ones, 400", Need.APPROVE, Need.EVENT)
def approval_of_a_good_and_an_unknown_id_is_400(stage: Stage) -> None:
    """Half an approval is one that nobody can reason about."""
    are_refused(stage, approval(stage.to_approve(), UNKNOWN_ID))


@check(SHOULD, "PROTOCOL 4: reject the whole request", Need.APPROVE, Need.CONTROL)
def approval_of_a_good_and_an_unknown_id_approves_neither(stage: Stage) -> None:
    """All or nothing: the good one stays as it was."""
    event_id = stage.to_approve()
    stage.post(approval(event_id, UNKNOWN_ID))
    told, event = stage.told(event_id), stage.document().find(event_id) or Entry()
    is_untouched = not told["approvals"] and event.get("EventStatus") == "Scheduled"
    holds(
        is_untouched,
        "a Scheduled event without approvals",
        f"{event} approved by {told['approvals']}",
    )


@check(MUST, "PROTOCOL 6.5: a VM may approve events of its group", Need.APPROVE, Need.STRANGER)
def approval_by_another_scope_is_refused(stage: Stage) -> None:
    """A VM of somebody else must not start what is not its own."""
    event_id = stage.to_approve()
    answer = stage.post(approval(event_id), vm=stage.find_other(is_peer=False))
    holds(400 <= answer.status < 500, "a refusal (4xx)", answer)
    told = stage.told(event_id)["approvals"]
    holds(not told, "no approval", told)
