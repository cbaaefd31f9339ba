"""The filter around the metadata application: it records every request, and does to it what the
faults in force say.

It knows the application by its answers only. A request that no fault touches passes through, and
its answer is not changed by a byte. What faults do is done in this order: delay, refusal, error
status, what the document shows (`view.py`), body (`body.py`). Where one of the last two touches a
GET of the document, it is answered at once (`Prefer: wait` or not).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from forewarn.engine.clock import Clock
from forewarn.errors import Invalid
from forewarn.lab.fault.active import Call, Faults, Standing, delay_seconds
from forewarn.lab.fault.kinds import BODIES, VIEWS, FirstCall, Latency, Refuse, Status
from forewarn.lab.fault.response import Answer, Ending, error, spoil
from forewarn.lab.fault.shown_document import Memory, read
from forewarn.lab.fault.tcp import Dropped, FilteredPolls, find_line
from forewarn.lab.transcript import BODY_CHARS_MAX, Kind, Transcript, text
from forewarn.web.http.message import Header
from forewarn.web.metadata import request as ask
from forewarn.web.metadata.app import Message, Receive, Send
from forewarn.wire import document

__all__ = ["Dropped", "FaultFilter", "FilteredPolls"]

SLEEP = "forewarn.sleep"
MEMORIES_MAX = 20_000
CONDITIONAL, PREFER = b"if-none-match", b"prefer"

Application = Callable[[Message, Receive, Send], Awaitable[None]]


class FaultFilter:
    """An ASGI application around another.

    `vm_of` tells whose request it is: a VM, or nobody (`""`).
    """

    def __init__(
        self,
        app: Application,
        faults: Faults,
        transcript: Transcript,
        clock: Clock,
        random: Random,
        vm_of: Callable[[Message], str],
    ) -> None:
        self._app = app
        self._faults = faults
        self._transcript = transcript
        self._clock = clock
        self._random = random
        self._vm_of = vm_of
        self._memories: dict[tuple[str, str], Memory] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._vm_of(scope), self._transcript)
        try:
            answer = await self._answer(exchange)
            if answer is not None:  # else the client has left
                await exchange.answer(answer)
        finally:
            if not exchange.is_recorded:  # cut off, by whoever
                exchange.record(0, b"")

    async def _answer(
        self, exchange: "Exchange", before: Sequence[Standing] = (), given: Answer | None = None
    ) -> Answer | None:
        """What to answer; None if the client has left.

        A fault that comes while a VM waits for a change touches the answer to that, too: then
        `before` were there already, and `given` is the answer if nothing else touches it.
        """
        active = [
            one
            for one in self._faults.active(exchange.call.vm, self._clock.now())
            if one not in before
        ]
        touching = self._faults.touching(exchange.call, active, self._random)
        exchange.touching += touching
        if given is not None and not touching:
            return self._untouched(exchange, given)
        answer: Answer | None = None
        for one in touching:
            match one.fault:
                case FirstCall() | Latency():
                    if not await exchange.sleep(delay_seconds(one.fault, self._random)):
                        return None
                case Refuse():
                    return Answer(0, (), ending=Ending.DROP)
                case Status():
                    answer = error(one.fault)
        answer = answer or await self._heard(exchange, [*before, *active])
        return answer and spoil(answer, [one.fault for one in touching])

    async def _heard(self, exchange: "Exchange", before: Sequence[Standing]) -> Answer | None:
        """The application's answer, and of the document what the VM is to see."""
        headers: list[Header] = exchange.scope["headers"]
        if not exchange.call.is_document:
            return await self._ask(exchange, headers)
        if any(isinstance(one.fault, (*VIEWS, *BODIES)) for one in exchange.touching):
            answer = await self._ask(
                exchange, [header for header in headers if header[0] not in (CONDITIONAL, PREFER)]
            )
            return answer and self._shown(exchange, answer)
        answer = await self._ask(exchange, self._by_real_number(exchange))
        return answer and await self._answer(exchange, before, answer)

    def _by_real_number(self, exchange: "Exchange") -> list[Header]:
        """The headers of a request that no fault touches.

        What the VM has may bear another number than it really has.
        """
        headers: list[Header] = exchange.scope["headers"]
        memory = self._memories.get(exchange.key)
        if memory is None or not memory.is_renumbered:
            return headers
        plain = [header for header in headers if header[0] != CONDITIONAL]
        has_it = document.matches(exchange.known, memory.offered[-1].number)
        return [*plain, (CONDITIONAL, _etag(memory.real)[1])] if has_it else plain

    def _untouched(self, exchange: "Exchange", answer: Answer) -> Answer:
        memory = self._memories.get(exchange.key)
        if memory is not None and memory.is_renumbered:
            if answer.status == 304:
                return answer.put(_etag(memory.offered[-1].number))
            return self._shown(exchange, answer)
        real = read(answer.body) if answer.status == 200 and exchange.call.vm else None
        if real is not None:
            self._memory(exchange).note(real)
        return answer

    def _shown(self, exchange: "Exchange", answer: Answer) -> Answer:
        """A document as the VM sees it;

        304 if it has that already, unless its body is about to be spoilt.
        """
        real = read(answer.body) if answer.status == 200 else None
        if real is None:
            return answer
        shown = self._memory(exchange).look(real, exchange.touching, self._clock.now())
        is_spoilt = any(isinstance(one.fault, BODIES) for one in exchange.touching)
        if document.matches(exchange.known, shown.number) and not is_spoilt:
            return Answer(304, (_etag(shown.number),))
        return answer.put(_etag(shown.number)).with_body(shown.body())

    async def _ask(self, exchange: "Exchange", headers: list[Header]) -> Answer | None:
        """The application's whole answer; None if it gives none, because the client has left."""
        sent: list[Message] = []

        async def collect(message: Message) -> None:
            sent.append(message)

        await self._app({**exchange.scope, "headers": headers}, exchange.receive, collect)
        if not sent:
            return None
        return Answer(
            sent[0]["status"],
            tuple(sent[0]["headers"]),
            b"".join(one.get("body", b"") for one in sent[1:]),
        )

    def _memory(self, exchange: "Exchange") -> Memory:
        if exchange.key not in self._memories and len(self._memories) >= MEMORIES_MAX:
            del self._memories[next(iter(self._memories))]
        return self._memories.setdefault(exchange.key, Memory())


class Exchange:
    """One request while it is being answered.

    What it asks is read on its way to the application.
    """

    def __init__(
        self, scope: Message, receive: Receive, send: Send, vm: str, transcript: Transcript
    ) -> None:
        _, self._path = ask.split(scope["path"])
        is_document = scope["method"] == "GET" and ask.normalize(self._path) in (
            ask.EVENTS,
            ask.EVENTS_LEGACY,
        )
        self.scope = scope
        self.send = send
        self.call = Call(vm, scope["method"], is_document)
        self.key = (vm, _version(scope["query_string"]) if is_document else "")
        self.known = ask.join(scope["headers"]).get(CONDITIONAL, b"").decode("latin-1")
        self.touching: list[Standing] = []
        self.is_recorded = False
        self._receive = receive
        self._received: deque[Message] = deque()
        self._asked = b""
        self._transcript = transcript

    async def receive(self) -> Message:
        return self._received.popleft() if self._received else await self._hear()

    async def _hear(self) -> Message:
        message = await self._receive()
        if len(self._asked) < BODY_CHARS_MAX:
            self._asked += message.get("body", b"")
        return message

    async def sleep(self, seconds: float) -> bool:
        """On the clock of the caller, if it has one of its own.

        Whether the client is still there.
        """
        clock = (self.scope.get("extensions") or {}).get(SLEEP, asyncio.sleep)
        asleep, leaving = (
            asyncio.ensure_future(clock(seconds)),
            asyncio.ensure_future(self._until_it_leaves()),
        )
        try:
            await asyncio.wait({asleep, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return not leaving.done()
        finally:
            asleep.cancel()
            leaving.cancel()

    async def _until_it_leaves(self) -> None:
        """What it says meanwhile is kept for the application."""
        while True:  # ends when it leaves: a body has an end, and then only that comes
            message = await self._hear()
            if message["type"] == "http.disconnect":
                return
            self._received.append(message)

    async def answer(self, answer: Answer) -> None:
        """Record the answer and send it, as far as it goes."""
        is_whole = answer.ending is Ending.WHOLE
        self.record(
            answer.status if is_whole else 0, b"" if answer.ending is Ending.DROP else answer.body
        )
        line = None if is_whole else find_line(self.scope)
        if answer.ending is not Ending.DROP:
            await self.send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": list(answer.headers),
                }
            )
            await self.send(
                {"type": "http.response.body", "body": answer.body, "more_body": not is_whole}
            )
        if line is not None:
            await (line.close() if answer.ending is Ending.CLOSE else line.reset())

    def record(self, status: int, answered: bytes) -> None:
        self.is_recorded = True
        query = self.scope["query_string"].decode("latin-1")
        self._transcript.add(
            Kind.REQUEST,
            vm=self.call.vm,
            method=self.call.method,
            path=f"{self._path}?{query}" if query else self._path,
            status=status,
            asked=text(self._asked),
            answered=text(answered),
            faults=tuple(one.fault.kind for one in self.touching),
        )


def _version(query: bytes) -> str:
    try:
        return ask.parse_query(query).get("api-version", "")
    except Invalid:
        return ""


def _etag(number: int) -> Header:
    return b"etag", b'"%d"' % number
