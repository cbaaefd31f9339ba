"""A document as a VM reads it:

JSON whose missing members are told as failures, and a value for what was polled.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forewarn.conformance.check import fail, holds

if TYPE_CHECKING:
    from forewarn.conformance.raw_http import Answer


class Entry(dict[str, Any]):
    """A JSON object. A member that is looked for and is not there is a failure of the endpoint."""

    def __missing__(self, name: str) -> Any:
        fail(f"a member {name!r}", dict(self))


def parse(body: bytes) -> Any:
    """JSON in UTF-8, whose objects are Entries. ValueError if it is not."""
    return json.loads(body.decode(), object_hook=Entry, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(name)


@dataclass(frozen=True)
class Document:
    """One polled document; `number` is its DocumentIncarnation."""

    answer: "Answer"
    number: int
    events: tuple[Entry, ...]

    @classmethod
    def of(cls, answer: "Answer") -> "Document":
        holds(answer.status == 200, "status 200 and the document", answer)
        said = answer.object()
        is_one = isinstance(said["Events"], list) and isinstance(said["DocumentIncarnation"], int)
        holds(
            is_one and all(isinstance(event, Entry) for event in said["Events"]),
            "a document with a list of events",
            answer,
        )
        return cls(answer, said["DocumentIncarnation"], tuple(said["Events"]))

    def find(self, event_id: str) -> Entry | None:
        """The event, whatever the case of its letters: how the id is written is another check's."""
        return next(
            (
                event
                for event in self.events
                if str(event.get("EventId")).upper() == event_id.upper()
            ),
            None,
        )

    def told(self) -> str:
        return self.answer.told()
