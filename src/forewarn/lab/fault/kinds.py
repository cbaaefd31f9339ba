"""The kinds of faults: the members of each, and what it does to a request or a response.

The types validate a fault, and the JSON Schema and the error messages are derived from them. What
faults do to the document is in `shown_document.py`, because it depends on what a VM has seen.
"""

from http import HTTPStatus
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from forewarn.duration import PATTERN, Duration
from forewarn.fleetfile.schema import make_schema, number_from
from forewarn.lab.fault.response import NO_RESPONSE, Ending, FaultyResponse
from forewarn.lab.names import VmNames
from forewarn.web.http.message import CONTENT_TYPE, content_length

TEXT_PLAIN = (b"content-type", b"text/plain; charset=utf-8")
SECONDS_MAX = 120
"""The slowest first response that the real endpoint has been seen to give."""
DAYS_7 = 7 * 24 * 3600
WHOLE_SECONDS = "a whole number of seconds"

_TIMESTAMP = (
    r"2[0-9]{3}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    r"(Z|[+-][01][0-9]:[0-5][0-9])"
)

Seconds = Annotated[float, number_from(0, SECONDS_MAX, "a number of seconds")]
Chance = Annotated[float, Meta(ge=0, le=1, description="a number from 0 (never) to 1 (always)")]
Begin = Annotated[
    str,
    Meta(
        pattern=rf"^({PATTERN}|{_TIMESTAMP})$(?!\n)",
        description="a duration from now such as 90s or 2h, or a time such as 2026-03-04T12:00:00Z",
    ),
]
Bytes = Annotated[int, number_from(0, 10**6)]


class AnyFault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="fault",
    rename={"from_": "from", "for_": "for"},
):
    """The members of every fault. No `vms`: all VMs. No `for`: until it is removed."""

    vms: VmNames = ()
    from_: Begin = "0s"
    for_: Duration | None = None

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class RequestFault(AnyFault, frozen=True, kw_only=True):
    """Affects single requests: a limited number of them, or each with some probability."""

    requests: Annotated[int, number_from(1, 10**6)] | None = None
    chance: Chance = 1.0


class MethodFault(RequestFault, frozen=True, kw_only=True):
    """Affects any request, or those of one HTTP method."""

    method: Literal["GET", "POST", "any"] = "any"


class FirstCall(MethodFault, frozen=True, kw_only=True, tag="first-call"):
    """The first request of each VM is answered late, as on Azure."""

    seconds: Seconds = 60.0

    def draw_delay(self, random: Random) -> float:
        return self.seconds


class Latency(MethodFault, frozen=True, kw_only=True, tag="latency"):
    """Responses are late by `seconds`, give or take `spread_seconds`, at most `cap_seconds`."""

    distribution: Literal["fixed", "uniform", "normal"] = "fixed"
    seconds: Seconds
    spread_seconds: Seconds = 0.0
    cap_seconds: Seconds = float(SECONDS_MAX)

    def draw_delay(self, random: Random) -> float:
        seconds = self.seconds
        if self.distribution == "uniform":
            seconds += random.uniform(-self.spread_seconds, self.spread_seconds)
        elif self.distribution == "normal":
            seconds = random.gauss(seconds, self.spread_seconds)
        return min(max(seconds, 0.0), self.cap_seconds)


class Refuse(MethodFault, frozen=True, kw_only=True, tag="refuse"):
    """The connection is reset before a byte of the response."""


class ErrorStatus(MethodFault, frozen=True, kw_only=True, tag="status"):
    """The request is not processed; the response is an error."""

    code: Literal[404, 410, 429, 500, 503]
    retry_after: Annotated[int, number_from(0, 3600, WHOLE_SECONDS)] | None = None

    def respond(self) -> FaultyResponse:
        body = msgspec.json.encode({"error": HTTPStatus(self.code).phrase})
        response = FaultyResponse(self.code, dict([CONTENT_TYPE, content_length(body)]), body)
        if self.retry_after is None:
            return response
        return response.with_header(b"retry-after", b"%d" % self.retry_after)


class ShortNotice(RequestFault, frozen=True, kw_only=True, tag="short-notice"):
    """An event is hidden until `seconds` before its NotBefore."""

    seconds: Annotated[int, number_from(0, DAYS_7, WHOLE_SECONDS)]


class NoStarted(RequestFault, frozen=True, kw_only=True, tag="no-started"):
    """An event stays Scheduled until it disappears."""


class Skew(RequestFault, frozen=True, kw_only=True, tag="skew"):
    """NotBefore is shifted by `seconds`."""

    seconds: Annotated[int, number_from(-DAYS_7, DAYS_7, WHOLE_SECONDS)]


class Stale(RequestFault, frozen=True, kw_only=True, tag="stale"):
    """The document of `by` changes ago; without `by`, the last one before the fault began."""

    by: Annotated[int, number_from(1, 63)] | None = None


class IncarnationReset(RequestFault, frozen=True, kw_only=True, tag="incarnation-reset"):
    """DocumentIncarnation starts again at 1."""


class NoEvents(RequestFault, frozen=True, kw_only=True, tag="no-events"):
    """The member `Events` is missing."""

    def change(self, response: FaultyResponse) -> FaultyResponse:
        if response.status != 200:
            return response
        document = msgspec.json.decode(response.body)
        del document["Events"]
        return response.with_body(msgspec.json.encode(document))


class TextPlain(MethodFault, frozen=True, kw_only=True, tag="text-plain"):
    """The Content-Type is text/plain."""

    def change(self, response: FaultyResponse) -> FaultyResponse:
        has_type = TEXT_PLAIN[0] in response.headers
        return response.with_header(*TEXT_PLAIN) if has_type else response


class Empty(MethodFault, frozen=True, kw_only=True, tag="empty"):
    """The response is a 200 with an empty body. Errors stay as they are."""

    def change(self, response: FaultyResponse) -> FaultyResponse:
        if response.status != 200:
            return response
        # An ETag would make the empty body cacheable.
        headers = {name: value for name, value in response.headers.items() if name != b"etag"}
        return response._replace(headers=headers).with_body(b"")


class Truncate(MethodFault, frozen=True, kw_only=True, tag="truncate"):
    """The body ends after `bytes`, or in its middle.

    `close`: before its Content-Length, and the connection is closed. `whole`: Content-Length
    matches, but the JSON is cut.
    """

    bytes: Bytes | None = None
    mode: Literal["close", "whole"] = "close"

    def change(self, response: FaultyResponse) -> FaultyResponse:
        if not response.body:
            return response
        body = cut(response.body, self.bytes)
        if self.mode == "whole":
            return response.with_body(body)
        return response._replace(body=body, ending=Ending.CLOSE)


class Reset(MethodFault, frozen=True, kw_only=True, tag="reset"):
    """The connection is reset after `bytes` of the body, or in its middle."""

    bytes: Bytes | None = None

    def change(self, response: FaultyResponse) -> FaultyResponse:
        if not response.body:
            return NO_RESPONSE
        return response._replace(body=cut(response.body, self.bytes), ending=Ending.RESET)


def cut(body: bytes, size: int | None) -> bytes:
    """Cut at `size` or in the middle, and always at least the last byte."""
    return body[: len(body) // 2 if size is None else min(size, len(body) - 1)]


class EnablementLapse(AnyFault, frozen=True, kw_only=True, tag="lapse"):
    """Enablement lapses: the scope counts as one that is never polled."""


Fault = (
    FirstCall
    | Latency
    | Refuse
    | ErrorStatus
    | ShortNotice
    | NoStarted
    | Skew
    | Stale
    | IncarnationReset
    | NoEvents
    | TextPlain
    | Empty
    | Truncate
    | Reset
    | EnablementLapse
)
"""In the order in which active faults are applied: delay, refusal, status, document, body.

A lapse does not affect requests.
"""

KINDS: tuple[type[AnyFault], ...] = Fault.__args__
VIEW_FAULTS = (ShortNotice, NoStarted, Skew, Stale, IncarnationReset)
DOCUMENT_FAULTS = (*VIEW_FAULTS, NoEvents)
"""Faults that only affect a GET of the document."""
BODY_FAULTS = (NoEvents, TextPlain, Empty, Truncate, Reset)


SCHEMA = make_schema(Fault)
"""The JSON Schema of the types above. Only the parser rejects a `from` such as February 30."""
