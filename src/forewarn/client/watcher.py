"""What changed from one document to the next, each change reported once. No I/O, no clock.

**Events are compared, not incarnations.** States of an event id, forward only:

    (unseen) --appeared--> Scheduled --started--> Started --finished--> (ended)
                               |                                          ^
                               `------------finished or canceled----------'

    An event first seen as Started is reported as appeared and as started. An id that has ended
    stays ended, even if a document still shows it. `changed` reports any other difference of a
    live event: NotBefore moved, a resource is gone.

**Finished or canceled.** A document only stops showing an event. It is *finished* if it was seen
Started, if its NotBefore has passed (within GRACE, as two clocks may differ), or if it was
approved here: then it may have run between two polls. Otherwise it disappeared while Scheduled,
well before NotBefore, and is *canceled*. An event that another VM approved and that ran between
two polls is reported as canceled too: nothing on the wire tells the difference.

**Which document to trust.** States:  TRUSTED <-> IN DOUBT

    TRUSTED   a document with a greater DocumentIncarnation, or equal to the last, is trusted
    IN DOUBT  any other one comes from a server that lags or from a counter that started again (a
              new store, 24 hours without a poll). Events that appear or start in it are reported
              immediately: that is urgent, and true in both cases. What it lacks or shows
              differently is trusted once LOOKS_MIN such documents came in a row.

So no reset is missed, and no stale document ends an event. The first document of a new process
has nothing to be compared with: it is in doubt if it lacks a known event.

**An empty body** means no events on some hosts, and a temporary fault on others. It ends the known
events only after BLANKS_MIN in a row, which takes a minute, as polls are at least a second apart;
until then it is ignored. No document showed that these ids have ended, so an event that comes back
is reported again.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from forewarn.client.models import Document, Event

GRACE = timedelta(seconds=5)
LOOKS_MIN = 3
BLANKS_MIN = 60
ENDED_MAX = 1024


class Kind(StrEnum):
    APPEARED = "appeared"
    CHANGED = "changed"
    STARTED = "started"
    FINISHED = "finished"
    CANCELED = "canceled"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of an event, and the document that showed it.

    When it has ended, `event` is as it was last seen.
    """

    kind: Kind
    event: Event
    document: Document


class Watcher:
    """Remembers what was reported. `known` are events reported by an earlier process; `approved`
    has the keys of events, and may grow.

    With `looks_min=1`, for a caller that polls only once, every document is trusted.
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
        self._ended: dict[str, None] = {}
        self._approved = approved
        self._trusted: Document | None = None
        self._doubts = 0
        self._blanks = 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether another poll is needed soon."""
        return self._doubts > 0 or bool(self._blanks and self._live)

    def update(self, document: Document, now: datetime) -> list[Change]:
        """The changes, ends first. The same document again gives none."""
        is_trusted = self._trust(document)
        events = _by_key(document)
        missing = [event for key, event in self._live.items() if key not in events]
        ended = missing if is_trusted else []
        changes = [Change(self._end(event, now), event, document) for event in ended]
        for event in ended:
            del self._live[event.key]
            if not document.is_blank:
                self._ended[event.key] = None
        for event in events.values():
            kinds = tuple(self._compare(event, is_trusted=is_trusted))
            changes += [Change(kind, event, document) for kind in kinds]
            if kinds:
                self._live[event.key] = event
        self._forget(events)
        return changes

    def _trust(self, document: Document) -> bool:
        if document.is_blank:
            self._blanks += 1
            return self._blanks >= self._blanks_min
        self._blanks = 0
        if self._is_doubtful(document):
            self._doubts += 1
            if self._doubts < self._looks_min:
                return False
        self._trusted, self._doubts = document, 0
        return True

    def _is_doubtful(self, document: Document) -> bool:
        last = self._trusted
        if last is None:
            return not self._live.keys() <= _by_key(document).keys()
        is_same = (document.incarnation, document.events) == (last.incarnation, last.events)
        return document.incarnation <= last.incarnation and not is_same

    def _compare(self, event: Event, *, is_trusted: bool) -> Iterator[Kind]:
        if event.key in self._ended:
            return
        known = self._live.get(event.key)
        if known is None:
            yield Kind.APPEARED
        if event.is_started and not (known and known.is_started):
            yield Kind.STARTED
        elif known and is_trusted and known != event and known.is_started == event.is_started:
            yield Kind.CHANGED

    def _end(self, event: Event, now: datetime) -> Kind:
        has_run = event.is_started or event.key in self._approved or event.is_due(now + GRACE)
        return Kind.FINISHED if has_run else Kind.CANCELED

    def _forget(self, events: Container[str]) -> None:
        """Drop the oldest ended ids over the limit, but never one that a document still shows."""
        gone = [key for key in self._ended if key not in events]
        for key in gone[: max(0, len(self._ended) - ENDED_MAX)]:
            del self._ended[key]


def _by_key(document: Document) -> dict[str, Event]:
    """The events by key. Of two with the same id a Started one wins, else the first."""
    events: dict[str, Event] = {}
    for event in document.events:
        known = events.get(event.key)
        if known is None or (event.is_started and not known.is_started):
            events[event.key] = event
    return events
