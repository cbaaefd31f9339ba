"""The POST body that approves events.

It is read as JSON whatever its Content-Type: most clients send another one.
"""

from typing import Annotated

import msgspec

from forewarn.errors import Invalid

EVENT_ID_LENGTH_MAX = 64
ENTRIES_MAX = 1000
SHAPE = '{"StartRequests":[{"EventId":"<id>"}]}'


class _Start(msgspec.Struct):
    EventId: Annotated[str, msgspec.Meta(min_length=1, max_length=EVENT_ID_LENGTH_MAX)]


class _Request(msgspec.Struct):
    """Other members, such as DocumentIncarnation, are ignored."""

    StartRequests: Annotated[list[_Start], msgspec.Meta(min_length=1, max_length=ENTRIES_MAX)]


_decoder = msgspec.json.Decoder(_Request)


def parse(body: bytes) -> tuple[str, ...]:
    """Return the event ids in upper case, in order, without duplicates."""
    try:
        request = _decoder.decode(body.decode("utf-8-sig"))
    except (UnicodeDecodeError, RecursionError, msgspec.DecodeError) as error:
        raise Invalid(f"Bad request. Expected {SHAPE}; {error}") from error
    return tuple(dict.fromkeys(start.EventId.upper() for start in request.StartRequests))
