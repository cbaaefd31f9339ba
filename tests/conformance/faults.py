"""Faults of a server, to combine with conditions on the request."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from tests.conformance.wrong_server import Fault, Reply, Request

When = Callable[[Request], bool]
Json = dict[str, Any]

ERROR = b'{"error":"No."}'


def always(request: Request) -> bool:
    return True


def is_post(request: Request) -> bool:
    return request.method == "POST"


def is_document(request: Request) -> bool:
    return request.method == "GET" and "/metadata/scheduledevents" in request.target.lower()


def target_has(part: str) -> When:
    """Requests with this in their target."""
    return lambda request: part in request.target


def has_header(name: str, part: str = "") -> When:
    """Requests with such a header."""
    return lambda request: name in request.headers and part in request.headers[name]


def lacks_header(name: str) -> When:
    return lambda request: name not in request.headers


def body_matches(pattern: bytes) -> When:
    """Requests with this in their body."""
    return lambda request: re.search(pattern, request.body) is not None


def lacks_version(request: Request) -> bool:
    return "api-version" not in request.target and "/versions" not in request.target


def both(first: When, second: When) -> When:
    return lambda request: first(request) and second(request)


# --- faults in the response


def respond_with(status: int, when: When = always, body: bytes = ERROR) -> Fault:
    """A different response."""

    def on_reply(request: Request, reply: Reply) -> Reply:
        return replace(reply, status=status).with_body(body) if when(request) else reply

    return Fault(on_reply=on_reply)


def change_status(before: int, after: int, when: When = always) -> Fault:
    """A different status instead of `before`."""

    def on_reply(request: Request, reply: Reply) -> Reply:
        return replace(reply, status=after) if reply.status == before and when(request) else reply

    return Fault(on_reply=on_reply)


def edit_json(change: Callable[[Any], Any], when: When = always, **shape: Any) -> Fault:
    """Different JSON: what `change` returns, or None if it changed the value in place."""

    def on_reply(request: Request, reply: Reply) -> Reply:
        if not when(request) or not reply.body.startswith(b"{"):
            return reply
        value = json.loads(reply.body)
        changed = change(value)
        compact = {"separators": (",", ":")} | shape
        return reply.with_body(
            json.dumps(value if changed is None else changed, **compact).encode()
        )

    return Fault(on_reply=on_reply)


def edit_document(change: Callable[[Json], Any], when: When = always, **shape: Any) -> Fault:
    return edit_json(
        lambda value: change(value) if "Events" in value else None, both(is_document, when), **shape
    )


def edit_events(change: Callable[[Json], object], when: When = always) -> Fault:
    """Change every event of every document."""

    def each(value: Json) -> None:
        for entry in value["Events"]:
            change(entry)

    return edit_document(each, when)


def set_members(**members: object) -> Fault:
    return edit_events(lambda entry: entry.update(members))


def edit_started_events(change: Callable[[Json], object], when: When = always) -> Fault:
    return edit_events(
        lambda entry: change(entry) if entry["EventStatus"] == "Started" else None, when
    )


def drop_header(name: str, status: int = 0) -> Fault:
    """Drop a header from every response, or from those with a status."""
    return Fault(
        on_reply=lambda request, reply: (
            reply.with_header(name, None) if status in (0, reply.status) else reply
        )
    )


def set_header(name: str, value: str, when: When = always) -> Fault:
    """A different value of a header."""
    return Fault(
        on_reply=lambda request, reply: reply.with_header(name, value) if when(request) else reply
    )


def change_reply(when: When = always, **changes: Any) -> Fault:
    return Fault(
        on_reply=lambda request, reply: replace(reply, **changes) if when(request) else reply
    )


def count_as_change(of: Callable[[Request, Reply], bool], when: When = is_document) -> Fault:
    """A DocumentIncarnation that also grows with requests that change nothing."""
    seen = list[Request]()

    def on_reply(request: Request, reply: Reply) -> Reply:
        if of(request, reply):
            seen.append(request)
        if not when(request) or b'"Events"' not in reply.body:
            return reply
        value = json.loads(reply.body)
        value["DocumentIncarnation"] += len(seen)
        return reply.with_body(json.dumps(value, separators=(",", ":")).encode())

    return Fault(on_reply=on_reply)


def keep_ended_events(*, changed: Json) -> Fault:
    """Ended events stay in the document."""
    past = dict[str, Json]()

    def change(value: Json) -> None:
        here = {entry["EventId"]: entry for entry in value["Events"]}
        value["Events"] += [entry for event_id, entry in past.items() if event_id not in here]
        past.update({event_id: entry | changed for event_id, entry in here.items()})

    return edit_document(change)


# --- faults in reading the request


def change_request_header(name: str, value: str | None, when: When = always) -> Fault:
    """Treat a request as if it had this header, or for None as if it had not."""
    return Fault(
        on_request=lambda request: request.with_header(name, value) if when(request) else request
    )


def rewrite_target(pattern: str, other: str, when: When = always) -> Fault:
    """Treat a request as if it had a different target."""
    return Fault(
        on_request=lambda request: (
            replace(request, target=re.sub(pattern, other, request.target))
            if when(request)
            else request
        )
    )


POLLS = count()


def move_not_before(entry: Json) -> None:
    entry["NotBefore"] = f"Thu, 22 Jul 2021 04:50:{next(POLLS) % 60:02d} GMT"


def all_but_first() -> When:
    """All requests but the first."""
    times = count()
    return lambda request: next(times) > 0


HEADER_NOT_REQUIRED = change_request_header("Metadata", "true")
PLAIN_TEXT_ERROR = respond_with(400, always, b"Bad Request")
STUCK_INCARNATION = edit_document(lambda value: value.update(DocumentIncarnation=7))
ERROR_AS_200 = change_status(400, 200)
POST_ERROR_AS_200 = change_status(400, 200, is_post)
NOT_FOUND_AS_200 = change_status(404, 200)


def reject_approval(when: When) -> Fault:
    """Reject an approval."""
    return respond_with(400, both(is_post, when))


def add_event(**members: object) -> Fault:
    """One more event, like the last one except for these members."""
    return edit_document(
        lambda value: (
            value["Events"].append(value["Events"][-1] | members) if value["Events"] else None
        )
    )


def reversed_members(compute: Json) -> Json:
    return dict(reversed(compute.items()))
