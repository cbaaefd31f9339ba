"""The POST body that approves events.

It is read as JSON whatever its Content-Type: most clients send another one.
"""

from typing import Annotated, Any

import msgspec

from forewarn.errors import Invalid

EVENT_ID_LENGTH_MAX = 64
ENTRIES_MAX = 1000
DECODER = msgspec.json.Decoder(float_hook=lambda text: None)
"""No member is a number; one that is out of range, such as 1e999, is ignored like any other. An
EventId that is a number is not a text.
"""
SHAPE = '{"StartRequests":[{"EventId":"<id>"}]}'


class _Start(msgspec.Struct):
    EventId: Annotated[str, msgspec.Meta(min_length=1, max_length=EVENT_ID_LENGTH_MAX)]


class _Request(msgspec.Struct):
    """Other members, such as DocumentIncarnation, are ignored."""

    StartRequests: Annotated[list[_Start], msgspec.Meta(min_length=1, max_length=ENTRIES_MAX)]


def parse(body: bytes) -> tuple[str, ...]:
    """Return the event ids in upper case, in order, without duplicates."""
    try:
        values = _normalize_name(DECODER.decode(body.decode("utf-8-sig")), "StartRequests")
        if isinstance(values, dict) and isinstance(starts := values.get("StartRequests"), list):
            values["StartRequests"] = [_normalize_name(start, "EventId") for start in starts]
        request = msgspec.convert(values, _Request)
    except (UnicodeDecodeError, RecursionError, msgspec.DecodeError) as error:
        raise Invalid(f"Bad request. Expected {SHAPE}; {error}") from error
    return tuple(dict.fromkeys(start.EventId.upper() for start in request.StartRequests))


def _normalize_name(value: Any, name: str) -> Any:
    """The object, with its member of this name written like this: .NET clients use camelCase."""
    members = value if isinstance(value, dict) else {}
    given = [each for each in members if each.lower() == name.lower()]
    if len(given) > 1:
        raise msgspec.ValidationError(f"`{given[0]}` and `{given[1]}` are the same member")
    return value | {name: value[given[0]]} if given else value
