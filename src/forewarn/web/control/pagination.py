"""Lists in pages.

A cursor is the key of the last item shown, so an item that exists throughout is shown exactly once.
"""

import asyncio
import base64
import binascii
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec

from forewarn.errors import Invalid
from forewarn.web.control.dependencies import PageRequest

CURSOR_LENGTH_MAX = 1000
SLICE = 200
"""Items that are built before yielding to the event loop."""

Key = tuple[str, ...]
_DECODER = msgspec.json.Decoder(Annotated[Key, msgspec.Meta(min_length=1)])


T = TypeVar("T")
L = TypeVar("L", bound="Paged")


def name_key(name: str) -> Key:
    return (name,)


class Paged(msgspec.Struct, frozen=True, kw_only=True):
    """What ends every list: how many items exist, and the cursor of the next page."""

    total: int
    next: str | None


async def build_page(
    list_type: Callable[..., L],
    items: Sequence[T],
    key: Callable[[T], Key],
    build: Callable[[Sequence[T]], Iterable[object]],
    request: PageRequest,
) -> L:
    """A page of the list.

    It is built in slices: a large page must not delay polls. What is deleted meanwhile is left out.
    """
    total = len(items)
    shown, after = page(items, key, request.limit, request.cursor)
    built: list[object] = []
    for first in range(0, len(shown), SLICE):
        built += build(shown[first : first + SLICE])
        await asyncio.sleep(0)
    return list_type(built, total=total, next=after)


def page(
    items: Sequence[T], key: Callable[[T], Key], limit: int, cursor: str | None
) -> tuple[Sequence[T], str | None]:
    """The next `limit` items and the cursor of the page after them.

    The items are in the order of their keys; a key is unique and never changes.
    """
    first = 0 if cursor is None else bisect_right(items, decode(cursor), key=key)
    shown = items[first : first + limit]
    return shown, encode(key(shown[-1])) if first + limit < len(items) else None


def encode(key: Key) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(key, enc_hook=str)).decode().rstrip("=")


def decode(cursor: str) -> Key:
    """The key in a cursor; Invalid if we did not make it."""
    try:
        if len(cursor) > CURSOR_LENGTH_MAX:
            raise ValueError
        padding = "=" * (-len(cursor) % 4)
        text = base64.b64decode(cursor + padding, altchars=b"-_", validate=True)
        key: Key = _DECODER.decode(text)
    except (binascii.Error, ValueError) as error:
        raise invalid_cursor(cursor) from error
    return key


def invalid_cursor(cursor: str) -> Invalid:
    return Invalid(
        f"cursor: expected the `next` of an earlier page, got {cursor[:80]!r}", field="cursor"
    )
