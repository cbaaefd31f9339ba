"""Approvals: which are rejected and change nothing, which are accepted, and with what effect.

Rejected ones come first: the checks after them share one approved event, so that a run impacts the
VM as little as possible.
"""

import json
from collections.abc import Mapping

from forewarn.conformance.check import MUST, SHOULD, Need, check, expect, expect_equal
from forewarn.conformance.checks.request import post_after_continue
from forewarn.conformance.raw_http import (
    RawResponse,
    expect_error,
    expect_rejected,
    expect_status,
)
from forewarn.conformance.session import METADATA, Session, approval
from forewarn.conformance.spec import NEWEST, OLDEST, VERSIONS, fields

UNKNOWN_ID = "00000000-0000-4000-8000-000000000000"
BAD_BODIES = (b"", b"{", b"{}", b"[]", b'{"StartRequests":null}', b'{"StartRequests":[{}]}')
D400 = "PROTOCOL 4: 400 for a malformed payload"
EVENT = (Need.APPROVE, Need.EVENT)


def _expect_400(session: Session, *bodies: bytes) -> None:
    for body in bodies:
        expect_status(session.post(body), 400)


@check(MUST, D400, Need.APPROVE)
def approval_not_json_is_400(session: Session) -> None:
    """A quoting mistake in a shell script must show, not look like an approval."""
    form = b"EventId=4CAEA225-A741-474D-A72E-428C86FCD853"
    _expect_400(session, b'{"StartRequests":[', form, b"\xff\xfe")


@check(MUST, D400, Need.APPROVE)
def approval_without_a_body_is_400(session: Session) -> None:
    """An empty variable in a script gives an empty body, which approves nothing."""
    _expect_400(session, b"")


@check(MUST, D400, Need.APPROVE)
def approval_not_an_object_is_400(session: Session) -> None:
    """A plain list of ids looks reasonable and is not the protocol."""
    _expect_400(session, b"[]", b'"4CAEA225-A741-474D-A72E-428C86FCD853"', b"null")


@check(MUST, D400, Need.APPROVE)
def approval_without_start_requests_is_400(session: Session) -> None:
    """A misspelt member would otherwise be ignored like any other, and approve nothing."""
    _expect_400(session, b"{}", b'{"startrequest":[]}')


@check(MUST, D400, Need.APPROVE)
def approval_start_requests_not_a_list_is_400(session: Session) -> None:
    """PowerShell turns a list of one into a plain object: its user must learn so."""
    values = (b'{"EventId":"4CAEA225-A741-474D-A72E-428C86FCD853"}', b"null", b'"x"', b"1")
    _expect_400(session, *(b'{"StartRequests":%b}' % value for value in values))


@check(SHOULD, "PROTOCOL 4: an empty list, 400", Need.APPROVE)
def approval_of_nothing_is_400(session: Session) -> None:
    """A client that approves nothing has lost an id."""
    _expect_400(session, b'{"StartRequests":[]}')


@check(MUST, D400, Need.APPROVE)
def approval_of_an_entry_without_id_is_400(session: Session) -> None:
    """A misspelt EventId approves nothing."""
    entries = (b"{}", b'{"EventID":"4CAEA225-A741-474D-A72E-428C86FCD853"}', b"1", b'{"EventId":1}')
    _expect_400(session, *(b'{"StartRequests":[%b]}' % entry for entry in entries))


@check(SHOULD, "PROTOCOL 4 and 10: unknown id, 400", Need.APPROVE)
def approval_of_an_unknown_id_is_400(session: Session) -> None:
    """200 is documented for a valid id; a client must not believe that it approved something."""
    _expect_400(session, approval(UNKNOWN_ID))


@check(MUST, "PROTOCOL 1.3", Need.APPROVE)
def approval_without_version_is_400(session: Session) -> None:
    """The rule is the same for GET and POST."""
    for version in (None, "2016-01-01"):
        expect_status(session.post(approval(UNKNOWN_ID), version), 400)


@check(MUST, "PROTOCOL 4: 400 with an error", Need.APPROVE)
def approval_rejected_has_a_message(session: Session) -> None:
    """Pacemaker's agent logs the error."""
    expect_error(session.post(b"{"), 400)


@check(SHOULD, "PROTOCOL 10: all or nothing", Need.APPROVE)
def approval_rejected_changes_nothing(session: Session) -> None:
    """A rejected request is not a change."""
    with session.expect_unchanged():
        for body in (*BAD_BODIES, approval(UNKNOWN_ID)):
            session.post(body)


@check(SHOULD, "PROTOCOL 4: one bad id among good ones, 400", *EVENT)
def approval_of_a_known_and_an_unknown_id_is_400(session: Session) -> None:
    """Clients cannot reason about half an approval."""
    _expect_400(session, approval(session.approvable(), UNKNOWN_ID))


@check(SHOULD, "PROTOCOL 4: reject the whole request", Need.APPROVE, Need.CONTROL)
def approval_of_a_known_and_an_unknown_id_approves_neither(session: Session) -> None:
    """All or nothing: the known event stays as it was."""
    event_id = session.approvable()
    session.post(approval(event_id, UNKNOWN_ID))
    approvals, event = session.approvals(event_id), session.document().event(event_id)
    is_untouched = not approvals and event["EventStatus"] == "Scheduled"
    actual = f"{event} approved by {approvals}"
    expect(is_untouched, "a Scheduled event without approvals", actual)


@check(MUST, "PROTOCOL 6.5: a VM may approve events of its group", Need.APPROVE, Need.STRANGER)
def approval_by_another_scope_is_rejected(session: Session) -> None:
    """A VM must not start events of another scope."""
    event_id = session.approvable()
    expect_rejected(session.post(approval(event_id), vm=session.stranger))
    approvals = session.approvals(event_id)
    expect(not approvals, "no approval", approvals)


def _approve(
    session: Session,
    version: str = NEWEST,
    headers: Mapping[str, str] = METADATA,
    **extra: object,
) -> RawResponse:
    """Approve the shared event again, and expect a 200."""
    response = session.post(approval(session.approved(), **extra), version, headers)
    expect_status(response, 200)
    return response


@check(MUST, "PROTOCOL 4: 200", *EVENT)
def approval_is_200(session: Session) -> None:
    """NODE and WDO accept nothing but 200."""
    _approve(session)


@check(MUST, "PROTOCOL 4: empty or JSON (PCMK)", *EVENT)
def approval_response_is_empty_or_json(session: Session) -> None:
    """Pacemaker's agent parses every body that is not empty as JSON."""
    response = _approve(session)
    expect(not response.body or response.json() is not None, "an empty body or JSON", response)


@check(SHOULD, "PROTOCOL 4 and 10: no body, Content-Length 0", *EVENT)
def approval_response_is_empty(session: Session) -> None:
    """There is nothing to report, and every client understands Content-Length: 0."""
    response = _approve(session)
    actual = (response.body, response.header("content-length"))
    expect_equal("the body and its Content-Length to be", actual, (b"", "0"))


@check(MUST, "PROTOCOL 4: 200 also when approved before", *EVENT)
def approval_again_is_200(session: Session) -> None:
    """Several VMs approve the same event, and clients that lost a response retry."""
    for _ in range(2):
        _approve(session)


@check(SHOULD, "PROTOCOL 4: Started, no effect", *EVENT, Need.CONTROL)
def approval_of_a_started_event_changes_nothing(session: Session) -> None:
    """A late approval is still correct, and there is nothing left to approve."""
    event_id = session.approved()
    session.control.post("events", event_id, "approve")  # a policy may need more than one VM
    before = session.until_started(event_id)
    _approve(session)
    after = session.document()
    expect_equal("the document to be", after.response.body, before.response.body)


@check(SHOULD, "PROTOCOL 4: 200 for ids finished lately", *EVENT, Need.CONTROL)
def approval_of_an_ended_event_is_200(session: Session) -> None:
    """Clients race with completion; Pacemaker's agent retries a rejected approval three times."""
    event_id = session.create_shown("redeploy")["EventId"]
    session.cancel(event_id)
    expect_status(session.post(approval(event_id)), 200)


@check(MUST, "PROTOCOL 4: also when another VM approved before", *EVENT, Need.PEER)
def approval_by_a_second_vm_is_200(session: Session) -> None:
    """Any VM of the scope may approve, and each does so by itself."""
    expect_status(session.post(approval(session.approved()), vm=session.peer), 200)


@check(SHOULD, "PROTOCOL 4: any VM in scope may approve", *EVENT, Need.CONTROL)
def approval_is_shown_to_the_operator(session: Session) -> None:
    """An operator who waits for a VM must see that it approved, and which one."""
    _expect_approved(session, session.approved())


def _expect_approved(session: Session, event_id: str) -> None:
    approvals = session.approvals(event_id)
    expect(session.vm in approvals, f"an approval of {event_id} by {session.vm}", approvals)


@check(SHOULD, "PROTOCOL 4: approval is not visible", *EVENT)
def approval_is_not_visible(session: Session) -> None:
    """The status stays Scheduled until the start, and no other member shows more."""
    event_id = session.approved()
    event = session.document().find(event_id)
    if event is not None:
        expect_equal("the members to be", list(event), fields(NEWEST))
        expect(event["EventStatus"] in ("Scheduled", "Started"), "Scheduled or Started", event)


@check(MUST, "PROTOCOL 1.1: mixed versions (PCMK)", *EVENT, each=VERSIONS)
def approval_is_accepted_in(version: str, session: Session) -> None:
    """Pacemaker's agent reads with one version and approves with another."""
    _approve(session, version)


@check(MUST, "PROTOCOL 3: 2017-03-01 samples POST without it (SD3)", *EVENT)
def approval_needs_no_header_in_2017_03_01(session: Session) -> None:
    """Microsoft's own C# and Python samples of that time approve without the header."""
    _approve(session, OLDEST, {})


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *EVENT)
def approval_as_a_form_is_accepted(session: Session) -> None:
    """curl -d, urllib and PowerShell send JSON with the Content-Type of a form."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    _approve(session, headers={**METADATA, **form})


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *EVENT)
def approval_without_content_type_is_accepted(session: Session) -> None:
    """requests with data= and drainsafe send none."""
    _approve(session)


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *EVENT)
def approval_as_json_is_accepted(session: Session) -> None:
    """giantswarm, NODE and SEO2 send application/json."""
    for kind in ("application/json", "application/json; charset=utf-8"):
        _approve(session, headers={**METADATA, "Content-Type": kind})


@check(MUST, "PROTOCOL 2.7: If-None-Match is ignored on POST (NODE)", *EVENT)
def approval_with_if_none_match_is_accepted(session: Session) -> None:
    """Microsoft's Node client sends If-None-Match with its approvals too."""
    session.approved()
    for etag in (session.get().header("etag") or '"1"', "0"):
        _approve(session, headers={**METADATA, "If-None-Match": etag})


@check(SHOULD, "PROTOCOL 4: ids in any case", *EVENT)
def approval_in_lower_case_is_accepted(session: Session) -> None:
    """Typed clients print a GUID in lower case."""
    expect_status(session.post(approval(session.approved().lower())), 200)


@check(MUST, "PROTOCOL 4: DocumentIncarnation as a string (SD0)", *EVENT)
def approval_with_incarnation_as_text_is_accepted(session: Session) -> None:
    """The articles of 2017 sent it as a string."""
    _approve(session, DocumentIncarnation=str(session.document().incarnation))


@check(MUST, "PROTOCOL 4: DocumentIncarnation as a number (DISC)", *EVENT)
def approval_with_incarnation_as_number_is_accepted(session: Session) -> None:
    """PowerShell and Python samples sent it as a number."""
    _approve(session, DocumentIncarnation=session.document().incarnation)


@check(SHOULD, "PROTOCOL 4: a stale number is ignored", *EVENT)
def approval_with_stale_incarnation_is_accepted(session: Session) -> None:
    """Another event may be announced between the poll and the approval."""
    _approve(session, DocumentIncarnation=987654321)


@check(SHOULD, "PROTOCOL 10: extra members are ignored", *EVENT)
def approval_with_more_members_is_accepted(session: Session) -> None:
    """Clients that send the whole event back mean its id."""
    entry = {"EventId": session.approved(), "EventType": "Reboot", "x": [1, {"y": None}]}
    body = json.dumps({"StartRequests": [entry], "By": "me"}).encode()
    expect_status(session.post(body), 200)


@check(SHOULD, "RFC 9112 7.1", *EVENT)
def approval_in_chunks_is_accepted(session: Session) -> None:
    """Node and Go send a body of unknown length in chunks."""
    body = approval(session.approved())
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    headers = {**METADATA, "Transfer-Encoding": "chunked"}
    expect_status(session.send(session.request("", headers, method="POST", body=chunks)), 200)


@check(MUST, "PROTOCOL 4: Expect: 100-continue (.NET)", *EVENT)
def approval_after_100_continue_is_accepted(session: Session) -> None:
    """Old .NET approves in two steps."""
    expect_status(post_after_continue(session, approval(session.approved())), 200)


@check(MUST, "PROTOCOL 4: several entries (DOC, PCMK)", *EVENT, Need.CONTROL)
def approval_of_several_is_accepted(session: Session) -> None:
    """Pacemaker's agent approves a whole set in one request."""
    first, second = session.approved(), session.create("freeze")
    session.until_shown(second)
    expect_status(session.post(approval(first, second)), 200)
    _expect_approved(session, second)
