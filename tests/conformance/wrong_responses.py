"""For each check a fault that it must detect. A check without one fails the test."""

import re
from dataclasses import replace
from operator import delitem

from tests.conformance.faults import (
    ERROR_AS_200,
    HEADER_NOT_REQUIRED,
    NOT_FOUND_AS_200,
    PLAIN_TEXT_ERROR,
    POLLS,
    POST_ERROR_AS_200,
    STUCK_INCARNATION,
    add_event,
    all_but_first,
    always,
    body_matches,
    both,
    change_reply,
    change_request_header,
    change_status,
    count_as_change,
    drop_header,
    edit_document,
    edit_events,
    edit_json,
    edit_started_events,
    has_header,
    is_document,
    is_post,
    keep_ended_events,
    lacks_header,
    lacks_version,
    move_not_before,
    reject_approval,
    respond_with,
    reversed_members,
    rewrite_target,
    set_header,
    set_members,
    target_has,
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
    "path-does-not-redirect": respond_with(302),
    "path-needs-no-login": respond_with(401),
    "path-in-any-case": respond_with(404, target_has("scheduledEvents")),
    "path-with-trailing-slash": respond_with(404, target_has("scheduledevents/?")),
    "path-unknown-is-404": NOT_FOUND_AS_200,
    "path-below-the-document-is-404": NOT_FOUND_AS_200,
    "method-put-is-405": change_status(405, 200),
    "method-delete-is-405": change_status(405, 200),
    "method-not-allowed-names-the-allowed": drop_header("allow"),
    "method-head-has-the-content-length": set_header(
        "content-length", "0", lambda request: request.method == "HEAD"
    ),
}

HEADER = {
    **{f"header-required-in-{version}": HEADER_NOT_REQUIRED for version in VERSIONS[1:]},
    "header-not-required-in-2017-03-01": respond_with(400, lacks_header("metadata")),
    "header-name-in-any-case": respond_with(
        400, lambda request: "Metadata" not in dict(request.lines)
    ),
    "header-value-in-any-case": respond_with(
        400, lambda request: request.headers.get("metadata") != "true"
    ),
    "header-value-false-is-400": HEADER_NOT_REQUIRED,
    "header-missing-has-the-documented-message": respond_with(400, lacks_header("metadata")),
    "header-required-by-instance": HEADER_NOT_REQUIRED,
    "header-required-by-versions": HEADER_NOT_REQUIRED,
    "header-forwarded-is-rejected": change_request_header("X-Forwarded-For", None),
    "header-forwarded-is-400": change_status(400, 403),
    "header-forwarded-is-rejected-by-instance": change_request_header("X-Forwarded-For", None),
    "header-accept-changes-nothing": respond_with(406, has_header("accept", "text/html")),
    "header-user-agent-changes-nothing": respond_with(403, has_header("user-agent", "Pacemaker")),
    "header-host-changes-nothing": respond_with(403, has_header("host", "169.254")),
    "header-required-to-approve": HEADER_NOT_REQUIRED,
}

VERSION = {
    **{
        f"version-is-served-{version}": respond_with(400, target_has(version))
        for version in VERSIONS
    },
    "version-does-not-change-the-incarnation": edit_document(
        lambda value: value.update(DocumentIncarnation=5), target_has("2017-08-01")
    ),
    "version-missing-is-400": ERROR_AS_200,
    "version-empty-is-400": ERROR_AS_200,
    "version-unknown-is-400": ERROR_AS_200,
    "version-latest-is-400": ERROR_AS_200,
    "version-with-an-unknown-date-is-404": change_status(404, 400),
    "version-missing-has-the-documented-message": edit_json(
        lambda value: value.update(error="No.")
    ),
    "version-missing-names-the-newest": edit_json(lambda value: value["newest-versions"].reverse()),
    "version-named-as-newest-is-served": edit_json(
        lambda value: value["newest-versions"].__setitem__(0, "2031-01-01")
    ),
    "query-duplicate-is-rejected": ERROR_AS_200,
    "query-duplicate-is-400": change_status(400, 409),
    "query-format-changes-nothing": respond_with(
        200, target_has("format=text"), b"DocumentIncarnation\nEvents/"
    ),
}

CONNECTION = {
    "http-1-1-is-spoken": change_reply(http="HTTP/1.0"),
    "response-within-5-seconds": change_reply(seconds=5.1),
    "connection-is-kept-alive": change_reply(is_last=True),
    "connection-is-kept-alive-after-an-error": change_reply(lacks_header("metadata"), is_last=True),
    "connection-responds-in-order": rewrite_target(
        r"/metadata/versions", "/metadata/scheduledevents?api-version=2020-07-01"
    ),
    "connection-close-is-echoed": Fault(echoes_close=False),
    "connection-close-closes": change_reply(is_last=False),
    "http-1-0-is-supported-and-closed": respond_with(505, lambda request: request.http == "1.0"),
    "request-may-arrive-in-pieces": Fault(accepts_pieces=False),
    "expect-100-continue-is-continued": Fault(continues=False),
}

DOCUMENT = {
    "document-is-a-json-object": respond_with(200, is_document, b""),
    "document-has-two-members-in-order": edit_document(lambda value: dict(reversed(value.items()))),
    "document-is-compact": edit_document(lambda value: None, separators=(", ", ": ")),
    "document-incarnation-is-an-integer": edit_document(
        lambda value: value.update(DocumentIncarnation="1")
    ),
    "document-incarnation-is-at-least-1": edit_document(
        lambda value: value.update(DocumentIncarnation=0)
    ),
    "document-events-is-a-list-of-objects": edit_document(lambda value: value.update(Events=None)),
    "document-incarnation-stays-while-nothing-changes": count_as_change(
        lambda request, reply: is_document(request)
    ),
    "document-of-the-same-incarnation-is-the-same": edit_document(
        lambda value: value["Events"].append({"x": next(POLLS)})
    ),
    "document-is-application-json": set_header("content-type", "text/plain"),
    "document-has-charset-utf-8": set_header("content-type", "application/json"),
    "document-content-length-is-exact": change_reply(surplus=b"\n"),
    "response-has-a-date": drop_header("date"),
    "response-has-a-server-header": drop_header("server"),
}

ETAG = {
    "etag-is-sent": drop_header("etag"),
    "etag-is-quoted": set_header("etag", "1"),
    "etag-is-the-incarnation": set_header("etag", '"x"'),
    "etag-known-is-304": change_request_header("If-None-Match", None),
    "etag-304-has-no-body": change_reply(has_header("if-none-match"), surplus=b"{}"),
    "etag-304-repeats-the-tag": drop_header("etag", 304),
    "etag-0-gives-the-document": respond_with(
        304,
        both(
            has_header("if-none-match", "0"),
            lambda request: request.headers["if-none-match"] == "0",
        ),
    ),
    "etag-of-another-document-gives-the-document": respond_with(
        304, has_header("if-none-match", "987654321")
    ),
    "etag-known-without-quotes-is-304": change_request_header(
        "If-None-Match", None, lambda request: '"' not in request.headers.get("if-none-match", "")
    ),
    "etag-known-as-weak-is-304": change_request_header(
        "If-None-Match", None, has_header("if-none-match", "W/")
    ),
    "etag-known-among-others-is-304": change_request_header(
        "If-None-Match", None, has_header("if-none-match", ",")
    ),
    "etag-changes-with-the-document": set_header("etag", '"5"'),
    "wait-holds-the-response": change_request_header("Prefer", None),
    "wait-sends-preference-applied": drop_header("preference-applied"),
    "wait-needs-a-known-etag": change_reply(has_header("prefer"), seconds=1.5),
    "wait-ends-with-the-change": change_request_header("Prefer", None),
}

EVENT = {
    **{
        f"event-members-in-{version}": edit_events(lambda entry: entry.pop("ResourceType"))
        for version in VERSIONS
    },
    "event-id-is-a-guid": add_event(EventId="1"),
    "event-id-is-upper-case": edit_events(
        lambda entry: entry.update(EventId=entry["EventId"].lower())
    ),
    "event-id-is-unique": add_event(),
    "event-id-is-the-same-in-every-version": edit_events(
        lambda entry: entry.update(EventId="1"), target_has("2019-08-01")
    ),
    "event-status-is-known": set_members(EventStatus="Completed"),
    "event-type-is-known": set_members(EventType="reboot"),
    "event-resource-type-is-virtual-machine": set_members(ResourceType="VM"),
    "event-resources-are-names": set_members(Resources="web-0"),
    "event-names-begin-with-underscore-in-2017-03-01": edit_events(
        lambda entry: entry.update(Resources=["web-0"]), target_has("2017-03-01")
    ),
    "event-names-are-plain-from-2017-08-01-on": edit_events(
        lambda entry: entry.update(Resources=["_web-0"]), target_has("2017-08-01")
    ),
    "event-resources-match-the-instance-name": set_members(Resources=["web00000i"]),
    "event-description-is-text": set_members(Description=None),
    "event-source-is-known": set_members(EventSource="user"),
    "event-duration-is-an-integer": set_members(DurationInSeconds="-1"),
}

DATE = {
    "not-before-is-text": set_members(NotBefore=None),
    **{
        f"not-before-is-rfc-1123-in-{version}": set_members(NotBefore="2021-07-22T04:50:17Z")
        for version in VERSIONS
    },
    "not-before-has-the-right-weekday": set_members(NotBefore="Mon, 22 Jul 2021 04:50:17 GMT"),
    "not-before-matches-the-control-api": set_members(NotBefore="Thu, 22 Jul 2021 04:50:17 GMT"),
    "not-before-does-not-move": edit_events(move_not_before),
}

KIND = {
    "restart-is-a-reboot-by-a-user": set_members(EventSource="Platform"),
    "redeploy-is-a-redeploy-by-a-user": set_members(EventType="Reboot"),
    "freeze-is-by-the-platform": set_members(EventType="Pause"),
    "freeze-has-a-duration": set_members(DurationInSeconds=0),
    "eviction-is-a-preempt-by-the-platform": set_members(EventType="Terminate"),
    "deletion-is-a-terminate": set_members(EventType="Preempt"),
    "every-version-shows-a-restart": edit_document(
        lambda value: value["Events"].clear(), target_has("2017-03-01")
    ),
    "every-version-shows-a-redeploy": edit_document(
        lambda value: value["Events"].clear(), target_has("2017-08-01")
    ),
    "every-version-shows-a-freeze": edit_document(
        lambda value: value["Events"].clear(), target_has("2019-04-01")
    ),
    "preempt-is-shown-from-2017-11-01-on": edit_document(
        lambda value: value["Events"].clear(), target_has("2017-11-01")
    ),
    "preempt-is-hidden-before-2017-11-01": rewrite_target("2017-08-01", "2017-11-01"),
    "terminate-is-shown-from-2019-01-01-on": edit_document(
        lambda value: value["Events"].clear(), target_has("2019-01-01")
    ),
    "terminate-is-hidden-before-2019-01-01": rewrite_target("2017-11-01", "2019-01-01"),
}

INSTANCE = {
    "root-names-the-newest-versions": respond_with(400, lacks_version),
    "identity-not-found-is-400": respond_with(404, target_has("/identity")),
    "instance-compute-has-plan-and-public-keys": edit_json(
        lambda value: delitem(value["compute"], "publicKeys")
    ),
    "versions-are-listed": edit_json(lambda value: value.update(apiVersions=[])),
    "versions-are-ascending": edit_json(lambda value: value["apiVersions"].reverse()),
    "versions-listed-are-served": edit_json(
        lambda value: value["apiVersions"].append("2031-01-01"), target_has("/versions")
    ),
    "instance-is-a-tree-of-compute-and-network": edit_json(lambda value: delitem(value, "network")),
    "instance-is-application-json": set_header("content-type", "text/json"),
    "instance-values-are-strings": edit_json(
        lambda value: value["compute"].update(platformUpdateDomain=0)
    ),
    "instance-members-are-in-alphabetical-order": edit_json(
        lambda value: value.update(compute=reversed_members(value["compute"]))
    ),
    "instance-compute-has-the-oldest-members": edit_json(
        lambda value: delitem(value["compute"], "vmSize")
    ),
    "instance-compute-has-no-newer-members": edit_json(
        lambda value: value["compute"].update(userData="")
    ),
    "instance-leaf-as-text-is-bare": respond_with(200, target_has("format=text"), b"web-0\n"),
    "instance-leaf-as-text-is-text-plain": set_header("content-type", "application/json"),
    "instance-leaf-without-format-is-400": ERROR_AS_200,
    "instance-path-can-be-walked": respond_with(200, target_has("/compute"), b"{}"),
    "instance-path-can-be-walked-by-index": respond_with(
        200, target_has("privateIpAddress"), b"169.254.1.1"
    ),
    "instance-node-as-text-names-its-children": respond_with(
        200, target_has("format=text"), b"compute\nnetwork"
    ),
    "instance-unknown-element-is-404": NOT_FOUND_AS_200,
    "instance-version-missing-is-400": ERROR_AS_200,
    "instance-version-missing-names-the-newest": edit_json(
        lambda value: delitem(value, "newest-versions"), lacks_version
    ),
}

REFUSAL = {
    "error-400-has-a-message": PLAIN_TEXT_ERROR,
    "error-404-has-a-message": respond_with(404, always, b'{"message":"No."}'),
    "error-405-has-a-message": respond_with(405, always, b'{"error":405}'),
    "error-for-a-forwarded-request-has-a-message": PLAIN_TEXT_ERROR,
    "error-is-application-json": set_header("content-type", "text/html"),
    "error-changes-nothing": count_as_change(lambda request, reply: reply.status == 400),
}

SCOPE = {
    "scope-unknown-vm-is-403": rewrite_target("no-such-vm-as-this", "web-0"),
    "scope-member-reads-its-own-name": respond_with(200, target_has("/compute/name"), b"localhost"),
    "scope-shares-one-document": edit_document(
        lambda value: value["Events"].clear(), target_has("web-1")
    ),
    "scope-does-not-see-others": rewrite_target("/as/db/", "/as/web-0/"),
    "scope-has-its-own-incarnation": count_as_change(lambda request, reply: is_document(request)),
}

LIFECYCLE = {
    "event-is-announced-as-scheduled": set_members(EventStatus="Started"),
    "incarnation-grows-by-1-when-an-event-is-added": STUCK_INCARNATION,
    "event-canceled-is-gone": keep_ended_events(changed={}),
    "incarnation-grows-by-1-when-an-event-is-canceled": STUCK_INCARNATION,
    "event-does-not-start-by-itself": set_members(EventStatus="Started"),
    "events-may-overlap": edit_document(lambda value: value.update(Events=value["Events"][-1:])),
    "event-starts-under-the-same-id": edit_started_events(
        lambda entry: entry.update(EventId=entry["EventId"].lower())
    ),
    "not-before-is-empty-once-started": edit_started_events(
        lambda entry: entry.update(NotBefore="Thu, 22 Jul 2021 04:50:17 GMT")
    ),
    "not-before-is-empty-once-started-in-old-versions": edit_started_events(
        lambda entry: entry.update(NotBefore=None), target_has("2017-08-01")
    ),
    "event-keeps-its-other-members-once-started": edit_started_events(
        lambda entry: entry.update(Resources=["web-1"])
    ),
    "incarnation-grows-by-1-when-an-event-starts": STUCK_INCARNATION,
    "event-ended-is-gone": keep_ended_events(changed={"EventId": "", "EventStatus": "Completed"}),
    "incarnation-grows-by-1-when-an-event-ends": STUCK_INCARNATION,
}

MALFORMED = {
    "approval-not-json-is-400": POST_ERROR_AS_200,
    "approval-without-a-body-is-400": POST_ERROR_AS_200,
    "approval-not-an-object-is-400": POST_ERROR_AS_200,
    "approval-without-start-requests-is-400": POST_ERROR_AS_200,
    "approval-start-requests-not-a-list-is-400": POST_ERROR_AS_200,
    "approval-of-nothing-is-400": POST_ERROR_AS_200,
    "approval-of-an-entry-without-id-is-400": POST_ERROR_AS_200,
    "approval-of-an-unknown-id-is-400": POST_ERROR_AS_200,
    "approval-without-version-is-400": POST_ERROR_AS_200,
    "approval-rejected-has-a-message": respond_with(400, is_post, b""),
    "approval-rejected-changes-nothing": count_as_change(lambda request, reply: is_post(request)),
    "approval-of-a-known-and-an-unknown-id-is-400": POST_ERROR_AS_200,
    "approval-of-a-known-and-an-unknown-id-approves-neither": Fault(
        on_request=lambda request: replace(
            request, body=re.sub(rb', \{"EventId": "00000000[^}]*\}', b"", request.body)
        )
    ),
    "approval-by-another-scope-is-rejected": rewrite_target("/as/db/", "/as/web-0/", is_post),
}

APPROVAL = {
    "approval-is-200": change_status(200, 202, is_post),
    "approval-response-is-empty-or-json": respond_with(200, is_post, b"OK"),
    "approval-response-is-empty": respond_with(200, is_post, b"{}"),
    "approval-again-is-200": respond_with(409, both(is_post, all_but_first())),
    "approval-of-a-started-event-changes-nothing": count_as_change(
        lambda request, reply: is_post(request)
    ),
    "approval-of-an-ended-event-is-200": reject_approval(always),
    "approval-by-a-second-vm-is-200": respond_with(403, both(is_post, target_has("web-1"))),
    "approval-is-shown-to-the-operator": Fault(is_swallowed=is_post),
    "approval-is-not-visible": set_members(Approved=True),
    **{
        f"approval-is-accepted-in-{version}": reject_approval(target_has(version))
        for version in VERSIONS
    },
    "approval-needs-no-header-in-2017-03-01": reject_approval(lacks_header("metadata")),
    "approval-as-a-form-is-accepted": reject_approval(has_header("content-type", "form")),
    "approval-without-content-type-is-accepted": reject_approval(lacks_header("content-type")),
    "approval-as-json-is-accepted": reject_approval(has_header("content-type", "json")),
    "approval-with-if-none-match-is-accepted": respond_with(
        412, both(is_post, has_header("if-none-match"))
    ),
    "approval-in-lower-case-is-accepted": reject_approval(
        body_matches(rb'"EventId": "[0-9-]*[a-f]')
    ),
    "approval-with-incarnation-as-text-is-accepted": reject_approval(
        body_matches(rb'"DocumentIncarnation": "')
    ),
    "approval-with-incarnation-as-number-is-accepted": reject_approval(
        body_matches(rb'"DocumentIncarnation": [0-9]')
    ),
    "approval-with-stale-incarnation-is-accepted": reject_approval(body_matches(b"987654321")),
    "approval-in-camel-case-is-accepted": reject_approval(body_matches(b'"startRequests"')),
    "approval-with-more-members-is-accepted": reject_approval(body_matches(b'"By"')),
    "approval-in-chunks-is-accepted": respond_with(411, has_header("transfer-encoding")),
    "approval-after-100-continue-is-accepted": respond_with(417, has_header("expect")),
    "approval-of-several-is-accepted": reject_approval(body_matches(b"EventId.*EventId")),
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
