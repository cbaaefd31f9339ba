"""The filter around the metadata application: records every request and applies the active faults.

It knows the application only by its responses. A response that no fault affects is passed on
byte for byte. Faults are applied in this order: delay, refusal, error status, shown document
(`shown_document.py`), body (`response.py`). A GET of the document that one of the last two
affects is answered immediately, whatever its `Prefer: wait` says.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from forewarn.engine.clock import Clock
from forewarn.errors import Invalid
from forewarn.lab.fault.active import ActiveFault, Call, FaultSet, draw_delay
from forewarn.lab.fault.kinds import (
    BODY_FAULTS,
    VIEW_FAULTS,
    ErrorStatus,
    FirstCall,
    Latency,
    Refuse,
)
from forewarn.lab.fault.response import Ending, FaultyResponse, apply_faults, make_error
from forewarn.lab.fault.shown_document import DocumentView, read_shown
from forewarn.lab.fault.tcp import get_connection
from forewarn.lab.transcript import BODY_CHARS_MAX, Transcript, TranscriptKind, decode_body
from forewarn.web.http.message import Header
from forewarn.web.metadata import request as metadata_request
from forewarn.web.metadata.app import Message, Receive, Send
from forewarn.wire import document

SLEEP = "forewarn.sleep"
VIEWS_MAX = 20_000
IF_NONE_MATCH, PREFER = b"if-none-match", b"prefer"

Application = Callable[[Message, Receive, Send], Awaitable[None]]


class FaultFilter:
    """An ASGI application around another. `get_vm` names the VM of a request, or `""`."""

    def __init__(
        self,
        app: Application,
        faults: FaultSet,
        transcript: Transcript,
        clock: Clock,
        random: Random,
        get_vm: Callable[[Message], str],
    ) -> None:
        self._app = app
        self._faults = faults
        self._transcript = transcript
        self._clock = clock
        self._random = random
        self._get_vm = get_vm
        self._views: dict[tuple[str, str], DocumentView] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._get_vm(scope), self._transcript)
        try:
            response = await self._respond(exchange)
            if response is not None:  # None: the client has disconnected
                await exchange.send_response(response)
        finally:
            if not exchange.is_recorded:  # disconnected or cancelled
                exchange.record(0, b"")

    async def _respond(
        self,
        exchange: "Exchange",
        seen: Sequence[ActiveFault] = (),
        response: FaultyResponse | None = None,
    ) -> FaultyResponse | None:
        """Return the response; None if the client has disconnected.

        A fault added while a VM waits for a change affects that response too. In this second
        pass, `seen` are the faults of the first one, and `response` is used if no new one applies.
        """
        now = self._clock.now()
        active = [
            each for each in self._faults.list_active(exchange.call.vm, now) if each not in seen
        ]
        taken = self._faults.take(exchange.call, active, self._random)
        exchange.faults += taken
        if response is not None and not taken:
            return self._record_shown(exchange, response)
        response = None
        for each in taken:
            match each.fault:
                case FirstCall() | Latency():
                    if not await exchange.sleep(draw_delay(each.fault, self._random)):
                        return None
                case Refuse():
                    return FaultyResponse(0, (), ending=Ending.DROP)
                case ErrorStatus():
                    response = make_error(each.fault)
        response = response or await self._process(exchange, [*seen, *active])
        return response and apply_faults(response, [each.fault for each in taken])

    async def _process(
        self, exchange: "Exchange", seen: Sequence[ActiveFault]
    ) -> FaultyResponse | None:
        """Return the application's response, with the document as the VM is to see it."""
        headers: list[Header] = exchange.scope["headers"]
        if not exchange.call.is_document:
            return await self._call_app(exchange, headers)
        if any(isinstance(each.fault, (*VIEW_FAULTS, *BODY_FAULTS)) for each in exchange.faults):
            headers = [header for header in headers if header[0] not in (IF_NONE_MATCH, PREFER)]
            response = await self._call_app(exchange, headers)
            return response and self._show(exchange, response)
        response = await self._call_app(exchange, self._restore_number(exchange))
        return response and await self._respond(exchange, seen, response)

    def _restore_number(self, exchange: "Exchange") -> list[Header]:
        """Return the headers with the real number in If-None-Match, where the VM has another."""
        headers: list[Header] = exchange.scope["headers"]
        view = self._views.get(exchange.key)
        if view is None or not view.is_renumbered:
            return headers
        headers = [header for header in headers if header[0] != IF_NONE_MATCH]
        if document.matches(exchange.if_none_match, view.shown[-1].number):
            headers.append((IF_NONE_MATCH, _etag(view.real_number)[1]))
        return headers

    def _record_shown(self, exchange: "Exchange", response: FaultyResponse) -> FaultyResponse:
        """Remember the document of a response that no fault affects."""
        view = self._views.get(exchange.key)
        if view is not None and view.is_renumbered:
            if response.status == 304:
                return response.with_header(*_etag(view.shown[-1].number))
            return self._show(exchange, response)
        real = read_shown(response.body) if response.status == 200 and exchange.call.vm else None
        if real is not None:
            self._get_view(exchange).record(real)
        return response

    def _show(self, exchange: "Exchange", response: FaultyResponse) -> FaultyResponse:
        """Return the document as the VM sees it.

        304 if the VM has it already, unless a fault will change the body.
        """
        real = read_shown(response.body) if response.status == 200 else None
        if real is None:
            return response
        shown = self._get_view(exchange).apply(real, exchange.faults, self._clock.now())
        changes_body = any(isinstance(each.fault, BODY_FAULTS) for each in exchange.faults)
        if document.matches(exchange.if_none_match, shown.number) and not changes_body:
            return FaultyResponse(304, (_etag(shown.number),))
        return response.with_header(*_etag(shown.number)).with_body(shown.body())

    async def _call_app(self, exchange: "Exchange", headers: list[Header]) -> FaultyResponse | None:
        """Return the application's response; None if the client has disconnected."""
        sent: list[Message] = []

        async def collect(message: Message) -> None:
            sent.append(message)

        await self._app({**exchange.scope, "headers": headers}, exchange.receive, collect)
        if not sent:
            return None
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return FaultyResponse(sent[0]["status"], tuple(sent[0]["headers"]), body)

    def _get_view(self, exchange: "Exchange") -> DocumentView:
        if exchange.key not in self._views and len(self._views) >= VIEWS_MAX:
            del self._views[next(iter(self._views))]
        return self._views.setdefault(exchange.key, DocumentView())


class Exchange:
    """One request and its response."""

    def __init__(
        self, scope: Message, receive: Receive, send: Send, vm: str, transcript: Transcript
    ) -> None:
        _, self._path = metadata_request.split(scope["path"])
        is_document = scope["method"] == "GET" and metadata_request.normalize(self._path) in (
            metadata_request.EVENTS,
            metadata_request.EVENTS_LEGACY,
        )
        self.scope = scope
        self.call = Call(vm, scope["method"], is_document)
        self.key = (vm, _get_version(scope["query_string"]) if is_document else "")
        headers = metadata_request.join(scope["headers"])
        self.if_none_match = headers.get(IF_NONE_MATCH, b"").decode("latin-1")
        self.faults: list[ActiveFault] = []
        self.is_recorded = False
        self._send = send
        self._receive = receive
        self._buffered: deque[Message] = deque()
        self._body = b""
        self._transcript = transcript

    async def receive(self) -> Message:
        return self._buffered.popleft() if self._buffered else await self._receive_next()

    async def _receive_next(self) -> Message:
        message = await self._receive()
        if len(self._body) < BODY_CHARS_MAX:
            self._body += message.get("body", b"")
        return message

    async def sleep(self, seconds: float) -> bool:
        """Delay the response. Returns whether the client is still connected.

        A client inside the lab brings its own clock in the extensions.
        """
        sleep = (self.scope.get("extensions") or {}).get(SLEEP, asyncio.sleep)
        sleeping = asyncio.ensure_future(sleep(seconds))
        leaving = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait({sleeping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return not leaving.done()
        finally:
            sleeping.cancel()
            leaving.cancel()

    async def _wait_for_disconnect(self) -> None:
        """Buffer what arrives before the disconnect for the application."""
        while True:  # ends: after the body only a disconnect can come
            message = await self._receive_next()
            if message["type"] == "http.disconnect":
                return
            self._buffered.append(message)

    async def send_response(self, response: FaultyResponse) -> None:
        """Record the response and send it, up to its ending."""
        is_whole = response.ending is Ending.WHOLE
        is_dropped = response.ending is Ending.DROP
        self.record(response.status if is_whole else 0, b"" if is_dropped else response.body)
        connection = None if is_whole else get_connection(self.scope)
        if not is_dropped:
            headers = list(response.headers)
            start = {"type": "http.response.start", "status": response.status, "headers": headers}
            await self._send(start)
            await self._send(
                {"type": "http.response.body", "body": response.body, "more_body": not is_whole}
            )
        if connection is not None:
            is_close = response.ending is Ending.CLOSE
            await (connection.close() if is_close else connection.reset())

    def record(self, status: int, body: bytes) -> None:
        self.is_recorded = True
        query = self.scope["query_string"].decode("latin-1")
        self._transcript.add(
            TranscriptKind.REQUEST,
            vm=self.call.vm,
            method=self.call.method,
            path=f"{self._path}?{query}" if query else self._path,
            status=status,
            request_body=decode_body(self._body),
            response_body=decode_body(body),
            faults=tuple(each.fault.kind for each in self.faults),
        )


def _get_version(query: bytes) -> str:
    try:
        return metadata_request.parse_query(query).get("api-version", "")
    except Invalid:
        return ""


def _etag(number: int) -> Header:
    return b"etag", b'"%d"' % number
