"""The filter around the metadata application: records every request and applies the active faults.

It knows the application only by its responses. A response that no fault affects is passed on
byte for byte. Faults are applied in this order: delay, refusal, error status, shown document
(`shown_document.py`), body (`response.py`). A GET of the document that one of the last two
affects is answered immediately, whatever its `Prefer: wait` says.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import msgspec

from forewarn.engine.clock import Clock
from forewarn.lab.fault import kinds
from forewarn.lab.fault.active import ActiveFault, Call, FaultSet
from forewarn.lab.fault.response import NO_RESPONSE, Ending, FaultyResponse, call_app
from forewarn.lab.fault.shown_document import DocumentView, ShownDocument
from forewarn.lab.fault.tcp import EXTENSION, FilteredConnection
from forewarn.lab.transcript import Transcript, TranscriptKind, decode_body
from forewarn.web.http.listener import Application
from forewarn.web.http.message import Header, Message, Receive, Send, join_headers
from forewarn.web.metadata import request as metadata_request
from forewarn.wire import document

VIEWS_MAX = 20_000
IF_NONE_MATCH, PREFER = b"if-none-match", b"prefer"

Sleep = Callable[[float], Awaitable[bool]]


@dataclass(eq=False)
class FaultFilter:
    """An ASGI application around another. `get_vm` names the VM of a request, or `""`."""

    app: Application
    faults: FaultSet
    transcript: Transcript
    clock: Clock
    random: Random
    get_vm: Callable[[Message], str]
    _views: dict[tuple[str, bytes], DocumentView] = field(default_factory=dict, init=False)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        connection: FilteredConnection = scope["extensions"][EXTENSION]
        response = await self.respond(scope, receive, connection.sleep)
        await response.send(send, connection)

    async def respond(self, scope: Message, receive: Receive, sleep: Sleep) -> FaultyResponse:
        """Record a request and return its response; NO_RESPONSE if the client has disconnected.

        `sleep` delays the response, and returns whether the client is still connected.
        """
        exchange = Exchange(scope, receive, sleep, self.get_vm(scope))
        response = NO_RESPONSE
        try:
            if await exchange.read_body():
                response = await self._respond(exchange)
        finally:  # also for a client that has disconnected, and a lab that is closing
            self._record(exchange, response)
        return response

    async def _respond(self, exchange: "Exchange") -> FaultyResponse:
        """Apply the active faults.

        A fault added while a VM waits for a change affects that response too: after each response
        of the application it is the turn of the faults that were not active before.
        """
        seen: list[ActiveFault] = []
        response: FaultyResponse | None = None
        while True:  # ends: another turn needs a fault that was added meanwhile
            active = self.faults.list_active(exchange.call.vm, self.clock.now())
            new = [each for each in active if each not in seen]
            seen += new
            taken = self.faults.take(exchange.call, new, self.random)
            exchange.faults += taken
            if response is not None and not taken:
                return self._show(exchange, response)
            for each in taken:
                match each.fault:
                    case kinds.FirstCall() | kinds.Latency():
                        if not await exchange.sleep(each.fault.draw_delay(self.random)):
                            return NO_RESPONSE
                    case kinds.Refuse():
                        return NO_RESPONSE
                    case kinds.ErrorStatus():
                        return exchange.change_body(each.fault.respond())
            headers, is_final = self._choose_headers(exchange)
            scope = {**exchange.scope, "headers": headers}
            response = await call_app(self.app, scope, exchange.receive)
            if is_final or response is NO_RESPONSE:
                return exchange.change_body(self._show(exchange, response))

    def _choose_headers(self, exchange: "Exchange") -> tuple[list[Header], bool]:
        """Return the headers for the application, and whether its response is the final one.

        Under a fault of the document or the body it must not wait, and must return the document.
        Otherwise, If-None-Match has the real number where the VM has another.
        """
        headers: list[Header] = exchange.scope["headers"]
        if not exchange.call.is_document:
            return headers, True
        if exchange.has_fault(*kinds.VIEW_FAULTS, *kinds.BODY_FAULTS):
            return [each for each in headers if each[0] not in (IF_NONE_MATCH, PREFER)], True
        view = self._views.get(exchange.key)
        if view is not None and view.is_renumbered:
            headers = [header for header in headers if header[0] != IF_NONE_MATCH]
            if document.matches(exchange.if_none_match, view.shown[-1].number):
                headers.append((IF_NONE_MATCH, _etag(view.real_number)[1]))
        return headers, False

    def _show(self, exchange: "Exchange", response: FaultyResponse) -> FaultyResponse:
        """Return the document as the VM is to see it, and remember that it was shown.

        304 if the VM has it already, unless a fault will change the body.
        """
        if not exchange.call.is_document or not exchange.call.vm:
            return response
        view = self._views.get(exchange.key) or DocumentView()
        if response.status == 304 and view.is_renumbered:
            return response.with_header(*_etag(view.shown[-1].number))
        if response.status != 200:
            return response
        if exchange.key not in self._views and len(self._views) >= VIEWS_MAX:
            del self._views[next(iter(self._views))]
        self._views[exchange.key] = view
        real = msgspec.json.decode(response.body, type=ShownDocument)
        shown = view.apply(real, exchange.faults, self.clock.now())
        is_known = document.matches(exchange.if_none_match, shown.number)
        if is_known and not exchange.has_fault(*kinds.BODY_FAULTS):
            return FaultyResponse(304, dict([_etag(shown.number)]))
        if shown == real:
            return response
        return response.with_header(*_etag(shown.number)).with_body(msgspec.json.encode(shown))

    def _record(self, exchange: "Exchange", response: FaultyResponse) -> None:
        query = exchange.scope["query_string"].decode("latin-1")
        self.transcript.add(
            TranscriptKind.REQUEST,
            vm=exchange.call.vm,
            method=exchange.call.method,
            path=f"{exchange.path}?{query}" if query else exchange.path,
            status=response.status if response.ending is Ending.WHOLE else 0,
            request_body=decode_body(exchange.body),
            response_body=decode_body(response.body),
            faults=tuple(each.fault.kind for each in exchange.faults),
        )


class Exchange:
    """One request, and the faults that have affected it so far."""

    def __init__(self, scope: Message, receive: Receive, sleep: Sleep, vm: str) -> None:
        _, self.path = metadata_request.split(scope["path"])
        is_events = metadata_request.normalize(self.path) == metadata_request.EVENTS
        self.scope = scope
        self.call = Call(vm, scope["method"], is_document=is_events and scope["method"] == "GET")
        self.sleep = sleep
        self.key = (vm, scope["query_string"])
        """A client asks for one api-version, always in the same way."""
        headers = join_headers(scope["headers"])
        self.if_none_match = headers.get(IF_NONE_MATCH, b"").decode("latin-1")
        self.body = b""
        self.faults: list[ActiveFault] = []
        self._receive = receive
        self._is_body_passed_on = False

    async def read_body(self) -> bool:
        """Read the body, which the listener limits. False if the client disconnects before."""
        while (message := await self._receive())["type"] == "http.request":
            self.body += message.get("body", b"")
            if not message.get("more_body", False):
                return True
        return False

    async def receive(self) -> Message:
        if self._is_body_passed_on:
            return await self._receive()
        self._is_body_passed_on = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    def change_body(self, response: FaultyResponse) -> FaultyResponse:
        for each in self.faults:
            if isinstance(each.fault, kinds.BODY_FAULTS):
                response = each.fault.change(response)
        return response

    def has_fault(self, *kinds: type) -> bool:
        return any(isinstance(each.fault, kinds) for each in self.faults)


def _etag(number: int) -> Header:
    return b"etag", b'"%d"' % number
