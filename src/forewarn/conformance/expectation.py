"""What a check expects of a response: functions that raise `Failed` for any other one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from forewarn.conformance.check import Body, expect, expect_equal
from forewarn.conformance.raw_http import JsonObject, RawResponse, Request, is_list_of

if TYPE_CHECKING:
    from forewarn.conformance.session import Session

ResponseTest = Callable[[RawResponse], object]


def sends(expected: ResponseTest, *requests: Request) -> Body:
    """Send a poll or these requests, each on a connection of its own."""

    def run(session: "Session") -> None:
        for request in requests or (Request(),):
            session.send(request, expected)

    return run


def gives(wanted: int, *requests: Request) -> Body:
    """This status."""
    return sends(status(wanted), *requests)


def served(*requests: Request) -> Body:
    """The document."""
    return sends(a_document, *requests)


def status(wanted: int) -> ResponseTest:
    return lambda response: expect(response.status == wanted, f"status {wanted}", response)


def a_rejection(response: RawResponse) -> None:
    expect(400 <= response.status < 500, "a 4xx status", response)


def an_error(wanted: int) -> ResponseTest:
    """This status, with a body `{"error": "…"}`."""

    def look(response: RawResponse) -> None:
        status(wanted)(response)
        error = response.object()["error"]
        expect(isinstance(error, str) and error, "an error message", response)

    return look


def json_equal(wanted: object) -> ResponseTest:
    return lambda response: expect_equal("the body", response.json(), wanted)


def media_type(wanted: str) -> ResponseTest:
    """The Content-Type without parameters."""

    def look(response: RawResponse) -> None:
        actual = response.header("content-type").partition(";")[0].strip().lower()
        expect_equal("the Content-Type", actual, wanted)

    return look


class PolledDocument(NamedTuple):
    response: RawResponse
    incarnation: int
    events: tuple[JsonObject, ...]

    def __repr__(self) -> str:
        return repr(self.response)

    def find(self, event_id: str) -> JsonObject | None:
        """In any case of letters: how an id is written is for another check."""
        wanted = event_id.upper()
        return next((e for e in self.events if str(e.get("EventId")).upper() == wanted), None)

    def event(self, event_id: str) -> JsonObject:
        event = self.find(event_id)
        expect(event is not None, f"the event {event_id}", self)
        return event or JsonObject()


def a_document(response: RawResponse) -> PolledDocument:
    status(200)(response)
    value = response.object()
    incarnation, events = value["DocumentIncarnation"], value["Events"]
    is_valid = isinstance(incarnation, int) and is_list_of(JsonObject, events)
    expect(is_valid, "a document with a list of events", response)
    return PolledDocument(response, incarnation, tuple(events))
