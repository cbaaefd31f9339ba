"""Model guests: they play the software in a VM through the real endpoint, faults included.

A poll every second for a day would mostly see nothing new. So a guest polls at its next poll time
after something has changed, keeps polling while responses are bad or a fault is active, and polls
once an hour to keep its scope enabled.

States:  IDLE (a poll is planned) -> POLLING -> IDLE. A change during POLLING plans another poll.
"""

import asyncio
import json
from datetime import datetime, timedelta
from functools import partial

from forewarn.client.models import Document, Event
from forewarn.client.protocol import API_VERSION
from forewarn.core.fleet import Power
from forewarn.lab.scenario.schema import NEVER, Approves, GuestEntry
from forewarn.lab.service import LabService
from forewarn.lab.transcript import read_shown

TARGET = f"/metadata/scheduledevents?api-version={API_VERSION}"
HEADERS = ((b"metadata", b"true"),)
IDLE = timedelta(hours=1)


class Guest:
    """The software of one VM. `phase` (0 to 1) is where in its interval it polls."""

    def __init__(self, vm: str, entry: GuestEntry, lab: LabService, *, phase: float) -> None:
        assert entry.poll != NEVER
        self.vm = vm
        self._entry = entry
        self._lab = lab
        self._run_at = lab.scheduler.run_at
        self._interval = lab.scale(entry.poll)
        self._approve_after = None if entry.approve == NEVER else lab.scale(entry.approve)
        self._first = lab.clock.now() + self._interval * phase
        self._planned: asyncio.Task[None] | None = None
        self._poll_at = datetime.max.replace(tzinfo=self._first.tzinfo)
        self._is_polling = False
        self._has_news = False
        self._noticed: set[str] = set()
        self._scheduled: dict[str, Event] = {}

    def start(self) -> None:
        self._plan_poll(self._first)

    def notify(self) -> None:
        """Something may have changed: poll at the next poll time."""
        self._has_news = True
        if not self._is_polling:
            self._plan_poll(self._next_poll_time(self._lab.clock.now()))

    def _plan_poll(self, time: datetime) -> None:
        if self._planned is not None:
            if not self._planned.done() and self._poll_at <= time:
                return
            self._planned.cancel()
        self._poll_at = time
        self._planned = self._run_at(time, self._poll)

    def _next_poll_time(self, after: datetime) -> datetime:
        intervals = max((after - self._first) // self._interval + 1, 0)
        return self._first + intervals * self._interval

    async def _poll(self) -> None:
        self._planned = None
        is_idle = True
        if self._is_up():
            self._is_polling, self._has_news = True, False
            response = await self._lab.request(self.vm, "GET", TARGET, headers=HEADERS)
            self._is_polling = False
            document = read_shown(response.body) if response.status == 200 else None
            if document is not None:
                self._plan_approvals(document)
            has_faults = bool(self._lab.faults.list_active(self.vm, self._lab.clock.now()))
            is_idle = document is not None and not self._has_news and not has_faults
        pause = IDLE / self._lab.rate if is_idle else timedelta(0)
        self._plan_poll(self._next_poll_time(self._lab.clock.now() + pause))

    def _is_up(self) -> bool:
        """Nothing runs in a VM that is deallocated or has left the fleet."""
        published = self._lab.engine.board.vms.get(self.vm)
        vm = published.scope.vm(self.vm) if published else None
        return vm is not None and vm.power is Power.RUNNING

    def _plan_approvals(self, document: Document) -> None:
        self._scheduled = {event.key: event for event in document.events if event.is_scheduled}
        for key, event in self._scheduled.items():
            if self._approve_after is None or key in self._noticed or not self._approves(event):
                continue
            self._noticed.add(key)
            self._run_at(self._lab.clock.now() + self._approve_after, partial(self._approve, key))

    def _approves(self, event: Event) -> bool:
        if self._entry.types and event.type not in self._entry.types:
            return False
        match self._entry.of:
            case Approves.OWN:
                return event.concerns(self.vm)
            case Approves.LEADER:
                return event.resources[:1] == (self.vm,)
            case Approves.ANY:
                return True
            case Approves.FOREIGN:
                return not event.concerns(self.vm)

    async def _approve(self, key: str) -> None:
        """Approve, and retry until it succeeds or the event is no longer Scheduled."""
        event = self._scheduled.get(key)
        if event is None or not self._is_up():
            return
        body = json.dumps({"StartRequests": [{"EventId": event.id}]}).encode()
        response = await self._lab.request(self.vm, "POST", TARGET, body, HEADERS)
        if response.status != 200:
            retry_at = self._next_poll_time(self._lab.clock.now())
            self._run_at(retry_at, partial(self._approve, key))
