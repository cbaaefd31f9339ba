"""Approvals: which are rejected and change nothing, which are accepted, and with what effect.

Rejected ones come first: the checks after them share one approved event, so that a run impacts the
VM as little as possible.
"""

import json

from forewarn.conformance.check import MUST, SHOULD, Body, Need, check, expect, expect_equal, rule
from forewarn.conformance.checks.request import post_after_continue
from forewarn.conformance.expectation import a_rejection, an_error, gives, sends, status
from forewarn.conformance.raw_http import METADATA, Headers, RawResponse, Request, approval, post
from forewarn.conformance.session import Session
from forewarn.conformance.spec import JSON, NEWEST, OLDEST, VERSIONS, fields

UNKNOWN_ID = "00000000-0000-4000-8000-000000000000"
UNKNOWN = approval(UNKNOWN_ID)
EVENT_ID = b'"4CAEA225-A741-474D-A72E-428C86FCD853"'
D400 = "PROTOCOL 4: 400 for a malformed payload"
APPROVE, EVENT = Need.APPROVE, (Need.APPROVE, Need.EVENT)


def rejects(*bodies: bytes) -> Body:
    return gives(400, *map(post, bodies))


def rejects_start_requests(*values: bytes) -> Body:
    return rejects(*(b'{"StartRequests":%b}' % value for value in values))


@rule(MUST, D400, rejects(b'{"StartRequests":[', b"EventId=" + EVENT_ID, b"\xff\xfe"), APPROVE)
def approval_not_json_is_400() -> None:
    """A quoting mistake in a shell script must show, not look like an approval."""


@rule(MUST, D400, rejects(b""), APPROVE)
def approval_without_a_body_is_400() -> None:
    """An empty variable in a script gives an empty body, which approves nothing."""


@rule(MUST, D400, rejects(b"[]", EVENT_ID, b"null"), APPROVE)
def approval_not_an_object_is_400() -> None:
    """A plain list of ids looks reasonable and is not the protocol."""


@rule(MUST, D400, rejects(b"{}", b'{"startrequest":[]}'), APPROVE)
def approval_without_start_requests_is_400() -> None:
    """A misspelt member would otherwise be ignored like any other, and approve nothing."""


NOT_LISTS = rejects_start_requests(b'{"EventId":%b}' % EVENT_ID, b"null", b'"x"', b"1")


@rule(MUST, D400, NOT_LISTS, APPROVE)
def approval_start_requests_not_a_list_is_400() -> None:
    """PowerShell turns a list of one into a plain object: its user must learn so."""


@rule(SHOULD, "PROTOCOL 4: an empty list, 400", rejects_start_requests(b"[]"), APPROVE)
def approval_of_nothing_is_400() -> None:
    """A client that approves nothing has lost an id."""


WITHOUT_ID = rejects_start_requests(
    b"[{}]", b'[{"Event":%b}]' % EVENT_ID, b"[1]", b'[{"EventId":1}]'
)


@rule(MUST, D400, WITHOUT_ID, APPROVE)
def approval_of_an_entry_without_id_is_400() -> None:
    """A misspelt EventId approves nothing."""


@rule(SHOULD, "PROTOCOL 4 and 10: unknown id, 400", rejects(UNKNOWN), APPROVE)
def approval_of_an_unknown_id_is_400() -> None:
    """200 is documented for a valid id; a client must not believe that it approved something."""


@rule(MUST, "PROTOCOL 1.3", gives(400, post(UNKNOWN, None), post(UNKNOWN, "preview")), APPROVE)
def approval_without_version_is_400() -> None:
    """The rule is the same for GET and POST."""


@rule(MUST, "PROTOCOL 4: 400 with an error", sends(an_error(400), post(b"{")), APPROVE)
def approval_rejected_has_a_message() -> None:
    """Pacemaker's agent logs the error."""


@check(SHOULD, "PROTOCOL 10: all or nothing", Need.APPROVE)
def approval_rejected_changes_nothing(session: Session) -> None:
    """A rejected request is not a change."""
    with session.expect_unchanged():
        for body in (b"", b"{", b"{}", b"[]", b'{"StartRequests":[{}]}', UNKNOWN):
            session.send(post(body))


@check(SHOULD, "PROTOCOL 4: one bad id among good ones, 400", *EVENT)
def approval_of_a_known_and_an_unknown_id_is_400(session: Session) -> None:
    """Clients cannot reason about half an approval."""
    session.send(post(approval(session.approvable(), UNKNOWN_ID)), status(400))


@check(SHOULD, "PROTOCOL 4: reject the whole request", Need.APPROVE, Need.CONTROL)
def approval_of_a_known_and_an_unknown_id_approves_neither(session: Session) -> None:
    """All or nothing: the known event stays as it was."""
    event_id = session.approvable()
    session.send(post(approval(event_id, UNKNOWN_ID)))
    actual = (session.document().event(event_id)["EventStatus"], session.approvals(event_id))
    expect_equal("the status and the approvals to be", actual, ("Scheduled", []))


@check(MUST, "PROTOCOL 6.5: a VM may approve events of its group", Need.APPROVE, Need.STRANGER)
def approval_by_another_scope_is_rejected(session: Session) -> None:
    """A VM must not start events of another scope."""
    event_id = session.approvable()
    session.send(post(approval(event_id), vm=session.stranger), a_rejection)
    expect_equal("the approvals to be", session.approvals(event_id), [])


def approve(
    session: Session, version: str = NEWEST, headers: Headers = METADATA, **extra: object
) -> RawResponse:
    """Approve the shared event again, and expect a 200."""
    body = approval(session.approved(), **extra)
    return session.send(post(body, version, headers), status(200))


def approve_as(session: Session, *content_types: str) -> None:
    for content_type in content_types:
        approve(session, headers={**METADATA, "Content-Type": content_type})


@rule(MUST, "PROTOCOL 4: 200", approve, *EVENT)
def approval_is_200() -> None:
    """NODE and WDO accept nothing but 200."""


@check(MUST, "PROTOCOL 4: empty or JSON (PCMK)", *EVENT)
def approval_response_is_empty_or_json(session: Session) -> None:
    """Pacemaker's agent parses every body that is not empty as JSON."""
    response = approve(session)
    expect(not response.body or response.json() is not None, "an empty body or JSON", response)


@check(SHOULD, "PROTOCOL 4 and 10: no body, Content-Length 0", *EVENT)
def approval_response_is_empty(session: Session) -> None:
    """There is nothing to report, and every client understands Content-Length: 0."""
    response = approve(session)
    actual = (response.body, response.header("content-length"))
    expect_equal("the body and its Content-Length to be", actual, (b"", "0"))


@check(MUST, "PROTOCOL 4: 200 also when approved before", *EVENT)
def approval_again_is_200(session: Session) -> None:
    """Several VMs approve the same event, and clients that lost a response retry."""
    approve(session)
    approve(session)


@check(SHOULD, "PROTOCOL 4: Started, no effect", *EVENT, Need.CONTROL)
def approval_of_a_started_event_changes_nothing(session: Session) -> None:
    """A late approval is still correct, and there is nothing left to approve."""
    event_id = session.approved()
    session.control.post("events", event_id, "approve")  # a policy may need more than one VM
    before = session.until_started(event_id)
    approve(session)
    expect_equal("the document to be", session.document().response.body, before.response.body)


@check(SHOULD, "PROTOCOL 4: 200 for ids that finished recently", *EVENT, Need.CONTROL)
def approval_of_an_ended_event_is_200(session: Session) -> None:
    """Clients race with completion; Pacemaker's agent retries a rejected approval three times."""
    event_id = session.create_shown("redeploy")["EventId"]
    session.cancel(event_id)
    session.send(post(approval(event_id)), status(200))


@check(MUST, "PROTOCOL 4: also when another VM approved before", *EVENT, Need.PEER)
def approval_by_a_second_vm_is_200(session: Session) -> None:
    """Any VM of the scope may approve, and each does so by itself."""
    session.send(post(approval(session.approved()), vm=session.peer), status(200))


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
    if event := session.document().find(event_id):
        expect_equal("the members to be", list(event), fields(NEWEST))
        expect(event["EventStatus"] in ("Scheduled", "Started"), "Scheduled or Started", event)


@check(MUST, "PROTOCOL 1.1: mixed versions (PCMK)", *EVENT, each=VERSIONS)
def approval_is_accepted_in(version: str, session: Session) -> None:
    """Pacemaker's agent reads with one version and approves with another."""
    approve(session, version)


@check(MUST, "PROTOCOL 3: 2017-03-01 samples POST without it (SD3)", *EVENT)
def approval_needs_no_header_in_2017_03_01(session: Session) -> None:
    """Microsoft's own C# and Python samples of that time approve without the header."""
    approve(session, OLDEST, headers={})


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *EVENT)
def approval_as_a_form_is_accepted(session: Session) -> None:
    """curl -d, urllib and PowerShell send JSON with the Content-Type of a form."""
    approve_as(session, "application/x-www-form-urlencoded")


@rule(MUST, "PROTOCOL 3: Content-Type is not checked", approve, *EVENT)
def approval_without_content_type_is_accepted() -> None:
    """requests with data= and drainsafe send none."""


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *EVENT)
def approval_as_json_is_accepted(session: Session) -> None:
    """giantswarm, NODE and SEO2 send application/json."""
    approve_as(session, JSON, f"{JSON}; charset=utf-8")


@check(MUST, "PROTOCOL 2.7: If-None-Match is ignored on POST (NODE)", *EVENT)
def approval_with_if_none_match_is_accepted(session: Session) -> None:
    """Microsoft's Node client sends If-None-Match with its approvals too."""
    session.approved()
    for etag in (session.send(Request()).header("etag") or '"1"', "0"):
        approve(session, headers={**METADATA, "If-None-Match": etag})


@check(SHOULD, "PROTOCOL 4: ids in any case", *EVENT)
def approval_in_lower_case_is_accepted(session: Session) -> None:
    """Typed clients print a GUID in lower case."""
    session.send(post(approval(session.approved().lower())), status(200))


@check(MUST, "PROTOCOL 4: DocumentIncarnation as a string (SD0)", *EVENT)
def approval_with_incarnation_as_text_is_accepted(session: Session) -> None:
    """The articles of 2017 sent it as a string."""
    approve(session, DocumentIncarnation=str(session.document().incarnation))


@check(MUST, "PROTOCOL 4: DocumentIncarnation as a number (DISC)", *EVENT)
def approval_with_incarnation_as_number_is_accepted(session: Session) -> None:
    """PowerShell and Python samples sent it as a number."""
    approve(session, DocumentIncarnation=session.document().incarnation)


@check(SHOULD, "PROTOCOL 4: a stale number is ignored", *EVENT)
def approval_with_stale_incarnation_is_accepted(session: Session) -> None:
    """Another event may be announced between the poll and the approval."""
    approve(session, DocumentIncarnation=987654321)


@check(SHOULD, "PROTOCOL 10: extra members are ignored", *EVENT)
def approval_with_more_members_is_accepted(session: Session) -> None:
    """Clients that send the whole event back mean its id."""
    entry = {"EventId": session.approved(), "EventType": "Reboot", "x": [1, {"y": None}]}
    body = json.dumps({"StartRequests": [entry], "By": "me"}).encode()
    session.send(post(body), status(200))


@check(SHOULD, "PROTOCOL 11: camelCase (.NET)", *EVENT)
def approval_in_camel_case_is_accepted(session: Session) -> None:
    """.NET clients with default settings write startRequests and eventId."""
    body = json.dumps({"startRequests": [{"eventId": session.approved()}]}).encode()
    session.send(post(body), status(200))


@check(SHOULD, "RFC 9112 7.1", *EVENT)
def approval_in_chunks_is_accepted(session: Session) -> None:
    """Node and Go send a body of unknown length in chunks."""
    body = approval(session.approved())
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    headers = {**METADATA, "Transfer-Encoding": "chunked"}
    session.send(Request(headers=headers, method="POST", body=chunks), status(200))


@check(MUST, "PROTOCOL 4: Expect: 100-continue (.NET)", *EVENT)
def approval_after_100_continue_is_accepted(session: Session) -> None:
    """Old .NET approves in two steps."""
    status(200)(post_after_continue(session, approval(session.approved())))


@check(MUST, "PROTOCOL 4: several entries (DOC, PCMK)", *EVENT, Need.CONTROL)
def approval_of_several_is_accepted(session: Session) -> None:
    """Pacemaker's agent approves a whole set in one request."""
    first, second = session.approved(), session.create("freeze")
    session.until_shown(second)
    session.send(post(approval(first, second)), status(200))
    _expect_approved(session, second)
