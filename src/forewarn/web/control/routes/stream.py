"""The history as it grows, as server-sent events.

A stream holds a position in the history and no entries: a slow client is never buffered for.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, QueryParameter
from litestar.response import ServerSentEvent, ServerSentEventMessage

from forewarn.auth.tokens import Tokens
from forewarn.engine.entry import encode_entry
from forewarn.errors import Error
from forewarn.history.feed import HistoryFeed
from forewarn.history.query import Wanted
from forewarn.web.control.dependencies import EngineDependency, PrincipalDependency
from forewarn.web.control.openapi import COMMON_ERRORS
from forewarn.web.control.routes.history import (
    ChangeFilter,
    EventFilter,
    HostFilter,
    ScopeFilter,
    VmFilter,
    check_change,
)

STREAMS_MAX = 100
STREAMS_PER_PRINCIPAL_MAX = 10
"""Open streams per token; without tokens, of all clients together."""
HEARTBEAT_SECONDS = 15.0
RETRY_MILLISECONDS = 2000
POSITION_MAX = 2**63 - 1

Message = partial(ServerSentEventMessage, data=None, sep="\n")
After = Annotated[
    int | None,
    QueryParameter(
        name="after",
        ge=0,
        le=POSITION_MAX,
        description="Start after the entry with this number; 0 starts with the oldest.",
    ),
]
LastEventId = Annotated[
    int | None,
    HeaderParameter(
        name="Last-Event-ID",
        ge=0,
        le=POSITION_MAX,
        description="As `after`; browsers send it when they reconnect.",
    ),
]
STREAM_RESPONSE = ResponseSpec(
    str,
    generate_examples=False,
    media_type="text/event-stream",
    description="Server-sent events.",
)


class StreamController(Controller):
    path = "/api/v1/stream"
    tags = ("History",)

    @get("/", responses={**COMMON_ERRORS, 200: STREAM_RESPONSE})
    async def follow(
        self,
        request: Request[Any, Any, Any],
        engine: EngineDependency,
        principal: PrincipalDependency,
        *,
        vm: VmFilter = "",
        of_scope: ScopeFilter = "",
        host: HostFilter = "",
        event: EventFilter = "",
        what: ChangeFilter = "",
        after: After = None,
        last_id: LastEventId = None,
    ) -> ServerSentEvent:
        """Sends every new history entry; its number is the id of the server-sent event."""
        engine.tail.check_room(STREAMS_MAX, principal.identity, STREAMS_PER_PRINCIPAL_MAX)
        wanted = Wanted(
            vm=vm, scope=of_scope, host=host, event=event.upper(), what=check_change(what)
        )
        messages = follow_history(
            engine.tail,
            wanted,
            after if last_id is None else last_id,
            by=principal.identity,
            is_allowed=make_permission(engine.tokens, request.headers.get("authorization", "")),
        )
        return ServerSentEvent(messages, headers={"Cache-Control": "no-store"})


def make_permission(tokens: Tokens, authorization: str) -> Callable[[], bool]:
    """Whether a stream may go on: its token may be revoked, or the first token be created."""
    text = authorization.partition(" ")[2].strip()
    if not tokens:
        return lambda: not tokens
    return lambda: tokens.holder(text) is not None


async def follow_history(
    feed: HistoryFeed,
    wanted: Wanted,
    after: int | None,
    *,
    by: str = "",
    is_allowed: Callable[[], bool] = lambda: True,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> AsyncGenerator[ServerSentEventMessage, None]:
    """The messages of one stream.

    It ends when the server stops, the permission is withdrawn, or the store is lost.
    """
    clock = asyncio.get_running_loop().time
    stops = feed.stops
    with suppress(Error), feed.following(STREAMS_MAX, by, STREAMS_PER_PRINCIPAL_MAX):
        position = last = await feed.last()
        if after is not None:
            position = after if after <= last else 0
        yield Message(id=position, retry=RETRY_MILLISECONDS)
        if after is not None and after > last:
            yield _gap(after, 1)  # a position in another store: all entries of this one are new
        heartbeat_at = clock() + heartbeat_seconds
        while feed.stops == stops and is_allowed():
            changed = feed.bell
            values = await feed.after(position)
            if values and values[0].number != position + 1:
                yield _gap(position, values[0].number)
            for entry in wanted.pick(values):
                yield Message(id=entry.number, data=encode_entry(entry))
                heartbeat_at = clock() + heartbeat_seconds
            if values:
                position = values[-1].number
            if clock() >= heartbeat_at:
                yield Message(id=position, comment="heartbeat")
                heartbeat_at = clock() + heartbeat_seconds
            if not values:
                await _wait(changed, heartbeat_at - clock())


def _gap(after: int, following: int) -> ServerSentEventMessage:
    """Entries after `after` are no longer stored; the next one has the number `following`."""
    return Message(event="gap", data=msgspec.json.encode({"after": after, "next": following}))


async def _wait(changed: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0)):
            await changed.wait()
