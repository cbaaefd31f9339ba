"""The metadata application: what a VM may request.

A plain ASGI application: case-insensitive paths and its own error bodies leave a framework nothing
to do. The first check that fails determines the response:

1. the client (`client_identity.py`): forwarded, 400; not a VM of the fleet or a bad signature, 403
2. a page in a browser (an Origin header): 403
3. too many requests: 429
4. the path, 404; then the method, 405 with Allow
5. a duplicate query parameter: 400
6. the Metadata header, as the api-version requires: 400
7. the api-version: 400, with those that are accepted; a date that is not one of them: 404
8. the body of an approval or the path into the instance tree, 400 and 404; the rules, 400

Only a GET that returns the document, or that it has not changed, counts as a poll.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from forewarn.auth.tokens import Tokens
from forewarn.config import Config, Identify, NotBeforeFormat
from forewarn.core.command import Approve
from forewarn.core.lifecycle import is_enabled
from forewarn.engine.board import wait_for_change
from forewarn.engine.engine import Engine
from forewarn.errors import Error, Forbidden, Invalid, NotFound
from forewarn.log import log
from forewarn.platform.remote import STALE_SECONDS_MIN
from forewarn.web.http.message import (
    BLANK_LINE,
    CONTENT_TYPE,
    Header,
    Message,
    Receive,
    Send,
    content_length,
    join_headers,
    plain_address,
    read_body,
    wait_for_disconnect,
)
from forewarn.web.http.rate_limit import TokenBucket
from forewarn.web.http_status import (
    BUG,
    METADATA_STATUS,
    ClientGone,
    TooManyRequests,
    headers_of,
    metadata_body,
    status_of,
)
from forewarn.web.metadata import request as requests
from forewarn.web.metadata.client_identity import (
    HOST,
    ClientIdentity,
    check_signed_time,
    identify,
)
from forewarn.web.metadata.fast_path import age, document_headers, etag, render
from forewarn.web.metadata.request import BodyError, MetadataRequest
from forewarn.wire import approval, document, instance


class Reply(NamedTuple):
    status: int
    headers: tuple[Header, ...]
    body: bytes = b""


def make_reply(
    status: int, body: bytes, *more: Header, content_type: Header = CONTENT_TYPE
) -> Reply:
    return Reply(status, (content_type, *more, content_length(body)), body)


class Metadata:
    """`counts` has the responses by kind and status, `waiting` the long polls in progress.

    `on_error` is called with the VM, the status and the problem of each poll that gets an error.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        proxy_key: bytes = b"",
        tokens: Tokens | None = None,
        on_error: Callable[[str, int, str], None] = lambda vm, status, problem: None,
    ) -> None:
        if Identify.PROXY in config.identify and not proxy_key:
            raise Invalid(
                "--identify proxy needs a key to check signatures with, but the key is empty",
                option="proxy_key_file",
            )
        self._engine = engine
        self._config = config
        self._proxy_key = proxy_key
        self._tokens = tokens
        self._on_error = on_error
        rate = config.requests_per_second
        self._requests = TokenBucket(rate) if rate else None
        self._is_stopping = False
        self.counts: Counter[tuple[str, int]] = Counter()
        self.waiting = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        request = self._read(scope)
        try:
            reply = await self._reply(request, receive)
        except ClientGone:
            return
        except Error as error:
            reply = error_reply(error)
            if reply.status >= 500:
                self._engine.throttled_log.warn("guest request failed", problem=error.message)
            self._report_error(request, kind_of(scope), reply.status, error.message)
        except Exception:
            log.exception("request failed", method=scope["method"], path=scope["path"])
            reply = error_reply(BUG)
            self._report_error(request, kind_of(scope), reply.status, BUG.message)
        self.counts[kind_of(scope), reply.status] += 1
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)}
        )
        await send({"type": "http.response.body", "body": reply.body})

    def stop(self) -> None:
        """Respond to all long polls now, and accept no new ones."""
        self._is_stopping = True
        for place in self._engine.board.scopes.values():
            self._engine.board.wake(place)

    def _read(self, scope: Message) -> MetadataRequest:
        path = scope["path"]
        vm, path = requests.split(path) if Identify.PATH in self._config.identify else ("", path)
        address = plain_address(scope["client"][0]) if scope["client"] else ""
        return MetadataRequest(
            scope["method"],
            vm,
            path,
            scope["query_string"],
            join_headers(scope["headers"]),
            address,
        )

    def _report_error(self, request: MetadataRequest, kind: str, status: int, problem: str) -> None:
        """Of a poll by a known VM. What passes a host daemon is counted there."""
        if kind != "document" or request.method != "GET" or HOST in request.headers:
            return
        with suppress(Error):
            self._on_error(self._identify(request).vm, status, problem)

    async def _reply(self, request: MetadataRequest, receive: Receive) -> Reply:
        client = self._identify(request)
        check_signed_time(request.headers, self._engine.clock)
        if b"origin" in request.headers:  # browsers send it with every POST, other clients never
            raise Forbidden("Forbidden. Requests from web pages are not accepted")
        now = asyncio.get_running_loop().time()
        if self._requests and not self._requests.admits(client.vm, now):
            rate = self._config.requests_per_second
            raise TooManyRequests(f"Too many requests. {rate:g} a second are accepted")
        path = requests.normalize(request.path)
        is_legacy = path == requests.EVENTS_LEGACY and self._config.legacy_path
        if path == requests.EVENTS or is_legacy:
            requests.require_method(request, "GET", "POST", "HEAD")
            if request.method == "POST":
                return await self._approve(request, receive)
            return await self._document(request, client, receive)
        is_instance = path == requests.INSTANCE or path.startswith(f"{requests.INSTANCE}/")
        if is_instance or path in (requests.VERSIONS, requests.TOKEN, requests.ROOT):
            requests.require_method(request, "GET", "HEAD")
            query = requests.parse_query(request.query)
            if path == requests.VERSIONS:
                return _versions(request)
            if path == requests.TOKEN:
                raise requests.no_identity(request)
            version = requests.instance_version(request, query)
            if is_instance:
                return _instance(request, client, version, query.get("format", "json"))
        raise NotFound("Not found. There is nothing at this path")

    def _identify(self, request: MetadataRequest) -> ClientIdentity:
        board = self._engine.board
        return identify(request, board, self._config, self._proxy_key, self._tokens)

    async def _document(
        self, request: MetadataRequest, client: ClientIdentity, receive: Receive
    ) -> Reply:
        version = requests.events_version(request, self._config)
        known = document.read_tags(request.header(b"if-none-match"))
        applied: tuple[Header, ...] = ()
        if request.method == "GET":
            if client.place.booting:
                self._engine.back(client.place, client.vm)
            self._engine.board.polled[client.vm] = self._engine.clock.now().timestamp()
            await self._record(client)
            client = self._identify(request)  # `_record` may have taken minutes
            seconds = requests.wait_seconds(request, self._config)
            must_not_wait = HOST in request.headers and self._engine.age_seconds > 0
            is_known = document.is_known(client.place.scope.incarnation, known)
            if seconds and is_known and not must_not_wait:
                self.waiting += 1
                try:
                    await self._wait(request, known, seconds, receive)
                finally:
                    self.waiting -= 1
                applied = ((b"preference-applied", b"wait=%d" % seconds),)
                client = self._identify(request)
        scope = client.place.scope
        applied += age(self._engine)
        if document.is_known(scope.incarnation, known):
            return Reply(304, (etag(scope), *applied))
        is_iso = self._config.not_before_format is NotBeforeFormat.DOCUMENTED
        body = render(client.place, version, is_iso=is_iso).partition(BLANK_LINE)[2]
        return Reply(200, (*document_headers(scope, body), *applied), body)

    async def _record(self, client: ClientIdentity) -> None:
        """Record that the VM and its scope are polled.

        The poll that enables a scope is delayed until that is stored, and longer if configured.
        """
        now, place = self._engine.clock.now(), client.place
        if not self._engine.last_polls.must_store(place, client.vm, now.timestamp()):
            return
        was_enabled = is_enabled(place.scope, now, self._engine.timing)
        await self._engine.seen(place)
        if not was_enabled:
            await asyncio.sleep(self._config.first_call_delay_seconds)

    async def _wait(
        self, request: MetadataRequest, known: Set[str], seconds: int, receive: Receive
    ) -> None:
        """Wait until the document changes, the time is up, or we stop.

        The client is identified again after each change: its VM may have moved to another scope.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._is_stopping and (left := deadline - loop.time()) > 0:
            place = self._identify(request).place
            incarnation = place.scope.incarnation
            if not document.is_known(incarnation, known):
                break
            if HOST in request.headers:
                if self._engine.age_seconds:  # its daemon can ask another server
                    break
                # A store that is lost after this is noticed in time, too: that takes as long.
                left = min(left, STALE_SECONDS_MIN - self._engine.stale_seconds)
            disconnect = partial(wait_for_disconnect, receive)
            if not await wait_for_change(place, incarnation, left, disconnect):
                raise ClientGone("the client has disconnected")

    async def _approve(self, request: MetadataRequest, receive: Receive) -> Reply:
        requests.events_version(request, self._config)
        body = await read_body(receive)
        # The body may have taken seconds, and the address may be another VM's by now.
        client = self._identify(request)
        command = Approve(event_ids=approval.parse(body), vm=client.vm)
        await self._engine.submit(client.place.scope.name, command, by=f"vm {client.vm}")
        return Reply(200, (content_length(b""),))


def _versions(request: MetadataRequest) -> Reply:
    requests.require_header(request)
    return make_reply(200, instance.versions_body())


def _instance(request: MetadataRequest, client: ClientIdentity, version: str, form: str) -> Reply:
    vm = client.place.scope.vm(client.vm)
    if vm is None:
        raise Forbidden(f"Forbidden. {client.vm} is not a VM of this fleet")
    path = request.path[len(requests.INSTANCE) :]
    segments = [segment for segment in path.split("/") if segment]
    tree = instance.tree(client.place.scope, vm, version)
    leaf = instance.select(tree, segments, form)
    content_type = (b"content-type", leaf.content_type.encode())
    return make_reply(200, leaf.body, content_type=content_type)


def kind_of(scope: Message) -> str:
    """The kind of a request, as a metric's label: a bounded set, whatever clients send."""
    _, _, path = scope["path"].lower().rpartition("/metadata/")
    if path.removesuffix("/").endswith("scheduledevents"):
        return "approval" if scope["method"] == "POST" else "document"
    return next((kind for kind in ("instance", "versions") if path.startswith(kind)), "other")


def error_reply(error: Error) -> Reply:
    body = error.body if isinstance(error, BodyError) else metadata_body(error)
    headers = headers_of(error).items()
    more = ((name.lower().encode(), value.encode()) for name, value in headers)
    return make_reply(status_of(error, METADATA_STATUS), body, *more)
