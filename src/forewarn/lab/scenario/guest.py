"""Model guests: they play the software in a VM, through the same endpoint as everybody, faults and
transcript included.

A day of polls once a second would tell nothing new most of the time. So a guest looks when
something has changed, at its next poll moment; it goes on looking while an answer was bad or a
fault is in force, and once an hour to keep its scope enabled.
"""

import asyncio
import json
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from forewarn import duration
from forewarn.client.errors import InvalidDocument
from forewarn.client.models import Document, Event, read_document
from forewarn.client.protocol import API_VERSION
from forewarn.core.fleet import Power
from forewarn.lab.scenario.scheduler import Agenda
from forewarn.lab.scenario.schema import NEVER, GuestEntry, Of
from forewarn.lab.service import Answer, LabService

TARGET = f"/metadata/scheduledevents?api-version={API_VERSION}"
HEADERS = (("Metadata", "true"),)
IDLE = timedelta(hours=1)


class Guest:
    """One VM's software. `phase` (0 to 1) is where in its interval it polls."""

    def __init__(
        self, vm: str, entry: GuestEntry, lab: LabService, agenda: Agenda, *, phase: float
    ) -> None:
        assert entry.poll != NEVER
        self.vm = vm
        self._entry = entry
        self._lab = lab
        self._agenda = agenda
        self._interval = duration.parse_duration(entry.poll) / lab.rate
        self._approve_after = (
            None if entry.approve == NEVER else duration.parse_duration(entry.approve) / lab.rate
        )
        self._first = lab.clock.now() + self._interval * phase
        self._alarm: asyncio.Task[None] | None = None
        self._poll_at = datetime.max.replace(tzinfo=self._first.tzinfo)
        self._is_asking = False
        self._has_news = False
        self._noticed: set[str] = set()
        self._scheduled: dict[str, Event] = {}

    def begin(self) -> None:
        self._look_at(self._first)

    def notice(self) -> None:
        """Something may be new: look at the next poll moment."""
        self._has_news = True
        if not self._is_asking:
            self._look_at(self._moment_after(self._agenda.clock.now()))

    def _look_at(self, moment: datetime) -> None:
        if self._alarm is not None and not self._alarm.done() and self._poll_at <= moment:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._poll_at = moment
        self._alarm = self._agenda.at(moment, self._poll)

    def _moment_after(self, moment: datetime) -> datetime:
        turns = max((moment - self._first) // self._interval + 1, 0)
        return self._first + turns * self._interval

    async def _poll(self) -> None:
        self._alarm = None
        is_quiet = True
        if self._is_up():
            self._is_asking, self._has_news = True, False
            document = read(await self._lab.ask(self.vm, "GET", TARGET, headers=HEADERS))
            self._is_asking = False
            if document is not None:
                self._consider(document)
            is_troubled = bool(self._lab.faults.active(self.vm, self._agenda.clock.now()))
            is_quiet = document is not None and not self._has_news and not is_troubled
        pause = IDLE / self._lab.rate if is_quiet else timedelta(0)
        self._look_at(self._moment_after(self._agenda.clock.now() + pause))

    def _is_up(self) -> bool:
        """Nothing runs in a VM that is deallocated, or not there any more."""
        place = self._lab.engine.board.vms.get(self.vm)
        vm = place.scope.vm(self.vm) if place else None
        return vm is not None and vm.power is Power.RUNNING

    def _consider(self, document: Document) -> None:
        self._scheduled = {event.key: event for event in document.events if event.is_scheduled}
        for key, event in self._scheduled.items():
            if key in self._noticed or self._approve_after is None or not self._is_ours(event):
                continue
            self._noticed.add(key)
            self._agenda.at(
                self._agenda.clock.now() + self._approve_after, partial(self._approve, key)
            )

    def _is_ours(self, event: Event) -> bool:
        if self._entry.types and event.type not in self._entry.types:
            return False
        match self._entry.of:
            case Of.OWN:
                return event.concerns(self.vm)
            case Of.LEADER:
                return event.resources[:1] == (self.vm,)
            case Of.ANY:
                return True
            case Of.FOREIGN:
                return not event.concerns(self.vm)

    async def _approve(self, key: str) -> None:
        """Until it is heard, or there is nothing to approve any more."""
        event = self._scheduled.get(key)
        if event is None or not self._is_up():
            return
        body = json.dumps({"StartRequests": [{"EventId": event.id}]}).encode()
        answer = await self._lab.ask(self.vm, "POST", TARGET, body, HEADERS)
        if answer.status != 200:
            self._agenda.at(
                self._moment_after(self._agenda.clock.now()), partial(self._approve, key)
            )


def read(answer: Answer) -> Document | None:
    """The document, if a careful client would believe it."""
    if answer.status == 200 and answer.body:
        with suppress(InvalidDocument):
            return read_document(answer.body)
    return None
