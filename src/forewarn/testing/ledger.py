"""What became of every event, readable from any thread: how each last was, who approved it and
when, how it ended.
"""

import threading
from datetime import datetime

import msgspec

from forewarn.core.change import ChangeKind
from forewarn.core.event import Event
from forewarn.engine.board import Board
from forewarn.engine.entry import Note
from forewarn.errors import UnknownEvent

ENDS = {
    ChangeKind.COMPLETED: "Completed",
    ChangeKind.CANCELED: "Canceled",
    ChangeKind.FAILED: "Failed",
}
STATUSES = ("Scheduled", "Started", *ENDS.values())


class Approval(msgspec.Struct, frozen=True):
    """Who approved which event, and when by the lab's clock. `by` is a VM's name, `operator` or
    `policy`.

    `vm` is empty unless a VM approved: a VM may be called `operator` or `policy`, too.
    """

    at: datetime
    by: str
    event_id: str
    vm: str = ""


class Course(msgspec.Struct, frozen=True):
    """An event as it last was.

    `end` is empty while it lives; a Failed or Canceled event may have ended without a start.
    """

    event: Event
    end: str = ""

    @property
    def status(self) -> str:
        return self.end or str(self.event.status)

    def has_reached(self, status: str) -> bool:
        """Whether it is so, or was so on its way."""
        return status in ("Scheduled", self.status) or (
            status == "Started" and self.event.started_at is not None
        )


class Ledger:
    """Written by the lab's own thread, by way of the engine's notes; read by any."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._courses: dict[str, Course] = {}
        self._approvals: list[Approval] = []
        self._news = threading.Condition()

    def hear(self, note: Note) -> None:
        """A change that has been committed and is shown on the board."""
        change, place = note.change, self._board.scopes.get(note.scope)
        with self._news:
            for event in place.scope.events if place else ():
                self._courses[event.id] = Course(event)
            known = self._courses.get(change.event_id)
            if known is not None and change.what in ENDS:
                self._courses[change.event_id] = Course(known.event, ENDS[change.what])
            elif known is not None and change.what is ChangeKind.APPROVED:
                self._approvals.append(Approval(note.at, change.detail, change.event_id, change.vm))
            self._news.notify_all()

    def find(self, event_id: str) -> Course:
        """The event as it is, or as it last was."""
        with self._news:
            found = self._courses.get(event_id.upper())
        if found is None:
            raise UnknownEvent(f"there never was an event {event_id!r} in this lab", event=event_id)
        return found

    def ids(self) -> tuple[str, ...]:
        """All events there ever were, the oldest first."""
        with self._news:
            return tuple(self._courses)

    def approvals(self, event_id: str = "") -> tuple[Approval, ...]:
        """All approvals in their order, or those of one event. Approving again is no approval."""
        with self._news:
            return tuple(one for one in self._approvals if event_id in ("", one.event_id))

    def wait(self, event_id: str, status: str, seconds: float) -> Course:
        """The event once it has reached the status, or can no more, or the (real) time is up:
        whichever comes first.
        """

        def is_settled() -> bool:
            course = self._courses[event_id]
            return course.has_reached(status) or course.end != ""

        with self._news:
            self._news.wait_for(is_settled, seconds)
            return self._courses[event_id]
