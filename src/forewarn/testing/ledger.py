"""The last state of every event, its approvals and its end, readable from any thread."""

import threading
from datetime import datetime
from typing import cast, get_args

import msgspec

from forewarn.core.change import ChangeKind
from forewarn.core.event import Event
from forewarn.engine.board import Board
from forewarn.engine.entry import Entry
from forewarn.testing.literals import EventStatus

ENDINGS = (ChangeKind.COMPLETED, ChangeKind.CANCELED, ChangeKind.FAILED)
STATUSES: tuple[EventStatus, ...] = get_args(EventStatus)


class LabApproval(msgspec.Struct, frozen=True):
    """An approval. `by` is a VM's name, `operator` or `policy`.

    `vm` is empty unless a VM approved: a VM may be named `operator` or `policy` too.
    """

    at: datetime
    by: str
    event_id: str
    vm: str = ""


class EventRecord(msgspec.Struct, frozen=True):
    """An event in its last state. `ending` is empty while it is in the document.

    States:  Scheduled -> Started -> Completed | Failed, and Scheduled -> Canceled | Failed.
    """

    event: Event
    ending: str = ""

    @property
    def status(self) -> EventStatus:
        return cast("EventStatus", self.ending or str(self.event.status))

    def has_reached(self, status: str) -> bool:
        """Return whether it has this status or had it before."""
        return status in ("Scheduled", self.status) or (
            status == "Started" and self.event.started_at is not None
        )


class EventLedger:
    """Written by the lab's thread from history entries; read by any thread."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._records: dict[str, EventRecord] = {}
        self._approvals: list[LabApproval] = []
        self._changed = threading.Condition()

    def add_change(self, entry: Entry) -> None:
        """Record a change that has been committed and published."""
        published = self._board.scopes.get(entry.scope)
        with self._changed:
            for event in published.scope.events if published else ():
                self._records[event.id] = EventRecord(event)
            record = self._records.get(entry.event)
            if record is not None and entry.what in ENDINGS:
                self._records[entry.event] = EventRecord(record.event, entry.what.capitalize())
            elif record is not None and entry.what is ChangeKind.APPROVED:
                self._approvals.append(LabApproval(entry.at, entry.detail, entry.event, entry.vm))
            self._changed.notify_all()

    def find(self, event_id: str) -> EventRecord:
        with self._changed:
            return self._records[event_id]

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all events, the oldest first."""
        with self._changed:
            return tuple(self._records)

    def approvals(self, event_id: str = "") -> tuple[LabApproval, ...]:
        """Return all approvals in order, or those of one event. Repeated ones do not count."""
        with self._changed:
            return tuple(each for each in self._approvals if event_id in ("", each.event_id))

    def wait(self, event_id: str, status: str, seconds: float) -> EventRecord:
        """Wait until the event has reached the status or has ended, or the real time is up."""

        def is_settled() -> bool:
            record = self._records[event_id]
            return record.has_reached(status) or record.ending != ""

        with self._changed:
            self._changed.wait_for(is_settled, seconds)
            return self._records[event_id]
