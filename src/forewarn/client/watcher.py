"""What changed from one document to the next, each told once. Pure: `Watcher.update(document,
now)`.

**Events, not numbers, are compared.** Each id passes through at most four states, forward only:

    (unseen) --appeared--> Scheduled --started--> Started --finished--> (over)
                               |    `---------finished or canceled--------^
    An event first seen as Started is told as appeared and as started. An id that is over stays
    over, whatever still shows it.
    `changed` tells that something else about a live event is different now: NotBefore has moved, a
    name has gone.

**Which end it was.** The document only stops showing an event. It is *finished* if it was seen
  Started, if its NotBefore has come (give or take GRACE, for two clocks), or if it was approved
  here: then it may run at once, and faster than anyone looks. Otherwise it vanished while it was
  Scheduled, well before its time, and is *canceled*. An event that another VM approved and that ran
  between two looks is told as canceled too: nothing on the wire tells the difference.

**Which document to believe.** A greater DocumentIncarnation is surely newer. One that is not
  greater comes from a server that lags, or from a counter that began again (a new store, 24 hours
  without a poll), and only more looks can tell. From such a document events that appear or start
  are told at once, because that is urgent and true of either; what it lacks or shows otherwise is
  believed when LOOKS_MIN documents in a row were like that. So no reset is missed, and no stale
  page ends an event. Nor does the first page of a new life: while there is none to compare it with,
  one that lacks a known event is doubted too.

**An empty body** is how some hosts say that there are no events, and how others hiccup. It ends
  what is known only when BLANKS_MIN came in a row, which takes a minute, as looks are at least a
  second apart; until then it is as if it had not come. No document has said then that these ids are
  over, so one that comes back is told anew.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from forewarn.client.models import Document, Event

GRACE = timedelta(seconds=5)
LOOKS_MIN = 3
BLANKS_MIN = 60
OVER_MAX = 1024


class Kind(StrEnum):
    APPEARED = "appeared"
    CHANGED = "changed"
    STARTED = "started"
    FINISHED = "finished"
    CANCELED = "canceled"


@dataclass(frozen=True, slots=True)
class Change:
    """What became of an event, and the document that showed it.

    At its end, `event` is as it was last seen.
    """

    kind: Kind
    event: Event
    document: Document


class Watcher:
    """Remembers what was told. `known` are events told in an earlier life; `approved` holds keys of
    events, and may grow.

    With a `looks_min` of 1, for who looks only once, whatever comes is believed.
    """

    def __init__(
        self,
        known: Iterable[Event] = (),
        *,
        approved: Container[str] = (),
        looks_min: int = LOOKS_MIN,
    ) -> None:
        self._looks_min = looks_min
        self._blanks_min = BLANKS_MIN if looks_min > 1 else 1
        self._live = {event.key: event for event in known}
        self._over: dict[str, None] = {}
        self._approved = approved
        self._believed: Document | None = None
        self._doubts = 0
        self._blanks = 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether another look is needed soon."""
        return self._doubts > 0 or bool(self._blanks and self._live)

    def update(self, document: Document, now: datetime) -> list[Change]:
        """What is new, ends first. The same document again is no news."""
        is_believed = self._believe(document)
        shown = _by_key(document)
        ended = (
            [event for key, event in self._live.items() if key not in shown] if is_believed else []
        )
        changes = [Change(self._end(event, now), event, document) for event in ended]
        for event in ended:
            del self._live[event.key]
            if not document.is_blank:
                self._over[event.key] = None
        for event in shown.values():
            kinds = tuple(self._news(event, is_believed=is_believed))
            changes += [Change(kind, event, document) for kind in kinds]
            if kinds:
                self._live[event.key] = event
        self._forget(shown)
        return changes

    def _believe(self, document: Document) -> bool:
        if document.is_blank:
            self._blanks += 1
            return self._blanks >= self._blanks_min
        self._blanks = 0
        if self._is_doubtful(document):
            self._doubts += 1
            if self._doubts < self._looks_min:
                return False
        self._believed, self._doubts = document, 0
        return True

    def _is_doubtful(self, document: Document) -> bool:
        last = self._believed
        if last is None:
            return not self._live.keys() <= _by_key(document).keys()
        return document.incarnation <= last.incarnation and not _is_same(document, last)

    def _news(self, event: Event, *, is_believed: bool) -> Iterator[Kind]:
        if event.key in self._over:
            return
        known = self._live.get(event.key)
        if known is None:
            yield Kind.APPEARED
        if event.is_started and not (known and known.is_started):
            yield Kind.STARTED
        elif known and is_believed and known != event and known.is_started == event.is_started:
            yield Kind.CHANGED

    def _end(self, event: Event, now: datetime) -> Kind:
        has_run = event.is_started or event.key in self._approved or event.is_due(now + GRACE)
        return Kind.FINISHED if has_run else Kind.CANCELED

    def _forget(self, shown: Container[str]) -> None:
        """The oldest ends, beyond a limit; never one that a document still shows."""
        spare = [key for key in self._over if key not in shown][
            : max(0, len(self._over) - OVER_MAX)
        ]
        for key in spare:
            del self._over[key]


def _is_same(one: Document, other: Document) -> bool:
    return (one.incarnation, one.events) == (other.incarnation, other.events)


def _by_key(document: Document) -> dict[str, Event]:
    """The events by id.

    Of two with one id the first counts, but one that has started counts before one that has not.
    """
    shown: dict[str, Event] = {}
    for event in document.events:
        known = shown.get(event.key)
        if known is None or (event.is_started and not known.is_started):
            shown[event.key] = event
    return shown
