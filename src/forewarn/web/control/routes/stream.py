"""The history as it grows, as server-sent events.

A stream holds the number of an entry and no entries: nothing is buffered for a slow client.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Request, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, QueryParameter
from litestar.response import ServerSentEvent, ServerSentEventMessage

from forewarn.engine.entry import first_number, last_number
from forewarn.engine.turns import Turn, yield_once
from forewarn.errors import Error
from forewarn.history.feed import HistoryFeed
from forewarn.history.query import EntryFilter
from forewarn.web.control.auth import COOKIE
from forewarn.web.control.dependencies import Call
from forewarn.web.control.routes.history import Wanted
from forewarn.web.service import Service

STREAMS_MAX = 100
STREAMS_PER_PRINCIPAL_MAX = 10
"""Open streams per token; without tokens, of all clients together."""
HEARTBEAT_SECONDS = 15.0
RETRY_MILLISECONDS = 2000
NUMBER_MAX = 2**63 - 1

Message = partial(ServerSentEventMessage, data=None, sep="\n")
After = Annotated[
    int | None,
    QueryParameter(
        ge=0,
        le=NUMBER_MAX,
        description="Start after the entry with this number; 0 starts with the oldest.",
    ),
]
LastEventId = Annotated[
    int | None,
    HeaderParameter(
        name="Last-Event-ID",
        ge=0,
        le=NUMBER_MAX,
        description="As `after`; browsers send it when they reconnect.",
    ),
]
STREAM_RESPONSE = ResponseSpec(
    str, generate_examples=False, media_type="text/event-stream", description="Server-sent events."
)


@get("/api/v1/stream", tags=["History"], responses={200: STREAM_RESPONSE})
async def follow_stream(
    request: Request[Any, Any, Any],
    call: Call,
    wanted: Wanted,
    after: After = None,
    last_id: LastEventId = None,
) -> ServerSentEvent:
    """Sends every new history entry; its number is the id of the server-sent event."""
    service, identity = call.service, call.principal.identity
    service.feed.check_room(STREAMS_MAX, identity, STREAMS_PER_PRINCIPAL_MAX)
    await service.feed.last()  # a lost store is a 503 here; later it only ends the stream
    messages = follow_history(
        service.feed,
        wanted,
        after if last_id is None else last_id,
        by=identity,
        is_allowed=make_permission(
            service, request.headers.get("authorization", ""), request.cookies.get(COOKIE, "")
        ),
        take_turn=call.take_turn,
    )
    return ServerSentEvent(messages, headers={"Cache-Control": "no-store"})


def make_permission(service: Service, authorization: str, cookie: str) -> Callable[[], bool]:
    """Whether a stream may continue.

    Its token may be revoked, its session may end, or the first token be created.
    """
    tokens, text = service.tokens, authorization.partition(" ")[2].strip()
    if not tokens:
        return lambda: not tokens
    if not text:
        return lambda: service.sessions.find(cookie) is not None
    return lambda: tokens.authenticate(text) is not None


async def follow_history(
    feed: HistoryFeed,
    wanted: EntryFilter,
    after: int | None,
    *,
    by: str = "",
    is_allowed: Callable[[], bool] = lambda: True,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    take_turn: Turn = yield_once,
) -> AsyncGenerator[ServerSentEventMessage, None]:
    """The messages of one stream.

    It ends when the server stops, the permission is withdrawn, or the store is lost.
    """
    clock = asyncio.get_running_loop().time
    stops = feed.stops
    with suppress(Error), ExitStack() as stack:
        number = last = await feed.last()
        # Again: others may have started since the request was accepted.
        feed.check_room(STREAMS_MAX, by, STREAMS_PER_PRINCIPAL_MAX)
        # From now on the stream is counted, and it sends everything that happens.
        stack.enter_context(feed.following(by))
        if after is not None:
            number = after if after <= last else 0
        yield Message(id=number, retry=RETRY_MILLISECONDS)
        if after is not None and after > last:
            yield _gap(after, first_number(1))  # of another store: all entries here are new
        heartbeat_at = clock() + heartbeat_seconds
        while feed.stops == stops and is_allowed():
            changed = feed.changed
            values = await feed.after(number)
            if oldest := await feed.gap_after(number, values):
                yield _gap(number, oldest)
            async for entry in wanted.select(values, take_turn):
                if entry.number <= number:
                    continue  # of the same commit as the last entry that the client has
                await take_turn()  # a client may read the whole history
                yield Message(id=entry.number, data=msgspec.json.encode(entry))
                heartbeat_at = clock() + heartbeat_seconds
            if values:
                number = last_number(values[-1].position)
            if clock() >= heartbeat_at:
                yield Message(id=number, comment="heartbeat")
                heartbeat_at = clock() + heartbeat_seconds
            if not values:
                await _wait(changed, heartbeat_at - clock())


def _gap(after: int, oldest: int) -> ServerSentEventMessage:
    """Entries between these numbers may be missing: they are no longer stored."""
    return Message(event="gap", data=msgspec.json.encode({"after": after, "next": oldest}))


async def _wait(changed: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0)):
            await changed.wait()
