"""What an endpoint can do wrong, each kind a type. The types are the parser, the JSON Schema and
the words of the errors.

A file's `0.5` is text to the reader of files, so numbers that need not be whole may come as text
too.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forewarn.duration import EXPECTED, Duration
from forewarn.duration import PATTERN as SPAN
from forewarn.fleetfile.schema import Name

SECONDS_MAX = 120
"""As long as the real endpoint has been seen to take for a first answer (protocol 6.1)."""
DAYS_7 = 7 * 24 * 3600
VMS_MAX = 10_000

_END = r"$(?!\n)"
_FRACTION = r"(\.[0-9]{1,6})?"
_SECONDS = rf"^(120(\.0{{1,6}})?|(1[01][0-9]|[0-9]{{1,2}}){_FRACTION}){_END}"
_MOMENT = r"2[0-9]{3}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][01][0-9]:[0-5][0-9])"

Seconds = Annotated[
    Annotated[float, Meta(ge=0, le=SECONDS_MAX)] | Annotated[str, Meta(pattern=_SECONDS)],
    Meta(description=f"a number of seconds from 0 to {SECONDS_MAX}"),
]
Chance = Annotated[
    Annotated[float, Meta(ge=0, le=1)]
    | Annotated[str, Meta(pattern=rf"^(0{_FRACTION}|1(\.0{{1,6}})?){_END}")],
    Meta(description="a number from 0 (never) to 1 (always)"),
]
Lead = Annotated[
    int, Meta(ge=0, le=DAYS_7, description=f"a whole number of seconds from 0 to {DAYS_7}")
]
Skewed = Annotated[
    int,
    Meta(
        ge=-DAYS_7, le=DAYS_7, description=f"a whole number of seconds from -{DAYS_7} to {DAYS_7}"
    ),
]
Begin = Annotated[
    str,
    Meta(
        pattern=rf"^({SPAN}|{_MOMENT}){_END}",
        description="a time from now such as 90s or 2h, or a moment such as 2026-03-04T12:00:00Z",
    ),
]
Vms = Annotated[
    tuple[Name, ...],
    Meta(max_length=VMS_MAX, description=f"a list of at most {VMS_MAX} names of VMs"),
]
For = Annotated[Duration | None, Meta(description=EXPECTED)]
Count = Annotated[
    Annotated[int, Meta(ge=1, le=1_000_000)] | None,
    Meta(description="a whole number from 1 to 1000000"),
]
Bytes = Annotated[
    Annotated[int, Meta(ge=0, le=1_000_000)] | None,
    Meta(description="a whole number from 0 to 1000000"),
]
Changes = Annotated[
    Annotated[int, Meta(ge=1, le=63)] | None, Meta(description="a whole number from 1 to 63")
]
RetryAfter = Annotated[
    Annotated[int, Meta(ge=0, le=3600)] | None,
    Meta(description="a whole number of seconds from 0 to 3600"),
]


class Method(StrEnum):
    GET = "GET"
    POST = "POST"
    ANY = "any"


class Distribution(StrEnum):
    FIXED = "fixed"
    UNIFORM = "uniform"
    NORMAL = "normal"
    EXPONENTIAL = "exponential"
    LOGNORMAL = "lognormal"


class Cut(StrEnum):
    CLOSE = "close"
    WHOLE = "whole"


class Base(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="fault",
    rename={"from_": "from", "for_": "for"},
):
    """What all have: whom it befalls (nobody named: everybody), from when, and for how long
    (nothing: until it is removed).
    """

    vms: Vms = ()
    from_: Begin = "0s"
    for_: For = None

    @property
    def kind(self) -> str:
        return kind_of(type(self))


class Touching(Base, frozen=True, kw_only=True):
    """What befalls single requests: only so many of them, or each by chance only."""

    requests: Count = None
    chance: Chance = 1.0


class AnyRequest(Touching, frozen=True, kw_only=True):
    """What befalls a request whatever it asks for."""

    method: Method = Method.ANY


class FirstCall(AnyRequest, frozen=True, kw_only=True, tag="first-call"):
    """A VM's first request since this began is answered so late (protocol 6.1)."""

    seconds: Seconds = 60.0


class Latency(AnyRequest, frozen=True, kw_only=True, tag="latency"):
    """Answers come late:

    `seconds` is the usual time, `spread_seconds` how far others lie from it, `cap_seconds` the
    longest.
    """

    distribution: Distribution = Distribution.FIXED
    seconds: Seconds
    spread_seconds: Seconds = 0.0
    cap_seconds: Seconds = float(SECONDS_MAX)


class Refuse(AnyRequest, frozen=True, kw_only=True, tag="refuse"):
    """Nobody answers: the door is closed; where a door is shared, the connection is reset without a
    byte.
    """


class Status(AnyRequest, frozen=True, kw_only=True, tag="status"):
    """The request is not heard, but answered with an error."""

    code: Literal[404, 410, 429, 500, 503]
    retry_after: RetryAfter = None


class ShortNotice(Touching, frozen=True, kw_only=True, tag="short-notice"):
    """An event is not shown until so many seconds before its NotBefore: late visibility (protocol
    6.2).
    """

    seconds: Lead


class NoStarted(Touching, frozen=True, kw_only=True, tag="no-started"):
    """An event stays Scheduled until it is gone (protocol 6.3)."""


class Skew(Touching, frozen=True, kw_only=True, tag="skew"):
    """NotBefore is so many seconds later than it really is; less than 0: earlier."""

    seconds: Skewed


class Stale(Touching, frozen=True, kw_only=True, tag="stale"):
    """The document as it was `by` changes ago; without `by`, as it was last shown before this
    began.
    """

    by: Changes = None


class Duplicate(Touching, frozen=True, kw_only=True, tag="duplicate"):
    """After each new document the one before is shown once more."""


class Reorder(Touching, frozen=True, kw_only=True, tag="reorder"):
    """Documents come out of order: the newest, the one before, the newest, and so on."""


class IncarnationReset(Touching, frozen=True, kw_only=True, tag="incarnation-reset"):
    """The numbers of the documents begin again at 1."""


class NoEvents(Touching, frozen=True, kw_only=True, tag="no-events"):
    """The member `Events` is missing."""


class TextPlain(AnyRequest, frozen=True, kw_only=True, tag="text-plain"):
    """The Content-Type is text/plain."""


class Empty(AnyRequest, frozen=True, kw_only=True, tag="empty"):
    """The answer is a 200 with an empty body."""


class Truncate(AnyRequest, frozen=True, kw_only=True, tag="truncate"):
    """The body ends after `bytes`, or in its middle.

    `close`: before its Content-Length, and the connection is closed; `whole`: Content-Length fits,
    but the JSON is cut.
    """

    bytes: Bytes = None
    mode: Cut = Cut.CLOSE


class Reset(AnyRequest, frozen=True, kw_only=True, tag="reset"):
    """The connection is reset after `bytes` of the body, or in its middle; without any byte if the
    answer has no body.
    """

    bytes: Bytes = None


class Lapse(Base, frozen=True, kw_only=True, tag="lapse"):
    """Enablement lapses: the scope counts as one that nobody polls (protocol 6.1)."""


Fault = (
    FirstCall
    | Latency
    | Refuse
    | Status
    | ShortNotice
    | NoStarted
    | Skew
    | Stale
    | Duplicate
    | Reorder
    | IncarnationReset
    | NoEvents
    | TextPlain
    | Empty
    | Truncate
    | Reset
    | Lapse
)
"""In the order in which those in force are applied: delay, refusal, status, what the document
shows, the body. A lapse is no matter of a request.
"""

KINDS: tuple[type[Base], ...] = Fault.__args__
VIEWS = (ShortNotice, NoStarted, Skew, Stale, Duplicate, Reorder, IncarnationReset)
DOCUMENTS = (*VIEWS, NoEvents)
"""Those that only a GET of the document can show."""
BODIES = (NoEvents, TextPlain, Empty, Truncate, Reset)


def kind_of(type_: type[Base]) -> str:
    """The word for a kind, as it stands in the member `fault`."""
    return str(type_.__struct_config__.tag)


SCHEMA: dict[str, Any] = msgspec.json.decode(
    msgspec.json.encode(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Fault)}
    )
)
"""Made from the types above.

What a schema cannot say, the parser says alone: a moment that is no date.
"""
