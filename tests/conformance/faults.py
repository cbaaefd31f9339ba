"""What a server can do wrong, as faults to choose from."""

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


def asks(part: str) -> When:
    """Requests with this in their target."""
    return lambda request: part in request.target


def has(name: str, part: str = "") -> When:
    """Requests with such a header."""
    return lambda request: name in request.headers and part in request.headers[name]


def lacks(name: str) -> When:
    return lambda request: name not in request.headers


def sends(pattern: bytes) -> When:
    """Requests with this in their body."""
    return lambda request: re.search(pattern, request.body) is not None


def lacks_version(request: Request) -> bool:
    return "api-version" not in request.target and "/versions" not in request.target


def both(first: When, second: When) -> When:
    return lambda request: first(request) and second(request)


# --- what an answer becomes


def answers(status: int, when: When = always, body: bytes = ERROR) -> Fault:
    """Another answer altogether."""

    def told(request: Request, reply: Reply) -> Reply:
        return replace(reply, status=status).with_body(body) if when(request) else reply

    return Fault(told=told)


def turns(before: int, after: int, when: When = always) -> Fault:
    """One status into another."""

    def told(request: Request, reply: Reply) -> Reply:
        return replace(reply, status=after) if reply.status == before and when(request) else reply

    return Fault(told=told)


def edits(change: Callable[[Any], Any], when: When = always, **shape: Any) -> Fault:
    """Another JSON. What `change` gives back replaces it; None: it was changed in place."""

    def told(request: Request, reply: Reply) -> Reply:
        if not when(request) or not reply.body.startswith(b"{"):
            return reply
        said = json.loads(reply.body)
        changed = change(said)
        compact = {"separators": (",", ":")} | shape
        return reply.with_body(json.dumps(said if changed is None else changed, **compact).encode())

    return Fault(told=told)


def document(change: Callable[[Json], Any], when: When = always, **shape: Any) -> Fault:
    return edits(
        lambda said: change(said) if "Events" in said else None, both(is_document, when), **shape
    )


def event(change: Callable[[Json], object], when: When = always) -> Fault:
    """Every event of every document."""

    def each(said: Json) -> None:
        for one in said["Events"]:
            change(one)

    return document(each, when)


def sets(**members: object) -> Fault:
    return event(lambda one: one.update(members))


def once_started(change: Callable[[Json], object], when: When = always) -> Fault:
    return event(lambda one: change(one) if one["EventStatus"] == "Started" else None, when)


def drops(name: str, status: int = 0) -> Fault:
    """A header, from every answer or from those of a status."""
    return Fault(
        told=lambda request, reply: (
            reply.with_header(name, None) if status in (0, reply.status) else reply
        )
    )


def says(name: str, value: str, when: When = always) -> Fault:
    """Another value of a header."""
    return Fault(
        told=lambda request, reply: reply.with_header(name, value) if when(request) else reply
    )


def tells(when: When = always, **changes: Any) -> Fault:
    return Fault(told=lambda request, reply: replace(reply, **changes) if when(request) else reply)


def counts(of: Callable[[Request, Reply], bool], when: When = is_document) -> Fault:
    """A DocumentIncarnation that grows with something that is no change."""
    seen = list[Request]()

    def told(request: Request, reply: Reply) -> Reply:
        if of(request, reply):
            seen.append(request)
        if not when(request) or b'"Events"' not in reply.body:
            return reply
        said = json.loads(reply.body)
        said["DocumentIncarnation"] += len(seen)
        return reply.with_body(json.dumps(said, separators=(",", ":")).encode())

    return Fault(told=told)


def remembers(*, changed: Json) -> Fault:
    """Events that are over stay in the document."""
    past = dict[str, Json]()

    def change(said: Json) -> None:
        here = {one["EventId"]: one for one in said["Events"]}
        said["Events"] += [one for event_id, one in past.items() if event_id not in here]
        past.update({event_id: one | changed for event_id, one in here.items()})

    return document(change)


# --- what a request becomes


def heeds(name: str, value: str | None, when: When = always) -> Fault:
    """A request as if it had this header, or for None as if it had not."""
    return Fault(
        asked=lambda request: request.with_header(name, value) if when(request) else request
    )


def reads(pattern: str, other: str, when: When = always) -> Fault:
    """A request as if it had another target."""
    return Fault(
        asked=lambda request: (
            replace(request, target=re.sub(pattern, other, request.target))
            if when(request)
            else request
        )
    )


POLLS = count()


def is_ever_later(one: Json) -> None:
    one["NotBefore"] = f"Thu, 22 Jul 2021 04:50:{next(POLLS) % 60:02d} GMT"


def is_repeated() -> When:
    """All requests but the first."""
    times = count()
    return lambda request: next(times) > 0


FORGETS_HEADER = heeds("Metadata", "true")
NO_JSON = answers(400, always, b"Bad Request")
STUCK = document(lambda said: said.update(DocumentIncarnation=7))
IS_OK = turns(400, 200)
IS_OK_POST = turns(400, 200, is_post)
IS_GONE = turns(404, 200)


def refuses(when: When) -> Fault:
    """An approval that is refused."""
    return answers(400, both(is_post, when))


def extra(**members: object) -> Fault:
    """One more event, like the last one but for these members."""
    return document(
        lambda said: said["Events"].append(said["Events"][-1] | members) if said["Events"] else None
    )


def renamed(compute: Json) -> Json:
    return dict(reversed(compute.items()))
