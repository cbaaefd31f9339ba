"""Lists in pages.

A cursor is the key of the last item shown, so an item that exists throughout is shown exactly once.
"""

import base64
import binascii
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec
from litestar import Response
from litestar.serialization import encode_json

from forewarn.engine.turns import SLICE, Turn
from forewarn.errors import Invalid
from forewarn.web.control.dependencies import PageRequest
from forewarn.web.control.json_body import CHUNK_BYTES, JsonBody

CURSOR_LENGTH_MAX = 1000
VMS_PER_TURN_MAX = 200
"""The name of a VM costs much less than an item, but a host has up to 2,000."""

Key = tuple[str, ...]
_DECODER = msgspec.json.Decoder(Annotated[Key, msgspec.Meta(min_length=1)])


T = TypeVar("T")
L = TypeVar("L", bound="Paged")
S = TypeVar("S", bound=msgspec.Struct)


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
    count_vms: Callable[[T], int] = lambda item: 0,
) -> L:
    """A page of the list.

    It is built in slices: a large page must not delay polls. What is deleted meanwhile is left out.
    `count_vms` says how many VMs an item has, if that may be many.
    """
    total = len(items)
    shown, after = page(items, key, request.limit, request.cursor)
    built: list[object] = []
    for part in _slices(shown, count_vms):
        await request.take_turn()
        built += build(part)
    return list_type(built, total=total, next=after)


def _slices(items: Sequence[T], count_vms: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Parts of at most SLICE items, and of one item or at most VMS_PER_TURN_MAX VMs."""
    part, vms = list[T](), 0
    for item in items:
        more = count_vms(item)
        if part and (len(part) == SLICE or vms + more > VMS_PER_TURN_MAX):
            yield part
            part, vms = [], 0
        part.append(item)
        vms += more
    if part:
        yield part


async def render_list(shown: S, take_turn: Turn) -> Response[S]:
    """A response with lists, encoded in slices, as they are built."""
    body = JsonBody()
    for number, (name, value) in enumerate(msgspec.structs.asdict(shown).items()):
        body.add(b"%b%b:" % (b"," if number else b"{", encode_json(name)))
        if isinstance(value, list):
            await _add_items(body, value, take_turn)
        else:
            body.add(encode_json(value))
    body.add(b"}")
    return body.respond(take_turn)


async def _add_items(body: JsonBody, items: Sequence[object], take_turn: Turn) -> None:
    """In slices of at most SLICE items, which end with the item that makes them a chunk."""
    left, left_bytes = 0, 0
    body.add(b"[")
    for number, item in enumerate(items):
        if left <= 0 or left_bytes <= 0:
            await take_turn()
            left, left_bytes = SLICE, CHUNK_BYTES
        encoded = encode_json(item)
        body.add(b"," + encoded if number else encoded)
        left -= 1
        left_bytes -= len(encoded)
    body.add(b"]")


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
