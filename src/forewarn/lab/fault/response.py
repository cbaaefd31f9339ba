"""A response of the application, what faults do to it, and how it is sent."""

from collections.abc import Iterable
from enum import Enum, auto
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from forewarn.lab.fault.active import ActiveFault
from forewarn.lab.fault.kinds import (
    Empty,
    ErrorStatus,
    NoEvents,
    Reset,
    TextPlain,
    Truncate,
    TruncateMode,
)
from forewarn.lab.fault.tcp import BreakableConnection
from forewarn.web.http.listener import Application
from forewarn.web.http.message import CONTENT_TYPE, Header, content_length
from forewarn.web.metadata.app import Message, Receive, Send

TEXT_PLAIN = (b"content-type", b"text/plain; charset=utf-8")


class Ending(Enum):
    """What happens to the connection. Only WHOLE gives the client a complete response."""

    WHOLE = auto()
    CLOSE = auto()
    RESET = auto()
    DROP = auto()
    """Reset before the first byte."""


class FaultyResponse(NamedTuple):
    """A response to send. Content-Length does not match the body if the ending is not WHOLE."""

    status: int
    headers: tuple[Header, ...]
    body: bytes = b""
    ending: Ending = Ending.WHOLE

    def with_header(self, name: bytes, value: bytes) -> "FaultyResponse":
        """Replace a header in its place, or append it."""
        if all(present != name for present, _ in self.headers):
            return self._replace(headers=(*self.headers, (name, value)))
        headers = tuple(
            (present, value if present == name else old) for present, old in self.headers
        )
        return self._replace(headers=headers)

    def with_body(self, body: bytes) -> "FaultyResponse":
        return self.with_header(*content_length(body))._replace(body=body)

    async def send(self, send: Send, connection: BreakableConnection) -> None:
        """Send it up to its ending."""
        is_whole = self.ending is Ending.WHOLE
        if self.ending is not Ending.DROP:
            start = {"type": "http.response.start", "status": self.status}
            await send({**start, "headers": list(self.headers)})
            body = {"type": "http.response.body", "body": self.body}
            await send({**body, "more_body": not is_whole})
        if not is_whole:
            is_close = self.ending is Ending.CLOSE
            await (connection.close() if is_close else connection.reset())


async def call_app(app: Application, scope: Message, receive: Receive) -> FaultyResponse | None:
    """Return the response of an application; None if the client has disconnected."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return None
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return FaultyResponse(sent[0]["status"], tuple(sent[0]["headers"]), body)


def make_error(fault: ErrorStatus) -> FaultyResponse:
    body = msgspec.json.encode({"error": HTTPStatus(fault.code).phrase})
    response = FaultyResponse(fault.code, (CONTENT_TYPE, content_length(body)), body)
    if fault.retry_after is None:
        return response
    return response.with_header(b"retry-after", b"%d" % fault.retry_after)


def apply_faults(response: FaultyResponse, faults: Iterable[ActiveFault]) -> FaultyResponse:
    """Apply the faults of the body, in the given order. Others change nothing."""
    for each in faults:
        match each.fault:
            case NoEvents():
                response = _remove_events(response)
            case TextPlain() if any(name == TEXT_PLAIN[0] for name, _ in response.headers):
                response = response.with_header(*TEXT_PLAIN)
            case Empty():
                response = _empty(response)
            case Truncate(bytes=size, mode=mode) if response.body:
                body = _cut(response.body, size)
                response = (
                    response.with_body(body)
                    if mode is TruncateMode.WHOLE
                    else response._replace(body=body, ending=Ending.CLOSE)
                )
            case Reset() if not response.body:
                response = response._replace(ending=Ending.DROP)
            case Reset(bytes=size):
                response = response._replace(body=_cut(response.body, size), ending=Ending.RESET)
    return response


def _remove_events(response: FaultyResponse) -> FaultyResponse:
    if response.status != 200:
        return response
    document = msgspec.json.decode(response.body)
    del document["Events"]
    return response.with_body(msgspec.json.encode(document))


def _empty(response: FaultyResponse) -> FaultyResponse:
    """Errors stay as they are. The ETag goes: it would make the empty body cacheable."""
    if response.status != 200:
        return response
    headers = tuple(header for header in response.headers if header[0] != b"etag")
    return response._replace(headers=headers).with_body(b"")


def _cut(body: bytes, size: int | None) -> bytes:
    """Cut at `size` or in the middle, and always at least the last byte."""
    return body[: len(body) // 2 if size is None else min(size, len(body) - 1)]
