"""Approvals that count: what is accepted, what is answered, and what becomes of it.

All checks here share one approved event, so that a run impacts the VM as little as possible.
"""

import json

from forewarn.conformance.check import Level, Need, check, check_each, holds, same
from forewarn.conformance.checks.path import status
from forewarn.conformance.session import TRUE, Stage, approval
from forewarn.conformance.spec import NEWEST, OLDEST, VERSIONS, fields

MUST, SHOULD = Level.MUST, Level.SHOULD
LEAVE = (Need.APPROVE, Need.EVENT)


@check(MUST, "PROTOCOL 4: 200", *LEAVE)
def approval_is_200(stage: Stage) -> None:
    """NODE and WDO take nothing but 200 for a yes."""
    status(stage.post(approval(stage.approved())), 200)


@check(MUST, "PROTOCOL 4: empty or JSON (PCMK)", *LEAVE)
def approval_is_answered_with_nothing_or_json(stage: Stage) -> None:
    """Pacemaker's agent reads every answer that is not empty as JSON."""
    answer = stage.post(approval(stage.approved()))
    holds(not answer.body or answer.json() is not None, "an empty body or JSON", answer)


@check(SHOULD, "PROTOCOL 4 and 10: no body, Content-Length 0", *LEAVE)
def approval_is_answered_with_nothing(stage: Stage) -> None:
    """There is nothing to say, and Content-Length: 0 says so to every client."""
    answer = stage.post(approval(stage.approved()))
    same(
        "the body and its Content-Length to be",
        (answer.body, answer.header("content-length")),
        (b"", "0"),
    )


@check(MUST, "PROTOCOL 4: 200 also when approved before", *LEAVE)
def approval_again_is_200(stage: Stage) -> None:
    """Several VMs approve the same event, and clients that lost an answer try again."""
    event_id = stage.approved()
    for _ in range(2):
        status(stage.post(approval(event_id)), 200)


@check(SHOULD, "PROTOCOL 4: Started, no effect", *LEAVE, Need.CONTROL)
def approval_of_what_has_started_changes_nothing(stage: Stage) -> None:
    """The approval that comes late is still right, and there is nothing left to approve."""
    event_id = stage.approved()
    stage.control.post(
        "events", event_id, "approve"
    )  # where one VM's word does not suffice, the operator's does
    before = stage.until_status(event_id, "Started")
    status(stage.post(approval(event_id)), 200)
    same("the document to be", stage.document().answer.body, before.answer.body)


@check(SHOULD, "PROTOCOL 4: 200 for ids finished lately", *LEAVE, Need.CONTROL)
def approval_of_what_is_over_is_200(stage: Stage) -> None:
    """Clients race with completion;

    Pacemaker's agent tries a refused approval three times, twenty seconds apart.
    """
    event_id = stage.make("redeploy")
    stage.until_shown(event_id)
    stage.control.post("events", event_id, "cancel")
    stage.until_gone(event_id)
    status(stage.post(approval(event_id)), 200)


@check(MUST, "PROTOCOL 4: also when another VM approved before", *LEAVE, Need.PEER)
def approval_by_a_second_vm_is_200(stage: Stage) -> None:
    """Any VM of the scope may approve, and each does so on its own."""
    status(stage.post(approval(stage.approved()), vm=stage.find_other(is_peer=True)), 200)


@check(SHOULD, "PROTOCOL 4: any VM in scope may approve", *LEAVE, Need.CONTROL)
def approval_reaches_the_operator(stage: Stage) -> None:
    """Whoever waits for a VM's word must see that it came, and from whom."""
    event_id = stage.approved()
    told = stage.told(event_id)["approvals"]
    holds(stage.vm in told, f"an approval by {stage.vm}", told)


@check(SHOULD, "PROTOCOL 4: approval is not visible", *LEAVE)
def approval_is_not_visible(stage: Stage) -> None:
    """The status stays Scheduled until the start, and no member tells more than that."""
    event_id = stage.approved()
    event = stage.document().find(event_id)
    if event is not None:
        same("the members to be", list(event), fields(NEWEST))
        holds(event["EventStatus"] in ("Scheduled", "Started"), "Scheduled or Started", event)


@check_each(VERSIONS, MUST, "PROTOCOL 1.1: mixed versions (PCMK)", *LEAVE)
def approval_is_taken_in(stage: Stage, version: str) -> None:
    """Pacemaker's agent reads with one version and approves with another."""
    status(stage.post(approval(stage.approved()), version), 200)


@check(MUST, "PROTOCOL 3: 2017-03-01 samples POST without it (SD3)", *LEAVE)
def approval_needs_no_header_in_2017_03_01(stage: Stage) -> None:
    """Microsoft's own C# and Python samples of that time approve without the header."""
    status(stage.post(approval(stage.approved()), OLDEST, {}), 200)


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *LEAVE)
def approval_as_a_form_is_taken(stage: Stage) -> None:
    """curl -d, urllib and PowerShell call it a form, and send JSON."""
    headers = {**TRUE, "Content-Type": "application/x-www-form-urlencoded"}
    status(stage.post(approval(stage.approved()), headers=headers), 200)


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *LEAVE)
def approval_without_content_type_is_taken(stage: Stage) -> None:
    """requests with data= and drainsafe send none."""
    status(stage.post(approval(stage.approved())), 200)


@check(MUST, "PROTOCOL 3: Content-Type is not checked", *LEAVE)
def approval_as_json_is_taken(stage: Stage) -> None:
    """giantswarm, NODE and SEO2 send application/json."""
    for kind in ("application/json", "application/json; charset=utf-8"):
        status(stage.post(approval(stage.approved()), headers={**TRUE, "Content-Type": kind}), 200)


@check(MUST, "PROTOCOL 2.7: If-None-Match is ignored on POST (NODE)", *LEAVE)
def approval_with_if_none_match_is_taken(stage: Stage) -> None:
    """Microsoft's Node client sends If-None-Match with its approvals too."""
    event_id = stage.approved()
    known = stage.get().header("etag") or '"1"'
    for tags in (known, "0"):
        status(stage.post(approval(event_id), headers={**TRUE, "If-None-Match": tags}), 200)


@check(SHOULD, "PROTOCOL 4: ids in any case", *LEAVE)
def approval_in_lower_case_is_taken(stage: Stage) -> None:
    """Typed clients print a GUID in lower case."""
    status(stage.post(approval(stage.approved().lower())), 200)


@check(MUST, "PROTOCOL 4: DocumentIncarnation as a string (SD0)", *LEAVE)
def approval_with_incarnation_as_text_is_taken(stage: Stage) -> None:
    """The documents of 2017 sent it as a string."""
    status(
        stage.post(approval(stage.approved(), DocumentIncarnation=str(stage.document().number))),
        200,
    )


@check(MUST, "PROTOCOL 4: DocumentIncarnation as a number (DISC)", *LEAVE)
def approval_with_incarnation_as_number_is_taken(stage: Stage) -> None:
    """PowerShell and Python samples sent it as a number."""
    status(stage.post(approval(stage.approved(), DocumentIncarnation=stage.document().number)), 200)


@check(SHOULD, "PROTOCOL 4: a stale number is ignored", *LEAVE)
def approval_with_stale_incarnation_is_taken(stage: Stage) -> None:
    """Between the poll and the approval another event may have come."""
    status(stage.post(approval(stage.approved(), DocumentIncarnation=987654321)), 200)


@check(SHOULD, "PROTOCOL 10: extra members are ignored", *LEAVE)
def approval_with_more_members_is_taken(stage: Stage) -> None:
    """Clients that send the whole event back mean its id."""
    event_id = stage.approved()
    entry = {"EventId": event_id, "EventType": "Reboot", "x": [1, {"y": None}]}
    status(stage.post(json.dumps({"StartRequests": [entry], "By": "me"}).encode()), 200)


@check(SHOULD, "RFC 9112 7.1", *LEAVE)
def approval_in_chunks_is_taken(stage: Stage) -> None:
    """Node and Go send a body of unknown length in chunks."""
    body = approval(stage.approved())
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    request = stage.request(
        headers={**TRUE, "Transfer-Encoding": "chunked"}, method="POST", body=chunked
    )
    status(stage.ask(request), 200)


@check(MUST, "PROTOCOL 4: Expect: 100-continue (.NET)", *LEAVE)
def approval_after_100_continue_is_taken(stage: Stage) -> None:
    """Old .NET approves in two steps."""
    body = approval(stage.approved())
    headers = {**TRUE, "Expect": "100-continue", "Content-Length": str(len(body))}
    with stage.line() as line:
        line.send(stage.request(headers=headers, method="POST"))
        status(line.answer(), 100)
        line.send(body)
        status(line.answer(), 200)


@check(MUST, "PROTOCOL 4: several entries (DOC, PCMK)", *LEAVE, Need.CONTROL)
def approval_of_several_is_taken(stage: Stage) -> None:
    """Pacemaker's agent approves a whole set in one request."""
    first, second = stage.approved(), stage.make("freeze")
    stage.until_shown(second)
    status(stage.post(approval(first, second)), 200)
    told = stage.told(second)["approvals"]
    holds(stage.vm in told, f"an approval of {second} by {stage.vm}", told)
