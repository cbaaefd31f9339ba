"""What faults make of an answer's body. Pure: an answer in, an answer out."""

from collections.abc import Iterable
from enum import Enum, auto
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from forewarn.lab.fault.kinds import Base, Cut, Empty, NoEvents, Reset, Status, TextPlain, Truncate
from forewarn.web.http.message import CONTENT_TYPE, Header, content_length

TEXT_PLAIN = (b"content-type", b"text/plain; charset=utf-8")


class Ending(Enum):
    """What becomes of the connection.

    Whatever is not WHOLE leaves the client without a whole answer.
    """

    WHOLE = auto()
    CLOSE = auto()
    RESET = auto()
    DROP = auto()
    """Reset without a byte."""


class Answer(NamedTuple):
    """An answer to be sent.

    Content-Length is among the headers, and is not that of the body if the answer is not whole.
    """

    status: int
    headers: tuple[Header, ...]
    body: bytes = b""
    ending: Ending = Ending.WHOLE

    def put(self, *headers: Header) -> "Answer":
        """With these headers in the place of those of the same names, at that place."""
        new = dict(headers)
        kept = tuple((name, new.pop(name, value)) for name, value in self.headers)
        return self._replace(headers=(*kept, *new.items()))

    def with_body(self, body: bytes) -> "Answer":
        return self.put(content_length(body))._replace(body=body)


def error(fault: Status) -> Answer:
    """The answer that a fault gives in the place of the endpoint."""
    body = msgspec.json.encode({"error": HTTPStatus(fault.code).phrase})
    retry_after = (
        () if fault.retry_after is None else ((b"retry-after", b"%d" % fault.retry_after),)
    )
    return Answer(fault.code, (CONTENT_TYPE, *retry_after, content_length(body)), body)


def spoil(answer: Answer, faults: Iterable[Base]) -> Answer:
    """The answer after these faults, which are in order.

    Those that are not about the body leave it as it is.
    """
    for fault in faults:
        match fault:
            case NoEvents():
                answer = _without_events(answer)
            case TextPlain():
                answer = (
                    answer.put(TEXT_PLAIN)
                    if any(name == TEXT_PLAIN[0] for name, _ in answer.headers)
                    else answer
                )
            case Empty():
                answer = _emptied(answer)
            case Truncate(bytes=size, mode=mode):
                answer = _truncated(answer, size, mode)
            case Reset(bytes=size):
                answer = _reset(answer, size)
    return answer


def _without_events(answer: Answer) -> Answer:
    if answer.status != 200:
        return answer
    said = msgspec.json.decode(answer.body)
    return answer.with_body(
        msgspec.json.encode({name: value for name, value in said.items() if name != "Events"})
    )


def _emptied(answer: Answer) -> Answer:
    """A refusal stays a refusal. Without an ETag: nobody shall ask for this one again."""
    if answer.status != 200:
        return answer
    kept = tuple(header for header in answer.headers if header[0] != b"etag")
    return answer._replace(headers=kept).with_body(b"")


def _truncated(answer: Answer, size: int | None, mode: Cut) -> Answer:
    if not answer.body:
        return answer
    cut = answer.body[: _within(answer.body, size)]
    return (
        answer.with_body(cut)
        if mode is Cut.WHOLE
        else answer._replace(body=cut, ending=Ending.CLOSE)
    )


def _reset(answer: Answer, size: int | None) -> Answer:
    if not answer.body:
        return answer._replace(ending=Ending.DROP)
    return answer._replace(body=answer.body[: _within(answer.body, size)], ending=Ending.RESET)


def _within(body: bytes, size: int | None) -> int:
    """Where to cut: never at the very end, for that would be no cut."""
    return len(body) // 2 if size is None else min(size, len(body) - 1)
