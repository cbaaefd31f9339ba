"""For each check a fault that it must find. A check without one fails the test."""

import re
from dataclasses import replace
from operator import delitem

from tests.conformance.faults import (
    FORGETS_HEADER,
    IS_GONE,
    IS_OK,
    IS_OK_POST,
    NO_JSON,
    POLLS,
    STUCK,
    always,
    answers,
    asks,
    both,
    counts,
    document,
    drops,
    edits,
    event,
    extra,
    has,
    heeds,
    is_document,
    is_ever_later,
    is_post,
    is_repeated,
    lacks,
    lacks_version,
    once_started,
    reads,
    refuses,
    remembers,
    renamed,
    says,
    sends,
    sets,
    tells,
    turns,
)
from tests.conformance.wrong_server import Fault

VERSIONS = (
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
)

PATH = {
    "path-does-not-redirect": answers(302),
    "path-needs-no-login": answers(401),
    "path-in-any-case": answers(404, asks("scheduledEvents")),
    "path-with-trailing-slash": answers(404, asks("scheduledevents/?")),
    "path-unknown-is-404": IS_GONE,
    "path-below-the-document-is-404": IS_GONE,
    "method-put-is-405": turns(405, 200),
    "method-delete-is-405": turns(405, 200),
    "method-not-allowed-names-the-allowed": drops("allow"),
    "method-head-has-the-content-length": says(
        "content-length", "0", lambda request: request.method == "HEAD"
    ),
}

HEADER = {
    **{f"header-required-in-{version}": FORGETS_HEADER for version in VERSIONS[1:]},
    "header-not-required-in-2017-03-01": answers(400, lacks("metadata")),
    "header-name-in-any-case": answers(400, lambda request: "Metadata" not in dict(request.lines)),
    "header-value-in-any-case": answers(
        400, lambda request: request.headers.get("metadata") != "true"
    ),
    "header-value-false-is-400": FORGETS_HEADER,
    "header-missing-has-the-documented-message": answers(400, lacks("metadata")),
    "header-required-by-instance": FORGETS_HEADER,
    "header-required-by-versions": FORGETS_HEADER,
    "header-forwarded-is-rejected": heeds("X-Forwarded-For", None),
    "header-forwarded-is-400": turns(400, 403),
    "header-forwarded-is-rejected-by-instance": heeds("X-Forwarded-For", None),
    "header-accept-changes-nothing": answers(406, has("accept", "text/html")),
    "header-user-agent-changes-nothing": answers(403, has("user-agent", "Pacemaker")),
    "header-host-changes-nothing": answers(403, has("host", "169.254")),
    "header-required-to-approve": FORGETS_HEADER,
}

VERSION = {
    **{f"version-is-served-{version}": answers(400, asks(version)) for version in VERSIONS},
    "version-does-not-change-the-incarnation": document(
        lambda said: said.update(DocumentIncarnation=5), asks("2017-08-01")
    ),
    "version-missing-is-400": IS_OK,
    "version-empty-is-400": IS_OK,
    "version-unknown-is-400": IS_OK,
    "version-latest-is-400": IS_OK,
    "version-of-instance-only-is-400": IS_OK,
    "version-missing-has-the-documented-message": edits(lambda said: said.update(error="No.")),
    "version-missing-names-the-newest": edits(lambda said: said["newest-versions"].reverse()),
    "version-named-as-newest-is-served": edits(
        lambda said: said["newest-versions"].__setitem__(0, "2031-01-01")
    ),
    "query-duplicate-is-rejected": IS_OK,
    "query-duplicate-is-400": turns(400, 409),
    "query-format-changes-nothing": answers(
        200, asks("format=text"), b"DocumentIncarnation\nEvents/"
    ),
}

CONNECTION = {
    "http-1-1-is-spoken": tells(http="HTTP/1.0"),
    "response-within-5-seconds": tells(seconds=5.1),
    "connection-is-kept-alive": tells(is_last=True),
    "connection-is-kept-alive-after-an-error": tells(lacks("metadata"), is_last=True),
    "connection-responds-in-order": reads(
        r"/metadata/versions", "/metadata/scheduledevents?api-version=2020-07-01"
    ),
    "connection-close-is-echoed": Fault(echoes_close=False),
    "connection-close-closes": tells(is_last=False),
    "http-1-0-is-supported-and-closed": answers(505, lambda request: request.http == "1.0"),
    "request-may-arrive-in-pieces": Fault(takes_pieces=False),
    "expect-100-continue-is-continued": Fault(continues=False),
}

DOCUMENT = {
    "document-is-a-json-object": answers(200, is_document, b""),
    "document-has-two-members-in-order": document(lambda said: dict(reversed(said.items()))),
    "document-is-compact": document(lambda said: None, separators=(", ", ": ")),
    "document-incarnation-is-an-integer": document(
        lambda said: said.update(DocumentIncarnation="1")
    ),
    "document-incarnation-is-at-least-1": document(lambda said: said.update(DocumentIncarnation=0)),
    "document-events-is-a-list-of-objects": document(lambda said: said.update(Events=None)),
    "document-incarnation-stays-while-nothing-changes": counts(
        lambda request, reply: is_document(request)
    ),
    "document-of-the-same-incarnation-is-the-same": document(
        lambda said: said["Events"].append({"x": next(POLLS)})
    ),
    "document-is-application-json": says("content-type", "text/plain"),
    "document-has-charset-utf-8": says("content-type", "application/json"),
    "document-content-length-is-exact": tells(surplus=b"\n"),
    "response-has-a-date": drops("date"),
    "response-has-a-server-header": drops("server"),
}

ETAG = {
    "etag-is-sent": drops("etag"),
    "etag-is-quoted": says("etag", "1"),
    "etag-is-the-incarnation": says("etag", '"x"'),
    "etag-known-is-304": heeds("If-None-Match", None),
    "etag-304-has-no-body": tells(has("if-none-match"), surplus=b"{}"),
    "etag-304-repeats-the-tag": drops("etag", 304),
    "etag-0-gives-the-document": answers(
        304, both(has("if-none-match", "0"), lambda one: one.headers["if-none-match"] == "0")
    ),
    "etag-of-another-document-gives-the-document": answers(304, has("if-none-match", "987654321")),
    "etag-known-without-quotes-is-304": heeds(
        "If-None-Match", None, lambda one: '"' not in one.headers.get("if-none-match", "")
    ),
    "etag-known-as-weak-is-304": heeds("If-None-Match", None, has("if-none-match", "W/")),
    "etag-known-among-others-is-304": heeds("If-None-Match", None, has("if-none-match", ",")),
    "etag-changes-with-the-document": says("etag", '"5"'),
    "wait-holds-the-response": heeds("Prefer", None),
    "wait-sends-preference-applied": drops("preference-applied"),
    "wait-needs-a-known-etag": tells(has("prefer"), seconds=1.5),
    "wait-ends-with-the-change": heeds("Prefer", None),
}

EVENT = {
    **{
        f"event-members-in-{version}": event(lambda one: one.pop("ResourceType"))
        for version in VERSIONS
    },
    "event-id-is-a-guid": extra(EventId="1"),
    "event-id-is-upper-case": event(lambda one: one.update(EventId=one["EventId"].lower())),
    "event-id-is-unique": extra(),
    "event-id-is-the-same-in-every-version": event(
        lambda one: one.update(EventId="1"), asks("2019-08-01")
    ),
    "event-status-is-known": sets(EventStatus="Completed"),
    "event-type-is-known": sets(EventType="reboot"),
    "event-resource-type-is-virtual-machine": sets(ResourceType="VM"),
    "event-resources-are-names": sets(Resources="web-0"),
    "event-names-begin-with-underscore-in-2017-03-01": event(
        lambda one: one.update(Resources=["web-0"]), asks("2017-03-01")
    ),
    "event-names-are-plain-from-2017-08-01-on": event(
        lambda one: one.update(Resources=["_web-0"]), asks("2017-08-01")
    ),
    "event-resources-match-the-instance-name": sets(Resources=["web00000i"]),
    "event-description-is-text": sets(Description=None),
    "event-source-is-known": sets(EventSource="user"),
    "event-duration-is-an-integer": sets(DurationInSeconds="-1"),
}

DATE = {
    "not-before-is-text": sets(NotBefore=None),
    **{
        f"not-before-is-rfc-1123-in-{version}": sets(NotBefore="2021-07-22T04:50:17Z")
        for version in VERSIONS
    },
    "not-before-has-the-right-weekday": sets(NotBefore="Mon, 22 Jul 2021 04:50:17 GMT"),
    "not-before-matches-the-control-api": sets(NotBefore="Thu, 22 Jul 2021 04:50:17 GMT"),
    "not-before-does-not-move": event(is_ever_later),
}

KIND = {
    "restart-is-a-reboot-by-a-user": sets(EventSource="Platform"),
    "redeploy-is-a-redeploy-by-a-user": sets(EventType="Reboot"),
    "freeze-is-by-the-platform": sets(EventType="Pause"),
    "freeze-has-a-duration": sets(DurationInSeconds=0),
    "eviction-is-a-preempt-by-the-platform": sets(EventType="Terminate"),
    "deletion-is-a-terminate": sets(EventType="Preempt"),
    "every-version-shows-a-restart": document(
        lambda said: said["Events"].clear(), asks("2017-03-01")
    ),
    "every-version-shows-a-redeploy": document(
        lambda said: said["Events"].clear(), asks("2017-08-01")
    ),
    "every-version-shows-a-freeze": document(
        lambda said: said["Events"].clear(), asks("2019-04-01")
    ),
    "preempt-is-shown-from-2017-11-01-on": document(
        lambda said: said["Events"].clear(), asks("2017-11-01")
    ),
    "preempt-is-hidden-before-2017-11-01": reads("2017-08-01", "2017-11-01"),
    "terminate-is-shown-from-2019-01-01-on": document(
        lambda said: said["Events"].clear(), asks("2019-01-01")
    ),
    "terminate-is-hidden-before-2019-01-01": reads("2017-11-01", "2019-01-01"),
}

INSTANCE = {
    "versions-are-listed": edits(lambda said: said.update(apiVersions=[])),
    "versions-are-ascending": edits(lambda said: said["apiVersions"].reverse()),
    "versions-listed-are-served": edits(
        lambda said: said["apiVersions"].append("2031-01-01"), asks("/versions")
    ),
    "instance-is-a-tree-of-compute-and-network": edits(lambda said: delitem(said, "network")),
    "instance-is-application-json": says("content-type", "text/json"),
    "instance-values-are-strings": edits(
        lambda said: said["compute"].update(platformUpdateDomain=0)
    ),
    "instance-members-are-in-alphabetical-order": edits(
        lambda said: said.update(compute=renamed(said["compute"]))
    ),
    "instance-compute-has-the-oldest-members": edits(
        lambda said: delitem(said["compute"], "vmSize")
    ),
    "instance-compute-has-no-newer-members": edits(
        lambda said: said["compute"].update(userData="")
    ),
    "instance-leaf-as-text-is-bare": answers(200, asks("format=text"), b"web-0\n"),
    "instance-leaf-as-text-is-text-plain": says("content-type", "application/json"),
    "instance-leaf-without-format-is-400": IS_OK,
    "instance-path-can-be-walked": answers(200, asks("/compute"), b"{}"),
    "instance-path-can-be-walked-by-index": answers(200, asks("privateIpAddress"), b"169.254.1.1"),
    "instance-node-as-text-names-its-children": answers(
        200, asks("format=text"), b"compute\nnetwork"
    ),
    "instance-unknown-element-is-404": IS_GONE,
    "instance-version-missing-is-400": IS_OK,
    "instance-version-missing-names-the-newest": edits(
        lambda said: delitem(said, "newest-versions"), lacks_version
    ),
}

REFUSAL = {
    "error-400-has-a-message": NO_JSON,
    "error-404-has-a-message": answers(404, always, b'{"message":"No."}'),
    "error-405-has-a-message": answers(405, always, b'{"error":405}'),
    "error-for-a-forwarded-request-has-a-message": NO_JSON,
    "error-is-application-json": says("content-type", "text/html"),
    "error-changes-nothing": counts(lambda request, reply: reply.status == 400),
}

SCOPE = {
    "scope-unknown-vm-is-403": reads("no-such-vm-as-this", "web-0"),
    "scope-member-reads-its-own-name": answers(200, asks("/compute/name"), b"localhost"),
    "scope-shares-one-document": document(lambda said: said["Events"].clear(), asks("web-1")),
    "scope-does-not-see-others": reads("/as/db/", "/as/web-0/"),
    "scope-has-its-own-incarnation": counts(lambda request, reply: is_document(request)),
}

LIFECYCLE = {
    "event-is-announced-as-scheduled": sets(EventStatus="Started"),
    "incarnation-grows-by-1-when-an-event-is-added": STUCK,
    "event-canceled-is-gone": remembers(changed={}),
    "incarnation-grows-by-1-when-an-event-is-canceled": STUCK,
    "event-does-not-start-by-itself": sets(EventStatus="Started"),
    "events-may-overlap": document(lambda said: said.update(Events=said["Events"][-1:])),
    "event-starts-under-the-same-id": once_started(
        lambda one: one.update(EventId=one["EventId"].lower())
    ),
    "not-before-is-empty-once-started": once_started(
        lambda one: one.update(NotBefore="Thu, 22 Jul 2021 04:50:17 GMT")
    ),
    "not-before-is-empty-once-started-in-old-versions": once_started(
        lambda one: one.update(NotBefore=None), asks("2017-08-01")
    ),
    "event-keeps-its-other-members-once-started": once_started(
        lambda one: one.update(Resources=["web-1"])
    ),
    "incarnation-grows-by-1-when-an-event-starts": STUCK,
    "event-ended-is-gone": remembers(changed={"EventId": "", "EventStatus": "Completed"}),
    "incarnation-grows-by-1-when-an-event-ends": STUCK,
}

MALFORMED = {
    "approval-not-json-is-400": IS_OK_POST,
    "approval-without-a-body-is-400": IS_OK_POST,
    "approval-not-an-object-is-400": IS_OK_POST,
    "approval-without-start-requests-is-400": IS_OK_POST,
    "approval-start-requests-not-a-list-is-400": IS_OK_POST,
    "approval-of-nothing-is-400": IS_OK_POST,
    "approval-of-an-entry-without-id-is-400": IS_OK_POST,
    "approval-of-an-unknown-id-is-400": IS_OK_POST,
    "approval-without-version-is-400": IS_OK_POST,
    "approval-rejected-has-a-message": answers(400, is_post, b""),
    "approval-rejected-changes-nothing": counts(lambda request, reply: is_post(request)),
    "approval-of-a-known-and-an-unknown-id-is-400": IS_OK_POST,
    "approval-of-a-known-and-an-unknown-id-approves-neither": Fault(
        asked=lambda request: replace(
            request, body=re.sub(rb', \{"EventId": "00000000[^}]*\}', b"", request.body)
        )
    ),
    "approval-by-another-scope-is-rejected": reads("/as/db/", "/as/web-0/", is_post),
}

APPROVAL = {
    "approval-is-200": turns(200, 202, is_post),
    "approval-response-is-empty-or-json": answers(200, is_post, b"OK"),
    "approval-response-is-empty": answers(200, is_post, b"{}"),
    "approval-again-is-200": answers(409, both(is_post, is_repeated())),
    "approval-of-a-started-event-changes-nothing": counts(lambda request, reply: is_post(request)),
    "approval-of-an-ended-event-is-200": refuses(always),
    "approval-by-a-second-vm-is-200": answers(403, both(is_post, asks("web-1"))),
    "approval-is-shown-to-the-operator": Fault(swallows=is_post),
    "approval-is-not-visible": sets(Approved=True),
    **{f"approval-is-accepted-in-{version}": refuses(asks(version)) for version in VERSIONS},
    "approval-needs-no-header-in-2017-03-01": refuses(lacks("metadata")),
    "approval-as-a-form-is-accepted": refuses(has("content-type", "form")),
    "approval-without-content-type-is-accepted": refuses(lacks("content-type")),
    "approval-as-json-is-accepted": refuses(has("content-type", "json")),
    "approval-with-if-none-match-is-accepted": answers(412, both(is_post, has("if-none-match"))),
    "approval-in-lower-case-is-accepted": refuses(sends(rb'"EventId": "[0-9-]*[a-f]')),
    "approval-with-incarnation-as-text-is-accepted": refuses(sends(rb'"DocumentIncarnation": "')),
    "approval-with-incarnation-as-number-is-accepted": refuses(
        sends(rb'"DocumentIncarnation": [0-9]')
    ),
    "approval-with-stale-incarnation-is-accepted": refuses(sends(b"987654321")),
    "approval-with-more-members-is-accepted": refuses(sends(b'"By"')),
    "approval-in-chunks-is-accepted": answers(411, has("transfer-encoding")),
    "approval-after-100-continue-is-accepted": answers(417, has("expect")),
    "approval-of-several-is-accepted": refuses(sends(b"EventId.*EventId")),
}

WRONG: dict[str, Fault] = {
    **PATH,
    **HEADER,
    **VERSION,
    **CONNECTION,
    **DOCUMENT,
    **ETAG,
    **EVENT,
    **DATE,
    **KIND,
    **INSTANCE,
    **REFUSAL,
    **SCOPE,
    **LIFECYCLE,
    **MALFORMED,
    **APPROVAL,
}
