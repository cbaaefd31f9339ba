"""A response of the application, and how it is sent, whole or broken."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from forewarn.lab.fault.tcp import FilteredConnection
from forewarn.web.http.listener import Application
from forewarn.web.http.message import Message, Receive, Send, content_length


class Ending(Enum):
    """What happens to the connection. Only WHOLE gives the client a complete response."""

    WHOLE = auto()
    CLOSE = auto()
    RESET = auto()


class FaultyResponse(NamedTuple):
    """A response to send. Content-Length does not match the body if the ending is not WHOLE.

    Status 0: not even its first byte is sent.
    """

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes = b""
    ending: Ending = Ending.WHOLE

    def with_header(self, name: bytes, value: bytes) -> "FaultyResponse":
        return self._replace(headers={**self.headers, name: value})

    def with_body(self, body: bytes) -> "FaultyResponse":
        return self.with_header(*content_length(body))._replace(body=body)

    async def send(self, send: Send, connection: FilteredConnection) -> None:
        """Send it up to its ending."""
        is_whole = self.ending is Ending.WHOLE
        if self.status:
            start = {"type": "http.response.start", "status": self.status}
            await send({**start, "headers": list(self.headers.items())})
            body = {"type": "http.response.body", "body": self.body}
            await send({**body, "more_body": not is_whole})
        if not is_whole:
            is_close = self.ending is Ending.CLOSE
            await (connection.close() if is_close else connection.reset())


NO_RESPONSE = FaultyResponse(0, {}, ending=Ending.RESET)


async def call_app(app: Application, scope: Message, receive: Receive) -> FaultyResponse:
    """Return the response of an application; NO_RESPONSE if the client has disconnected."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return NO_RESPONSE
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return FaultyResponse(sent[0]["status"], dict(sent[0]["headers"]), body)
