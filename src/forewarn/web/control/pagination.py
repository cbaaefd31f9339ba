"""Lists in pages.

A cursor is the key of the last item shown, so an item that exists throughout is shown exactly once.
"""

import asyncio
import base64
import binascii
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from forewarn.errors import Invalid

CURSOR_LENGTH_MAX = 1000
SLICE = 200
"""Items that are built before yielding to the event loop."""

T = TypeVar("T")
V = TypeVar("V")
Key = tuple[str, ...]


def page(
    items: Sequence[T], key: Callable[[T], Key], limit: int, cursor: str | None
) -> tuple[Sequence[T], str | None]:
    """The next `limit` items and the cursor of the page after them.

    The items are in the order of their keys; a key is unique and never changes.
    """
    first = 0 if cursor is None else bisect_right(items, decode(cursor), key=key)
    shown = items[first : first + limit]
    return shown, encode(key(shown[-1])) if first + limit < len(items) else None


async def build_in_slices(
    keys: Sequence[T], build: Callable[[Sequence[T]], Iterable[V]]
) -> list[V]:
    """Build a large page without delaying polls. What is deleted meanwhile is left out."""
    built: list[V] = []
    for first in range(0, len(keys), SLICE):
        built += build(keys[first : first + SLICE])
        await asyncio.sleep(0)
    return built


def encode(key: Key) -> str:
    text = json.dumps(key, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(cursor: str) -> Key:
    """The key in a cursor; Invalid if we did not make it."""
    try:
        if len(cursor) > CURSOR_LENGTH_MAX:
            raise ValueError
        padding = "=" * (-len(cursor) % 4)
        key = json.loads(base64.b64decode(cursor + padding, altchars=b"-_", validate=True))
        if not isinstance(key, list) or not key or not all(isinstance(part, str) for part in key):
            raise ValueError
    except (binascii.Error, ValueError, RecursionError) as error:
        raise invalid_cursor(cursor) from error
    return tuple(key)


def invalid_cursor(cursor: str) -> Invalid:
    return Invalid(
        f"cursor: expected the `next` of an earlier page, got {cursor[:80]!r}", field="cursor"
    )
