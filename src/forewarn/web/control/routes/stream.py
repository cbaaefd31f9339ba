"""The history as it grows, as server-sent events.

A stream keeps a number and nothing else: who is slow is let go, not fed.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, QueryParameter
from litestar.response import Stream

from forewarn.auth.tokens import Tokens
from forewarn.engine.entry import encode_entry, first_number, last_number
from forewarn.errors import Error
from forewarn.history.feed import HistoryFeed
from forewarn.history.query import EntryFilter
from forewarn.web.control.auth import Principal
from forewarn.web.control.openapi_responses import ANY
from forewarn.web.control.routes.history import OfChange, OfEvent, OfHost, OfScope, OfVm, change

STREAMS_MAX = 100
STREAMS_PER_CALLER_MAX = 10
"""How many one token may have open; without tokens, all who reach the listener together."""
HEARTBEAT_SECONDS = 15.0
RETRY_MILLISECONDS = 2000
CHUNK_BYTES = 32 * 1024
NUMBER_MAX = 2**63 - 1
MEDIA_TYPE = "text/event-stream"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

After = Annotated[
    int | None,
    QueryParameter(
        name="after",
        ge=0,
        le=NUMBER_MAX,
        description="Begin after the entry of this number; 0 is the oldest.",
    ),
]
LastId = Annotated[
    int | None,
    HeaderParameter(
        name="Last-Event-ID",
        ge=0,
        le=NUMBER_MAX,
        description="As `after`; a browser says it by itself.",
    ),
]


class Streams(Controller):
    path = "/api/v1/stream"
    tags = ("History",)

    @get(
        "/",
        responses=ANY
        | {
            200: ResponseSpec(
                str,
                generate_examples=False,
                media_type=MEDIA_TYPE,
                description="Server-sent events.",
            )
        },
    )
    async def follow(
        self,
        request: Request[Any, Any, Any],
        feed: NamedDependency[HistoryFeed],
        tokens: NamedDependency[Tokens],
        caller: NamedDependency[Principal],
        *,
        vm: OfVm = "",
        of_scope: OfScope = "",
        host: OfHost = "",
        event: OfEvent = "",
        what: OfChange = "",
        after: After = None,
        last_id: LastId = None,
    ) -> Stream:
        """Tells every change as it happens: an entry of the history each, its number as the id,
        from now on or after a number.
        """
        feed.check_room(STREAMS_MAX, caller.identity, STREAMS_PER_CALLER_MAX)
        wanted = EntryFilter(
            vm=vm, scope=of_scope, host=host, event=event.upper(), what=change(what)
        )
        is_allowed = permission(tokens, request.headers.get("authorization", ""))
        begin = after if last_id is None else last_id
        sent = frames(feed, wanted, begin, by=caller.identity, is_allowed=is_allowed)
        return Stream(sent, media_type=MEDIA_TYPE, headers=HEADERS)


def permission(tokens: Tokens, authorization: str) -> Callable[[], bool]:
    """Whether whoever was let in may still stay: a token may be revoked, and where there was none
    one may be asked for.
    """
    text = authorization.partition(" ")[2].strip()
    if not tokens:
        return lambda: not tokens
    return lambda: tokens.authenticate(text) is not None


async def frames(
    tail: HistoryFeed,
    wanted: EntryFilter,
    after: int | None,
    *,
    by: str = "",
    is_allowed: Callable[[], bool] = lambda: True,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> AsyncGenerator[bytes, None]:
    """What is sent, piece by piece.

    It ends when the server stops, the caller may no longer, or the store is lost.
    """
    clock = asyncio.get_running_loop().time
    stops = tail.stops
    with suppress(Error), tail.following(STREAMS_MAX, by, STREAMS_PER_CALLER_MAX):
        number = last = await tail.last()
        if after is not None:
            number = after if after <= last else 0
        yield b"retry: %d\nid: %d\n\n" % (RETRY_MILLISECONDS, number)
        if after is not None and after > last:
            # a number of another store: everything of this one is new
            yield _gap(after, first_number(1))
        beat_at = clock() + heartbeat_seconds
        while tail.stops == stops and is_allowed():  # ends with the server, too
            changed = tail.changed
            values = await tail.after(number)
            if oldest := await tail.gap_after(number, values):
                yield _gap(number, oldest)
            chunk = b""
            for entry in wanted.select(values):
                if entry.number <= number:
                    continue  # it shares its commit with the entry that the client has
                chunk += b"id: %d\ndata: %s\n\n" % (entry.number, encode_entry(entry))
                if len(chunk) >= CHUNK_BYTES:
                    yield chunk
                    chunk = b""
            number = last_number(values[-1].position) if values else number
            if not chunk and clock() >= beat_at:
                chunk = b": still here\nid: %d\n\n" % number
            if chunk:
                yield chunk
                beat_at = clock() + heartbeat_seconds
            if not values:
                await _wait(changed, beat_at - clock())


def _gap(after: int, oldest: int) -> bytes:
    """Entries between these numbers are gone."""
    return b"event: gap\ndata: %s\n\n" % msgspec.json.encode({"after": after, "next": oldest})


async def _wait(changed: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0)):
            await changed.wait()
