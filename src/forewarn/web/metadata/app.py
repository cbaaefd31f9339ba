"""What a VM may call. A plain ASGI application: paths in any case of letters and bodies of its own
leave a framework no work.

The first check that fails answers:

1. who is calling (`callers.py`): passed on by somebody, 400; no VM of the fleet, or a wrong
  signature, 403
2. a page in a browser (an Origin header): 403
3. too often: 429
4. the path, 404; then the method, 405 with Allow
5. a query parameter that stands twice: 400
6. the Metadata header, as the api-version asks: 400
7. the api-version: 400, with those that would be accepted
8. what is asked: the body of an approval or the path into the instance tree, 400 and 404; what the
  rules say of it, 400

Only a GET that is answered with the document, or told that it has not changed, counts as a poll.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Set
from functools import partial
from typing import Any, NamedTuple

from forewarn.config import Identify
from forewarn.core.command import Approve
from forewarn.core.lifecycle import is_enabled
from forewarn.engine.board import PublishedScope, wait_for_change, wake
from forewarn.engine.engine import Engine
from forewarn.errors import Error, Forbidden, NotFound, Unavailable
from forewarn.web.http.rate_limit import TokenBucket
from forewarn.web.http_status import (
    BUG,
    METADATA_STATUS,
    BodyTooLarge,
    TooManyRequests,
    WrongMethod,
    metadata_body,
    status_of,
)
from forewarn.web.metadata import request as ask
from forewarn.web.metadata.client_identity import ClientIdentity, identify, plain
from forewarn.web.metadata.rendered_document import (
    CONTENT_TYPE,
    Header,
    body_of,
    content_length,
    etag,
    headers,
    page,
)
from forewarn.web.metadata.request import BadVersion, Request
from forewarn.web.settings import Settings
from forewarn.wire import approval, document, instance

log = logging.getLogger("forewarn")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

APPROVAL_BYTES_MAX = 64 * 1024
RETRY_AFTER = (b"retry-after", b"1")


class Reply(NamedTuple):
    status: int
    headers: tuple[Header, ...]
    body: bytes = b""


Handler = Callable[[Request, ClientIdentity, Receive], Awaitable[Reply | None]]


class Metadata:
    """The application of the metadata listener."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._pace = (
            TokenBucket(settings.requests_per_second) if settings.requests_per_second else None
        )
        self._is_stopping = False
        self.counts: Counter[tuple[str, int]] = Counter()
        self.waiting = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            reply = await self._reply(self._read(scope), receive)
        except Error as problem:
            reply = refusal(problem)
            if reply.status >= 500:
                self._engine.throttled_log.warn("guest request failed", problem=problem.message)
        except Exception:
            log.exception(
                "request failed",
                extra={"facts": {"method": scope["method"], "path": scope["path"]}},
            )
            reply = refusal(BUG)
        if reply is None:  # the client has left
            return
        self.counts[kind_of(scope), reply.status] += 1
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)}
        )
        await send({"type": "http.response.body", "body": reply.body})

    def stop(self) -> None:
        """Answer all who wait, and let nobody wait any more."""
        self._is_stopping = True
        for place in self._engine.board.scopes.values():
            wake(place)

    def _read(self, scope: Message) -> Request:
        path = scope["path"]
        vm, path = ask.split(path) if Identify.PATH in self._settings.identify else ("", path)
        address = plain(scope["client"][0]) if scope["client"] else ""
        return Request(
            scope["method"], vm, path, scope["query_string"], ask.join(scope["headers"]), address
        )

    async def _reply(self, request: Request, receive: Receive) -> Reply | None:
        caller = self._identify(request)
        if (
            b"origin" in request.headers
        ):  # no client of the protocol sends it; browsers do, with every POST of a page
            raise Forbidden("Forbidden. Requests from web pages are not accepted")
        if self._pace and not self._pace.admits(caller.vm, asyncio.get_running_loop().time()):
            raise TooManyRequests(
                f"Too many requests. {self._settings.requests_per_second:g} a second are accepted"
            )
        handler, methods = self._handler(request)
        if request.method not in methods:
            allow = ", ".join(methods)
            raise WrongMethod(
                f"Method not allowed. {request.method} came; expected {allow}", allow=allow
            )
        return await handler(request, caller, receive)

    def _identify(self, request: Request) -> ClientIdentity:
        return identify(request, self._engine.board, self._settings)

    def _handler(self, request: Request) -> tuple[Handler, tuple[str, ...]]:
        route = ask.route(request.path)
        if route == ask.EVENTS or (route == ask.EVENTS_LEGACY and self._settings.legacy_path):
            return (self._approve if request.method == "POST" else self._document), (
                "GET",
                "POST",
                "HEAD",
            )
        if route == ask.VERSIONS:
            return self._versions, ("GET", "HEAD")
        if route == ask.INSTANCE or route.startswith(f"{ask.INSTANCE}/"):
            return self._instance, ("GET", "HEAD")
        raise NotFound("Not found. There is nothing at this path", path=request.path)

    async def _document(
        self, request: Request, caller: ClientIdentity, receive: Receive
    ) -> Reply | None:
        version = ask.events_version(request, self._settings)
        known = document.read_tags(request.header(b"if-none-match"))
        applied: tuple[Header, ...] = ()
        if request.method == "GET":
            await self._record(caller.place)
            caller = self._identify(request)  # the poll may have been held for minutes
            seconds = ask.wait_seconds(request, self._settings)
            if seconds and document.is_known(caller.place.scope.incarnation, known):
                self.waiting += 1
                try:
                    has_stayed = await self._hold(request, known, seconds, receive)
                finally:
                    self.waiting -= 1
                if not has_stayed:
                    return None
                applied = ((b"preference-applied", b"wait=%d" % seconds),)
                caller = self._identify(request)
        scope = caller.place.scope
        if document.is_known(scope.incarnation, known):
            return Reply(304, (etag(scope), *applied))
        body = body_of(page(caller.place, version, iso_not_before=self._settings.iso_not_before))
        return Reply(200, (*headers(scope, body), *applied), body)

    async def _record(self, place: PublishedScope) -> None:
        """Note that somebody polls.

        The poll that enables a scope is answered once that is stored, and late if so wished.
        """
        now = self._engine.clock.now()
        if place.fresh_until > now.timestamp():
            return
        was_enabled = is_enabled(place.scope, now, self._engine.timing)
        await self._engine.seen(place)
        if not was_enabled:
            await asyncio.sleep(self._settings.first_call_delay_seconds)

    async def _hold(
        self, request: Request, known: Set[str], seconds: int, receive: Receive
    ) -> bool:
        """Until the caller's document is another, the time is up, or we stop: True. False: the
        client has left.

        Who is calling is asked again at each change: meanwhile the VM may have moved to another
        scope.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (
            not self._is_stopping and (rest := until - loop.time()) > 0
        ):  # ends when the time is up
            place = self._identify(request).place
            if not document.is_known(place.scope.incarnation, known):
                break
            if not await wait_for_change(
                place, place.scope.incarnation, rest, partial(_leaving, receive)
            ):
                return False
        return True

    async def _approve(
        self, request: Request, caller: ClientIdentity, receive: Receive
    ) -> Reply | None:
        ask.events_version(request, self._settings)
        body = await _body(receive)
        if body is None:
            return None
        caller = self._identify(
            request
        )  # the body may have taken seconds, and the address may be another VM's now
        command = Approve(event_ids=approval.parse(body), vm=caller.vm)
        await self._engine.submit(caller.place.scope.name, command, by=f"vm {caller.vm}")
        return Reply(200, (content_length(b""),))

    async def _versions(self, request: Request, caller: ClientIdentity, receive: Receive) -> Reply:
        ask.parameters(request.query)
        ask.require_header(request)
        body = instance.versions_body()
        return Reply(200, (CONTENT_TYPE, content_length(body)), body)

    async def _instance(self, request: Request, caller: ClientIdentity, receive: Receive) -> Reply:
        asked = ask.parameters(request.query)
        version = ask.instance_version(request, asked)
        vm = caller.place.scope.vm(caller.vm)
        if vm is None:
            raise Forbidden(f"Forbidden. {caller.vm} is no VM of this fleet", vm=caller.vm)
        segments = [segment for segment in request.path[len(ask.INSTANCE) :].split("/") if segment]
        answer = instance.select(
            instance.tree(caller.place.scope, vm, version), segments, asked.get("format", "json")
        )
        content_type = (b"content-type", answer.content_type.encode())
        return Reply(200, (content_type, content_length(answer.body)), answer.body)


def kind_of(scope: Message) -> str:
    """What a request was about, in one of a few words: whoever can call must not be able to make up
    new ones.
    """
    _, _, path = scope["path"].lower().rpartition("/metadata/")
    if path.removesuffix("/").endswith("scheduledevents"):
        return "approval" if scope["method"] == "POST" else "document"
    return next((word for word in ("instance", "versions") if path.startswith(word)), "other")


def refusal(problem: Error) -> Reply:
    body = problem.body if isinstance(problem, BadVersion) else metadata_body(problem)
    more: tuple[Header, ...] = ()
    if isinstance(problem, WrongMethod):
        more = ((b"allow", problem.allow.encode()),)
    elif isinstance(problem, Unavailable | TooManyRequests):
        more = (RETRY_AFTER,)
    return Reply(
        status_of(problem, METADATA_STATUS), (CONTENT_TYPE, *more, content_length(body)), body
    )


async def _leaving(receive: Receive) -> None:
    while (await receive())[
        "type"
    ] != "http.disconnect":  # ends when the client leaves; until then there is at most its body
        pass


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None if the client left before its end."""
    body = bytearray()
    while (message := await receive())[
        "type"
    ] == "http.request":  # ends with the body, or where it grows too large
        body += message.get("body", b"")
        if len(body) > APPROVAL_BYTES_MAX:
            raise BodyTooLarge(
                f"Payload too large. At most {APPROVAL_BYTES_MAX} bytes are accepted"
            )
        if not message.get("more_body", False):
            return bytes(body)
    return None
