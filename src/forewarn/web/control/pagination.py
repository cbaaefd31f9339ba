"""Lists in pages.

A cursor is the key of the last item that was shown, so what exists throughout is shown exactly
once.
"""

import base64
import binascii
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

from forewarn.errors import Invalid

LENGTH_MAX = 1000

T = TypeVar("T")
Key = tuple[str, ...]


def page(
    items: Sequence[T], key: Callable[[T], Key], limit: int, cursor: str | None
) -> tuple[Sequence[T], str | None]:
    """The next items, at most `limit`, and the cursor of those after them. The items stand in the
    order of their keys.

    A key must tell its item apart from all others and never change.
    """
    first = 0 if cursor is None else bisect_right(items, decode(cursor), key=key)
    shown = items[first : first + limit]
    return shown, encode(key(shown[-1])) if first + limit < len(items) else None


def encode(key: Key) -> str:
    return (
        base64.urlsafe_b64encode(json.dumps(key, separators=(",", ":")).encode())
        .decode()
        .rstrip("=")
    )


def decode(cursor: str) -> Key:
    """The key that a cursor stands for; Invalid if it is none of ours."""
    try:
        if len(cursor) > LENGTH_MAX:
            raise ValueError
        key = json.loads(
            base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        )
        if not isinstance(key, list) or not key or not all(isinstance(part, str) for part in key):
            raise ValueError
    except (binascii.Error, ValueError, RecursionError) as error:
        raise Invalid(
            f"cursor: expected the `next` of an earlier answer, got {cursor[:80]!r}", field="cursor"
        ) from error
    return tuple(key)
